"""The page on adding a rule: its files, as a reader would write them, with the kernel in Triton's interpreter."""

import re
import runpy
import sys
import tempfile
from pathlib import Path

from interpreter import interpreted, needs_triton

PAGE = Path(__file__).parents[2] / "docs" / "add-a-rule.md"


def write_files(folder: Path) -> None:
    """The page's blocks that have a file's name, those of one name one after another."""
    for name, block in re.findall(r'```python title="([\w.]+)"\n(.*?)```', PAGE.read_text(), re.S):
        with (folder / name).open("a") as file:
            file.write(block + "\n\n")


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
