"""Norms and smooth activations: right on this device, and what a step with them costs.

    PYTHONPATH=src python3 benchmarks/norms.py

First every case of tests/rules/test_norm_rules.py on the device, in float64 against double backward and the CPU; then
steps of stacks of one layer, plain training and both modes, eager and captured and compiled whole (ms, and the bytes
that Inductor counts, in tensors of an activation's size). The same file runs in an older checkout, for a comparison.
"""

import copy
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # a cached graph is not counted

import torch
from torch import nn
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import threepass

TESTS = Path(__file__).parents[1] / "tests"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 6 if DEVICE == "cuda" else 2
_aten = torch.ops.aten


def check() -> None:
    """Every case on the device, against the CPU (paper mode) and double backward (exact mode)."""
    sys.path[:0] = [str(TESTS), str(TESTS / "rules")]
    import test_norm_rules as t
    from close import assert_close

    for name in t.CASES:
        model, x, y = t.build(name)
        there, x_there, y_there = copy.deepcopy(model).to(DEVICE), x.to(DEVICE), y.to(DEVICE)
        for options in ({"mode": "paper"}, {"mode": "exact"}):
            expected, got = t.run(model, x, y, **options), t.run(there, x_there, y_there, **options)
            for a, b in (
                (got.backprop_grads, expected.backprop_grads),
                (got.third_grads, expected.third_grads),
            ):
                assert_close({n: g.cpu() for n, g in a.items()}, b, 1e-6)
        assert_close(got.third_grads, t.double_backward(there, x_there, y_there, got.grads), 1e-6)
    print(f"{len(t.CASES)} cases agree on {DEVICE}: paper with the CPU, exact with double backward")


def check_half() -> None:
    """bf16 and fp16 under autocast, channels_last: slope of the scales' gradients on float64's."""
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        model, x, y = stack("batch norm, relu")
        twin = copy.deepcopy(model).double()
        for mode in ("paper", "exact"):
            expected = threepass.three_pass(twin, F.cross_entropy, x.double(), y, mode=mode, separate=True)
            with torch.autocast(DEVICE, dtype):
                got = threepass.three_pass(model, F.cross_entropy, x, y, mode=mode, separate=True)
            slopes = []
            for name in (n for n, p in model.named_parameters() if p.dim() == 1 and "weight" in n):
                a, b = got.third_grads[name].double(), expected.third_grads[name]
                slopes.append(((a * b).sum() / b.square().sum()).item())
            print(f"{dtype} {mode}: slopes of the scales' third pass {min(slopes):.3f} to {max(slopes):.3f}")


def stack(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """LAYERS layers of one kind, and a batch; the channels are the batch norm's 64 or the layer norm's 384."""
    images = kind in ("batch norm, relu", "group norm, silu")
    size = 32 if DEVICE == "cuda" else 8
    x = torch.randn(256 if DEVICE == "cuda" else 8, *((64, size, size) if images else (64, 384)), device=DEVICE)

    def layer() -> list[nn.Module]:
        first = nn.Conv2d(64, 64, 3, padding=1, bias=False) if images else nn.Linear(384, 384)
        rest = {
            "batch norm, relu": lambda: [nn.BatchNorm2d(64), nn.ReLU()],
            "group norm, silu": lambda: [nn.GroupNorm(8, 64), nn.SiLU()],
            "layer norm, gelu": lambda: [nn.LayerNorm(384), nn.GELU()],
            "rms norm, tanh gelu": lambda: [nn.RMSNorm(384), nn.GELU("tanh")],
            "gelu": lambda: [nn.GELU()],
        }[kind]()
        return [first, *rest]

    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)] if images else [Mean(), nn.Linear(384, 10)]
    model = nn.Sequential(*(m for _ in range(LAYERS) for m in layer()), *pool).to(DEVICE)
    if images:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    return model, x, torch.randint(0, 10, (len(x),), device=DEVICE)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def steps(model: nn.Module, autocast: bool):
    """By name, one step as a function of (x, y)."""
    parameters = list(model.parameters())

    def plain(x, y):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        return torch.autograd.grad(loss, parameters)

    def passes(mode):
        def step(x, y):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                return list(threepass.three_pass(model, F.cross_entropy, x, y, mode=mode).grads.values())

        return step

    return {"plain": plain, "paper": passes("paper"), "exact": passes("exact")}


def compiled(step, x, y):
    """The step captured as one graph of ATen operations, and compiled."""
    graph = make_fx(step)(x, y)
    for node in list(graph.graph.nodes):
        if node.target in (_aten.detach.default, _aten.alias.default):
            node.replace_all_uses_with(node.args[0])
    for name, p in list(graph.named_parameters()):
        delattr(graph, name)
        graph.register_buffer(name, p.detach())
    graph.graph.eliminate_dead_code()
    graph.recompile()
    torch._dynamo.reset()
    call = torch.compile(graph, fullgraph=True)

    def run(x, y):
        with torch.no_grad():
            return call(x, y)

    return run


def milliseconds(call, x, y, repeats: int) -> float:
    def once() -> float:
        begin = time.perf_counter()
        call(x, y)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    once(), once()
    return statistics.median(once() for _ in range(repeats))


def measure(kind: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model, x, y = stack(kind)
    counted: list[int] = []
    original = GraphLowering.codegen

    def codegen(self):
        out = original(self)
        counted.append(self.count_bytes()[0])
        return out

    base: dict[str, float] = {}
    for name, step in steps(model, autocast).items():
        eager = milliseconds(step, x, y, 10)
        counted.clear()
        GraphLowering.codegen = codegen
        try:
            whole = milliseconds(compiled(step, x, y), x, y, 20)
        finally:
            GraphLowering.codegen = original
        bytes_ = sum(counted) / (x.numel() * (2 if autocast else 4)) / LAYERS
        base = base or {"eager": eager, "whole": whole}
        print(
            f"{kind:20} {'bf16' if autocast else 'fp32':5} {name:6} eager {eager:8.2f} ms {eager / base['eager']:5.2f}x"
            f"   compiled {whole:8.2f} ms {whole / base['whole']:5.2f}x   {bytes_:6.1f} tensors a layer"
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if (TESTS / "test_norm_rules.py").exists():
        check()
        check_half()
    for what in sys.argv[1:] or ["batch norm, relu", "layer norm, gelu", "group norm, silu", "rms norm, tanh gelu"]:
        for half in (False, True) if DEVICE == "cuda" else (False,):
            try:
                measure(what, half)
            except Exception as error:  # the other rows are wanted all the same
                print(
                    f"{what} {'bf16' if half else 'fp32'}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
                )
