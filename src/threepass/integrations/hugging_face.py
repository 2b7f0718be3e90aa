"""Hugging Face: a `Trainer` whose steps are three-pass steps.

    from threepass.integrations.hugging_face import ThreePassTrainer

    trainer = ThreePassTrainer(model=model, args=args, train_dataset=data, three_pass={"strength": 0.1})
    trainer.train()

Training calls `ThreePass.loss` and leaves the rest to the `Trainer`: accumulation, mixed precision, clipping,
DistributedDataParallel, checkpoints. The number of calls, on which schedules depend, is saved with the `TrainerState`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError(
        "ThreePassTrainer needs transformers and accelerate: pip install 'threepass[hugging-face]'"
    ) from error

from ..step import ThreePass

IGNORED = -100  # the label of positions that are not counted
STATE = "ThreePass"  # the name of a step's state in the `TrainerState`


class ThreePassTrainer(Trainer):
    """A `transformers.Trainer` with three-pass steps.

    Each loss is a mean over its micro-batch, and the mean of these means is minimised: where micro-batches have
    different numbers of tokens, that is not the mean over all tokens of the batch.

    Args:
        three_pass: options of `ThreePass`: alpha, strength, mode, input_at, every, compile, ...
        loss_fn: `loss_fn(output, batch)`, a scalar mean over the samples, also for evaluation; default: that of
            compute_loss_func or label_smoothing_factor, if given, and otherwise the loss that the model returns.
        args, kwargs: as for `transformers.Trainer`. `compute_loss_func` gets the number of items in the micro-batch.
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
        unknown = {"scaler", "process_group", "batch_size"} & set(self.three_pass)
        if unknown:
            raise ValueError(f"the Trainer sets {', '.join(sorted(unknown))} itself: leave it out of three_pass")
        if loss_fn is not None and (self.compute_loss_func is not None or self.label_smoother is not None):
            raise ValueError("pass only one of loss_fn, compute_loss_func and label_smoothing_factor")
        self.model_accepts_loss_kwargs = False  # each loss is a mean over its micro-batch, and the Trainer divides
        self.loss_is_scaled_for_ga = self.compute_loss_func is not None  # then it does not, in any version

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch; in training, `backward()` of it adds the gradients of three passes."""
        if model.training and torch.is_grad_enabled():
            loss, output = self._training_loss(model, inputs)
        elif self.loss_fn is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        else:
            output = model(**inputs)
            loss = self.loss_fn(output, inputs)
        return (loss, output) if return_outputs else loss

    def _training_loss(self, model: nn.Module, inputs: Any) -> tuple[Tensor, Any]:
        if self._step is None or self._step.model is not model:
            loss_fn = self.loss_fn or self._loss_of_labels()
            self._step = ThreePass(model, loss_fn, batch_size=self._batch_size(), **self.three_pass)
        step = self._step
        states: Any = self.state.stateful_callbacks  # a dict of plain values, which checkpoints contain
        step.load_state_dict(states.get(STATE, {}).get("attributes", {"calls": 0}))
        hidden = {"labels"} if isinstance(step.loss_fn, _LossOfLabels) else set()
        loss = step.loss({name: z for name, z in inputs.items() if name not in hidden}, inputs)
        states[STATE] = {"args": {}, "attributes": step.state_dict()}
        if self.compute_loss_func is not None:
            loss = loss / self.current_gradient_accumulation_steps
        return loss, step.result.output

    def _loss_of_labels(self) -> "_LossOfLabels | None":
        if self.compute_loss_func is not None:
            return _LossOfLabels(self.compute_loss_func, {}, True, getattr(self, "_loss_shifts_labels", False))
        if self.label_smoother is None:
            return None
        model = self.accelerator.unwrap_model(self.model)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
        is_causal = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return _LossOfLabels(self.label_smoother, {"shift_labels": is_causal}, False, is_causal)

    def _batch_size(self) -> int | None:
        """The samples of all micro-batches and ranks; None: those of the batch itself."""
        accumulated = self.args.gradient_accumulation_steps
        return None if accumulated == 1 else accumulated * self.args.train_batch_size * self.args.world_size


@dataclass(frozen=True)
class _LossOfLabels:
    """A loss of the `Trainer`'s, which computes it from the labels, as a mean over the items of a batch."""

    function: Callable[..., Tensor]
    options: Mapping[str, Any]
    is_counted: bool  # it divides by a number of items that it gets
    is_shifted: bool  # the first label of each sequence is not predicted

    def __call__(self, output: Any, batch: Any) -> Tensor:
        labels, more = batch.get("labels"), {}
        if self.is_counted:
            items = labels[..., 1:] if self.is_shifted and isinstance(labels, Tensor) else labels
            more["num_items_in_batch"] = items.ne(IGNORED).sum() if isinstance(items, Tensor) else None
        return self.function(output, labels, **self.options, **more)
