"""Functions fit a screen and take few arguments; what exceeds that is listed here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from modules import MODULES

from threepass import cli

ROOT = Path(__file__).parents[1]
MEMBERS = re.compile(r"members: \[(.*)\]")
LINES, PARAMETERS = 50, 6
PUBLIC = {  # signatures that users see: in the API reference, or the options of a command
    "cli.bench",
    "cli.compare",
    "cli.reproduce",
    "core.engine.three_pass",
    "core.gradient_loss.gradient_step",
    "models.vit",
    "step.loss",
    "step.ThreePass.__init__",
    "study.compare.compare",
    "train.data.batches.Batches.__init__",
    "train.loop.fit",
}
WITH_ARGUMENTS_OF = {  # an operation's own: the same computation in other operations, or a launcher of its kernel
    "kernels.batch_norm.triton_kernel.gated_moments",
    "kernels.batch_norm.triton_kernel.moments",
    "kernels.layer_norm._empty",
    "kernels.layer_norm._plain",
    "kernels.layer_norm._plain_bend",
    "rules.norm._BatchNorm.forward",
    "rules.norm._tap",
    "tape.inner_dropout._attention",
    "tape.inner_dropout._layer_by_layer",
}
OTHERS = {"compile.step.CompiledSteps.__call__"}
OPERATIONS = ("rule(", "custom_op(", "register_fake", "fusible(", "on_its_device", "triton.jit")


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for module, path in MODULES.items():
        yield from functions_in(module, ast.parse(path.read_text()))


def functions_in(name: str, tree: ast.AST) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those of classes have the name of the class, those inside functions that of the function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{name}.{node.name}", node
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        yield from functions_in(f"{name}.{node.name}" if named else name, node)


def is_decorated_by(node: ast.FunctionDef, *names: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in node.decorator_list for name in names)


def parameters(node: ast.FunctionDef) -> int:
    return sum(a.arg not in ("self", "cls") for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def test_functions_fit_a_screen():
    kernel = "triton.jit"
    long = {name for name, f in functions() if f.end_lineno - f.lineno >= LINES and not is_decorated_by(f, kernel)}
    assert long == set()


def test_functions_take_few_arguments():
    wide = {name for name, f in functions() if parameters(f) > PARAMETERS and not is_decorated_by(f, *OPERATIONS)}
    assert wide == PUBLIC | WITH_ARGUMENTS_OF | OTHERS


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_signatures_are_in_the_api_reference_or_commands(name):
    module, _, function = name.removesuffix(".__init__").rpartition(".")
    if module == "cli":
        assert function in {command.__name__ for command in cli.COMMANDS}
        return
    page = (ROOT / "docs" / "api.md").read_text()
    documented = {entry.rpartition(".")[2] for entry in re.findall(r"^::: ([\w.]+)", page, re.M)}
    documented |= {member for members in MEMBERS.findall(page) for member in members.split(", ")}
    assert function in documented
