"""Lightning: a callback that turns the training steps of a LightningModule into three-pass steps.

    from threepass.integrations.lightning import ThreePassCallback

    trainer = lightning.Trainer(callbacks=[ThreePassCallback(strength=0.1)])
    trainer.fit(module, data)

The module stays as it is: its `training_step` is run as the forward pass, from the batch to the loss that it returns,
and the `backward()` of automatic optimization then adds the gradients of three passes. Floating-point tensors of the
batch are the inputs; where there are none, the output of the first embedding.

With compile=True, `training_step` runs while a program is captured, and later steps run the program in its place. The
values that it passes to `self.log` are outputs of the program, and are logged after every step. A `training_step` that
reads batch_idx or the trainer (`self.current_epoch`, say) is not captured, because the program would keep their values.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from numbers import Number
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

try:
    import lightning
except ImportError as error:
    raise ImportError("ThreePassCallback needs lightning: pip install 'threepass[lightning]'") from error

from ..errors import CaptureError, UncompiledWarning, warn_caller
from ..step import ThreePass


class ThreePassCallback(lightning.Callback):
    """Three-pass training steps for a LightningModule with automatic optimization.

    `callback.step` is the `ThreePass` of the fit.

    Args:
        options: those of `ThreePass`: alpha, strength, mode, input_at, batch_size, every, compile, ... With
            accumulate_grad_batches, batch_size is the size of the whole batch.
    """

    def __init__(self, **options: Any):
        if "scaler" in options:
            raise ValueError('the Trainer scales the loss itself (precision="16-mixed"): leave scaler out')
        self.options = options
        self.step: ThreePass | None = None
        self._state: dict[str, Any] = {}  # of a checkpoint
        self._own: dict[str, Any] | None = None  # the attribute that is replaced, where the module itself has it

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "ThreePassCallback needs automatic optimization; with manual optimization, call a ThreePass in "
                "training_step in place of the forward and self.manual_backward"
            )
        self._state = self.state_dict()  # of an earlier fit: the trainer's counters continue too
        if pl_module._compiler_ctx is not None and not self.options.get("compile"):
            warn_caller(
                "the module was compiled by torch.compile, which three-pass steps do not use: they run the original "
                "module eagerly. ThreePassCallback(..., compile=True) compiles the whole step",
                UncompiledWarning,
            )
        forward = _TrainingStep(pl_module, pl_module.training_step)
        step = self.step = ThreePass(forward, _loss_of, **self.options)
        self.load_state_dict(self._state)

        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            forward.context.arguments = args, kwargs
            with forward.context.without_trainer() if step.compiled else contextlib.nullcontext():
                loss = step.loss(forward.take(batch), None)
            output, logged = step.result.output
            forward.context.log(logged)
            return {**output, "loss": loss} if isinstance(output, Mapping) else loss

        self._own = {name: f for name, f in vars(pl_module).items() if name == "training_step"}
        pl_module.training_step = training_step

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._own is not None:
            vars(pl_module).pop("training_step", None)
            vars(pl_module).update(self._own)
            self._own = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # which Lightning leaves out then

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state if self.step is None else self.step.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict
        if self.step is not None and state_dict:
            self.step.load_state_dict(state_dict)


class _TrainingStep(nn.Module):
    """A module whose forward is the `training_step` of a LightningModule, on the batch of the current step.

    Returns what that returns, and what it logs.
    """

    def __init__(self, module: nn.Module, training_step: Any):
        super().__init__()
        self.module, self.context = module, _Context(module)
        self.is_method = getattr(training_step, "__self__", None) is module
        self.training_step = training_step.__func__ if self.is_method else training_step
        self.kind: type = tuple

    def take(self, batch: Any) -> Any:
        """The batch as `ThreePass` takes it."""
        self.kind = type(batch)
        return tuple(batch) if isinstance(batch, list) else batch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch: Any = args[0] if issubclass(self.kind, Tensor) else kwargs if kwargs else args
        if not isinstance(batch, (Tensor, self.kind)):
            batch = self.kind(batch) if self.kind in (list, dict) else self.kind(*batch)
        with self.context.of_step() as (more, named, logged):
            first = (self.module, batch) if self.is_method else (batch,)
            return self.training_step(*first, *more, **named), logged


class _Context:
    """What a `training_step` reads and writes besides tensors: its further arguments, the trainer, and logs.

    An object with slots, so that it is no part of what a captured program depends on. In a trace the arguments and the
    trainer are objects that refuse to be read.
    """

    __slots__ = ("arguments", "logs", "module", "trainers")

    def __init__(self, module: nn.Module):
        self.module: Any = module
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.trainers: list[tuple[dict[str, Any], Any]] = []  # attributes of modules, and the trainer among them
        self.logs: list[tuple[Any, ...]] = []  # arguments of `self.log` without the value

    @contextlib.contextmanager
    def without_trainer(self) -> Iterator[None]:
        """The modules without their trainer, whose counters change at every step."""
        modules = [m for m in self.module.modules() if isinstance(m, lightning.LightningModule)]
        self.trainers = [(vars(m), vars(m)["_trainer"]) for m in modules]
        with _set("_trainer", [(fields, None) for fields, _ in self.trainers]):
            yield

    @contextlib.contextmanager
    def of_step(self) -> Iterator[tuple[Any, dict[str, Any], list[tuple[int, Any]]]]:
        """Further arguments of a `training_step`, and a list for what it logs: (place in `logs`, value)."""
        logged: list[tuple[int, Any]] = []
        trainers, (more, named) = self.trainers, self.arguments
        if torch.compiler.is_compiling():
            trainers = [(fields, _Changing("self.trainer")) for fields, _ in trainers]
            more = tuple(_ChangingNumber("batch_idx") for _ in more)
            named = {name: _ChangingNumber(name) for name in named}
        with _set("_trainer", trainers), _set("log", [(vars(self.module), partial(self._record, logged))]):
            yield more, named, logged

    def _record(self, logged: list[tuple[int, Any]], name: str, value: Any, *args: Any, **options: Any) -> None:
        """In place of `module.log`."""
        if torch.compiler.is_compiling() and not isinstance(value, (Tensor, Number)):
            raise CaptureError(f"self.log({name!r}, ...) gets a {type(value).__name__}: pass a tensor or a number")
        if any(isinstance(z, torch.SymInt) for z in options.values()):  # batch_size, in a trace with dynamic shapes
            raise CaptureError(f"self.log({name!r}, ...) gets a size, which may be different at the next call")
        if (name, args, options) not in self.logs:
            self.logs.append((name, args, options))
        logged.append((self.logs.index((name, args, options)), value))

    def log(self, logged: list[tuple[int, Any]]) -> None:
        for place, value in logged:
            name, args, options = self.logs[place]
            self.module.log(name, value, *args, **options)


@contextlib.contextmanager
def _set(name: str, values: list[tuple[dict[str, Any], Any]]) -> Iterator[None]:
    """Attributes of this name in the `__dict__`s of modules, for a while."""
    before = [(fields, {name: fields[name]} if name in fields else {}) for fields, _ in values]
    try:
        for fields, value in values:
            fields[name] = value
        yield
    finally:
        for fields, old in before:
            fields.pop(name)
            fields.update(old)


class _Changing:
    """Stands in a trace for an object that changes from call to call: whoever reads it gets an error that says so."""

    __slots__ = ("subject",)

    def __init__(self, name: str):
        self.subject = name

    def __getattr__(self, name: str) -> NoReturn:
        raise CaptureError(
            f"training_step reads {self.subject}{name and '.'}{name}, which may be different at the next call. Keep "
            "what changes in a buffer of the module and write to it in place, in on_train_batch_start for example"
        )


class _ChangingNumber(_Changing):
    __slots__ = ()

    def _refuse(self, *args: Any) -> NoReturn:
        self.__getattr__("")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __neg__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = _refuse
    __int__ = __float__ = __index__ = __str__ = __repr__ = __format__ = _refuse


def _loss_of(output: Any, y: Any) -> Tensor:
    output, _ = output
    loss = output["loss"] if isinstance(output, Mapping) else output
    if loss is None:
        raise ValueError("training_step returned None: skipping a step is not supported by ThreePassCallback")
    return loss
