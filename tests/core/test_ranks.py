"""Several ranks: 2 ranks x B/2 is 1 rank x B. Two gloo processes run all cases; the tests look at their results."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from close import assert_close, plain_grads
from processes import RANKS, spawned
from small_batches import TERMS, UNEVEN, B, Tokens, WithUnusedLayer, batch, net, of_gradients, refused, tokens, whole
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import threepass
from threepass.core.engine import Task, run
from threepass.core.options import Options


def grads_of(model: nn.Module) -> dict:
    return {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# What the two processes run. A case is a function of the rank, named as in the table of results.


def one_step(rank, model=None, wrap=None, sizes=(4, 4), **options):
    """The gradients of one step on this rank's samples."""
    x, y = (z.split(list(sizes))[rank] for z in batch())
    model = model or net()
    wrapped = DistributedDataParallel(model, **(wrap or {}))
    r = threepass.ThreePass(wrapped, F.cross_entropy, **options)(x, y)
    assert [n for n, p in wrapped.named_parameters() if p.grad is not None] == list(r.grads)
    return grads_of(model)


def accumulated(rank, **options):
    """Two micro-batches on each rank; gradients are exchanged after the second."""
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = DistributedDataParallel(net())
    step = threepass.ThreePass(model, F.cross_entropy, batch_size=B, **options)
    for i, part in enumerate(zip(x.split(2), y.split(2), strict=True)):
        with model.no_sync() if i == 0 else contextlib.nullcontext():
            step(*part)
    return grads_of(model)


def by_loss(rank, **options):
    """A loop that calls backward() itself, with micro-batches, whose losses it divides by their number."""
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = DistributedDataParallel(net())
    step = threepass.ThreePass(model, F.cross_entropy, batch_size=B, **options)
    for i, part in enumerate(zip(x.split(2), y.split(2), strict=True)):
        with model.no_sync() if i == 0 else contextlib.nullcontext():
            (step.loss(*part) / 2).backward()
    return grads_of(model)


def gradient_steps(rank):
    """A loss on the input gradient, under DistributedDataParallel."""
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = DistributedDataParallel(net())
    r = threepass.GradientStep(model, of_gradients)(x, y)
    assert list(r.grads) == [n for n, _ in model.named_parameters()]
    return grads_of(model)


def by_hand(rank, **options):
    """Without DistributedDataParallel: the gradients are averaged after the step."""
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = net()
    threepass.ThreePass(model, F.cross_entropy, **options)(x, y)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= RANKS
    return grads_of(model)


def repeated(rank, wrap, model=net):
    """DistributedDataParallel does more in its first iterations than later: three of them."""
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    wrapped = DistributedDataParallel(model(), **wrap)
    step, found = threepass.ThreePass(wrapped, F.cross_entropy), []
    for _ in range(3):
        wrapped.zero_grad()
        step(x, y)
        found.append(grads_of(wrapped))
    return found


def communication_hook(rank):
    """Gradients travel as the hook has them: here at double size."""

    def doubled(state, bucket):
        return default_hooks.allreduce_hook(None, bucket).then(lambda done: 2 * done.value())

    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, doubled)
    threepass.ThreePass(model, F.cross_entropy)(x, y)
    return grads_of(model)


def after_an_error(rank):
    """The wrapper is as it was: its next step is right."""
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = DistributedDataParallel(net(), static_graph=True)
    inner, step = model.module, threepass.ThreePass(model, F.cross_entropy)
    message = refused(lambda x, y: step(x[:, :3], y), RuntimeError)
    assert model.module is inner
    step(x, y)
    return message, grads_of(model), step.calls


def frozen(rank):
    model = net()
    model[2].weight.requires_grad_(False)
    return one_step(rank, model)


def training(rank, zero: bool):
    """zero: the optimizer's state is divided among the ranks, each of which updates a part of the weights."""
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = DistributedDataParallel(net())
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.5, mode="exact")
    if zero:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch's own
            from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()
    return {n: p.detach() for n, p in model.module.named_parameters()}


