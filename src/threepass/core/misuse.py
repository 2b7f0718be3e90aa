"""Warnings about training loops whose numbers are not what their authors expect."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import tree_leaves, tree_map
from ..errors import (
    AccumulationWarning,
    BatchDimensionWarning,
    LabelWarning,
    LossReductionWarning,
    MaskWarning,
    warn_caller,
)
from ..tape.inputs import is_float
from ..tape.state import random_state, set_random_state
from .options import Options
from .warn import warn_once

FAR = -1e4  # additive masks have this value or less at masked positions
SEQUENCES = (nn.RNNBase, nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder)
PER_STEP = (nn.Linear, nn.Embedding, nn.Dropout, nn.LayerNorm)  # do not mix or move dimensions 0 and 1


class AccumulationWatch:
    """Detects weight updates that use the gradients of several calls, by the version counters of one parameter."""

    def __init__(self) -> None:
        self.calls = 0  # whose gradients lie in p.grad
        self._after: tuple[int, int, int] | None = None
        self._has_warned = False

    def before_call(self, parameters: Iterable[nn.Parameter]) -> None:
        """Warns once, when weights have changed since calls that accumulated."""
        now, before = self._versions(parameters), self._after
        accumulated = self.calls
        self.calls = self.calls + 1 if now is not None and now == before else 1
        updated = before is not None and (now is None or now[0] != before[0])
        if updated and accumulated > 1 and not self._has_warned:
            self._has_warned = True
            _warn_of_accumulation(accumulated, "The update uses the sum of their gradients instead of the mean. ")

    def after_call(self, parameters: Iterable[nn.Parameter]) -> None:
        self._after = self._versions(parameters)

    @staticmethod
    def _versions(parameters: Iterable[nn.Parameter]) -> tuple[int, int, int] | None:
        p = _trained(parameters)
        if p is None:
            return None
        return (p._version, -1, -1) if p.grad is None else (p._version, id(p.grad), p.grad._version)


class BackwardWatch:
    """Detects weight updates that use the gradients of several losses, in loops that call `backward()` themselves."""

    def __init__(self) -> None:
        self.losses = 0  # whose gradients lie in p.grad
        self._version: int | None = None  # of a parameter, when the last of them was added
        self._has_warned = False

    def before_loss(self, parameters: Iterable[nn.Parameter]) -> None:
        """Warns once, when weights have changed since losses whose gradients accumulated."""
        p = _trained(parameters)
        updated = p is not None and self._version is not None and p._version != self._version
        if updated and self.losses > 1 and not self._has_warned:
            self._has_warned = True
            _warn_of_accumulation(self.losses)

    def follow(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Counts the loss when its backward pass runs."""
        p = _trained(parameters)
        assert p is not None

        def count(_: Tensor) -> None:
            accumulates = p._version == self._version and p.grad is not None and bool(p.grad.any())
            self.losses, self._version = self.losses + 1 if accumulates else 1, p._version

        if not self._has_warned:
            loss.register_hook(count)


def _trained(parameters: Iterable[nn.Parameter]) -> nn.Parameter | None:
    """The first parameter that is trained, if there is one. Inference tensors, which cannot be, have no version."""
    return next((p for p in parameters if p.requires_grad and not p.is_inference()), None)


def _warn_of_accumulation(calls: int, effect: str = "") -> None:
    warn_caller(
        f"the gradients of {calls} calls were accumulated into one update, but batch_size= was not given, so each call "
        f"was treated as a whole batch. {effect}With alpha=, the third pass is then weighted for a batch as small as "
        f"one call's. Pass batch_size=, the number of samples in all {calls} calls together",
        AccumulationWarning,
    )


def warn_of_sum(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], x: Any, y: Any, output: Any, loss: Tensor
) -> None:
    """Warns if the loss is a sum over the batch: it then doubles when every sample comes twice, and a mean does not."""
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.buffers()):
        return  # another call might move them
    leaves = tree_leaves(dict(x) if isinstance(x, Mapping) else x)
    samples = next(len(z) for z in leaves if isinstance(z, Tensor))

    def twice(z: Any) -> Any:
        return torch.cat([z, z]) if isinstance(z, Tensor) and z.dim() and len(z) == samples else z

    device = loss.device.type
    rng = random_state(device)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first call has said it
            doubled = float(loss_fn(tree_map(twice, output), tree_map(twice, y)))
    except Exception:  # losses of fixed batches, or of outputs that are not tensors
        return
    finally:
        set_random_state(rng, device)
    one = float(loss)
    if samples > 1 and one and abs(doubled / one - 2) < 1e-3:
        warn_once(
            model,
            "loss_fn is a sum over the batch, not a mean, so the third pass's gradient grows with the batch size "
            f'(with penalty="l2" it is {samples}^2 times as large for this batch). Use reduction="mean", or divide the '
            "loss by the number of samples",
            LossReductionWarning,
        )


