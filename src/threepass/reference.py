"""The paper's equations written out: slow, obvious, without autograd and without the engine. The oracle of the tests.

One case at a time, so that the batch is a plain sum over cases and enters in one place, `over_cases`.

Signs: section 3 and appendix A write descent directions, Delta w = -dl/dw, nabla w = -dl_x/dw and delta = -dl/du (but
g = +dl/dx: it is the tangent t). What is returned has the usual sign, as `three_pass(..., separate=True)` gives it.

Symbols: section 4 swaps those of section 3; there nabla is the second pass and Delta the third. The convolutions below
say d for a signal of the second pass and t for one of the third. Equations (1) to (5) are section 4's own five, which a
count through the whole paper makes (4) to (8).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, einsum


class Case(NamedTuple):
    """The three passes of case i alone: dl_i/dx, dl_i/dw and the third pass from t_0 = dl_i/dx, by parameter."""

    output: Tensor
    loss: Tensor
    input_grad: Tensor
    backprop: list[Tensor]
    third: list[Tensor]


@dataclass(frozen=True)
class Passes:
    """The three passes of a batch; the names are those of `three_pass`'s result."""

    output: Tensor
    loss: Tensor
    input_loss: Tensor
    input_grad: Tensor
    backprop_grads: dict[str, Tensor]
    third_grads: dict[str, Tensor]

    def grads(self, alpha: float) -> dict[str, Tensor]:
        """alpha dl/dw + (1 - alpha) dl_x/dw: what Algorithm 1 descends along."""
        return {name: alpha * g + (1 - alpha) * self.third_grads[name] for name, g in self.backprop_grads.items()}


@torch.no_grad()
def over_cases(
    case: Callable[[list[Tensor], Tensor, Tensor], Case],
    parameters: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    reduction: str,
) -> Passes:
    """The batch: l = 1/B sum_i l_i, so every error d of case i is 1/B of the case's own.

    Pass 3 starts from dl/dx_i = 1/B dl_i/dx_i (reduction="batch") or from dl_i/dx_i ("sample"), and is linear in it:

        dl/dw = 1/B sum_i dl_i/dw,    third = c/B sum_i third_i,    c = 1/B or 1.

    The input loss is mean_i 1/2 |dl_i/dx_i|^2 with either.
    """
    b = len(x)
    c = {"batch": 1 / b, "sample": 1.0}[reduction]
    cases = [case(list(parameters.values()), x_i, y_i) for x_i, y_i in zip(x, y, strict=True)]
    backprop = [torch.stack(gs).sum(0) / b for gs in zip(*(i.backprop for i in cases), strict=True)]
    third = [c * torch.stack(gs).sum(0) / b for gs in zip(*(i.third for i in cases), strict=True)]
    return Passes(
        output=torch.stack([i.output for i in cases]),
        loss=torch.stack([i.loss for i in cases]).mean(),
        input_loss=torch.stack([i.input_grad.square().sum() / 2 for i in cases]).mean(),
        input_grad=torch.stack([i.input_grad for i in cases]) / b,
        backprop_grads=dict(zip(parameters, backprop, strict=True)),
        third_grads=dict(zip(parameters, third, strict=True)),
    )


def mlp(parameters: Mapping[str, Tensor], x: Tensor, y: Tensor, reduction: str = "batch") -> Passes:
    """Sigmoid perceptron with squared error, output layer included: section 3 and appendix A over a batch.

    Parameters come in order, weight (out, in) and bias (out) of each layer in turn; x is (B, in), y (B, out).

    Examples:
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> passes = mlp({"w": one, "w_0": -one[0]}, x=one, y=one)  # u = 0, v = 1/2, v (1 - v) = 1/4, delta = 1/8
        >>> passes.backprop_grads["w"].item(), passes.third_grads["w"].item()
        (-0.125, 0.015625)
    """
    return over_cases(mlp_case, parameters, x, y, reduction)


