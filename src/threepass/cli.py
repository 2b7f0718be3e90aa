"""The program `threepass`: one subcommand a function, one flag an argument, the same words as in Python."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from .train.config import Config
from .train.extras import require


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 after an error, 2 for bad usage, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    sys.path.insert(0, "")  # a model of the user's own, "module:function", is looked for in the folder they stand in
    try:
        tyro = require("tyro", "the command line")
        about = "Three-pass learning: train on the loss and on its gradient at the input. --debug shows tracebacks."
        tyro.extras.subcommand_cli_from_dict(
            commands(), prog="threepass", description=about, args=[a for a in arguments if a != "--debug"]
        )
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, ImportError) as error:
        if debug:
            raise
        print(f"threepass: {error}", file=sys.stderr)
        return 1
    return 0


def commands() -> dict[str, Callable[..., None]]:
    """The subcommands; settings of the config are flags of their own."""
    tyro = require("tyro", "the command line")
    Settings = Annotated[Config, tyro.conf.OmitArgPrefixes]  # noqa: N806
    Name = Annotated[str, tyro.conf.Positional]  # noqa: N806

    def train(
        config: Settings,
        data: str = "digits",
        model: str = "mlp",
        name: str | None = None,
        model_options: str = "{}",
        init: str | None = None,
        data_dir: Path | None = None,
        device: str = "auto",
        resume: Path | None = None,
    ) -> None:
        """Train a model on a data set; metrics and checkpoints go to runs/NAME.

        Args:
            data: digits, mnist, fashion-mnist, cifar10, cifar100, or a folder of .npy / .npz arrays.
            model: mlp, plain20, resnet20 (or another depth 6n + 2), vit, or module:function of your own.
            name: of the run; default: MODEL-DATA. An existing run is never overwritten.
            model_options: for the model's function, as JSON.
            init: xavier, kaiming, geometric or balanced; default: the model's own initialisation.
            data_dir: where the data is; default: $THREEPASS_DATA, then ~/.cache/threepass.
            device: cpu, cuda, or auto: cuda if there is one.
            resume: go on with the run in this folder; all other flags are its own.
        """
        from .train.runs import Run, fresh

        if resume is not None:
            folder, run = resume, Run.read(resume)
        else:
            options = json.loads(model_options)
            place = str(data_dir) if data_dir is not None else None
            run = Run(data, model, options, init, place, device, config)
            folder = fresh(Path("runs") / (name or f"{model.replace(':', '-')}-{Path(data).name}"))
        try:
            result = run.train(folder, resume=resume is not None)
        except KeyboardInterrupt:
            print(f"threepass: to go on: threepass train --resume {folder}", file=sys.stderr)
            raise
        last = result.history[-1]
        figures = f"loss {last['train_loss']:.4f}, validation error {last['val_error']:.2%}"
        print(f"{folder}: epoch {last['epoch']}, {figures}, input loss {last['val_input_loss']:.4g}")

    def data(name: Name = "digits", download: bool = False, data_dir: Path | None = None) -> None:
        """Find a data set, and say what is in it.

        Args:
            name: digits, mnist, fashion-mnist, cifar10, cifar100, or a folder of .npy / .npz arrays.
            download: fetch it if it is not there.
            data_dir: where it is, or where a download goes; default: $THREEPASS_DATA, then ~/.cache/threepass.
        """
        from .train.data import load

        found = load(name, data_dir, download)
        print(f"{found.name}: {len(found.train)} training and {len(found.val)} validation examples of shape "
              f"{tuple(found.train.x.shape[1:])}, {len(found.classes)} classes")  # fmt: skip
        print("mean", *(f"{m:.4f}" for m in found.mean), " std", *(f"{s:.4f}" for s in found.std))

    def init_study(name: str = "init-study", depth: int = 8, width: int = 256, seed: int = 0) -> None:
        """Measure the variances of both passes at initialisation, against the paper's equations; to runs/NAME.

        Args:
            name: of the folder; an existing one is never overwritten.
            depth: the most layers.
            width: of the layers.
            seed: of weights and data.
        """
        from .study.init_study import run
        from .train.runs import fresh

        out = fresh(Path("runs") / name)
        run(out, depth=depth, width=width, seed=seed)
        print(f"{out}: init-study.svg, init-study.json")

    return {"train": train, "data": data, "init-study": init_study}


def run_and_exit() -> Any:
    raise SystemExit(main())
