"""Triton kernels, each with a plain path as fallback and oracle."""

import functools
import importlib.util
import os

import torch


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run there; on a CPU, in Triton's interpreter."""
    if device.type == "cuda":
        return _has_triton() and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
