"""Products in TF32: their operands are rounded to nearest in the code for a GPU. Compiling needs no GPU."""

import pytest
from interpreter import needs_triton

EXACT, CUT = "cvt.rna.tf32.f32", ".tf32.tf32"


@needs_triton
@pytest.mark.parametrize(
    ("numbers", "precision", "rounded", "tf32"),
    [
        ("fp32", "tf32", False, True),
        ("fp32", "tf32", True, True),
        ("fp32", "ieee", False, False),
        ("bf16", "tf32", False, False),
    ],
)
def test_operands_of_products_in_tf32_are_rounded_unless_they_are_already(numbers, precision, rounded, tf32):
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from threepass.kernels.product_triton import product

    @triton.jit
    def kernel(x, y, z, PRECISION: tl.constexpr, ROUNDED: tl.constexpr):  # noqa: N803
        i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
        a, b = tl.load(x + 64 * i + j), tl.load(y + 64 * i + j)
        out = product(a, b, tl.zeros((64, 64), tl.float32), PRECISION, ROUNDED)
        tl.store(z + 64 * i + j, out)

    kernel.fn.__globals__.update(tl=tl, product=product)
    signature = {"x": f"*{numbers}", "y": f"*{numbers}", "z": "*fp32", "PRECISION": "constexpr", "ROUNDED": "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(3,): precision, (4,): rounded})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert (CUT in code) is tf32, "the product's own format"
    assert (EXACT in code) is (tf32 and not rounded)
