"""The benchmark of losses on input gradients: its nets are exact, its methods agree, and a stopped run goes on."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PACKAGES = {"schnet": "schnetpack", "painn": "schnetpack", "schnet-pyg": "torch_geometric"}


@pytest.fixture
def losses(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gradient_losses")


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", ["schnet", "painn", "schnet-pyg", "discriminator", "siren", "resnet18"])
def test_nets_are_exact(losses, name):
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is a requirement of the benchmark alone")
    assert losses.exactness(name) < 1e-12
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "tiny.json"
    script = [sys.executable, str(BENCHMARKS / "gradient_losses.py"), "--size", "tiny", "--rounds", "1"]
    shown = []
    for methods in (["plain", "double"], ["double", "func", "threepass"], ["traced", "--minutes", "0"]):
        command = [*script, "--out", str(out), "--nets", "siren", "--methods", *methods]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        shown.append([line.split()[1] for line in done.stdout.splitlines()])
    assert shown == [["plain", "double"], ["func", "threepass"], []]
    rows = json.loads(out.read_text())["nets"]["siren"]["methods"]
    for method in ("double", "func", "threepass"):
        assert rows[method]["difference"] < 1e-5
        assert min(rows[method]["median"], rows[method]["peak_bytes"]) > 0
