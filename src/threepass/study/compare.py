"""`compare`: two passes against three from the same initial weights on the same batches, over seeds, with a report.

    runs/NAME/
        compare.json             settings, variants, seeds, versions, the command, cost of a step
        <variant>/seed-<n>/      metrics.jsonl, weights.safetensors, robustness.json, variances.json, result.json
        examples.safetensors     images and their input gradients under every variant
        summary.json             compare.json with the last metrics and the robustness of every run, in one file
        report.html, figures/    the page, and its figures as files

A seed gives every variant the same initial weights and the same batches. A run is complete when its result.json is
there; `resume=True` repeats no complete run, and goes on in the run in hand from its checkpoint.
"""

import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .._version import code_version
from ..core.engine import Task
from ..core.engine import run as three_passes
from ..core.options import Options
from ..errors import DivergedError
from ..inspect.variances import variances
from ..step import add_to_grad
from ..train.config import Config
from ..train.config_file import as_toml
from ..train.data import Batches, DataSet, load
from ..train.files import read_object, write_json
from ..train.folder import new_folder
from ..train.loop import fit
from ..train.metrics import GivenFunctions
from ..train.optimizer import make_optimizer
from ..train.trainer import Trainer
from . import attacks
from .gather import COMPARED, gather, read
from .report import report
from .report_tables import common_settings, in_lines

