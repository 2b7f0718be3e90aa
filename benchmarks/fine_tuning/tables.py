"""The tables of the fine-tuning study, from its runs.

    python benchmarks/fine_tuning/tables.py runs.jsonl --into PAGE.md

A page has the marks `<!-- overall -->` and `<!-- details -->`, each with an `<!-- end -->`.
Accuracies are means over the seeds that were not used for the search. A difference is taken between runs of the same
seed, which have the same training examples; it is bold where its 95 % interval (Student's t) excludes zero.
"""

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from threepass.study.intervals import Difference, paired

SEARCH = 100  # the seed that learning rates and strengths were chosen with
UNDER = ("clean", "words left out", "typos", "embedding noise")
TITLES = {
    "plain": "plain", "paper": "three passes, paper", "exact": "three passes, exact", "r-drop": "R-Drop",
    "freelb": "FreeLB", "sam": "SAM",
}  # fmt: skip
TASKS = {"trec": "TREC-6", "sst2": "SST-2"}
Record = dict[str, Any]
Setting = tuple[str, str]  # a task and the number of its training examples


def read(path: Path) -> list[Record]:
    """The runs that are measured, without those of the search."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [r for r in records if r["seed"] != SEARCH]


def method_of(record: Record) -> str:
    title = TITLES[record["method"]]
    return title if record["longer"] == 1 else f"{title}, {record['longer']}x the steps"


def by_seed(records: Iterable[Record], method: str, setting: Setting) -> dict[int, Record]:
    task, size = setting
    return {r["seed"]: r for r in records if method_of(r) == method and (r["task"], r["size"]) == (task, size)}


def differences(records: Sequence[Record], method: str, settings: Iterable[Setting], under: str) -> Difference | None:
    """Of a method and plain training, over the seeds that both have, in all of these settings."""
    after, before = [], []
    for setting in settings:
        ours, plain = by_seed(records, method, setting), by_seed(records, TITLES["plain"], setting)
        for seed in sorted(ours.keys() & plain.keys()):
            after.append(ours[seed]["test"][under])
            before.append(plain[seed]["test"][under])
    return paired(after, before)


def points(d: Difference | None, interval: bool = False) -> str:
    """+1.2, bold where the interval excludes zero.

    >>> points(Difference(1.24, 0.1, 2.3, 3)), points(Difference(-1.24, None, None, 2)), points(None)
    ('**+1.2**', '-1.2', '-')
    >>> points(Difference(1.24, 0.1, 2.3, 3), interval=True)
    '**+1.2** (+0.1 to +2.3)'
    """
    if d is None:
        return "-"
    text = f"**{d.mean:+.1f}**" if d.shown else f"{d.mean:+.1f}"
    return f"{text} ({d.low:+.1f} to {d.high:+.1f})" if interval and d.has_interval else text


def overall(records: Sequence[Record]) -> str:
    """Each method against plain training, over all tasks and sizes."""
    settings = sorted({(r["task"], r["size"]) for r in records})
    lines = [f"| method | {' | '.join(UNDER)} | runs |", "| --- " * (len(UNDER) + 2) + "|"]
    for method in dict.fromkeys(map(method_of, records)):
        if method != TITLES["plain"]:
            found = [differences(records, method, settings, under) for under in UNDER]
            count = max((d.n for d in found if d is not None), default=0)
            lines.append(f"| {method} | {' | '.join(points(d, interval=True) for d in found)} | {count} |")
    return "\n".join(lines)


def details(records: Sequence[Record]) -> str:
    """A table for each task and number of examples."""
    parts = []
    for task, size in dict.fromkeys((r["task"], r["size"]) for r in records):
        heading = f"{TASKS[task]}, {'all examples' if size == 'all' else f'{size} training examples'}"
        lines = [f"| {heading} | learning rate, strength | {' | '.join(UNDER)} |", "| --- " * (len(UNDER) + 2) + "|"]
        for method in dict.fromkeys(map(method_of, records)):
            runs = list(by_seed(records, method, (task, size)).values())
            if runs:
                chosen = f"{runs[0]['rate']:g}" + (f", {runs[0]['value']:g}" if runs[0]["value"] else "")
                cells = [_cell(records, method, (task, size), runs, under) for under in UNDER]
                lines.append(f"| {method} | {chosen} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(records: Sequence[Record], method: str, setting: Setting, runs: Sequence[Record], under: str) -> str:
    mean = f"{fmean(r['test'][under] for r in runs):.1f}"
    if method == TITLES["plain"]:
        return mean
    return f"{mean} ({points(differences(records, method, [setting], under))})"


def fill(page: str, records: Sequence[Record]) -> str:
    """The page with the tables between their marks."""
    for mark, table in (("overall", overall(records)), ("details", details(records))):
        page, count = re.subn(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", rf"\g<1>{table}\n\g<2>", page, flags=re.S)
        if not count:
            raise ValueError(f"the page has no mark <!-- {mark} -->")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--into", type=Path, help="the page; without it, the tables are printed")
    args = parser.parse_args()
    records = read(args.runs)
    if args.into is None:
        print(overall(records), details(records), sep="\n\n")
    else:
        args.into.write_text(fill(args.into.read_text(encoding="utf-8"), records), encoding="utf-8")


if __name__ == "__main__":
    main()
