"""The figures of docs/gradient-losses.md, from the results of the examples that train on gradients.

    python benchmarks/gradient_figures.py [results/gradient-losses] [docs/assets]

Result: the drawings in docs/assets, shown by docs/gradient-losses.md.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from threepass.page.figure import Figure, Line, Panel

GAP = 12  # pixels between pictures


def curves(results: dict[str, Any], slug: str, title: str, field: str) -> str:
    """A measure of both engines against the CPU time of their steps."""
    history = results["history"]
    lines = [Line(k, [r["seconds"] for r in rows], [r[field] for r in rows]) for k, rows in enumerate(history.values())]
    panel = Panel(slug, title, "CPU time of the training steps, compilation included (s)", lines, "", logarithmic=True)
    return Figure(panel, list(history)).alone


def level_sets(results: dict[str, Any]) -> Image.Image:
    """Where each engine's f is negative (warm) and positive (cold), with a line at every tenth and a thick one at 0."""
    return _beside([_shaded(torch.tensor(field)) for field in results["fields"].values()])


def _shaded(field: Tensor) -> np.ndarray:
    """field[i, j] is f at x_i, y_j; rows of the picture go downwards."""
    fine = F.interpolate(field.T.flip(0)[None, None], size=(320, 320), mode="bicubic", align_corners=True)[0, 0]
    depth = (0.35 + 0.65 * (1 - fine.abs().clamp(max=1))).unsqueeze(2)
    colour = torch.where(fine.unsqueeze(2) < 0, torch.tensor([0.98, 0.72, 0.42]), torch.tensor([0.52, 0.74, 0.95]))
    slope = torch.stack(torch.gradient(fine)).norm(dim=0)
    to_line = (fine / 0.1 - (fine / 0.1).round()).abs() * 0.1 / slope  # in pixels
    width = torch.where(fine.abs() < 0.05, 1.6, 0.6)
    picture = torch.where((to_line < width).unsqueeze(2), torch.tensor(0.15), depth * colour + (1 - depth))
    return (255 * picture.clamp(0, 1)).to(torch.uint8).numpy()


def samples(results: dict[str, Any]) -> Image.Image:
    """The images that each engine's generator makes of the same noise."""
    return _beside([_sheet(text) for text in results["samples"].values()])


def _sheet(text: str) -> np.ndarray:
    images = np.frombuffer(base64.b64decode(text), np.uint8).reshape(4, 8, 28, 28)
    sheet = images.transpose(0, 2, 1, 3).reshape(4 * 28, 8 * 28)
    return np.repeat(np.repeat(sheet, 2, 0), 2, 1)[..., None].repeat(3, 2)


def _beside(pictures: list[np.ndarray]) -> Image.Image:
    gap = np.full((len(pictures[0]), GAP, 3), 255, np.uint8)
    return Image.fromarray(np.concatenate([pictures[0], *(z for p in pictures[1:] for z in (gap, p))], 1))


def main(results: Path, assets: Path) -> None:
    forces, distance, gan = (
        json.loads((results / f"{n}.json").read_text(encoding="utf-8")) for n in ("forces", "distance", "gan")
    )
    assets.mkdir(parents=True, exist_ok=True)
    drawn = curves(forces, "forces", "Mean absolute error of forces (meV/Angstrom)", "forces")
    (assets / "forces.svg").write_text(drawn, encoding="utf-8")
    level_sets(distance).save(assets / "distance.png", optimize=True)
    samples(gan).save(assets / "gan.png", optimize=True)


if __name__ == "__main__":
    given = [Path(z) for z in sys.argv[1:]]
    root = Path(__file__).parents[1]
    main(*(given or [root / "results" / "gradient-losses", root / "docs" / "assets"]))
