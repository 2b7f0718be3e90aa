"""Loads inside a kernel."""

# mypy: disable-error-code="import-not-found, import-untyped"

import triton
import triton.language as tl


@triton.jit
def load(z, here, inside):
    """z at `here` in float32, 0 outside."""
    return tl.load(z + here, mask=inside, other=0.0).to(tl.float32)
