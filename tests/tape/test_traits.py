"""What is remembered from call to call about functions, shapes and geometries, and what an eager step patches."""

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import threepass
from threepass.rules import affine, table
from threepass.tape import state
from threepass.tape.intercept import rows_as_index_select
from threepass.tape.operation import without_contents
from threepass.tape.traits import _known, traits_of

X, Y = torch.randn(3, 4), torch.tensor([0, 1, 2])


def test_traits_follow_the_name_and_the_type():
    assert traits_of(torch.relu_).writes
    assert not traits_of(torch.relu).writes
    assert traits_of(Tensor.__setitem__).writes
    assert traits_of(torch.bernoulli).is_random
    assert traits_of(F.relu).body is not None
    assert traits_of(Tensor.shape.__get__).is_metadata
    assert traits_of(torch.relu) is traits_of(torch.relu)


def test_functions_of_users_are_not_remembered():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return 2 * a

    def mine_(a):
        return a

    assert traits_of(Twice.apply).is_user_defined
    assert traits_of(mine_).writes
    mine_.__name__ = "mine"
    assert not traits_of(mine_).writes
    assert mine_ not in _known
    assert Twice.apply not in _known


def test_a_rule_that_is_registered_between_two_calls_is_used(monkeypatch):
    monkeypatch.setattr(table, "_RULES", dict(table._RULES))
    model = nn.Sequential(nn.Linear(4, 4), nn.Softsign(), nn.Linear(4, 3))
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.1)
    step(X, Y)
    used = []

    @threepass.rule(torch.abs, Tensor.abs)
    def absolute(u, a):
        used.append(a)
        return threepass.Linearization(push=lambda t: t * a.sign(), pull=lambda r: r * a.sign())

    step(X, Y)
    assert len(used) == 1


def test_a_tensor_without_contents_has_the_format_of_its_own():
    z = torch.randn(2, 3)
    made = [without_contents(v) for v in (z, z.t(), z.double(), z[:, :2], torch.randn(2, 3))]
    assert [(m.shape, m.stride(), m.dtype) for m in made] == [
        (v.shape, v.stride(), v.dtype) for v in (z, z.t(), z.double(), z[:, :2], z)
    ]
    assert all(m.is_meta for m in made)
    assert made[0] is made[-1]


def test_the_geometry_of_a_convolution_follows_its_arguments():
    one = affine._geometry(torch.Size([3, 3]), (1, 1), "same", (1, 1), 1)
    assert one.padding == [1, 1]
    assert affine._geometry(torch.Size([5, 3]), (1, 1), "same", (1, 1), 1).padding == [2, 1]
    assert affine._geometry(torch.Size([3, 3]), (1, 1), "same", (2, 2), 1).padding == [2, 2]
    assert affine._geometry(torch.Size([3, 3]), 2, 0, 1, 4)[::5] == ([2, 2], 4)
    assert affine._geometry(torch.Size([2, 2]), (1, 1), "same", (1, 1), 1) is None


