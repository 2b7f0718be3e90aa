"""Two passes against three on scikit-learn's digits: a first, small comparison, about a minute on a CPU.

    python examples/compare_digits.py

A small convolutional net is trained by plain backpropagation, by three passes as in the paper (by its rule with the
learning rate eta / alpha), and by exact three passes with a penalty `strength`. A seed gives all three the same initial
weights and the same batches. Prints a table; writes a page with curves, and all numbers, to a new folder runs/demo.
Pixels are in [0, 1]; noise and attack radii are in the same unit.

The settings were chosen by validation accuracy, on the same images with seeds 100 to 102, so that accuracies are a bit
optimistic for every method: eta for two passes from 0.05, 0.1, 0.2 (96.2, 96.7, 95.9 %), for the paper's rule from the
same (97.5 %, 97.7 %, diverges), alpha not searched; learning rate and strength for exact mode from (0.05, 0.1) x (0.1,
0.3) (97.6 %, 97.9 %, 97.4 %, diverges). `benchmarks/step.py` times larger nets: here overhead is much of a step.
"""

import argparse
import copy
import itertools
import json
import math
import time
from pathlib import Path
from statistics import mean, median, stdev
from string import Template
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import threepass

ETA, ALPHA, RATE, STRENGTH = 0.1, 0.1, 0.05, 0.3
TRAIN, BATCH = 640, 64
NOISE, RADII = 0.3, (0.05, 0.1)
Data = tuple[Tensor, Tensor]
Records = dict[str, list[dict[str, Any]]]  # method: one record a seed
METHODS: dict[str, tuple[float, dict[str, Any]]] = {  # learning rate, and options of ThreePass; none: backpropagation
    "two passes": (ETA, {}),
    "three, paper": (ETA / ALPHA, {"alpha": ALPHA}),
    "three, exact": (RATE, {"mode": "exact", "strength": STRENGTH}),
}


def digits() -> tuple[Data, Data]:
    """Training and validation images, 1 x 8 x 8, every digit as frequent in both."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(range(len(labels)), train_size=TRAIN, stratify=labels, random_state=0)
    x, y = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    return tuple((x[part], y[part]) for part in parts)


def net() -> nn.Sequential:
    convolutions = nn.Conv2d(1, 32, 3, 1, 1), nn.Conv2d(32, 64, 3, 2, 1), nn.Conv2d(64, 64, 3, 1, 1)
    for layer in convolutions:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*(m for layer in convolutions for m in (layer, nn.ReLU())), nn.Flatten(), nn.Linear(1024, 10))


class Run:
    """One method's training from one seed, and its record."""

    def __init__(self, method: str, seed: int, epochs: int):
        lr, options = METHODS[method]
        torch.manual_seed(seed)
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, epochs)
        self.order = torch.Generator().manual_seed(seed)
        three = options and threepass.ThreePass(self.model, F.cross_entropy, **options)
        self.step = three or (lambda x, y: F.cross_entropy(self.model(x), y).backward())
        self.curves: dict[str, list[float]] = {"error": [], "input_loss": [], "seconds_per_step": []}

    def epoch(self, train: Data, validation: Data) -> None:
        x, y = train
        start = time.perf_counter()
        batches = torch.randperm(len(x), generator=self.order).split(BATCH)
        for batch in batches:
            self.optimizer.zero_grad()
            self.step(x[batch], y[batch])
            self.optimizer.step()
        self.curves["seconds_per_step"].append((time.perf_counter() - start) / len(batches))
        self.schedule.step()
        r = look(self.model, *validation)
        self.curves["error"].append(100 - accuracy(r.output, validation[1]))
        self.curves["input_loss"].append(r.input_loss.item())

    def result(self, train: Data, validation: Data) -> dict[str, float]:
        """In float64: in float32 a confident net's error rounds to zero, and the attack would find no direction."""
        model = copy.deepcopy(self.model).double()
        (x, y), (x_val, y_val) = ((x.double(), y) for x, y in (train, validation))
        r = look(model, x_val, y_val)
        noise = torch.randn(x_val.shape, generator=torch.Generator().manual_seed(0)).double()
        with torch.no_grad():
            return {
                "1000 x training loss": 1000 * F.cross_entropy(model(x), y).item(),
                "validation accuracy, %": accuracy(r.output, y_val),
                "validation input loss": r.input_loss.item(),
                f"accuracy, noise {NOISE:g}, %": accuracy(model(x_val + NOISE * noise), y_val),
            } | {
                f"accuracy, FGSM {e:g}, %": accuracy(model((x_val + e * r.input_grad.sign()).clamp(0, 1)), y_val)
                for e in RADII
            }


