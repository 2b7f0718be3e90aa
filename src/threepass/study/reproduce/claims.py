"""The claims of the paper, each with the comparisons that decide on it."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from ...bench.tables import reports, title
from ..intervals import paired
from . import paper
from .plan import ALPHAS, BATCHES, CIFAR, DEPTHS, GRID_ALPHAS, RATES
from .records import Record
from .rules import (
    CLASSES,
    CONFIRMED,
    NOT_RUN,
    REFUTED,
    TOLERANCE,
    UNCLEAR,
    Cell,
    Evidence,
    Finding,
    Row,
    above,
    agreement,
    below,
    best_train,
    best_val,
    compare,
    difference_text,
    end_of,
    every,
    final_train,
    final_val,
    growth_of,
    same,
    sign_of,
    spread,
    stalled,
)  # fmt: skip

NETS = ("plain20", "plain32")
ALIGNED = ("plain20", "plain32", "resnet20", "vit")
NO_GAP = 0.3  # points of validation accuracy on MNIST that are "no obvious accuracy gap": 30 of 10,000 images
WORKS = 5.0  # points: a setting of a grid works if its final accuracy is as near as this to the best of its alpha
VANISHED = 1e-6  # Var of pass 2 at the input over that at the last layer
NAMES = {
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mnist": "MNIST", "mlp": "MLP 784-512-10", "vit": "ViT",
    "resnet18": "ResNet-18", "resnet20": "ResNet-20", **{f"plain{d}": f"plain-{d}" for d in (20, 32, *DEPTHS)},
}  # fmt: skip


def pretty(net: str, data: str) -> str:
    return f"{NAMES[net]}, {NAMES[data]}"


def xavier_row(e: Evidence) -> str:
    """The reading of "Xavier" whose cells come nearest to the paper's row; with gain 1 unless the other is nearer."""

    def distance(method: str) -> float:
        cells = [(e.cell("table2", n, d, method), paper.TABLE2[n, d, "xavier"].val) for n in NETS for d in CIFAR]
        gaps = [(fmean(c.values(best_val)) - theirs) ** 2 for c, theirs in cells if c]
        return fmean(gaps) if gaps else math.inf

    return min(("xavier", "xavier-relu"), key=distance)


def table_cells(e: Evidence) -> list[tuple[str, str, str, Cell]]:
    """The twelve cells of Table 2: net, data, the paper's row, our runs."""
    rows = {"xavier": xavier_row(e), "kaiming": "kaiming", "alpha 0.1": "alpha 0.1"}
    return [(n, d, row, e.cell("table2", n, d, ours)) for n in NETS for d in CIFAR for row, ours in rows.items()]


def table2_accuracies(e: Evidence) -> Finding:
    rows = []
    for net, data, row, cell in table_cells(e):
        theirs = paper.TABLE2[net, data, row]
        for part, of, number in (("train", best_train, theirs.train), ("validation", best_val, theirs.val)):
            what = f"{pretty(net, data)}, {row}: best {part} accuracy"
            rows.append(Row(what, f"{number:.2f}", spread(cell.values(of)), agreement(cell, of, number)))
    rule = f"the paper's number is within {TOLERANCE:g} point of our mean, or where another of our seeds could lie"
    return Finding("table-2", "Table 2: the best accuracies of plain-20 and plain-32", rule, rows)


def learns_better(e: Evidence) -> Finding:
    """Three passes against Kaiming: the best epoch, as the paper reports it, and the last one."""
    rows = []
    for of, which in ((best_val, "best"), (final_val, "final")):
        for net in NETS:
            for data in CIFAR:
                theirs = paper.TABLE2[net, data, "alpha 0.1"].val - paper.TABLE2[net, data, "kaiming"].val
                three, two = (e.cell("table2", net, data, m) for m in ("alpha 0.1", "kaiming"))
                shown = f"{theirs:+.2f}" if which == "best" else ""
                rows.append(compare(f"{pretty(net, data)}: {which} validation accuracy", three, two, of, 1, shown))
    claim = "Three passes (alpha .1, eta .1) learn better than two (Kaiming, eta .01)"
    return Finding("learns-better", claim, "three passes minus two, in points, is above zero", rows)


