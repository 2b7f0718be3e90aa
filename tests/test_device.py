"""The grid on another device: the same gradients as on the CPU. Also a script: `python tests/test_device.py`.

To 1e-6 only, because some of CUDA's float64 kernels have float32 constants.
"""

import copy
import warnings

import torch
from cases import CASES
from close import assert_close

import threepass


def check(case, device: str) -> None:
    model, loss_fn, x, y = case.build()
    there = copy.deepcopy(model).to(device)
    for mode in ("paper", "exact"):
        for options in ({"alpha": 0.3}, {"separate": True}, {"alpha": 1.0}):
            if case.random:  # other numbers are drawn there: only that it runs, and moves no other generator
                r = threepass.three_pass(there, loss_fn, x.to(device), y.to(device), mode=mode, **options)
                assert all(torch.isfinite(g).all() for g in r.grads.values())
                continue
            a = threepass.three_pass(copy.deepcopy(model), loss_fn, x, y, mode=mode, **options)
            b = threepass.three_pass(copy.deepcopy(there), loss_fn, x.to(device), y.to(device), mode=mode, **options)
            assert_close({n: g.cpu() for n, g in b.grads.items()}, a.grads, 1e-6)
            if options == {"separate": True}:
                assert_close({n: g.cpu() for n, g in b.third_grads.items()}, a.third_grads, 1e-6)


def main(device: str) -> list[str]:
    """Every case; returns what failed."""
    failed = []
    warnings.simplefilter("ignore")
    for case in CASES:
        try:
            check(case, device)
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {str(error)[:500]}")
    return failed


def test_the_grid_on_an_accelerator():
    import pytest

    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    assert not main("cuda")


if __name__ == "__main__":
    found = main("cuda" if torch.cuda.is_available() else "cpu")
    print("\n".join(found) or f"{len(CASES)} cases agree")
