"""`fully_shard` (FSDP2): 2 ranks x B/2 is 1 rank x B. Two gloo processes run all cases; the tests compare results."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from close import assert_close
from processes import RANKS, spawned
from small_batches import TERMS, B, Tokens, WithUnusedLayer, batch, net, of_gradients, refused, tokens, whole
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import threepass


def sharded(model: nn.Module, parts: bool = True, **options) -> nn.Module:
    """The model sharded over all ranks, its linear layers one by one unless parts=False."""
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for module in list(model.modules()) if parts else []:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def part_of(rank: int) -> list[torch.Tensor]:
    return [z.chunk(RANKS)[rank] for z in batch()]


def grads_of(model: nn.Module) -> dict:
    """The gradients, gathered; each must lie in a DTensor as its parameter does."""
    for name, p in model.named_parameters():
        assert type(p.data).__name__ == "DTensor", name
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def by_step(rank, model=None, shard=None, **options):
    model = sharded(model or net(), **(shard or {}))
    threepass.ThreePass(model, F.cross_entropy, **options)(*part_of(rank))
    return grads_of(model)


def by_loss(rank, **options):
    """A loop that owns backward(), with micro-batches, whose losses it divides by their number."""
    model = sharded(net())
    step = threepass.ThreePass(model, F.cross_entropy, batch_size=B, **options)
    parts = list(zip(*(z.split(2) for z in part_of(rank)), strict=True))
    for i, part in enumerate(parts):
        model.set_requires_gradient_sync(i == len(parts) - 1)
        (step.loss(*part) / len(parts)).backward()
    return grads_of(model)


def accumulated(rank, **options):
    model = sharded(net())
    step = threepass.ThreePass(model, F.cross_entropy, batch_size=B, **options)
    for i, part in enumerate(zip(*(z.split(2) for z in part_of(rank)), strict=True)):
        model.set_requires_gradient_sync(i == 1)
        step(*part)
    return grads_of(model)


def frozen(rank):
    model = net()
    model[2].weight.requires_grad_(False)
    return by_step(rank, model)


def embeddings(rank):
    x, y = tokens()
    model = sharded(Tokens())
    threepass.ThreePass(model, F.cross_entropy)({**x, "ids": x["ids"].chunk(RANKS)[rank]}, y.chunk(RANKS)[rank])
    return grads_of(model)


def training(rank):
    """Weights after four steps; every third step is a plain one, through the same model."""
    x, y = part_of(rank)
    model = sharded(net())
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.5, mode="exact")
    train(model, lambda: step(x, y), lambda: F.cross_entropy(model(x), y).backward())
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}


def train(model, three, two):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for i in range(4):
        optimizer.zero_grad()
        (two if i == 2 else three)()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def mixed_precision(rank):
    """Parameters in bfloat16 within the step; gradients are reduced in float32 and kept in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = sharded(net().float(), mp_policy=policy)
    x, y = part_of(rank)
    r = threepass.ThreePass(model, F.cross_entropy, strength=0.5)(x.float(), y)
    assert r.output.dtype == torch.float32
    return grads_of(model)


def checkpointed(rank):
    """The state dict of a sharded model has the names and shapes that it had without a step."""
    model = sharded(net())
    before = {n: p.full_tensor() for n, p in model.state_dict().items()}
    threepass.ThreePass(model, F.cross_entropy)(*part_of(rank))
    after = {n: p.full_tensor() for n, p in model.state_dict().items()}
    return before, after


def gradient_steps(rank):
    model = sharded(net())
    threepass.GradientStep(model, of_gradients)(*part_of(rank))
    return grads_of(model)


def after_an_error(rank):
    model = sharded(net())
    x, y = part_of(rank)
    step = threepass.ThreePass(model, lambda output, y: F.cross_entropy(output[:, :broken], y))
    broken = 0
    message = refused(lambda *_: step(x, y), (RuntimeError, IndexError, ValueError))
    broken = None
    step(x, y)
    return message, grads_of(model)


def compiled(rank):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        grads = by_step(rank, compile=True)
    required = refused(lambda x, y: by_step(rank, compile="require"), threepass.CaptureError)
    return grads, [str(w.message) for w in seen], required


def pure(x, y):
    threepass.three_pass(sharded(net()), F.cross_entropy, x, y)


def in_part(x, y):
    model = net()
    fully_shard(model[0], mesh=dist.init_device_mesh("cpu", (RANKS,)))
    threepass.ThreePass(model, F.cross_entropy)(x, y)


