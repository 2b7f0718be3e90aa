"""Losses on input gradients: `GradientStep` and `ThreePass` against double backward in the forms that people use.

    python benchmarks/gradient_losses.py --device cpu --out results/gradient-losses/cpu.json
    python benchmarks/gradient_losses.py --device cuda --out results/gradient-losses/h200.json

Nets: `gradient_nets.py`. Methods: `plain`, the step without the loss on g; `double`, eager double backward; `traced`,
output and g traced by make_fx and compiled by Inductor, as NequIP does, with the outer backward pass by AOTAutograd;
`func`, torch.func; `threepass`, `threepass-captured` (compile="trace") and `threepass-compiled`. On a GPU,
`double-graph` and `traced-graph` are the same steps as CUDA graphs, which our captured and compiled steps are too.

First, every net's gradients are compared with double backward in float64 at a tiny size. Memory is the most that a step
allocated, without the CUDA graph, whose memory is a pool of its own. The largest batch, on a GPU: where the peak, in
proportion to the batch but for the weights' gradients, meets the memory of the device.

On a CPU a step has one thread, its seconds are processor time, and the methods of a net take turns.

On a GPU each row is written as soon as it is measured, on a CPU the rows of a net together, and rows that are in the
file are left out, so that a run that was stopped, or that --minutes ended, goes on. --prepare compiles without timing,
so that a later run finds its programs in the caches (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR). --size tiny: a test of
all paths.

Result: results/gradient-losses/h200.json and cpu.json, quoted by docs/gradient-losses.md. On an H200, compiled steps
take 0.23x (discriminator), 0.95x (SIREN) and 0.97x (SchNet) of the time of `traced-graph`.
"""

import argparse
import contextlib
import copy
import gc
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gradient_nets import NETS, SIZES, Problem, make
from torch import Tensor
from torch.func import functional_call

import threepass
from threepass._torch_compat import make_fx
from threepass._version import commit
from threepass.bench import case
from threepass.bench.case import machine
from threepass.bench.timing import peak_bytes, summary, take_turns
from threepass.compile.cuda_graph import CudaGraph

Run = Callable[[], Any]


class Step(NamedTuple):
    """A step ready to run, and, where that replays a CUDA graph, the same without it."""

    run: Run
    bare: Run


def plain(problem: Problem) -> Run:
    weights = list(problem.model.parameters())
    return lambda: torch.autograd.grad(problem.plain(problem.model(**problem.x), problem.y), weights)


def double(problem: Problem) -> Run:
    weights = [p for p in problem.model.parameters() if p.requires_grad]

    def step() -> Any:
        leaf = problem.x[problem.wrt].detach().requires_grad_()
        output = problem.model(**problem.x | {problem.wrt: leaf})
        (g,) = torch.autograd.grad(problem.inner(output, problem.y), leaf, create_graph=True)
        return torch.autograd.grad(problem.loss(output, g, problem.y), weights, allow_unused=True)

    return step


def traced(problem: Problem) -> Run:
    """Output and g as one graph of ATen operations, which torch.compile differentiates and compiles."""
    model, names = problem.model, [n for n, _ in problem.model.named_parameters()]
    buffers = dict(model.named_buffers())
    weights = [p for _, p in model.named_parameters()]

    def output_and_gradient(weights: list[Tensor], x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        leaf = x[problem.wrt].detach().requires_grad_()
        state = dict(zip(names, weights, strict=True)) | buffers
        output = functional_call(model, state, kwargs=x | {problem.wrt: leaf})
        (g,) = torch.autograd.grad(problem.inner(output, problem.y), leaf, create_graph=True)
        return output, g

    module = make_fx(output_and_gradient)(weights, problem.x)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])  # it cuts off derivatives of saved results
        module.graph.erase_node(node)
    module.recompile()
    graph = torch.compile(module, dynamic=False)

    def step() -> Any:
        output, g = graph(weights, problem.x)
        return torch.autograd.grad(problem.loss(output, g, problem.y), weights, allow_unused=True)

    return step


