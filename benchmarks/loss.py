"""What `step.loss(x, y).backward()` costs beside `step(x, y)`: the same gradients, through autograd's accumulation.

    PYTHONPATH=src python benchmarks/loss.py --out results/bench/cpu-loss.json

Seconds of a step without the optimizer, with gradients set to None before it; the two take turns. On a CPU these are
processor seconds of one thread, which other programs on the machine hardly change. On a GPU: --device cuda --out
results/bench/h200-loss.json.

Result: results/bench/cpu-loss.json, quoted by docs/loops.md. Compiled steps take 1.05x (MLP 784-512-10, batch
128) and 1.01x (plain-8, batch 32) of the time of `step(x, y)`.
"""

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

import threepass
from threepass.bench.timing import sample, summary
from threepass.models import mlp, plain

NETS = {
    "MLP 784-512-10, batch 128": (lambda: mlp(784, 512, 10), (128, 784), 10),
    "plain-8, batch 32": (lambda: plain(8), (32, 3, 32, 32), 2),
}


def steps(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, compile: bool | str) -> dict[str, Callable]:
    """A call of each kind; a compiled one is the same program in both."""
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.1, compile=compile)

    def call() -> None:
        model.zero_grad()
        step(x, y)

    def loss() -> None:
        model.zero_grad()
        step.loss(x, y).backward()

    return {"call": call, "loss": loss}


def processor_seconds(step: Callable, repeats: int) -> float:
    step()
    begin = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - begin) / repeats


def measure(name: str, device: str, rounds: int) -> dict:
    torch.manual_seed(0)
    make, shape, repeats = NETS[name]
    model, x, y = make().to(device), torch.randn(shape, device=device), torch.randint(10, shape[:1], device=device)
    row: dict = {"net": name}
    for form, compile in {"eager": False, "compiled": "require"}.items():
        runs = steps(model, x, y, compile)
        seconds: dict = {how: [] for how in runs}
        for _ in range(rounds):
            for how, run in runs.items():
                took = sample(run, repeats, True) if device == "cuda" else processor_seconds(run, repeats)
                seconds[how].append(took)
        row[form] = {how: summary(each) for how, each in seconds.items()}
        row[form]["ratio"] = row[form]["loss"]["median"] / row[form]["call"]["median"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", threepass.NormalizationWarning)
    torch.set_num_threads(1)
    rows = []
    for name in NETS:
        rows.append(measure(name, args.device, args.rounds))
        print(name, *(f"{form} {rows[-1][form]['ratio']:.3f}x" for form in ("eager", "compiled")), flush=True)
    found = {
        "device": args.device,
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
