"""What people do with models and steps besides training: export, compile, save, copy, pickle, other processes."""

import copy
import pickle

import pytest
import torch
import torch.multiprocessing as mp
from close import assert_close
from torch import nn
from torch.nn import functional as F

import threepass


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)).double()


def batch():
    torch.manual_seed(1)
    return torch.randn(8, 5).double(), torch.randint(0, 4, (8,))


def trained(model, compile=False):
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.1, mode="exact", compile=compile)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        step(*batch())
        optimizer.step()
    return step


def fresh_copy(model):
    """A model that has the same weights and never met a step."""
    other = net()
    other.load_state_dict(model.state_dict())
    return other


@pytest.fixture(scope="module")
def model():
    model = net()
    trained(model)
    return model.eval()


def test_the_state_dict_has_the_names_that_it_had(model):
    assert list(model.state_dict()) == list(net().state_dict())


@pytest.mark.parametrize("compile", [False, "require"])
def test_a_trained_model_has_no_hooks_and_its_own_attributes(compile, graph_only):
    model = net()
    trained(model, compile)
    assert repr(model) == repr(net())
    for ours, theirs in zip(model.modules(), net().modules(), strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert not ours._forward_hooks
        assert not ours._forward_pre_hooks
        assert not ours._backward_hooks


def test_export_gives_the_graph_of_an_untouched_model(model):
    x, _ = batch()
    ours, theirs = (torch.export.export(m, (x,)) for m in (model, fresh_copy(model).eval()))
    assert ours.graph_module.code == theirs.graph_module.code
    torch.testing.assert_close(ours.module()(x), model(x), rtol=1e-12, atol=0)


def test_torch_compile_of_a_trained_model(model):
    """By a backend that compiles nothing, with one graph, because a step leaves nothing on it that breaks it."""
    x, _ = batch()
    torch.compiler.reset()  # of what other tests of this process left
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=0)


def test_a_trained_model_can_be_copied_and_pickled(model):
    x, _ = batch()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


def step_of(model, **options):
    return threepass.ThreePass(model, F.cross_entropy, alpha=0.3, mode="exact", **options)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"])
def test_a_copied_step_has_its_own_model_and_goes_on(how):
    step, (x, y) = step_of(net(), every=2), batch()
    step(x, y)
    other = how(step)
    assert other.model is not step.model
    assert other.calls == 1
    step.model.zero_grad()
    other.model.zero_grad()
    mine, theirs = step(x, y), other(x, y)
    assert_close(theirs.grads, mine.grads, 0.0)
    added, expected = ({n: p.grad for n, p in s.model.named_parameters()} for s in (other, step))
    assert_close(added, expected, 0.0)
    assert step.calls == other.calls == 2


def of_gradients(output, g, y):
    return g.square().mean() + F.cross_entropy(output, y)


def test_a_copied_gradient_step():
    step, (x, y) = threepass.GradientStep(net(), of_gradients), batch()
    other = pickle.loads(pickle.dumps(step))
    assert_close(other(x, y).grads, step(x, y).grads, 0.0)


def test_a_step_that_was_compiled_is_copied_without_its_programs():
    step, (x, y) = step_of(net(), compile=True), batch()
    r = step(x, y)
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert len(step.compiled.programs) == 1
        assert len(other.compiled.programs) == 0
        assert other.compiled.max_programs == step.compiled.max_programs
        assert other.compiled.model is other.model
        assert other.calls == 1
    assert r.loss.isfinite()


def test_what_cannot_be_pickled_says_why():
    step = step_of(net())
    step.loss_fn = lambda output, y: F.cross_entropy(output, y)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(step)


def in_another_process(step, queue):
    torch.set_num_threads(1)
    queue.put({n: g.tolist() for n, g in step(*batch()).grads.items()})


def test_a_step_in_another_process():
    step = step_of(net())
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=in_another_process, args=(step, queue))
    process.start()
    found = queue.get(timeout=100)
    process.join()
    expected = step(*batch()).grads
    assert_close({n: torch.tensor(g, dtype=torch.float64) for n, g in found.items()}, expected, 1e-12, least=1e-15)
