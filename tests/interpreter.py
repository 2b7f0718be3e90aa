"""Triton's interpreter: it runs the kernels on a machine without a GPU.

Whether a kernel is interpreted is settled when Triton is imported: such a test runs in a process of its own. On Linux
Triton is a dependency of the tests, so there they fail without it.
"""

import contextlib
import functools
import importlib
import os
import subprocess
import sys
import threading

import pytest
import torch

needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")

# The modules of `threepass.kernels` that have Triton functions, and the tests that run every one of them
RUN_BY = {
    "activation.triton_kernel": "test_activation",
    "attention.triton_kernel": "test_attention",
    "batch_norm.triton_kernel": "test_batch_norm",
    "conv.triton_kernel": "test_conv",
    "layer_norm.triton_kernel": "test_layer_norm",
    "load_triton": "test_activation",
    "product_triton": "test_conv",
    "rounding_triton": "test_layer_norm",
    "sums_triton": "test_activation",
}


def interpreted(test: str, *call: str) -> None:
    """Calls a test module's function in the interpreter, or runs those of its tests that `-k expression` selects."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "import interpreter; interpreter.main()", test, *call]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    """In the process of its own: the tests, and that they left out no Triton function of the modules they stand for."""
    mend()
    test, *call = sys.argv[1:]
    module = importlib.import_module(test)
    if call[0] == "-k":
        assert module.__file__
        failed = pytest.main(["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *call, module.__file__])
        assert not failed, f"{test}: pytest ended with {failed!r}"
    else:
        getattr(module, call[0])()
    assert not (left := [name for kernels, by in RUN_BY.items() if by == test for name in not_run(kernels)]), left


def not_run(module: str) -> list[str]:
    """The Triton functions of a module that no kernel's launch has reached so far."""
    from triton.runtime.interpreter import InterpretedFunction

    names = vars(importlib.import_module(f"threepass.kernels.{module}")).items()
    ours = {name: f for name, f in names if isinstance(f, InterpretedFunction)}
    return [f"{module}.{name}" for name, f in ours.items() if f.fn not in InterpretedFunction.rewritten_fn]


def check_results(call, expected, dtype: torch.dtype, tolerance: float, case: object) -> None:
    """Results of the expected shapes, and near the expected: in `dtype` by the tolerance."""
    for result, reference in zip(call(), expected, strict=True):
        assert result.shape == reference.shape
        if result.numel():
            error = (result.double() - reference).norm() / reference.norm()
            assert error < (tolerance if result.dtype == dtype else 1e-6), (case, dtype, error)


@functools.cache
def mend() -> None:
    torch.set_num_threads(1)
    _count_loops()
    _bfloat16()
    _patch_once()
    _refuse_other_memory()
    _refuse_other_devices()


def _count_loops() -> None:
    """Triton 3.6's interpreter cannot count loops with NumPy 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _bfloat16() -> None:
    """The interpreter (3.6 to 3.9) computes with bfloat16's bits as if they were integers, and cuts where a GPU rounds.

    Here an operation on bfloat16 is one on float32, its result rounded to the nearest, and a comparison's is an int1.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle, convert = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter._convert_float
    binary, multiply = builder.binary_op, builder.create_dot

    def nearest(z, given, wanted, mode):
        if (given, wanted) != (tl.float32, tl.bfloat16):
            return convert(z, given, wanted, mode)
        return torch.from_numpy(z.view(np.float32).copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)

    def wide(z):
        if z.dtype.scalar != tl.bfloat16:
            return z
        return handle(convert(z.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)

    def binary_op(self, x, y, op):
        result = binary(self, wide(x), wide(y), op)
        if result.data.dtype == np.bool_:  # of a comparison, which has its operands' type: it is lost in a broadcast
            return handle(result.data, tl.int1)
        if x.dtype.scalar != tl.bfloat16:
            return result
        return handle(nearest(result.data, tl.float32, tl.bfloat16, None), tl.bfloat16)

    builder.binary_op = binary_op
    builder.create_dot = lambda self, a, b, *rest: multiply(self, wide(a), wide(b), *rest)
    interpreter._convert_float = nearest


def _patch_once() -> None:
    """Functions that a kernel calls patch Triton's language at each call, half of a kernel's time; once is enough."""
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()

    def launched(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_lang(function):
        if (module := id(function.__globals__)) in patched:
            return None
        patched.add(module)
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, patch_lang


def _refuse_other_memory() -> None:
    """A kernel that reads or writes outside its arguments' memory fails, as on a GPU it does at its worst."""
    import numpy as np
    from triton.runtime import interpreter

    known: list[tuple[int, int]] = []
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    prepare, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

    def noted(self, args, kwargs):
        given, named = prepare(self, args, kwargs)
        known[:] = [_extent(z) for z in (*given, *named.values()) if isinstance(z, torch.Tensor)]
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


def _extent(z: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor's elements and the one after the last; of a view, not of what it is a view of."""
    last = sum((size - 1) * stride for size, stride in zip(z.shape, z.stride(), strict=True))
    return z.data_ptr(), z.data_ptr() + (last + 1) * z.element_size() * bool(z.numel())


def _refuse_other_devices() -> None:
    """A kernel fails that is launched while the thread's current device is not known to be that of its arguments."""
    from triton.runtime import interpreter

    launch, device_of = interpreter.GridExecutor.__call__, torch.cuda.device_of
    current = threading.local()

    @contextlib.contextmanager
    def noted(tensor):
        before, current.device = getattr(current, "device", None), tensor.device
        with device_of(tensor):
            yield
        current.device = before

    def launched(self, *args, **kwargs):
        devices = {z.device for z in (*args, *kwargs.values()) if isinstance(z, torch.Tensor)}
        assert devices == {getattr(current, "device", None)}, f"{self.fn.__name__} is launched on any device"
        return launch(self, *args, **kwargs)

    torch.cuda.device_of, interpreter.GridExecutor.__call__ = noted, launched