def only_three_converge(e: Evidence) -> Finding:
    rows = []
    for net in NETS:
        for data in CIFAR:
            cell, what = e.cell("table2", net, data, "alpha 0.1"), f"{pretty(net, data)}, three passes"
            rows.append(every(what, cell, lambda r: not stalled(r), best_train, "converges", " %"))
            for row in ("kaiming", "xavier", "xavier-relu"):
                cell, what = e.cell("table2", net, data, f"{row}, eta 0.1"), f"{pretty(net, data)}, two passes, {row}"
                rows.append(every(what, cell, stalled, best_train, "stalls", " %"))
    rule = "best training accuracy: a run has stalled if it never got to twice that of guessing, or its loss ran away"
    return Finding("eta-0.1", "At eta = .1 only three passes converge; Kaiming and Xavier stall", rule, rows)


def more_regular(e: Evidence) -> Finding:
    rows = []
    for data in CIFAR:
        three, two = (e.cell("table2", "plain20", data, m) for m in ("alpha 0.1", "kaiming"))
        a, b = (paper.TABLE2["plain20", data, m] for m in ("alpha 0.1", "kaiming"))
        what = pretty("plain20", data)
        rows.append(compare(f"{what}: training accuracy", three, two, best_train, -1, f"{a.train - b.train:+.2f}"))
        rows.append(compare(f"{what}: validation accuracy", three, two, best_val, 1, f"{a.val - b.val:+.2f}"))
    claim = "plain-20 under three passes always has a higher training and a lower validation error"
    return Finding("regular", claim, "three passes minus two: training below zero, validation above", rows)


def degradation(e: Evidence) -> Finding:
    rows = []
    for data in CIFAR:
        cells = {(n, m): e.cell("table2", n, data, m) for n in NETS for m in ("alpha 0.1", "kaiming")}
        what = f"{pretty('plain32', data)}, two passes, against plain-20: final training accuracy"
        rows.append(compare(what, cells["plain32", "kaiming"], cells["plain20", "kaiming"], final_train, -1))
        d = paired(*(drops(cells, method) for method in ("alpha 0.1", "kaiming")))
        t = paper.TABLE2
        theirs = [t["plain20", data, m].val - t["plain32", data, m].val for m in ("alpha 0.1", "kaiming")]
        what = f"{NAMES[data]}: best validation accuracy lost from 20 to 32 layers, three passes minus two"
        rows.append(Row(what, f"{theirs[0] - theirs[1]:+.2f}", difference_text(d), sign_of(d, -1)))
    claim = "32 layers are worse than 20, and three passes dampen that degradation"
    return Finding("degradation", claim, "both differences are below zero", rows)


def drops(cells: dict[tuple[str, str], Cell], method: str) -> list[float]:
    """Best validation accuracy lost from 20 to 32 layers, over the seeds that all cells have."""
    seeds = sorted(set.intersection(*(set(cell.records) for cell in cells.values())))
    shallow, deep = (cells[net, method].records for net in NETS)
    return [best_val(shallow[s]) - best_val(deep[s]) for s in seeds]


def curve_cells(e: Evidence, study: str, net: str, data: str) -> dict[str, Cell]:
    """Two passes, then alpha from large to small: the paper's order of the input loss on CIFAR from high to low."""
    two = "plain" if study == "mnist" else "kaiming"
    return {two: e.cell(study, net, data, two)} | {
        f"alpha {a:g}": e.cell(study, net, data, f"alpha {a:g}") for a in sorted(ALPHAS, reverse=True)
    }


def input_loss_grows(e: Evidence) -> Finding:
    rows = []
    for data in CIFAR:
        for method, cell in curve_cells(e, "curves", "plain20", data).items():
            grown = growth_of("train_input_loss")
            what = f"{pretty('plain20', data)}, {method}: log10 of the growth of the input loss"
            rows.append(every(what, cell, above(grown, 0), grown, "above 0"))
    claim = "On CIFAR the input loss accumulates in training, whatever alpha"
    return Finding("input-loss-grows", claim, "it is larger at the end than in the first epoch, in every run", rows)


