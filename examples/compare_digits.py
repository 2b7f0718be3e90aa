"""Two passes against three on scikit-learn's digits: a first, small comparison, about a minute on two cores.

    python examples/compare_digits.py

A small convolutional net is trained by plain backpropagation, by three passes as in the paper (alpha 0.1, and by the
paper's rule the learning rate eta / alpha), and by exact three passes (the penalty `strength`, learning rate eta). A seed
gives all three the same initial weights and the same batches. It prints a table, and writes a page with curves and all
numbers to a new folder, runs/demo. Pixels are in [0, 1]; radii and noise are in the same unit.

How the settings were chosen, on the same validation images and other seeds (100 to 102): SEARCHED
So all the accuracies are a little optimistic, for every method. On a net this small the time of a step is mostly
overhead; `benchmarks/step.py` measures larger ones.
"""

import argparse
import copy
import itertools
import json
import math
import time
from dataclasses import dataclass
from html import escape
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

ETA, ALPHA, STRENGTH = 0.1, 0.1, 0.1
TRAIN, BATCH = 640, 64
NOISE, RADII = 0.3, (0.05, 0.1)
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Method:
    lr: float
    options: dict[str, Any] | None  # of ThreePass; None: backpropagation
    words: str


METHODS = {
    "two passes": Method(ETA, None, f"backpropagation, learning rate {ETA:g}"),
    "three, paper": Method(ETA / ALPHA, {"alpha": ALPHA}, f"alpha {ALPHA:g}, learning rate {ETA:g} / {ALPHA:g}"),
    "three, exact": Method(
        ETA, {"mode": "exact", "strength": STRENGTH}, f"strength {STRENGTH:g}, learning rate {ETA:g}"
    ),
}


