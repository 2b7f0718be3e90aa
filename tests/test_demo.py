import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def demo():
    path = Path(__file__).parent.parent / "examples" / "compare_digits.py"
    spec = importlib.util.spec_from_file_location("compare_digits", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


def test_demo_writes_a_page_and_its_numbers_and_never_over_others(demo, tmp_path, capsys):
    (tmp_path / "demo").mkdir()
    out = demo.main(["--seeds", "1", "--epochs", "2", "--out", str(tmp_path / "demo")])
    assert out == tmp_path / "demo-2"
    assert capsys.readouterr().out.endswith(f"report: {out / 'report.html'}\n")

    metrics = json.loads((out / "metrics.json").read_text())
    assert list(metrics["methods"]) == list(demo.METHODS)
    for (record,) in metrics["methods"].values():
        assert len(record["error"]) == len(record["input_loss"]) == len(record["seconds_per_step"]) == 2
        assert len(record["result"]) == 6
        assert all(math.isfinite(v) for v in tree_leaves(record))

    page = (out / "report.html").read_text()
    assert page.count("<polyline") == 2 * len(demo.METHODS)
    assert "nan" not in page
    assert not any(outside in page for outside in ("http", "src=", "@import", "<script"))


def test_methods_of_a_seed_start_alike_and_see_the_same_batches(demo):
    (x, _), _ = demo.digits()
    runs = [demo.Run(name, seed=0, epochs=1) for name in demo.METHODS]
    assert len({tuple(p.sum().item() for p in run.model.parameters()) for run in runs}) == 1
    assert len({tuple(run.order.get_state().tolist()) for run in runs}) == 1
    assert len(x) % demo.BATCH == 0  # no part of a batch: alpha's strength depends on the batch size
