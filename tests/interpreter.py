"""Triton's interpreter, for where there is Triton and no GPU.

Whether a kernel is interpreted is settled when Triton is imported: such a test runs in a process of its own.
"""

import functools
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def interpreted(code: str) -> None:
    """Runs code, in which tests may be imported, with the interpreter mended."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"import interpreter; interpreter.mend(); {code}"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def check_results(call, expected, dtype: torch.dtype, tolerance: float, case: object) -> None:
    """Results of the expected shapes, the same bits again, and near the expected: in `dtype` by the tolerance."""
    for result, other, reference in zip(call(), call(), expected, strict=True):
        assert result.shape == reference.shape
        assert torch.equal(result, other)
        if result.numel():
            error = (result.double() - reference).norm() / reference.norm()
            assert error < (tolerance if result.dtype == dtype else 1e-6), (case, dtype, error)


@functools.cache
def mend() -> None:
    torch.set_num_threads(1)
    _products_and_loops()
    _round_to_nearest()
    _refuse_other_memory()


def _products_and_loops() -> None:
    """Triton 3.6's interpreter multiplies bfloat16 as if it were uint16, and with NumPy 2.4 cannot count loops."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    multiply, patch = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor

    def wide(z):
        if z.dtype.scalar != tl.bfloat16:
            return z
        data = interpreter._convert_float(z.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, wide(a), wide(b), *rest)

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang_tensor = patch_lang_tensor


def _round_to_nearest() -> None:
    """Triton 3.6's interpreter cuts bfloat16 off; a GPU rounds."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def nearest(z, given, wanted, mode):
        if (given, wanted) != (tl.float32, tl.bfloat16):
            return convert(z, given, wanted, mode)
        return torch.from_numpy(z.view(np.float32).copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = nearest


def _refuse_other_memory() -> None:
    """A kernel that reads or writes outside its arguments' memory fails, as on a GPU it does at its worst."""
    import numpy as np
    from triton.runtime import interpreter

    known: list[tuple[int, int]] = []
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    prepare, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

    def noted(self, args, kwargs):
        given, named = prepare(self, args, kwargs)
        storages = [z.untyped_storage() for z in (*given, *named.values()) if isinstance(z, torch.Tensor)]
        known[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        return given, named

    def check(pointers, mask):
        at = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)].astype(np.uint64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(at.shape, bool)
        for first, last in known:
            inside |= (at >= first) & (at + size <= last)
        assert inside.all(), "a kernel reaches outside its arguments' memory"

    def checked_load(self, pointers, mask, *rest):
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    executor._init_args_hst = noted
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
