"""Every operation in the list of affine and linear operations is called, and its derivatives are checked."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from threepass.rules.linearity import (
    AFFINE,
    IN_BOTH,
    LINEAR,
    OPERATIONS,
    PIECEWISE,
    is_affine,
    is_linear,
    is_linear_in_both,
    is_piecewise_linear,
)
from threepass.tape.record import Record

INDEX = torch.tensor([[0, 2, 1, 1, 0, 3], [3, 1, 0, 2, 2, 1]])
MASK = torch.tensor([True, False, True, True, False, True])


def set_item(a: Tensor) -> Tensor:
    out = a.clone()
    out[1] = 2 * a[0]
    return out


# For each operation the shape of its argument, and a call.
MATRIX, SEQUENCE, IMAGE, VOLUME = (4, 6), (2, 4, 6), (2, 4, 6, 6), (2, 2, 4, 6, 6)
CALLS = {
    "__getitem__": (MATRIX, lambda a: a[1:, [0, 2]]),
    "__setitem__": (MATRIX, set_item),
    "adaptive_avg_pool1d": (SEQUENCE, lambda a: F.adaptive_avg_pool1d(a, 4)),
    "adaptive_avg_pool2d": (IMAGE, lambda a: F.adaptive_avg_pool2d(a, 4)),
    "adaptive_avg_pool3d": (VOLUME, lambda a: F.adaptive_avg_pool3d(a, 3)),
    "adaptive_max_pool1d": (SEQUENCE, lambda a: F.adaptive_max_pool1d(a, 4)),
    "adaptive_max_pool2d": (IMAGE, lambda a: F.adaptive_max_pool2d(a, 4)),
    "adaptive_max_pool3d": (VOLUME, lambda a: F.adaptive_max_pool3d(a, 3)),
    "add": (MATRIX, lambda a: torch.add(a[0], a[1], alpha=3)),
    "amax": (MATRIX, lambda a: a.amax(1)),
    "amin": (MATRIX, lambda a: a.amin(1)),
    "avg_pool1d": (SEQUENCE, lambda a: F.avg_pool1d(a, 2)),
    "avg_pool2d": (IMAGE, lambda a: F.avg_pool2d(a, 2)),
    "avg_pool3d": (VOLUME, lambda a: F.avg_pool3d(a, 2)),
    "broadcast_to": (MATRIX, lambda a: a.broadcast_to(3, 4, 6)),
    "cat": (MATRIX, lambda a: torch.cat([a, a[:2]])),
    "chunk": (MATRIX, lambda a: a.chunk(2)),
    "clamp": (MATRIX, lambda a: a.clamp(-0.5, 0.5)),
    "clamp_max": (MATRIX, lambda a: a.clamp_max(0.5)),
    "clamp_min": (MATRIX, lambda a: a.clamp_min(0.5)),
    "clone": (MATRIX, torch.clone),
    "col2im": (SEQUENCE, lambda a: F.fold(a, (3, 4), (2, 2))),
    "concat": (MATRIX, lambda a: torch.concat([a, a[:2]])),
    "concatenate": (MATRIX, lambda a: torch.concatenate([a, a[:2]])),
    "constant_pad_nd": (MATRIX, lambda a: torch.constant_pad_nd(a, [1, 2], 3.0)),
    "contiguous": (MATRIX, lambda a: a.mT.contiguous()),
    "copy": (MATRIX, lambda a: torch.zeros_like(a).copy_(a)),
    "cumsum": (MATRIX, lambda a: a.cumsum(1)),
    "diagonal": (MATRIX, torch.diagonal),
    "double": (MATRIX, lambda a: a.double()),
    "expand": (MATRIX, lambda a: a.expand(3, 4, 6)),
    "expand_as": (MATRIX, lambda a: a.expand_as(torch.zeros(3, 4, 6))),
    "flatten": (SEQUENCE, torch.flatten),
    "flip": (MATRIX, lambda a: a.flip(1)),
    "float": (MATRIX, lambda a: a.float()),
    "gather": (MATRIX, lambda a: a.gather(0, INDEX)),
    "hardshrink": (MATRIX, F.hardshrink),
    "hardsigmoid": (MATRIX, F.hardsigmoid),
    "hardtanh": (MATRIX, F.hardtanh),
    "hstack": (MATRIX, lambda a: torch.hstack([a, a[:, :2]])),
    "index_add": (MATRIX, lambda a: a.index_add(1, INDEX[0], 2 * a)),
    "index_select": (MATRIX, lambda a: a.index_select(0, INDEX[0])),
    "leaky_relu": (MATRIX, F.leaky_relu),
    "masked_fill": (MATRIX, lambda a: a.masked_fill(MASK, 3.0)),
    "max_pool1d": (SEQUENCE, lambda a: F.max_pool1d(a, 2)),
    "max_pool2d": (IMAGE, lambda a: F.max_pool2d(a, 2)),
    "max_pool3d": (VOLUME, lambda a: F.max_pool3d(a, 2)),
    "maximum": (MATRIX, lambda a: torch.maximum(a[0], a[1])),
    "mean": (MATRIX, lambda a: a.mean(1)),
    "minimum": (MATRIX, lambda a: torch.minimum(a[0], a[1])),
    "moveaxis": (SEQUENCE, lambda a: a.moveaxis(0, 2)),
    "movedim": (SEQUENCE, lambda a: a.movedim(0, 2)),
    "narrow": (MATRIX, lambda a: a.narrow(1, 2, 3)),
    "neg": (MATRIX, torch.neg),
    "pad": (IMAGE, lambda a: F.pad(a, (1, 2, 1, 0), mode="reflect")),
    "permute": (SEQUENCE, lambda a: a.permute(2, 0, 1)),
    "pixel_shuffle": (IMAGE, lambda a: F.pixel_shuffle(a, 2)),
    "pixel_unshuffle": (IMAGE, lambda a: F.pixel_unshuffle(a, 2)),
    "ravel": (MATRIX, torch.ravel),
    "relu": (MATRIX, torch.relu),
    "relu6": (MATRIX, F.relu6),
    "repeat": (MATRIX, lambda a: a.repeat(2, 3)),
    "repeat_interleave": (MATRIX, lambda a: a.repeat_interleave(2, 1)),
    "reshape": (MATRIX, lambda a: a.reshape(3, 8)),
    "roll": (MATRIX, lambda a: a.roll(2, 1)),
    "rsub": (MATRIX, lambda a: torch.rsub(a[0], a[1], alpha=3)),
    "scatter_add": (MATRIX, lambda a: a.scatter_add(0, INDEX, 2 * a[:2])),
    "select": (MATRIX, lambda a: a.select(1, 2)),
    "softshrink": (MATRIX, F.softshrink),
    "split": (MATRIX, lambda a: a.split(3, 1)),
    "split_with_sizes": (MATRIX, lambda a: a.split_with_sizes([1, 5], 1)),
    "squeeze": (MATRIX, lambda a: a[:1].squeeze(0)),
    "stack": (MATRIX, lambda a: torch.stack([a, 2 * a])),
    "sub": (MATRIX, lambda a: torch.sub(a[0], a[1], alpha=3)),
    "sum": (MATRIX, lambda a: a.sum(1)),
    "swapaxes": (MATRIX, lambda a: a.swapaxes(0, 1)),
    "t": (MATRIX, torch.t),
    "tensor_split": (MATRIX, lambda a: a.tensor_split(4, 1)),
    "threshold": (MATRIX, lambda a: F.threshold(a, 0.1, 3.0)),
    "tile": (MATRIX, lambda a: a.tile(2, 3)),
    "to": (MATRIX, lambda a: a.to(torch.float32)),
    "transpose": (MATRIX, lambda a: a.transpose(0, 1)),
    "tril": (MATRIX, torch.tril),
    "triu": (MATRIX, torch.triu),
    "type_as": (MATRIX, lambda a: a.type_as(torch.zeros((), dtype=torch.float32))),
    "unbind": (MATRIX, torch.unbind),
    "unflatten": (MATRIX, lambda a: a.unflatten(1, (2, 3))),
    "unfold": (MATRIX, lambda a: a.unfold(1, 2, 1)),
    "unsqueeze": (MATRIX, lambda a: a.unsqueeze(1)),
    "upsample_bilinear2d": (IMAGE, lambda a: F.interpolate(a, scale_factor=2, mode="bilinear")),
    "upsample_nearest2d": (IMAGE, lambda a: F.interpolate(a, scale_factor=2)),
    "view": (MATRIX, lambda a: a.view(3, 8)),
    "view_as": (MATRIX, lambda a: a.view_as(torch.zeros(3, 8))),
    "vstack": (MATRIX, lambda a: torch.vstack([a, a[:2]])),
    "where": (MATRIX, lambda a: torch.where(MASK, a[0], 2 * a[1])),
}


def outputs(call, a: Tensor) -> list[Tensor]:
    out = call(a)
    return [out] if isinstance(out, Tensor) else list(out)


def has_constant_jacobian(call, shape) -> bool:
    """Whether the backward pass gives the same near a as at a; a double backward is not implemented for all."""
    torch.manual_seed(0)
    a, step = torch.randn((2, *shape), dtype=torch.float64)
    out = outputs(call, a)
    d = [torch.randn_like(u) for u in out]

    def pulled(a: Tensor) -> Tensor:
        a = a.clone().requires_grad_()
        return torch.autograd.grad(outputs(call, a), a, d)[0]

    return torch.equal(pulled(a), pulled(a + 1e-6 * step))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_jacobian_is_piecewise_constant(name):
    shape, call = CALLS[name]
    assert has_constant_jacobian(call, shape)


def tangents_and_outputs(name, count: int) -> tuple[tuple[Tensor, ...], list[list[Tensor]]]:
    """The outputs at `count` random arguments, and the tangents at the first of them along the last."""
    shape, call = CALLS[name]
    torch.manual_seed(0)
    given = torch.randn((count, *shape), dtype=torch.float64)
    _, tangents = torch.autograd.functional.jvp(lambda a: tuple(outputs(call, a)), given[0], given[-1])
    return tangents, [outputs(call, a) for a in given]


def with_flag(flag) -> list[str]:
    return [name for name, flags in OPERATIONS.items() if flag in flags]


@pytest.mark.parametrize("name", [*with_flag(PIECEWISE), *with_flag(IN_BOTH)])
def test_nothing_is_added(name):
    """u = J a, where J may be that of the piece."""
    tangents, (u,) = tangents_and_outputs(name, 1)
    torch.testing.assert_close(list(tangents), u)


@pytest.mark.parametrize("name", with_flag(PIECEWISE))
def test_linear_operations_are_their_own_tangents(name):
    """Of those that are linear on pieces alone, the tangent is another function: J is that of a, not of t."""
    tangents, (_, of_tangent) = tangents_and_outputs(name, 2)
    is_own = all(torch.allclose(t, u, rtol=1e-12) for t, u in zip(tangents, of_tangent, strict=True))
    assert is_own is (LINEAR in OPERATIONS[name])


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_tape_records_the_operation_by_that_name(name):
    shape, call = CALLS[name]
    tape = Record("cpu")
    z = tape.add_input(torch.randn(shape, dtype=torch.float32 if name == "double" else torch.float64))
    with tape:
        call(z)
    recorded = [op for op in tape.operations if op.name in (name, f"{name}_")]
    assert recorded
    assert all(is_affine(op.func) for op in recorded)


def test_the_checks_can_fail():
    assert not has_constant_jacobian(torch.sigmoid, MATRIX)
    assert not has_constant_jacobian(lambda a: a * a, MATRIX)


def test_what_is_affine_and_what_is_linear():
    a, b = torch.randn(3), torch.randn(3)
    assert is_affine(torch.flatten)
    assert is_affine(Tensor.add_)
    assert not is_affine(torch.mul)
    assert not is_affine(torch.sigmoid)
    assert is_piecewise_linear(torch.relu, [a], [0])
    assert not is_piecewise_linear(torch.clamp, [a, 0, 1], [0])
    assert is_piecewise_linear(torch.add, [a, b], [0, 1])
    assert not is_piecewise_linear(torch.add, [a, b], [0])  # b is a constant
    assert not is_piecewise_linear(torch.add, [a, 1.0], [0])
    assert not is_piecewise_linear(torch.cat, [a, b], [0])
    assert is_linear(torch.flatten)
    assert not is_linear(torch.relu)
    assert is_linear_in_both(torch.sub)
    assert not is_linear_in_both(torch.mul)
    assert AFFINE in PIECEWISE
    assert PIECEWISE in LINEAR
    assert AFFINE in IN_BOTH


def test_an_operation_of_somebodys_own_is_not_known_by_its_name():
    class relu(torch.autograd.Function):  # noqa: N801
        pass

    assert not is_affine(relu.apply)
    assert not is_linear(relu.apply)
