"""`nn.SyncBatchNorm`: 2 ranks x B/2 is 1 rank x B with BatchNorm. Two gloo processes run all cases."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from close import assert_close
from processes import RANKS, spawned
from small_batches import TERMS, UNEVEN, B, of_gradients, refused
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import threepass

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def net() -> nn.Sequential:
    """Norms with and without scale and shift, of images and of vectors, with both kinds of running averages."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(),
        nn.Conv2d(4, 3, 2, bias=False), nn.BatchNorm2d(3, affine=False), nn.ReLU(), nn.Flatten(),
        nn.Linear(12, 6, bias=False), nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, 4),
    ).double()  # fmt: skip
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([1.0, -0.5, 2.0, 0.0]))
        model[8].bias.copy_(torch.linspace(-1, 1, 6))
    return model


class Late(nn.Module):
    """A norm before the input, which is the output of `embed`, and one after it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()).double()
        self.head = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)).double()

    def forward(self, x):
        return self.head(self.embed(x))


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, *(shape or (2, 5, 5))).double(), torch.randint(0, 4, (B,))


def parts(rank: int, sizes=(4, 4), shape=()) -> list[torch.Tensor]:
    return [z.split(list(sizes))[rank] for z in batch(*shape)]


def wrapped(model: nn.Module) -> DistributedDataParallel:
    """DistributedDataParallel itself refuses a model that has such norms on a CPU: they are put in afterwards."""
    ddp = DistributedDataParallel(model)
    ddp.module = nn.SyncBatchNorm.convert_sync_batchnorm(ddp.module)
    return ddp


def state_of(model: nn.Module) -> tuple[dict, dict]:
    inner = getattr(model, "module", model)
    full = {n: p.grad for n, p in inner.named_parameters() if p.grad is not None}
    grads = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in full.items()}
    return grads, {n: b.double() for n, b in inner.named_buffers()}


def twice(model: nn.Module, x, y, **options) -> tuple[dict, dict]:
    """The gradients of a second step, and the running statistics of both."""
    step = threepass.ThreePass(model, F.cross_entropy, **options)
    for _ in range(2):
        model.zero_grad()
        step(x, y)
    return state_of(model)


def accumulated(model: nn.Module, x, y, by_loss: bool, size: int) -> tuple[dict, dict]:
    """Micro-batches, each with statistics of its own; gradients are exchanged after the last."""
    step = threepass.ThreePass(model, F.cross_entropy, batch_size=B, mode="exact")
    micro = list(zip(x.split(size), y.split(size), strict=True))
    for i, part in enumerate(micro):
        waits = i < len(micro) - 1 and isinstance(model, DistributedDataParallel)
        with model.no_sync() if waits else contextlib.nullcontext():
            if by_loss:
                (step.loss(*part) / len(micro)).backward()
            else:
                step(*part)
    return state_of(model)


def sharded(rank, **options):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (RANKS,)))
    return twice(model, *parts(rank), **options)


def gradient_step(model, x, y) -> tuple[dict, dict]:
    threepass.GradientStep(model, lambda output, g, y: of_gradients(output, g.flatten(1), y))(x, y)
    return state_of(model)


def half(model, x, y, dtype, **options) -> dict:
    """The third term alone, of a step under autocast."""
    model, x = model.float(), x.float()
    with torch.autocast("cpu", dtype=dtype):
        return threepass.ThreePass(model, F.cross_entropy, separate=True, **options)(x, y).third_grads


def averaged(grads: dict) -> dict:
    for g in grads.values():
        dist.all_reduce(g)
    return {n.removeprefix("module."): g / RANKS for n, g in grads.items()}


def pure(rank) -> dict:
    """`three_pass` with the whole batch's size: the gradients of the ranks add up."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    r = threepass.three_pass(model, F.cross_entropy, *parts(rank), mode="exact", batch_size=B)
    return {n: g * RANKS for n, g in averaged(r.grads).items()}


def compiled(rank):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = twice(wrapped(net()), *parts(rank), compile=True, mode="exact")
    required = refused(lambda x, y: twice(wrapped(net()), *parts(rank), compile="require"), threepass.CaptureError)
    return found, [str(w.message) for w in seen], required