FORMAT = 1
EXAMPLES = 8  # images that are shown
LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Variant:
    """A way to train: its name, and the settings of `Config` in which it differs."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.]+", "-", self.name).strip("-")

    def config(self, common: Config, seed: int) -> Config:
        return Config.from_dict(common.to_dict() | self.settings | {"seed": seed})

    def in_words(self) -> str:
        """Its name and settings in one line.

        >>> Variant("slow", {"lr": 0.01, "strength": None}).in_words()
        'slow: lr 0.01'
        """
        settings = [f"{name} {value}" for name, value in self.settings.items() if value is not None]
        return f"{self.name}: {', '.join(settings)}"

    @property
    def is_two_passes(self) -> bool:
        return self.settings.get("strength") is None and self.settings.get("alpha") == 1.0


def two_passes(**settings: Any) -> Variant:
    """Backpropagation alone."""
    return Variant("two passes", {"alpha": 1.0, "alpha_end": None, "strength": None} | settings)


def by_alpha(alpha: float, mode: str = "paper", **settings: Any) -> Variant:
    """alpha * pass 2 + (1 - alpha) * pass 3, with the paper's learning rate eta / alpha.

    >>> by_alpha(0.1).name, by_alpha(0.5, "exact", lr=0.05).name
    ('alpha 0.1', 'alpha 0.5, exact')
    """
    name = f"alpha {alpha:g}" + ("" if mode == "paper" else f", {mode}")
    return Variant(name, {"alpha": alpha, "strength": None, "mode": mode, "eta_over_alpha": True} | settings)


def by_strength(strength: float, mode: str = "exact", **settings: Any) -> Variant:
    """pass 2 + strength * pass 3 of every sample's own input loss, with the learning rate of two passes.

    >>> by_strength(0.3).name
    'strength 0.3, exact'
    """
    common = {"strength": strength, "mode": mode, "alpha_end": None, "eta_over_alpha": False}
    return Variant(f"strength {strength:g}, {mode}", common | settings)


def compare(
    data: DataSet,
    make_model: Callable[[], nn.Module],
    config: Config,
    variants: Sequence[Variant],
    seeds: int,
    out: Path,
    *,
    resume: bool = False,
    command: str | None = None,
    about: str = "",
    loss_fn: LossFn | None = None,
    sigmas: Sequence[float] = attacks.SIGMAS,
    radii: Sequence[float] = attacks.RADII,
    say: Callable[[str], None] = print,
) -> Path:
    """Trains every variant from every seed, measures what came of it, writes the report, and returns the folder.

    Args:
        data: on the device to train on.
        make_model: makes a freshly initialised model; it is called after `torch.manual_seed(seed)`.
        config: the settings that variants share; a variant's own go first, and the seed replaces the config's.
        variants: the first of two passes among them (else the first) is what the others are compared with.
        seeds: how many; they are 0, 1, ...
        out: the folder; where there is one already, NAME-2, NAME-3, ... is made, unless this is to `resume`.
        command: the command line of this comparison, for the report.
        about: a sentence for the report on what is compared.
        loss_fn: `loss_fn(output, y)`, a mean over the batch; default: cross-entropy.
        sigmas, radii: of noise and attacks, in units of pixels 0 to 1.
        say: called with a line at the end of every run.
    """
    plan = Comparison(data, make_model, config, variants, seeds, loss_fn, sigmas, radii)
    _check(plan)
    out = Path(out) if resume else new_folder(Path(out))
    _begin(out, plan.described() | {"about": about, "command": command}, resume)
    _note(f"# common settings, saved in {out / 'compare.json'}\n{plan.in_words()}")
    _train_missing(plan, out, say)
    _measure_missing(plan, out)
    write_json(out / "summary.json", summary(out))
    for line in in_lines(gather([out])):
        say(line)
    say(f"report: {report([out], out)}")
    return out


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _train_missing(plan: "Comparison", out: Path, say: Callable[[str], None]) -> None:
    """Trains every variant from every seed, but for runs that are complete."""
    runs = [(variant, seed) for seed in range(plan.seeds) for variant in plan.variants]
    for k, (variant, seed) in enumerate(runs, 1):
        folder = out / variant.folder / f"seed-{seed}"
        if not (folder / "result.json").exists():
            _note(f"# run {k} of {len(runs)}: {variant.name}, seed {seed}")
            result = _train(plan, variant, seed, folder)
            say(f"seed {seed}  {variant.name:<24} {_in_words(result)}")


def _measure_missing(plan: "Comparison", out: Path) -> None:
    """Writes what is measured once all runs are there: examples with their input gradients, and the cost of a step."""
    if not (out / "examples.safetensors").exists():
        _write_examples(plan, out)
    described = json.loads((out / "compare.json").read_text())
    if "cost" not in described:
        write_json(out / "compare.json", described | {"cost": cost(plan)})


def summary(out: Path) -> dict[str, Any]:
    """compare.json of a comparison, and of every run its last metrics and its accuracy under noise and attacks."""
    described = read_object(out / "compare.json", COMPARED)
    runs = []
    for variant in described["variants"]:
        for seed in range(described["seeds"]):
            folder = out / variant["folder"] / f"seed-{seed}"
            result, robustness = json.loads((folder / "result.json").read_text()), folder / "robustness.json"
            del result["config"]  # the comparison's, the variant's settings and the seed
            measured = json.loads(robustness.read_text()) if robustness.exists() else None
            runs.append(result | {"robustness": measured})
    return described | {"runs": runs}


def digits_demo(out: Path = Path("runs/demo"), **options: Any) -> Path:
    """The comparison of `make demo`: a small convolutional net on scikit-learn's digits, under two minutes on a CPU.

    Learning rates and the strength were chosen by final validation error with seeds 100 to 102, which the demo does not
    use; the validation images are the same, so that errors are a bit optimistic for every method. Seen (%): two passes
    at 0.05, 0.1: 2.13, 2.31; alpha 0.1 at 0.1: 1.94; alpha 0.03 at 0.05, 0.1: 2.13, 2.31; exact, strength 1 at 0.03,
    0.05: 1.85, 2.22; 2 at 0.05: 1.76; 3 at 0.03: 1.67. A shorter round before, of two seeds and 25 epochs, had ruled
    out 0.2 for two passes and 0.1 for exact mode, where training fails, and alpha 0.5 and strength 0.3 as weak.
    """
    torch.set_num_threads(1)  # on so small a net a second thread mostly waits for the first
    return compare(load("digits"), digits_net, DEMO, DEMO_VARIANTS, 4, out, **DEMO_OPTIONS | options)


DEMO = Config(epochs=30, batch_size=64, lr=0.05, schedule="cosine", save_every=10)
DEMO_VARIANTS = [two_passes(), by_alpha(0.1, lr=0.1), by_alpha(0.03), by_strength(3.0, lr=0.03)]
DEMO_OPTIONS: dict[str, Any] = {
    "about": "A net of three convolutions on scikit-learn's 8 x 8 digits. Learning rates and the strength were chosen "
    "on the same validation examples, with other seeds.",
    "command": 'python -c "from threepass.study.compare import digits_demo; digits_demo()"',
    "radii": (0.0, 0.025, 0.05, 0.1, 0.15, 0.2),
}


def digits_net() -> nn.Sequential:
    """Three convolutions and a linear layer for 1 x 8 x 8 images; Kaiming initialisation."""
    convolutions = nn.Conv2d(1, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 1, 1)
    for layer in convolutions:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(*(m for layer in convolutions for m in (layer, nn.ReLU())), nn.Flatten(), nn.Linear(512, 10))


@dataclass(frozen=True)
class Comparison:
    """What `compare` trains and measures; its arguments of the same names."""

    data: DataSet
    make_model: Callable[[], nn.Module]
    config: Config
    variants: Sequence[Variant]
    seeds: int
    loss_fn: LossFn | None
    sigmas: Sequence[float]
    radii: Sequence[float]

    def fresh_model(self, seed: int) -> nn.Module:
        """The model with the initial weights of a seed, on the data's device."""
        torch.manual_seed(seed)
        return self.make_model().to(self.data.train.x.device)

    def in_words(self) -> str:
        """The settings that the variants share, as a file for `--config`, and each variant's own."""
        shared = common_settings(self.config.to_dict(), [{"settings": v.settings} for v in self.variants])
        return "\n".join([as_toml(shared), "# methods", *(f"# {v.in_words()}" for v in self.variants)])

    def described(self) -> dict[str, Any]:
        """What compare.json has of it, with the versions and the machine."""
        data = self.data
        with torch.random.fork_rng(devices=[]):
            model = self.make_model()
        device = data.train.x.device
        baseline = next((v for v in self.variants if v.is_two_passes), self.variants[0])
        return {
            "format": FORMAT,
            "data": {"name": data.name, "train": len(data.train), "val": len(data.val),
                     "shape": list(data.train.x.shape[1:]), "classes": list(data.classes)},
            "model": {"layers": str(model), "parameters": sum(p.numel() for p in model.parameters())},
            "config": self.config.to_dict(),
            "variants": [{"name": v.name, "folder": v.folder, "settings": v.settings} for v in self.variants],
            "baseline": baseline.name,
            "seeds": self.seeds,
            "sigmas": list(self.sigmas),
            "radii": list(self.radii),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "threepass": code_version()},
            "machine": {
                "system": f"{platform.system()} {platform.machine()}",
                "processors": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            },
        }  # fmt: skip


