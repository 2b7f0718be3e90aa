"""What it costs a compiled step on a CPU that glibc gives freed memory back to the system.

    PYTHONPATH=src python benchmarks/heap.py --out results/bench/cpu-heap.json

Steps of plain-20 with 128 images, with freed memory kept (`threepass/heap.py`) and without, in processes of their own
that take turns: milliseconds, the system's own on both cores, and page faults, medians over the steps of all turns.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

TURNS, STEPS = 3, 15


def measure(mode: str, kept: bool) -> list[list[float]]:
    import torch
    from torch.nn import functional as F

    import threepass
    from threepass import capture, models

    if not kept:
        capture.keep_freed_memory = lambda: False
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = models.plain(20).to(memory_format=torch.channels_last)
    x = torch.randn(128, 3, 32, 32).to(memory_format=torch.channels_last)
    y = torch.randint(10, (128,))
    step = threepass.ThreePass(model, F.cross_entropy, mode=mode, compile=True)
    rows = []
    for _ in range(STEPS + 5):
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        step(x, y)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        rows.append([1e3 * seconds, 1e3 * (after.ru_stime - before.ru_stime), after.ru_minflt - before.ru_minflt])
    return rows[5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", nargs=2, metavar=("MODE", "KEPT"), help="one turn, as lines on standard output")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], given.one[1] == "kept")))
        return
    rows: dict[tuple[str, str], list[list[float]]] = {}
    for _ in range(TURNS):
        for mode in ("paper", "exact"):
            for memory in ("kept", "given back"):
                command = [sys.executable, __file__, "--out", str(given.out), "--one", mode, memory]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                rows.setdefault((mode, memory), []).extend(json.loads(done.stdout.splitlines()[-1]))
    report: dict[str, dict[str, dict[str, float]]] = {}
    for (mode, memory), steps in rows.items():
        medians = [statistics.median(column) for column in zip(*steps, strict=True)]
        report.setdefault(mode, {})[memory] = dict(zip(("ms", "system_ms", "faults"), medians, strict=True))
        print(f"{mode:6} {memory:10} {medians[0]:7.1f} ms, {medians[1]:5.1f} of the system's, {medians[2]:.0f} faults")
    given.out.write_text(json.dumps({"steps": TURNS * STEPS, "modes": report}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