def plain(rank, sizes):
    """loss.backward() under DistributedDataParallel."""
    x, y = (z.split(list(sizes))[rank] for z in batch())
    model = DistributedDataParallel(net())
    F.cross_entropy(model(x), y).backward()
    return grads_of(model)


def statistics(rank, three):
    """Gradients and running statistics of three steps, by three passes or by loss.backward()."""
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = DistributedDataParallel(net(norm=True))
    step = threepass.ThreePass(model, F.cross_entropy, mode="exact")
    for _ in range(3):
        model.zero_grad()
        if three:
            step(x, y)
        else:
            F.cross_entropy(model(x), y).backward()
    return grads_of(model), dict(model.module.named_buffers())


def joined(rank):
    """Rank 0 has two batches and rank 1 has one."""
    x, y = batch()
    parts = [slice(0, 2), slice(4, 8)] if rank == 0 else [slice(2, 4)]
    model = DistributedDataParallel(net())
    step = threepass.ThreePass(model, F.cross_entropy)
    with model.join():
        for part in parts:
            model.zero_grad()
            step(x[part], y[part])
            last = grads_of(model)
    return last


def subgroup(rank, wrapped):
    """Every rank is a group of its own."""
    groups = [dist.new_group([r]) for r in range(RANKS)]
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = DistributedDataParallel(net(), process_group=groups[rank]) if wrapped else net()
    group = None if wrapped else groups[rank]
    threepass.ThreePass(model, F.cross_entropy, process_group=group)(x, y)
    return grads_of(model)


def inside(rank):
    """A wrapped module in a model that is not wrapped."""
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = nn.Sequential(DistributedDataParallel(net()), nn.Softplus())
    threepass.ThreePass(model, F.cross_entropy)(x, y)
    return grads_of(model[0])


def named_input(rank, input_at):
    x, y = tokens()
    x, y = {**x, "ids": x["ids"].chunk(RANKS)[rank]}, y.chunk(RANKS)[rank]
    model = DistributedDataParallel(Tokens())
    threepass.ThreePass(model, F.cross_entropy, input_at=input_at)(x, y)
    return grads_of(model)


def reported(rank):
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    r = threepass.ThreePass(DistributedDataParallel(net()), F.cross_entropy, separate=True)(x, y)
    return {
        "output": r.output, "loss": r.loss, "input_loss": r.input_loss, "input_grad": r.input_grad,
        "grads": r.grads, "backprop_grads": r.backprop_grads, "third_grads": r.third_grads,
    }  # fmt: skip


