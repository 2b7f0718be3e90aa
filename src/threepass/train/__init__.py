"""Training on top of the engine: data, loop, checkpoints."""

from .extras import require

for package in ("numpy", "safetensors"):
    require(package, "training")
