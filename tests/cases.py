"""The grid: every operation that a parameter may sit in, and what may stand between them. One row a case."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Case:
    """A model, the shape of its input, and what is special: noise drawn, samples that mix (batch norm)."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    random: bool = False
    mixes_samples: bool = False
    hidden: bool = False  # from the oracle, which sees torch functions and needs autograd.grad
    once: bool = False  # PyTorch cannot differentiate it twice
    loss: Callable = F.cross_entropy

    def build(self, dtype=torch.float64):
        torch.manual_seed(sum(map(ord, self.name)))
        model = _cast(self.make(), dtype)
        model.zero_grad()  # parts of a `Fn` are made once, for all tests
        x = torch.randn(self.shape, dtype=dtype)
        with torch.no_grad():
            out = model.eval()(x.clone()) if not self.mixes_samples else model(x.clone())
        model.train(not getattr(model, "stays_eval", False))
        y = torch.randint(0, out.shape[-1], (self.shape[0],)) if self.loss is F.cross_entropy else torch.rand_like(out)
        return model, self.loss, x, y

    def __str__(self):
        return self.name


class Fn(nn.Module):
    """A forward written as a function of (parameters, x)."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.f = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x):
        return self.f(self, x)


def seq(*layers, head=None):
    """Layers, then everything flat, then a linear head."""
    return nn.Sequential(*layers, nn.Flatten(), *([] if head is None else [nn.Linear(head, 4)]))


def _fn(f, **parts):
    return lambda: Fn(f, **parts)


class Scale(torch.autograd.Function):
    """a * w, as a user would write it."""

    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        return a * w

    @staticmethod
    def backward(ctx, d):
        a, w = ctx.saved_tensors
        return d * w, (d * a).sum(0)


@torch.library.custom_op("threepass_tests::cube_scale", mutates_args=())
def cube_scale(a: Tensor, w: Tensor) -> Tensor:
    return a**3 * w


cube_scale.register_autograd(
    lambda ctx, d: (3 * ctx.saved_tensors[0] ** 2 * ctx.saved_tensors[1] * d, (d * ctx.saved_tensors[0] ** 3).sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _lora(s, x):
    return s.out(torch.relu(F.linear(x, s.w + s.b @ s.a)))


def _class_token(s, x):
    x = torch.cat([s.token.expand(len(x), -1, -1), x + s.position], 1)
    return s.head(s.layer(x)[:, 0])


def _radial(s, x):
    """Lengths, radial bases, gathers and scatters, as in nets on graphs; rows are 0 to 5."""
    to, source = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 0, 4, -1, 3, 5, 4]], device=x.device)
    length = (x[to] - x[source]).norm(dim=1, keepdim=True)
    filters = F.softplus(s.filters(torch.cat([length.sin(), (-length.square()).exp(), (1 + length**2).sqrt()], 1)))
    messages = s.embed(x).index_select(0, to) * filters * s.scale
    h = torch.zeros_like(x[:, :1]).expand(-1, 4).index_add(0, to, messages, alpha=0.5)
    h = h.scatter_add(0, to[:, None].expand_as(messages), messages.cos())
    return s.head(h * h.gather(1, torch.tensor([[0, 3, 3, 1]], device=x.device).expand(6, -1)))


def _hyper(s, x):
    w = s.make(x).view(len(x), 4, 5)
    return torch.einsum("noi,ni->no", w, x)


def _control_flow(s, x):
    for i in range(3):
        x = s.a(x).tanh() if x.sum() > 0 or i % 2 else s.b(x).sigmoid()
    return s.head(x)


def _views(s, x):
    q, k = s.qk(x).chunk(2, -1)
    h = (q * k.flip(-1))[:, ::2].t().contiguous().t()
    return s.head(torch.stack([h, h.roll(1, 1)], 1).mean(1).unsqueeze(0).squeeze(0))


def _subscripts(s, x):
    """Rows and entries by vectors of numbers, alone and with other subscripts; memory in the order of an image."""
    i, j = torch.tensor([[0, 2, 4, -1, 1, 3], [1, 0, 2, 1, 4, -2]], device=x.device)
    h = s.a(x)
    image = h.view(6, 5, 1, 1).expand(-1, -1, 2, 3).contiguous(memory_format=torch.channels_last)
    pixels = image[i].permute(0, 2, 3, 1).view(6, -1).sin().sum(1, keepdim=True)
    rows = h[i] * h[i, 1:2] + h[i, None].tanh().squeeze(1) * h[..., j[:5]] + h.t()[j[:5]].t()
    return s.head(rows * pixels + h[i, j].unsqueeze(1) + h[i, ...])


def _positions(s, x):
    """Positions in tensors, one of which moves later; dimensions by name; a mean of nothing."""
    h = s.a(x)
    i, out = torch.tensor(0), h.select(1, torch.tensor(2))
    for k in range(3):
        out = out + h[:, i] * (k + 1) + h.narrow(1, i, 2).tanh().sum(1)
        i += 1
    empty = h[:0].mean(1).sum() + torch.linalg.vector_norm(h, dim=[])
    return s.head(torch.permute(h, dims=(1, 0)).t() * out.unsqueeze(1) * (1 + empty))


def _written_in_place(s, x):
    h = s.a(x)
    h += x
    h[:, 1:3] = 2 * h[:, :2]
    h.mul_(s.scale)
    view = h[:, 2:]
    view.tanh_()
    out = x.new_zeros(len(x), 7)
    out[:, :5] = h
    out[:, 5:] = s.token
    out[:, 0].mul_(2)
    return s.head(out.clamp_(-2, 2))


def _token_first(s, x):
    out = s.token.expand(len(x), -1).clone() * 1
    out[:, :3] = x[:, :3]
    return s.head(torch.tanh(out))


def _keeps_old_values(s, x):
    h = s.a(x)
    e = h.exp()
    h.mul_(2.0)
    return s.head(e * h)


def _fourier(s, x):
    return s.head(torch.fft.irfft(torch.fft.rfft(torch.tanh(s.a(x))) * s.w.exp(), n=5))


def _packed(s, x):
    packed = nn.utils.rnn.pack_padded_sequence(x, [3, 3, 2, 1], batch_first=True)
    return s.head(nn.utils.rnn.pad_packed_sequence(s.rnn(packed)[0], batch_first=True)[0].mean(1))


def _scatter(s, x):
    h = torch.tanh(s.a(x)) * s.g(x).softmax(-1)[:, :1]
    out = torch.zeros_like(x).index_add(0, torch.arange(len(x), device=x.device), h)
    return s.head(out.scatter_add(1, torch.arange(5, device=x.device).flip(0).expand(len(x), 5), h.square()))


def _can_sample_twice() -> bool:
    """Whether this PyTorch knows grid_sample's second derivative; older ones do not."""
    x, grid = torch.randn(1, 1, 2, 2, requires_grad=True), torch.zeros(1, 1, 1, 2, requires_grad=True)
    try:
        (d,) = torch.autograd.grad(F.grid_sample(x, grid, align_corners=False).sum(), x, create_graph=True)
        torch.autograd.grad(d.square().sum(), grid)
    except RuntimeError:
        return False
    return True


