"""What exchanging gradients costs a step under DistributedDataParallel: two gloo processes on a CPU.

    PYTHONPATH=src python benchmarks/ranks.py --out results/bench/cpu-ranks.json

Seconds of a step with and without the exchange (`no_sync`), of plain training and of three passes, eager and compiled;
gradients are set to None before every step. Plain training exchanges a bucket as soon as its gradients are there, while
the backward pass goes on; a step of three passes exchanges all buckets after its passes. The difference between its two
times is therefore the most that overlapping the exchange with the third pass could save.

Result: results/bench/cpu-ranks.json, quoted by docs/loops.md. With the MLP the exchange takes 22 of 83 ms of a
step of three passes.
"""

import argparse
import contextlib
import json
import platform
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import threepass
from threepass.bench.timing import sample, summary
from threepass.models import mlp, plain

RANKS = 2
NETS = {
    "MLP 3072-2048-2048-10, batch 2 x 64": (lambda: mlp(3072, 2048, 2048, 10), (64, 3072)),
    "plain-8, batch 2 x 32": (lambda: plain(8), (32, 3, 32, 32)),
}
METHODS = ("plain", "three passes", "three passes, compiled")


def stepped(method: str, make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> tuple[nn.Module, Callable]:
    model = DistributedDataParallel(make())
    if method == "plain":
        return model, lambda: F.cross_entropy(model(x), y).backward()
    step = threepass.ThreePass(
        model, F.cross_entropy, strength=0.1, compile="require" if "compiled" in method else False
    )
    return model, lambda: step(x, y)


def timed(model: nn.Module, step: Callable, exchanges: bool) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        with contextlib.nullcontext() if exchanges else model.no_sync():
            step()

    return run


def work(rank: int, folder: str, rounds: int) -> None:
    """Measures on both ranks, round by round, so that they wait for each other in the exchange alone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    rows = []
    for name, (make, shape) in NETS.items():
        torch.manual_seed(rank)
        x, y = torch.randn(shape), torch.randint(10, shape[:1])
        runs = {}
        for method in METHODS:
            model, step = stepped(method, make, x, y)
            runs |= {(method, exchanges): timed(model, step, exchanges) for exchanges in (True, False)}
        seconds: dict = {key: [] for key in runs}
        for _ in range(rounds):
            for key, run in runs.items():
                dist.barrier()
                seconds[key].append(sample(run, 1, False))
        methods = {m: {"with": summary(seconds[m, True]), "without": summary(seconds[m, False])} for m in METHODS}
        bytes_ = sum(p.numel() * p.element_size() for p in make().parameters())
        rows.append({"net": name, "megabytes": bytes_ / 1e6, "methods": methods})
        print(rank, name, flush=True)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        mp.spawn(work, (folder, args.rounds), nprocs=RANKS)
        rows = json.loads(Path(folder, "rows.json").read_text())
    for row in rows:
        print(f"{row['net']}, {row['megabytes']:.1f} MB of gradients")
        for method, times in row["methods"].items():
            best = {kind: 1e3 * each["best"] for kind, each in times.items()}
            print(f"  {method:<24} {best['with']:8.1f} ms, without the exchange {best['without']:8.1f} ms")
    found = {
        "ranks": RANKS,
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
