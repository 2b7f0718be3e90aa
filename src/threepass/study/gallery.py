"""Images and their input gradients under every method of a comparison."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..page.figure import number
from ..page.images import data_uri, heat, picture
from ..page.writer import Cell, Table
from .gather import Study


class Gallery(NamedTuple):
    """Images and |dl/dx| under every method, each image on a scale of its own, and numbers over all examples."""

    heading: str
    examples: int
    lengths: list[tuple[str, str]]
    table: Table


def galleries(study: Study) -> Iterator[Gallery]:
    for folder, about in study.compared:
        file = folder / "examples.safetensors"
        tensors = _read_examples(file) if file.exists() else {}
        names = [v["name"] for v in about["variants"] if f"gradient/{v['name']}" in tensors]
        if names and tensors["pixels"].dim() == 4:
            lengths = _lengths(tensors, names, about["baseline"])
            examples = len(tensors[f"norm/{names[0]}"])
            yield Gallery(study.heading(folder), examples, lengths, _tiles(tensors, names, about["data"]["classes"]))


def _read_examples(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): delete it to build the page without images") from error


def _tiles(tensors: dict[str, Tensor], names: Sequence[str], classes: Sequence[str]) -> Table:
    labels = [classes[i] for i in tensors["label"].tolist()]
    sizes = torch.stack(
        [tensors[f"gradient/{name}"].abs().sum(1) for name in names]
    )  # methods x images x height x width
    tops = sizes.amax((0, 2, 3)).tolist()
    images = zip(tensors["pixels"], labels, strict=True)
    rows = [("image", [Cell("", image=data_uri(picture(z)), alt=f"image of class {label}") for z, label in images])]
    for name, maps in zip(names, sizes, strict=True):
        lengths = tensors[f"gradient/{name}"].flatten(1).norm(dim=1).tolist()
        cells = []
        for label, said, size, top, length in zip(
            labels, tensors[f"said/{name}"].tolist(), maps, tops, lengths, strict=True
        ):
            wrong = "" if classes[said] == label else f"read as {classes[said]}"
            alt = f"input gradient under {name}, class {label}: length {number(length)} {wrong}".rstrip()
            cells.append(Cell(number(length), wrong, image=data_uri(heat(size, top)), alt=alt))
        rows.append((name, cells))
    return Table("Images and input gradients.", labels, rows, "examples")


def _lengths(tensors: dict[str, Tensor], names: Sequence[str], base: str) -> list[tuple[str, str]]:
    """Over all examples, because eight images prove nothing: of every method, in words."""
    texts = []
    for name in names if base in names else ():
        if name != base:
            shorter = (tensors[f"norm/{name}"] < tensors[f"norm/{base}"]).double().mean().item()
            before, after = (number(tensors[f"norm/{n}"].square().mean().sqrt().item()) for n in (base, name))
            texts.append((name, f"root mean square {after} against {before} with {base}, shorter in {shorter:.0%}"))
    return texts
