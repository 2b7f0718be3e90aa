"""docs/claims.md: the paper claim by claim, generated from the records alone."""

import dataclasses
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from ...page.render import render
from . import paper
from .claims import ALIGNED, NAMES, judge, pretty, readings, table_cells, xavier_row
from .figures import Figures, all_figures
from .net_measurements import EXAMPLES, RADII
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

LOSS = 1.0  # points of clean accuracy that a recommendation may cost
RADIUS = RADII.index(1 / 255)  # of the attack that methods are compared under
WORDS = (CONFIRMED, REFUTED, UNCLEAR, NOT_RUN)
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
Rows = list[tuple[str, ...]]


def write(results: Path, page: Path | None, scale: Scale) -> Path:
    """Writes the page, and its figures into the folder of its name; figures that are no longer made are removed.

    By default it is docs/claims.md, and that of a smaller version beside its records.
    """
    whole = scale.epochs is None and scale.examples is None
    page = page or (Path("docs/claims.md") if whole and Path("docs").is_dir() else results / "claims.md")
    planned = dataclasses.replace(scale, seeds=None) if whole else scale
    text, figures = build(results, planned, Path(), page.stem)
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
    text = render(
        "claims.md.j2",
        citation=paper.CITATION,
        findings=findings,
        counts=Counter(f.word for f in findings),
        words=WORDS,
        small=_small(scale),
        summary=[_summary(f) for f in findings],
        table2=_table2(e, next(f for f in findings if f.name == "table-2")),
        xavier=xavier_row(e),
        terms=_terms(e),
        figures={f.name: [stem for stem in FIGURES.get(f.name, ()) if stem in figures] for f in findings},
        folder=folder,
        readings=_readings(e),
        examples=EXAMPLES,
        loss=LOSS,
        methods=_methods(e),
        norms=_norms(e),
        advice=_advice(e),
        **_runs(records, scale),
    )
    return str(text), figures


def _small(scale: Scale) -> dict[str, int]:
    """The sizes of a version that is smaller than planned."""
    if scale.epochs is None and scale.examples is None:
        return {}
    sizes = {"epochs": scale.epochs, "training examples": scale.examples, "seeds": scale.seeds, "width": scale.width}
    return {name: size for name, size in sizes.items() if size is not None}


def _summary(f: Finding) -> tuple[str, ...]:
    counts = Counter(row.word for row in f.rows)
    decided = ", ".join(f"{counts[w]} {w}" for w in WORDS if counts[w])
    figures = f.rows[0].ours if len(f.rows) == 1 else ""
    return f"[{f.claim}](#{slug(f.claim)})", f"**{f.word}**", figures or f"{len(f.rows)} comparisons: {decided}"


def _table2(e: Evidence, f: Finding) -> Rows:
    """The comparisons of Table 2 in its own layout, with the final accuracies beside them."""
    rows: Rows = []
    pairs = zip(f.rows[::2], f.rows[1::2], strict=True)
    for (net, data, row, cell), (train, val) in zip(table_cells(e), pairs, strict=True):
        final = spread(cell.values(final_val)) or NOT_RUN
        figures = [text for r in (train, val) for text in (r.paper, r.ours or NOT_RUN, r.word if r.ours else "")]
        rows.append((pretty(net, data), row, *figures, final))
    return rows


def _terms(e: Evidence) -> Rows:
    """Which of the two terms that pass 3 drops is to blame: without which one the cosine would be larger."""
    rows: Rows = []
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
    return rows


def _readings(e: Evidence) -> Rows:
    return [
        (r.row, r.name, f"{r.cells} of 4", NOT_RUN if r.distance is None else f"{r.distance:.2f}") for r in readings(e)
    ]


def attacked(r: Record) -> float:
    return r["measured"]["robustness"]["pgd"][RADIUS]


def _accuracies(cell: Cell) -> tuple[str, str]:
    measured = [attacked(r) for r in cell.records.values() if "robustness" in r["measured"]]
    return spread(cell.values(final_val)) or NOT_RUN, spread(measured)