def mlp_case(parameters: list[Tensor], x: Tensor, y: Tensor) -> Case:
    """One case, in the paper's symbols; k is its l, and v^0 = x:

        pass 1   u_j^k = sum_i w_ij^(k-1) v_i^(k-1) + w_0j^(k-1),    v^k = 1 / (1 + exp(-u^k))
        pass 2   delta_i^k = v_i^k (1 - v_i^k) sum_j delta_j^(k+1) w_ij^k,  without v (1 - v) at k = 0
                 Delta w_ij^k = v_i^k delta_j^(k+1),    Delta w_0j^k = delta_j^(k+1)
        pass 3   g^0 = -delta^0,    g_j^k = v_j^k (1 - v_j^k) sum_i g_i^(k-1) w_ij^(k-1)
                 nabla w_ij^k = g_i^k delta_j^(k+1),    nothing for the biases w_0j

    w_ij^k leads from neuron i of layer k to neuron j of layer k + 1, as in the paper's sums (its text says
    from k - 1 to k). It is entry [j, i] of the matrix W^k, u^(k+1) = W^k v^k: `nn.Linear`'s weight (out, in).
    """
    w, w_0 = parameters[::2], parameters[1::2]
    top = len(w)

    v = {0: x}
    for k in range(1, top + 1):
        u = einsum("ji,i->j", w[k - 1], v[k - 1]) + w_0[k - 1]
        v[k] = 1 / (1 + torch.exp(-u))
    loss = (v[top] - y).square().sum() / 2

    delta = {top: v[top] * (1 - v[top]) * (y - v[top])}
    for k in reversed(range(top)):
        delta[k] = einsum("j,ji->i", delta[k + 1], w[k])
        if k != 0:
            delta[k] = v[k] * (1 - v[k]) * delta[k]

    g = {0: -delta[0]}
    for k in range(1, top):
        g[k] = v[k] * (1 - v[k]) * einsum("i,ji->j", g[k - 1], w[k - 1])

    backprop, third = [], []
    for k in range(top):
        delta_w, delta_w_0 = einsum("i,j->ji", v[k], delta[k + 1]), delta[k + 1]
        nabla_w, nabla_w_0 = einsum("i,j->ji", g[k], delta[k + 1]), torch.zeros_like(w_0[k])
        backprop += [-delta_w, -delta_w_0]
        third += [-nabla_w, nabla_w_0]
    return Case(v[top], loss, -delta[0], backprop, third)


def pad(x: Tensor, border: int) -> Tensor:
    """x with zeros around it, (C, H, W) -> (C, H + 2 border, W + 2 border); a negative border crops."""
    return F.pad(x, (border,) * 4)


def conv_forward(w: Tensor, x: Tensor) -> Tensor:
    """Equation (1), stride 1: y(i, j, k) = sum_chw w(i, c, h, w) x(c, j+h, k+w).

    w (C_out, C_in, ks, ks), x (C_in, H+ks-1, W+ks-1), with its padding -> (C_out, H, W).
    """
    ks = w.shape[-1]
    height, width = x.shape[1] - ks + 1, x.shape[2] - ks + 1
    y = x.new_zeros(len(w), height, width)
    for h in range(ks):
        for k in range(ks):
            y += einsum("ic,cjk->ijk", w[:, :, h, k], x[:, h : h + height, k : k + width])
    return y


def conv_backward_weight(x: Tensor, d: Tensor) -> Tensor:
    """Equation (2), pass 2: dl/dw(i, j, k, l) = sum_hw x(j, k+h, l+w) d(i, h, w).

    x (C_in, H+ks-1, W+ks-1), d = dl/dy (C_out, H, W) -> (C_out, C_in, ks, ks).
    """
    _, height, width = d.shape
    ks = x.shape[1] - height + 1
    dw = x.new_zeros(len(d), len(x), ks, ks)
    for k in range(ks):
        for m in range(ks):
            dw[:, :, k, m] = einsum("jhw,ihw->ij", x[:, k : k + height, m : m + width], d)
    return dw


def conv_backward_input(w: Tensor, d: Tensor) -> Tensor:
    """Equation (3), pass 2: dl/dx(i, j, k) = sum_chw d_0(c, j+h, k+w) w(c, i, ks-h-1, ks-w-1), d_0 = d padded by ks-1.

    d (C_out, H, W) -> (C_in, H+ks-1, W+ks-1). Where x had padding, crop: an error ends at a constant.
    """
    ks = w.shape[-1]
    height, width = d.shape[1] + ks - 1, d.shape[2] + ks - 1
    d_0 = pad(d, ks - 1)
    dx = d.new_zeros(w.shape[1], height, width)
    for h in range(ks):
        for k in range(ks):
            dx += einsum("cjk,ci->ijk", d_0[:, h : h + height, k : k + width], w[:, :, ks - h - 1, ks - k - 1])
    return dx


def conv_third_weight(d: Tensor, t: Tensor) -> Tensor:
    """Equation (4), pass 3: dl_x/dw(i, j, ks-k-1, ks-l-1) = sum_hw d_0(i, k+h, l+w) t(j, h, w), d_0 = d padded by ks-1.

    d (C_out, H, W), t (C_in, H+ks-1, W+ks-1) -> (C_out, C_in, ks, ks). Right as printed; t is zero on the padding of x.
    Substituting h -> ks-1-k+h makes it equation (2) with t in the place of x, and neither flip nor padding are left:

    >>> d, t = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(3, 7, 6, dtype=torch.float64)
    >>> torch.allclose(conv_third_weight(d, t), conv_backward_weight(t, d))
    True
    """
    _, height, width = t.shape
    ks = height - d.shape[1] + 1
    d_0 = pad(d, ks - 1)
    dw = d.new_zeros(len(d), len(t), ks, ks)
    for k in range(ks):
        for m in range(ks):
            dw[:, :, ks - k - 1, ks - m - 1] = einsum("ihw,jhw->ij", d_0[:, k : k + height, m : m + width], t)
    return dw


