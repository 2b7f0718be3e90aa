"""Hugging Face: a `Trainer` whose steps are three-pass steps.

    from threepass.integrations.hugging_face import ThreePassTrainer

    trainer = ThreePassTrainer(model=model, args=args, train_dataset=data, three_pass={"strength": 0.1})
    trainer.train()

Training calls `ThreePass.loss` and leaves the rest to the `Trainer`: accumulation, mixed precision, clipping,
DistributedDataParallel, checkpoints. Evaluation is unchanged.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "ThreePassTrainer needs transformers and accelerate: pip install 'threepass[hugging-face]'"
    ) from error

from ..step import ThreePass


class ThreePassTrainer(Trainer):
    """A `transformers.Trainer` with three-pass steps.

    Args:
        three_pass: options of `ThreePass`: alpha, strength, mode, input_at, every, compile, ...
        loss_fn: `loss_fn(output, batch)`, a scalar mean over the samples; default: the loss that the model returns.
        args, kwargs: as for `transformers.Trainer`.
    """

    def __init__(
        self,
        *args: Any,
        three_pass: Mapping[str, Any] | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        **kwargs: Any,
    ):
        self.three_pass, self.loss_fn = dict(three_pass or {}), loss_fn
        self._step: ThreePass | None = None
        super().__init__(*args, **kwargs)
        if self.compute_loss_func is not None or self.label_smoother is not None:
            raise ValueError("compute_loss_func and label_smoothing_factor are not supported: pass loss_fn instead")
        unknown = {"scaler", "process_group", "batch_size"} & set(self.three_pass)
        if unknown:
            raise ValueError(f"the Trainer sets {', '.join(sorted(unknown))} itself: leave it out of three_pass")
        self.model_accepts_loss_kwargs = False  # each loss is a mean over its micro-batch, and the Trainer divides

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch; in training, `backward()` of it adds the gradients of three passes."""
        if not (model.training and torch.is_grad_enabled()):
            return super().compute_loss(model, inputs, return_outputs)
        if self._step is None or self._step.model is not model:
            self._step = ThreePass(model, self.loss_fn, batch_size=self._batch_size(), **self.three_pass)
        loss = self._step.loss(dict(inputs), inputs)
        assert self._step.result is not None
        return (loss, self._step.result.output) if return_outputs else loss

    def _batch_size(self) -> int | None:
        """The samples of all micro-batches and ranks; None: those of the batch itself."""
        accumulated = self.args.gradient_accumulation_steps
        return None if accumulated == 1 else accumulated * self.args.train_batch_size * self.args.world_size