def with_scaler(rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {n: g / 1024 for n, g in one_step(rank, scaler=scaler).items()}


def pure(rank):
    """`three_pass` does not ask who else is there."""
    x, y = batch()
    return threepass.three_pass(net(), F.cross_entropy, x, y).grads


def compiled(rank, norm=False, compile="require"):
    """Micro-batches, by calls and by losses that are divided by their number; gradients are exchanged after the last.

    The results of three rounds, the first of which captures the program.
    """
    x, y = (z.chunk(RANKS)[rank].split(2) for z in batch())
    model = DistributedDataParallel(net(norm))
    step = threepass.ThreePass(model, F.cross_entropy, batch_size=B, compile=compile)
    rounds = []
    for by_loss in (False, False, True):
        model.zero_grad()
        with model.no_sync():
            (step.loss(x[0], y[0]) / 2).backward() if by_loss else step(x[0], y[0])
        (step.loss(x[1], y[1]) / 2).backward() if by_loss else step(x[1], y[1])
        rounds.append(grads_of(model))
    assert not compile or len(step.compiled.programs) == 1
    return rounds, dict(model.module.named_buffers())


def compiled_in_part(rank):
    """A captured step of a model with a layer that is not used, and a frozen weight."""
    x, y = (z.chunk(RANKS)[rank] for z in batch())
    model = WithUnusedLayer()
    model.body[2].weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    threepass.ThreePass(wrapped, F.cross_entropy, mode="exact", compile="require")(x, y)
    return grads_of(wrapped)


def on_wrapper(x, y):
    model = DistributedDataParallel(net())
    model.register_forward_hook(lambda *args: None)
    threepass.ThreePass(model, F.cross_entropy)(x, y)


def inside_and_static(x, y):
    model = nn.Sequential(DistributedDataParallel(net(), static_graph=True), nn.Softplus())
    threepass.ThreePass(model, F.cross_entropy)(x, y)


def fully_sharded(x, y):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    threepass.ThreePass(model, F.cross_entropy)(x, y)


def mixed_precision(x, y):
    model = DistributedDataParallel(net())
    model.mixed_precision = object()  # needs a GPU to be made
    threepass.ThreePass(model, F.cross_entropy)(x, y)


def pure_and_static(x, y):
    threepass.three_pass(DistributedDataParallel(net(), static_graph=True), F.cross_entropy, x, y)


def different_groups(x, y):
    groups = [dist.new_group([r]) for r in range(RANKS)]
    model = nn.Sequential(
        DistributedDataParallel(net(), process_group=groups[dist.get_rank()]),
        DistributedDataParallel(nn.Linear(4, 4).double()),
    )
    threepass.ThreePass(model, F.cross_entropy)(x, y)


def not_a_member(x, y):
    group = dist.new_group([0])
    threepass.ThreePass(net(), F.cross_entropy, process_group=group)(x, y)


def results(rank: int) -> dict:
    table: dict = {}
    for name, options in TERMS.items():
        table["step", name] = one_step(rank, **options)
        table["accumulated", name] = accumulated(rank, **options)
        table["by loss", name] = by_loss(rank, **options)
        table["by hand", name] = by_hand(rank, **options)
        table["uneven, batch_size", name] = one_step(rank, sizes=UNEVEN, batch_size=B, **options)
        table["uneven", name] = one_step(rank, sizes=UNEVEN, **options)
    table["find_unused_parameters"] = repeated(rank, {"find_unused_parameters": True}, WithUnusedLayer)
    table["static_graph"] = repeated(rank, {"static_graph": True})
    table["gradient_as_bucket_view"] = repeated(rank, {"gradient_as_bucket_view": True})
    table["communication hook"] = communication_hook(rank)
    table["after an error"] = after_an_error(rank)
    table["gradient step"] = gradient_steps(rank)
    table["frozen"] = frozen(rank)
    table["training"] = [training(rank, zero) for zero in (False, True)]
    table["uneven, alpha=1"], table["uneven, plain"] = one_step(rank, sizes=UNEVEN, alpha=1.0), plain(rank, UNEVEN)
    table["statistics"] = {three: statistics(rank, three) for three in (True, False)}
    table["join"] = joined(rank)
    table["subgroup"] = [subgroup(rank, wrapped) for wrapped in (True, False)]
    table["inside"] = inside(rank)
    table["input_at"] = [named_input(rank, name) for name in (None, "embeddings", "module.embeddings")]
    table["reported"] = reported(rank)
    table["scaler"] = with_scaler(rank)
    table["three_pass"] = pure(rank)
    table["compile"] = compiled(rank)
    table["compile, in part"] = compiled_in_part(rank)
    table["compile, norm"] = {compile: compiled(rank, norm=True, compile=compile) for compile in ("require", False)}
    table["refused"] = {
        f.__name__: refused(f)
        for f in (
            on_wrapper, inside_and_static, pure_and_static, fully_sharded, mixed_precision,
            different_groups,
        )
    }  # fmt: skip
    table["refused"]["not_a_member"] = refused(not_a_member, ValueError)
    return table


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return spawned(results, tmp_path_factory.mktemp("ranks"), threepass.NormalizationWarning)


# The tests: in this process, on the whole batch.


def double_backward(weights, options) -> dict:
    """The gradient of sum_i w_i l_i and of the input loss, by autograd: mode="exact"."""
    model, (x, y) = net(), batch()
    x.requires_grad_()
    losses = F.cross_entropy(model(x), y, reduction="none")
    (g,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    penalties = {"l2": lambda: 0.5 * g.square().sum(1), "l1": lambda: g.abs().sum(1), "norm": lambda: g.norm(dim=1)}
    penalty = options.get("penalty", "l2")
    values = penalty(g) if callable(penalty) else penalties[penalty]()
    alpha = options.get("alpha")
    power = 2 if options.get("reduction", "batch") == "batch" and alpha is not None else 1
    back, third = (1.0, options["strength"]) if alpha is None else (alpha, 1 - alpha)
    total = back * (weights * losses).sum() + third * (weights**power * values).sum()
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(total, list(model.parameters())), strict=True))


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("loop", ["step", "accumulated", "by loss", "by hand", "uneven, batch_size"])
def test_two_ranks_are_one_with_the_whole_batch(ranks, loop, terms):
    for rank in ranks:
        assert_close(rank[loop, terms], whole(**TERMS[terms]).grads, 1e-10)


