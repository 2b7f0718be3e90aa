"""Recurrent layers with dropout, written out for a captured step: the same states, masks between layers alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import threepass
from threepass.compile.trace import trace
from threepass.tape import inner_dropout

LAYERS = {
    "lstm": lambda **options: nn.LSTM(3, 4, 3, **options),
    "lstm-projected": lambda **options: nn.LSTM(3, 4, 3, proj_size=2, **options),
    "gru": lambda **options: nn.GRU(3, 4, 3, **options),
    "rnn": lambda **options: nn.RNN(3, 4, 3, nonlinearity="relu", bias=False, **options),
}


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_by_layer_is_the_fused_operation(name, batch_first, bidirectional, monkeypatch):
    """Without the masks, which are drawn in other places."""
    torch.manual_seed(0)
    masked = []
    monkeypatch.setattr(F, "dropout", lambda z, p: masked.append(p) or z)
    layer = LAYERS[name](dropout=0.4, batch_first=batch_first, bidirectional=bidirectional).double()
    plain = LAYERS[name](batch_first=batch_first, bidirectional=bidirectional).double()
    plain.load_state_dict(layer.state_dict())
    x, hx = torch.randn(2, 5, 3, dtype=torch.float64), plain(torch.randn(2, 5, 3, dtype=torch.float64))[1]
    func = {"lstm": torch.lstm, "gru": torch.gru, "rnn": torch.rnn_relu}[name.partition("-")[0]]
    arguments = (x, hx, layer._flat_weights, layer.bias, 3, 0.4, True, bidirectional, batch_first)
    with monkeypatch.context() as patch:
        patch.setattr(inner_dropout, "is_traced", lambda: True)
        body = inner_dropout.body_in_trace(func, arguments, {})
        for without in (4, 5, 6):  # one layer, no dropout, no training
            other = list(arguments)
            other[without] = {4: 1, 5: 0.0, 6: False}[without]
            assert inner_dropout.body_in_trace(func, other, {}) is None
    z, *state = body(*arguments)
    expected, last = plain(x, hx)
    torch.testing.assert_close(z, expected)
    torch.testing.assert_close(tuple(state), last if isinstance(last, tuple) else (last,))
    assert masked == [0.4, 0.4]


def test_packed_sequences_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(inner_dropout, "is_traced", lambda: True)
    layer, z = nn.LSTM(3, 4, 2, dropout=0.4), torch.randn(7, 3)
    packed = (z, torch.tensor([4, 3]), (z, z), layer._flat_weights, True, 2, 0.4, True, False)
    assert inner_dropout.body_in_trace(torch.lstm, packed, {}) is None


def test_the_masks_of_a_captured_step_are_those_of_pass_3():
    """The trace has one mask for each pair of layers, and the third pass uses it again."""

    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0][:, -1]

    torch.manual_seed(0)
    model = Last(3, 5, 3, dropout=0.5, batch_first=True).double()
    x, y = torch.randn(4, 6, 3, dtype=torch.float64), torch.randint(5, (4,))

    def step(x):
        return list(threepass.three_pass(model, F.cross_entropy, x, y, strength=0.3, mode="exact").grads.values())

    nodes = trace(step, [x]).plain.graph.nodes
    masks = [node for node in nodes if "rand" in str(node.target) or "bernoulli" in str(node.target)]
    assert len(masks) == 2
