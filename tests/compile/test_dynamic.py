"""Inputs of many sizes: one program serves them all, its guards hold, and without one each size has its own."""

import copy
import logging
import random
from dataclasses import dataclass

import pytest
import torch
from close import assert_close
from families import SchNet
from torch import Tensor, nn
from torch.nn import functional as F
from watched import Watched

import threepass
from threepass.compile import capture, inductor
from threepass.compile.dynamic import SymbolicInputs
from threepass.compile.programs import Programs
from threepass.compile.sizes import MAX_DYNAMIC, Sizes
from threepass.errors import CaptureError
from threepass.kernels import activation
from threepass.models import mlp

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")

BATCHES = (4, 7, 2, 3, 19, 5, 8, 33, 6, 12, 4, 7)


def compare(step, eager, x, y) -> None:
    """A compiled step against the eager one on a copy of its model: gradients, loss, output and buffers."""
    step.model.zero_grad()
    expected = eager(x, y)
    found = step(x, y)
    grads = {n: p.grad for n, p in step.model.named_parameters() if n in expected.grads}
    assert_close(grads, expected.grads, 1e-10)
    torch.testing.assert_close((found.loss, found.output), (expected.loss, expected.output), rtol=1e-10, atol=1e-10)


def run(model, loss_fn, batches, **options):
    """A `ThreePass` step that was compared with the eager one on each of the batches."""
    twin = copy.deepcopy(model)
    step = threepass.ThreePass(model, loss_fn, compile="require", **options)
    for x, y in batches:
        compare(step, lambda x, y: threepass.three_pass(twin, loss_fn, x, y, **options), x, y)
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()), rtol=1e-10, atol=1e-10)
    return step


def classified(shape, sizes=BATCHES, classes=3):
    return [(torch.randn(n, *shape).double(), torch.randint(classes, (n,))) for n in sizes]


