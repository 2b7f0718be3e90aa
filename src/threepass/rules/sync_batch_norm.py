"""`nn.SyncBatchNorm`: batch norm whose mean and variance are those of all ranks' samples.

The formulas are batch norm's (`kernels/norm.py`), with every sum over a channel taken over all ranks: the statistics in
pass 1, two sums for an error in pass 2 and for a tangent in pass 3, and the sums of the second derivative in exact
mode. Each rank computes the errors of the sum of the ranks' losses, as PyTorch's own SyncBatchNorm does, and the
gradients of scale and shift from its own samples: their mean over the ranks is the gradient.

Every sum is a collective operation, which all ranks have to call in the same order: they run the same model.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from ..kernels import norm
from ..numerics.precision import accumulate_dtype
from .names import key_of
from .norm import affine_gradients, channels
from .table import Linearization, rule


def is_synchronized(module: nn.Module) -> bool:
    """Whether the module is an `nn.SyncBatchNorm` that takes its statistics from other ranks too."""
    if not (dist.is_available() and dist.is_initialized() and isinstance(module, nn.SyncBatchNorm)):
        return False
    return module.training and dist.get_world_size(module.process_group) > 1


def has_synchronized_norm(model: nn.Module) -> bool:
    return dist.is_available() and dist.is_initialized() and any(map(is_synchronized, model.modules()))


class Statistics(NamedTuple):
    """Of the samples of all ranks: mean and variance of the channels; share: the part of the samples on this rank."""

    mean: Tensor
    var: Tensor
    share: Tensor
    eps: float
    group: Any


def forward(module: nn.SyncBatchNorm, a: Tensor) -> Tensor:
    """The forward of an `nn.SyncBatchNorm` that `is_synchronized`; PyTorch's own refuses tensors on a CPU."""
    if a.dim() < 2:
        raise ValueError(f"expected at least 2D input (got {a.dim()}D input)")
    group: Any = module.process_group or dist.group.WORLD
    with torch.no_grad():
        mean, var, count = _statistics(a, group)
        _track(module, mean, var, count)
        statistics = Statistics(mean, var, a.numel() / a.shape[1] / count, module.eps, group)
    return SyncBatchNorm.apply(a, module.weight, module.bias, statistics)


def _statistics(a: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the channels over all ranks, and how many numbers a channel has."""
    var, mean = torch.var_mean(a.to(accumulate_dtype(a.dtype)), channels(a)[0], correction=0)
    own = torch.cat([mean, var, mean.new_full((1,), a.numel() // a.shape[1])])
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group)
    means, variances, counts = torch.stack(rows).split([len(mean), len(var), 1], 1)
    count = counts.sum()
    shares = counts / count
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0), count


def _track(module: nn.SyncBatchNorm, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Moves the running statistics, as `nn.SyncBatchNorm` does."""
    if not module.track_running_stats or module.running_mean is None or module.running_var is None:
        return
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    for running, value in ((module.running_mean, mean), (module.running_var, var * (count / (count - 1)))):
        running.lerp_(value.to(running.dtype), momentum)


class SyncBatchNorm(torch.autograd.Function):
    """u = w (a - mean) / std + b, with statistics of all ranks."""

    @staticmethod
    def forward(ctx, a, weight, bias, statistics):
        ctx.save_for_backward(a, weight, bias)
        ctx.statistics = statistics
        mean, var, _, eps, _ = statistics
        return torch.batch_norm(a, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        a, weight, bias = ctx.saved_tensors
        lin = sync_batch_norm(d, a, weight, bias, ctx.statistics)
        assert lin is not None
        assert lin.pull is not None
        d_a = lin.pull(d).to(a.dtype)  # on all ranks, whichever of them need it
        d_weight = lin.grad[weight](d, lin.signal) if ctx.needs_input_grad[1] else None
        d_bias = lin.add[bias](d) if ctx.needs_input_grad[2] else None
        return d_a, d_weight, d_bias, None


@rule(SyncBatchNorm)
def sync_batch_norm(u, a, weight, bias, statistics) -> Linearization:
    """Over the batches of all ranks and the positions of each channel."""
    mean, var, share, eps, group = statistics
    dims, shape = channels(a)
    rstd = (var + eps).rsqrt().view(shape)
    x_hat = (a.detach().to(rstd.dtype) - mean.view(shape)) * rstd
    w = None if weight is None else weight.view(shape)

    def sums(*tensors: Tensor) -> Tensor:
        """Their sums over all ranks times this rank's share, so that over this rank's count they are the means."""
        rows = torch.stack([z.sum(dims) for z in tensors])
        dist.all_reduce(rows, group=group)
        return rows * share

    def scaled(z: Tensor, dtype: torch.dtype) -> Tensor:
        return z.to(dtype) if w is None else (z * w).to(dtype)

    def jacobian(z: Tensor) -> Tensor:
        z = z.to(rstd.dtype)
        return norm.jacobian(z, x_hat, rstd, dims, True, sums(z, x_hat * z))

    def curve(d: Tensor, t: Tensor) -> Tensor:
        g, t = scaled(d, rstd.dtype), t.to(rstd.dtype)
        of_g = sums(g, x_hat * g)
        d_a, along = norm.jacobian(g, x_hat, rstd, dims, True, of_g), norm.mean_of(g, dims, of_g, 1)
        return norm.curved_at_input(d_a, t, along, x_hat, rstd, dims, True, sums(t, x_hat * t, d_a * t))

    return Linearization(
        signal=x_hat,
        tangent=jacobian,
        push=lambda s: scaled(s, u.dtype),
        pull=lambda r: jacobian(scaled(r, rstd.dtype)),
        curve=curve,
        **affine_gradients(weight, bias, dims),
    )


def groups_of(operations: Iterable[Any]) -> list[dist.ProcessGroup]:
    """The groups of ranks over which these operations sum signals."""
    return list(dict.fromkeys(op.values[-1] for op in operations if key_of(op.func) is SyncBatchNorm))


def largest(z: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
    """The largest z of the ranks of these groups, elementwise."""
    z = z.clone()
    for group in groups:
        dist.all_reduce(z, dist.ReduceOp.MAX, group)
    return z