def _methods(e: Evidence) -> Rows:
    names = dict.fromkeys(job.cell["method"] for job in STUDIES["methods"](e.scale))
    return [(name, *_accuracies(e.cell("methods", "plain20", "cifar10", name))) for name in names]


def norm_cells(e: Evidence) -> dict[tuple[str, str, str], Cell]:
    """By net, activation and method."""
    methods = ["two passes", *(f"{mode}, strength {s:g}" for s in STRENGTHS for mode in ("exact", "paper"))]
    return {
        (net, activation, m): e.cell("norms", net, "cifar10", m, activation=activation)
        for net in ("resnet20", "resnet18")
        for activation in ("relu", "gelu")
        for m in methods
    }


def _norms(e: Evidence) -> Rows:
    return [(NAMES[net], act, m, *_accuracies(cell)) for (net, act, m), cell in norm_cells(e).items()]


def _advice(e: Evidence) -> Rows:
    methods = ("kaiming", "alpha 0.1", "exact, alpha 0.1")
    cells = {("plain20", "relu", m): e.cell("methods", "plain20", "cifar10", m) for m in methods} | norm_cells(e)
    rows: Rows = []
    for net, activation in dict.fromkeys(key[:2] for key in cells):
        by_method = {m: cell for (n, a, m), cell in cells.items() if (n, a) == (net, activation) and cell}
        rows.append((f"{NAMES[net]}, {activation}", *_choice(by_method)))
    return rows


def _choice(methods: dict[str, Cell]) -> tuple[str, str, str]:
    """The method with the highest accuracy under attack among those that keep the final accuracy."""
    base = methods.get("two passes") or methods.get("kaiming")
    if base is None or len(methods) < 2:
        return NOT_RUN, "", ""
    clean = fmean(base.values(final_val))
    accurate = {
        m: c for m, c in methods.items() if fmean(c.values(final_val)) >= clean - LOSS and _attack(c) is not None
    }
    choice = max(accurate, key=lambda m: _attack(accurate[m]) or 0.0, default=None)
    if choice is None:
        return NOT_RUN, "", ""
    gain = fmean(accurate[choice].values(final_val)) - clean
    return choice, f"{gain:+.2f}", f"{_attack(base) or 0.0:.1f} to {_attack(accurate[choice]) or 0.0:.1f}"


def _attack(cell: Cell) -> float | None:
    values = [attacked(r) for r in cell.records.values() if "robustness" in r["measured"]]
    return fmean(values) if values else None


def _runs(records: dict[str, Record], scale: Scale) -> dict[str, Any]:
    """What was run, what was not, and the versions it was run with."""
    studies: Rows = []
    missing = {}
    for study in STUDIES:
        jobs = plan([study], scale)
        done = [records[job.key] for job in jobs if job.key in records]
        own = [r for r in done if r["study"] == study]
        minutes = f"{sum(r['seconds'] for r in own) / 60:.0f}" if own else ""
        devices = ", ".join(sorted({r["device"] for r in done}))
        studies.append((f"`{study}`", f"{len(done)} of {len(jobs)}", minutes, devices))
        cells = Counter(", ".join(job.cell.values()) for job in jobs if job.key not in records)
        if cells:
            missing[study] = cells
    planned = {job.key for job in plan(["all"], scale)}
    used = [r for key, r in records.items() if key in planned]
    versions = sorted({f"torch {r['torch']}, Python {r['python']}, {_commit(r)}" for r in used})
    return {"studies": studies, "missing": missing, "versions": versions}


def _commit(r: Record) -> str:
    return f"commit {r['commit'][:10]}" if r["commit"] else "commit unknown"


def slug(heading: str) -> str:
    """The id that Markdown gives to a heading: lower case, words joined by hyphens, other signs left out."""
    return "-".join("".join(c for c in heading.lower() if c.isalnum() or c in " -_").split())