def conv_third_signal(w: Tensor, t: Tensor) -> Tensor:
    """Equation (5), pass 3: t_y0(i, j, k) = sum_chw w(i, c, h, w) t_0(c, j+h, k+w), t_0 = t padded by ks-1.

    t (C_in, H+ks-1, W+ks-1) -> (C_out, H, W). As printed the left side has the size of d_0, (H+2ks-2, W+2ks-2): its
    border belongs to the zeros around d, which are constants. Only the inside is the signal of y, and goes on.
    """
    ks = w.shape[-1]
    return pad(conv_forward(w, pad(t, ks - 1)), -(ks - 1))


def columns(x: Tensor, ks: int, stride: int) -> Tensor:
    """im2col: (C, H, W) -> (C ks ks, L), one column of x for each of the L positions of the kernel."""
    return F.unfold(x[None], ks, stride=stride)[0]


def strided_forward(w: Tensor, x: Tensor, stride: int) -> Tensor:
    """Pass 1, and pass 3 with t for x: y = W unfold(x), W = w as (C_out, C_in ks ks); x (C_in, H, W) is padded."""
    ks = w.shape[-1]
    height, width = ((n - ks) // stride + 1 for n in x.shape[1:])
    return (w.flatten(1) @ columns(x, ks, stride)).reshape(-1, height, width)


def strided_weight(d: Tensor, x: Tensor, ks: int, stride: int) -> Tensor:
    """Pass 2, and pass 3 with t for x: dl/dW = d unfold(x)ᵀ; d (C_out, H', W') -> (C_out, C_in, ks, ks)."""
    return (d.flatten(1) @ columns(x, ks, stride).T).reshape(len(d), len(x), ks, ks)


def strided_input(w: Tensor, d: Tensor, stride: int, size: tuple[int, int]) -> Tensor:
    """Pass 2: dl/dx = fold(Wᵀ d), (C_out, H', W') -> (C_in, *size), size = (H, W) of the padded x."""
    return F.fold((w.flatten(1).T @ d.flatten(1))[None], size, w.shape[-1], stride=stride)[0]


def conv_net(
    parameters: Mapping[str, Tensor], x: Tensor, y: Tensor, reduction: str = "batch", padding: int = 1, stride: int = 2
) -> Passes:
    """conv -> ReLU -> conv with stride -> ReLU -> flatten -> linear, squared error; both convolutions pad by `padding`.

    Parameters come in order, weight and bias of each of the three; x is (B, C, H, W), y (B, out).
    """
    return over_cases(lambda ps, x_i, y_i: conv_net_case(ps, x_i, y_i, padding, stride), parameters, x, y, reduction)


def conv_net_case(parameters: list[Tensor], x: Tensor, y: Tensor, padding: int, stride: int) -> Case:
    """One case: the first convolution by equations (1) to (5), the second by unfold and fold; no bias in pass 3."""
    w1, b1, w2, b2, w3, b3 = parameters
    ks = w2.shape[-1]

    x1 = pad(x, padding)
    u1 = conv_forward(w1, x1) + b1[:, None, None]
    x2 = pad(u1 * (u1 > 0), padding)
    u2 = strided_forward(w2, x2, stride) + b2[:, None, None]
    x3 = (u2 * (u2 > 0)).flatten()
    u3 = einsum("ji,i->j", w3, x3) + b3
    loss = (u3 - y).square().sum() / 2

    d3 = u3 - y
    d2 = einsum("j,ji->i", d3, w3).reshape(u2.shape) * (u2 > 0)
    d1 = pad(strided_input(w2, d2, stride, (x2.shape[1], x2.shape[2])), -padding) * (u1 > 0)
    dx = pad(conv_backward_input(w1, d1), -padding)

    t1 = pad(dx, padding)
    t2 = pad(conv_third_signal(w1, t1) * (u1 > 0), padding)
    t3 = (strided_forward(w2, t2, stride) * (u2 > 0)).flatten()

    backprop = [
        *(conv_backward_weight(x1, d1), d1.sum((1, 2))),
        *(strided_weight(d2, x2, ks, stride), d2.sum((1, 2))),
        *(einsum("j,i->ji", d3, x3), d3),
    ]
    third = [
        *(conv_third_weight(d1, t1), torch.zeros_like(b1)),
        *(strided_weight(d2, t2, ks, stride), torch.zeros_like(b2)),
        *(einsum("j,i->ji", d3, t3), torch.zeros_like(b3)),
    ]
    return Case(u3, loss, dx, backprop, third)
