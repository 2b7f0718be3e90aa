"""Memory that a step on a CPU frees stays with the process.

A compiled step makes and frees hundreds of large tensors. glibc gives free memory at the end of its heap back to the
system, and large tensors' at once, and every page that the step then gets again costs a fault: thousands in a step of
plain-20 (`benchmarks/heap.py`). So the first step that is compiled for a CPU asks glibc to keep what is freed, as
CUDA's allocator does, unless the user has settings of their own in the environment.
"""

import ctypes
import functools
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST = 2**25  # glibc takes no more: larger tensors come from the system and go back to it
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Says whether it did; once a process."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MOST) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
