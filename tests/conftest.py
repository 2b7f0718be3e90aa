import functools
import os
import warnings

from processor import avoid_trapped_instructions

avoid_trapped_instructions()

# ruff: noqa: E402 -- torch reads the limits of its libraries when it is imported
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from threepass.tracing import is_for_compiler

with warnings.catch_warnings(), forward_ad.dual_level():  # the first dual tensor imports a module that warns
    warnings.simplefilter("ignore")
    forward_ad.make_dual(torch.ones(1), torch.ones(1))

settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("explore", deadline=None, suppress_health_check=list(HealthCheck), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture
def graph_only(monkeypatch):
    """Captured steps run their traced graph operation by operation: Inductor takes most of the time of a capture."""
    monkeypatch.setattr(
        "threepass.compile.inductor.compiled", lambda program, inputs: lambda values: program.graph(*values)
    )


@pytest.fixture(autouse=True)
def one_thread():
    """The nets here are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def traced_for_kernels(monkeypatch):
    """As on a GPU: in a trace with kernels, fusible formulas are one node each."""
    monkeypatch.setattr("threepass.kernels.fusible.runs_on", lambda device: True)


@pytest.fixture
def as_on_a_gpu(monkeypatch, traced_for_kernels):
    """A function: after its call, traced graphs have the operations of these modules' kernels, run in plain PyTorch.

    With `any_format` for tensors of every format and layout, float64 included.
    """

    def always(*args, **kwargs):
        return True

    def in_a_trace(condition, *args, **kwargs):
        return (is_for_compiler() or any(map(is_fake, args))) and condition(*args, **kwargs)

    def use(*modules, any_format=False):
        for module in modules:
            conditions = {"fits", "can_gate", "is_faster"} & vars(module).keys()
            assert conditions or "runs_on" in vars(module), f"{module.__name__} does not ask where kernels run"
            for name in conditions:
                condition = always if any_format else vars(module)[name]
                monkeypatch.setattr(module, name, functools.partial(in_a_trace, condition))
            if "runs_on" in vars(module):
                monkeypatch.setattr(module, "runs_on", always)

    return use


@pytest.fixture
def packs(monkeypatch):
    """As on a GPU: operations on many small tensors are one operation on all of them."""
    monkeypatch.setattr("threepass.numerics.packed.pays", lambda z: z.layout == torch.strided)
