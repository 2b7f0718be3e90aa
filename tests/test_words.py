"""Phrases that a reader who knows PyTorch has to read twice stand in no code, message or page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"behind": "downstream of, after",
    r"way back": "backward pass",
    r"(?:made|makes?|making) again": "recompute",
    r"nobody (?:reads|needs)": "unused",
    r"of which it is": "whose",
    r"takes? (?:no )?part": "is used",
    r"go(?:es)? by": "uses, depends on",
    r"holds? no run": "contains no run",
    r"(?:is|was) mended": "is fixed",
    r"never ran": "was not called",
    r"by pieces": "piecewise",
    r"lies? before the input": "is upstream of the input",
}
PATTERNS = (
    "src/**/*.py", "src/**/*.j2", "src/**/*.js", "tests/**/*.py", "benchmarks/**/*.py", "examples/*.py",
    "examples/*.ipynb", "docs/*.md", "*.md",
)  # fmt: skip
FILES = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern)) if path != Path(__file__)]


@pytest.mark.parametrize("phrase", INSTEAD)
def test_plain_words(phrase):
    pattern = re.compile(rf"\b{phrase}\b", re.I)
    found = [path.relative_to(ROOT).as_posix() for path in FILES if pattern.search(path.read_text(encoding="utf-8"))]
    assert not found, f"say: {INSTEAD[phrase]}"
