"""The grid on another device: the same gradients as on the CPU. Also a script: `python tests/test_device.py`.

To 1e-6 only, because some of CUDA's float64 kernels have float32 constants.
"""

import copy
import warnings

import pytest
import torch
from cases import CASES
from close import assert_close
from torch.nn import functional as F

import threepass
from threepass import models


def check(case, device: str) -> None:
    model, loss_fn, x, y = case.build()
    there = copy.deepcopy(model).to(device)
    for mode in ("paper", "exact"):
        for options in ({"alpha": 0.3}, {"separate": True}, {"alpha": 1.0}):
            if case.random:  # other numbers are drawn there: only that it runs, and moves no other generator
                r = threepass.three_pass(there, loss_fn, x.to(device), y.to(device), mode=mode, **options)
                assert all(torch.isfinite(g).all() for g in r.grads.values())
                continue
            a = threepass.three_pass(copy.deepcopy(model), loss_fn, x, y, mode=mode, **options)
            b = threepass.three_pass(copy.deepcopy(there), loss_fn, x.to(device), y.to(device), mode=mode, **options)
            assert_close({n: g.cpu() for n, g in b.grads.items()}, a.grads, 1e-6)
            if options == {"separate": True}:
                assert_close({n: g.cpu() for n, g in b.third_grads.items()}, a.third_grads, 1e-6)


def main(device: str) -> list[str]:
    """Every case; returns what failed."""
    failed = []
    warnings.simplefilter("ignore")
    for case in CASES:
        try:
            check(case, device)
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {str(error)[:500]}")
    return failed


def test_the_grid_on_an_accelerator():
    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    assert not main("cuda")


COMPILED = {
    "mlp": (lambda: models.mlp(48, 64, 64, 10), (32, 48)),
    "plain": (lambda: models.plain(8), (64, 3, 16, 16)),
    "resnet": (lambda: models.resnet(8), (64, 3, 16, 16)),
    "vit": (lambda: models.vit(image=16, width=64, depth=2, heads=2), (64, 3, 16, 16)),
}


@pytest.mark.parametrize("compile", [True, "trace"])
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("name", COMPILED)
def test_a_captured_step_on_a_gpu_is_the_eager_one(name, mode, compile):
    """Replayed as a CUDA graph, compiled with our kernels or with an eager step's: gradients, buffers, `p.grad`."""
    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    torch.manual_seed(0)
    make, shape = COMPILED[name]
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    model = make().to("cuda", memory_format=layout)
    x, y = torch.randn(shape).to("cuda", memory_format=layout), torch.randint(10, shape[:1]).cuda()
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, mode=mode, compile=compile)
    with warnings.catch_warnings(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        warnings.simplefilter("ignore", threepass.NormalizationWarning)
        warnings.simplefilter("error", threepass.UncompiledWarning)
        losses = [step(x, y).loss, step(x, y).loss]
        expected = [threepass.three_pass(twin, F.cross_entropy, x, y, alpha=0.3, mode=mode) for _ in range(2)]
    assert losses[0].data_ptr() != losses[1].data_ptr()
    assert step.compiled.graph_bytes > 0
    sums = {n: 2 * g for n, g in expected[1].grads.items()}
    assert_close({n: p.grad for n, p in model.named_parameters()}, sums, 1e-4)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("settings", [{"alpha": 1.0}, {"alpha": 0.3}, {"strength": 0.1, "mode": "exact"}], ids=str)
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("classes", [10, 100])
def test_recorded_training_on_a_gpu_is_eager_training(precision, settings, classes):
    """From images on the device to updated weights, compiled or not: losses and input losses of both splits."""
    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    from threepass.train.data import DataSet, Split

    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (512, 3, 32, 32), generator=g, dtype=torch.uint8).cuda()
    y = torch.randint(0, classes, (512,), generator=g).cuda()
    data = DataSet(
        Split(x, y), Split(x[:256], y[:256]), (0.5,) * 3, (0.25,) * 3, tuple(map(str, range(classes))), "made"
    )
    shared = {
        "epochs": 2,
        "batch_size": 128,
        "lr": 0.01,
        "precision": precision,
        "channels_last": True,
        "augment": True,
    }
    runs = []
    for compile in (False, "trace", "require"):
        torch.manual_seed(0)
        model = models.plain(20, classes=classes).cuda()
        runs.append(threepass.fit(model, data, compile=compile, **shared, **settings).history)
    eager, *captured = runs
    for history in captured:
        for ours, theirs in zip(history, eager, strict=True):
            for name in ("train_loss", "train_input_loss", "val_loss", "val_input_loss"):
                rel = 0.1 if name.endswith("input_loss") else 0.01
                assert ours[name] == pytest.approx(theirs[name], rel=rel), name


