"""Freed memory stays with the process, where the user has not said otherwise."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")

# Faults of the last of some rounds, in each of which large tensors are made, touched and freed.
FAULTS = """
import resource, torch
from threepass.heap import keep_freed_memory
print(keep_freed_memory())
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.zeros(2**21) for _ in range(16)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**settings: str) -> tuple[bool, int]:
    env = {k: v for k, v in os.environ.items() if "MALLOC" not in k and k != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=env | settings, capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept == "True", int(count)


def test_what_is_freed_stays():
    pages = 16 * 2**23 // os.sysconf("SC_PAGE_SIZE")
    kept, count = faults()
    assert kept
    assert count < pages / 10
    settled, count = faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert not settled  # the user's own
    assert count > pages / 10


def test_a_compiled_step_on_a_cpu_asks_for_it(monkeypatch):
    import torch
    from torch.nn import functional as F

    import threepass
    from threepass import capture, models

    asked = []
    monkeypatch.setattr(capture, "keep_freed_memory", lambda: asked.append(True))
    step = threepass.ThreePass(models.mlp(4, 8, 3), F.cross_entropy, compile=True)
    step(torch.randn(5, 4), torch.randint(3, (5,)))
    assert asked
