"""safetensors files: by the library where it is installed, else by these few lines, since the format is so plain.

Eight bytes with the length of a JSON header, the header {name: dtype, shape, offsets}, then the tensors' bytes.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def save_file(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        from safetensors.torch import save_file as save
    except ImportError:
        save_plainly(tensors, path)
    else:
        save(tensors, path)


def load_file(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file as load
    except ImportError:
        return load_plainly(path)
    return load(path)


def save_plainly(tensors: dict[str, Tensor], path: Path) -> None:
    header: dict[str, dict] = {}
    end = 0
    for name, z in tensors.items():
        size = z.numel() * z.element_size()
        header[name] = {"dtype": _NAMES[z.dtype], "shape": list(z.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for z in tensors.values():
            file.write(z.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def load_plainly(path: Path) -> dict[str, Tensor]:
    kinds = {name: dtype for dtype, name in _NAMES.items()}
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, about in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = (start + offset for offset in about["data_offsets"])
        part = (
            torch.frombuffer(raw[first:last], dtype=torch.uint8) if last > first else torch.empty(0, dtype=torch.uint8)
        )
        tensors[name] = part.view(kinds[about["dtype"]]).reshape(about["shape"])
    return tensors