def cost(plan: Comparison, rounds: int = 40) -> dict[str, Any]:
    """Seconds a step: medians over rounds in which variants take turns on one batch, and so meet the same disturbances.

    "plain" is PyTorch's own forward, `loss.backward()` and update, without the input gradient: what two passes need.
    The learning rate is next to zero, so that all measure the same net. With every=k a step is the mean of k in a row.
    """
    data, config, loss_fn = plan.data, plan.config, plan.loss_fn or F.cross_entropy
    batches = Batches(data.train, config.batch_size, normalise=(data.mean, data.std), shuffle=True, seed=0)
    x, y = next(iter(batches.epoch(0)))
    steps = {"plain": _plain_step(plan.fresh_model(0), config, loss_fn, x, y)}
    for v in plan.variants:
        steps[v.name] = _step(plan.fresh_model(0), v.config(config, 0), loss_fn, x, y)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, step in steps.items():
            seconds = step()
            if turn >= 3:  # the first ones allocate and choose algorithms
                times[name].append(seconds)
    return {"rounds": rounds, "seconds": {name: statistics.median(t) for name, t in times.items()}}


def _train(plan: Comparison, variant: Variant, seed: int, folder: Path) -> dict[str, Any]:
    """One run, from its checkpoint if there is one, and its measurements; result.json comes last."""
    data, loss_fn, own = plan.data, plan.loss_fn, variant.config(plan.config, seed)
    model = plan.fresh_model(seed)
    begun = any((folder / name / "state.json").exists() for name in ("checkpoint", "checkpoint.old"))

    if not (begun and read(folder).diverged):
        with contextlib.suppress(DivergedError):
            fit(model, data, own, folder=folder, resume=begun, loss_fn=loss_fn)
    run = read(folder)
    if not run.diverged:
        save_file(
            {k: z.detach().cpu().contiguous() for k, z in model.state_dict().items()}, folder / "weights.safetensors"
        )
        write_json(folder / "robustness.json", attacks.robustness(model, data, plan.sigmas, plan.radii))
        variances = {
            "start": _variances(plan.fresh_model(seed), data, own, loss_fn),
            "end": _variances(model, data, own, loss_fn),
        }
        write_json(folder / "variances.json", variances)
    result = {
        "status": "diverged" if run.diverged else "complete",
        "variant": variant.name,
        "seed": seed,
        "epochs": len(run.history),
        "config": own.to_dict(),
        "last": run.history[-1],
    }
    write_json(folder / "result.json", result)
    for name in ("checkpoint", "checkpoint.old"):  # the weights are kept; what is left is only needed to go on
        shutil.rmtree(folder / name, ignore_errors=True)
    return result


def _variances(model: nn.Module, data: DataSet, config: Config, loss_fn: LossFn | None) -> list[dict[str, Any]]:
    """Of both passes' signals at every layer on the first validation batch; nothing where forward AD is missing."""
    batches = Batches(data.val, config.batch_size, normalise=(data.mean, data.std), shuffle=False, seed=0)
    x, y = next(iter(batches.epoch(0)))
    try:
        rows = variances(model.eval(), loss_fn or F.cross_entropy, x, y, config.input_at)
    except RuntimeError:
        return []
    return [dataclasses.asdict(row) for row in rows]


