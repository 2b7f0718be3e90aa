"""docs/claims.md: the paper claim by claim, made from the records and nothing else."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from . import paper
from .claims import ALIGNED, NAMES, judge, pretty, readings, table_cells, xavier_row
from .figures import Figures, all_figures
from .measure import EXAMPLES, RADII
from .plan import CIFAR, STRENGTHS, STUDIES, Scale, plan
from .records import Record, Records
from .rules import (
    CONFIRMED,
    NOT_RUN,
    REFUTED,
    UNCLEAR,
    Cell,
    Evidence,
    Finding,
    final_val,
    spread,
)

COMMAND = "threepass reproduce report"
LOSS = 1.0  # points of clean accuracy that a recommendation may cost
RADIUS = RADII.index(1 / 255)  # of the attack that methods are compared under


def write(results: Path, page: Path, scale: Scale, root: Path) -> Path:
    """Writes the page, and its figures into the folder of its name; figures that are no longer made are removed."""
    text, figures = build(results, scale, root, page.stem)
    folder = page.with_suffix("")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    for stem, drawing in figures.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.svg").write_text(drawing, encoding="utf-8")
    for old in folder.glob("*.svg"):
        if old.stem not in figures:
            old.unlink()
    return page


def build(results: Path, scale: Scale, root: Path, folder: str = "claims") -> tuple[str, Figures]:
    """The page's text and its figures."""
    records = Records(results).read()
    e = Evidence(records, scale, root)
    findings, figures = judge(e), all_figures(e)
    parts = [
        _head(findings, scale),
        _summary(findings),
        *(_section(e, f, figures, folder) for f in findings),
        _open_questions(e),
        _right_thing(e),
        _what_was_run(records, scale),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n", figures


def _head(findings: Sequence[Finding], scale: Scale) -> str:
    counts = Counter(f.word for f in findings)
    verdicts = ", ".join(f"{counts[w]} {w}" for w in (CONFIRMED, REFUTED, UNCLEAR, NOT_RUN))
    small = ""
    if scale.epochs is not None or scale.examples is not None:
        sizes = {
            "epochs": scale.epochs,
            "training examples": scale.examples,
            "seeds": scale.seeds,
            "width": scale.width,
        }
        words = ", ".join(f"{name}: {size}" for name, size in sizes.items() if size is not None)
        small = f"""
**A small version** ({words}): it shows that the studies run; its verdicts say nothing about the paper.
"""
    return f"""# The paper's claims, checked

{paper.CITATION}. Of {len(findings)} claims {verdicts}.
{small}
This page is made from the records of training runs by `{COMMAND}`. The runs are made by
`threepass reproduce all`, each of them an ordinary `threepass train` run whose command is in its record. Verdicts
follow from rules (`src/threepass/study/reproduce/rules.py`): a difference between methods is taken between runs of the
same seed, and its 95 % interval over seeds must lie on the claimed side of zero to confirm a claim, and on the other
side to refute it. Fewer than three seeds decide no difference. "Best" is the best epoch, as the paper reports it,
chosen by looking at the validation set; "final" is the last epoch. The paper's figures come without numbers, so that of
its curves only what the text says of them is compared."""


def _summary(findings: Sequence[Finding]) -> str:
    rows = []
    for f in findings:
        counts = Counter(row.word for row in f.rows)
        figures = f.rows[0].ours if len(f.rows) == 1 else ""
        decided = ", ".join(f"{counts[w]} {w}" for w in (CONFIRMED, REFUTED, UNCLEAR, NOT_RUN) if counts[w])
        rows.append(
            (f"[{f.claim}](#{slug(f.claim)})", f"**{f.word}**", figures or f"{len(f.rows)} comparisons: {decided}")
        )
    return table(("claim", "verdict", "from"), rows)


def _table2(e: Evidence, f: Finding) -> str:
    """The comparisons of Table 2 in its own layout, with the final accuracies beside them."""
    rows = []
    pairs = zip(f.rows[::2], f.rows[1::2], strict=True)
    for (net, data, row, cell), (train, val) in zip(table_cells(e), pairs, strict=True):
        final = spread(cell.values(final_val)) or NOT_RUN
        figures = [text for r in (train, val) for text in (r.paper, r.ours or NOT_RUN, r.word if r.ours else "")]
        rows.append((pretty(net, data), row, *figures, final))
    head = ("net, data", "row", "paper: best train", "ours", "", "paper: best validation", "ours", "", "ours, final")
    return f"""Accuracy in percent, mean ± standard deviation over seeds. "Xavier" is our row `{xavier_row(e)}`: of the
readings that were run the one nearest to the paper's.

{table(head, rows)}

"""


FIGURES = {  # the figures below a claim
    "table-2": ("table2",),
    "input-loss-grows": ("cifar10-loss", "cifar10-error", "cifar10-input-loss", "cifar100-loss", "cifar100-error",
                         "cifar100-input-loss"),
    "mnist-input-loss": ("mnist-loss", "mnist-error", "mnist-input-loss"),
    "alpha-0": tuple(f"alpha0-{d}-{c}" for d in ("mnist", *CIFAR) for c in ("loss", "error", "input-loss")),
    "rates": ("rates",),
    "batches": ("batches",),
    "alignment": ("alignment", *(f"alignment-{net}" for net in ALIGNED)),
}  # fmt: skip


def _section(e: Evidence, f: Finding, figures: Figures, folder: str) -> str:
    drawn = "\n".join(image(figures, folder, stem, stem) for stem in FIGURES.get(f.name, ()) if stem in figures)
    rows = [(row.what, row.paper, row.ours, row.word) for row in f.rows]
    compared = "" if f.word == NOT_RUN else table(("", "paper", "ours", "verdict"), rows) + "\n\n"
    compared = _table2(e, f) if f.name == "table-2" else compared
    more = _terms(e) if f.name == "alignment" else ""
    return f"""## {f.claim}

**{f.word.capitalize()}.** Rule: {f.rule}.

{compared}{more}{drawn}"""


def _terms(e: Evidence) -> str:
    """Which of the two terms that pass 3 drops is to blame: without which one the cosine would be larger."""
    rows = []
    for net in ALIGNED:
        for method in ("two passes", "alpha 0.1"):
            for seed, r in e.cell("alignment", net, "cifar10", method).records.items():
                for when, m in r["measured"].get("alignment", {}).items():
                    if when in ("start", "end"):
                        without = m["cosine without hessian"], m["cosine without curvature"]
                        blame = "the loss's Hessian" if without[0] > without[1] else "curvature of the net"
                        negative = sum(c < 0 for c in m["layers"].values())
                        rows.append(
                            (f"{NAMES[net]}, {method}, seed {seed}", when, f"{m['cosine']:.3f}", f"{m['ratio']:.3g}",
                             f"{negative} of {len(m['layers'])}", f"{m['hessian']:.3g}", f"{m['curvature']:.3g}", blame)
                        )  # fmt: skip
    if not rows:
        return ""
    head = ("net", "when", "cosine", "length of pass 3 over that of the gradient", "layers with a negative cosine",
            "length of the Hessian's term", "of the curvature's", "to blame")  # fmt: skip
    return f"""Pass 3 drops two terms of the gradient: what comes from the Hessian of the loss, and what comes from the
curvature of activations, norms and attention. Lengths are relative to the whole gradient; to blame is the term with
whose addition pass 3 comes nearer to it.

{table(head, rows)}

"""


def _open_questions(e: Evidence) -> str:
    rows = [
        (r.row, r.name, f"{r.cells} of 4", NOT_RUN if r.distance is None else f"{r.distance:.2f}") for r in readings(e)
    ]
    head = ("row of Table 2", "reading", "cells run", "distance to the paper's, points")
    return f"""## What the paper leaves open

How far each reading is from the paper's accuracies: root mean square over the best training and validation accuracies
of the cells that were run.

{table(head, rows)}"""


def _right_thing(e: Evidence) -> str:
    return f"""## Is it the right thing to use?

Accuracy in percent; under attack: PGD of ten steps with radius 1/255 on the first {EXAMPLES} validation images.

plain-20 on CIFAR-10, the same epochs but where it says the same time:

{_methods(e)}

Nets with BatchNorm and shortcuts on CIFAR-10, 30 epochs; the strength weighs the input loss of every sample:

{_norms(e)}

Where to start, by these runs: of all settings that cost at most {LOSS:g} point of final accuracy the one with the
highest accuracy under attack.

{_advice(e)}"""


def attacked(r: Record) -> float:
    return r["measured"]["robustness"]["pgd"][RADIUS]


def _accuracies(cell: Cell) -> tuple[str, str]:
    measured = [attacked(r) for r in cell.records.values() if "robustness" in r["measured"]]
    return spread(cell.values(final_val)) or NOT_RUN, spread(measured)


def _methods(e: Evidence) -> str:
    names = list(dict.fromkeys(job.cell["method"] for job in STUDIES["methods"](e.scale)))
    rows = [(name, *_accuracies(e.cell("methods", "plain20", "cifar10", name))) for name in names]
    return table(("method", "final validation accuracy", "under attack"), rows)


def norm_cells(e: Evidence) -> dict[tuple[str, str, str], Cell]:
    """By net, activation and method."""
    methods = ["two passes", *(f"{mode}, strength {s:g}" for s in STRENGTHS for mode in ("exact", "paper"))]
    return {
        (net, activation, m): e.cell("norms", net, "cifar10", m, activation=activation)
        for net in ("resnet20", "resnet18")
        for activation in ("relu", "gelu")
        for m in methods
    }


def _norms(e: Evidence) -> str:
    rows = [(NAMES[net], act, m, *_accuracies(cell)) for (net, act, m), cell in norm_cells(e).items()]
    return table(("net", "activation", "method", "final validation accuracy", "under attack"), rows)


def _advice(e: Evidence) -> str:
    cells = {
        ("plain20", "relu", m): e.cell("methods", "plain20", "cifar10", m)
        for m in ("kaiming", "alpha 0.1", "exact, alpha 0.1")
    }
    cells |= norm_cells(e)
    rows = []
    for net, activation in dict.fromkeys(key[:2] for key in cells):
        found = {m: cell for (n, a, m), cell in cells.items() if (n, a) == (net, activation) and cell}
        base = found.get("two passes") or found.get("kaiming")
        what = f"{NAMES[net]}, {activation}"
        if base is None or len(found) < 2:
            rows.append((what, NOT_RUN, "", ""))
            continue
        clean = fmean(base.values(final_val))
        kept = {m: c for m, c in found.items() if fmean(c.values(final_val)) >= clean - LOSS and _attack(c) is not None}
        choice = max(kept, key=lambda m: _attack(kept[m]) or 0.0, default=None)
        if choice is None:
            rows.append((what, NOT_RUN, "", ""))
            continue
        gain = fmean(kept[choice].values(final_val)) - clean
        rows.append((what, choice, f"{gain:+.2f}", f"{_attack(base) or 0.0:.1f} to {_attack(kept[choice]) or 0.0:.1f}"))
    return table(("your model", "start with", "final accuracy against two passes", "accuracy under attack"), rows)


def _attack(cell: Cell) -> float | None:
    values = [attacked(r) for r in cell.records.values() if "robustness" in r["measured"]]
    return fmean(values) if values else None


def _what_was_run(records: dict[str, Record], scale: Scale) -> str:
    rows, missing = [], []
    for study in STUDIES:
        jobs = plan([study], scale)
        done = [records[job.key] for job in jobs if job.key in records]
        own = [r for r in done if r["study"] == study]
        hours = f"{sum(r['seconds'] for r in own) / 60:.0f}" if own else ""
        rows.append(
            (f"`{study}`", f"{len(done)} of {len(jobs)}", hours, ", ".join(sorted({r["device"] for r in done})))
        )
        cells = Counter(", ".join(job.cell.values()) for job in jobs if job.key not in records)
        if cells:
            words = "; ".join(cell + (f" ({n} seeds)" if n > 1 else "") for cell, n in cells.items())
            missing.append(f"- `{study}`, {cells.total()} runs: {words}")
    planned = {job.key for job in plan(["all"], scale)}
    used = [r for key, r in records.items() if key in planned]
    versions = sorted({f"torch {r['torch']}, Python {r['python']}, {_commit(r)}" for r in used})
    made = f"\n\nMade with {'; '.join(versions)}." if versions else ""
    listed = "\n".join(missing) if missing else "Nothing: every planned run is done."
    return f"""## What was run

{table(("study", "runs done", "minutes", "device"), rows)}{made}

A study shares runs with those above it; their minutes are counted once.

## Not run yet

{listed}"""


def _commit(r: Record) -> str:
    return f"commit {r['commit'][:10]}" if r["commit"] else "commit unknown"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def image(figures: Figures, folder: str, stem: str, text: str) -> str:
    return f"![{text}]({folder}/{stem}.svg)" if stem in figures else ""


def slug(heading: str) -> str:
    """The id that Markdown gives to a heading: lower case, words joined by hyphens, other signs left out."""
    return "-".join("".join(c for c in heading.lower() if c.isalnum() or c in " -_").split())
