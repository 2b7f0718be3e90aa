"""Which signatures are captured when, which programs make room, and what is said about it."""

import gc
import logging
import re
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
from close import assert_close
from torch import nn
from torch.nn import functional as F
from watched import Watched

import threepass
from threepass.compile import capture
from threepass.compile.programs import Programs
from threepass.errors import CaptureError
from threepass.models import mlp

CPU = torch.device("cpu")


@dataclass
class Made:
    check_seconds = 0.5
    graph_bytes = None


class Table:
    """Programs, and which calls captured (c), replayed (r) or ran eagerly (e)."""

    def __init__(self, **options):
        self.watched = Watched()
        self.programs = Programs(self.watched, **options)
        self.made = 0

    def make(self):
        self.made += 1
        return Made()

    def calls(self, inputs, kind="step", **options):
        done = ""
        for each in inputs:
            before = self.made
            found = self.programs.find(kind, each, self.make, lambda each=each: f"[{each}]", **options)
            done += "e" if found is None else "c" if self.made > before else "r"
        return done


def test_the_first_inputs_are_captured_at_once_and_others_when_they_come_again():
    table = Table()
    assert table.calls("aaabbbac") == "crrecrre"
    assert table.calls("ab", kind="another") == "ce"
    assert table.calls("d", recurring=True) == "c"


def test_a_change_that_keeps_the_inputs_is_captured_at_once():
    table = Table()
    assert table.calls("aa") == "cr"
    table.watched.items = {"model.p": (float, (0.7).hex())}
    assert table.calls("aa") == "cr"
    table.watched.items = {"model.p": (float, (0.5).hex())}
    assert table.calls("aa") == "rr"


def test_what_comes_more_often_replaces_what_was_used_longest_ago():
    table = Table(max_programs=2)
    assert table.calls("aaaa" + "bb" + "bb") == "crrrecrr"
    assert table.calls("cccc") == "eeee"  # a was used four times, as often as c came
    assert table.calls("c") == "c"
    assert [entry.label for entry in table.programs.entries] == ["[b]", "[c]"]
    assert table.calls("bc") == "rr"


def test_programs_of_an_earlier_state_make_room_at_once():
    table = Table(max_programs=2)
    assert table.calls("aaaabbbb") == "crrrecrr"
    table.watched.items = {"model.p": (float, (0.7).hex())}
    assert table.calls("aabb") == "crec"


def test_many_inputs_in_turns_do_not_take_each_others_place_for_ever():
    table = Table(max_programs=4)
    done = table.calls("abcdef" * 200)
    assert done.count("c") < 20
    assert done[-6:].count("r") == 4


def test_states_that_never_come_again_stop_being_captured():
    table = Table()
    done = ""
    for i in range(10):
        table.watched.items = {"model.p": (float, float(i).hex())}
        done += table.calls("a")
    assert done == "cccceeeeee"
    with pytest.warns(threepass.UncompiledWarning, match=r"keeps changing between calls: model.p \(3.0, then 4.0\)"):
        table.programs.eagerly(lambda: None, CPU)
    assert table.calls("aaa") == "crr"  # it came again


def test_failures_are_not_tried_for_ever():
    table = Table()

    def fail():
        table.made += 1
        raise ValueError("no\nmore")

    table.make = fail
    assert table.calls("aabbccddee") == "e" * 10
    assert table.made == 3
    for i in range(5):
        table.watched.items = {"model.p": (float, float(i).hex())}
        assert table.calls("a") == "e"
    assert table.made == 3
    with pytest.warns(threepass.UncompiledWarning, match="because capturing it failed with ValueError: no. To get"):
        table.programs.eagerly(lambda: None, CPU)


def test_required_programs_are_an_error_where_they_cannot_be():
    table = Table(compile="require", max_programs=1)
    assert table.calls("aab") == "cre"  # put off, not refused
    with pytest.raises(CaptureError, match=r'compile="require".*maximum of 1 programs .*already.*Pad or bucket'):
        table.calls("b")


def test_what_happens_is_logged(caplog):
    table = Table(max_programs=1)
    with caplog.at_level(logging.INFO, "threepass"):
        table.calls("abbb")
    said = "\n".join(caplog.messages)
    assert "captured [a] in 0.0 s, 0.5 s of them to check it (program 1 of at most 1)" in said
    assert "new inputs, [b]: this step runs eagerly, and is captured if they come again" in said
    assert "discarded the program for [a], used 1 times, to capture another" in said
    assert re.match(r"1 of at most 1 programs; 0 other.*\n +2 uses +0.0 s  \[b\]", table.programs.report())


def test_memory_of_signatures_is_bounded():
    table = Table(max_programs=2)
    table.calls(["first", *map(str, range(500))])
    assert len(table.programs._entries) < 30


class Masked(nn.Linear):
    mask: torch.Tensor

    def forward(self, x):
        return super().forward(x) * self.mask


def change_loss(step, tensor):
    step.loss_fn = lambda output, y: F.cross_entropy(output, y)