def _write_examples(plan: Comparison, out: Path) -> None:
    """Validation images with dl/dp under every variant of seed 0, and |dl/dp| of all examples.

    The images are those with the largest geometric mean of |dl/dp| over the variants, a choice that favours none.
    """
    p = attacks.pixels(plan.data)
    gradients, tensors = {}, {}
    for v in plan.variants:
        weights = out / v.folder / "seed-0" / "weights.safetensors"
        if weights.exists():
            model = plan.fresh_model(0)
            model.load_state_dict(load_file(weights))
            model = attacks.in_float64(model, p.x.device)
            gradients[v.name] = attacks.input_gradient(model, p, p.x)
            tensors[f"norm/{v.name}"] = gradients[v.name].flatten(1).norm(dim=1)
            tensors[f"said/{v.name}"] = model(p.normalised(p.x)).argmax(1)
    if not gradients:
        return
    lengths = torch.stack([tensors[f"norm/{name}"] for name in gradients])
    shown = lengths.log().mean(0).argsort(descending=True)[:EXAMPLES].tolist()
    tensors |= {"pixels": p.x[shown].float(), "label": p.y[shown]}
    for name, gradient in gradients.items():
        tensors |= {f"gradient/{name}": gradient[shown].float(), f"said/{name}": tensors[f"said/{name}"][shown]}
    save_file({k: z.cpu().contiguous() for k, z in tensors.items()}, out / "examples.safetensors")


def _plain_step(model: nn.Module, config: Config, loss_fn: LossFn, x: Tensor, y: Tensor) -> Callable[[], float]:
    optimizer = make_optimizer(model, dataclasses.replace(config, lr=1e-12))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()

    return lambda: _seconds(step, x)


def _step(model: nn.Module, config: Config, loss_fn: LossFn, x: Tensor, y: Tensor) -> Callable[[], float]:
    optimizer = make_optimizer(model, dataclasses.replace(config, lr=1e-12))
    c = config
    options = Options(c.alpha, c.reduction, c.mode, c.strength, c.input_at, penalty=c.penalty)

    def steps() -> None:
        for i in range(config.every):
            optimizer.zero_grad()
            with torch.autocast(x.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                r = three_passes(Task(model, loss_fn, x, y), options, runs_third_pass=i == 0, warn=False)
            add_to_grad(model, r)
            optimizer.step()

    return lambda: _seconds(steps, x) / config.every


def _seconds(run: Callable[[], None], x: Tensor) -> float:
    def now() -> float:
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        return time.perf_counter()

    began = now()
    run()
    return now() - began


def _check(plan: Comparison) -> None:
    """Raises a `ValueError` for a comparison that is impossible, before anything is trained."""
    if not plan.data.classes:
        raise ValueError(
            f"{plan.data.name} has no classes, and a comparison measures accuracy: use train for regression"
        )
    if plan.seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {plan.seeds!r}")
    if not plan.variants:
        raise ValueError("nothing to compare: pass at least one variant")
    folders = [v.folder for v in plan.variants]
    twice = sorted({v.name for v in plan.variants if folders.count(v.folder) > 1 or not v.folder})
    if twice:
        raise ValueError(
            f"variant names must be unique and not empty, also as folder names: {', '.join(map(repr, twice))}"
        )
    for variant in plan.variants:  # what cannot be trained is an error of the trainer
        Trainer(plan.fresh_model(0), plan.data, variant.config(plan.config, 0), GivenFunctions(plan.loss_fn))


def _begin(out: Path, now: dict[str, Any], resume: bool) -> None:
    """Writes compare.json; a comparison that goes on must be the one that was begun."""
    if not (resume and (out / "compare.json").exists()):
        write_json(out / "compare.json", now)
        return
    before = read_object(out / "compare.json", COMPARED)
    keys = ("data", "model", "config", "variants", "seeds", "sigmas", "radii")
    changed = [k for k in keys if before.get(k) != json.loads(json.dumps(now[k]))]
    if changed:
        names = ", ".join(changed)
        raise ValueError(f"cannot resume {out} with other values of {names}: use those it was started with")


def _in_words(result: dict[str, Any]) -> str:
    last = result["last"]
    if result["status"] == "diverged":
        return f"diverged in epoch {result['epochs']}"
    return f"validation error {last['val_error']:6.2%}, input loss {last['val_input_loss']:.3g}"
