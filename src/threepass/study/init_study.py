"""The paper's section on initialisation, measured: variances at every layer against its equations (eq1) to (eq4).

The equations hold signals and weights to be independent, so the error at the output is drawn at random: l is the mean
of u y. plain-20 is measured with cross-entropy too. Of plain-20 the chain of convolutions is compared, without pooling
and the last layer, which the equations do not have; with stride s an input is read by n' / s^2 outputs, not n'.
The equations leave out padding too; in the net it lowers the variance at every layer.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..init import LAYERS, NO_ROOT, SCHEMES, Layer, init_
from ..inspect.variances import Row, predicted, variances
from ..models import mlp, plain
from ..page.figure import Figure, Line, Panel, number
from ..page.writer import Cell, Table, write_page

QUANTITIES = {"u": "Var[u], eq1", "pass2": "Var[Δv], eq2", "pass3": "Var[∇v], eq3", "both": "Var[Δv + ∇v], eq4"}


class Net(NamedTuple):
    """A net of the study: how it is made, and from which batch and loss its signals come."""

    name: str
    nonlinearity: str
    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]


def run(out: Path, depth: int = 8, width: int = 256, batch: int = 64, draws: int = 4, seed: int = 0) -> dict[str, Any]:
    """Measures perceptrons of `depth` layers and plain-20 under the four initialisers, as means over draws of weights.

    Writes init-study.json and init-study.html to `out`, prints how well the equations hold and where "balanced" has no
    solution, and returns what the JSON file holds.
    """
    if depth < 2 or width < 16 or batch < 1 or draws < 1:
        raise ValueError("init-study needs depth >= 2, width >= 16, batch >= 1 and draws >= 1")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        results = [_measure(net, scheme, draws) for net in _nets(depth, width, batch) for scheme in SCHEMES]
        chains = {"plain-20": plain(20), "plain-32": plain(32), "mlp(784, 512, 10)": mlp(784, 512, 10)}
        missing = {name: _without_root(init_(model, "balanced")) for name, model in chains.items()}
    for r in results:
        if r["scheme"] == "balanced":
            missing.setdefault(r["net"], _without_root(r["layers"]))
    agreement = {name: _agreement([r for r in results if r["net"] == name]) for name in {r["net"]: 0 for r in results}}

    out.mkdir(parents=True, exist_ok=True)
    settings = {"depth": depth, "width": width, "batch": batch, "draws": draws, "seed": seed}
    report = {"settings": settings, "agreement": agreement, "no_solution": missing, "results": results}
    (out / "init-study.json").write_text(json.dumps(report, default=asdict) + "\n")
    _write(out / "init-study.html", report)
    print("measured / predicted: smallest and largest over layers and initialisers")
    for name, ratios in agreement.items():
        print(f"  {name}: " + ", ".join(f"{q} {low:.2g} to {high:.2g}" for q, (low, high) in ratios.items()))
    for name, layers in missing.items():
        print(f'"balanced", {name}: ' + (f"no solution in {', '.join(layers)}" if layers else "solved in every layer"))
    return report


def _nets(depth: int, width: int, batch: int) -> Iterator[Net]:
    def random_error(u: Tensor, y: Tensor) -> Tensor:
        return (u * y).mean()

    steps = [round(width * 4 ** (i / depth - 0.5)) for i in range(depth + 1)]
    shapes = {"one width": [width] * (depth + 1), "widening": steps, "narrowing": steps[::-1]}
    activations: dict[str, type[nn.Module]] = {"linear": nn.Identity, "relu": nn.ReLU}
    for nonlinearity, activation in activations.items():
        for shape, sizes in shapes.items():
            make = partial(mlp, *sizes, activation=activation)
            x, y = torch.randn(batch, sizes[0]), torch.randn(batch, sizes[-1])
            yield Net(f"{nonlinearity}, {shape}", nonlinearity, make, x, y, random_error)
    x = torch.randn(min(batch, 16), 3, 32, 32)
    yield Net("plain-20", "relu", plain, x, torch.randn(len(x), 10), random_error)
    yield Net("plain-20, cross-entropy", "relu", plain, x, torch.randint(0, 10, (len(x),)), F.cross_entropy)


def _measure(net: Net, scheme: str, draws: int) -> dict[str, Any]:
    """The layers of one kind from the input on: their variances, measured and predicted from both ends' signals."""
    tables = []
    for _ in range(draws):
        model = net.make()
        layers = list(init_(model, scheme, net.nonlinearity))
        tables.append(variances(model, net.loss_fn, net.x, net.y))
    modules = [m for m in model.modules() if isinstance(m, LAYERS)]
    chain = [m for m in modules if type(m) is type(modules[0])]
    measured = [_mean(rows) for rows in zip(*tables, strict=True)][: len(chain)]
    strides = [prod(getattr(m, "stride", (1,))) for m in chain]
    fans = [(r.n_in, r.n_out // s) for r, s in zip(layers, strides, strict=False)]
    weights, start = [r.variance for r in layers[: len(chain)]], (net.x.var().item(), measured[-1].error)
    report: dict[str, Any] = {"net": net.name, "scheme": scheme, "layers": layers, "measured": measured}
    for name in ("equations", "correlated"):
        report[name] = predicted(fans, weights, net.nonlinearity, *start, correlated=name == "correlated").rows
    return report


def _mean(rows: Iterable[Row]) -> Row:
    (name, *_), *values = zip(*(asdict(r).values() for r in rows), strict=True)
    return Row(name, *(sum(z) / len(z) for z in values))


def _agreement(results: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """The extremes of measured / predicted; the sum at the input, which is zero, is left out."""
    extremes = {}
    for kind in ("equations", "correlated"):
        for q in QUANTITIES if kind == "equations" else ("pass3", "both"):
            pairs = [pair for r in results for pair in list(zip(r["measured"], r[kind], strict=True))[q == "both" :]]
            ratios = [getattr(m, q) / getattr(p, q) for m, p in pairs]
            extremes[q if kind == "equations" else f"{q} correlated"] = (min(ratios), max(ratios))
    return extremes


def _without_root(layers: Iterable[Layer]) -> list[str]:
    return [f"{r.name} ({r.n_in} to {r.n_out})" for r in layers if r.note == NO_ROOT]


def _write(page: Path, report: dict[str, Any]) -> None:
    nets = {name: list(_figures(name, report["results"])) for name in report["agreement"]}
    quantities = list(next(iter(report["agreement"].values())))
    rows = []
    for name, ratios in report["agreement"].items():
        rows.append((name, [Cell(" to ".join(number(end, 2) for end in ratios[q])) for q in quantities]))
    caption = "Measured over predicted: smallest and largest over layers and initialisers."
    write_page(
        page,
        "init_study.html.j2",
        [figure for figures in nets.values() for figure in figures],
        nets=nets,
        schemes=list(SCHEMES),
        agreement=Table(caption, [QUANTITIES[q.split()[0]] + ", correlated" * (" " in q) for q in quantities], rows),
        **{name: report[name] for name in ("settings", "no_solution")},
    )


def _figures(net: str, results: list[dict[str, Any]]) -> Iterator[Figure]:
    """One figure a quantity, over the layers from the input on."""
    for q, title in QUANTITIES.items():
        lines = []
        for r in results:
            if r["net"] == net:
                k = SCHEMES.index(r["scheme"])
                styles = {"equations": "bare", "correlated": "dashed", "measured": "points"}
                for kind, style in styles.items():
                    if kind != "correlated" or q in ("pass3", "both"):
                        values = [getattr(row, q) for row in r[kind]]
                        lines.append(Line(k, range(len(values)), values, style=style))  # type: ignore[arg-type]
        slug, note = re.sub(r"\W+", "-", f"{net} {q}"), f"{net}; points: measured"
        yield Figure(Panel(slug, title, "layer", lines, note, logarithmic=True, wide=280), SCHEMES)