def test_programs_for_several_shapes_share_memory_on_a_gpu():
    """Sums in `p.grad`, begun by one CUDA graph, outlast the replays of the others and the end of their own graph."""
    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    torch.manual_seed(0)
    model = models.mlp(48, 64, 10).double().cuda()
    model.register_forward_pre_hook(lambda module, args: args[0].reshape(len(args[0]), 48))  # len: no dynamic program
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    step.compiled.max_programs = 2
    batches = {n: (torch.randn(n, 48).double().cuda(), torch.randint(10, (n,)).cuda()) for n in (8, 16, 24)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", threepass.UncompiledWarning)
        for order in ([8, 8, 16], [16, 8, 16], [24, 24, 16], [24, 24, 24], [24, 16, 24], [16, 24, 8]):
            model.zero_grad()
            expected = [threepass.three_pass(model, F.cross_entropy, *batches[n]).grads for n in order]
            for n in order:
                step(*batches[n])
            sums = {name: sum(grads[name] for grads in expected) for name in expected[0]}
            assert_close({n: p.grad for n, p in model.named_parameters()}, sums, 1e-6)
    assert [entry.label[-9:] for entry in step.compiled.programs.entries] == ["int64[16]", "int64[24]"]


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["linear", "conv", "norm"])
def test_slope_of_the_third_pass_is_one_in_a_compiled_bf16_step_on_a_gpu(kind):
    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    from narrow_slopes import bf16_slopes

    slopes = bf16_slopes(kind, 0.5, 1e-2, compile_=True, device="cuda")
    assert abs(slopes.mean() - 1) <= 3 * slopes.std() / len(slopes) ** 0.5 + 0.02
    assert slopes.std() / len(slopes) ** 0.5 < 0.1


@pytest.mark.parametrize("present", ["qr", "qk", "qv", "qkvr"])
@pytest.mark.parametrize("size", [(197, 77, 40, 24), (50, 50, 40, 24), (50, 50, 64, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_attention_whose_heads_have_two_widths_on_a_gpu(dtype, size, present):
    """Widths whose blocks would be padded to different sizes, each by itself: see `kernels/attention`."""
    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    from threepass.kernels.attention import attention_bend, attention_tangent
    from threepass.rules.attention import Heads, Scores, curved, tangent

    torch.manual_seed(0)
    queries, keys, n, w = size
    shapes = {"q": (queries, n), "k": (keys, n), "v": (keys, w), "r": (queries, w)}
    q, k, v, d = (torch.randn(2, 3, *shapes[z], device="cuda", dtype=dtype) for z in "qkvr")
    *t, r = (torch.randn(2, rows, 3, width, device="cuda", dtype=dtype).transpose(1, 2) if z in present else None
             for z, (rows, width) in shapes.items())  # fmt: skip
    given, how, scores = [q, k, v, *t, d, r], (0.2, False, "tf32x3", True), Scores(0.2)
    wide = [None if z is None else z.double() for z in given]
    at, t = Heads(*wide[:3]), Heads(*wide[3:6])
    got = [attention_tangent(*given[:6], *how), *attention_bend(*given, *how)]
    for g, e in zip(got, [tangent(at, t, scores), *curved(at, t, *wide[6:], scores)], strict=True):
        assert (g - e).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * e.norm()


if __name__ == "__main__":
    found = main("cuda" if torch.cuda.is_available() else "cpu")
    print("\n".join(found) or f"{len(CASES)} cases agree")
