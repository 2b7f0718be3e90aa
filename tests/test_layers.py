"""Imports point one way: a module imports from its own layer or from lower ones, and modules form no cycle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from modules import MODULES, SOURCE

LAYERS = [  # the lowest first
    {"errors", "_torch_compat", "_version"},
    {"numerics"},
    {"kernels"},
    {"rules"},
    {"tape"},
    {"core"},
    {"compile"},
    {"step", "reference", "models", "init"},
    {"inspect", "integrations"},
    {"page"},
    {"train"},
    {"study", "bench"},
    {"cli"},
    {"__main__", ""},  # the package itself: its public names
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports(module: str, tree: ast.AST) -> Iterator[str]:
    """The modules of this package that a module imports, those imported inside functions included."""
    package = MODULES[module].parent.relative_to(SOURCE).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (m for n in node.names if (m := n.name.removeprefix("threepass.")) in MODULES and m != n.name)
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            origin = [*package[: len(package) + 1 - node.level], *(node.module or "").split(".")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "threepass":
            origin = (node.module or "").split(".")[1:]
        else:
            continue
        for alias in node.names:
            full = ".".join(filter(None, [*origin, alias.name]))
            yield full if full in MODULES else ".".join(filter(None, origin))


IMPORTS = {module: set(imports(module, ast.parse(path.read_text()))) for module, path in MODULES.items()}


def layer(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_has_a_layer():
    assert {layer(module) for module in MODULES} == set(LEVEL)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    assert [m for m in IMPORTS[module] if LEVEL[layer(m)] > LEVEL[layer(module)]] == []


def test_no_modules_import_each_other():
    try:
        list(TopologicalSorter(IMPORTS).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_imports_inside_functions_count():
    code = (
        "def f():\n    from ..errors import CaptureError\n    from . import programs\n    from ..core.engine import run"
    )
    assert list(imports("compile.step", ast.parse(code))) == ["errors", "compile.programs", "core.engine"]


def test_absolute_imports_count():
    code = "import json\nimport threepass.train.loop\nfrom threepass.train import steps"
    assert list(imports("step", ast.parse(code))) == ["train.loop", "train.steps"]


def test_tests_take_their_helpers_from_helper_modules():
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("test_"), f"{path.name} imports from {node.module}"
