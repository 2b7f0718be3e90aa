"""Checkpoints: safetensors and JSON, no pickle, written whole or not at all.

A checkpoint is a folder with `tensors.safetensors` (model, optimizer, sums of the epoch so far, random states) and
`state.json` (everything else: the optimizer's groups, the position, the config, versions). It is written under another
name and renamed, so that a crash leaves the previous checkpoint.
"""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from .._version import code_version
from ..tape.state import random_state, set_random_state
from .files import Kinds, check_kind, read_object

FORMAT = 2
KEYS: dict[str, Kinds] = {
    "format": (int,), "config": (dict,), "position": (list,), "seconds": (float,), "history": (list,),
    "average_updates": (int,), "optimizer": (dict,), "numpy_random": (list,), "python_random": (list,),
}  # fmt: skip

Packed = tuple[dict[str, Tensor], dict[str, Any]]


def save(path: Path, model: nn.Module, optimizer: Optimizer, sums: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Writes a checkpoint to the folder `path`, in place of the one there."""
    write(path, pack(model, optimizer, sums, state))


def pack(model: nn.Module, optimizer: Optimizer, sums: dict[str, Tensor], state: dict[str, Any]) -> Packed:
    """A checkpoint's tensors, copied to the CPU, and its state: nothing that training goes on to change."""
    device = next(model.parameters()).device.type
    packed = optimizer.state_dict()
    tensors = {f"model/{name}": z for name, z in model.state_dict().items()}
    tensors |= {f"sum/{name}": z for name, z in sums.items()}
    tensors |= {f"rng/{i}": z for i, z in enumerate(random_state(device))}
    rest: dict[str, dict[str, Any]] = {}
    for number, entries in packed["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{number}/{key}"] = value
            else:
                rest.setdefault(str(number), {})[key] = value
    version, internal, gauss = random.getstate()
    _, keys, *rest_of_numpy = np.random.get_state()
    state = state | {
        "format": FORMAT,
        "threepass": code_version(),
        "torch": torch.__version__,
        "numpy_random": [np.asarray(keys).tolist(), *rest_of_numpy],
        "optimizer": {"groups": packed["param_groups"], "rest": rest},
        "python_random": [version, list(internal), gauss],
    }
    return {k: z.detach().cpu().contiguous().clone() for k, z in tensors.items()}, state


def write(path: Path, packed: Packed) -> None:
    """Writes to the folder `path`, in place of the checkpoint there."""
    tensors, state = packed
    beside = path.with_name(path.name + ".new")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        save_file(tensors, beside / "tensors.safetensors")
        (beside / "state.json").write_text(json.dumps(state, indent=1))
        for file in (beside / "tensors.safetensors", beside / "state.json"):
            with open(file, "rb") as written:
                os.fsync(written.fileno())
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        previous = "the previous checkpoint is kept" if exists(path) else "there is no previous checkpoint"
        raise OSError(f"could not write the checkpoint {path} ({error}); {previous}") from error
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    beside.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Puts model, optimizer and random states back; returns the sums and the rest of the state."""
    return unpack(read(path), model, optimizer)


def read(path: Path) -> Packed:
    """The checkpoint at `path`, with its tensors on the CPU."""
    folder = find(path)
    return _read_tensors(folder / "tensors.safetensors"), read_state(folder)


def unpack(packed: Packed, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Puts model, optimizer and random states back; returns the sums and the rest of the state."""
    on_cpu, state = packed
    first = next(model.parameters())
    tensors = {k: z.to(first.device) for k, z in on_cpu.items()}
    try:
        model.load_state_dict({k.removeprefix("model/"): z for k, z in tensors.items() if k.startswith("model/")})
    except RuntimeError as error:
        raise ValueError(f"the checkpoint does not match the model: {' '.join(str(error).split())}") from error
    entries_of: dict[int, dict[str, Any]] = {}
    for key, z in tensors.items():
        if key.startswith("optimizer/"):
            _, number, name = key.split("/", 2)
            entries_of.setdefault(int(number), {})[name] = z
    for number, entries in state["optimizer"]["rest"].items():
        entries_of.setdefault(int(number), {}).update(entries)
    optimizer.load_state_dict({"state": entries_of, "param_groups": state["optimizer"]["groups"]})
    _lay_out_like_parameters(optimizer)
    rng = [tensors[k].cpu() for k in sorted(k for k in tensors if k.startswith("rng/"))]
    set_random_state(rng, first.device.type)
    keys, *rest_of_numpy = state["numpy_random"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), *rest_of_numpy))
    version, internal, gauss = state["python_random"]
    random.setstate((version, tuple(internal), gauss))
    return {k.removeprefix("sum/"): z for k, z in tensors.items() if k.startswith("sum/")}, state


def read_state(folder: Path) -> dict[str, Any]:
    """What state.json holds, checked."""
    file = folder / "state.json"
    state = read_object(file, {"format": (int,)})
    if state["format"] != FORMAT:
        raise ValueError(
            f"{folder}: written by another version (format {state['format']}, but this version reads {FORMAT})"
        )
    state = read_object(file, KEYS)
    for place in state["position"]:
        check_kind(file, "position", place, (int,))
    for number, metrics in enumerate(state["history"]):
        check_kind(file, f"history[{number}]", metrics, (dict,))
    for name, kinds in {"groups": (list,), "rest": (dict,)}.items():
        check_kind(file, f"optimizer.{name}", state["optimizer"].get(name), kinds)
    return state


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or missing ({error}): the run cannot be resumed from it") from error


@torch.no_grad()
def _lay_out_like_parameters(optimizer: Optimizer) -> None:
    """Files hold contiguous tensors; fused optimizers want a channels_last parameter's state in its own layout."""
    for p, entries in optimizer.state.items():
        for name, z in entries.items():
            if isinstance(z, Tensor) and z.shape == p.shape and z.stride() != p.stride():
                entries[name] = torch.empty_like(p, dtype=z.dtype).copy_(z)


def exists(path: Path) -> bool:
    return any((folder / "state.json").exists() for folder in _places(path))


def find(path: Path) -> Path:
    """The checkpoint at `path`; the one before, if a crash came between the two renames."""
    for folder in _places(path):
        if (folder / "state.json").exists():
            return folder
    raise FileNotFoundError(f"no checkpoint at {path}")


def _places(path: Path) -> tuple[Path, Path]:
    return path, path.with_name(path.name + ".old")