def results(rank: int) -> dict:
    table: dict = {}
    for name, options in TERMS.items():
        table["step", name] = by_step(rank, **options)
        table["accumulated", name] = accumulated(rank, **options)
        table["by loss", name] = by_loss(rank, **options)
    table["whole model"] = by_step(rank, shard={"parts": False}, mode="exact")
    table["resharded"] = by_step(rank, shard={"reshard_after_forward": True})
    table["kept"] = by_step(rank, shard={"reshard_after_forward": False})
    table["frozen"] = frozen(rank)
    table["unused"] = by_step(rank, WithUnusedLayer())
    table["embeddings"] = embeddings(rank)
    table["training"] = training(rank)
    table["mixed precision"] = mixed_precision(rank)
    table["state dict"] = checkpointed(rank)
    table["gradient step"] = gradient_steps(rank)
    table["after an error"] = after_an_error(rank)
    table["compile"] = compiled(rank)
    table["refused"] = {f.__name__: refused(f) for f in (pure, in_part)}
    return table


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return spawned(results, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("loop", ["step", "accumulated", "by loss"])
def test_two_ranks_are_one_with_the_whole_batch(ranks, loop, terms):
    for rank in ranks:
        assert_close(rank[loop, terms], whole(**TERMS[terms]).grads, 1e-10)


def test_a_model_sharded_as_one(ranks):
    assert_close(ranks[1]["whole model"], whole(mode="exact").grads, 1e-10)


@pytest.mark.parametrize("when", ["resharded", "kept"])
def test_parameters_resharded_or_not_after_a_forward(ranks, when):
    assert_close(ranks[1][when], whole().grads, 1e-12)


def test_frozen_parameters(ranks):
    expected = {n: g for n, g in whole().grads.items() if n != "2.weight"}
    assert_close(ranks[1]["frozen"], expected, 1e-12)


def test_unused_parameters(ranks):
    assert_close(ranks[0]["unused"], {f"body.{n}": g for n, g in whole().grads.items()}, 1e-12)


def test_inputs_inside_the_model(ranks):
    assert_close(ranks[0]["embeddings"], threepass.three_pass(Tokens(), F.cross_entropy, *tokens()).grads, 1e-12)


def test_training_of_two_ranks_is_that_of_one(ranks):
    model, (x, y) = net(), batch()
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.5, mode="exact")
    train(model, lambda: step(x, y), lambda: F.cross_entropy(model(x), y).backward())
    for rank in ranks:
        assert_close(rank["training"], {n: p.detach() for n, p in model.named_parameters()}, 1e-10)


def test_mixed_precision_computes_in_its_format_and_reduces_in_float32(ranks):
    model, (x, y) = net().to(torch.bfloat16), batch()
    shards = [
        threepass.three_pass(copy.deepcopy(model), lambda u, y: F.cross_entropy(u.float(), y), a, b, strength=0.5)
        for a, b in zip(x.to(torch.bfloat16).chunk(RANKS), y.chunk(RANKS), strict=True)
    ]
    expected = {n: sum(r.grads[n].float() for r in shards) / RANKS for n in shards[0].grads}
    assert all(g.dtype == torch.float32 for g in ranks[0]["mixed precision"].values())
    assert_close(ranks[0]["mixed precision"], expected, 2**-7)  # each rank rounds its gradients to bfloat16


def test_the_state_dict_is_as_it_was(ranks):
    before, after = ranks[0]["state dict"]
    assert before.keys() == after.keys() == net().state_dict().keys()
    assert_close(after, before, 0.0)


def test_gradient_steps_are_averaged(ranks):
    assert_close(ranks[0]["gradient step"], threepass.gradient_step(net(), of_gradients, *batch()).grads, 1e-12)


def test_a_step_after_an_error_is_right(ranks):
    message, grads = ranks[0]["after an error"]
    assert message != "no error"
    assert_close(grads, whole().grads, 1e-12)


def test_compile_runs_eagerly_and_says_so(ranks):
    grads, messages, required = ranks[0]["compile"]
    assert_close(grads, whole().grads, 1e-12)
    assert len(messages) == 1
    assert "fully_shard gathers parameters" in messages[0]
    assert "fully_shard gathers parameters" in required


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("pure", ["DTensors ('0.weight'", "supported by ThreePass and its .loss, not by three_pass"]),
        ("in_part", ["2 parameter(s)", "call it on the whole model too"]),
    ],
)
def test_what_is_not_supported_says_so(ranks, what, words):
    for rank in ranks:
        assert all(word in rank["refused"][what] for word in words), rank["refused"][what]