def results(rank: int) -> dict:
    table: dict = {}
    for name, options in TERMS.items():
        table["even", name] = twice(wrapped(net()), *parts(rank), **options)
        table["uneven", name] = twice(wrapped(net()), *parts(rank, UNEVEN), batch_size=B, **options)
    for by_loss in (False, True):
        table["accumulated", by_loss] = accumulated(wrapped(net()), *parts(rank), by_loss, 2)
    table["sharded"] = {mode: sharded(rank, mode=mode) for mode in ("paper", "exact")}
    table["gradient step"] = gradient_step(wrapped(net()), *parts(rank))
    table["input_at"] = twice(wrapped(Late()), *parts(rank, shape=(5,)), input_at="embed", mode="exact")
    table["eval"] = twice(wrapped(net()).eval(), *parts(rank))
    table["three_pass"] = pure(rank)
    table["compile"] = compiled(rank)
    model = wrapped(net())
    table["coverage"] = [(r.parameter, r.operation, r.rule) for r in threepass.coverage(model, parts(rank)[0])]
    for name, dtype in HALF.items():
        for mode in ("paper", "exact"):
            options = {"mode": mode, "strength": 0.5, "batch_size": B}
            table[name, mode] = averaged(half(wrapped(net()), *parts(rank, UNEVEN), dtype, **options))
    return table


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return spawned(results, tmp_path_factory.mktemp("norms"), threepass.NormalizationWarning)


def assert_same(found: tuple[dict, dict], expected: tuple[dict, dict]) -> None:
    for got, whole in zip(found, expected, strict=True):
        assert_close(got, whole, 1e-10)


@pytest.fixture(autouse=True)
def of_norms_not_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", threepass.NormalizationWarning)
        yield


@pytest.mark.parametrize("sizes", ["even", "uneven"])
@pytest.mark.parametrize("terms", TERMS)
def test_two_ranks_are_one_with_batch_norm(ranks, terms, sizes):
    expected = twice(net(), *batch(), **TERMS[terms])
    for rank in ranks:
        assert_same(rank[sizes, terms], expected)


@pytest.mark.parametrize("by_loss", [False, True])
def test_micro_batches(ranks, by_loss):
    """A micro-batch of a norm is that of all ranks: the first halves of the ranks' samples, then the second."""
    x, y = (torch.cat([z[[0, 1, 4, 5]], z[[2, 3, 6, 7]]]) for z in batch())
    for rank in ranks:
        assert_same(rank["accumulated", by_loss], accumulated(net(), x, y, by_loss, 4))


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_sharded_models(ranks, mode):
    for rank in ranks:
        assert_same(rank["sharded"][mode], twice(net(), *batch(), mode=mode))


def test_gradient_steps(ranks):
    """A loss of its own on each rank, with g of the sum over all ranks' samples."""
    for rank in ranks:
        assert_same(rank["gradient step"], gradient_step(net(), *batch()))


def test_norms_before_the_input(ranks):
    for rank in ranks:
        assert_same(rank["input_at"], twice(Late(), *batch(5), input_at="embed", mode="exact"))


def test_eval_mode_uses_the_running_statistics(ranks):
    for rank in ranks:
        assert_same(rank["eval"], twice(net().eval(), *batch()))


def test_three_pass_with_a_batch_size_gives_terms_that_add_up(ranks):
    expected = threepass.three_pass(net(), F.cross_entropy, *batch(), mode="exact").grads
    assert_close(ranks[0]["three_pass"], expected, 1e-10)


def test_compile_runs_eagerly_and_says_why(ranks):
    found, messages, required = ranks[0]["compile"]
    assert_same(found, twice(net(), *batch(), mode="exact"))
    assert len(messages) == 1
    for message in (messages[0], required):
        assert "SyncBatchNorm communicates between the ranks in every pass" in message


def test_coverage_shows_its_rule(ranks):
    assert ("module.1.weight", "SyncBatchNorm", "fast") in ranks[0]["coverage"]


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("name", HALF)
def test_half_formats_scale_all_ranks_alike(ranks, name, mode):
    """Tangents are scaled by what is largest on a rank, and errors by its samples: a norm adds those of all ranks."""
    expected = half(net(), *batch(), HALF[name], mode=mode, strength=0.5)
    for rank in ranks:
        assert_close(rank[name, mode], expected, 0.05)


def on_gpu(rank: int) -> dict:
    """Gradients and statistics of PyTorch's own SyncBatchNorm, and of three passes: with alpha=1, and in exact mode."""
    x, y = (z.cuda() for z in parts(rank))
    ddp = [DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net().cuda())) for _ in range(3)]
    for _ in range(2):
        ddp[0].zero_grad()
        F.cross_entropy(ddp[0](x), y).backward()
    own = state_of(ddp[0])
    found = {"plain": own, "alpha=1": twice(ddp[1], x, y, alpha=1.0), "exact": twice(ddp[2], x, y, mode="exact")}
    return {name: [{n: z.cpu() for n, z in each.items()} for each in state] for name, state in found.items()}


def test_on_a_gpu_they_are_those_of_pytorch(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    for rank in spawned(on_gpu, tmp_path):
        for got, expected in zip(rank["alpha=1"], rank["plain"], strict=True):
            assert_close(got, expected, 1e-6)
        for got, expected in zip(rank["exact"], twice(net(), *batch(), mode="exact"), strict=True):
            assert_close(got, expected, 1e-6)