def change_data(step, tensor):
    step.model.bias.data = tensor


def change_stride(step, tensor):
    weight = step.model.weight
    weight.data = tensor.repeat(6, 1).t() if weight.is_contiguous() else tensor.repeat(6, 1).t().contiguous()


CHANGES = {
    "mask.*a tensor of shape .3,., then another one": lambda step, tensor: setattr(step.model, "mask", tensor),
    "bias.*a tensor of shape .3,., then the same in other memory": change_data,
    "weight.*stride .*, then": change_stride,
    "loss_fn.*an object, then another object": change_loss,
}


@pytest.mark.parametrize("words", CHANGES)
def test_the_warning_of_a_changing_model_says_what_changes(words, graph_only):
    model, kept = Masked(6, 3), []  # kept, so that no address comes again
    model.mask = torch.ones(3)
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.3, compile=True)

    def train():
        for _ in range(8):
            kept.extend([torch.rand(3), model.weight.data])
            model.zero_grad()
            CHANGES[words](step, kept[-2])
            step(torch.randn(4, 6), torch.randint(3, (4,)))

    with pytest.warns(threepass.UncompiledWarning, match=f"keeps changing between calls: .*{words}"):
        train()


@pytest.mark.filterwarnings("ignore::threepass.UncompiledWarning")
@pytest.mark.parametrize("what", ["attribute", "parameter", "loss"])
def test_tensors_that_were_replaced_are_freed(what, graph_only):
    model, x, y = Masked(6, 3), torch.randn(4, 6), torch.randint(3, (4,))
    model.mask = torch.ones(3)
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.3, compile=True)
    alive = []
    for _ in range(30):
        tensor = torch.rand(3)
        if what == "attribute":
            model.mask = tensor
        elif what == "parameter":
            model.bias = tensor = nn.Parameter(tensor)
        else:
            step.loss_fn = lambda output, y, tensor=tensor: F.cross_entropy(output * tensor, y)
        alive.append(weakref.ref(tensor))
        del tensor
        step(x, y)
    gc.collect()
    assert sum(each() is not None for each in alive) < 10


def test_a_last_smaller_batch_and_many_lengths(graph_only):
    torch.manual_seed(0)
    model = mlp(6, 5, 3).double()
    step = threepass.ThreePass(model, F.cross_entropy, compile=True)
    step.compiled.max_programs = 2
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for rows in (8, 8, 8, 3, 8, 8, 3, 5, 6, 7, 3):
            x, y = torch.randn(rows, 6).double(), torch.randint(3, (rows,))
            model.zero_grad()
            expected = threepass.three_pass(model, F.cross_entropy, x, y).grads
            step(x, y)
            assert_close({n: p.grad for n, p in model.named_parameters()}, expected, 1e-12)
    assert not seen
    assert [entry.label for entry in step.compiled.programs.entries] == [
        "paper mode, float64[8, 6], int64[8]", "paper mode, float64[*, 6], int64[*]"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="max_programs must be a positive integer, got 0"):
        step.compiled.max_programs = 0


def test_a_sparse_gradient_is_named_as_the_reason():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.3, compile="trace")
    with pytest.warns(threepass.UncompiledWarning, match="a parameter has a sparse gradient.*Use sparse=False"):
        step(torch.randint(9, (4, 2)), torch.randint(3, (4,)))


class OtherwiseCompiled(nn.Linear):
    """Runs other operations in a trace, as Mamba of transformers does: there it calls a scan, which uses vmap."""

    def forward(self, x):
        run = super().forward
        return torch.vmap(run)(x).relu() if torch.compiler.is_compiling() else run(x).relu()


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_code_for_compilers_that_is_not_supported_is_replaced_by_that_of_eager_steps(mode, recwarn):
    torch.manual_seed(0)
    model = nn.Sequential(OtherwiseCompiled(6, 5), nn.Linear(5, 3)).double()
    x, y = torch.randn(4, 6).double(), torch.randint(3, (4,))
    expected = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.3, mode=mode).grads
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.3, mode=mode, compile="trace")
    assert_close(step(x, y).grads, expected, 1e-12)
    assert len(step.compiled.programs) == 1
    assert not recwarn