def _sampled(s, x):
    grid = F.affine_grid(s.theta.expand(len(x), 2, 3), (len(x), 1, 2, 2), align_corners=False)
    return s.head(F.grid_sample(x, grid, align_corners=False).flatten(1))


CASES = [
    Case("linear", lambda: nn.Linear(5, 4), (6, 5)),
    Case("mlp-relu", lambda: seq(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4)), (6, 5)),
    Case(
        "mlp-sigmoid-mse",
        lambda: seq(nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 4), nn.Sigmoid()),
        (6, 5),
        loss=F.mse_loss,
    ),
    Case(
        "addmm",
        _fn(
            lambda s, x: s.head(torch.addmm(s.b, torch.tanh(torch.addmm(s.b, x, s.w)), s.w).addmm(x, s.w, beta=0.5)),
            w=torch.randn(5, 5),
            b=torch.randn(5),
            head=nn.Linear(5, 4),
        ),
        (6, 5),
    ),
    Case("linear-3d", lambda: seq(nn.Linear(5, 6), nn.Tanh(), head=18), (4, 3, 5)),
    Case("bilinear", _fn(lambda s, x: s.b(x, torch.tanh(x)), b=nn.Bilinear(5, 5, 4)), (6, 5)),
    Case("conv1d", lambda: seq(nn.Conv1d(3, 4, 3, stride=2, padding=1), nn.GELU(), head=16), (5, 3, 8)),
    Case("conv2d-stride", lambda: seq(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), head=36), (5, 3, 7, 7)),
    Case("conv2d-same", lambda: seq(nn.Conv2d(3, 4, 3, padding="same"), nn.SiLU(), head=64), (5, 3, 4, 4)),
    Case(
        "conv2d-same-even",
        lambda: seq(nn.Conv2d(3, 4, 2, padding="same", dilation=3), nn.Tanh(), head=64),
        (5, 3, 4, 4),
    ),
    Case("conv2d-valid", lambda: seq(nn.Conv2d(3, 4, 3, padding="valid"), nn.Tanh(), head=16), (5, 3, 4, 4)),
    *[
        Case(
            f"conv2d-{mode}",
            lambda m=mode: seq(nn.Conv2d(3, 4, 3, padding=1, padding_mode=m), nn.Tanh(), head=64),
            (5, 3, 4, 4),
        )
        for mode in ("zeros", "reflect", "replicate", "circular")
    ],
    Case(
        "conv2d-dilation", lambda: seq(nn.Conv2d(2, 4, 3, dilation=2, padding=(1, 2)), nn.ELU(), head=40), (5, 2, 4, 5)
    ),
    Case("conv2d-groups", lambda: seq(nn.Conv2d(4, 6, 3, groups=2, padding=1), nn.ReLU(), head=96), (5, 4, 4, 4)),
    Case(
        "conv2d-depthwise",
        lambda: seq(nn.Conv2d(4, 8, 3, groups=4, padding=1, bias=False), nn.Tanh(), head=128),
        (5, 4, 4, 4),
    ),
    Case("conv3d", lambda: seq(nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 1, 2)), nn.ReLU(), head=18), (4, 2, 2, 4, 4)),
    Case(
        "conv-transpose1d",
        lambda: seq(nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1), nn.Tanh(), head=40),
        (5, 3, 4),
    ),
    Case(
        "conv-transpose2d",
        lambda: seq(nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2, dilation=2), nn.Tanh(), head=294),
        (4, 4, 3, 3),
    ),
    Case("conv-transpose3d", lambda: seq(nn.ConvTranspose3d(2, 2, 2), nn.ReLU(), head=54), (4, 2, 2, 2, 2)),
    Case(
        "batch-norm",
        lambda: seq(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), head=12),
        (5, 2, 4, 4),
        mixes_samples=True,
    ),
    Case(
        "batch-norm-1d-plain",
        lambda: seq(
            nn.BatchNorm1d(5, affine=False), nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh(), head=6
        ),
        (6, 5),
        mixes_samples=True,
    ),
    Case(
        "batch-norm-eval",
        lambda: _evaluated(seq(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), head=12)),
        (5, 2, 4, 4),
    ),
    Case("layer-norm", lambda: seq(nn.Linear(5, 6), nn.LayerNorm(6), nn.GELU(), head=18), (5, 3, 5)),
    Case(
        "layer-norm-2d-no-bias",
        lambda: seq(nn.Conv2d(2, 2, 3), nn.LayerNorm((2, 2), bias=False), nn.Tanh(), head=8),
        (5, 2, 4, 4),
    ),
    Case("layer-norm-plain", lambda: seq(nn.Linear(5, 6), nn.LayerNorm(6, elementwise_affine=False), head=6), (5, 5)),
    Case("group-norm", lambda: seq(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), head=16), (5, 2, 4, 4)),
    Case(
        "instance-norm",
        lambda: seq(
            nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.ReLU(), head=27
        ),
        (5, 2, 4, 4),
    ),
    Case("rms-norm", lambda: seq(nn.Linear(5, 6), nn.RMSNorm(6), nn.SiLU(), head=18), (5, 3, 5)),
    Case("local-response-norm", lambda: seq(nn.Conv2d(2, 4, 3), nn.LocalResponseNorm(2), head=16), (5, 2, 4, 4)),
    Case("prelu", lambda: seq(nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, 5), nn.PReLU(), head=5), (5, 5)),
    Case(
        "attention",
        _fn(
            lambda s, x: s.head(s.mha(x, x, x, need_weights=False)[0].mean(1)),
            mha=nn.MultiheadAttention(4, 2, batch_first=True),
            head=nn.Linear(4, 4),
        ),
        (4, 3, 4),
    ),
    Case(
        "attention-weights-mask",
        _fn(
            lambda s, x: s.head(
                s.mha(x, x, x, attn_mask=torch.ones(3, 3, dtype=torch.bool, device=x.device).triu(1))[0].mean(1)
            ),
            mha=nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True, kdim=4, vdim=4),
            head=nn.Linear(4, 4),
        ),
        (4, 3, 4),
    ),
    Case(
        "encoder-layer",
        lambda: seq(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), head=12),
        (4, 3, 4),
    ),
    Case(
        "encoder-layer-eval",
        lambda: _evaluated(
            seq(nn.TransformerEncoderLayer(4, 2, 6, activation="gelu", norm_first=True, batch_first=True), head=12)
        ),
        (4, 3, 4),
    ),
    Case(
        "decoder-layer",
        _fn(
            lambda s, x: s.head(s.layer(x, torch.tanh(x)).flatten(1)),
            layer=nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
            head=nn.Linear(12, 4),
        ),
        (4, 3, 4),
    ),
    Case(
        "sdpa",
        _fn(
            lambda s, x: s.head(
                F.scaled_dot_product_attention(
                    *s.qkv(x).view(-1, 3, 3, 2, 4).permute(2, 0, 3, 1, 4), is_causal=True
                ).flatten(1)
            ),
            qkv=nn.Linear(5, 24),
            head=nn.Linear(24, 4),
        ),
        (4, 3, 5),
    ),
    Case(
        "sdpa-learned-query-bias",
        _fn(
            lambda s, x: F.scaled_dot_product_attention(
                s.q.expand(len(x), 1, 5), x, s.v(x), attn_mask=s.bias, scale=0.7
            )[:, 0],
            q=torch.randn(1, 1, 5),
            v=nn.Linear(5, 4),
            bias=torch.randn(1, 3),
        ),
        (4, 3, 5),
    ),
    Case(
        "sdpa-gqa",
        _fn(
            lambda s, x: s.head(
                F.scaled_dot_product_attention(
                    s.q(x).view(-1, 3, 4, 2).transpose(1, 2),
                    *(x.view(-1, 3, 2, 2).transpose(1, 2),) * 2,
                    enable_gqa=True,
                ).flatten(1)
            ),
            q=nn.Linear(4, 8),
            head=nn.Linear(24, 4),
        ),
        (4, 3, 4),
    ),
    Case(
        "lstm",
        _fn(
            lambda s, x: s.head(s.rnn(x)[0][:, -1]),
            rnn=nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True),
            head=nn.Linear(8, 4),
        ),
        (4, 3, 3),
    ),
    Case(
        "lstm-projected",
        _fn(
            lambda s, x: s.head(s.rnn(x)[1][0][0]),
            rnn=nn.LSTM(3, 5, proj_size=2, batch_first=True),
            head=nn.Linear(2, 4),
        ),
        (4, 3, 3),
    ),
    Case(
        "gru",
        _fn(lambda s, x: s.head(s.rnn(x)[1][0]), rnn=nn.GRU(3, 4, batch_first=True), head=nn.Linear(4, 4)),
        (4, 3, 3),
    ),
    Case(
        "rnn-relu",
        _fn(
            lambda s, x: s.head(s.rnn(x)[0].mean(1)),
            rnn=nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
            head=nn.Linear(4, 4),
        ),
        (4, 3, 3),
    ),
    Case(
        "gru-cell",
        _fn(lambda s, x: s.head(s.cell(x[:, 1], s.cell(x[:, 0]))), cell=nn.GRUCell(3, 4), head=nn.Linear(4, 4)),
        (4, 3, 3),
    ),
    Case(
        "lstm-cell",
        _fn(lambda s, x: s.head(s.cell(x[:, 1], s.cell(x[:, 0]))[0]), cell=nn.LSTMCell(3, 4), head=nn.Linear(4, 4)),
        (4, 3, 3),
    ),
    Case(
        "layer-scale",
        _fn(
            lambda s, x: s.head(x + s.gamma * torch.tanh(s.a(x))),
            a=nn.Linear(5, 5),
            gamma=torch.randn(5),
            head=nn.Linear(5, 4),
        ),
        (6, 5),
    ),
    Case(
        "class-token-position",
        _fn(
            _class_token,
            token=torch.randn(1, 1, 4),
            position=torch.randn(3, 4),
            layer=nn.TransformerEncoderLayer(4, 1, 5, dropout=0.0, batch_first=True),
            head=nn.Linear(4, 4),
        ),
        (4, 3, 4),
    ),
    Case("matmul", _fn(lambda s, x: torch.tanh(x @ s.w) @ s.v, w=torch.randn(5, 6), v=torch.randn(6, 4)), (6, 5)),
    Case(
        "einsum",
        _fn(lambda s, x: torch.einsum("nti,oi,t->no", torch.sin(x), s.w, s.v), w=torch.randn(4, 5), v=torch.randn(3)),
        (6, 3, 5),
    ),
    Case(
        "temperature",
        _fn(
            lambda s, x: F.normalize(s.a(x), dim=-1) @ F.normalize(s.w, dim=-1).T * s.scale.exp(),
            a=nn.Linear(5, 5),
            w=torch.randn(4, 5),
            scale=torch.tensor(0.5),
        ),
        (6, 5),
    ),
    Case(
        "division-power",
        _fn(
            lambda s, x: s.head((s.p / (1 + x.square()) - x / s.q) ** 2 + s.p.exp() ** x),
            p=torch.rand(5) + 0.5,
            q=torch.rand(5) + 0.5,
            head=nn.Linear(5, 4),
        ),
        (6, 5),
    ),
    Case(
        "tied", _fn(lambda s, x: s.a(torch.tanh(s.a(torch.tanh(s.a(x))))) @ s.a.weight[:4].T, a=nn.Linear(5, 5)), (6, 5)
    ),
    Case(
        "weight-norm",
        lambda: seq(
            parametrizations.weight_norm(nn.Linear(5, 6)), nn.ReLU(), parametrizations.weight_norm(nn.Linear(6, 4))
        ),
        (6, 5),
    ),
    Case("spectral-norm", lambda: seq(parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh(), head=6), (6, 5)),
    Case(
        "lora", _fn(_lora, w=torch.randn(6, 5), a=torch.randn(2, 5), b=torch.randn(6, 2), out=nn.Linear(6, 4)), (6, 5)
    ),
    Case("hypernetwork", _fn(_hyper, make=nn.Linear(5, 20)), (6, 5)),
    Case("frozen", lambda: _frozen(seq(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), head=6)), (6, 5)),
    Case(
        "residual-concat",
        _fn(
            lambda s, x: s.head(torch.cat([x + s.a(x).relu(), s.b(x)], -1)),
            a=nn.Linear(5, 5),
            b=nn.Linear(5, 3),
            head=nn.Linear(8, 4),
        ),
        (6, 5),
    ),
    Case(
        "in-place-relu",
        lambda: seq(
            nn.ReLU(inplace=True),
            nn.Conv2d(2, 3, 3),
            nn.ReLU(inplace=True),
            nn.BatchNorm2d(3),
            nn.LeakyReLU(0.1, inplace=True),
            head=12,
        ),
        (5, 2, 4, 4),
        mixes_samples=True,
    ),
    Case(
        "in-place-writes",
        _fn(
            _written_in_place, a=nn.Linear(5, 5), scale=torch.rand(5) + 0.5, token=torch.randn(2), head=nn.Linear(7, 4)
        ),
        (6, 5),
    ),
    Case("written-over-a-weight", _fn(_token_first, token=torch.randn(1, 5), head=nn.Linear(5, 4)), (6, 5)),
    Case("old-values-kept", _fn(_keeps_old_values, a=nn.Linear(5, 5), head=nn.Linear(5, 4)), (6, 5)),
    Case("positions", _fn(_positions, a=nn.Linear(5, 5), head=nn.Linear(5, 4)), (6, 5), mixes_samples=True),
    Case("subscripts", _fn(_subscripts, a=nn.Linear(5, 5), head=nn.Linear(5, 4)), (6, 5), mixes_samples=True),
    Case("views", _fn(_views, qk=nn.Linear(5, 12), head=nn.Linear(3, 4)), (6, 5)),
    Case(
        "control-flow",
        _fn(_control_flow, a=nn.Linear(5, 5), b=nn.Linear(5, 5), head=nn.Linear(5, 4)),
        (6, 5),
        mixes_samples=True,
    ),
    Case(
        "pooling",
        lambda: seq(
            nn.Conv2d(2, 3, 3, padding=1),
            nn.MaxPool2d(2),
            nn.Conv2d(3, 4, 3, padding=1),
            nn.AvgPool2d(2),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 4),
        ),
        (5, 2, 8, 8),
    ),
    Case(
        "more-pooling",
        lambda: seq(nn.Conv2d(2, 3, 3, padding=1), nn.LPPool2d(2, 2), nn.AdaptiveAvgPool2d(2), head=12),
        (5, 2, 8, 8),
    ),
    Case(
        "interpolate",
        lambda: seq(
            nn.Conv2d(2, 3, 3),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.PixelShuffle(1),
            nn.Conv2d(3, 2, 3),
            head=8,
        ),
        (5, 2, 4, 4),
    ),
    Case(
        "softmax-indexing",
        _fn(
            lambda s, x: s.head(F.softmax(s.a(x), -1)[:, [0, 2, 1]] * x[..., 1:4]),
            a=nn.Linear(5, 5),
            head=nn.Linear(3, 4),
        ),
        (6, 5),
    ),
    Case(
        "activations",
        _fn(lambda s, x: s.head(sum(f(s.a(x)) for f in _ACTIVATIONS)), a=nn.Linear(5, 5), head=nn.Linear(5, 4)),
        (6, 5),
    ),
    Case("hardsigmoid", lambda: seq(nn.Linear(5, 6), nn.Hardsigmoid(), head=6), (6, 5), once=True),
    Case(
        "checkpoint",
        _fn(
            lambda s, x: s.head(checkpoint(s.a, x, use_reentrant=False)),
            a=nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)),
            head=nn.Linear(5, 4),
        ),
        (6, 5),
    ),
    Case(
        "autograd-function",
        _fn(lambda s, x: s.head(torch.sin(Scale.apply(torch.tanh(x), s.w))), w=torch.randn(5), head=nn.Linear(5, 4)),
        (6, 5),
        hidden=True,
    ),
    Case(
        "custom-op",
        _fn(lambda s, x: s.head(cube_scale(torch.tanh(x), s.w)), w=torch.randn(5), head=nn.Linear(5, 4)),
        (6, 5),
    ),
    Case("fourier", _fn(_fourier, a=nn.Linear(5, 5), w=torch.randn(3), head=nn.Linear(5, 4)), (6, 5)),
    Case(
        "fourier-complex",
        _fn(_fourier, a=nn.Linear(5, 5), w=torch.randn(3, dtype=torch.complex64), head=nn.Linear(5, 4)),
        (6, 5),
    ),
    Case("orthogonal", lambda: seq(parametrizations.orthogonal(nn.Linear(5, 5)), nn.Tanh(), head=5), (6, 5)),
    Case(
        "embedding-gate",
        _fn(
            lambda s, x: s.head(torch.tanh(s.a(x)) * s.e(torch.arange(len(x), device=x.device) % 3)),
            a=nn.Linear(5, 5),
            e=nn.Embedding(3, 5),
            head=nn.Linear(5, 4),
        ),
        (6, 5),
        mixes_samples=True,
    ),
    Case(
        "packed-lstm",
        _fn(_packed, rnn=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 4)),
        (4, 3, 3),
        mixes_samples=True,
    ),
    Case("scatter-index", _fn(_scatter, a=nn.Linear(5, 5), g=nn.Linear(5, 3), head=nn.Linear(5, 4)), (6, 5)),
    *(
        [
            Case(
                "grid-sample",
                _fn(_sampled, theta=torch.tensor([[1.0, 0.1, 0.05], [0.1, 0.9, 0.02]]), head=nn.Linear(4, 4)),
                (6, 1, 3, 3),
            )
        ]
        if _can_sample_twice()
        else []
    ),
    Case(
        "dropout",
        lambda: seq(
            nn.Linear(5, 20), nn.Dropout(0.5), nn.ReLU(), nn.Linear(20, 20), nn.Dropout(0.3, inplace=True), head=20
        ),
        (6, 5),
        random=True,
    ),
    Case(
        "dropout-2d-alpha",
        lambda: seq(nn.Conv2d(2, 8, 3), nn.Dropout2d(0.4), nn.SELU(), nn.AlphaDropout(0.3), nn.RReLU(), head=32),
        (5, 2, 4, 4),
        random=True,
    ),
    Case(
        "encoder-dropout",
        lambda: seq(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, batch_first=True), head=12),
        (4, 3, 4),
        random=True,
    ),
    Case(
        "sdpa-dropout",
        _fn(
            lambda s, x: s.head(F.scaled_dot_product_attention(s.q(x), x, x, dropout_p=0.4).flatten(1)),
            q=nn.Linear(5, 5),
            head=nn.Linear(15, 4),
        ),
        (4, 3, 5),
        random=True,
    ),
    Case(
        "lstm-dropout",
        _fn(
            lambda s, x: s.head(s.rnn(x)[0][:, -1]),
            rnn=nn.LSTM(3, 8, 2, batch_first=True, dropout=0.4),
            head=nn.Linear(8, 4),
        ),
        (4, 3, 3),
        random=True,
    ),
    Case(
        "noise",
        _fn(
            lambda s, x: s.head(torch.tanh(s.a(x)) + torch.randn_like(x) * x.new_ones(1).uniform_()),
            a=nn.Linear(5, 5),
            head=nn.Linear(5, 4),
        ),
        (6, 5),
        random=True,
    ),
    Case(
        "radial",
        _fn(_radial, filters=nn.Linear(3, 4), embed=nn.Linear(5, 4), head=nn.Linear(4, 4), scale=torch.randn(4)),
        (6, 5),
        mixes_samples=True,
    ),
    Case(
        "bce",
        lambda: seq(nn.Linear(5, 6), nn.Softplus(), nn.Linear(6, 4)),
        (6, 5),
        loss=F.binary_cross_entropy_with_logits,
    ),
    Case(
        "label-smoothing",
        lambda: seq(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 4)),
        (6, 5),
        loss=lambda o, y: F.cross_entropy(o, y.softmax(-1), label_smoothing=0.1),
    ),
]

