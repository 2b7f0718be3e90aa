"""Captures of ten nets, each at several draws of weights and data: how often the check refuses a program, and its cost.

    python benchmarks/captures.py --device cuda --size real --draws 5 --out results/bench/h200-captures.json

A program refers to its parameters, so each net is traced and compiled once in every precision and mode, and checked
again at other weights and other data: a check that refuses one of them is a false alarm, unless the program is wrong.
For each check: the largest ratio of a compiled figure to what is allowed (1 is refused), and the sizes of both errors.
Rows that are already in the file of results are not measured again.

Result: results/bench/h200-captures.json and cpu-captures.json, quoted by docs/compile.md.
On an H200: 200 checks, none refused, the largest error 0.69 of the allowed one.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
warnings.simplefilter("ignore")

from families import NETS, Problem, make, on  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten  # noqa: E402

from threepass.compile import check as checking  # noqa: E402
from threepass.compile.capture import Build, capture  # noqa: E402
from threepass.compile.check import Outputs  # noqa: E402
from threepass.core.engine import Task, run  # noqa: E402
from threepass.core.options import Options  # noqa: E402
from threepass.errors import CaptureError  # noqa: E402

MODES = {"paper": Options(), "exact": Options(strength=0.1, mode="exact")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=["tiny", "real"], default="tiny")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--precisions", default=None, help="of tf32, bf16, float32")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--processes", type=int, default=1, help="so many nets at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stops then, with what is done")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.precisions = args.precisions or ("tf32,bf16" if args.device == "cuda" else "float32,bf16")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    known = [row for row in known if "failed" not in row]
    if args.processes > 1:
        write(args, in_processes(args, known))
    else:
        in_process(args, known)


def write(args: argparse.Namespace, rows: list[dict]) -> None:
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    summary = {
        "captures": sum(len(row["checks"]) for row in rows),
        "refused": sum(not c["passed"] for row in rows for c in row["checks"]),
        "failed": [row["net"] for row in rows if "failed" in row],
    }
    report = {"device": device, "size": args.size, **summary, "rows": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.processes > 1:
        print(json.dumps(summary))


def in_processes(args: argparse.Namespace, known: list[dict]) -> list[dict]:
    """Nets side by side, each in a process of its own."""
    todo, running, rows = args.nets.split(","), {}, [row for row in known if row["net"] not in args.nets.split(",")]
    end = time.monotonic() + 60 * args.minutes
    while todo or running:
        if time.monotonic() > end:
            todo = []
            for process, _ in running.values():
                process.kill()
        while todo and len(running) < args.processes:
            net = todo.pop(0)
            part = args.out.with_name(f"{args.out.stem}-{net}.part")
            part.write_text(json.dumps({"rows": [row for row in known if row["net"] == net]}))
            command = [sys.executable, __file__, "--device", args.device, "--size", args.size, "--draws"]
            command += [str(args.draws), "--nets", net, "--precisions", args.precisions, "--modes", args.modes]
            command += ["--out", str(part)]
            running[net] = (subprocess.Popen(command, env=os.environ), part)
        time.sleep(0.2)
        for net, (process, part) in list(running.items()):
            if process.poll() is not None:
                del running[net]
                rows += json.loads(part.read_text())["rows"] if part.exists() else []
                if process.returncode and time.monotonic() <= end:
                    rows.append({"net": net, "checks": [], "failed": f"exit status {process.returncode}"})
                part.unlink(missing_ok=True)
                write(args, rows)
    return rows


def in_process(args: argparse.Namespace, rows: list[dict]) -> None:
    done = {(row["net"], row["precision"], row["mode"]) for row in rows}
    for net in args.nets.split(","):
        for precision in args.precisions.split(","):
            for mode in args.modes.split(","):
                if (net, precision, mode) in done:
                    continue
                rows.append(one(net, precision, mode, args))
                write(args, rows)
                print({k: v for k, v in rows[-1].items() if k != "checks"}, summary_of(rows[-1]), flush=True)


def summary_of(row: dict) -> str:
    return " ".join(f"{c['worst']:.2f}{'' if c['passed'] else ' REFUSED: ' + c['reason']}" for c in row["checks"])


def one(net: str, precision: str, mode: str, args: argparse.Namespace) -> dict:
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    model, loss_fn, x, y = problem(net, args)
    flat, spec = tree_flatten((x, y))
    options = MODES[mode]
    weights = torch.tensor([options.back, options.third], device=args.device)
    seed = torch.zeros((), dtype=torch.int32, device=args.device)
    penalties: list[int] = []

    def step(weights, seed, *flat):
        x, y = tree_unflatten(list(flat), spec)
        with torch.autocast(args.device, torch.bfloat16, enabled=precision == "bf16"):
            r = run(Task(model, loss_fn, x, y), options, weights=(weights[0], weights[1]), seed=seed, warn=False)
        penalties[:] = [len(r.grads) + 1]
        return [*r.grads.values(), r.loss, r.input_loss, *(z for z in tree_leaves(r.input_grad) if z is not None)]

    inputs = [weights, seed, *flat]
    row: dict = {"net": net, "precision": precision, "mode": mode, "torch": torch.__version__, "checks": []}
    watch = Watch()
    try:
        with watch:
            captured = capture(step, inputs, Build(graph=False), weights=weights, known=Outputs((), penalties))
    except CaptureError as error:
        row["checks"].append(watch.figures | {"passed": False, "reason": str(error)})
        return row
    except Exception as error:  # a fault of the capture, not of the check
        return row | {"failed": f"{type(error).__name__}: {str(error)[:400]}"}
    row |= {"compile_seconds": captured.compile_seconds, "check_seconds": captured.check_seconds}
    row["checks"].append(watch.figures | {"passed": True})
    for draw in range(1, args.draws):
        other, _, x, y = problem(net, args, draw)
        model.load_state_dict(other.state_dict())
        seed.fill_(draw)
        program = captured.program
        values = [*program.state, weights, seed, *tree_flatten((x, y))[0]]
        try:
            with watch:
                checking.check(program.plain, captured.run, values, len(program.state), captured.known)
            row["checks"].append(watch.figures | {"passed": True})
        except CaptureError as error:
            row["checks"].append(watch.figures | {"passed": False, "reason": str(error)})
    return row


def problem(net: str, args: argparse.Namespace, seed: int = 0) -> Problem:
    """On its device; images in channels_last, as `fit` has them, because our convolution kernels take no others."""
    model, loss_fn, x, y = on(args.device, make(NETS[net], args.size, seed=seed))

    def layout(z: torch.Tensor) -> torch.Tensor:
        return z.contiguous(memory_format=torch.channels_last if z.dim() == 4 else torch.contiguous_format)

    return model.to(memory_format=torch.channels_last), loss_fn, tree_map(layout, x), tree_map(layout, y)


class Watch:
    """Keeps the figures that a check compares."""

    def __enter__(self) -> None:
        self.figures, self._judge = {"worst": 0.0, "eager_error": 0.0, "compiled_error": 0.0}, checking.Part.judge
        watch = self

        def judge(part: checking.Part, *names: Any) -> None:
            watch.see(part)
            watch._judge(part, *names)

        checking.Part.judge = judge

    def __exit__(self, *_) -> None:
        checking.Part.judge = self._judge

    def see(self, part: checking.Part) -> None:
        self.figures["worst"] = max(self.figures["worst"], part.worst()[0])
        for name, each in (("eager_error", part.eager), ("compiled_error", part.compiled)):
            known = [f.error for f, e in zip(each, part.eager, strict=True) if e.error < 0.5 and math.isfinite(f.error)]
            self.figures[name] = max([self.figures[name], *known])


if __name__ == "__main__":
    main()
