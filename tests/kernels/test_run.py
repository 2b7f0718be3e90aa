"""No Triton kernel without a test that runs it: the tests of `interpreter.RUN_BY` fail if they leave one out."""

import ast
from pathlib import Path

from interpreter import RUN_BY

import threepass.kernels

TESTS = Path(__file__).parents[1]


def test_every_module_with_triton_functions_has_a_test_that_runs_them():
    kernels = Path(threepass.kernels.__file__).parent
    found = [path for path in kernels.rglob("*.py") if any(map(_is_triton, ast.walk(ast.parse(path.read_text()))))]
    assert {".".join(path.relative_to(kernels).with_suffix("").parts) for path in found} == set(RUN_BY)


def test_those_tests_run_in_the_interpreter():
    for test in set(RUN_BY.values()):
        calls = [n for n in ast.walk(ast.parse(next(TESTS.rglob(f"{test}.py")).read_text())) if isinstance(n, ast.Call)]
        ours = [n.args[0] for n in calls if isinstance(n.func, ast.Name) and n.func.id == "interpreted"]
        assert [a.value for a in ours if isinstance(a, ast.Constant)] == [test]


def _is_triton(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(d).startswith("triton.jit") for d in decorators)
