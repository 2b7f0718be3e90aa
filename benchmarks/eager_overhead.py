"""What a step without a compiler costs where Python and the launches of kernels take the time, against plain training.

    python benchmarks/eager_overhead.py --label tiny --out results/bench/cpu-eager-overhead.json
    python benchmarks/eager_overhead.py --nets MLP --label mlps --out results/bench/cpu-eager-overhead.json
    python benchmarks/eager_overhead.py --device cuda --out results/bench/h200-eager-overhead.json

A step is the forward and `loss.backward()`, or one call of `ThreePass`: eager, or with compile="trace". On a CPU the
nets are tiny (2 images of 8 x 8, 2 to 16 channels, one thread), so that arithmetic takes next to nothing and the ratio
is that of Python and dispatch; the MLPs (--nets MLP, for a CPU) have the sizes of the recipes for MNIST and digits. On
a GPU the nets have the sizes of `docs/speed-details.md`: plain-20 at batch 128, ResNet-18 and ViT-Tiny at 256.

The steps take turns; a ratio is the median over the rounds of a step's time relative to the plain step's of the same
round. On a CPU it is the process's own time. `calls` counts the ATen calls below autograd, `kernels` those that are
neither views nor bare allocations: on a GPU each is a launch, or more. `capture_seconds` is what the first call of a
traced step takes to trace and check it.

Prints a table. With --out, writes it under --label into a JSON file, beside the labels that are there already.

Result: results/bench/cpu-eager-overhead.json (labels `tiny` and `mlps`), quoted by docs/speed-details.md. With
the tiny plain-20, paper mode takes 2.37x of a plain step, traced 1.41x.
"""

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from threepass import ThreePass
from threepass.bench.timing import take_turns
from threepass.models import mlp, plain, resnet18, vit

GOAL = 2.0  # of paper mode
NETS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "plain-20": {"cpu": lambda: plain(20, width=2), "cuda": lambda: plain(20)},
    "ResNet-18": {"cpu": lambda: resnet18(width=2), "cuda": resnet18},
    "ViT-Tiny": {
        "cpu": lambda: vit(image=8, width=6, depth=12, heads=3),
        "cuda": lambda: vit(depth=12),
    },
}
MLPS = {"MLP 784-512-10, batch 128": ((784, 512, 10), 128), "MLP 64-512-10, batch 64": ((64, 512, 10), 64)}
BATCH = {"cpu": dict.fromkeys(NETS, 2), "cuda": {"plain-20": 128, "ResNet-18": 256, "ViT-Tiny": 256}}
IMAGE = {"cpu": 8, "cuda": 32}
OPTIONS: dict[str, dict[str, Any]] = {
    "paper, strength": {"strength": 0.1},
    "paper, alpha": {"alpha": 0.1},
    "exact, strength": {"strength": 0.1, "mode": "exact"},
    "paper, traced": {"strength": 0.1, "compile": "trace"},
    "exact, traced": {"strength": 0.1, "mode": "exact", "compile": "trace"},
}
NO_KERNELS = {"_unsafe_view", "promote_types", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def is_kernel(func: OpOverload) -> bool:
    return not func.is_view and func.overloadpacket.__name__ not in NO_KERNELS


class Count(TorchDispatchMode):
    """Counts ATen calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.kernels += is_kernel(func)
        return func(*args, **(kwargs or {}))


def model_and_batch(name: str, device: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name in MLPS:
        sizes, batch = MLPS[name]
        return mlp(*sizes).to(device), torch.randn(batch, sizes[0], device=device)
    model = NETS[name][device]().to(device, memory_format=torch.channels_last)
    x = torch.randn(BATCH[device][name], 3, IMAGE[device], IMAGE[device], device=device)
    return model, x.contiguous(memory_format=torch.channels_last)


class Step:
    """A step on one batch: of `ThreePass`, or plain training's. Gradients are set to None before."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, three: ThreePass | None = None):
        self.model, self.x, self.y, self.three = model, x, y, three

    def __call__(self) -> None:
        self.model.zero_grad()
        if self.three is None:
            F.cross_entropy(self.model(self.x), self.y).backward()
        else:
            self.three(self.x, self.y)

    def counts(self) -> dict[str, Any]:
        """Of ATen calls; those of a captured step are the nodes of its graph."""
        if self.three is None or self.three.compiled is None:
            with Count() as count:
                self()
            return {"calls": count.calls, "kernels": count.kernels}
        (step,) = self.three.compiled.programs
        captured = step.captured
        called = [node.target for node in captured.program.graph.graph.nodes if isinstance(node.target, OpOverload)]
        seconds = captured.compile_seconds + captured.check_seconds
        return {"calls": len(called), "kernels": sum(map(is_kernel, called)), "capture_seconds": seconds}


def steps_of(name: str, device: str) -> dict[str, Step]:
    """The plain step and those of `ThreePass`, on the same model and batch."""
    model, x = model_and_batch(name, device)
    y = torch.randint(10, (len(x),), device=device)
    made = {option: ThreePass(model, F.cross_entropy, **given) for option, given in OPTIONS.items()}
    return {"plain": Step(model, x, y)} | {option: Step(model, x, y, three) for option, three in made.items()}


def cpu_times(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of the process's own time, one step a round, so that other processes have a smaller part in them."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append(time.process_time() - began)
    return times


def measure(name: str, device: str, rounds: int) -> list[dict[str, Any]]:
    steps = steps_of(name, device)
    for step in steps.values():  # also a step's checks of its first call
        step()
    counts = {option: step.counts() for option, step in steps.items()}
    times = take_turns(steps, rounds, True) if device == "cuda" else cpu_times(steps, rounds)
    rows = []
    for option, seconds in times.items():
        ratios = [s / one for s, one in zip(seconds, times["plain"], strict=True)]
        row = {"net": name, "step": option, "ms": 1e3 * statistics.median(seconds), "ratio": statistics.median(ratios)}
        rows.append(row | counts[option])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--nets", choices=["tiny", "MLP"], default="tiny", help="tiny: on a GPU, those of docs/speed-details.md"
    )
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--label", default="now", help="the name of these rows in the file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of norms in paper mode
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    rows = []
    for name in MLPS if args.nets == "MLP" else NETS:
        for row in measure(name, args.device, args.rounds):
            rows.append(row)
            print(f"{name:<10} {row['step']:<16} {row['ms']:8.2f} ms  {row['ratio']:5.2f}x", end="")
            captured = f"  captured in {row['capture_seconds']:.1f} s" if "capture_seconds" in row else ""
            print(f"  {row['calls']:5} calls  {row['kernels']:5} kernels{captured}", flush=True)
    if args.out is not None:
        found = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"goal": GOAL, "runs": {}}
        found["runs"][args.label] = {
            "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "rounds": args.rounds,
            "rows": rows,
        }
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