class Decoder(nn.Module):
    """A block of causal attention over tokens, with learned positions."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(40, 4)
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        q, k, v = self.qkv(self.norm(z)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(z + mixed.transpose(1, 2).flatten(2))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.inner, self.up = (
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(8, 3, 1),
        )
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        high = F.silu(self.norm(self.down(x)))
        low = F.interpolate(F.relu(self.inner(F.max_pool2d(high, 2))), scale_factor=2)
        return self.up(torch.cat([high, low], 1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.BatchNorm2d(4),
        nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def token_loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def sentences():
    lengths = [(2, 6), (3, 9), (2, 4), (3, 7), (3, 30), (5, 11), (2, 8), (7, 3), (4, 4), (6, 21), (2, 13), (2, 6)]
    tokens = [torch.randint(9, (batch, length + 1)) for batch, length in lengths]
    return [(z[:, :-1].contiguous(), z[:, 1:].contiguous()) for z in tokens]


def pictures():
    sizes = [(8, 8), (8, 12), (4, 6), (10, 8), (6, 6), (12, 20), (14, 4), (8, 10), (16, 16), (6, 22), (8, 8)]
    return [(torch.randn(2, 2, h, w).double(), torch.randint(3, (2, h, w))) for h, w in sizes]


CASES = {
    "mlp": (lambda: mlp(6, 5, 3), F.cross_entropy, lambda: classified((6,))),
    "cnn": (cnn, F.cross_entropy, lambda: classified((2, 6, 6))),
    "decoder": (Decoder, token_loss, sentences),
    "unet": (UNet, F.cross_entropy, pictures),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("mlp", "paper"),
        ("mlp", "exact"),
        ("cnn", "exact"),
        ("decoder", "paper"),
        pytest.param("unet", "exact", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("graph_only")
def test_two_programs_serve_ten_sizes(name, mode):
    make, loss_fn, batches = CASES[name]
    torch.manual_seed(0)
    step = run(make().double(), loss_fn, batches(), mode=mode)
    assert len(step.compiled.programs) == 2
    assert "*" in repr(step.compiled)


def molecules(atoms: int, edges: int):
    pairs = torch.randint(atoms, (2, edges))
    pairs[1] = torch.where(pairs[0] == pairs[1], (pairs[1] + 1) % atoms, pairs[1])
    positions, kinds, molecule = (
        torch.randn(atoms, 3).double(),
        torch.randint(5, (atoms,)),
        2 * torch.arange(atoms) // atoms,
    )
    return (positions, kinds, pairs, molecule), (torch.randn(2, 1).double(), torch.randn(atoms, 3).double())


def collected(rows: int, index: Tensor, z: Tensor) -> Tensor:
    return z.new_zeros(rows, z.shape[1]).index_add(0, index, z)


def force_loss(output, g, y):
    return F.mse_loss(output, y[0]) + F.mse_loss(-g, y[1])


ATOMS = ((6, 14), (5, 9), (9, 30), (4, 4), (7, 7), (12, 13), (3, 8), (8, 40), (10, 2), (11, 19), (6, 14))


def test_forces_of_molecules_of_ten_sizes_through_the_compiler():
    torch.manual_seed(0)
    model = SchNet(collected, width=4, bases=3).double()
    step = threepass.GradientStep(model, force_loss, wrt=0, compile="require")
    for atoms, edges in ATOMS:
        x, y = molecules(atoms, edges)
        compare(step, lambda x, y: threepass.gradient_step(model, force_loss, x, y, wrt=0), x, y)
    assert len(step.compiled.programs) == 2


@pytest.mark.usefixtures("graph_only")
def test_one_size_is_captured_as_ever():
    torch.manual_seed(0)
    step = run(mlp(6, 5, 3).double(), F.cross_entropy, classified((6,), [8] * 4))
    (program,) = step.compiled.programs
    assert program.captured.guards is None
    assert program.captured.program.symbolic is None


@pytest.mark.usefixtures("graph_only")
def test_a_size_of_one_is_no_symbol():
    torch.manual_seed(0)
    step = run(mlp(6, 5, 3).double(), F.cross_entropy, classified((6,), (8, 3, 1, 5, 1, 4, 1, 6, 1, 2)))
    labels = [entry.label for entry in step.compiled.programs.entries]
    assert sorted(labels) == [f"paper mode, float64[{n}, 6], int64[{n}]" for n in ("*", "1", "8")]


@pytest.mark.usefixtures("graph_only")
def test_a_random_sequence_of_sizes():
    draw = random.Random(0)
    torch.manual_seed(0)
    sizes = [draw.choice([1, 2, 3, draw.randrange(1, 50)]) for _ in range(60)]
    step = run(mlp(4, 3).double(), F.cross_entropy, classified((4,), sizes))
    assert len(step.compiled.programs) == 3  # the first, all others, and 1


class Contracting(nn.Module):
    """Turns a size into a number. The result of its tensordot is a view of a tensor that nothing else has seen."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(3, 2), nn.Parameter(torch.randn(2, 1, 1))

    def forward(self, x, others):
        z = torch.tensordot(self.first(x).tanh(), self.weight, dims=([1], [0]))
        return z.flatten(1).sin() * int(x.shape[0]) + others.sin().mean()


@pytest.mark.usefixtures("graph_only")
def test_a_size_that_is_fixed_beside_one_that_varies():
    torch.manual_seed(0)
    model = Contracting().double()
    twin = copy.deepcopy(model)

    def loss_fn(output, g, y):
        return output.square().mean() + (g**3).sum()

    step = threepass.GradientStep(model, loss_fn, wrt="x", compile="require")
    for rows, count in ((4, 3), (6, 5), (6, 5), (6, 8), (6, 2)):
        x = {"x": torch.randn(rows, 3).double(), "others": torch.randn(count).double()}
        compare(step, lambda x, y: threepass.gradient_step(twin, loss_fn, x, y, wrt="x"), x, None)
    assert [program.captured.program.symbolic is not None for program in step.compiled.programs] == [False, True]


