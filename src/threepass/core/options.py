"""The options of a step, and checks of its arguments."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..tape.state import named_parameters
from .penalty import Penalty, check_penalty
from .ranks import check_parallel
from .wrt import Wrt, as_wrt, check_wrt, inputs_of, leaves_of

# The default, which is the paper's. A number that a user gives is another object, even if it is equal, so that `is`
# tells the two apart. It is computed, because equal literals may be one object.
ALPHA = float("0.1")
NOT_BOTH = (
    "pass either strength or alpha, not both: strength=s is backpropagation + s * third pass; alpha=a is "
    "a * backpropagation + (1 - a) * third pass"
)


class InputOptions(Protocol):
    """The options that determine which tensors are the input of the net."""

    @property
    def input_at(self) -> str | None: ...
    @property
    def wrt(self) -> Wrt: ...


@dataclass(frozen=True)
class Options:
    """The options of `three_pass`, and values that follow from them.

    back, third  the weights of backpropagation and of the third pass in the gradients
    ranks        the number of processes over which the gradients will be averaged (`ranks.py`): each rank computes
                 `ranks` times its part of the whole batch's gradient
    part(n)      the batch size over which the mean loss l is taken, where this call has n samples
    scale(part)  the factor c in t_0 = c dl/dx
    """

    alpha: float = ALPHA
    reduction: str = "batch"
    mode: str = "paper"
    strength: float | None = None
    input_at: str | None = None
    batch_size: int | None = None
    separate: bool = False
    penalty: Penalty = "l2"
    wrt: Wrt = None
    ranks: int = 1

    def __post_init__(self) -> None:
        if not _is_number(self.alpha) or not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be a number in [0, 1] (1 is plain training), got {self.alpha!r}")
        if self.reduction not in ("batch", "sample"):
            raise ValueError(f'reduction must be "batch" or "sample", got {self.reduction!r}')
        if self.mode not in ("paper", "exact"):
            raise ValueError(f'mode must be "paper" or "exact", got {self.mode!r}')
        if self.strength is not None:
            if not _is_number(self.strength) or not 0 <= self.strength < math.inf:
                raise ValueError(f"strength must be a finite number >= 0, got {self.strength!r}")
            if self.alpha != ALPHA:
                raise ValueError(NOT_BOTH)
            if self.reduction != "batch":
                raise ValueError('with strength the reduction is always "sample": leave out reduction')
        check_penalty(self.penalty)
        object.__setattr__(self, "wrt", as_wrt(self.wrt))
        check_input_options(self.wrt, self.input_at)
        size = self.batch_size
        if size is not None and (not isinstance(size, Integral) or isinstance(size, bool) or size < 1):
            raise ValueError(f"batch_size must be a positive integer, got {size!r}")

    @property
    def back(self) -> float:
        return self.alpha if self.strength is None else 1.0

    @property
    def third(self) -> float:
        return 1 - self.alpha if self.strength is None else self.strength

    @property
    def has_third_term(self) -> bool:
        """Whether the third pass's gradients are a result of the step."""
        return self.third > 0 or self.separate

    @property
    def exact(self) -> bool:
        return self.mode == "exact"

    @property
    def depends_on_batch(self) -> bool:
        """Whether the weight of the third pass, relative to backpropagation's, depends on the size of the batch."""
        return self.strength is None and self.reduction == "batch" and self.third > 0

    def part(self, samples: int) -> float:
        return samples if self.batch_size is None else self.batch_size / self.ranks

    def scale(self, part: float) -> float:
        return (
            1 / self.ranks if self.strength is None and self.reduction == "batch" else part * 1.0
        )  # part may be a symbol


def check_weights(alpha: Any, strength: Any) -> None:
    """Raises an error if strength is given together with alpha, even an alpha that equals the default."""
    if strength is not None and alpha is not ALPHA:
        raise ValueError(NOT_BOTH)