_ACTIVATIONS = [
    *(
        F.relu,
        F.relu6,
        F.leaky_relu,
        F.elu,
        F.celu,
        F.selu,
        F.gelu,
        F.silu,
        F.mish,
        F.hardswish,
        F.hardtanh,
        F.softplus,
    ),
    *(F.softsign, F.tanhshrink, F.softshrink, F.hardshrink, F.logsigmoid, torch.sigmoid, torch.tanh, torch.abs),
    *(torch.erf, torch.sin, lambda z: F.glu(torch.cat([z, z], -1)), lambda z: F.log_softmax(z, -1)),
    lambda z: F.softmin(z, -1),
    lambda z: torch.where(z > 0, z, z.square()),
    lambda z: z.clamp(-0.5, 0.5),
    lambda z: torch.maximum(z, z.roll(1, -1)),
    lambda z: z.sort(-1).values,
    lambda z: z.cumsum(-1),
    lambda z: torch.logsumexp(z, -1, keepdim=True),
    lambda z: z.std(-1, keepdim=True),
]


def _cast(model, dtype):
    """To dtype; complex parameters to the complex format of the same precision."""
    for p in model.parameters():
        p.data = p.data.to(dtype.to_complex() if p.is_complex() else dtype)
    for b in model.buffers():
        b.data = b.data.to(dtype) if b.is_floating_point() else b.data
    return model


def _evaluated(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    model.stays_eval = True
    return model


def _frozen(model):
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model