class Branching(nn.Linear):
    """Computes something else for large batches, and for those that three divides."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        if x.shape[0] > 16:
            z = 2 * z
        return z.tanh() if x.shape[0] % 3 == 0 else z


@pytest.mark.usefixtures("graph_only")
def test_a_branch_on_a_size_is_a_guard():
    torch.manual_seed(0)
    sizes = [5, 4, 7, 8, 20, 22, 23, 6, 9, 3, 10, 25, 24, 30, 27, 12, 16, 17, 18]
    step = run(Branching(4, 3).double(), F.cross_entropy, classified((4,), sizes))
    assert 3 <= len(step.compiled.programs) <= 1 + MAX_DYNAMIC


class FirstHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()[:, : max(1, x.shape[1] // 2)].mean(1))


@pytest.mark.usefixtures("graph_only")
def test_a_guard_that_divides_by_a_size_does_not_hold_where_that_is_zero():
    torch.manual_seed(0)
    lengths = [5, 7, 4, 9, 5, 3, 2, 12, 1]
    batches = [(torch.randn(t % 4 + 2, t, 4).double(), torch.randint(3, (t % 4 + 2,))) for t in lengths]
    run(FirstHalf().double(), F.cross_entropy, batches)


class Fixed(nn.Linear):
    """Gets its size in a way that no symbol survives."""

    def __init__(self, rows):
        super().__init__(4, 3)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.rows(x)


@pytest.mark.parametrize("rows", [len, lambda x: int(x.shape[0]), lambda x: range(100)[x.shape[0]]])
@pytest.mark.usefixtures("graph_only")
def test_where_a_size_is_fixed_each_has_a_program(rows, caplog):
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO, "threepass"):
        step = run(Fixed(rows).double(), F.cross_entropy, classified((4,), (8, 3, 5, 3, 5, 8, 3, 5)))
    assert len(step.compiled.programs) == 3
    (said,) = [text for text in caplog.messages if "a separate program is captured" in text]
    assert said == (
        "a separate program is captured for each size of paper mode, float64[*, 4], int64[*], because the step "
        "converts every dynamic size into a Python number (by int() or len(), say), so the program would be valid for "
        "these sizes only; use z.shape[0] without converting it"
    )


class Returning(nn.Linear):
    def forward(self, x: Tensor):
        return super().forward(x), x.shape[0]


@pytest.mark.usefixtures("graph_only")
def test_a_size_among_the_results_is_a_number():
    torch.manual_seed(0)
    step = threepass.ThreePass(Returning(4, 3).double(), lambda z, y: F.cross_entropy(z[0], y), compile="require")
    for x, y in classified((4,), (8, 3, 5, 3, 5)):
        assert step(x, y).output[1] == len(x)


@pytest.mark.usefixtures("graph_only")
def test_random_masks_are_those_of_a_static_program():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)).double()
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    for i, (x, y) in enumerate(classified((6,))):
        results = []
        for each in (step, threepass.ThreePass(model, F.cross_entropy, compile="require")):
            torch.manual_seed(i)
            model.zero_grad()
            each(x, y)
            results.append({n: p.grad for n, p in model.named_parameters()})
        if i != 1:  # the first call with other sizes runs eagerly, with other masks
            assert_close(*results, 1e-10)
    assert len(step.compiled.programs) == 2
    assert len({float(step(x, y).loss) for _ in range(5)}) == 5


@pytest.mark.usefixtures("graph_only")
def test_penalties_and_separate_terms():
    def penalty(g):
        return (g.flatten(1).square().sum(1) + 1e-6).sqrt()

    torch.manual_seed(0)
    options = {"mode": "exact", "strength": 0.1, "separate": True, "penalty": penalty}
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    assert len(run(model, F.cross_entropy, classified((6,)), **options).compiled.programs) == 2


@pytest.mark.usefixtures("graph_only")
def test_channels_last_and_contiguous_images_have_programs_of_their_own():
    torch.manual_seed(0)
    batches = [(x.to(memory_format=torch.channels_last), y) for x, y in classified((2, 6, 6))]
    step = run(cnn().double(), F.cross_entropy, [*batches, *classified((2, 6, 6))])
    assert len(step.compiled.programs) == 3


def test_a_program_that_is_wrong_for_other_sizes_is_found_and_dropped(monkeypatch, caplog):
    def compiled(program, inputs):
        rows = inputs[2].shape[0]

        def run(values):
            outputs = list(program.graph(*values))
            if values[-1].shape[0] != rows:
                outputs[0] = outputs[0] * 1.1
            return outputs

        return run

    monkeypatch.setattr(inductor, "compiled", compiled)
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO, "threepass"):
        step = run(mlp(6, 5, 3).double(), F.cross_entropy, classified((6,), (8, 3, 5, 5, 4, 4, 3)))
    assert [entry.label for entry in step.compiled.programs.entries] == [
        f"paper mode, float64[{n}, 6], int64[{n}]" for n in (8, 4, 3)
    ]
    assert any(", because the captured step computes " in text for text in caplog.messages)


@pytest.mark.usefixtures("graph_only")
def test_the_check_runs_at_capture_and_with_the_first_other_sizes(monkeypatch):
    checked = []

    def check(graph, run, values, weights, names):
        checked.append(values[-1].shape[0])
        return 0.25

    monkeypatch.setattr(capture, "check", check)
    step = threepass.ThreePass(mlp(6, 5, 3), F.cross_entropy, compile="require")
    for x, y in classified((6,), (8, 3, 5, 5, 4, 7, 8)):
        step(x.float(), y)
    assert checked == [8, 5, 4]
    assert step.compiled.check_seconds == 0.75


@pytest.mark.usefixtures("graph_only")
def test_a_step_with_kernels_stays_static(as_on_a_gpu, caplog):
    """The activation's operation is in the first program."""
    as_on_a_gpu(activation)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    with caplog.at_level(logging.INFO, "threepass"):
        for x, y in classified((64,), (8, 16, 24, 16)):
            step(x.float(), y)
    assert [program.captured.has_kernels for program in step.compiled.programs] == [True, True]
    assert any("kernels of threepass, which are compiled for fixed sizes" in text for text in caplog.messages)


