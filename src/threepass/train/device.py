"""The device that a user names."""

import torch

DEVICES = "cpu, cuda, cuda:N or auto"


def find_device(name: str) -> torch.device:
    """The device of this name; auto: cuda if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be {DEVICES}, got {name!r}") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device must be {DEVICES}, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        devices = f"there are {count} CUDA devices" if count else "PyTorch finds no CUDA device"
        raise ValueError(f"device {name}: {devices}; --device cpu or --device auto runs without one")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {name}: PyTorch finds no MPS device; --device cpu or --device auto runs without one")
    return device
