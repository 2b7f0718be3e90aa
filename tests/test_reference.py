"""The engine against the paper's equations written out: float64, norm by norm, to 1e-10."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from threepass import reference, three_pass


def squared_error(output, y):
    return (output - y).square().sum() / 2 / len(output)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def same(got, want, name, zero=False):
    if zero:
        assert not got.any(), name
        assert not want.any(), name
    else:
        assert (got - want).norm() / want.norm() < 1e-10, name


def same_passes(model, x, y, want, alpha, reduction):
    """All that the two results share; pass 3 gives a bias exactly nothing, and every weight something."""
    got = three_pass(model, squared_error, x, y, alpha=alpha, reduction=reduction, separate=True)
    for name in ("output", "loss", "input_loss", "input_grad"):
        same(getattr(got, name), getattr(want, name), name)
    names = [name for name, _ in model.named_parameters()]
    assert set(got.grads) == set(got.backprop_grads) == set(got.third_grads) == set(names)
    mixed = want.grads(alpha)
    for name in names:
        bias = name.endswith("bias")
        same(got.backprop_grads[name], want.backprop_grads[name], name)
        same(got.third_grads[name], want.third_grads[name], name, zero=bias)
        same(got.grads[name], mixed[name], name, zero=bias and alpha == 0)


@pytest.mark.parametrize("alpha", [0, 0.1, 0.5, 1])
@pytest.mark.parametrize("reduction", ["batch", "sample"])
@pytest.mark.parametrize("sizes", [(3, 2), (5, 4, 3), (4, 7, 1), (6, 5, 4, 3, 2), (8, 8, 8, 8, 8, 8)])
def test_mlp(sizes, reduction, alpha):
    torch.manual_seed(len(sizes))
    layers = [layer for n, m in pairwise(sizes) for layer in (nn.Linear(n, m), nn.Sigmoid())]
    model = nn.Sequential(*layers).double()
    x, y = random(6, sizes[0]), torch.rand(6, sizes[-1], dtype=torch.float64)
    want = reference.mlp(dict(model.named_parameters()), x, y, reduction)
    same_passes(model, x, y, want, alpha, reduction)


def same_convolutions(c, ks, padding, stride, size, reduction, pieces):
    """Two convolutions in a row, so that the second one's gradient sees what the first sends on in pass 3."""
    torch.manual_seed(ks)
    options = {"padding": padding, "stride": stride, "bias": False}
    model = nn.Sequential(nn.Conv2d(c[0], c[1], ks, **options), nn.Conv2d(c[1], c[2], ks, **options)).double()
    x = random(3, c[0], *size)
    y = random(*model(x).shape)
    forward, backward_weight, backward_input, third_weight, third_signal = pieces

    def case(parameters, x, y):
        w1, w2 = parameters
        x1 = reference.pad(x, padding)
        x2 = reference.pad(forward(w1, x1), padding)
        output = forward(w2, x2)
        d2 = output - y
        d1 = reference.pad(backward_input(w2, d2, x2), -padding)
        dx = reference.pad(backward_input(w1, d1, x1), -padding)
        t1 = reference.pad(dx, padding)
        t2 = reference.pad(third_signal(w1, t1), padding)
        backprop = [backward_weight(x1, d1), backward_weight(x2, d2)]
        third = [third_weight(d1, t1), third_weight(d2, t2)]
        return reference.Case(output, d2.square().sum() / 2, dx, backprop, third)

    want = reference.over_cases(case, dict(model.named_parameters()), x, y, reduction)
    same_passes(model, x, y, want, 0.1, reduction)


@pytest.mark.parametrize("c", [(1, 1, 1), (2, 3, 4), (3, 1, 2)])
@pytest.mark.parametrize(("ks", "padding"), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (3, 4), (5, 2)])
def test_equations_1_to_5(c, ks, padding):
    pieces = (
        reference.conv_forward,
        reference.conv_backward_weight,
        lambda w, d, x: reference.conv_backward_input(w, d),
        reference.conv_third_weight,
        reference.conv_third_signal,
    )
    same_convolutions(c, ks, padding, 1, (9, 10), "batch", pieces)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("ks", "padding"), [(1, 0), (2, 1), (3, 0), (3, 1), (5, 2)])
def test_stride_by_unfold(ks, padding, stride):
    """The strides do not always divide the sizes: pixels past the kernel's last position get nothing."""
    pieces = (
        lambda w, x: reference.strided_forward(w, x, stride),
        lambda x, d: reference.strided_weight(d, x, ks, stride),
        lambda w, d, x: reference.strided_input(w, d, stride, x.shape[1:]),
        lambda d, t: reference.strided_weight(d, t, ks, stride),
        lambda w, t: reference.strided_forward(w, t, stride),
    )
    same_convolutions((2, 3, 4), ks, padding, stride, (19, 22), "sample", pieces)


@pytest.mark.parametrize("alpha", [0, 0.1, 1])
@pytest.mark.parametrize("reduction", ["batch", "sample"])
@pytest.mark.parametrize(("ks", "padding", "stride"), [(3, 1, 2), (3, 0, 3), (2, 1, 2), (5, 2, 1)])
def test_conv_net(ks, padding, stride, reduction, alpha):
    torch.manual_seed(ks)
    body = nn.Sequential(
        *(nn.Conv2d(2, 3, ks, padding=padding), nn.ReLU()),
        *(nn.Conv2d(3, 4, ks, stride=stride, padding=padding), nn.ReLU(), nn.Flatten()),
    ).double()
    x, y = random(4, 2, 8, 9), random(4, 5)
    model = nn.Sequential(*body, nn.Linear(body(x).shape[1], 5)).double()
    want = reference.conv_net(dict(model.named_parameters()), x, y, reduction, padding, stride)
    same_passes(model, x, y, want, alpha, reduction)
