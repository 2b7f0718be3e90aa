"""What an epoch of training costs from end to end, beside the bare three-pass step.

    PYTHONPATH=src python benchmarks/epoch.py --data-dir DATA --precision tf32 --out epoch.json

Trains on CIFAR-10 as the paper does (crops and flips, momentum SGD, batch 128, alpha 0.1, lr .01 / alpha) by
`fit(compile=True)`, in a folder, so that metrics and checkpoints are written as in any run.

    wall     seconds from an epoch's first step to the next one's: training, validation, probe, files; the median over
             the epochs after the first, which records and compiles
    bare     seconds of the captured three-pass step alone (gradients and loss of a fixed batch: no data, augmentation,
             optimizer or sums), replayed in this process and timed by CUDA events
    share    steps * bare / wall
    split    training, validation and the rest (probe, metrics, checkpoint) of `wall`

--table measures both depths by two passes and by three, and adds up the paper's table: 12 runs of 200 epochs, which
are {plain-20, plain-32} x {CIFAR-10, CIFAR-100} x {Xavier, Kaiming, three passes}, the first two by two passes.
--check trains a small net in float64 with and without compile and gives the largest difference of a parameter; on a GPU
fused optimizers read a float32 learning rate, so that 1e-7 of an update is as near as they come.
--together K trains K models at once, each in a process of its own or, with --threads, on a stream of its own in this
process. Every run records alone, then all start together; `wall` is then one epoch of all K.

Result: results/bench/h200-epoch-table-tf32.json (--table), quoted by docs/speed-details.md: the table takes 26
minutes, and its three-pass steps alone are 86% of wall.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from threepass.bench.timing import sample
from threepass.compile.capture import capture
from threepass.core.engine import Task
from threepass.core.engine import run as three_passes
from threepass.core.options import Options
from threepass.train.config import Config
from threepass.train.data import DataSet, Split, load
from threepass.train.loop import fit
from threepass.train.precision import backend_flags
from threepass.train.runs import build
from threepass.train.steps import in_precision

RUNS_OF_TABLE = {("plain20", 0.1): 2, ("plain20", 1.0): 4, ("plain32", 0.1): 2, ("plain32", 1.0): 4}
EPOCHS_OF_TABLE = 200


def settings(args: argparse.Namespace, alpha: float) -> Config:
    return Config(
        epochs=args.epochs, batch_size=args.batch, alpha=alpha, lr=0.01, eta_over_alpha=True, augment=True,
        precision=args.precision, channels_last=True, compile=not args.eager, probe_every=args.probe_every,
    )  # fmt: skip


def data_of(args: argparse.Namespace) -> DataSet:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.made:
        g = torch.Generator().manual_seed(0)
        sizes = (args.made, max(1, args.made // 5))
        splits = [
            Split(
                torch.randint(0, 256, (n, 3, 32, 32), generator=g, dtype=torch.uint8).to(device),
                torch.randint(0, 10, (n,), generator=g).to(device),
            )
            for n in sizes
        ]
        return DataSet(*splits, (0.5,) * 3, (0.3,) * 3, tuple(map(str, range(10))), "made")
    return load("cifar10", args.data_dir, device=device)


def train(
    data: DataSet, model_name: str, config: Config, recorded: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Trains; gives seconds an epoch and their split. `recorded` is called when the first epoch is over."""
    torch.manual_seed(config.seed)
    model = build(model_name, data).to(data.train.x.device)
    starts: list[float] = []

    def after_step(epoch: int, done: int) -> None:
        if done == 1:
            if epoch == 1:
                recorded()
            starts.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        history = fit(model, data, config, folder=folder, after_step=after_step).history
        starts.append(time.perf_counter())
    walls = [b - a for a, b in pairwise(starts[1:])]
    later = history[1:]
    steps = -(-len(data.train) // config.batch_size)
    training = statistics.median(m["step_seconds"] for m in later) * steps
    validation = statistics.median(m["val_seconds"] for m in later)
    wall = statistics.median(walls)
    return {
        "model": model_name,
        "alpha": config.alpha,
        "epochs": len(history),
        "steps": steps,
        "wall": wall,
        "walls": walls,
        "training": training,
        "validation": validation,
        "probe": statistics.median(m["seconds"] - m["val_seconds"] - m["step_seconds"] * steps for m in later),
        "rest": wall - training - validation,
        "first_epoch": starts[1] - began,
        "compile_seconds": sum(m.get("compile_seconds", 0.0) for m in history),
        "graph_bytes": max((m.get("graph_bytes", 0) for m in history), default=0),
        "train_loss": [m["train_loss"] for m in history],
        "val_error": [m["val_error"] for m in history],
    }


def bare_step(data: DataSet, model_name: str, config: Config, rounds: int = 7, replays: int = 50) -> float:
    """Seconds of the captured step: a fixed batch in, gradients and loss out."""
    device = data.train.x.device
    torch.manual_seed(0)
    model = build(model_name, data).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options = Options(config.alpha)
    x = torch.randn(config.batch_size, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(0, len(data.classes), (config.batch_size,), device=device)
    weights = torch.tensor([options.back, options.third], device=device)

    def step(weights: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        with in_precision(config, device):
            r = three_passes(Task(model, F.cross_entropy, x, y), options, weights=(weights[0], weights[1]))
        return [*r.grads.values(), r.loss]

    with backend_flags(config):
        captured = capture(step, [weights, x, y])
        if captured.graph is None:
            return statistics.median(sample(lambda: captured(weights, x, y), 2, cuda=False) for _ in range(rounds))
        return statistics.median(sample(captured.graph.replay, replays, cuda=True) for _ in range(rounds))


def measure(args: argparse.Namespace, data: DataSet, model_name: str, alpha: float) -> dict[str, Any]:
    config = settings(args, alpha)
    found = train(data, model_name, config)
    if not args.eager and alpha < 1:
        found["bare"] = bare_step(data, model_name, config)
        found["share"] = found["steps"] * found["bare"] / found["wall"]
    return found


CHECKS: dict[str, dict[str, Any]] = {
    "sgd, every=2, moving alpha": {"every": 2, "alpha": 0.9, "alpha_end": 0.3, "schedule": "cosine", "augment": True},
    "adamw": {"optimizer": "adamw", "lr": 0.003, "schedule": "step"},
    "RMSprop, outside the graph": {"optimizer": "RMSprop", "lr": 0.003},
    "one update an epoch": {"update": "epoch"},
}


def check(data: DataSet) -> dict[str, float]:
    """Compiled against eager: the largest difference after two epochs, relative to the parameter's largest entry."""
    few = [Split(s.x[:200].double() / 255, s.y[:200]) for s in (data.train, data.val)]
    small = DataSet(*few, data.mean, data.std, data.classes, data.name)
    found = {}
    for name, own in CHECKS.items():
        states = []
        for compile in (False, True):
            torch.manual_seed(0)
            model = build("plain8", small).double().to(data.train.x.device)
            common: dict[str, Any] = {"epochs": 2, "batch_size": 64, "lr": 0.02, "channels_last": True}
            states.append(list(fit(model, small, compile=compile, **common | own).model.parameters()))
        pairs = zip(*states, strict=True)
        found[name] = max(((p - q).abs().max() / p.abs().max().clamp_min(1e-3)).item() for p, q in pairs)
        print(f"compiled against eager, {name}: {found[name]:.1e}")
    return found


def together(args: argparse.Namespace) -> dict[str, Any]:
    """K runs at once: seconds for an epoch of all of them."""
    found = _in_threads(args) if args.threads else _in_processes(args)
    wall = statistics.median(sum(f["walls"]) / len(f["walls"]) for f in found)
    how = "threads" if args.threads else "processes"
    return {"together": args.together, "by": how, "wall": wall, "wall_per_run": wall / args.together, "runs": found}


def _in_threads(args: argparse.Namespace) -> list[dict[str, Any]]:
    data, recording, start = data_of(args), threading.Lock(), threading.Barrier(args.together)
    found: list[dict[str, Any]] = []

    def recorded() -> None:
        recording.release()
        start.wait()

    def work() -> None:
        recording.acquire()  # until `recorded`: graphs are recorded while nothing else runs
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found.append(train(data, args.model, settings(args, args.alpha), recorded))
        except BaseException:
            start.abort()
            if recording.locked():
                recording.release()
            raise

    workers = [threading.Thread(target=work) for _ in range(args.together)]
    # The switches of `numerics` are global: a run that ends first must not turn them back for the others.
    with backend_flags(settings(args, args.alpha)):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if len(found) < args.together:
        raise SystemExit("a run failed: see above")
    return found


def _in_processes(args: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(args.together), context.Queue()
    workers = [context.Process(target=_work, args=(args, start, results)) for _ in range(args.together)]
    for worker in workers:
        worker.start()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    if None in found:
        raise SystemExit("a run failed: see above")
    return found


def _work(args: argparse.Namespace, start: Any, results: Any) -> None:
    found = None
    try:
        found = train(data_of(args), args.model, settings(args, args.alpha), start.wait)
    except BaseException:
        start.abort()
        raise
    finally:
        results.put(found)


def table(args: argparse.Namespace, data: DataSet) -> dict[str, Any]:
    """The four kinds of run in the paper's table, and the time of all 12 one after the other."""
    found = []
    for model_name, alpha in RUNS_OF_TABLE:
        found.append(measure(args, data, model_name, alpha))
        write(args, {"runs": found})
    seconds = sum(
        count * (EPOCHS_OF_TABLE * f["wall"] + f["compile_seconds"])
        for count, f in zip(RUNS_OF_TABLE.values(), found, strict=True)
    )
    return {"runs": found, "table_minutes": seconds / 60}


def write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    about = {k: v for k, v in vars(args).items() if k not in ("out", "data_dir")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if args.out is not None:
        text = json.dumps(result | {"arguments": about, "torch": torch.__version__, "device": device}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


def show(result: dict[str, Any]) -> None:
    for f in result.get("runs", [result]):
        print(
            f"{f['model']} alpha {f['alpha']}: epoch {f['wall']:.4f} s = training {f['training']:.4f} + validation "
            f"{f['validation']:.4f} + rest {f['rest']:.4f} (probe {f['probe']:.4f}); first epoch {f['first_epoch']:.1f}"
            f" s, compile {f['compile_seconds']:.1f} s, graphs {f['graph_bytes'] / 2**20:.0f} MiB; loss "
            + " ".join(f"{loss:.3f}" for loss in f["train_loss"])
        )
        if "bare" in f:
            each = f["training"] / f["steps"]
            print(f"  step {each * 1e3:.3f} ms, bare {f['bare'] * 1e3:.3f} ms, share of the epoch {f['share']:.1%}")
    if "together" in result:
        print(f"{result['together']} at once by {result['by']}: {result['wall_per_run']:.4f} s an epoch and run")
    if "table_minutes" in result:
        print(f"the paper's table, 12 runs of {EPOCHS_OF_TABLE} epochs: {result['table_minutes']:.1f} minutes")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data-dir", help="where CIFAR-10 is, as for `threepass train`")
    parser.add_argument("--made", type=int, default=0, help="so many random images instead of CIFAR-10")
    parser.add_argument("--model", default="plain20")
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--probe-every", type=int, default=Config.probe_every)
    parser.add_argument("--eager", action="store_true", help="without compile")
    parser.add_argument("--check", action="store_true", help="compiled against eager")
    parser.add_argument("--table", action="store_true", help="all kinds of run in the paper's table")
    parser.add_argument("--together", type=int, default=1, help="runs at once")
    parser.add_argument("--threads", action="store_true", help="--together in one process")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.epochs < 2:
        parser.error("--epochs must be at least 2: the first one records")
    return args


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    result: dict[str, Any]
    if args.check:
        result = {"differences": check(data_of(args)), "runs": []}
    elif args.together > 1:
        result = together(args)
    else:
        data = data_of(args)
        result = table(args, data) if args.table else measure(args, data, args.model, args.alpha)
    show(result)
    write(args, result)


if __name__ == "__main__":
    main(sys.argv[1:])