def input_loss_order(e: Evidence) -> Finding:
    rows = []
    for data in CIFAR:
        cells = list(curve_cells(e, "curves", "plain20", data).items())
        for (more, high), (less, low) in pairwise(cells):
            what = f"{pretty('plain20', data)}: input loss at the end, {less} minus {more}"
            rows.append(compare(what, low, high, end_of("train_input_loss"), -1, "below 0"))
    claim = "On CIFAR the input loss is smaller for smaller alpha, and largest for two passes"
    return Finding("input-loss-order", claim, "every step down in alpha lowers it", rows)


def alpha_02(e: Evidence) -> Finding:
    cells = curve_cells(e, "curves", "plain20", "cifar10")
    what, pair = pretty("plain20", "cifar10"), (cells["alpha 0.2"], cells["kaiming"])
    rows = [
        compare(f"{what}: final training accuracy", *pair, final_train, -1, "below 0"),
        compare(f"{what}: final validation accuracy", *pair, final_val, 1, "above 0"),
    ]
    claim = "alpha = .2 has a higher training error but a smaller validation error than two passes on CIFAR-10"
    return Finding("alpha-0.2", claim, "alpha .2 minus two passes, in points", rows)


def gain_everywhere(e: Evidence) -> Finding:
    rows = []
    for data in CIFAR:
        cells = curve_cells(e, "curves", "plain20", data)
        for alpha in ALPHAS:
            what = f"{pretty('plain20', data)}, alpha {alpha:g}: best validation accuracy"
            rows.append(compare(what, cells[f"alpha {alpha:g}"], cells["kaiming"], best_val, 1, "above 0"))
    claim = "Three passes have a persistent gain at alpha .2 to .8 (eta / alpha)"
    return Finding("gain", claim, "three passes minus two, in points, is above zero", rows)


def mnist_input_loss(e: Evidence) -> Finding:
    cells = list(curve_cells(e, "mnist", "mlp", "mnist").items())
    grown = growth_of("train_input_loss")
    rows = [every(f"{method}: log10 of its growth", cell, below(grown, 0), grown, "below 0") for method, cell in cells]
    for (more, high), (less, low) in pairwise(cells):
        what = f"input loss at the end, {less} minus {more}"
        rows.append(compare(what, low, high, end_of("train_input_loss"), 1, "above 0"))
    claim = "On MNIST the input loss falls in training, and is larger for smaller alpha"
    return Finding("mnist-input-loss", claim, "it falls in every run, and every step down in alpha raises it", rows)


def mnist_no_gap(e: Evidence) -> Finding:
    cells = curve_cells(e, "mnist", "mlp", "mnist")
    rows = [
        same(f"{m}: final validation accuracy", cells[m], cells["plain"], final_val, NO_GAP, "no gap")
        for m in (f"alpha {a:g}" for a in ALPHAS)
    ]
    rule = f"the interval of three passes minus two lies within {NO_GAP:g} points of zero; refuted if wholly outside"
    return Finding("mnist-no-gap", "On MNIST there is no obvious accuracy gap between alphas", rule, rows)


def mnist_alpha_08(e: Evidence) -> Finding:
    cells = curve_cells(e, "mnist", "mlp", "mnist")
    rows = [
        compare(
            f"alpha 0.8 minus {other}: final validation accuracy", cells["alpha 0.8"], cell, final_val, 1, "above 0"
        )
        for other, cell in cells.items()
        if other != "alpha 0.8"
    ]
    return Finding("mnist-alpha-0.8", "On MNIST alpha = .8 has the lowest validation error", "above all others", rows)


def mnist_val_loss(e: Evidence) -> Finding:
    cells = list(curve_cells(e, "mnist", "mlp", "mnist").items())
    rows = [
        compare(f"validation loss at the end, {less} minus {more}", low, high, end_of("val_loss"), -1, "below 0")
        for (more, high), (less, low) in pairwise(cells)
    ]
    return Finding("mnist-val-loss", "On MNIST, the smaller alpha, the smaller the validation loss", "every step", rows)


