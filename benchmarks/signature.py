"""What it costs a compiled step to find out whether its program is still right: the signature, call by call.

    PYTHONPATH=src python benchmarks/signature.py --out results/bench/signature.json

Microseconds, the least of many rounds, on one core: the quick look at the model and the loss, the signature of the
inputs, both together, and the full description, which is made only after something has changed.

Result: results/bench/signature.json, quoted by docs/compile.md: 15 microseconds per call on plain-20.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from threepass.compile.signature import Signature, flattened, input_signature
from threepass.models import plain, resnet18, vit

LIMIT = 30.0  # microseconds on plain-20
NETS = {"plain-20": lambda: plain(20), "ResNet-18": resnet18, "ViT, depth 12": lambda: vit(depth=12)}


def microseconds(f: Callable[[], object], rounds: int, calls: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            f()
        best = min(best, (time.perf_counter() - began) / calls)
    return 1e6 * best


def measure(name: str, rounds: int) -> dict[str, float | int | str]:
    model = NETS[name]()
    x, y = torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    signature = Signature(model, F.cross_entropy)

    def inputs() -> object:
        return input_signature(flattened(x, y)[0])

    return {
        "net": name,
        "modules": len(list(model.modules())),
        "tensors": len(list(model.parameters())) + len(list(model.buffers())),
        "quick look": microseconds(signature.state, rounds, 20),
        "inputs": microseconds(inputs, rounds, 20),
        "call": microseconds(lambda: (signature.state(), inputs()), rounds, 20),
        "full description": microseconds(lambda: Signature(model, F.cross_entropy).state(), rounds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, args.rounds) for name in NETS]
    for row in rows:
        print({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()})
    found = {
        "limit": LIMIT,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "microseconds": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if float(rows[0]["call"]) > LIMIT:
        raise SystemExit(f"a call costs more than {LIMIT} microseconds on plain-20")


if __name__ == "__main__":
    main()
