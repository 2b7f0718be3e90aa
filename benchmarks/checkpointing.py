"""Memory of a step with activation checkpointing: three passes beside plain training, 12 to 48 transformer blocks.

    PYTHONPATH=src python benchmarks/checkpointing.py --out results/bench/cpu-checkpointing.json

Peak bytes that a step allocates beyond the parameters and their gradients, on a CPU: eager, captured without a compiler
(compile="trace") and, for the smallest net, compiled. Bytes do not depend on how busy the machine is. It takes 15
minutes, most of them for the profiler's records and for the compiler.

Result: with 48 blocks, paper mode takes 1.34x of the memory of plain training with the same checkpoints, traced 1.18x.
In results/bench/cpu-checkpointing.json, quoted by docs/speed-details.md.
"""

import argparse
import json
import platform
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import threepass
from threepass.bench.timing import peak_bytes

WIDTH, HEADS, TOKENS, BATCH = 128, 4, 64, 32
BLOCKS = (12, 24, 48)
FORMS = {"eager": False, "traced": "trace", "compiled": "require"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Net(nn.Module):
    def __init__(self, blocks: int, checkpointed: bool):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(WIDTH, 10)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x.mean(1))


def measure(blocks: int, checkpointed: bool) -> dict:
    torch.manual_seed(0)
    net = Net(blocks, checkpointed)
    x, y = torch.randn(BATCH, TOKENS, WIDTH), torch.randint(10, (BATCH,))

    def plain() -> None:
        F.cross_entropy(net(x), y).backward()

    forms = [form for form in FORMS if form != "compiled" or blocks == BLOCKS[0]]
    plain()  # gradients are there, and are added to
    of_plain = peak_bytes(plain, cuda=False)
    row = {"blocks": blocks, "checkpointed": checkpointed, "bytes": of_plain}
    for mode in ("paper", "exact"):
        row[mode] = {}
        for form in forms:
            step = threepass.ThreePass(net, F.cross_entropy, strength=0.1, mode=mode, compile=FORMS[form])
            step(x, y)  # captures
            step(x, y)
            row[mode][form] = peak_bytes(lambda step=step: step(x, y), cuda=False) / of_plain
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for blocks in BLOCKS:
        for checkpointed in (False, True):
            rows.append(measure(blocks, checkpointed))
            print(rows[-1], flush=True)
    found = {
        "width": WIDTH, "heads": HEADS, "tokens": TOKENS, "batch": BATCH, "torch": torch.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
