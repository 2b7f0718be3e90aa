"""DeepSpeed under torchrun: engines with one and two ranks train as one process by hand does.

Needs deepspeed, which the dev extra does not install: DS_BUILD_OPS=0 .venv/bin/pip install '.[deepspeed]'
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from close import assert_close
from processes import free_port
from ranks_script import by_hand

import threepass

HERE = Path(__file__).parent
CASES = ["stage 0", "stage 1", "stage 2", "captured", "accelerate", "hugging_face"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install '.[deepspeed]'",
    ),
]


def launched(ranks: int, folder: Path, *command: str, **environment: str) -> str:
    """What a script prints under torchrun."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [Path(threepass.__file__).parents[1], HERE.parent, HERE, *given]
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torchrun, "--master-port", free_port(), *command],
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    launched(request.param, folder, str(HERE / "deepspeed_script.py"), str(folder))
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process(folder, case):
    expected = {n: p.float() for n, p in by_hand(case).items()}  # DeepSpeed keeps float32 weights
    found = [torch.load(file) for file in folder.glob(f"{case}-*.pt")]
    assert found
    for weights in found:
        assert_close(weights, expected, 1e-5)


def test_what_is_refused(folder):
    for file in folder.glob("refused-*.pt"):
        called, partitioned = torch.load(file)
        assert "engine.backward(loss)" in called
        assert "ZeRO stage 3" in partitioned
        assert "use stage 2" in partitioned


def test_the_script_of_the_docs(tmp_path):
    page = (HERE.parents[1] / "docs" / "loops.md").read_text()
    (script,) = re.findall(r'```python title="zero.py"\n(.*?)```', page, re.S)
    (tmp_path / "zero.py").write_text(script)
    assert "input loss" in launched(2, tmp_path, "zero.py", DS_ACCELERATOR="cpu")
