"""Memory of a step without a compiler: three passes, eager and traced, double backward and plain training.

    PYTHONPATH=src python benchmarks/eager_memory.py --out results/bench/cpu-eager-memory.json

Peak bytes that a step allocates beyond the parameters and their gradients, on a CPU, relative to plain training. Bytes
do not depend on how busy the machine is. It takes three minutes, most of them for the profiler's records. Double
backward runs attention by PyTorch's math kernel, which alone can be differentiated twice.

Result: eager, ResNet-20 takes 1.59x in paper mode and 1.73x in exact mode.
In results/bench/cpu-eager-memory.json, quoted by docs/speed-details.md.
"""

import argparse
import json
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import threepass
from threepass.bench.nets import by_name
from threepass.bench.timing import peak_bytes
from threepass.models import plain, resnet, vit
from threepass.train.files import write_json

NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with their batches
    "plain-20": (lambda: plain(20), 32),
    "ResNet-20": (lambda: resnet(20), 32),
    "nn.TransformerEncoder": (lambda: by_name("encoder"), 16),
    "ViT-Tiny": (lambda: vit(depth=12), 8),
}
FORMS: dict[str, dict[str, Any]] = {
    "paper, eager": {"mode": "paper"},
    "paper, traced": {"mode": "paper", "compile": "trace"},
    "exact, eager": {"mode": "exact"},
    "exact, traced": {"mode": "exact", "compile": "trace"},
}


def double_backward(net: nn.Module, x: Tensor, y: Tensor) -> None:
    """What exact mode computes, by autograd."""
    x = x.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        loss = F.cross_entropy(net(x), y)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + 0.05 * len(x) * g.square().sum()).backward()


def measure(make: Callable[[], nn.Module], batch: int) -> dict[str, float]:
    torch.manual_seed(0)
    net, x, y = make(), torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    steps: dict[str, Callable[[], Any]] = {
        "plain": lambda: F.cross_entropy(net(x), y).backward(),
        "double backward": lambda: double_backward(net, x, y),
    }
    for form, options in FORMS.items():
        step = threepass.ThreePass(net, F.cross_entropy, strength=0.1, **options)
        steps[form] = lambda step=step: step(x, y)
    found = {}
    for name, step in steps.items():
        step()  # captures, and makes gradients that the next one adds to
        found[name] = peak_bytes(step, cuda=False)
    return {"bytes": found["plain"]} | {name: found[name] / found["plain"] for name in found if name != "plain"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, (make, batch) in NETS.items():
        rows.append({"net": name, "batch": batch} | measure(make, batch))
        print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        write_json(given.out, {"torch": torch.__version__, "python": platform.python_version(), "rows": rows})


if __name__ == "__main__":
    main()
