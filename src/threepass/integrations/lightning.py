"""Lightning: a callback that turns the training steps of a LightningModule into three-pass steps.

    from threepass.integrations.lightning import ThreePassCallback

    trainer = lightning.Trainer(callbacks=[ThreePassCallback(strength=0.1)])
    trainer.fit(module, data)

The module stays as it is: its `training_step` is run as the forward pass, from the batch to the loss that it returns,
and the `backward()` of automatic optimization then adds the gradients of three passes. Floating-point tensors of the
batch are the inputs; where there are none, the output of the first embedding.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

try:
    import lightning
except ImportError as error:
    raise ImportError("ThreePassCallback needs lightning: pip install 'threepass[lightning]'") from error

from ..step import ThreePass


class ThreePassCallback(lightning.Callback):
    """Three-pass training steps for a LightningModule with automatic optimization.

    options: those of `ThreePass`, as alpha, strength, mode, input_at, batch_size and every. With
    accumulate_grad_batches, batch_size is the size of the whole batch.
    """

    def __init__(self, **options: Any):
        unknown = {"scaler", "compile"} & set(options)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: not supported by ThreePassCallback")
        self.options = options
        self._step: ThreePass | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "ThreePassCallback needs automatic optimization; with manual optimization, call a ThreePass in "
                "training_step in place of the forward and self.manual_backward"
            )
        wrapped = _TrainingStep(pl_module, pl_module.training_step)
        step = self._step = ThreePass(wrapped, _loss_of, **self.options)

        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            wrapped.rest = args, kwargs
            x = wrapped.take(batch)
            loss = step.loss(x, None)
            assert step.result is not None
            output = step.result.output
            return {**output, "loss": loss} if isinstance(output, Mapping) else loss

        pl_module.training_step = training_step

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.__dict__.pop("training_step", None)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._step is None else dict(self._step.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._step is not None and state_dict:
            self._step.load_state_dict(state_dict)


class _TrainingStep(nn.Module):
    """A module whose forward is the `training_step` of a LightningModule, on the batch of the current step."""

    def __init__(self, module: nn.Module, training_step: Any):
        super().__init__()
        self.module, self.training_step = module, training_step
        self.rest: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.kind: type = tuple

    def take(self, batch: Any) -> Any:
        """The batch as `ThreePass` takes it."""
        self.kind = type(batch)
        return tuple(batch) if isinstance(batch, list) else batch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch: Any = args[0] if issubclass(self.kind, Tensor) else kwargs if kwargs else args
        if not isinstance(batch, (Tensor, self.kind)):
            batch = self.kind(batch) if self.kind in (list, dict) else self.kind(*batch)
        more, named = self.rest
        return self.training_step(batch, *more, **named)


def _loss_of(output: Any, y: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if loss is None:
        raise ValueError("training_step returned None: skipping a step is not supported by ThreePassCallback")
    return loss
