"""`ThreePass`: three passes in a training loop, in place of the forward and `loss.backward()`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .compiled import CompiledSteps
from .engine import Result, run
from .options import Options
from .precision import round_stochastically
from .programs import check_compile


class ThreePass:
    """Adds three-pass gradients to `p.grad`.

        step = threepass.ThreePass(model, loss_fn, alpha=0.1)
        r = step(x, y)      # in place of loss = loss_fn(model(x), y); loss.backward()
        optimizer.step()

    The options are those of `three_pass`. alpha may be a function of the number of calls so far. every=k runs the third
    pass in every k-th call, the first among them; the others add back * backpropagation alone (back is alpha, or 1 with
    strength). Gradients go through autograd's own accumulation, so hooks on parameters fire as they do in `backward()`.

    compile=True captures the whole step, compiles it, and replays it as a CUDA graph on a GPU: the same numbers to
    rounding, faster. `r.grads` are then in the parameters' formats, may be the very tensors in `p.grad`, and on a GPU
    lie, as `r.input_grad` does, in memory that the next call overwrites: clone what you keep. Hooks on parameters fire;
    those on autograd's nodes do not. A step that cannot be captured runs eagerly, and a warning says why and what that
    costs; with compile="require" it is an error. `print(step.compiled)` lists the captured programs,
    `step.compiled.compile_seconds` and `.graph_bytes` say what they cost, `step.compiled.reset()` starts again.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        alpha: float | Callable[[int], float] = 0.1,
        reduction: str = "batch",
        mode: str = "paper",
        strength: float | None = None,
        input_at: str | None = None,
        batch_size: int | None = None,
        separate: bool = False,
        every: int = 1,
        compile: bool | str = False,
    ):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a positive whole number, got {every!r}")
        self.model, self.loss_fn, self.every = model, loss_fn, every
        self.alpha = alpha if callable(alpha) else lambda calls: alpha
        self.options: dict[str, Any] = {
            "reduction": reduction, "mode": mode, "strength": strength,
            "input_at": input_at, "batch_size": batch_size, "separate": separate,
        }  # fmt: skip
        self.calls = 0
        Options(self.alpha(0), **self.options)
        check_compile(compile)
        self.compiled = CompiledSteps(model, loss_fn, required=compile == "require") if compile else None

    def __call__(self, x: Any, y: Any) -> Result:
        options = Options(self.alpha(self.calls), **self.options)
        third = self.calls % self.every == 0

        def eager() -> Result:
            r = run(self.model, self.loss_fn, x, y, options, third=third)
            add_to_grad(self.model, r)
            return r

        r = eager() if self.compiled is None else self.compiled(x, y, options, third, eager)
        self.calls += 1
        return r


def add_to_grad(model: nn.Module, r: Result) -> None:
    """Adds r.grads to `p.grad` by autograd's own accumulation; half parameters' are rounded stochastically."""
    named = dict(model.named_parameters())
    parameters = [named[name] for name in r.grads]
    with torch.inference_mode(False), torch.enable_grad():
        grads = [
            g if g.dtype == p.dtype else round_stochastically(g, p.dtype)
            for p, g in zip(parameters, r.grads.values(), strict=True)
        ]
        torch.autograd.backward(parameters, grads)
