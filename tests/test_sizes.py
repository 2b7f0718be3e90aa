"""Functions fit a screen and take few arguments; what exceeds that is listed here."""

import ast
from collections.abc import Iterator

from modules import MODULES

LINES, PARAMETERS = 50, 6
LONG = {"cli.reproduce", "study.compare.compare", "train.loop.fit"}  # with the options that users may give, described
WIDE = {  # besides rules, which have the signature of their function, and operations with their kernels
    "compile.capture.capture",
    "compile.dependencies._attributes",
    "compile.step.__call__",
    "kernels.batch_norm.triton_kernel.gated_moments",
    "kernels.batch_norm.triton_kernel.moments",
    "kernels.layer_norm._empty",
    "kernels.layer_norm._plain",
    "kernels.layer_norm._plain_bend",
    "rules.norm._tap",
    "rules.norm.forward",
}
WITH_FEW = ("compile", "kernels", "rules")
OPERATIONS = ("rule(", "custom_op(", "register_fake", "fusible(", "on_its_device", "triton.jit")


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{module}.{node.name}", node


def is_operation(node: ast.FunctionDef) -> bool:
    return any(name in ast.unparse(decorator) for decorator in node.decorator_list for name in OPERATIONS)


def parameters(node: ast.FunctionDef) -> int:
    return sum(a.arg not in ("self", "cls") for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def test_functions_fit_a_screen():
    long = {name for name, node in functions() if node.end_lineno - node.lineno >= LINES and not is_operation(node)}
    assert long <= LONG


def test_functions_take_few_arguments():
    few = [(name, node) for name, node in functions() if name.startswith(WITH_FEW) and not is_operation(node)]
    wide = {name for name, node in few if parameters(node) > PARAMETERS}
    assert wide <= WIDE
