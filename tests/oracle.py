"""A finite-difference oracle: the definition of the third pass, with none of the engine's code.

Tangents are central differences of the activations along dl/dx. For every torch function call op(a; p) that takes an
activation and a weight, pass 3's gradient of p is then d/dp < d , J_a op(a; p) t >, with J_a t again a central
difference and d/dp one first-order backward pass.
"""

from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


class Watch(TorchFunctionMode):
    """Notes every torch function call that takes an activation (what depends on x) and a weight (what does not)."""

    def __init__(self, x_leaves):
        self.leaves, self.calls = x_leaves, []

    def depends_on_x(self, z: Tensor) -> bool:
        seen, todo = set(), [z.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if any(getattr(node, "variable", None) is leaf for leaf in self.leaves):
                return True
            todo += [n for n, _ in node.next_functions]
        return False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.multi_head_attention_forward:  # its operations count, not the call
            with mock.patch.object(F, "has_torch_function", return_value=False), self:
                return func(*args, **(kwargs or {}))
        flat, spec = tree_flatten((args, kwargs or {}))
        needs = [i for i, z in enumerate(flat) if isinstance(z, Tensor) and z.requires_grad]
        a = [i for i in needs if self.depends_on_x(flat[i])]
        p = [i for i in needs if i not in a]
        before = [z.detach().clone() if isinstance(z, Tensor) else z for z in flat] if a and p else None
        out = func(*args, **(kwargs or {}))
        if a and p and isinstance(out, tuple):  # an alias each, so that one output's error has no part in another's
            out = tree_map(lambda z: z.view_as(z) if isinstance(z, Tensor) else z, out)
        outs = [z for z in tree_flatten(out)[0] if isinstance(z, Tensor) and z.requires_grad]
        if a and p and outs:
            d = [None] * len(outs)
            for k, u in enumerate(outs):
                u.register_hook(lambda g, d=d, k=k: d.__setitem__(k, g))
            self.calls.append((func, spec, before, a, p, [flat[i] for i in p], d))
        return out


def third_grads(model, loss_fn, x: Tensor, y, eps: float = 1e-6, start=lambda dx: dx) -> dict[str, Tensor]:
    """Pass 3's gradients, from t_0 = start(dl/dx), for a model that takes one tensor and draws no random numbers."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    buffers = [(b, b.clone()) for b in model.buffers()]

    def watch(at: Tensor):
        with torch.no_grad():
            for b, old in buffers:
                if not torch.equal(b, old):  # writing would spoil the first run's graph
                    b.copy_(old)
        leaf = at.detach().clone().requires_grad_()
        with Watch([leaf]) as w:
            loss = loss_fn(model(leaf * 1), y)
        return leaf, loss, w.calls

    leaf, loss, calls = watch(x)
    t_0 = start(torch.autograd.grad(loss, leaf, retain_graph=True)[0])
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    size = t_0.abs().max()
    if size == 0:  # a dead net
        return total
    above, below = watch(x + eps * t_0 / size)[2], watch(x - eps * t_0 / size)[2]
    for call, up, down in zip(calls, above, below, strict=True):
        func, spec, before, a, p, weights, d = call
        t = {i: (up[2][i] - down[2][i]) * (size / (2 * eps)) for i in a}
        largest = max(float(s.abs().max()) for s in t.values())
        if largest == 0:
            continue
        h = 1e-5 / largest
        leaves = [before[i].clone().requires_grad_() for i in p]

        def at(sign, func=func, spec=spec, before=before, t=t, h=h, p=p, leaves=leaves):
            flat = [z.clone() if isinstance(z, Tensor) else z for z in before]
            for i, s in t.items():
                flat[i] = flat[i] + sign * h * s
            for i, z in zip(p, leaves, strict=True):
                flat[i] = z
            args, kwargs = tree_unflatten(flat, spec)
            return [z for z in tree_flatten(func(*args, **kwargs))[0] if isinstance(z, Tensor) and z.requires_grad]

        pairs = [(b - c, e) for b, c, e in zip(at(1), at(-1), d, strict=True) if e is not None]
        phi = sum((s * e.conj()).real.sum() / (2 * h) for s, e in pairs)
        if not isinstance(phi, Tensor):
            continue
        gs = torch.autograd.grad(phi, leaves, allow_unused=True)
        for weight, g in zip(weights, gs, strict=True):
            if g is None:
                continue
            chained = torch.autograd.grad(weight * 1, params.values(), g, retain_graph=True, allow_unused=True)
            for name, c in zip(params, chained, strict=True):
                if c is not None:
                    total[name] += c
    return total