def warn_of_masks(model: nn.Module, x: Any) -> None:
    """Warns if the loss is differentiated with respect to a floating-point mask that comes with tokens."""
    named = x.items() if isinstance(x, Mapping) else enumerate(x) if isinstance(x, tuple) else ()
    tensors = {name: z for name, z in named if isinstance(z, Tensor)}
    tokens = any(not z.is_floating_point() for z in tensors.values())
    if not tokens or not any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in model.modules()):
        return
    masks = [name for name, z in tensors.items() if z.is_floating_point() and _is_mask(name, z)]
    if masks:
        warn_once(
            model,
            f"x[{masks[0]!r}] is a floating-point mask. Every floating-point entry of x is treated as an input, so the "
            "loss is differentiated with respect to the mask. Convert it to bool or an integer dtype, or name the "
            'input: an entry of x, as in wrt="features", or the module whose output is the input, as in '
            'input_at="embeddings"',
            MaskWarning,
        )


def warn_of_labels(model: nn.Module, x: Any) -> None:
    """Warns if the loss is differentiated with respect to labels, which x contains if the model returns its loss."""
    for name, value in x.items() if isinstance(x, Mapping) else ():
        if _is_label(name) and any(map(is_float, tree_leaves(value))):
            warn_once(
                model,
                f"x[{name!r}] contains floating-point labels. Every floating-point tensor of x is treated as an input, "
                "so the loss is differentiated with respect to them. Name the input: an entry of x, as in "
                'wrt="pixel_values", or the module whose output is the input, as in input_at="embeddings"',
                LabelWarning,
            )


def _is_label(name: Any) -> bool:
    return "label" in str(name) or "target" in str(name)


def _is_mask(name: Any, z: Tensor) -> bool:
    if _is_label(name):
        return False
    return "mask" in str(name) or bool(((z == 0) | (z == 1) | (z <= FAR)).all())


def warn_of_samples_along_dimension_1(model: nn.Module, x: Any, y: Any) -> bool:
    """Warns if x is a batch of sequences whose dimension 1 is the batch, as for nn.LSTM without batch_first.

    It does, and returns True, if there are as many targets as dimension 1 has entries, or if the model begins with such
    a module. Checks only an x that is one tensor.
    """
    first, *others = tree_leaves(dict(x) if isinstance(x, Mapping) else x)
    if others or first.dim() != (3 if first.is_floating_point() else 2):
        return False  # not sequences of features or of tokens
    length, samples = first.shape[:2]
    by_targets = isinstance(y, Tensor) and y.dim() > 0 and len(y) == samples and length > 1
    is_mistaken = length != samples and (by_targets or _is_sequence_first(model))
    if is_mistaken:
        warn_once(
            model,
            f"x has shape {tuple(first.shape)}, and dimension 1 seems to be the batch dimension ({samples} samples). "
            "Dimension 0 is taken as the batch dimension, so the effective strength and the input loss are "
            f"{length / samples:.3g} times as large. Pass x with samples first: use batch_first=True, or transpose x "
            "in the model's forward",
            BatchDimensionWarning,
        )
    return is_mistaken


def warn_of_fewer_targets(model: nn.Module, x: Any, y: Any, output: Any, options: Options) -> None:
    """Warns if a penalty per sample counts rows of x that are not the samples, as the nodes of a batch of graphs."""
    if options.penalty != "l2" or (options.strength is None and options.reduction != "sample"):
        return  # with alpha, the gradient of the batch's loss is weighted as a whole
    rows = next(len(z) for z in tree_leaves(dict(x) if isinstance(x, Mapping) else x) if isinstance(z, Tensor))
    has_one_each = all(isinstance(z, Tensor) and z.dim() > 0 for z in (output, y)) and len(output) == len(y)
    if has_one_each and 0 < len(y) < rows:
        ratio = rows / len(y)
        warn_once(
            model,
            f"x has {rows} rows along dimension 0, but the model returned {len(y)}, one for each target, as for the "
            "nodes of a batch of graphs. Rows of x are treated as samples, so the penalty and the input loss are "
            f"{ratio:.3g} times those of a mean over the {len(y)} targets. Divide strength by {ratio:.3g}, or write "
            "the penalty yourself with threepass.gradient_step: docs/gradient-losses.md has an example",
            BatchDimensionWarning,
        )


def _is_sequence_first(model: nn.Module | None) -> bool:
    while isinstance(model, nn.Sequential):
        model = next((m for m in model if not isinstance(m, PER_STEP)), None)
    if not isinstance(model, SEQUENCES):
        return False
    return not next(m.batch_first for m in model.modules() if hasattr(m, "batch_first"))
