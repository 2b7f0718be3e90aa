"""The program `threepass`: one subcommand a function of this file, one flag an argument, the same words as in Python.

Flags come from the functions' signatures and their help from the docstrings; a dataclass gives a flag for each field.
"""

import dataclasses
import inspect
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, ArgumentCollection, CycloptsError, Parameter, Token, UnusedCliTokensError

from .errors import CaptureError, DivergedError, UnsupportedError
from .train import config_file, recipes
from .train.config import Config

if TYPE_CHECKING:
    from .bench.case import Case
    from .study.reproduce.plan import Scale
    from .train.runs import Run
    from .train.trainer import Trainer


def main(arguments: list[str] | None = None) -> int:
    """Runs a command.

    Returns the exit code: 0, 1 after an error, 2 for bad usage, 3 after training that diverged, 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    sys.path.insert(0, "")  # a model of the user's own, "module:function", is looked for in the folder they stand in
    try:
        command, values = parse([a for a in arguments if a != "--debug"])
        if command is not train and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError("threepass: torchrun is for `threepass train`; run other commands as one process")
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _show_warning  # type: ignore[assignment]
            command(*values.args, **values.kwargs)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, ImportError, CaptureError, UnsupportedError, DivergedError) as error:
        if debug:
            raise
        print(f"threepass: {error}", file=sys.stderr)
        return 3 if isinstance(error, DivergedError) else 1
    return 0 if arguments else 2  # without a command the help is shown


def _show_warning(message: Warning | str, *where: Any) -> None:
    """A warning as a user of the program reads it, without a line of source code."""
    print(f"threepass: warning: {message}", file=sys.stderr)


class UsageError(Exception):
    """Arguments that the program does not take, in one line."""


def parse(arguments: list[str]) -> tuple[Callable[..., Any], inspect.BoundArguments]:
    """The command and its arguments, defaults included."""
    try:
        arguments = _with_config_file(arguments)
        command, values, unparsed = app.parse_args(arguments, exit_on_error=False, print_error=False)
    except (CycloptsError, ValueError) as error:  # a ValueError comes from a dataclass that checks its fields
        name = "threepass " + arguments[0] if arguments[0] in app else "threepass"
        unused = error.unused_tokens if isinstance(error, UnusedCliTokensError) else None
        words = f"unexpected argument {unused[0]!r}" if unused else str(error).rstrip(".")
        raise UsageError(f"{name}: {words} (see {name} --help)") from error
    if "given" in unparsed:
        values.arguments["given"] = _given(arguments)
    values.apply_defaults()
    return command, values


def _with_config_file(arguments: list[str]) -> list[str]:
    """The arguments with the settings of `--config FILE` in place of that flag; flags that are given come first."""
    rest = list(arguments)
    places = [i for i, argument in enumerate(arguments) if argument.partition("=")[0] == "--config"]
    if not places or not arguments or arguments[0] not in app:
        return rest
    if len(places) > 1:
        raise ValueError("--config was given more than once")
    place, (_, equals, name) = places[0], arguments[places[0]].partition("=")
    if not equals and place + 1 == len(arguments):
        raise ValueError("--config needs the name of a file")
    file = Path(name if equals else arguments[place + 1])
    del rest[place : place + (1 if equals else 2)]
    named = [a.name for a in app[arguments[0]].assemble_argument_collection() if a.parse and a.name.startswith("--")]
    known = [name.removeprefix("--").replace("-", "_") for name in named]
    return [*rest, *config_file.as_flags(config_file.read(file), file, known, _given(rest))]


def _given(arguments: list[str]) -> frozenset[str]:
    """The names of the flags that are there, whatever their values."""
    flags = (argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
    return frozenset(flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags)


@dataclass(frozen=True)
class Task:
    """What is trained on what.

    Args:
        data: digits, mnist, fashion-mnist, cifar10, cifar100, a .npz file, or a folder of .npy / .npz arrays.
        model: mlp, plain20, resnet20 (or another depth 6n + 2), resnet18, vit, or module:function of your own.
        model_options: for the model's function, as JSON.
        init: xavier, kaiming, geometric or balanced; default: the model's own initialisation.
        data_dir: where the data is; default: $THREEPASS_DATA, then ~/.cache/threepass.
        device: cpu, cuda, or auto: cuda if there is one.
    """

    data: str = "digits"
    model: str = "mlp"
    model_options: str = "{}"
    init: str | None = None
    data_dir: Path | None = None
    device: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.model.replace(':', '-')}-{Path(self.data).name.removesuffix('.npz')}"

    def run(self, config: Config) -> "Run":
        from .train.runs import Run

        place = None if self.data_dir is None else str(self.data_dir)
        return Run(self.data, self.model, _options(self.model_options), self.init, place, self.device, config)


@dataclass(frozen=True)
class Measurement:
    """One benchmark.

    Args:
        model: mlp, plain20, resnet20 (or another depth 6n + 2), resnet18, vit, encoder (nn.TransformerEncoder),
            imagenet-resnet50, convnext, vit-b16, gpt2, or module:function of your own.
        model_options: for the model's function, as JSON.
        batch: images in a step.
        image: their height and width.
        precision: tf32, float32, bf16, or amp (autocast to bf16); auto: tf32 on a GPU, float32 on a CPU.
        methods: some of plain, paper, exact, alpha1, sam, finite, jacobian, double; default: all.
        eager: measure eager steps.
        traced: measure three passes captured without a compiler too, relative to eager plain training.
        best: measure every method at its best: captured or compiled, on a GPU as a CUDA graph.
        rounds: samples of every method, which take turns.
        device: cpu, cuda, or auto: cuda if there is one.
        channels_last: the memory format of images; else contiguous.
        checkpointing: activation checkpointing around each block of the model.
        threads: of a CPU; default: torch's own choice.
    """

    model: str = "plain20"
    model_options: str = "{}"
    batch: int = 128
    image: int = 32
    precision: str = "auto"
    methods: tuple[str, ...] = ()
    eager: bool = True
    traced: bool = True
    best: bool = True
    rounds: int = 15
    device: str = "auto"
    channels_last: bool = True
    checkpointing: bool = False
    threads: int | None = None

    def case(self) -> "Case":
        from .bench.case import Case
        from .bench.methods import METHODS

        settings = dataclasses.asdict(self)
        options, methods = _options(settings.pop("model_options")), _words(settings.pop("methods"))
        return Case(options=options, methods=methods or tuple(METHODS), **settings)


@dataclass(frozen=True)
class Extent:
    """How much of the paper's experiments is run.

    Args:
        seeds: runs of every cell; default: as planned, three for the rows that matter most.
        epochs: of every run; default: as planned.
        examples: train on so many examples of a set; default: all.
        quick: a small version for two CPU cores, narrow nets on 1000 examples, into runs/paper-quick.
    """

    seeds: int | None = None
    epochs: int | None = None
    examples: int | None = None
    quick: bool = False

    def scale(self) -> "Scale":
        from .study.reproduce.plan import QUICK, Scale

        given = Scale(self.seeds, self.epochs, self.examples)
        return QUICK.replaced_by(given) if self.quick else given


Flat = Parameter(name="*")  # the fields are flags without a prefix
Settings = Parameter(name="*", group="Settings")
TASK, MEASUREMENT, EXTENT, CONFIG = Task(), Measurement(), Extent(), Config()  # the defaults


def train(
    *,
    task: Annotated[Task, Flat] = TASK,
    name: str | None = None,
    resume: Path | None = None,
    keep_going: bool = False,
    config: Annotated[Config, Settings] = CONFIG,
    given: Annotated[frozenset[str], Parameter(parse=False)] = frozenset(),
) -> None:
    """Train a model on a data set; metrics and checkpoints go to runs/NAME.

    Start with --strength 0.1 and change it by factors of 3; in Python,
    threepass.advise recommends a mode.

    Several processes: torchrun --nproc-per-node 4 -m threepass train ... with
    the same flags; --batch-size is that of all processes together.

    Settings that you leave out come from the recipe of the model and data set
    (mlp on digits or mnist, plain20 and the like on cifar10 or cifar100). Where
    there is none, a run has strength 0.1 and the defaults below, in exact mode
    if the model has norms. The first line says what was chosen; run.json has all
    that was used.

    Args:
        name: of the run; default: MODEL-DATA. An existing run is never overwritten.
        resume: continue the run in this folder with its own settings; a larger number of --epochs extends it.
        keep_going: continue training when the loss is not finite, instead of stopping with exit code 3.
    """
    from .train.device import find_device
    from .train.ranks import joined
    from .train.runs import Run

    run = task.run(config)
    if resume is not None:
        if "name" in given:
            raise ValueError("--name names a new run, and --resume continues an existing one: pass only one of them")
        values = {**vars(config), **vars(run)}
        run = Run.read(resume).resumed({flag: values[flag] for flag in given & values.keys()})
    chosen = {} if resume is not None else recipes.train_defaults(task.model, task.data, _own(given, config.optimizer))
    if_norms = {} if resume is not None else recipes.if_norms(task.model, chosen, given, config)
    with joined(find_device(run.device)) as ranks:
        trainer = run.trainer(ranks, if_norms)
        run = dataclasses.replace(run, config=trainer.config)
        if resume is None and ranks.is_first:
            found = {name: getattr(trainer.config, name) for name in if_norms}
            chosen |= {name: value for name, value in found.items() if value == if_norms[name]}
            _say_what_was_chosen(task, chosen, trainer.config, given)
        _train(run, trainer, Path("runs") / (name or task.name), resume, keep_going)


def _train(run: "Run", trainer: "Trainer", place: Path, resume: Path | None, keep_going: bool) -> None:
    """Trains in a new folder at `place`, or goes on in the folder `resume`; the first rank writes and reports."""
    from .train.folder import created, resumed
    from .train.metrics import guessing_in_words, in_words
    from .train.ranks import folder_of_first

    ranks = trainer.ranks
    with folder_of_first(ranks, lambda: created(place, numbered=True) if resume is None else resumed(resume)) as folder:
        trainer.begin(folder)
        if ranks.is_first:
            run.write(folder.path)
            print(f"# settings, saved in {folder.path / 'run.json'}\n{run.in_words()}", file=sys.stderr, flush=True)
        try:
            history = trainer.run(keep_going=keep_going)
        except (KeyboardInterrupt, SystemExit):
            if ranks.is_first:
                print(f"threepass: to go on: threepass train --resume {folder.path}", file=sys.stderr)
            raise
    if ranks.is_first:
        last = history[-1]
        print(f"{folder.path}: epoch {last['epoch']}, loss {last['train_loss']:.4f}, {in_words(last)}")
        if trainer.labels is not None and (words := guessing_in_words(last, trainer.labels)) is not None:
            print(f"threepass: warning: {words}", file=sys.stderr)


def compare(
    *,
    demo: bool = False,
    task: Annotated[Task, Flat] = TASK,
    alphas: tuple[float, ...] = (),
    strengths: tuple[float, ...] = (),
    seeds: int = 3,
    name: str | None = None,
    resume: bool = False,
    config: Annotated[Config, Settings] = CONFIG,
    given: Annotated[frozenset[str], Parameter(parse=False)] = frozenset(),
) -> None:
    """Train by two passes and by three, on the same data order and initialisation, and write a report to runs/NAME.

    Settings, alphas and strengths that you leave out come from the recipe of
    the model and data set, as in train; without one, strengths are 0.1 0.3 1.

    Methods are given by --alphas and --strengths, and runs by --seeds: --alpha,
    --strength, --eta-over-alpha and --seed are for train.

    Args:
        demo: a small net on digits, with settings of its own: what `make demo` runs, in about two minutes.
        alphas: one method each, in the config's mode, with the paper's learning rate lr / alpha.
        strengths: one method each, in the config's mode.
        seeds: runs of every method.
        name: of the folder; default: compare-MODEL-DATA. An existing one is never overwritten.
        resume: continue the comparison in runs/NAME; give the same flags again.
    """
    from .study import compare as study
    from .train.runs import norms_of

    _refuse_what_compare_ignores(given, demo, alphas)
    if demo:
        study.digits_demo(Path("runs") / (name or "demo"), resume=resume, command="threepass compare --demo")
        return
    run = task.run(config)
    dataset = run.load()
    chosen = recipes.compare_defaults(task.model, task.data, _own(given, config.optimizer))
    if_norms = recipes.if_norms(task.model, chosen, given, config)
    if if_norms and norms_of(run.make_model(dataset), dataset):
        config, chosen = config.with_settings(if_norms), chosen | if_norms
    config = recipes.with_default_lr(config)
    common = dataclasses.replace(config, alpha=Config.alpha, strength=None, mode="paper", eta_over_alpha=False)
    variants = [study.two_passes(), *(study.by_alpha(a, config.mode) for a in alphas)]
    variants += [study.by_strength(s, config.mode) for s in strengths]
    out, command = Path("runs") / (name or f"compare-{task.name}"), shlex.join(["threepass", *sys.argv[1:]])
    _say_what_was_chosen(task, chosen, dataclasses.replace(common, alpha=1.0), given)  # each method has its own alpha
    study.compare(
        dataset, lambda: run.fresh_model(dataset), common, variants, seeds, out, resume=resume, command=command
    )


def _refuse_what_compare_ignores(given: frozenset[str], demo: bool, alphas: tuple[float, ...]) -> None:
    """Raises an error for flags that a comparison would not use."""
    instead = {
        "strength": "compare trains one method for each of --strengths: pass --strengths instead of --strength",
        "alpha": "compare trains one method for each of --alphas: pass --alphas instead of --alpha",
        "eta_over_alpha": "methods of --alphas always divide the learning rate by alpha: leave out --eta-over-alpha",
        "seed": "compare trains the seeds 0, 1, ...: pass their number as --seeds instead of --seed",
    }
    if not alphas:
        words = "--reduction and --alpha-end apply only to methods of --alphas"
        instead |= dict.fromkeys(("reduction", "alpha_end"), words)
    if demo:
        allowed = ("demo", "name", "resume")
        instead = {name: f"--demo has settings of its own: leave out --{name.replace('_', '-')}" for name in given}
        instead = {name: words for name, words in instead.items() if name not in allowed}
    for name in sorted(given & instead.keys()):
        raise UsageError(f"threepass compare: {instead[name]} (see threepass compare --help)")


def report(runs: tuple[Path, ...], /, *, out: Path | None = None) -> None:
    """Build one page from any set of runs and comparisons.

    Args:
        runs: their folders.
        out: a folder, or the page's own name ending in .html; a page that is there is replaced. Default: runs/report,
            or the first of runs/report-2, runs/report-3, ... that is not there.
    """
    from .study.report import report as write

    print(f"report: {write(list(runs), out)}")


def robustness(
    runs: tuple[Path, ...],
    /,
    *,
    examples: int = 500,
    data_dir: Path | None = None,
    device: str = "auto",
) -> None:
    """Measure the accuracy of trained runs under noise, FGSM and PGD; report then shows it.

    What compare measures of its runs, for those of train, with the weights of
    the last epoch; sizes are in units of pixels from 0 to 1, or in those of the
    features.

    Args:
        runs: their folders.
        examples: of the validation set, the first ones.
        data_dir: where the data is, if not where the run found it.
        device: cpu, cuda, or auto: cuda if there is one.
    """
    from .study.robustness import in_words, measure

    where = {"device": device} | ({} if data_dir is None else {"data_dir": str(data_dir)})
    for run in runs:
        curves = measure(run, where, examples)
        print(f"{run}: accuracy on {curves['examples']} validation examples, by the size of the disturbance")
        print("\n".join(f"  {line}" for line in in_words(curves)))


def data(name: str, /, *, download: bool = False, data_dir: Path | None = None) -> None:
    """Find a data set, and say what is in it.

    Args:
        name: digits, mnist, fashion-mnist, cifar10, cifar100, or a folder of .npy / .npz arrays.
        download: fetch it if it is not there.
        data_dir: where it is, or where a download goes; default: $THREEPASS_DATA, then ~/.cache/threepass.
    """
    from .train.data import load

    dataset = load(name, data_dir, download)
    sizes = f"{len(dataset.train)} training and {len(dataset.val)} validation examples"
    kind = (
        f"{len(dataset.classes)} classes" if dataset.classes else f"targets of shape {tuple(dataset.train.y.shape[1:])}"
    )
    print(f"{dataset.name}: {sizes} of shape {tuple(dataset.train.x.shape[1:])}, {kind}")
    print("mean", *(f"{m:.4f}" for m in dataset.mean), " std", *(f"{s:.4f}" for s in dataset.std))


def init_study(*, name: str = "init-study", depth: int = 8, width: int = 256, seed: int = 0) -> None:
    """Measure the variances of both passes at initialisation, against the paper's equations; to runs/NAME.

    Args:
        name: of the folder; an existing one is never overwritten.
        depth: the most layers.
        width: of the layers.
        seed: of weights and data.
    """
    from .study.init_study import run
    from .train.folder import new_folder

    out = new_folder(Path("runs") / name)
    run(out, depth=depth, width=width, seed=seed)
    print(f"page: {out / 'init-study.html'}")


def bench(
    *,
    measurement: Annotated[Measurement, Flat] = MEASUREMENT,
    suite: str | None = None,
    nets: tuple[str, ...] = (),
    prepare: bool = False,
    minutes: float | None = None,
    scaling: tuple[str, ...] = (),
    out: Path | None = None,
    table: Path | None = None,
    into: tuple[Path, ...] = (),
) -> None:
    """Measure what a training step costs: three passes, plain training, and what is used today.

    Args:
        suite: instead of one model, several: gpu, cpu, or gpu-more, other batches and precisions; or
            large: resnet50, vit, gpt2 and convnext, of the sizes that people train. What large has already written is
            not measured again.
        nets: of the suite large, these alone.
        prepare: of a suite, only compile, without times, into the caches on disk: for a GPU that others use.
        minutes: of the suite large, stop then, with what is done.
        scaling: instead of one model, sweeps: depth, width, batch, image.
        out: write a JSON file; of a suite or sweep, the folder; default there: results/bench, and below it large for
            that suite.
        table: measure nothing; print the tables of the results in this folder.
        into: pages in which to replace the generated tables, these and the short ones of time and memory.
    """
    from .bench import tables
    from .bench.case import run
    from .bench.large import large
    from .train.files import write_json

    if table is not None:
        print(tables.markdown(table))
        for target in into:
            tables.fill(target, table)
        return
    case = measurement.case()
    if suite == "large":
        folder = out or Path("results/bench/large")
        large(_words(nets), folder, case.checkpointing, prepare, minutes, case.device)
    elif suite is not None or scaling:
        _measure_many(suite, prepare, _words(scaling), case, out or Path("results/bench"))
    else:
        report = run(case)
        print(tables.text(report))
        if out is not None:
            write_json(out, report)


def _measure_many(suite: str | None, prepare: bool, scaling: Sequence[str], case: "Case", folder: Path) -> None:
    from .bench import page
    from .bench.scaling import scaling as sweep
    from .bench.suite import suite as run_suite

    if suite is not None:
        run_suite(suite, folder, prepare)
    if prepare:
        return
    if scaling:
        shared = ("precision", "eager", "traced", "best", "rounds", "device", "threads")
        sweep(scaling, type(case)(**{name: getattr(case, name) for name in shared}), folder)
    print(f"page: {page.write(folder)}")


def reproduce(
    study: tuple[str, ...],
    /,
    *,
    extent: Annotated[Extent, Flat] = EXTENT,
    data: Path | None = None,
    results: Path | None = None,
    minutes: float | None = None,
    compile: bool | None = None,
    device: str = "auto",
    list: bool = False,
    page: Path | None = None,
) -> None:
    """Run the paper's experiments, each from where it was left, and write the page that checks its claims.

    Args:
        study: table2 mnist curves alpha0 rates batches deeper init alignment norms methods readings, all, or report.
        data: the folder with the data sets; default: $THREEPASS_DATA, then ~/.cache/threepass.
        results: the folder of the records; default: results/paper.
        minutes: stop after so long, in the middle of a run if need be; the same command goes on.
        compile: compile the steps; default: on a GPU.
        device: cpu, cuda, or auto: cuda if there is one.
        list: train nothing; list what is done and what is not.
        page: where the page goes; default: docs/claims.md, of a smaller version claims.md beside the records.
    """
    import torch

    from .study.reproduce import page as claims
    from .study.reproduce import plan, runner

    if extent.quick:
        torch.set_num_threads(1)  # on nets so narrow a second thread mostly waits for the first
    scale, folder = extent.scale(), results or Path("runs/paper-quick" if extent.quick else "results/paper")
    jobs = plan.plan([name for name in _words(study) if name != "report"], scale)
    place = runner.Place(data, device, compile)
    if list:
        print("\n".join(runner.status(jobs, folder, place)))
        return
    if jobs:
        runner.train_missing(jobs, folder, place, minutes)
    print(f"page: {claims.write(folder, page, scale)}")


def _options(text: str) -> dict[str, Any]:
    """What --model-options holds: a JSON object of keywords."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--model-options is not JSON ({error}): {text!r}") from error
    if not isinstance(options, dict):
        raise ValueError(f"--model-options must be a JSON object such as '{{\"width\": 32}}', got {text!r}")
    return options


