"""The machine code of the convolution kernels for a GPU of compute capability 9.0 has all of their products.

ptxas, which makes machine code of Triton's PTX, once removed every product of a kernel, and the kernel gave zeros.
Compiling needs no GPU, and Triton's package has ptxas and a disassembler.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from interpreter import needs_triton

# Channels in and out, image size and stride of the layers of plain-20
LAYERS = [(3, 16, 32, 1), (16, 16, 32, 1), (16, 32, 32, 2), (32, 32, 16, 1), (32, 64, 16, 2), (64, 64, 8, 1)]
FORMATS = {"tf32": (torch.float32, False), "rounded": (torch.float32, True), "bf16": (torch.bfloat16, False)}
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32"}
PRODUCT_IN_PTX = re.compile(r"wgmma\.mma_async|mma\.sync")
# ptxas leaves an HGMMA of empty operands in place of those that it removes.
PRODUCT = re.compile(r"\bHGMMA\b(?!.*gdesc\[URZ\], RZ)|\bHMMA\b")

SLOW = [
    pytest.param(layer, numbers, marks=() if layer == LAYERS[1] and numbers == "rounded" else pytest.mark.slow)
    for layer in LAYERS
    for numbers in FORMATS
]


@needs_triton
@pytest.mark.parametrize(("layer", "numbers"), SLOW, ids=str)
def test_no_product_is_removed_from_the_machine_code(layer, numbers, monkeypatch):
    for kernel, arguments in launches(layer, *FORMATS[numbers], monkeypatch):
        program = compiled(kernel, arguments)
        expected, found = len(PRODUCT_IN_PTX.findall(program.asm["ptx"])), len(PRODUCT.findall(machine_code(program)))
        assert found >= expected, f"{kernel.__name__} has {found} of {expected} products"


@needs_triton
def test_a_removed_product_is_seen():
    assert PRODUCT.findall("HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0 ;") == []
    assert len(PRODUCT.findall("HGMMA.64x16x8.F32.TF32 R24, gdesc[UR4], R24, gsb0 ;")) == 1


def launches(layer, dtype, rounded, monkeypatch):
    """(kernel, arguments by name) of every way in which a layer's kernels are called, launched or not."""
    from triton.runtime.jit import JITFunction

    from threepass.kernels.conv import triton_kernel

    found = {}

    def record(self, *args, grid, warmup, **kwargs):
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        found[self.__name__, str({n: _described(z) for n, z in arguments.items()})] = self, arguments

    monkeypatch.setattr(JITFunction, "run", record)
    monkeypatch.setattr(triton_kernel, "multiprocessors", lambda device: 132)
    i, o, size, stride = layer
    a, w, d = (
        _nhwc(*shape, dtype=dtype) for shape in ((64, i, size, size), (o, i, 3, 3), (64, o, *(size // stride,) * 2))
    )
    bias, ratio, seed = torch.empty(o), torch.empty(()), torch.empty((), dtype=torch.int32)
    both = {"rounded": rounded, "round_result": rounded}
    for b, relu, gate, opened in (
        (bias, True, None, None),
        (bias, True, d, None),
        (None, False, None, d),
        (None, False, None, None),
    ):
        triton_kernel.forward(a, w, b, stride, relu, gate, opened, **both)
    for opened in (a, None):
        triton_kernel.backward_input(d, w, stride, (size, size), opened, **both)
    triton_kernel.forward_tangent(a, w, stride, d, ratio, seed)
    triton_kernel.backward_weight(d, a, stride, True, rounded=rounded)
    return found.values()


def compiled(kernel, arguments):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = {n for p, n in zip(kernel.params, names, strict=True) if p.is_constexpr or arguments[n] is None}
    signature = {n: "constexpr" if n in constants else _type(arguments[n]) for n in names}
    values = {(names.index(n),): arguments[n] for n in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {n: arguments[n] for n in ("num_warps", "num_stages") if n in arguments}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def machine_code(program):
    import triton

    file = Path(program.metadata_group[next(n for n in program.metadata_group if n.endswith(".cubin"))])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, "-sass", file], check=True, capture_output=True, text=True).stdout


def _nhwc(*shape, dtype):
    return torch.empty(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


def _type(z):
    return POINTERS[z.dtype] if isinstance(z, torch.Tensor) else "i32"


def _described(z):
    return (z.shape, z.stride(), z.dtype) if isinstance(z, torch.Tensor) else z