def look(model: nn.Module, x: Tensor, y: Tensor) -> threepass.Result:
    """Output, input loss and dl/dx; alpha = 1 leaves the third pass out."""
    return threepass.three_pass(model, F.cross_entropy, x, y, alpha=1.0)


def accuracy(output: Tensor, y: Tensor) -> float:
    return 100 * (output.argmax(1) == y).double().mean().item()


def compare(data: tuple[Data, Data], seeds: int, epochs: int) -> Records:
    """Trains all. The methods take turns by the epoch, so that their times compare."""
    records: Records = {name: [] for name in METHODS}
    for seed in range(seeds):
        runs = {name: Run(name, seed, epochs) for name in METHODS}
        for epoch in range(1, epochs + 1):
            for run in runs.values():
                run.epoch(*data)
            if epoch % 10 == 0 or epoch == epochs:
                errors = "   ".join(f"{name} {run.curves['error'][-1]:5.2f} %" for name, run in runs.items())
                print(f"seed {seed}  epoch {epoch:3}  validation error: {errors}", flush=True)
        for name, run in runs.items():
            records[name].append({"seed": seed, "result": run.result(*data), **run.curves})
    return records


def table(records: Records) -> list[list[str]]:
    """A header, then a row for each quantity: mean ± standard deviation over seeds, by method."""
    rows = [["", *records]]
    for key in next(iter(records.values()))[0]["result"]:
        cells = [[r["result"][key] for r in record] for record in records.values()]
        rows.append([key, *(f"{mean(c):.2f} ± {stdev(c):.2f}" if len(c) > 1 else f"{c[0]:.2f}" for c in cells)])
    seconds = [median(s for r in record for s in r["seconds_per_step"]) for record in records.values()]
    return [*rows, ["time per step", *(f"{s / seconds[0]:.2f} x" for s in seconds)]]


PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Two and three passes on digits</title>
<style>
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1d1f21; --soft: #63676b; --line: #dddfe1;
  --s0: #7a7f85; --s1: #1f6fd0; --s2: #d0661b }