@pytest.mark.parametrize("terms", [name for name in TERMS if "exact" in name])
def test_exact_mode_is_double_backward_over_all_ranks(ranks, terms):
    expected = double_backward(torch.full((B,), 1 / B, dtype=torch.float64), TERMS[terms])
    assert_close(ranks[0]["step", terms], expected, 1e-10)
    weights = torch.cat([torch.full((n,), 1 / (RANKS * n), dtype=torch.float64) for n in UNEVEN])
    assert_close(ranks[0]["uneven", terms], double_backward(weights, TERMS[terms]), 1e-10)


def test_gradient_steps_are_averaged(ranks):
    expected = threepass.gradient_step(net(), of_gradients, *batch())
    for rank in ranks:
        assert_close(rank["gradient step"], expected.grads, 1e-12)


def test_ranks_with_unequal_numbers_weigh_the_same_as_in_plain_training(ranks):
    assert_close(ranks[0]["uneven, alpha=1"], ranks[0]["uneven, plain"], 1e-12)
    x, y = batch()
    shards = [
        threepass.three_pass(net(), F.cross_entropy, a, b, separate=True)
        for a, b in zip(x.split(UNEVEN), y.split(UNEVEN), strict=True)
    ]
    expected = {
        n: sum(0.1 * r.backprop_grads[n] + 0.9 * r.third_grads[n] / RANKS for r in shards) / RANKS
        for n in shards[0].grads
    }
    assert_close(ranks[0]["uneven", "alpha, batch, paper"], expected, 1e-12)


@pytest.mark.parametrize("option", ["static_graph", "gradient_as_bucket_view"])
def test_options_of_distributed_data_parallel(ranks, option):
    for rank in ranks:
        for grads in rank[option]:
            assert_close(grads, whole().grads, 1e-12)


def test_communication_hooks(ranks):
    assert_close(ranks[1]["communication hook"], {n: 2 * g for n, g in whole().grads.items()}, 1e-12)


def test_an_error_leaves_the_wrapper_as_it_was(ranks):
    for rank in ranks:
        message, grads, calls = rank["after an error"]
        assert "mat1 and mat2 shapes" in message
        assert calls == 1
        assert_close(grads, whole().grads, 1e-12)


def test_unused_parameters(ranks):
    for rank in ranks:
        for grads in rank["find_unused_parameters"]:
            assert_close(grads, {f"body.{n}": g for n, g in whole().grads.items()}, 1e-12)


def test_frozen_parameters(ranks):
    expected = {n: g for n, g in whole().grads.items() if n != "2.weight"}
    assert_close(ranks[1]["frozen"], expected, 1e-12)


def test_training_of_two_ranks_is_that_of_one(ranks):
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.5, mode="exact")
    for _ in range(4):
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()
    for rank in ranks:
        for weights in rank["training"]:
            assert_close(weights, {n: p.detach() for n, p in model.named_parameters()}, 1e-10)


