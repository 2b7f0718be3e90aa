"""The CTC loss in exact mode, against double backward of the sum over all alignments."""

import itertools

import pytest
import torch
from close import assert_close
from torch import nn
from torch.nn import functional as F

import threepass

FRAMES, CLASSES = 4, 3
LABELS = torch.tensor([[1, 2], [2, 2], [1, 0]])
LENGTHS = [2, 2, 1]
INPUTS = [4, 3, 2]


def by_alignments(log_probs, labels, inputs):
    """The loss of one sample: alignments are sequences that give the labels without repetitions and blanks (0)."""
    paths = []
    for path in itertools.product(range(CLASSES), repeat=inputs):
        if [k for k, _ in itertools.groupby(path) if k] == labels:
            paths.append(sum(log_probs[time, k] for time, k in enumerate(path)))
    return -torch.logsumexp(torch.stack(paths), 0)


def expected(logits, reduction):
    log_probs = logits.log_softmax(2)
    each = [
        by_alignments(log_probs[:, i], LABELS[i, :n].tolist(), INPUTS[i]) / (n if reduction == "mean" else 1)
        for i, n in enumerate(LENGTHS)
    ]
    return torch.stack(each).sum() / (len(each) if reduction == "mean" else 1)


@pytest.mark.parametrize("form", ["padded", "joined", "tensors"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_exact_mode_is_double_backward(reduction, form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    x = torch.randn(3, FRAMES, 5).double()
    targets = LABELS if form == "padded" else torch.cat([y[:n] for y, n in zip(LABELS, LENGTHS, strict=True)])
    lengths = [torch.tensor(z) if form == "tensors" else z for z in (INPUTS, LENGTHS)]

    def loss_fn(output, y):
        log_probs = output.transpose(0, 1).log_softmax(2)
        return F.ctc_loss(log_probs, targets, *lengths, reduction=reduction, zero_infinity=True).sum()

    got = threepass.three_pass(model, loss_fn, x, mode="exact", separate=True)
    leaf = x.clone().requires_grad_()
    loss = expected(model(leaf).transpose(0, 1), reduction)
    torch.testing.assert_close(got.loss, loss.detach())
    (g,) = torch.autograd.grad(loss, leaf, create_graph=True)
    names, parameters = zip(*model.named_parameters(), strict=True)
    third = torch.autograd.grad(0.5 * g.square().sum(), parameters, allow_unused=True)
    third = [torch.zeros_like(p) if z is None else z for p, z in zip(parameters, third, strict=True)]
    assert_close(got.third_grads, dict(zip(names, third, strict=True)), 1e-12)


def test_an_impossible_sample_counts_as_zero():
    torch.manual_seed(0)
    model, x = nn.Linear(5, CLASSES).double(), torch.randn(2, FRAMES, 5).double()

    def loss_fn(output, y):
        log_probs = output.transpose(0, 1).log_softmax(2)[:, : len(y)]
        return F.ctc_loss(log_probs, y, [4] * len(y), [3] * len(y), reduction="sum", zero_infinity=True)

    labels = torch.tensor([[1, 2, 1], [1, 1, 1]])  # the second needs five frames
    first = threepass.three_pass(model, loss_fn, x, labels[:1], mode="exact")
    assert_close(threepass.three_pass(model, loss_fn, x, labels, mode="exact").grads, first.grads, 1e-12)
