"""nn.MultiheadAttention, F.scaled_dot_product_attention and attention by hand: the same passes, the same rules."""

import pytest
import torch
from close import assert_close
from torch import nn
from torch.nn import functional as F

import threepass

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")

WIDTH, HEADS, TOKENS, SAMPLES = 8, 2, 5, 4
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
PADDED = torch.arange(TOKENS) >= torch.tensor([5, 4, 3, 5])[:, None]


class Block(nn.Module):
    """Attention and a head; how says by which functions attention is computed, on the same parameters."""

    def __init__(self, how, masks=None, need_weights=False, dropout=0.0, cross=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)
        self.how, self.masks, self.need_weights, self.cross = how, masks or {}, need_weights, cross

    def forward(self, x):
        y = x.flip(1).tanh() if self.cross else x
        if self.how == "module":
            out = self.attention(x, y, y, need_weights=self.need_weights, **self.masks)[0]
        else:
            out = self._written_out(x, y)
        return self.head(out).mean(1)

    def _written_out(self, x, y):
        m = self.attention
        if self.cross:
            weights = zip((x, y, y), m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3), strict=True)
            parts = [F.linear(z, w, b) for z, w, b in weights]
        else:
            parts = F.linear(x, m.in_proj_weight, m.in_proj_bias).chunk(3, -1)
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in parts)
        blind = self._blind()
        if self.how == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, None if blind is None else ~blind)
        else:
            scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
            out = (scores if blind is None else scores.masked_fill(blind, -torch.inf)).softmax(-1) @ v
        return m.out_proj(out.transpose(1, 2).flatten(2))

    def _blind(self):
        padded = self.masks.get("key_padding_mask")
        blind = self.masks.get("attn_mask")
        if padded is None:
            return blind
        return padded[:, None, None] if blind is None else padded[:, None, None] | blind


def batch():
    torch.manual_seed(1)
    return torch.randn(SAMPLES, TOKENS, WIDTH).double(), torch.randint(0, 3, (SAMPLES,))


def block(how, **options):
    torch.manual_seed(0)
    return Block(how, **options).double()


def passes(model, mode):
    return threepass.three_pass(model, F.cross_entropy, *batch(), mode=mode, separate=True)


MASKS = {
    "none": {},
    "causal": {"attn_mask": CAUSAL},
    "padding": {"key_padding_mask": PADDED},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": PADDED},
}


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("masks", MASKS)
def test_three_ways_to_write_attention_are_one(masks, cross, need_weights, training, mode):
    options = {"masks": MASKS[masks], "cross": cross}
    module = passes(block("module", need_weights=need_weights, **options).train(training), mode)
    for how in ("sdpa", "by hand"):
        other = passes(block(how, **options).train(training), mode)
        for name in ("backprop_grads", "third_grads"):
            assert_close(getattr(module, name), getattr(other, name), 1e-10, least=1e-15)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("mode", ["paper", "exact"])
def test_dropout_is_drawn_as_in_a_training_forward(mode, need_weights):
    model, (x, y) = block("module", need_weights=need_weights, dropout=0.5), batch()
    torch.manual_seed(3)
    output, after = model(x), torch.get_rng_state()
    torch.manual_seed(3)
    r = threepass.three_pass(model, F.cross_entropy, x, y, mode=mode)
    torch.testing.assert_close(r.output, output, rtol=1e-12, atol=1e-14)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_coverage_has_no_generic_rule_for_it(training, need_weights):
    model = block("module", need_weights=need_weights).train(training)
    x, _ = batch()
    rows = {row.parameter: row.rule for row in threepass.coverage(model, x).rows}
    assert set(rows) == {n for n, _ in model.named_parameters()}
    assert set(rows.values()) == {"fast"}


def encoder(training, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first"))
    return model.double().train(training)


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoders_are_the_same_in_training_and_eval_mode(norm_first, mode):
    """In eval mode torch has a fused path for them, which three passes do not take."""
    x, y = batch()
    found = []
    for training in (True, False):
        model = nn.ModuleDict({"body": encoder(training, norm_first=norm_first), "head": nn.Linear(WIDTH, 3).double()})
        nn.init.constant_(model["head"].bias, 0.1)
        nn.init.eye_(model["head"].weight)
        forward = Forward(model)
        found.append(threepass.three_pass(forward, F.cross_entropy, {"x": x, "padded": PADDED}, y, mode=mode))
        rules = {row.rule for row in threepass.coverage(forward, {"x": x, "padded": PADDED}).rows}
        assert rules == {"fast"}
    assert_close(found[0].grads, found[1].grads, 1e-12, least=1e-15)


class Forward(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x, padded):
        out = self.parts["body"](x, src_key_padding_mask=padded)
        return self.parts["head"](out.masked_fill(padded[..., None], 0.0).mean(1))
