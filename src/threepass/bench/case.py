"""One configuration: its methods eagerly, traced and at their best, timed in turns, checked against each other."""

import contextlib
import copy
import importlib.metadata
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._version import commit
from ..errors import NormalizationWarning, reason_of
from ..train.device import find_device
from . import nets
from .execution import Form, FormError, best, eager, traced
from .limits import layers, limits, operations
from .methods import METHODS
from .timing import ceilings, peak_bytes, summary, take_turns

PRECISIONS = ("tf32", "float32", "bf16", "amp")
CLASSES, WARM_UP = 10, 2


@dataclass(frozen=True)
class Case:
    """What is measured.

    precision: bf16: weights and batch in bfloat16; amp: autocast to bfloat16, float32 weights; tf32: float32 with TF32
        products (on a GPU).
    traced: three passes also as captured steps without a compiler, in comparison with plain training's eager step.
    checkpointing: activation checkpointing around each block of the model.
    """

    model: str = "plain20"
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 128
    image: int = 32
    precision: str = "auto"
    methods: tuple[str, ...] = tuple(METHODS)
    eager: bool = True
    traced: bool = True
    best: bool = True
    rounds: int = 15
    device: str = "auto"
    channels_last: bool = True
    checkpointing: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ValueError(f"unknown method {unknown[0]!r}: choose from {', '.join(METHODS)}")
        if self.batch < 1 or self.rounds < 1 or self.image < 1:
            raise ValueError("batch, rounds and image must be at least 1")
        if not (self.eager or self.best):
            raise ValueError("nothing to measure: set eager or best")
        if self.precision not in ("auto", *PRECISIONS):
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")

    def settled(self) -> "Case":
        """This case with "auto" replaced by what the machine has, and with plain training among the methods."""
        device = str(find_device(self.device))
        precision = self.precision
        if precision == "auto":
            precision = "tf32" if device == "cuda" else "float32"
        if precision == "tf32" and device != "cuda":
            raise ValueError("tf32 needs a GPU: use --precision float32 or bf16")
        methods = tuple(name for name in METHODS if name == "plain" or name in self.methods)
        threads = self.threads or torch.get_num_threads()
        return replace(self, device=device, precision=precision, methods=methods, threads=threads)

    def make(self) -> tuple[nn.Module, list[Tensor]]:
        """The model, and x, y, and the random unit vectors v of the Jacobian penalty."""
        model = self.make_model()
        return model, self.make_batch(model)

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nets.by_name(self.model, **self._fitting() | self.options)
        if self.checkpointing:
            nets.with_checkpointing(model)
        model = model.to(self.device, self._dtype, memory_format=self._layout)  # type: ignore[call-overload]
        return nets.Autocast(model, self.device) if self.precision == "amp" else model

    def make_batch(self, model: nn.Module) -> list[Tensor]:
        """x, y and v: images (batch x 3 x image x image) and their classes, or tokens and those that follow them."""
        torch.manual_seed(1)
        if self.model == "gpt2":
            size = self.options.get("n_positions", 1024)
            tokens = torch.randint(self.options.get("vocab_size", nets.WORDS), (self.batch, size + 1))
            x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
            return [x.to(self.device), y.to(self.device), torch.empty(0, device=self.device)]
        x = torch.randn(self.batch, 3, self.image, self.image)
        x = x.to(self.device, self._dtype, memory_format=self._layout)
        try:
            with torch.no_grad():
                z = copy.deepcopy(model)(x[:2])
        except Exception as error:
            shape = " x ".join(map(str, x.shape))
            raise ValueError(f"the model does not take batches of images, {shape}: {reason_of(error)}") from error
        if z.dim() != 2 or len(z) != len(x[:2]):
            raise ValueError(f"the model must return class scores of shape (N, classes), got {tuple(z.shape)}")
        y = torch.randint(z.shape[1], (self.batch,)).to(self.device)
        v = F.normalize(torch.randn(self.batch, z.shape[1]), dim=1).to(z)
        return [x, y, v]

    @property
    def product_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision in ("bf16", "amp") else torch.float32

    @property
    def _layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last and self.model != "mlp" else torch.contiguous_format

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def _fitting(self) -> dict[str, Any]:
        if self.model == "mlp":
            return {"sizes": (3 * self.image**2, 2048, 2048, CLASSES)}
        return {"image": self.image} if self.model in ("vit", "encoder", "vit-b16") else {}