def alpha_zero(e: Evidence) -> Finding:
    rows = []
    methods = {"mnist": ["alpha 0"]} | {data: [f"alpha 0, eta {lr}" for lr in ("0.1", "0.01")] for data in CIFAR}
    for data, names in methods.items():
        net, chance = "mlp" if data == "mnist" else "plain20", 100 / CLASSES[data]
        attempts = [
            every(name, e.cell("alpha0", net, data, name), above(final_val, 1.5 * chance), final_val) for name in names
        ]
        best = min((row.word for row in attempts), key=(CONFIRMED, UNCLEAR, REFUTED, NOT_RUN).index)
        ours = "; ".join(f"{row.what}: {row.ours}" for row in attempts if row.ours)
        rows.append(Row(f"{pretty(net, data)}: final validation accuracy", f"above {chance:g}", ours, best))
    claim = "The third pass alone (alpha = 0) learns better than chance in all three cases"
    rule = "final accuracy above 1.5 times chance; the paper does not give its learning rate, and one of two is enough"
    return Finding("alpha-0", claim, rule, rows)


def alpha_zero_mnist(e: Evidence) -> Finding:
    cell = e.cell("alpha0", "mlp", "mnist", "alpha 0")

    def early(r: Record) -> float:
        """The epoch of the best validation error, as a part of the run."""
        errors = r["history"]["val_error"]
        return errors.index(min(errors)) / max(1, len(errors) - 1)

    def fall(r: Record) -> float:
        return best_val(r) - final_val(r)

    rows = [
        every("the best epoch, as a part of the run", cell, below(early, 0.2), early, "at the beginning"),
        every("best minus final validation accuracy", cell, above(fall, 1.0), fall, "worse later", " points"),
    ]
    rule = "the best epoch is in the first fifth, and the last one more than a point below it"
    return Finding("alpha-0-mnist", "At alpha = 0 on MNIST the start is best, then it gets worse", rule, rows)


def grid(e: Evidence, study: str) -> dict[tuple[str, str], Cell]:
    """The cells of a grid by (alpha, eta or batch)."""
    across = [f"{lr:g}" for lr in RATES] if study == "rates" else [str(b) for b in BATCHES]
    word = "eta" if study == "rates" else "batch"
    return {
        (f"{a:g}", x): e.cell(study, "plain20", "cifar10", f"alpha {a:g}, {word} {x}")
        for a in GRID_ALPHAS
        for x in across
    }


def working(cells: dict[tuple[str, str], Cell], alpha: float) -> dict[int, int]:
    """By seed, how many settings of a row of the grid work; only of seeds that have the whole row."""
    row = [cell for (name, _), cell in cells.items() if name == f"{alpha:g}"]
    counts = {}
    for seed in set.intersection(*(set(cell.records) for cell in row)):
        values = [grid_value(cell.records[seed]) for cell in row]
        counts[seed] = sum(v >= max(values) - WORKS for v in values)
    return counts


def grid_value(r: Record) -> float:
    """Final validation accuracy; of a run that diverged, that of guessing."""
    return 100 / CLASSES[r["cell"]["data"]] if r["status"] == "diverged" else final_val(r)


def less_sensitive(e: Evidence, study: str, claim: str) -> Finding:
    """How many settings of a row work: those whose final accuracy is near the row's best."""
    cells = grid(e, study)
    rows, two = [], working(cells, 1.0)
    for alpha in GRID_ALPHAS[1:]:
        three, what = working(cells, alpha), f"alpha {alpha:g} against two passes: settings that work"
        pairs = [(three[seed], two[seed]) for seed in sorted(three.keys() & two.keys())]
        if not pairs:
            rows.append(Row(what, "more", "", NOT_RUN))
            continue
        word = CONFIRMED if all(a > b for a, b in pairs) else REFUTED if all(a < b for a, b in pairs) else UNCLEAR
        shown = " and ".join(f"{a} against {b}" for a, b in pairs)
        rows.append(Row(what, "more", f"{shown} of {len(cells) // len(GRID_ALPHAS)}", word))
    rule = f"a setting works if its final validation accuracy is within {WORKS:g} points of the best of its alpha"
    return Finding(study, claim, rule, rows)


def less_sensitive_to_rates(e: Evidence) -> Finding:
    return less_sensitive(e, "rates", "Three passes are less sensitive to the learning rate")


