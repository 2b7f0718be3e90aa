"""Losses on input gradients: `GradientStep` and `ThreePass` against double backward in the forms that people use.

    python benchmarks/gradient_losses.py --device cpu --out results/gradient-losses/cpu.json
    python benchmarks/gradient_losses.py --device cuda --out results/gradient-losses/h200.json

Nets: `gradient_nets.py`. Methods: `plain`, the step without the loss on g; `double`, eager double backward; `traced`,
output and g traced by make_fx and compiled by Inductor, as NequIP does, with the outer backward pass by AOTAutograd;
`func`, torch.func; `threepass` and `threepass-compiled`. First, every net's gradients are compared with double backward
in float64 at a tiny size. Then the methods of a net take turns; memory is the most that a step allocated. The largest
batch, on a GPU: where the peak at this batch and at half of it, continued as a line, meets the memory of the device.

A net that is in the file already is left out, so that a run that was stopped goes on. --size tiny: a test of all paths.
"""

import argparse
import contextlib
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gradient_nets import NETS, SIZES, Problem, make
from torch import Tensor
from torch.func import functional_call

import threepass
from threepass._torch_compat import make_fx
from threepass.bench.case import machine
from threepass.bench.measure import peak_bytes, summary, take_turns

Step = Callable[[], Any]


def plain(problem: Problem) -> Step:
    weights = list(problem.model.parameters())
    return lambda: torch.autograd.grad(problem.plain(problem.model(**problem.x), problem.y), weights)


def double(problem: Problem) -> Step:
    weights = [p for p in problem.model.parameters() if p.requires_grad]

    def step() -> Any:
        leaf = problem.x[problem.wrt].detach().requires_grad_()
        output = problem.model(**problem.x | {problem.wrt: leaf})
        (g,) = torch.autograd.grad(problem.inner(output, problem.y), leaf, create_graph=True)
        return torch.autograd.grad(problem.loss(output, g, problem.y), weights, allow_unused=True)

    return step


def traced(problem: Problem) -> Step:
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


def func(problem: Problem) -> Step:
    model, weights = problem.model, dict(problem.model.named_parameters())

    def loss_of(weights: dict[str, Tensor]) -> Tensor:
        def value(leaf: Tensor) -> tuple[Tensor, Tensor]:
            output = functional_call(model, weights, kwargs=problem.x | {problem.wrt: leaf})
            return problem.inner(output, problem.y), output

        g, output = torch.func.grad(value, has_aux=True)(problem.x[problem.wrt])
        return problem.loss(output, g, problem.y)

    return lambda: tuple(torch.func.grad(loss_of)({n: p.detach() for n, p in weights.items()}).values())


def ours(problem: Problem, compile: bool = False) -> Step:
    how: Any = {"compile": "require" if compile else False}
    if problem.penalty is None:
        step = threepass.GradientStep(problem.model, problem.loss, wrt=problem.wrt, **how)
    else:
        how |= {"penalty": problem.penalty, "mode": "exact", "strength": 1.0, "wrt": problem.wrt}
        step = threepass.ThreePass(problem.model, problem.inner, **how)
    weights = list(problem.model.named_parameters())

    def run() -> Any:
        for _, p in weights:
            p.grad = None
        grads = step(problem.x, problem.y).grads
        return tuple(grads.get(n) for n, _ in weights)

    return run


METHODS: dict[str, Callable[[Problem], Step]] = {
    "plain": plain, "double": double, "traced": traced, "func": func, "threepass": ours,
    "threepass-compiled": lambda problem: ours(problem, compile=True),
}  # fmt: skip


def difference(grads: Any, reference: Any) -> float:
    """|g - g'| / |g'| over all weights together; a weight without gradient has the gradient 0."""
    pairs = [
        (torch.zeros(()).to(r) if g is None else g, r) for g, r in zip(grads, reference, strict=True) if r is not None
    ]
    apart = sum((g.double() - r.double()).square().sum().item() for g, r in pairs)
    return (apart / sum(r.double().square().sum().item() for _, r in pairs)) ** 0.5


def exactness(name: str) -> float:
    """How far our gradients are from double backward's, in float64 on the CPU."""
    problem = make(name, *SIZES["tiny"][name], dtype=torch.float64)
    other = copy.deepcopy(problem)
    with doubles_by_default():
        return difference(ours(problem)(), double(other)())


@contextlib.contextmanager
def doubles_by_default() -> Iterator[None]:
    """Some packages make tensors of the default format in their forward pass."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def measure(name: str, size: int, width: int, device: str, rounds: int, methods: list[str]) -> dict[str, Any]:
    """By method: seconds, peak bytes, the first call's seconds, distance from double backward; or why it fails."""
    problem, steps, rows = make(name, size, width, device), {}, {}
    reference = double(copy.deepcopy(problem))()
    for method in methods:
        began = time.perf_counter()
        try:
            step = METHODS[method](copy.deepcopy(problem))
            apart = None if method == "plain" else difference(step(), reference)
            step()
        except Exception as error:  # whatever a method does not support, the others still count
            rows[method] = {"fails": f"{type(error).__name__}: {str(error).strip()[:300]}"}
            continue
        steps[method] = step
        rows[method] = {"first_seconds": time.perf_counter() - began, "difference": apart}
    seconds = take_turns(steps, rounds, device == "cuda")
    for method, step in steps.items():
        rows[method] |= summary(seconds[method]) | {"peak_bytes": peak_bytes(step, device == "cuda")}
    return rows


def largest_batch(name: str, size: int, width: int, rows: dict[str, Any]) -> None:
    """Adds to each row the batch whose peak, on the line through this batch and half of it, is the device's memory."""
    memory = torch.cuda.get_device_properties(0).total_memory
    problem = make(name, size // 2, width, "cuda")
    for method, row in rows.items():
        if "fails" in row:
            continue
        step = METHODS[method](copy.deepcopy(problem))
        step()
        slope = (row["peak_bytes"] - peak_bytes(step, True)) / (size - size // 2)
        row["largest_batch"] = int(size + (memory - row["peak_bytes"]) / slope) if slope > 0 else None


def show(name: str, entry: dict[str, Any]) -> None:
    print(f"{name}: {entry['samples']} samples, float64 difference {entry['float64_difference']:.1e}")
    base = entry["methods"].get("plain", {}).get("median")
    for method, row in entry["methods"].items():
        if "fails" in row:
            print(f"  {method:<20} fails: {row['fails'].splitlines()[0][:90]}")
            continue
        ratio = f"{row['median'] / base:5.2f}x" if base else ""
        batch = f"  largest batch {row['largest_batch']}" if "largest_batch" in row else ""
        print(f"  {method:<20} {1e3 * row['median']:9.2f} ms {ratio} {row['peak_bytes'] / 2**20:9.1f} MiB{batch}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), help="default: the device's")
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=list(NETS))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    found = json.loads(given.out.read_text()) if given.out.exists() else {"nets": {}}
    found |= {"machine": machine(given.device), "threads": torch.get_num_threads()}
    for name in [n for n in given.nets if n not in found["nets"]]:
        size, width = SIZES[given.size or given.device][name]
        try:
            entry: dict[str, Any] = {"samples": size, "width": width, "float64_difference": exactness(name)}
        except ModuleNotFoundError as error:
            print(f"{name}: left out, {error.name} is not installed")
            continue
        entry["methods"] = measure(name, size, width, given.device, given.rounds, given.methods)
        if given.device == "cuda":
            largest_batch(name, size, width, entry["methods"])
        show(name, entry)
        found["nets"][name] = entry
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
