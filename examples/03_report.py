"""Two against three passes from Python: the comparison and its page. On the command line: `threepass compare`."""

import sys
from pathlib import Path

from threepass.models import mlp
from threepass.study.compare import by_alpha, by_strength, compare, two_passes
from threepass.train.config import Config
from threepass.train.data import load

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs") / "example"
folder = compare(
    load("digits"),
    lambda: mlp(64, 32, 10),
    Config(epochs=4, batch_size=64, lr=0.05),
    [two_passes(), by_alpha(0.3), by_strength(0.3, mode="exact")],
    seeds=2,
    out=out,
)
print(f"open {folder / 'report.html'}")