def digits() -> tuple[Data, Data]:
    """Training and validation images, 1 x 8 x 8, every digit as frequent in both."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, train_size=TRAIN, stratify=labels, random_state=0)
    x, x_val = (torch.tensor(p, dtype=torch.float32).view(-1, 1, 8, 8) for p in parts[:2])
    y, y_val = (torch.tensor(p) for p in parts[2:])
    return (x, y), (x_val, y_val)


def net() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, 1, 1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1024, 10)),
    )


class Run:
    """One method's training from one seed, and its record."""

    def __init__(self, method: Method, seed: int, epochs: int):
        torch.manual_seed(seed)
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), method.lr, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, epochs)
        self.order = torch.Generator().manual_seed(seed)
        three = method.options and threepass.ThreePass(self.model, F.cross_entropy, **method.options)
        self.step = three or (lambda x, y: F.cross_entropy(self.model(x), y).backward())
        self.error: list[float] = []
        self.input_loss: list[float] = []
        self.seconds: list[float] = []

    def epoch(self, train: Data, validation: Data) -> None:
        x, y = train
        start = time.perf_counter()
        batches = torch.randperm(len(x), generator=self.order).split(BATCH)
        for batch in batches:
            self.optimizer.zero_grad()
            self.step(x[batch], y[batch])
            self.optimizer.step()
        self.seconds.append((time.perf_counter() - start) / len(batches))
        self.schedule.step()
        r = look(self.model, *validation)
        self.error.append(100 - accuracy(r.output, validation[1]))
        self.input_loss.append(r.input_loss.item())

    def result(self, train: Data, validation: Data) -> dict[str, float]:
        """In float64: in float32 a confident net's error rounds to zero, and the attack would find no direction."""
        model = copy.deepcopy(self.model).double()
        (x, y), (x_val, y_val) = ((x.double(), y) for x, y in (train, validation))
        r = look(model, x_val, y_val)
        noise = torch.randn(x_val.shape, generator=torch.Generator().manual_seed(0)).double()
        with torch.no_grad():
            return {
                "training loss": F.cross_entropy(model(x), y).item(),
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


def train(seeds: int, epochs: int) -> dict[str, list[dict[str, Any]]]:
    """For each method a record for each seed. The methods take turns by the epoch, so that their times compare."""
    data = digits()
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for seed in range(seeds):
        runs = {name: Run(method, seed, epochs) for name, method in METHODS.items()}
        for epoch in range(1, epochs + 1):
            for run in runs.values():
                run.epoch(*data)
            if epoch % 10 == 0 or epoch == epochs:
                errors = "   ".join(f"{name} {run.error[-1]:5.2f} %" for name, run in runs.items())
                print(f"seed {seed}  epoch {epoch:3}  validation error: {errors}", flush=True)
        for name, run in runs.items():
            curves = {"error": run.error, "input_loss": run.input_loss, "seconds_per_step": run.seconds}
            records[name].append({"seed": seed, "result": run.result(*data), **curves})
    return records


def table(records: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """A header, then a row for each quantity: mean ± standard deviation over seeds, by method."""
    rows = [["", *records]]
    for key in next(iter(records.values()))[0]["result"]:
        cells = [[r["result"][key] for r in record] for record in records.values()]
        rows.append([key, *(f"{mean(c):.3g} ± {stdev(c) if len(c) > 1 else math.nan:.2g}" for c in cells)])
    seconds = [median(s for r in record for s in r["seconds_per_step"]) for record in records.values()]
    return [*rows, ["time per step", *(f"{s / seconds[0]:.2f} x ({1000 * s:.1f} ms)" for s in seconds)]]


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
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
p, li { color: var(--soft) } ul { padding: 0; list-style: none } li b { color: var(--ink) }
.key { display: inline-block; width: 1.4rem; height: .25rem; margin-right: .5rem; vertical-align: middle }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child { text-align: left; font-weight: 400; white-space: normal } svg { width: 100%; height: auto }
svg text { font-size: 12px; fill: var(--soft) } svg .grid { stroke: var(--line) } polyline { fill: none; stroke-width: 2 }
pre { overflow-x: auto; padding: .7rem; border: 1px solid var(--line); border-radius: .4rem }
</style>
<h1>Two and three passes on scikit-learn's digits</h1>
<p>$data</p>
<ul>$legend</ul>
$charts
<h2>After the last epoch</h2>
<div class="scroll"><table>$table</table></div>
<p>Mean ± standard deviation over seeds. The input loss is the mean of ½ |dl/dx|² over validation images. The attack (FGSM)
moves every pixel by the radius along the sign of dl/dx; noise is Gaussian. The settings were chosen on these validation
images, with other seeds. The net is so small that overhead is most of a step's time.</p>
<h2>Again</h2>
<pre>$command</pre>
<p>$versions. All numbers: <a href="metrics.json">metrics.json</a>.</p>
</html>
""")


def chart(title: str, curves: list[list[list[float]]]) -> str:
    """Lines on a logarithmic scale, one a method: the mean over seeds, and a band from the lowest to the highest."""
    width, height, left, bottom, top = 640, 260, 48, 36, 10
    values = [v for seeds in curves for curve in seeds for v in curve if v > 0]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05
    steps = max(1, len(curves[0][0]) - 1)

    def at(i: int, v: float) -> str:
        share = (math.log10(max(v, 10**low)) - low) / (high - low)
        return f"{left + i / steps * (width - left - 8):.1f},{height - bottom - share * (height - bottom - top):.1f}"

    parts = []
    ticks = [m * 10.0**e for e in range(math.floor(low), math.ceil(high)) for m in (1, 2, 5)]
    for tick in (t for t in ticks if low <= math.log10(t) <= high):
        y = float(at(0, tick).split(",")[1])
        parts.append(f'<path class="grid" d="M{left} {y}H{width - 8}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for i in sorted({0, *range(9, steps, 10), steps}):
        x = at(i, 1).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - 16}" text-anchor="middle">{i + 1}</text>')
    parts.append(f'<text x="{(left + width) / 2}" y="{height - 2}" text-anchor="middle">epoch</text>')
    for k, seeds in enumerate(curves):
        columns = list(zip(*seeds, strict=True))
        band = [at(i, min(c)) for i, c in enumerate(columns)] + [at(i, max(c)) for i, c in enumerate(columns)][::-1]
        line = [at(i, mean(c)) for i, c in enumerate(columns)]
        parts.append(f'<polygon points="{" ".join(band)}" style="fill: var(--s{k}); opacity: .16"/>')
        parts.append(f'<polyline points="{" ".join(line)}" style="stroke: var(--s{k})"/>')
    drawing = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<h2>{escape(title)}</h2>{drawing}"


def page(records: dict[str, list[dict[str, Any]]], config: dict[str, Any], rows: list[list[str]]) -> str:
    cells = [[f"<th>{escape(row[0])}</th>", *(f"<td>{escape(c)}</td>" for c in row[1:])] for row in rows]
    curves = {key: [[r[key] for r in record] for record in records.values()] for key in ("error", "input_loss")}
    return PAGE.substitute(
        data=f"{config['train']} training and {config['validation']} validation images of 8 × 8 pixels; a net of three "
        f"convolutions; SGD with momentum 0.9, cosine schedule, batch {BATCH}, {config['epochs']} epochs, "
        f"{config['seeds']} seeds. For a seed all methods start from the same weights and see the same batches.",
        legend="".join(
            f'<li><span class="key" style="background: var(--s{k})"></span><b>{name}</b>: {method.words}</li>'
            for k, (name, method) in enumerate(METHODS.items())
        ),
        charts=chart("Validation error, %", curves["error"]) + chart("Validation input loss", curves["input_loss"]),
        table="".join(f"<tr>{''.join(row)}</tr>" for row in cells),
        command=f"python examples/compare_digits.py --seeds {config['seeds']} --epochs {config['epochs']}",
        versions=f"torch {config['torch']}, {config['threads']} threads",
    )


def main(argv: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description="Two passes against three on scikit-learn's digits.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="a new folder; if it exists, OUT-2 and so on"
    )
    args = parser.parse_args(argv)

    records, rows = None, None
    records = train(args.seeds, args.epochs)
    rows = table(records)
    print()
    for row in rows:
        print(f"{row[0]:<24}" + "".join(f"{cell:>22}" for cell in row[1:]))
    config = {
        "train": TRAIN, "validation": len(load_digits().target) - TRAIN, "batch": BATCH, "epochs": args.epochs,
        "seeds": args.seeds, "methods": {name: method.words for name, method in METHODS.items()},
        "torch": torch.__version__, "threads": torch.get_num_threads(),
    }  # fmt: skip
    names = itertools.chain([args.out], (args.out.with_name(f"{args.out.name}-{k}") for k in itertools.count(2)))
    out = next(name for name in names if not name.exists())
    out.mkdir(parents=True)
    (out / "metrics.json").write_text(json.dumps({"config": config, "methods": records}, indent=1) + "\n", "utf-8")
    (out / "report.html").write_text(page(records, config, rows), "utf-8")
    print(f"\nreport: {out / 'report.html'}")
    return out


if __name__ == "__main__":
    main()