def test_a_mode_inside_the_model_is_shown_functions_of_nn_functional():
    seen = []

    class Log(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Logged(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            with Log():
                return self.last(F.relu(self.first(x)))

    checks = {name: check for name, check in vars(F).items() if name.startswith("has_torch_function")}
    model = Logged()
    r = threepass.three_pass(model, F.cross_entropy, X, Y)
    assert F.relu in seen
    assert set(r.grads) == {name for name, _ in model.named_parameters()}
    assert {name: getattr(F, name) for name in checks} == checks


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled):
    during = []

    class Asks(nn.Linear):
        def forward(self, x):
            during.append(gc.isenabled())
            return super().forward(x)

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        threepass.three_pass(Asks(4, 3), F.cross_entropy, X, Y)
        assert gc.isenabled() is enabled
        with pytest.raises(ValueError, match="no batch dimension"):
            threepass.three_pass(Asks(4, 3), F.cross_entropy, torch.tensor(1.0), Y)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert during == [False]


def test_names_of_parameters_are_those_of_torch():
    """Tied weights and modules have the first of their names, None has none."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)))
    model = nn.Sequential(inner, nn.ModuleDict({"again": inner, "tied": nn.Linear(2, 2)}), nn.PReLU())
    model[1]["tied"].weight = inner[0].weight
    model[0].register_module("none", None)
    model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))
    found, expected = state.named_parameters(model), dict(model.named_parameters())
    assert list(found) == list(expected)
    assert all(found[name] is p for name, p in expected.items())
    assert [(f"{name}.".lstrip("."), m) for name, m in model.named_modules()] == state.named_modules(model)


def test_buffers_of_all_formats_are_restored():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 3))
            self.register_buffer("a", torch.arange(6.0).view(2, 3).t())
            self.register_buffer("b", torch.tensor(3))
            self.register_buffer("c", torch.ones(2))
            self.register_buffer("d", torch.eye(2).to_sparse())
            self.register_buffer("e", None)

        def forward(self, x):
            for z in (self.a, self.b, self.c):
                z.add_(1)
            self.c = torch.zeros(5)
            raise KeyError("here")

    model = Fails()
    a, c = model.a, model.c
    with pytest.raises(KeyError):
        threepass.three_pass(model, F.cross_entropy, X, Y)
    assert model.a is a
    assert model.c is c
    assert torch.equal(model.a, torch.arange(6.0).view(2, 3).t())
    assert torch.equal(model.c, torch.ones(2))
    assert model.b == 3


def test_gradients_of_a_step_do_not_share_memory_with_grad():
    model = nn.Linear(4, 3)
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.1)
    r = step(X, Y)
    assert all(torch.equal(p.grad, r.grads[n]) for n, p in model.named_parameters())
    assert all(p.grad.data_ptr() != r.grads[n].data_ptr() for n, p in model.named_parameters())
    model.bias.grad = None
    again = step(X, Y)
    torch.testing.assert_close(model.weight.grad, 2 * again.grads["weight"])
    assert torch.equal(model.bias.grad, again.grads["bias"])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u):
        ctx.mark_dirty(u)
        return u.mul_(2)

    @staticmethod
    def backward(ctx, d):
        return 2 * d


class Doubled_(Doubled):  # noqa: N801
    """As the message of a `Doubled` asks for."""


def test_a_function_that_writes_in_place_is_known_by_its_name():
    class Net(nn.Linear):
        def forward(self, x):
            return self.function.apply(super().forward(x))

    torch.manual_seed(0)
    model, x, y = Net(4, 3).double(), torch.randn(5, 4).double(), torch.randint(3, (5,))
    model.function = Doubled
    with pytest.raises(threepass.UnsupportedError, match="rename it to Doubled_, or return a new tensor"):
        threepass.three_pass(model, F.cross_entropy, x, y)
    model.function = Doubled_
    found = threepass.three_pass(model, F.cross_entropy, x, y, alpha=0.3)
    plain = nn.Linear(4, 3).double()
    plain.load_state_dict(model.state_dict())
    expected = threepass.three_pass(plain, lambda out, y: F.cross_entropy(2 * out, y), x, y, alpha=0.3)
    assert torch.allclose(found.grads["weight"], expected.grads["weight"], rtol=1e-12)


def test_gathers_keep_their_rule_where_a_library_has_replaced_torch_index_select(monkeypatch):
    """PyTorch Geometric puts a Python function in its place."""
    original = torch.index_select

    def _new_index_select(z, dim, index):
        return original(z, dim, index)

    monkeypatch.setattr(torch, "index_select", _new_index_select)
    func, *_ = rows_as_index_select(Tensor.__getitem__, [torch.randn(3, 4), Y], (2, (), None))
    assert func is original
    assert table.rule_for(func) is not None
