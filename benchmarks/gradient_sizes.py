"""Batches of molecules of many sizes, a step each: eagerly, by dynamic programs, and by a program for each size.

    python benchmarks/gradient_sizes.py --out results/gradient-losses/cpu-sizes.json

The net and the loss, on energies and forces, are those of `eager_forces.py`, on the CPU. "traced" is the dynamic
program of compile="trace", "dynamic" that of compile="require". A program for each size is captured for the first
batches only, as many as --static says, because each takes as long as the dynamic one. Of captured steps the wall-clock
seconds of the first call with each batch are given, capture included; of all methods the CPU seconds of one thread for
a later step with each batch, the least of all rounds, in which methods take turns.

Result: results/gradient-losses/cpu-sizes.json, quoted by docs/gradient-losses.md. 20 batches take
0.08 s by a dynamic program, 0.15 s by double backward.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eager_forces import Energies, loss_fn
from torch import Tensor, nn

import threepass
from threepass.bench.case import machine

Batch = tuple[dict[str, Tensor], tuple[Tensor, Tensor]]


def make_batch(atoms: int, edges: int) -> Batch:
    pairs = torch.randint(atoms, (2, edges))
    pairs[1] = torch.where(pairs[0] == pairs[1], (pairs[1] + 1) % atoms, pairs[1])
    x = {"positions": 2 * torch.randn(atoms, 3), "kinds": torch.randint(5, (atoms,)), "edges": pairs}
    x["molecule"] = 2 * torch.arange(atoms) // atoms
    return x, (torch.randn(2, 1), torch.randn(atoms, 3))


def double_backward(model: nn.Module, x: dict[str, Tensor], y: tuple[Tensor, Tensor]) -> Any:
    positions = x["positions"].clone().requires_grad_()
    output = model(**x | {"positions": positions})
    (g,) = torch.autograd.grad(output.sum(), positions, create_graph=True)
    return torch.autograd.grad(loss_fn(output, g, y), list(model.parameters()))


def captured(model: nn.Module, compile: str = "require") -> threepass.GradientStep:
    return threepass.GradientStep(model, loss_fn, wrt="positions", compile=compile)


def wall_seconds(step: Callable[..., Any], batch: Batch) -> float:
    began = time.perf_counter()
    step(*batch)
    return time.perf_counter() - began


def later_seconds(runs: dict[str, list[Callable[[], Any]]], rounds: int) -> dict[str, list[float]]:
    least = {name: [float("inf")] * len(steps) for name, steps in runs.items()}
    for _ in range(rounds):
        for name, steps in runs.items():
            for i, step in enumerate(steps):
                began = time.process_time()
                step()
                least[name][i] = min(least[name][i], time.process_time() - began)
    return least


def measure(given: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model, draw = Energies(given.width), random.Random(0)
    scales = [draw.uniform(0.5, 1.5) for _ in range(given.sizes)]
    batches = [make_batch(int(s * given.atoms), int(s * given.edges * draw.uniform(0.8, 1.2))) for s in scales]
    traced, dynamic = captured(model, "trace"), captured(model)
    static = [captured(model) for _ in range(given.static)]
    first = {
        "traced": [wall_seconds(traced, batch) for batch in batches],
        "dynamic": [wall_seconds(dynamic, batch) for batch in batches],
        "static": [wall_seconds(step, batch) for step, batch in zip(static, batches, strict=False)],
    }
    eager = partial(threepass.gradient_step, model, loss_fn, wrt="positions")
    runs: dict[str, list[Callable[[], Any]]] = {
        "double backward": [partial(double_backward, model, *batch) for batch in batches],
        "gradient_step": [partial(eager, *batch) for batch in batches],
        "traced": [partial(traced, *batch) for batch in batches],
        "dynamic": [partial(dynamic, *batch) for batch in batches],
        "static": [partial(step, *batch) for step, batch in zip(static, batches, strict=False)],
    }
    later = later_seconds(runs, given.rounds)
    programs = repr(dynamic.compiled).splitlines()
    return {"first_wall_seconds": first, "later_cpu_seconds": later, "dynamic_programs": programs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"sizes": 20, "static": 2, "atoms": 60, "edges": 800, "width": 64, "rounds": 3}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given)
    for name, later in found["later_cpu_seconds"].items():
        first = found["first_wall_seconds"].get(name)
        wall = f"first {len(first)} steps {sum(first):6.1f} s, " if first else ""
        print(f"{name:<16} {wall}later steps {1e3 * sum(later) / len(later):6.1f} ms on average")
    settings = {name: getattr(given, name) for name in defaults}
    given.out.write_text(json.dumps({"settings": settings, "machine": machine("cpu")} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