def _say_what_was_chosen(task: Task, chosen: dict[str, Any], config: Config, given: frozenset[str]) -> None:
    """A line on the settings that the user left out, on the default learning rate, on alpha where it slows training."""
    if chosen:
        print(recipes.choice_in_words(task.model, task.data, chosen))
    lr = None if "lr" in {*given, *chosen} else recipes.lr_in_words(config)
    for words in (lr, recipes.alpha_in_words(config)):
        if words is not None:
            print(words)


def _fill_from_recipe(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Gives flags that the user left out the values of the recipe for their model and data."""
    defaults = {"train": recipes.train_defaults, "compare": recipes.compare_defaults}.get("".join(commands))
    given = {a.field_info.name: a.tokens[-1].value for a in arguments if a.tokens}
    if defaults is None or "demo" in given or (defaults is recipes.train_defaults and "resume" in given):
        return
    own = _own(given, given.get("optimizer", ""))
    recipe = defaults(given.get("model", TASK.model), given.get("data", TASK.data), own)
    for argument in arguments:
        if argument.field_info.name in recipe:
            value = recipe[argument.field_info.name]
            argument.append(Token(keyword=argument.name, implicit_value=value, source="recipe"))


def _own(given: Iterable[str], optimizer: str) -> set[str]:
    """What a user gave in place of a recipe's settings; the optimizer that recipes have, sgd, does not count."""
    return {*given} - {"optimizer"} if optimizer == "sgd" else {*given}


def _words(given: tuple[str, ...]) -> tuple[str, ...]:
    """Words apart by spaces, commas or both."""
    return tuple(part for word in given for part in word.split(","))


COMMANDS: tuple[Callable[..., None], ...] = (compare, train, robustness, reproduce, bench, report, data, init_study)
app = App(
    name="threepass",
    help="Three-pass learning: train on the loss and on its gradient at the input.",
    help_epilogue=(
        "With any command: --config FILE reads flags from a TOML or YAML file (epochs = 5), and flags on the command "
        "line override them; --debug shows tracebacks, and warnings with their source lines."
    ),
    help_format="plaintext",
    config=_fill_from_recipe,
    default_parameter=Parameter(consume_multiple=True, negative_iterable=(), negative_none=()),
)
for number, command in enumerate(COMMANDS):
    app.command(command, sort_key=number)
