"""Two against three passes from Python: the comparison and its page. On the command line: `threepass compare`.

The stronger the penalty, here in exact mode, the smaller the input loss and the higher the accuracy under attack, while
the validation error does not rise. The page has the intervals over seeds.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

from threepass.models import mlp
from threepass.study.compare import by_strength, compare, two_passes
from threepass.train.config import Config
from threepass.train.data import load

folder = compare(
    load("digits"),
    lambda: mlp(64, 32, 10),
    Config(epochs=10, batch_size=64, lr=0.05, schedule="cosine"),
    [two_passes(), *(by_strength(s, mode="exact") for s in (0.3, 1.0, 3.0))],
    seeds=3,
    out=Path(sys.argv[1] if len(sys.argv) > 1 else "runs") / "example",
    radii=(0.0, 0.05, 0.1, 0.15, 0.2),
)
for method in json.loads((folder / "compare.json").read_text())["variants"]:
    runs = sorted((folder / method["folder"]).glob("seed-*"))
    error = fmean(json.loads((run / "result.json").read_text())["last"]["val_error"] for run in runs)
    attacked = fmean(json.loads((run / "robustness.json").read_text())["pgd"]["accuracy"][2] for run in runs)
    print(f"{method['name']:<20} error {error:.2%}, accuracy under PGD at radius 0.1 {attacked:.1%}")
print(f"open {folder / 'report.html'}")
