"""PyTorch's switches of precision and determinism, for the time of a run."""

import contextlib
from collections.abc import Iterator

import torch

from .config import Config


@contextlib.contextmanager
def backend_flags(config: Config) -> Iterator[None]:
    """TF32 and determinism as the config has them, and as they were afterwards.

    Captured steps run often enough to try all of cuDNN's algorithms first.
    """
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.allow_tf32
    benchmark = torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
    torch.backends.cudnn.benchmark = benchmark or (bool(config.compile) and not config.deterministic)
    torch.use_deterministic_algorithms(config.deterministic)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic)