def func(problem: Problem) -> Run:
    model, weights = problem.model, dict(problem.model.named_parameters())

    def loss_of(weights: dict[str, Tensor]) -> Tensor:
        def value(leaf: Tensor) -> tuple[Tensor, Tensor]:
            output = functional_call(model, weights, kwargs=problem.x | {problem.wrt: leaf})
            return problem.inner(output, problem.y), output

        g, output = torch.func.grad(value, has_aux=True)(problem.x[problem.wrt])
        return problem.loss(output, g, problem.y)

    return lambda: tuple(torch.func.grad(loss_of)({n: p.detach() for n, p in weights.items()}).values())


def ours(problem: Problem, compile: bool | str = False) -> Step:
    how: Any = {"compile": compile, "wrt": problem.wrt}
    step: threepass.GradientStep | threepass.ThreePass
    if problem.penalty is None:
        step = threepass.GradientStep(problem.model, problem.loss, **how)
    else:
        how |= {"penalty": problem.penalty, "mode": "exact", "strength": 1.0}
        step = threepass.ThreePass(problem.model, problem.inner, **how)
    weights = list(problem.model.named_parameters())

    def run() -> Any:
        for _, p in weights:
            p.grad = None
        grads = step(problem.x, problem.y).grads
        return tuple(grads.get(n) for n, _ in weights)

    run()
    if step.compiled is None:
        return Step(run, run)
    if not step.compiled.programs:  # a first call may fill a cache of the net's own: its program comes with the second
        run()
    (program,) = step.compiled.programs
    if not next(iter(problem.x.values())).is_cuda:
        return Step(run, run)
    return Step(run, lambda: program.captured.run_without_graph(*program.captured.inputs))


METHODS: dict[str, Callable[[Problem], Step]] = {
    "plain": lambda problem: Step(*2 * [plain(problem)]),
    "double": lambda problem: Step(*2 * [double(problem)]),
    "double-graph": lambda problem: graphed(double(problem)),
    "traced": lambda problem: Step(*2 * [traced(problem)]),
    "traced-graph": lambda problem: graphed(traced(problem)),
    "func": lambda problem: Step(*2 * [func(problem)]),
    "threepass": ours,
    "threepass-captured": lambda problem: ours(problem, compile="trace"),
    "threepass-compiled": lambda problem: ours(problem, compile="require"),
}
COMPILED = ("traced", "threepass-compiled")  # what --prepare runs


def graphed(bare: Run) -> Step:
    bare()
    return Step(CudaGraph(bare).replay, bare)


def difference(grads: Any, reference: Any) -> float:
    """|g - g'| / |g'| over all weights together; a weight without gradient has the gradient 0."""
    pairs = [(g, r) for g, r in zip(grads, reference, strict=True) if r is not None]
    return case.difference([torch.zeros_like(r) if g is None else g for g, r in pairs], [r for _, r in pairs])


def exactness(name: str) -> float:
    """How far our gradients are from double backward's, in float64 on the CPU."""
    problem = make(name, "tiny", dtype=torch.float64)
    other = copy.deepcopy(problem)
    with doubles_by_default():
        return difference(ours(problem).run(), double(other)())


@contextlib.contextmanager
def doubles_by_default() -> Iterator[None]:
    """Some packages make tensors of the default format in their forward pass."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Started(NamedTuple):
    """A step that ran once, on a problem of its own, and its row so far; or no step, and a row that says why."""

    problem: Problem
    step: Step | None
    row: dict[str, Any]


def start(name: str, method: str, size: str, device: str) -> Started:
    """Makes a method's step: the seconds of its first call, and its distance from double backward."""
    problem = make(name, size, device)
    reference = None if method == "plain" else double(copy.deepcopy(problem))()
    began = time.perf_counter()
    try:
        step = METHODS[method](problem)
        grads = step.run()
    except Exception as error:  # whatever a method does not support, the others still count
        return Started(problem, None, {"fails": f"{type(error).__name__}: {str(error).strip()[:300]}"})
    row = {"first_seconds": time.perf_counter() - began, "commit": commit()}
    row["difference"] = None if reference is None else difference(grads, reference)
    return Started(problem, step, row)