def less_sensitive_to_batches(e: Evidence) -> Finding:
    return less_sensitive(e, "batches", "Three passes are less sensitive to the batch size")


def deeper_stall(e: Evidence) -> Finding:
    rows = [
        every(f"{pretty(f'plain{d}', 'cifar10')}, {m}: best training accuracy",
              e.cell("deeper", f"plain{d}", "cifar10", m), stalled, best_train, "stalls", " %")
        for d in DEPTHS for m in ("kaiming", "alpha 0.1")
    ]  # fmt: skip
    return Finding("deeper", "Deeper plain nets stall under all approaches", "as for eta = .1, within 60 epochs", rows)


def faded(r: Record) -> float:
    """log10 of the variance of pass 2's signal at the input over that at the last layer, before training."""
    pass2 = r["measured"]["variances"]["start"]["pass2"]
    return math.log10(max(pass2[0], 1e-300) / max(pass2[-1], 1e-300))


def sigmoid_fails(e: Evidence) -> Finding:
    rows = []
    for method in ("sigmoid, kaiming", "sigmoid, alpha 0.1"):
        cell = e.cell("deeper", "plain20", "cifar10", method)
        rows.append(every(f"plain-20, {method}: best training accuracy", cell, stalled, best_train, "fails", " %"))
        what = f"plain-20, {method}: log10 of pass 2's variance at the input over that at the last layer"
        measured = Cell({s: r for s, r in cell.records.items() if "variances" in r["measured"]})
        rows.append(every(what, measured, below(faded, math.log10(VANISHED)), faded, "vanished"))
    claim = "Deep sigmoid nets fail, because the gradient has vanished before it reaches the input"
    return Finding("sigmoid", claim, f"they stall, and the variance falls below {VANISHED:g} of the last layer's", rows)


def no_superiority(e: Evidence) -> Finding:
    rows = []
    kaiming = e.cell("init", "plain20", "cifar10", "kaiming")
    for scheme in ("geometric", "balanced"):
        row = compare(f"{scheme} minus kaiming: best validation accuracy",
                      e.cell("init", "plain20", "cifar10", scheme), kaiming, best_val, 1, "not above 0")  # fmt: skip
        turned = {CONFIRMED: REFUTED, REFUTED: CONFIRMED, UNCLEAR: UNCLEAR, NOT_RUN: NOT_RUN}
        enough = row.word == UNCLEAR and len(kaiming.records) >= 3
        rows.append(row._replace(word=CONFIRMED if enough else turned[row.word]))
    rule = "no interval over three seeds or more lies above zero"
    return Finding("init", "The reformulated initialisation has no superiority over Kaiming's", rule, rows)


def _ratio_row(what: str, extremes: tuple[float, float]) -> Row:
    low, high = extremes
    return Row(what, "1", f"{low:.2f} to {high:.2f}", CONFIRMED if low > 0.5 and high < 2 else REFUTED)


def equations(e: Evidence) -> Finding:
    """Equations 3 and 4 of the section on initialisation, measured by `threepass init-study`."""
    file, rows = e.root / "results" / "init" / "init-study.json", []
    agreement = json.loads(file.read_text(encoding="utf-8"))["agreement"] if file.exists() else {}
    for quantity, name in {"u": "eq1, Var[u]", "pass2": "eq2, Var[Δv]", "pass3": "eq3, Var[∇v]"}.items():
        for net in ("linear, one width", "relu, one width"):
            what = f"{net}: measured over predicted, {name}"
            if net not in agreement:
                rows.append(Row(what, "1", "", NOT_RUN))
                continue
            rows.append(_ratio_row(what, agreement[net][quantity]))
            if quantity == "pass3":
                row = _ratio_row(
                    f"{what}, with pass 3's correlation with the weights", agreement[net]["pass3 correlated"]
                )
                rows.append(row._replace(paper=""))
    claim = "The variances of the passes' signals obey the section's equations"
    return Finding(
        "equations", claim, "every layer's ratio is between 1/2 and 2 (`results/init/init-study.json`)", rows
    )


def end_cosine(r: Record) -> float:
    return r["measured"]["alignment"]["end"]["cosine"]