def check_model(model: Any) -> dict[str, nn.Parameter]:
    """Raises an error if the model cannot be trained; returns its parameters by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_parallel(model)
    named = named_parameters(model)
    parameters = named.values()
    if any(map(is_lazy, parameters)):
        raise ValueError("the model has uninitialized lazy parameters: run model(x) once before")
    if named and next(iter(parameters)).device.type == "meta":  # a look at the first one costs a step no time
        raise ValueError(
            "the model is on the meta device, where parameters have no values: call model.to_empty(device=...) and "
            "load a state_dict or initialise the parameters"
        )
    if not any(p.requires_grad for p in parameters):
        raise ValueError("no parameter of the model requires grad: call requires_grad_() on those to be trained")
    if any(p.is_inference() for p in parameters):
        raise ValueError(
            "parameters were created under torch.inference_mode and cannot be trained: create the model outside of it"
        )
    return named


def check_roles(model: Any, loss_fn: Any) -> None:
    """Raises an error if the model is not a module, if loss_fn cannot be called, or if the two are swapped."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}: the model comes first")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise TypeError(f"loss_fn is the class {loss_fn.__name__}: pass an instance, {loss_fn.__name__}()")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the output and y, got {type(loss_fn).__name__}")
    swapped = isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters())
    if swapped and not any(True for _ in model.parameters()):
        raise TypeError(
            f"the model ({type(model).__name__}) has no parameters, but loss_fn has: the arguments seem to be swapped; "
            "the model comes first"
        )


def check_input_options(wrt: Wrt, input_at: str | None) -> None:
    if wrt is not None and input_at is not None:
        raise ValueError("give wrt (entries of x) or input_at (a module whose output is the input), not both")


def check_tensors(x: Any, wrt: Wrt) -> list[Tensor]:
    """The tensors of x, or with `wrt` those that it names; there is at least one, and none is empty."""
    if not isinstance(x, (Tensor, tuple, Mapping)):
        raise TypeError(f"x must be a tensor, or a tuple or dict of what the model takes, got {type(x).__name__}")
    tensors = [z for z in leaves_of(dict(x) if isinstance(x, Mapping) else x) if isinstance(z, Tensor)]
    if not tensors:
        raise TypeError("x contains no tensor")
    if any(z.is_complex() for z in tensors):
        raise TypeError("x is complex: the input loss is defined for real inputs; pass torch.view_as_real(x)")
    check_wrt(x, wrt)
    tensors = tensors if wrt is None else inputs_of(x, wrt)
    if any(z.numel() == 0 for z in tensors if z.is_floating_point()) or 0 in tensors[0].shape[:1]:
        raise ValueError(f"x is an empty batch, of shape {tuple(tensors[0].shape)}: there is nothing to learn from")
    return tensors


def check_x(x: Any, options: Options) -> int:
    """The number of samples, which lie along dimension 0 of the first tensor of x, or of the first that wrt names."""
    tensors = check_tensors(x, options.wrt)
    if tensors[0].dim() == 0:
        raise ValueError("x has no batch dimension: pass x.unsqueeze(0)")
    samples = tensors[0].shape[0]
    if options.batch_size is not None and options.batch_size < samples:
        raise ValueError(f"batch_size={options.batch_size} is less than the {samples} samples in x")
    return samples


def own_loss(output: Any, y: Any) -> Any:
    """`loss_fn=None`: the loss that the model returns, as `output.loss`, `output["loss"]` or first in a tuple."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].ndim == 0:
        loss = output[0]
    if loss is None:
        raise ValueError(
            f"loss_fn=None uses the loss that the model returns, but its output ({type(output).__name__}) contains "
            "none: pass a loss_fn, or add to x what the model needs to compute its loss (labels, for Hugging Face "
            "models)"
        )
    return loss


def check_loss(loss: Any, scalar: str = "the mean over the batch") -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f'loss_fn must return a scalar, {scalar}, got shape {tuple(loss.shape)}: use reduction="mean"')
    if not loss.is_floating_point():
        raise TypeError(f"loss_fn must return a floating-point tensor, got {loss.dtype}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
