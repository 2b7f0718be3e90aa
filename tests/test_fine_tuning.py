"""benchmarks/fine_tuning with a tiny encoder: its methods, its runs, and going on from what is there."""

import json
import random
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "fine_tuning"
TEXTS = ["what is a cat", "who was it", "where do cats live", "how many are there", "when did it end", "why not"]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("tasks", "methods", "tables"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """The folder of a tiny BERT: config.json, model.safetensors, tokenizer.json."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("encoder")
    known = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *sorted({w for t in TEXTS for w in t.split()})])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(known), **sizes), add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("trec.train", "trec.test", "sst2.train", "sst2.dev", "sst2.test"):
        lines = [f"{i % 2} {TEXTS[i % len(TEXTS)]}" for i in range(40)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_the_page_has_the_tables_of_the_runs():
    """After new runs: python benchmarks/fine_tuning/tables.py results/fine-tuning/runs.jsonl --into the page."""
    import tables

    page = (ROOT / "docs" / "fine-tuning.md").read_text()
    assert tables.fill(page, tables.read(ROOT / "results" / "fine-tuning" / "runs.jsonl")) == page


def gradients(method: str, value: float, encoder: Path, data: Path) -> list[torch.Tensor]:
    import methods
    import tasks

    torch.manual_seed(0)
    model = tasks.Classifier(encoder, 2).double().eval()  # no dropout
    task = tasks.load("trec", data)
    methods.make_step(method, model, value, False)(*tasks.Words(encoder, 8, "cpu")(task.train[:8]))
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore::threepass.errors.NormalizationWarning")
@pytest.mark.parametrize("method", ["paper", "exact", "r-drop", "freelb", "sam"])
def test_methods_of_strength_zero_are_plain_training(method, encoder, data):
    plain = gradients("plain", 0.0, encoder, data)
    # R-Drop at any weight: without dropout both predictions are the same.
    ours = gradients(method, 1.0 if method == "r-drop" else 0.0, encoder, data)
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12)
    if method != "r-drop":
        stronger = gradients(method, 0.5, encoder, data)
        assert any(not torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(stronger, plain, strict=True))


def test_trec_has_no_validation_set_of_its_own(encoder, data):
    import tasks

    trec, sst2 = tasks.load("trec", data), tasks.load("sst2", data)
    assert (len(trec.train), len(trec.validation), len(trec.test)) == (36, 4, 40)
    assert (len(sst2.train), len(sst2.validation), len(sst2.test)) == (40, 40, 40)
    assert trec.examples(10, 1) == trec.examples(20, 1)[:10] != trec.examples(10, 2)


def test_texts_are_changed_a_little():
    import tasks

    words = ["word"] * 1000
    kept = tasks.drop_words(" ".join(words), random.Random(0)).split()
    assert 700 < len(kept) < 900
    wrong = tasks.add_typos(" ".join(words), random.Random(0)).split()
    assert len(wrong) == 1000
    assert 100 < sum(w != "word" for w in wrong) < 300


@pytest.mark.filterwarnings("ignore::threepass.errors.NormalizationWarning")
def test_cell_is_searched_then_run_with_three_seeds_and_never_twice(encoder, data, tmp_path, capsys):
    out = tmp_path / "runs.jsonl"
    main = runpy.run_path(str(FOLDER / "__main__.py"), run_name="fine_tuning")["main"]
    words = ["--data", data, "--model", encoder, "--device", "cpu", "--out", out]
    words += ["--scale", "0.01", "--only", "trec 100 r-drop"]
    main([str(w) for w in words])
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["seed"] for r in runs] == [100] * (len(runs) - 3) + [0, 1, 2]
    best = max(runs[:-3], key=lambda r: r["validation"])
    assert all((r["rate"], r["value"]) == (best["rate"], best["value"]) for r in runs[-3:])
    assert all(r["test"] is None for r in runs[:-3])  # nothing is chosen by the test set
    assert set(runs[-1]["test"]) == {"clean", "words left out", "typos", "embedding noise"}
    main([str(w) for w in words])
    assert len(out.read_text().splitlines()) == len(runs)


def test_the_example_trains_the_encoder_in_both_ways(encoder, data, capsys):
    example = runpy.run_path(str(FOLDER.parents[1] / "examples" / "09_fine_tune.py"))
    files = ["--data", str(data / "trec.train.txt"), "--test", str(data / "trec.test.txt"), "--model", str(encoder)]
    example["main"]([*files, "--steps", "60", "--length", "8", "--lr", "0.02", "--device", "cpu", "--strength", "0.1"])
    two, three = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"two passes: 100.0 % of the test set is classified correctly", two)
    assert re.fullmatch(r"three passes, strength 0.1: 100.0 % of the test set is classified correctly", three)


def test_tables_take_differences_between_runs_of_the_same_seed(tmp_path):
    import tables

    def line(method, seed, clean, value=0.0, longer=1):
        test = dict.fromkeys(tables.UNDER, clean)
        key = {"task": "trec", "size": "100", "method": method, "longer": longer, "rate": 1e-4, "value": value}
        return json.dumps(key | {"seed": seed, "test": test})

    lines = [line("plain", tables.SEARCH, 10.0), *(line("plain", s, 80.0 + s) for s in range(3))]
    lines += [*(line("exact", s, 82.0 + s + 0.1 * s, 10.0) for s in range(3)), line("plain", 0, 79.0, longer=2)]
    (tmp_path / "runs.jsonl").write_text("\n".join(lines) + "\n")
    records = tables.read(tmp_path / "runs.jsonl")
    page = tables.fill("a\n<!-- overall -->\n<!-- end -->\nb\n<!-- details -->\nold\n<!-- end -->\n", records)
    assert "| three passes, exact | **+2.1** (+1.9 to +2.3) |" in page
    assert "| plain, 2x the steps | -1.0 | -1.0 | -1.0 | -1.0 | 1 |" in page
    assert "| three passes, exact | 0.0001, 10 | 83.1 (**+2.1**) |" in page
    assert "| plain | 0.0001 | 81.0 |" in page
    assert "old" not in page
    assert tables.fill(page, records) == page
    with pytest.raises(ValueError, match="the page has no mark <!-- overall -->"):
        tables.fill("nothing", records)
