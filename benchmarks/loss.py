"""What `step.loss(x, y).backward()` costs beside `step(x, y)`: the same gradients, through autograd's accumulation.

    PYTHONPATH=src python benchmarks/loss.py --out results/bench/cpu-loss.json

Seconds of a step without the optimizer, with gradients set to None before it; the methods take turns. On a GPU:
--device cuda --out results/bench/h200-loss.json.
"""

import argparse
import copy
import json
import platform
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

import threepass
from threepass.bench.measure import summary, take_turns
from threepass.models import mlp, plain, resnet

NETS = {
    "MLP 784-512-10, batch 128": (lambda: mlp(784, 512, 10), (128, 784)),
    "plain-20, batch 32": (lambda: plain(20), (32, 3, 32, 32)),
    "ResNet-20, batch 32": (lambda: resnet(20), (32, 3, 32, 32)),
}


def steps(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, compile: bool | str) -> dict[str, Callable]:
    """A call of each kind, on a model of its own."""
    model, other = copy.deepcopy(model), copy.deepcopy(model)
    by_call = threepass.ThreePass(model, F.cross_entropy, strength=0.1, compile=compile)
    by_loss = threepass.ThreePass(other, F.cross_entropy, strength=0.1, compile=compile)

    def call() -> None:
        model.zero_grad()
        by_call(x, y)

    def loss() -> None:
        other.zero_grad()
        by_loss.loss(x, y).backward()

    return {"call": call, "loss": loss}


def measure(name: str, device: str, rounds: int) -> dict:
    torch.manual_seed(0)
    make, shape = NETS[name]
    model, x, y = make().to(device), torch.randn(shape, device=device), torch.randint(10, shape[:1], device=device)
    row: dict = {"net": name}
    for form, compile in {"eager": False, "compiled": "require"}.items():
        seconds = take_turns(steps(model, x, y, compile), rounds, device == "cuda")
        best = {how: min(each) for how, each in seconds.items()}
        row[form] = {how: summary(each) for how, each in seconds.items()} | {"ratio": best["loss"] / best["call"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore", threepass.NormalizationWarning)
    torch.set_num_threads(args.threads)
    rows = [measure(name, args.device, args.rounds) for name in NETS]
    for row in rows:
        print(row["net"], *(f"{form} {row[form]['ratio']:.3f}x" for form in ("eager", "compiled")))
    found = {
        "device": args.device,
        "threads": args.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
