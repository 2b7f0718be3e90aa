"""The user's code in a trace: what it is told, what is refused, and the line that is named."""

import contextlib
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from threepass.compile.user_code import culprit, in_trace
from threepass.errors import CaptureError
from threepass.tape.intercept import reporting_compilation


def traced(f, *inputs):
    def watched(*inputs):
        with in_trace():
            return f(*inputs)

    return make_fx(watched)(*inputs)


def line_of(text):
    """The number of the one line of this file that ends with a comment."""
    with open(__file__) as file:
        (number,) = [i for i, line in enumerate(file, 1) if line.rstrip().endswith("# " + text)]
    return number


def item(x):
    return x * x.sum().item()  # line: item


def branch(x):
    return x if x.sum() > 0 else -x  # line: branch


def equal(x):
    return x * float(torch.equal(x, x))  # line: equal


def tolist(x):
    return x * x.tolist()[0]  # line: tolist


def numpy(x):
    return x * float(np.asarray(x).sum())  # line: numpy


def tensor(x):
    return x * torch.tensor([x.sum(), 1.0])[0]  # line: tensor


def mask(x):
    return x[x > 0]  # line: mask


def nonzero(x):
    return x[torch.where(x > 0)]  # line: nonzero


def repeated(x):
    return torch.repeat_interleave(x, (x > 0).long())  # line: repeated


def classes(x):
    return F.one_hot((x > 0).long())  # line: classes


@pytest.mark.parametrize(
    "f", [item, branch, equal, tolist, numpy, tensor, mask, nonzero, repeated, classes], ids=lambda f: f.__name__
)
def test_what_depends_on_contents_is_refused_with_its_line(f):
    module = nn.Sequential(nn.Identity(), nn.Identity())
    module[1].forward = f
    with pytest.raises(CaptureError) as caught:
        traced(module, torch.randn(4))
    place = rf"{re.escape(__file__)}:{line_of('line: ' + f.__name__)}, in {f.__name__}: `return .*`: "
    read = "the shape of a result depends on the contents" if f in (mask, nonzero, repeated) else "a value is read out"
    assert re.match(place + read, str(caught.value)), caught.value
    assert "torch.where" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * F.one_hot((x > 0).long(), 3)[:, 0],
        lambda x: x * torch.tensor(x.detach().sum()) if x.requires_grad else x * x.new_tensor([1.0, 2.0]).sum(),
        lambda x: x[torch.tensor([2, 0])] + x[:2],
        lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 2, 1]), output_size=4),
        lambda x: x.masked_fill(x > 0, 0.0),
        lambda x: Normal(x, x.exp()).log_prob(x + 1),
        lambda x: x if torch.compiler.is_compiling() or x.sum() > 0 else -x,
    ],
    ids=["one_hot", "tensor", "index", "repeat", "masked_fill", "distribution", "asked"],
)
def test_what_does_not_is_traced(f):
    x = torch.tensor([1.0, -2.0, 3.0, 4.0], dtype=torch.float64)
    graph = traced(f, x)
    for z in (x, x.flip(0) - 0.5):
        torch.testing.assert_close(graph(z), f(z))


def test_contents_are_not_validated_in_a_trace():
    def f(x):
        torch._check_tensor_all(x < 5)
        return x + 1

    graph = traced(f, torch.randn(4))
    torch.testing.assert_close(graph(torch.zeros(4)), torch.ones(4))
    with pytest.raises(RuntimeError):
        f(torch.full((4,), 9.0))


def test_code_is_told_that_it_is_compiled_and_everything_is_as_before_behind_it():
    checks, validates = torch._check_tensor_all_with, Normal._validate_args
    inside, leave, answers = threading.Event(), threading.Event(), []

    def other():
        with reporting_compilation():
            inside.set()
            leave.wait()
            answers.append(torch.compiler.is_compiling())

    thread = threading.Thread(target=other)
    with contextlib.suppress(KeyError), reporting_compilation():
        assert torch.compiler.is_compiling()
        assert not torch.compiler.is_exporting()
        thread.start()
        inside.wait()
        raise KeyError
    assert torch.compiler.is_compiling()  # the other thread's trace still runs
    leave.set()
    thread.join()
    assert answers == [True]
    assert not torch.compiler.is_compiling()
    assert torch._check_tensor_all_with is checks
    assert Normal._validate_args is validates


def wrong(x):
    return x @ x[:, :1].expand(2, 2).T[:1]  # line: wrong


def test_other_errors_name_their_line_too():
    with pytest.raises(CaptureError) as caught:
        traced(lambda x: F.relu(wrong(x)), torch.randn(2, 3))
    assert f"test_user_code.py:{line_of('line: wrong')}, in wrong: `" in str(caught.value)
    assert "`: RuntimeError: " in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_outside_the_users_code_stays_as_it_is():
    ours = {"__name__": "threepass.core.engine", "in_trace": in_trace, "torch": torch}
    exec("def step():\n with in_trace():\n  torch.zeros(3).select(0, 5)", ours)
    with pytest.raises(IndexError):
        ours["step"]()


def test_the_culprit_is_the_innermost_line_of_the_users():
    try:
        nn.Sequential(nn.Identity(), nn.Linear(3, 3))(torch.zeros(2, 4))  # line: call
    except RuntimeError as error:
        place = culprit(error)
    assert place is not None
    assert (place.file, place.number) == (__file__, line_of("line: call"))
    assert culprit(RuntimeError("never raised")) is None