def test_guards_are_those_of_the_trace():
    inputs = [torch.ones(4, 3), torch.ones(4)]
    symbolic = SymbolicInputs(inputs, frozenset({(0, 0), (1, 0)}))
    x, y = symbolic.inputs
    assert bool(x.shape[0] == y.shape[0])
    assert bool(x.shape[0] % 2 == 0)
    guards = symbolic.guards()
    assert guards.dynamic == {(0, 0), (1, 0)}

    def holds(*shapes):
        return guards.hold([torch.ones(shape) for shape in shapes])

    assert holds((4, 3), 4)
    assert holds((10, 3), 10)
    assert not holds((10, 3), 8)
    assert not holds((5, 3), 5)
    assert not holds((10, 2), 10)
    assert not holds((0, 3), 0)


@dataclass
class Made:
    size: int  # at which it was captured
    check_seconds = 0.5
    graph_bytes = None


class Table:
    """Programs for calls with one size; which calls captured one size (c) or many (d), replayed (r) or were eager (e).

    serves: whether a dynamic program captured at a size serves another one; None: there can be none.
    """

    def __init__(self, serves=lambda made, n: True, **options):
        self.watched, self.serves = Watched(), serves
        self.programs = Programs(self.watched, **options)
        self.done = ""

    def make(self, kind, n):
        if kind == "d" and self.serves is None:
            raise ValueError("no symbols")
        self.done += kind
        return Made(n)

    def calls(self, sizes, layout="x"):
        self.done = ""
        for n in sizes:
            before = self.done
            found = self.programs.find(
                "step",
                (layout, n),
                lambda n=n: self.make("c", n),
                lambda n=n: f"[{layout}{n}]",
                sizes=lambda n=n: Sizes(
                    layout,
                    (torch.Size([n, 2]),),
                    lambda varying: self.make("d", n),
                    lambda program: self.serves(program.size, n),
                    lambda dynamic: f"[{layout}*]",
                ),
            )
            if self.done == before:
                self.done += "e" if found is None else "r"
        return self.done


