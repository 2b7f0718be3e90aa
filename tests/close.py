"""Comparing gradients, and leaving a model as it was found."""

import contextlib

import torch


def wide(g: torch.Tensor) -> torch.Tensor:
    return g.to(torch.promote_types(g.dtype, torch.float64))


def norm(grads) -> float:
    return torch.stack([wide(g).norm() for g in grads.values()]).norm().item()


def assert_close(got: dict, expected: dict, tolerance: float, least: float = 0.0) -> None:
    """Every gradient to a relative tolerance; one far smaller than the rest, relative to a thousandth of them.

    least: what remains of values near 1 that cancel, as in a chain of norms, is below this and not compared.
    """
    assert got.keys() == expected.keys()
    floor = 1e-3 * norm(expected)
    for name, g in expected.items():
        error = (wide(got[name]) - wide(g)).norm().item()
        assert error <= tolerance * max(wide(g).norm().item(), floor) + least, (
            f"{name}: {error:.2e} against {g.norm():.2e}"
        )


@contextlib.contextmanager
def restored(model):
    """Buffers, random state and mode after the block as before it."""
    state, rng = [b.clone() for b in model.buffers()], torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(rng)
        with torch.no_grad():
            for b, old in zip(model.buffers(), state, strict=True):
                b.copy_(old)


def plain_grads(model, loss_fn, x, y) -> dict:
    """What loss.backward() gives, for the parameters that it reaches."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss_fn(model(x), y), list(params.values()), allow_unused=True)
    return {n: g for n, g in zip(params, grads, strict=True) if g is not None}