def run(case: Case) -> dict[str, Any]:
    """Everything about a case, as it goes into its JSON file."""
    case = case.settled()
    with settings(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", NormalizationWarning)
        model, batch = case.make()
        forms, failures = prepare(case, model, batch)
        before = ceilings(case.device, case.product_dtype)
        methods = _measure(case, model, batch, forms)
        after = ceilings(case.device, case.product_dtype)
        ceiling = {name: max(before[name], after[name]) for name in before}  # other load only ever lowers them
        limit = limits(layers(model, batch[0]), ceiling)
        for (method, form), why in failures.items():
            methods.setdefault(method, {})[form] = {"fails": why}
        for method, entry in methods.items():
            _at_ceilings(entry, limit.get(method), ceiling)
        place = machine(case.device)
        agrees = agreement(model, batch) if "exact" in case.methods else None
    return {
        "case": asdict(case),
        "machine": place,
        "ceilings": ceiling,
        "limits": limit,
        "exact_against_double_backward": agrees,
        "methods": {name: methods[name] for name in case.methods},
    }


def compile_only(case: Case) -> None:
    """Compiles the best forms of the case's methods: later processes find them in the compilers' caches on disk."""
    methods, case = case.methods, case.settled()  # which would add plain training
    with settings(case), warnings.catch_warnings():
        warnings.simplefilter("ignore", NormalizationWarning)
        model, batch = case.make()
        for method in methods:
            best(method, model, batch)


Forms = dict[tuple[str, str], Form]


def prepare(case: Case, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Forms, dict[tuple[str, str], str]]:
    """Every (method, form) that runs, and why the others do not. Plain training's candidates are all kept."""
    made: Forms = {}
    failures = {}
    for method in case.methods:
        for form in _forms(case, method):
            try:
                ready = best(method, model, batch) if form == "best" else [MAKE[form](method, model, batch)]
                for z in ready:
                    for _ in range(WARM_UP):
                        z.run()
                    made[method, z.how] = z
            except FormError as error:
                failures[method, form] = str(error)
            except Exception as error:  # whatever a model does not allow, the others still count
                failures[method, form] = reason_of(error)
    return made, failures


MAKE = {"eager": eager, "traced": traced}
TRACED = ("paper", "exact")


def _forms(case: Case, method: str) -> list[str]:
    is_traced = case.eager and case.traced and method in TRACED
    return ["eager"] * case.eager + ["traced"] * is_traced + ["best"] * case.best


def _measure(case: Case, model: nn.Module, batch: Sequence[Tensor], forms: Forms) -> dict[str, dict[str, Any]]:
    """By method and form: times, memory, ratios to plain's; the slower candidate of plain's best form is "second"."""
    cuda = case.device == "cuda"
    references = {method: reference(method, model, batch) for method in {m for m, _ in forms}}
    steps: dict[tuple[str, ...], Callable[[], Any]] = {key: form.run for key, form in forms.items()}
    steps |= {(*key, "call"): form.call for key, form in forms.items() if form.call is not None}
    times = take_turns(steps, case.rounds, cuda)
    results: dict[str, dict[str, Any]] = {}
    for (method, how), form in forms.items():
        row = {"how": form.how, **summary(times[method, how]), "peak_bytes": peak_bytes(form.bare, cuda)}
        row |= {"compile_seconds": form.compile_seconds, "graph_bytes": form.graph_bytes}
        row["difference"] = difference(form.bare(), references[method])
        row["samples_per_second"] = case.batch / row["median"]
        if form.failed:
            row["failed"] = list(form.failed)
        if (method, how, "call") in times:
            row["call"] = summary(times[method, how, "call"])
        entry = results.setdefault(method, {})
        place = how if how in MAKE else "best"
        if place in entry:
            entry["best"], entry["second"] = sorted((entry["best"], row), key=lambda r: r["median"])
        else:
            entry[place] = row
    for method, entry in results.items():
        entry["operations"] = operations(eager(method, copy.deepcopy(model), batch).run)
        for place, row in entry.items():
            base = results.get("plain", {}).get({"second": "best", "traced": "eager"}.get(place, place))
            if base is not None and place != "operations":
                row["ratio"] = row["median"] / base["median"]
                row["best_ratio"] = row["best"] / base["best"]
                row["peak_ratio"] = row["peak_bytes"] / base["peak_bytes"]
                if "call" in row:
                    row["call"]["ratio"] = row["call"]["median"] / base["median"]
    return results


def reference(method: str, model: nn.Module, batch: Sequence[Tensor]) -> Sequence[Tensor]:
    """The method's gradients, eagerly and in full float32."""
    model = copy.deepcopy(model.module if isinstance(model, nets.Autocast) else model).float()
    with _float32_products():
        return METHODS[method](model, *(z.float() if z.is_floating_point() else z for z in batch))


def agreement(model: nn.Module, batch: Sequence[Tensor]) -> float | str:
    """How far exact mode is from autograd's double backward, in full float32."""
    try:
        return difference(reference("exact", model, batch), reference("double", model, batch))
    except Exception as error:
        return reason_of(error)


def difference(grads: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """|g - g'| / |g'|, over all weights together."""
    pairs = list(zip(grads, reference, strict=True))
    squares = sum((g.double() - r.double()).square().sum().item() for g, r in pairs)
    return (squares / sum(r.double().square().sum().item() for _, r in pairs)) ** 0.5


def _at_ceilings(entry: dict[str, Any], limit: dict[str, float] | None, ceiling: dict[str, float]) -> None:
    """The roofline: how long the counted operations and the least bytes take at the ceilings, and the share of it."""
    for row in (entry[place] for place in (*MAKE, "best", "second") if "median" in entry.get(place, {})):
        row["operations_share"] = entry["operations"] / ceiling["operations_per_second"] / row["median"]
        if limit is not None:
            row["bytes_share"] = limit["bytes"] / ceiling["bytes_per_second"] / row["median"]


@contextlib.contextmanager
def settings(case: Case) -> Iterator[None]:
    """The case's threads and precision, for a while."""
    threads, kernels = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch.set_num_threads(case.threads or threads)
    torch.backends.cudnn.benchmark = True
    try:
        with _float32_products("high" if case.precision in ("tf32", "amp") else "highest"):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = kernels


@contextlib.contextmanager
def _float32_products(precision: str = "highest") -> Iterator[None]:
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


def machine(device: str) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    cuda = device == "cuda"
    return {
        "cpu": cpu,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "triton": _triton(),
        "python": platform.python_version(),
        "commit": commit(),
    }


def _triton() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
