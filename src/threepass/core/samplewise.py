"""Piecewise linear nets with one output a sample: R{d} is d times a number for each sample, so pass 4 is not needed.

Where no operation has a second derivative, R{d} obeys the same recursion as d. At the output it starts as e, and d as
1, because the value is output.sum(). If every operation also treats the samples along dimension 0 each on its own, then
R{d}_i = e_i d_i everywhere, and

    dL/dw = sum_i d_i (x) t_i + R{d}_i (x) a_i = sum_i d_i (x) (t_i + e_i a_i).

One product serves both terms: four units in place of six. Discriminators with rectifiers and without norms are such
nets.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..rules.linearity import is_affine, is_linear_in_both
from ..rules.table import is_user_defined
from ..tape.operation import Operation
from ..tape.record import Record
from .plan import MixForm, Plan, Terms

# Operations that may treat samples alone. `rules/linearity.py` lists which operations are affine; products are not in
# its list, and are affine if one of their factors is a constant or a weight.
# fmt: off
ELEMENTWISE = {"add", "clone", "contiguous", "div", "leaky_relu", "mul", "neg", "relu", "sub"}
LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
POOLS = {f"{adaptive}{kind}_pool{n}d" for adaptive in ("", "adaptive_") for kind in ("avg", "max") for n in (1, 2, 3)}
RESHAPES = {"flatten", "reshape", "squeeze", "unflatten", "unsqueeze", "view"}
RESAMPLINGS = {"upsample_bilinear2d", "upsample_nearest2d"}
PRODUCTS = {"div", "mul"} | LAYERS
# fmt: on


def is_samplewise(tape: Record, output: Any) -> bool:
    """Whether a tape that ends with output.sum() is affine, and treats each sample on its own."""
    if not isinstance(output, Tensor) or output.dim() == 0 or tape.half or tape.problems:
        return False
    *operations, _ = tape.operations
    if not all(_is_affine(op) and _name(op) in _TESTS and len(op.outputs) == 1 for op in operations):
        return False
    samples = output.shape[0]
    inputs = [(given.source.requires_grad, given.meta.shape) for given in tape.inputs]
    return (
        output.numel() == samples
        and all(not trained and shape[:1] == (samples,) for trained, shape in inputs)
        and all(_has_samples(op, samples) and _TESTS[_name(op)](op) for op in operations)
    )


def samplewise_plan(plan: Plan, e: Tensor) -> Plan:
    """The plan in which d is multiplied by t + e a; e: the derivative of the loss at the output."""
    return replace(
        plan,
        terms=Terms.MIXED_PRODUCT,
        mix_form=MixForm.PER_SAMPLE,
        exact=False,
        sample_weights=e.reshape(-1),
    )


def _name(op: Operation) -> str:
    return op.name.removesuffix("_")


def _is_affine(op: Operation) -> bool:
    return is_affine(op.func) or (_name(op) in PRODUCTS and not is_user_defined(op.func))


def _has_samples(op: Operation, samples: int) -> bool:
    """Whether dimension 0 of the activations may be the samples, and weights have a fast rule."""
    shapes = [op.outputs[0].shape, *(z.shape for _, z in op.active)]
    return all(shape[:1] == (samples,) for shape in shapes) and (not op.weights or op.linearize() is not None)


def _elementwise(op: Operation) -> bool:
    alone = len(op.active) == 1 and op.active[0][0] == 0
    return all(z.shape == op.outputs[0].shape for _, z in op.active) and (alone or is_linear_in_both(op.func))


def _layer(op: Operation) -> bool:
    """Of one activation; there is no fast rule for a convolution of one sample without a batch dimension."""
    is_batch = len(op.active[0][1].shape) > 1
    return [i for i, _ in op.active] == [0] and is_batch and op.linearize() is not None


def _pool(op: Operation) -> bool:
    return len(op.active[0][1].shape) == int(_name(op)[-2]) + 2


def _any(op: Operation) -> bool:
    return True


_TESTS: dict[str, Callable[[Operation], bool]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise), **dict.fromkeys(LAYERS, _layer), **dict.fromkeys(POOLS, _pool),
    **dict.fromkeys(RESHAPES | RESAMPLINGS, _any),
}  # fmt: skip