def test_other_sizes_get_one_program_at_the_second_call():
    assert Table().calls([8, 8, 3, 8, 5, 6, 7, 3, 8]) == "crerdrrrr"
    assert Table().calls([8, 3, 3, 4]) == "cedr"


def test_other_layouts_are_other_programs():
    table = Table()
    assert table.calls([8, 3, 5]) == "ced"
    assert table.calls([8, 3, 3, 5], "y") == "eedr"


def test_sizes_whose_guards_fail_are_captured_again_but_not_for_ever():
    table = Table(serves=lambda made, n: made == n)
    assert table.calls([8, 2, 2, 3, 3, 4, 4, 2, 3, 4, 8]) == "cedededrrrr"
    assert table.calls([5, 5, 6, 6, 7, 7, 7, 2]) == "edececrr"
    assert table.programs._families.popitem()[1].captures == MAX_DYNAMIC


def test_where_symbols_fail_sizes_are_captured_as_before(caplog):
    table = Table(serves=None)
    with caplog.at_level(logging.INFO, "threepass"):
        assert table.calls([8, 3, 5, 3, 5, 3, 5, 6]) == "ceeccrre"
    assert "a separate program is captured for each size of [x*], because ValueError: no symbols" in "\n".join(
        caplog.messages
    )


def test_a_dynamic_program_takes_the_place_of_one_that_was_used_less():
    table = Table(max_programs=1)
    assert table.calls([8, 3, 5, 8, 3, 2]) == "cedrrr"
    assert [entry.label for entry in table.programs.entries] == ["[x*]"]


def test_a_changed_model_is_another_family():
    table = Table()
    assert table.calls([8, 3, 5]) == "ced"
    table.watched.items = {"model.p": (float, (0.7).hex())}
    assert table.calls([8, 3, 5, 6]) == "cedr"
    table.watched.items = {"model.p": (float, (0.5).hex())}
    assert table.calls([8, 3, 6]) == "rrr"


def test_families_are_bounded():
    table = Table(max_programs=2)
    for i in range(100):
        table.watched.items = {"model.p": (float, float(i).hex())}
        table.calls([8, 3, 5])
    assert len(table.programs._families) <= 16
    assert len(table.programs) <= 2


def test_the_step_must_not_refer_to_fake_tensors():
    symbolic = SymbolicInputs([torch.ones(4)], frozenset({(0, 0)}))
    with pytest.raises(CaptureError, match="refers to a tensor that was created during the trace"):
        symbolic.fixed(symbolic.inputs)


@pytest.mark.parametrize("scale", [lambda n: 2.0 if isinstance(n, int) else 3.0, lambda n: {"9": 4.0}.get(str(n), 1.0)])
@pytest.mark.usefixtures("graph_only")
def test_code_that_takes_a_symbol_for_something_else_gets_no_dynamic_program(scale):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.last(self.first(x).tanh() * scale(x.shape[0]))

    torch.manual_seed(0)
    model = Scaled().double()
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    for n in (5, 7, 9, 11, 9):
        x, y = torch.randn(n, 4).double(), torch.randint(3, (n,))
        expected = threepass.three_pass(model, F.cross_entropy, x, y)
        model.zero_grad()
        step(x, y)
        assert_close({name: p.grad for name, p in model.named_parameters()}, expected.grads, 1e-10)


@pytest.mark.parametrize("options", [{"strength": 0.3}, {"strength": 0.3, "mode": "exact"}, {"reduction": "sample"}])
@pytest.mark.usefixtures("graph_only")
def test_weights_that_depend_on_the_batch_are_symbols_too(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    step = threepass.ThreePass(model, F.cross_entropy, compile="require", **options)
    for n in (5, 7, 9, 11, 9, 13):
        x, y = torch.randn(n, 4).double(), torch.randint(3, (n,))
        model.zero_grad()
        step(x, y)
        expected = threepass.three_pass(model, F.cross_entropy, x, y, **options).grads
        assert_close({name: p.grad for name, p in model.named_parameters()}, expected, 1e-10)
    assert len(step.compiled.programs) == 2