def measure(name: str, methods: Iterable[str], size: str, device: str, rounds: int) -> dict[str, dict[str, Any]]:
    """The rows of some methods, whose steps take turns."""
    cuda = device == "cuda"
    started = {method: start(name, method, size, device) for method in methods}
    runs = {method: s.step.run for method, s in started.items() if s.step is not None}
    times = take_turns(runs, rounds, cuda) if cuda else processor_seconds(runs, rounds)
    for method, (problem, step, row) in started.items():
        if step is not None:
            row |= summary(times[method])
            row["peak_bytes"] = peak_bytes(step.bare, cuda)
            if cuda:
                row["largest_batch"] = largest_batch(problem, SIZES[size][name][0], row["peak_bytes"])
    return {method: s.row for method, s in started.items()}


def processor_seconds(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {method: [] for method in runs}
    for _ in range(rounds):
        for method, run in runs.items():
            run()  # a step follows one of its own kind, as in training
            began = time.process_time()
            run()
            times[method].append(time.process_time() - began)
    return times


def largest_batch(problem: Problem, samples: int, peak: int) -> int:
    weights = sum(p.nbytes for p in problem.model.parameters())
    memory = torch.cuda.get_device_properties(0).total_memory - 2 * weights  # the weights, and their gradients
    batch = sum(z.nbytes for z in (*problem.x.values(), *problem.y.values()))
    return int(samples * memory / (peak - weights + batch))


def prepare(name: str, methods: Iterable[str], size: str, device: str) -> None:
    for method in methods:
        began = time.perf_counter()
        try:
            METHODS[method](make(name, size, device)).run()
        except Exception as error:
            print(f"{name}, {method}: {type(error).__name__}: {str(error).strip()[:300]}", flush=True)
            continue
        print(f"{name}, {method}: {time.perf_counter() - began:.0f} s", flush=True)


def show(name: str, method: str, row: dict[str, Any], base: dict[str, Any]) -> None:
    if "fails" in row:
        print(f"{name:<14} {method:<19} fails: {row['fails'].splitlines()[0][:100]}", flush=True)
        return
    ratio = f"{row['median'] / base['median']:5.2f}x" if "median" in base else ""
    batch = f"  largest batch {row['largest_batch']}" if "largest_batch" in row else ""
    print(
        f"{name:<14} {method:<19} {1e3 * row['median']:9.2f} ms {ratio:<6} {row['peak_bytes'] / 2**20:9.1f} MiB{batch}",
        flush=True,
    )


def set_precision(name: str) -> None:
    """Products and convolutions in TF32, or not, as the net is trained; kernels of convolutions chosen by timing."""
    with_tf32 = make(name, "tiny").tf32
    torch.set_float32_matmul_precision("high" if with_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = with_tf32
    torch.backends.cudnn.benchmark = True


def run_net(name: str, given: argparse.Namespace, found: dict[str, Any], deadline: float) -> None:
    """The rows of a net that are not in the file yet: on a GPU one by one, because compiling takes most of its time."""
    size = given.size or given.device
    methods = [m for m in given.methods if given.device == "cuda" or not m.endswith("-graph")]
    if given.prepare:
        prepare(name, [m for m in methods if m in COMPILED], size, given.device)
        return
    entry = found["nets"].setdefault(
        name, {"size": SIZES[size][name], "tf32": torch.backends.cudnn.allow_tf32, "methods": {}}
    )
    rows = entry["methods"]
    missing = [m for m in methods if m not in rows]
    for group in [[m] for m in missing] if given.device == "cuda" else [missing] if missing else []:
        if time.perf_counter() > deadline:
            return
        if "float64_difference" not in entry:
            entry["float64_difference"] = exactness(name)
        rows |= measure(name, group, size, given.device, given.rounds)
        gc.collect()
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        for method in group:
            show(name, method, rows[method], rows.get("plain", {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), help="default: the device's")
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=list(NETS))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no row after so many")
    parser.add_argument("--prepare", action="store_true", help="compile, and time nothing")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    if given.device == "cpu":
        torch.set_num_threads(1)
    deadline = time.perf_counter() + 60 * given.minutes
    found = json.loads(given.out.read_text()) if given.out.exists() else {"nets": {}}
    found |= {"machine": machine(given.device), "threads": torch.get_num_threads()}
    for name in given.nets:
        try:
            set_precision(name)
            run_net(name, given, found, deadline)
        except ModuleNotFoundError as error:
            print(f"{name}: left out, {error.name} is not installed", flush=True)


if __name__ == "__main__":
    main()