def test_buffers_move_as_in_plain_training(ranks):
    for rank in ranks:
        assert_close(rank["statistics"][True][1], rank["statistics"][False][1], 1e-14)
    mean = "1.running_mean"
    assert not torch.equal(ranks[0]["statistics"][True][1][mean], ranks[1]["statistics"][True][1][mean])
    shards = [
        threepass.three_pass(net(norm=True), F.cross_entropy, a, b, mode="exact", separate=True)
        for a, b in zip(*(z.chunk(RANKS) for z in batch()), strict=True)
    ]
    expected = {
        n: sum(0.1 * r.backprop_grads[n] + 0.9 * r.third_grads[n] / RANKS for r in shards) / RANKS
        for n in shards[0].grads
    }
    assert_close(ranks[0]["statistics"][True][0], expected, 1e-10, least=1e-15)


def test_join(ranks):
    """The last batch is rank 0's alone, and its gradient is averaged with a zero."""
    x, y = batch()
    r = threepass.three_pass(net(), F.cross_entropy, x[4:], y[4:], separate=True)
    expected = {n: (0.1 * r.backprop_grads[n] + 0.9 * r.third_grads[n] / RANKS) / RANKS for n in r.grads}
    assert_close(ranks[0]["join"], expected, 1e-12)


def test_a_group_of_one_is_one_rank(ranks):
    for rank, (x, y) in zip(ranks, zip(*(z.chunk(RANKS) for z in batch()), strict=True), strict=True):
        expected = threepass.three_pass(net(), F.cross_entropy, x, y).grads
        for grads in rank["subgroup"]:
            assert_close(grads, expected, 1e-12)


def test_a_wrapped_module_inside_a_model(ranks):
    model, (x, y) = nn.Sequential(net(), nn.Softplus()), batch()
    expected = threepass.three_pass(model, F.cross_entropy, x, y).grads
    assert_close(ranks[1]["inside"], {n.removeprefix("0."): g for n, g in expected.items()}, 1e-12)


def test_inputs_named_with_and_without_the_wrapper(ranks):
    expected = threepass.three_pass(Tokens(), F.cross_entropy, *tokens()).grads
    for grads in ranks[0]["input_at"]:
        assert_close(grads, expected, 1e-12)


def test_what_a_rank_reports(ranks):
    x, y = batch()
    r = whole(separate=True)
    for rank, (a, b) in zip(ranks, zip(x.chunk(RANKS), y.chunk(RANKS), strict=True), strict=True):
        own, got = threepass.three_pass(net(), F.cross_entropy, a, b), rank["reported"]
        for name in ("output", "loss", "input_loss"):
            torch.testing.assert_close(got[name], getattr(own, name), rtol=1e-12, atol=0)
    both = [rank["reported"] for rank in ranks]
    torch.testing.assert_close(torch.cat([z["input_grad"] for z in both]), r.input_grad, rtol=1e-12, atol=1e-16)
    for name in ("grads", "backprop_grads", "third_grads"):
        mean = {n.removeprefix("module."): (g + both[1][name][n]) / 2 for n, g in both[0][name].items()}
        assert_close(mean, getattr(r, name), 1e-12)


def test_a_scaler(ranks):
    assert_close(ranks[0]["scaler"], whole().grads, 1e-12)


def test_three_pass_counts_its_own_samples(ranks):
    assert_close(ranks[0]["three_pass"], whole().grads, 0.0)


def test_compiled_steps(ranks):
    for rank in ranks:
        for grads in rank["compile"][0]:
            assert_close(grads, whole().grads, 1e-10)


def test_compiled_steps_with_unused_and_frozen_parameters(ranks):
    expected = {f"body.{n}": g for n, g in whole(mode="exact").grads.items() if n != "2.weight"}
    for rank in ranks:
        assert_close(rank["compile, in part"], expected, 1e-10)