def not_a_second_derivative(e: Evidence) -> Finding:
    rows = []
    for net in ALIGNED:
        for method in ("two passes", "alpha 0.1"):
            cell = e.cell("alignment", net, "cifar10", method)
            what = f"{pretty(net, 'cifar10')}, {method}: cosine of pass 3 with the input loss's gradient, at the end"
            rows.append(every(what, cell, below(end_cosine, 0.99), end_cosine, "not 1"))
    claim = "The third pass is not a second derivative: it is not the gradient of the input loss"
    return Finding("alignment", claim, "the cosine is below .99", rows)


def cost(e: Evidence) -> Finding:
    rows = []
    folder = e.root / "results" / "bench"
    for report in reports(folder) if folder.exists() else []:
        best = {name: method["best"]["median"] for name, method in report["methods"].items() if "best" in method}
        ratios = {
            words: best["paper"] / best[other]
            for other, words in (("plain", "plain training"), ("alpha1", "our own step without the third pass"))
            if {"paper", other} <= best.keys()
        }
        if ratios:
            shown = "; ".join(f"{ratio:.2f} of {words}" for words, ratio in ratios.items())
            word = CONFIRMED if max(ratios.values()) <= paper.COST else REFUTED
            rows.append(Row(title(report["case"]), f"{paper.COST:g}", shown, word))
    rows = rows or [Row("a training step", f"{paper.COST:g}", "", NOT_RUN)]
    rule = (
        "the time of a three-pass step is at most twice that of plain training, and of our own step at alpha = 1 "
        "(`results/bench`, each at its best); inference runs the model itself, to which training adds nothing"
    )
    return Finding("cost", "The third pass may double the training time, and costs nothing in inference", rule, rows)


CLAIMS: tuple[Callable[[Evidence], Finding], ...] = (
    table2_accuracies, learns_better, only_three_converge, more_regular, degradation, input_loss_grows,
    input_loss_order, alpha_02, gain_everywhere, mnist_input_loss, mnist_no_gap, mnist_alpha_08, mnist_val_loss,
    alpha_zero, alpha_zero_mnist, less_sensitive_to_rates, less_sensitive_to_batches, no_superiority, equations,
    deeper_stall, sigmoid_fails, not_a_second_derivative, cost,
)  # fmt: skip


def judge(e: Evidence) -> list[Finding]:
    return [claim(e) for claim in CLAIMS]


class Reading(NamedTuple):
    """A reading of what the paper leaves open: how far the cells of a row are from the paper's, in points."""

    name: str
    row: str
    cells: int
    distance: float | None  # root mean square over best accuracies on both splits; None: not run


READINGS = (  # name, study, the paper's row, our method
    ("biases, fan in, input loss of the batch (as run for Table 2)", "table2", "alpha 0.1", "alpha 0.1"),
    ("convolutions without biases", "readings", "alpha 0.1", "alpha 0.1, no bias"),
    ("Kaiming by fan out", "readings", "alpha 0.1", "alpha 0.1, fan out"),
    ("input loss of every sample", "readings", "alpha 0.1", "alpha 0.1, per sample"),
    ("biases, fan in (as run for Table 2)", "table2", "kaiming", "kaiming"),
    ("convolutions without biases", "readings", "kaiming", "kaiming, no bias"),
    ("Kaiming by fan out", "readings", "kaiming", "kaiming, fan out"),
    ("Xavier with gain 1", "table2", "xavier", "xavier"),
    ("Xavier with the gain of ReLU", "table2", "xavier", "xavier-relu"),
)


def readings(e: Evidence) -> list[Reading]:
    compared = []
    for name, study, row, method in READINGS:
        gaps = []
        for net in NETS:
            for data in CIFAR:
                cell, theirs = e.cell(study, net, data, method), paper.TABLE2[net, data, row]
                if cell:
                    gaps += [fmean(cell.values(best_train)) - theirs.train, fmean(cell.values(best_val)) - theirs.val]
        distance = math.sqrt(fmean(g * g for g in gaps)) if gaps else None
        compared.append(Reading(name, row, len(gaps) // 2, distance))
    return compared
