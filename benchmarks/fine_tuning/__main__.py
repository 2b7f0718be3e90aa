"""Fine-tunes MiniLM on TREC-6 and SST-2: plain training, three passes in both modes, R-Drop, FreeLB and SAM.

    python benchmarks/fine_tuning --data DIR --precision bf16 --out results/fine-tuning/runs.jsonl

For each task and number of training examples (100, 500, all), every method's learning rate and strength are chosen by
the accuracy on the validation set with a seed of their own (SEARCH); then other seeds, --seeds of them, are run with
them and measured on the test set: clean, with words left out, with typing errors, with noise on the embeddings. "plain,
2x" is plain training with twice the steps, for the methods that cost twice as much.

A run is a line of the file; runs that are in the file are not repeated. Several processes may work on one file: each
takes the next cell that no other has in hand.

Result: results/fine-tuning/runs.jsonl, quoted by docs/fine-tuning.md: so far no gain over plain
training that one could rely on.
"""

import argparse
import copy
import itertools
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from methods import VALUES, Step, make_step
from tasks import TASKS, Classifier, Example, Task, Words, accuracies, accuracy, load, model_folder

import threepass
from threepass.train.files import locked_file

SIZES: dict[str, int] = {"100": 120, "500": 310, "all": 900}  # training examples -> steps: 20, 10, 2 to 3 epochs
RATES = {"100": (1e-4, 3e-4), "500": (1e-4, 3e-4), "all": (3e-5, 1e-4)}  # at 3e-5, 100 examples are too few steps
SEARCH, SEEDS = 100, 3  # the seed of the search, and how many others are measured: 0, 1, 2
SLOWEST_FIRST = ("freelb", "sam", "exact", "paper", "r-drop", "plain")
BATCH, WEIGHT_DECAY, WARM_UP, CLIP = 16, 0.01, 0.1, 1.0


@dataclass(frozen=True)
class Cell:
    """A task, a number of examples and a method: its search and its runs."""

    task: str
    size: str
    method: str
    longer: int = 1

    @property
    def title(self) -> str:
        return self.method if self.longer == 1 else f"{self.method}, {self.longer}x"

    @property
    def name(self) -> str:
        return f"{self.task} {self.size} {self.title}"

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w-]+", "-", self.name)


@dataclass(frozen=True)
class Setting:
    cell: Cell
    rate: float
    value: float
    seed: int

    @property
    def key(self) -> dict:
        return asdict(self.cell) | {"rate": self.rate, "value": self.value, "seed": self.seed}


def cells() -> Iterator[Cell]:
    """The longest first, so that several processes end at the same time."""
    for size in reversed(SIZES):
        for method in sorted(VALUES, key=SLOWEST_FIRST.index):
            for task in TASKS:
                yield Cell(task, size, method)
        for task in TASKS:
            yield Cell(task, size, "plain", longer=2)


