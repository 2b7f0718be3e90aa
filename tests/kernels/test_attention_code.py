"""Attention's kernels as machine code for sm_90: no uniform register is read that was not written before.

ptxas computes the shared-memory addresses of a tensor core's operands in uniform registers (UR0, UR1, ...), and some of
its versions forget to write one: `kernels/attention/triton_kernel.py` says when. Compiling needs no GPU.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from interpreter import needs_triton

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)\s+(?P<operands>.*?)\s*;")
FORMATS = {torch.float16: "fp16", torch.float32: "fp32"}
KERNELS = ("_tangent_kernel", "_bend_tile_kernel", "_bend_rows_kernel", "_bend_columns_kernel")
OPTIONS = ("num_warps", "num_stages")


def unwritten(code: str) -> list[str]:
    """The instructions that name a uniform register which no instruction above them writes."""
    written: set[int] = set()
    found = []
    for line in code.splitlines():
        if not (match := INSTRUCTION.match(line)):
            continue
        operands = re.sub(r"gdesc\[UR\d+\]", "", match["operands"])  # of its four registers two may be unused
        target = re.match(r"UR(\d+)(?:,|$)", operands)
        read = {int(z) for z in re.findall(r"\bUR(\d+)", operands[target.end() :] if target else operands)}
        if read - written:
            found.append(line.strip())
        if target:
            pair = re.search(r"\.(64|WIDE)", match["name"])
            written |= {int(target[1]), int(target[1]) + 1} if pair else {int(target[1])}
    return found


def test_unwritten_registers_are_found():
    lines = ["ULDC.64 UR4, c[0x0][0x248]", "UIADD3 UR6, UP0, UR5, 0x40, URZ", "@P0 UIADD3.X UR7, UR8, UR6, URZ, UP0"]
    assert unwritten("\n".join(f"  /*00{i}0*/  {line} ;" for i, line in enumerate(lines))) == [
        f"/*0020*/  {lines[2]} ;"
    ]


class Recorder:
    """Stands for a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel, launches: list):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def machine_code(kernel, args, kwargs, path: Path) -> str:
    """What the launch would run on an H100: its arguments have the properties that Triton compiles for."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [p.name for p in kernel.params]
    values = dict(zip(names, args, strict=False)) | {k: z for k, z in kwargs.items() if k not in OPTIONS}
    signature, constants, attributes = {}, {}, {}
    for i, p in enumerate(kernel.params):
        z = values[p.name]
        if p.is_constexpr:
            signature[p.name], constants[i,] = "constexpr", z
            continue
        size = z.data_ptr() if isinstance(z, torch.Tensor) else z
        signature[p.name] = (
            f"*{FORMATS[z.dtype]}" if isinstance(z, torch.Tensor) else "fp32" if p.name == "scale" else "i32"
        )
        if p.name != "scale" and size % 16 == 0:
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {k: kwargs[k] for k in OPTIONS}
    path.write_bytes(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"])
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return subprocess.run([disassembler, "-c", path], check=True, capture_output=True, text=True).stdout


@needs_triton
@pytest.mark.parametrize(("size", "present"), [((197, 77, 40, 24), "qr"), ((50, 50, 64, 32), "qkvr")], ids=str)
def test_kernels_read_no_register_that_was_not_written(monkeypatch, tmp_path, size, present):
    from threepass.kernels.attention import triton_kernel as attention

    launches: list = []
    for name in KERNELS:
        monkeypatch.setattr(attention, name, Recorder(getattr(attention, name), launches))
    queries, keys, n, w = size
    shapes = {"q": (queries, n), "k": (keys, n), "v": (keys, w), "r": (queries, w)}
    q, k, v, d = (torch.zeros(2, 3, *shapes[z], dtype=torch.float16) for z in "qkvr")
    *t, r = (torch.zeros(2, rows, 3, width, dtype=torch.float16).transpose(1, 2) if z in present else None
             for z, (rows, width) in shapes.items())  # fmt: skip
    attention.launch_tangent(q, k, v, *t, 0.2, False, "tf32", True)
    attention.launch_bend(q, k, v, *t, d, r, 0.2, False, "tf32", True)
    assert 0 < len(launches) <= (2 if max(queries, keys) <= attention.TILE else 3)
    for launch in launches:
        code = machine_code(*launch, tmp_path / "kernel.cubin")
        assert "HGMMA" in code
        assert not unwritten(code), launch[0].__name__