def test_compiled_steps_with_batch_norm(ranks):
    """Its statistics are those of a rank's micro-batch, as in eager steps; buffers come from rank 0 at every call."""
    for rank in ranks:
        (rounds, buffers), (expected, expected_buffers) = (rank["compile, norm"][c] for c in ("require", False))
        for grads, eager in zip(rounds, expected, strict=True):
            assert_close(grads, eager, 1e-10, least=1e-15)
        assert_close(buffers, expected_buffers, 1e-12)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("on_wrapper", ["hooks of its own", "register them on model.module"]),
        ("inside_and_static", ["static_graph=True", "wraps the whole model"]),
        ("fully_sharded", ["FullyShardedDataParallel", "use fully_shard"]),
        ("mixed_precision", ["mixed_precision", "use torch.autocast"]),
        ("pure_and_static", ["static_graph=True", "pass its .module"]),
        ("different_groups", ["[1, 2]", "by DistributedDataParallel or fully_shard", "wrap the whole model once"]),
    ],
)
def test_what_is_not_supported_says_so(ranks, what, words):
    for rank in ranks:
        assert all(word in rank["refused"][what] for word in words), rank["refused"][what]


def test_a_rank_outside_the_group(ranks):
    assert ranks[0]["refused"]["not_a_member"] == "no error"
    assert "not a member of process_group" in ranks[1]["refused"]["not_a_member"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("terms", TERMS)
def test_a_rank_of_two_in_half_formats(dtype, terms):
    """Its terms are those of its own samples, but that with reduction="batch" pass 3 starts from half as much."""
    model, (x, y) = net().float(), batch()
    options = TERMS[terms]
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        task = Task(model, F.cross_entropy, x.float(), y)
        one = run(task, Options(**options, separate=True))
        two = run(task, Options(**options, ranks=2, separate=True))
        part = run(task, Options(**options, ranks=2, batch_size=32, separate=True))
    fewer = 2 if options.get("alpha") and options.get("reduction") is None else 1
    assert_close(two.backprop_grads, one.backprop_grads, 1e-6)
    assert_close(two.third_grads, {n: g / fewer for n, g in one.third_grads.items()}, 1e-6)
    assert_close(part.backprop_grads, {n: g / 2 for n, g in two.backprop_grads.items()}, 1e-6)
    assert_close(part.third_grads, {n: g / (4 if fewer == 2 else 2) for n, g in two.third_grads.items()}, 1e-6)
    for r in (two, part):
        torch.testing.assert_close(r.input_loss, one.input_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(two.input_grad, one.input_grad / 2)
    torch.testing.assert_close(part.input_grad, one.input_grad / 4)


def test_a_compiled_step_of_a_rank_of_two(monkeypatch):
    """Without DistributedDataParallel a step of several ranks can be compiled."""
    monkeypatch.setattr("threepass.step.count_ranks", lambda model, group: 2)
    model, (x, y) = net(), batch()
    step = threepass.ThreePass(model, F.cross_entropy, batch_size=32, compile=True)
    expected = run(Task(model, F.cross_entropy, x, y), Options(0.1, batch_size=32, ranks=2))
    r = step(x, y)
    assert step.compiled.compile_seconds > 0
    assert_close(r.grads, expected.grads, 1e-12)
    torch.testing.assert_close(r.input_grad, expected.input_grad, rtol=1e-12, atol=1e-16)


def test_one_process_counts_one_rank():
    model, (x, y) = net(), batch()
    r = threepass.ThreePass(model, F.cross_entropy, alpha=1.0)(x, y)
    assert_close(r.grads, plain_grads(net(), F.cross_entropy, x, y), 1e-12)


def test_data_parallel_over_several_devices():
    model, (x, y) = nn.DataParallel(net()), batch()
    assert_close(
        threepass.three_pass(model, F.cross_entropy, x, y).grads,
        {f"module.{n}": g for n, g in whole().grads.items()},
        1e-12,
    )
    model.device_ids = [0, 1]
    with pytest.raises(NotImplementedError, match=r"Use torch\.nn\.parallel\.DistributedDataParallel"):
        threepass.three_pass(model, F.cross_entropy, x, y)
