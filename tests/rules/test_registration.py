"""What a rule can be registered for: operations that pass 1 records; for others the error says what to type."""

import functools
import types

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function, wrap_torch_function

import threepass
from threepass.rules import table
from threepass.rules.linearity import is_affine
from threepass.rules.table import is_user_defined, name_of, registered, rule_for
from threepass.tape.intercept import python_body
from threepass.tape.record import Record

PYTHON_FUNCTIONS = {name: f for name, f in vars(F).items() if isinstance(f, types.FunctionType)}
MISH = torch._C._nn.mish


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, w, factor=1.0):
        return a * w * factor


@torch.library.custom_op("threepass_tests::registered", mutates_args=())
def registered_op(a: Tensor, w: Tensor, factor: float = 1.0) -> Tensor:
    return a * w * factor


def plain(a):
    return torch.sin(a)


def dispatching(a):
    return handle_torch_function(dispatching, (a,), a) if has_torch_function((a,)) else a.sin()


@wrap_torch_function(lambda a: (a,))
def wrapped(a):
    return a.sin()


class Net(nn.Module):
    def __init__(self, func):
        super().__init__()
        self.inner, self.func, self.head = nn.Linear(4, 4), func, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.func(self.inner(x)))


@pytest.fixture(autouse=True)
def _own_rules(monkeypatch):
    monkeypatch.setattr(table, "_RULES", dict(table._RULES))


def counting(used):
    def sine(u, a, *rest, **names):
        used.append(a)
        return threepass.Linearization(push=lambda t: t * a.cos(), pull=lambda r: r * a.cos())

    return sine


def recorded(call, *shape):
    tape = Record("cpu")
    z = tape.add_input(torch.randn(shape))
    with tape:
        call(z)
    return [op.func for op in tape.operations]


@pytest.mark.parametrize("func", [F.mish, F.relu, torch.norm, Tensor.split, F.max_pool2d, plain, Scale.forward])
def test_python_functions_are_refused(func):
    with pytest.raises(ValueError, match="which is a Python function: pass 1 records the operations that it calls"):
        threepass.rule(func)


@pytest.mark.parametrize(
    ("func", "operations"),
    [
        (F.mish, r"torch\._C\._nn\.mish, torch\._C\._nn\.mish_"),
        (F.softmax, r"torch\.Tensor\.softmax"),
        (F.fold, r"torch\._C\._nn\.col2im"),
        (Tensor.split, r"torch\._VF\.split, torch\._VF\.split_with_sizes"),
        (plain, r"torch\.sin"),
    ],
)
def test_the_error_names_the_operations_that_the_function_calls(func, operations):
    with pytest.raises(ValueError, match=rf"\(in its source: {operations}\)"):
        threepass.rule(func)


def test_without_source_the_error_says_where_to_look():
    with pytest.raises(ValueError, match=r"for those operations\. docs/add-a-rule\.md shows how to list"):
        threepass.rule(F.tanh)
    namespace: dict = {"__name__": "mine"}
    exec("def f(a): return a", namespace)
    with pytest.raises(ValueError, match=r"mine\.f, .* or make the function one operation"):
        threepass.rule(namespace["f"])


@pytest.mark.parametrize("name", PYTHON_FUNCTIONS)
def test_functions_whose_body_the_tape_runs_are_refused(name):
    assert python_body(PYTHON_FUNCTIONS[name]) is not None
    with pytest.raises(ValueError, match="Python function"):
        threepass.rule(PYTHON_FUNCTIONS[name])


@pytest.mark.parametrize(("operation", "func"), [(MISH, F.mish), (dispatching, dispatching), (wrapped, wrapped)])
def test_a_rule_for_what_is_recorded_is_used(operation, func):
    used: list[Tensor] = []
    threepass.rule(operation)(counting(used))
    threepass.three_pass(Net(func), F.cross_entropy, torch.randn(2, 4), torch.tensor([0, 1]))
    assert used
    assert recorded(func, 3) == [operation]


