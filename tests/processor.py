"""Virtual machines exist that announce AMX and trap its instructions: there a bf16 product ends Python by SIGILL."""

import os
import signal
import subprocess
import sys
from pathlib import Path

_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def avoid_trapped_instructions() -> None:
    """Limits oneDNN to AVX-512 if its AMX kernels cannot run here. To be called before torch is imported.

    Processes that are started later, pytest's workers among them, inherit the limit and do not try again.
    """
    processor = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not processor.exists() or "amx_tile" not in processor.read_text():
        return
    tried = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True)
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16" if tried.returncode == -signal.SIGILL else "DEFAULT"