@media (prefers-color-scheme: dark) { :root { --page: #17191b; --ink: #e8e9ea; --soft: #a3a8ad; --line: #36393c;
  --s0: #a3a8ad; --s1: #68acf5; --s2: #f0984f } }
body { max-width: 46rem; margin: 0 auto; padding: 1.2rem 1rem 3rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem } p, li { color: var(--soft) }
ul { padding: 0; list-style: none } li b { color: var(--ink) }
li i { display: inline-block; width: 1.4rem; height: .25rem; margin-right: .5rem; vertical-align: middle }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .3rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child { text-align: left; font-weight: 400; white-space: normal } svg { width: 100%; height: auto }
svg text { font-size: 12px; fill: var(--soft) } svg path { stroke: var(--line) }
polyline { fill: none; stroke-width: 2 } polygon { opacity: .16 }
@media (max-width: 34rem) { table { font-size: .72rem } th, td { padding: .3rem .15rem } svg text { font-size: 18px } }
pre { white-space: pre-wrap; padding: .7rem; border: 1px solid var(--line); border-radius: .4rem }
</style>
<h1>Two and three passes on scikit-learn's digits</h1>
<p>$train training and $validation validation images of 8 × 8 pixels; a net of three convolutions; SGD with momentum
0.9, cosine schedule, batch $batch, epochs: $epochs, seeds: $seeds. For a seed all methods start from the same weights
and see the same batches.</p>
<ul>$legend</ul>
<div class="scroll"><table>$table</table></div>
<p>After the last epoch, mean ± standard deviation over seeds. The input loss is the mean of ½ |dl/dx|² over images. The
attack (FGSM) moves every pixel by the radius along the sign of dl/dx; noise is Gaussian. The settings were chosen on
these validation images, with other seeds. The net is so small that overhead is much of a step's time.</p>
$charts
<p>Lines: mean over seeds. Bands: from the lowest to the highest.</p>
<h2>Again</h2>
<pre>python examples/compare_digits.py --seeds $seeds --epochs $epochs</pre>
<p>torch $torch, CPU threads: $threads. All numbers: <a href="metrics.json">metrics.json</a>.</p>
</html>
""")


def chart(title: str, curves: list[list[list[float]]]) -> str:
    """An SVG with a logarithmic scale and a colour a method: the mean over seeds, and the band that the seeds span."""
    left, right, top, bottom = 48, 625, 10, 230
    values = [v for seeds in curves for curve in seeds for v in curve if v > 0]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05
    last = len(curves[0][0]) - 1

    def at(i: int, v: float) -> tuple[float, float]:
        share = (math.log10(max(v, 10**low)) - low) / (high - low)
        return round(left + i / max(1, last) * (right - left), 1), round(bottom - share * (bottom - top), 1)

    parts = []
    for tick in (m * 10.0**e for e in range(math.floor(low), math.ceil(high)) for m in (1, 2, 5)):
        if low <= math.log10(tick) <= high:
            y = at(0, tick)[1]
            parts.append(f'<path d="M{left} {y}H{right}"/><text x="40" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for i in sorted({0, *range(9, last, 10), last}):
        parts.append(f'<text x="{at(i, 1)[0]}" y="250" text-anchor="middle">{i + 1}</text>')
    for k, seeds in enumerate(curves):
        columns = list(enumerate(zip(*seeds, strict=True)))
        band = [at(i, min(c)) for i, c in columns] + [at(i, max(c)) for i, c in reversed(columns)]
        line = [at(i, mean(c)) for i, c in columns]
        for shape, points, paint in (("polygon", band, "fill"), ("polyline", line, "stroke")):
            path = " ".join(f"{x},{y}" for x, y in points)
            parts.append(f'<{shape} points="{path}" style="{paint}: var(--s{k})"/>')
    return f'<h2>{title}</h2><svg viewBox="0 0 640 256" role="img" aria-label="{title}">{"".join(parts)}</svg>'


def page(records: Records, config: dict[str, Any], rows: list[list[str]]) -> str:
    cells = [f"<tr><th>{head}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>" for head, *rest in rows]
    legend = []
    for k, (name, settings) in enumerate(config["methods"].items()):
        words = ", ".join(f"{key} {value}" for key, value in settings.items())
        legend.append(f'<li><i style="background: var(--s{k})"></i><b>{name}</b>: {words}</li>')
    curves = {key: [[r[key] for r in record] for record in records.values()] for key in ("error", "input_loss")}
    charts = chart("Validation error by epoch, %", curves["error"])
    charts += chart("Validation input loss by epoch", curves["input_loss"])
    return PAGE.substitute(**config, legend="".join(legend), charts=charts, table="".join(cells))


def main(argv: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description="Two passes against three on scikit-learn's digits.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="a new folder; if there is one, OUT-2, ...")
    args = parser.parse_args(argv)

    data = digits()
    records = compare(data, args.seeds, args.epochs)
    rows = table(records)
    print("", *(f"{head:<24}" + "".join(f"{cell:>18}" for cell in cells) for head, *cells in rows), sep="\n")
    methods = {name: {"learning rate": lr, **options} for name, (lr, options) in METHODS.items()}
    config = {"methods": methods, "train": TRAIN, "validation": len(data[1][0]), "batch": BATCH, "epochs": args.epochs,
              "seeds": args.seeds, "torch": torch.__version__, "threads": torch.get_num_threads()}  # fmt: skip
    names = itertools.chain([args.out], (args.out.with_name(f"{args.out.name}-{k}") for k in itertools.count(2)))
    out = next(name for name in names if not name.exists())
    out.mkdir(parents=True)
    (out / "metrics.json").write_text(json.dumps({"config": config, "methods": records}, indent=1) + "\n", "utf-8")
    (out / "report.html").write_text(page(records, config, rows), "utf-8")
    print(f"\nreport: {out / 'report.html'}")
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)  # on so small a net a second thread mostly waits for the first
    main()
