"""The page on adding a rule: its files, as a reader would write them, with the kernel in Triton's interpreter."""

import re
import runpy
import sys
import tempfile
from pathlib import Path

import torch
from interpreter import interpreted, needs_triton
from rule_properties import (
    check_curve_is_the_derivative_of_the_jacobian,
    check_pull_is_its_transpose,
    check_push_is_the_jacobian,
    made,
    r,
)
from torch.nn import functional as F

from threepass.rules import table

PAGE = Path(__file__).parents[2] / "docs" / "add-a-rule.md"


def write_files(folder: Path) -> None:
    """The page's blocks that have a file's name, those of one name one after another."""
    for name, block in re.findall(r'```python title="([\w.]+)"\n(.*?)```', PAGE.read_text(), re.S):
        with (folder / name).open("a") as file:
            file.write(block + "\n\n")


def test_the_rule_with_a_bend_fits_the_grid(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "_RULES", dict(table._RULES))
    write_files(tmp_path)
    runpy.run_path(str(tmp_path / "softplus.py"))
    call = F.softplus, (r(4, 5),)
    m = made(*call)[1]
    assert m.bend is not None
    check_push_is_the_jacobian(*call)
    check_pull_is_its_transpose(*call)
    check_curve_is_the_derivative_of_the_jacobian(*call)
    error, (d,) = torch.randn(2, 1, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(m.bend([error[0]], [d], [None]), m.bend([error[0]], [None], [d]))


@needs_triton
def test_softplus_eager_and_compiled_and_with_its_kernel():
    interpreted("test_add_a_rule", "check_softplus")


def check_softplus() -> None:
    """Runs under TRITON_INTERPRET=1."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        sys.path.insert(0, folder)
        import softplus_kernel

        launch, launched = softplus_kernel.launch, []
        softplus_kernel.launch = lambda *args: launched.append(len(args)) or launch(*args)
        runpy.run_path(f"{folder}/check_softplus.py")
        assert launched