def test_python_functions_with_a_rule_of_this_package_are_recorded():
    calls = {
        "unflatten": (lambda a: a.unflatten(1, (2, 3)), (4, 6)),
        "einsum": (lambda a: torch.einsum("ij,kj->ik", a, a), (4, 6)),
        "linear": (lambda a: F.linear(a.transpose(0, 1), torch.ones(3, 6)), (4, 5, 6)),
    }
    for func in registered():
        if isinstance(func, types.FunctionType):
            call, shape = calls[name_of(func)]
            assert func in recorded(call, *shape)


@pytest.mark.parametrize(
    "func", ["mish", nn.Mish, nn.Mish(), [F.gelu], None, functools.partial(F.gelu, approximate="tanh")], ids=str
)
def test_what_is_no_operation_is_refused(func):
    with pytest.raises(TypeError, match="which is not an operation: it takes functions and methods of torch"):
        threepass.rule(func)


def test_a_rule_names_its_operation():
    with pytest.raises(TypeError, match=r"needs the operation that the rule is for: @threepass\.rule\(operation\)"):
        threepass.rule()

    with pytest.raises(ValueError, match=r"threepass\.rule\(operation\) got .*sine, which is a Python function"):

        @threepass.rule
        def sine(u, a):
            return None


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match=r'reads must be "a" \(.*\), "u" \(.*\) or "shapes" \(.*\), got \'output\''):
        threepass.rule(torch.erf, reads="output")
    for arity in (0, "two", None):
        with pytest.raises(ValueError, match=r"arity must be a positive integer .*, got"):
            threepass.rule(torch.erf, arity=arity)


@pytest.mark.parametrize("func", [Scale, Scale.apply, registered_op, torch.ops.threepass_tests.registered])
def test_a_rule_takes_the_arguments_of_its_operation(func):
    for accepted in (
        lambda u, a, w: None,
        lambda u, a, w, factor: None,
        lambda u, a, w, factor=1.0: None,
        lambda u, *args: None,
        lambda u, a, w, factor=1.0, *, active: None,
    ):
        threepass.rule(func)(accepted)
    for refused in (lambda u, a: None, lambda u, a, w, factor, b: None, lambda a: None):
        with pytest.raises(TypeError, match=r"cannot be called with the output and .*: \(u, a, w, factor\)"):
            threepass.rule(func)(refused)


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        return sum(args)


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(a, w):
        return a * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def test_a_rule_takes_the_arguments_of_other_forms_of_functions():
    threepass.rule(Several)(lambda u, a, b, c: None)
    threepass.rule(WithSetup)(lambda u, a, w: None)
    with pytest.raises(TypeError, match=r"arguments of WithSetup: \(u, a, w\)"):
        threepass.rule(WithSetup)(lambda u, a: None)


def test_a_rule_for_a_function_in_c_takes_the_output_and_an_argument():
    threepass.rule(torch.erf)(lambda u, a, *rest: None)
    with pytest.raises(TypeError, match=r"the rule <lambda>\(a\) cannot be called with .* erf: \(u, a, ...\)"):
        threepass.rule(torch.erf)(lambda a: None)


@pytest.mark.parametrize("func", registered(), ids=lambda f: f"{type(f).__name__} {name_of(f)}")
def test_the_flat_rules_are_those_of_the_listed_operations(func):
    assert rule_for(func).flat == (is_affine(func) and not is_user_defined(func))


def test_a_rule_of_a_users_operation_says_itself_that_it_is_flat():
    class relu(torch.autograd.Function):  # noqa: N801
        @staticmethod
        def forward(ctx, a):
            return a

    threepass.rule(relu)(lambda u, a: None)
    assert not rule_for(relu).flat
    threepass.rule(relu, flat=True)(lambda u, a: None)
    assert rule_for(relu).flat