def test_gradient_steps_replace_code_for_compilers_too(recwarn):
    torch.manual_seed(0)
    model = nn.Sequential(OtherwiseCompiled(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.randn(4, 6).double()

    def loss_fn(output, g, y):
        return g.square().mean() + output.square().mean()

    expected = threepass.gradient_step(model, loss_fn, x).grads
    step = threepass.GradientStep(model, loss_fn, compile="trace")
    assert_close(step(x).grads, expected, 1e-12)
    assert len(step.compiled.programs) == 1
    assert not recwarn


class Checked(nn.Linear):
    """Reads values where it is not compiled, as transformers does with masks."""

    def forward(self, x):
        return super().forward(x) if torch.compiler.is_compiling() or x.isfinite().all() else x


def test_other_modules_keep_their_code_for_compilers():
    torch.manual_seed(0)
    model = nn.Sequential(Checked(6, 6), OtherwiseCompiled(6, 5), Checked(5, 3))
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.3, compile="trace")
    step(torch.randn(4, 6), torch.randint(3, (4,)))
    assert len(step.compiled.programs) == 1


class Experts(nn.Module):
    """Each row times the matrix of its expert, as mixtures of experts of transformers compute it."""

    def __init__(self):
        super().__init__()
        self.gate, self.weights = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x):
        scores, experts = self.gate(x).softmax(1).max(1)
        order = experts.argsort()
        ends = F.one_hot(experts, 3).sum(0).cumsum(0).to(torch.int32)
        rows = F.grouped_mm(x[order], self.weights, offs=ends)
        return torch.zeros_like(rows).index_copy(0, order, rows) * scores[:, None]


@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_grouped_products_are_captured(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Experts(), nn.Tanh(), nn.Linear(8, 3))
    step = threepass.ThreePass(model, F.cross_entropy, strength=0.3, mode=mode, compile="trace")
    for seed in (1, 2):
        torch.manual_seed(seed)
        x, y = torch.randn(16, 6), torch.randint(3, (16,))
        expected = threepass.three_pass(model, F.cross_entropy, x, y, strength=0.3, mode=mode).grads
        assert_close(step(x, y).grads, expected, 1e-5)
    assert len(step.compiled.programs) == 1


class ReadsValues(OtherwiseCompiled):
    """Where it is not compiled, it can be captured even less."""

    def forward(self, x):
        return super().forward(x) if torch.compiler.is_compiling() or x.mean() < 9 else x


def test_operations_that_only_the_trace_does_not_support_are_named():
    step = threepass.ThreePass(nn.Sequential(ReadsValues(6, 3)), F.cross_entropy, strength=0.3, compile="trace")
    with pytest.warns(threepass.UncompiledWarning, match=r"1 operation\(s\) of this model, the first in .*vmap"):
        step(torch.randn(4, 6), torch.randint(3, (4,)))


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.mean() > 0 else 2 * super().forward(x)


def test_the_warning_says_what_it_costs_and_points_at_the_users_line():
    step = threepass.ThreePass(Branching(4, 3), F.cross_entropy, compile=True)
    with pytest.warns(threepass.UncompiledWarning) as seen:
        step(torch.randn(5, 4), torch.randint(3, (5,)))
    (warning,) = seen
    assert re.match(
        r"compile=True: this step runs eagerly \([\d.]+ ms, measured on this call\), with the same results, because .*"
        r'To get an error with its traceback instead, pass compile="require"',
        str(warning.message),
    )
    assert warning.filename == __file__


def test_a_refused_program_is_compared_with_the_eager_step(graph_only, monkeypatch):
    def refused(*args):
        raise CaptureError("the results differ")

    monkeypatch.setattr(capture, "check", refused)
    step = threepass.ThreePass(mlp(4, 3), F.cross_entropy, compile=True)
    with pytest.warns(
        threepass.UncompiledWarning, match=r"the captured program took [\d.]+ ms, so this is [\d.]+x slower"
    ):
        step(torch.randn(5, 4), torch.randint(3, (5,)))


@pytest.mark.parametrize("compile", [False, True])
def test_other_warnings_point_at_the_users_line_too(compile, graph_only):
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    weight = torch.ones((), requires_grad=True)
    step = threepass.ThreePass(model, lambda out, y: weight * F.cross_entropy(out, y), compile=compile)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step(torch.randn(5, 4), torch.randint(3, (5,)))
    seen = [w for w in seen if w.category is not DeprecationWarning]  # of PyTorch itself
    assert {w.category for w in seen} == {threepass.NormalizationWarning, threepass.LeftOutWarning}
    assert {w.filename for w in seen} == {__file__}


def test_require_raises_and_nothing_else_happens():
    model = Branching(4, 3)
    step = threepass.ThreePass(model, F.cross_entropy, compile="require")
    with pytest.raises(threepass.CaptureError, match=r'compile="require": this step cannot run .* because ') as raised:
        step(torch.randn(5, 4), torch.randint(3, (5,)))
    with pytest.raises(threepass.CaptureError):  # again, and not eagerly
        step(torch.randn(5, 4), torch.randint(3, (5,)))
    assert isinstance(raised.value, RuntimeError)
    assert raised.value.__cause__ is not None
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(threepass.CaptureError, match="x or y contains a slice; only tensors and plain numbers"):
        threepass.ThreePass(mlp(4, 3), F.cross_entropy, compile="require")(torch.randn(5, 4), slice(3))


@pytest.mark.parametrize("value", ["always", 1, None])
def test_other_words_for_compile_are_refused(value):
    with pytest.raises(ValueError, match='compile must be False, True, "trace" or "require"'):
        threepass.ThreePass(mlp(4, 3), F.cross_entropy, compile=value)