class Runs:
    """The lines of the file: one a run."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.read()

    def read(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        self.records = [json.loads(line) for line in lines]

    def find(self, setting: Setting) -> dict | None:
        return next((r for r in self.records if all(r[k] == v for k, v in setting.key.items())), None)

    def add(self, record: dict) -> None:
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class Study:
    def __init__(self, args: argparse.Namespace):
        self.args, self.runs, self.folder = args, Runs(args.out), args.model or model_folder()
        self.tasks: dict[str, Task] = {name: load(name, args.data) for name in TASKS}
        self.words = {name: Words(self.folder, length, args.device) for name, length in TASKS.items()}
        self.end = time.monotonic() + 60 * args.minutes
        self.made: dict[tuple[str, str], tuple[Classifier, Step]] = {}

    def run(self) -> None:
        for cell in [cell for cell in cells() if self.args.only in cell.name]:
            with locked_file(self.runs.path.with_name(f".{cell.file_name}.lock")) as (_, mine):
                if mine:
                    self.runs.read()  # another process may have finished it
                    self.finish(cell)

    def finish(self, cell: Cell) -> None:
        """The search of a cell, and its runs with what was chosen."""
        grid = itertools.product(RATES[cell.size], VALUES[cell.method])
        searched = [self.result(Setting(cell, rate, value, SEARCH)) for rate, value in grid]
        best = max(searched, key=lambda r: r["validation"])
        for seed in range(self.args.seeds):
            self.result(Setting(cell, best["rate"], best["value"], seed))

    def result(self, setting: Setting) -> dict:
        """The record of a run, which is made if there is none."""
        record = self.runs.find(setting)
        if record is None:
            if time.monotonic() > self.end:
                raise SystemExit(f"the time is over; {len(self.runs.records)} runs are in {self.args.out}")
            record = setting.key | self.train(setting)
            self.runs.add(record)
            told = f"validation {record['validation']:.1f}"
            told += "" if record["test"] is None else f", test {record['test']['clean']:.1f}"
            told += f", {record['seconds']:.0f} s"
            print(f"{setting.cell.name} {setting.rate:g} {setting.value:g}: {told}", flush=True)
        return record

    def prepared(self, setting: Setting) -> tuple[Classifier, Step]:
        """The pretrained encoder with a new head, and its step; one compiled step serves all strengths of a task."""
        cell, device = setting.cell, self.args.device
        torch.manual_seed(setting.seed)
        fresh, known = Classifier(self.folder, self.tasks[cell.task].classes), (cell.task, cell.method)
        if known not in self.made:
            model = copy.deepcopy(fresh).to(device)
            self.made[known] = model, make_step(cell.method, model, setting.value, device != "cpu")
        model, step = self.made[known]
        if isinstance(step, threepass.ThreePass):
            step.options["strength"] = setting.value
        else:
            step = make_step(cell.method, model, setting.value, False)
        model.load_state_dict(fresh.state_dict())
        return model.train(), step

    def precision(self) -> AbstractContextManager:
        """Around steps and evaluations; the weights stay in float32."""
        return torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.precision == "bf16")

    def train(self, setting: Setting) -> dict:
        cell = setting.cell
        task, words = self.tasks[cell.task], self.words[cell.task]
        model, step = self.prepared(setting)
        optimizer = torch.optim.AdamW(model.parameters(), setting.rate, weight_decay=WEIGHT_DECAY)
        steps = max(2, round(cell.longer * SIZES[cell.size] * self.args.scale))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: share_of_rate(i, steps))
        examples = task.examples(None if cell.size == "all" else int(cell.size), setting.seed)
        began = time.perf_counter()
        for batch in batches(examples, steps, setting.seed):
            optimizer.zero_grad()
            with self.precision():
                step(*words(batch))
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
        seconds = time.perf_counter() - began
        most = None if self.args.scale == 1 else 50
        with self.precision():
            validation = accuracy(model, words, task.validation[:most])
            test = None if setting.seed == SEARCH else accuracies(model, words, task.test[:most])
        return {
            "steps": steps,
            "seconds": seconds,
            "validation": validation,
            "test": test,
            "device": self.args.device,
            "precision": self.args.precision,
            "versions": {"torch": torch.__version__, "threepass": threepass.__version__},
        }


def share_of_rate(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero."""
    warm = max(1, math.ceil(WARM_UP * steps))
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm))


def batches(examples: list[Example], steps: int, seed: int) -> Iterator[list[Example]]:
    """Epoch after epoch, each in an order of its own; a last, smaller batch is left out."""
    draw, done, size = torch.Generator().manual_seed(seed), 0, min(BATCH, len(examples))
    while True:
        order = torch.randperm(len(examples), generator=draw).tolist()
        for start in range(0, len(order) - size + 1, size):
            if done == steps:
                return
            yield [examples[i] for i in order[start : start + size]]
            done += 1


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of trec.train.txt and the others")
    parser.add_argument("--model", type=Path, help="a folder with config.json, model.safetensors and tokenizer.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32", help="bf16: by autocast")
    parser.add_argument("--out", type=Path, default=Path("results/fine-tuning/runs.jsonl"))
    parser.add_argument("--only", default="", help="cells whose name contains this: 'trec 100' or 'exact'")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run is begun after so long")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many are measured on the test set")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the steps; below 1 also few test examples: a trial"
    )
    Study(parser.parse_args(arguments)).run()


if __name__ == "__main__":
    main()
