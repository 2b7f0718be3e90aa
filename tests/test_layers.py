"""Imports point one way: a module imports from its own layer or from lower ones, and modules form no cycle."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from modules import MODULES, SOURCE

ROOT = Path(__file__).parents[1]
LAYERS = [  # the lowest first
    {"errors", "tracing", "_python_compat", "_torch_compat", "_version"},
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
            names = (n.name.partition(".") for n in node.names)
            yield from (module for root, _, module in names if root == "threepass")  # "" is the package itself
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


def imports_by_name(tree: ast.AST) -> list[str]:
    """Calls of `import_module` or `__import__` that could name a module of this package: their argument is unknown."""
    names = ("import_module", "__import__")
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).rpartition(".")[2] in names]
    return [ast.unparse(call) for call in calls if not isinstance(call.args[0], ast.Constant)]


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


def test_modules_are_imported_by_name_only_where_users_or_extras_name_them():
    by_name = {module: imports_by_name(ast.parse(path.read_text())) for module, path in MODULES.items()}
    assert {module: calls for module, calls in by_name.items() if calls} == {
        "models": ["importlib.import_module(path)"],  # of a user's own model
        "train.extras": ["import_module(module)"],  # of an optional dependency
    }


def test_imports_inside_functions_count():
    code = (
        "def f():\n    from ..errors import CaptureError\n    from . import programs\n    from ..core.engine import run"
    )
    assert list(imports("compile.step", ast.parse(code))) == ["errors", "compile.programs", "core.engine"]


def test_absolute_imports_count():
    code = "import json\nimport threepass\nimport threepass.train.loop\nfrom threepass.train import steps"
    assert list(imports("step", ast.parse(code))) == ["", "train.loop", "train.steps"]


def test_contributing_lists_the_layers():
    """In the order of `LAYERS`, the lowest first; private modules are not listed."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| ((?:`[\w.]+`(?:, )?)+) \|", page[page.index("### Layers") :], re.M)
    listed = [{name.removesuffix(".py") for name in re.findall(r"`([\w.]+)`", row)} for row in rows]
    assert listed == [public for names in LAYERS if (public := {n for n in names if n and not n.startswith("_")})]


def imports_of_tests(tree: ast.AST) -> list[str]:
    """The modules and names that begin with `test_` among those that a module imports."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return [name for name in names if any(part.startswith("test_") for part in name.split("."))]


def test_tests_take_their_helpers_from_helper_modules():
    for path in Path(__file__).parent.rglob("*.py"):
        assert not (names := imports_of_tests(ast.parse(path.read_text()))), f"{path.name} imports {names}"


@pytest.mark.parametrize(
    "code", ["import test_a", "import rules.test_a as a", "from test_a import b", "from rules import test_a"]
)
def test_every_form_of_importing_a_test_is_found(code):
    assert imports_of_tests(ast.parse(code))
    assert not imports_of_tests(ast.parse(code.replace("test_a", "a")))
