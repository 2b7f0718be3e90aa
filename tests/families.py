"""Nets of the kinds that people train, each with a loss and a batch.

A family is a function of a size, "tiny" (for float64 on a CPU) or "real" (for a GPU), that returns
(model, loss_fn, x, y), everything in float32. `NETS` are ten nets in both sizes. `OTHERS` are tiny whatever the size,
and `HUGGING_FACE` are made from the configuration classes of transformers; none of them downloads weights.
`in_float64` converts a problem. Dropout is off everywhere: captured and eager steps draw different masks.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from threepass import models

Problem = tuple[nn.Module, Callable[[Any, Any], Tensor], Any, Any]
Family = Callable[..., Problem]


def make(family: Family, size: str = "tiny", seed: int = 0) -> Problem:
    """A family's problem from a seed."""
    torch.manual_seed(seed)
    return family(size)


def in_float64(problem: Problem) -> Problem:
    model, loss_fn, x, y = problem
    x, y = tree_map(lambda z: z.double() if isinstance(z, Tensor) and z.is_floating_point() else z, (x, y))
    return model.double(), loss_fn, x, y


def on(device: str, problem: Problem) -> Problem:
    model, loss_fn, x, y = problem
    x, y = tree_map(lambda z: z.to(device) if isinstance(z, Tensor) else z, (x, y))
    return model.to(device), loss_fn, x, y


def _images(batch: int, side: int, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, side, side)


def _padding(batch: int, length: int) -> Tensor:
    return torch.arange(length) >= torch.randint(1, length + 1, (batch, 1))


def _classified(model: nn.Module, batch: int, side: int, classes: int = 10) -> Problem:
    return model, F.cross_entropy, _images(batch, side), torch.randint(classes, (batch,))


def token_loss(output: Any, y: Tensor) -> Tensor:
    """Cross-entropy of logits (..., classes), of a tensor or of a transformers output; y of -100 does not count."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


# The ten nets


def plain20(size: str = "tiny") -> Problem:
    if size == "real":
        return _classified(models.plain(20), 256, 32)
    return _classified(models.plain(20, width=2), 2, 8)


def resnet18(size: str = "tiny") -> Problem:
    if size == "real":
        return _classified(models.resnet18(), 256, 32)
    return _classified(models.resnet18(width=2), 3, 8)


def resnet18_gelu(size: str = "tiny") -> Problem:
    if size == "real":
        return _classified(_residual_net(64, nn.GELU), 256, 32)
    return _classified(_residual_net(2, nn.GELU), 3, 8)


def vit(size: str = "tiny") -> Problem:
    if size == "real":
        return _classified(models.vit(depth=12), 256, 32)
    return _classified(models.vit(image=8, width=6, depth=1), 2, 8)


def decoder(size: str = "tiny") -> Problem:
    """A GPT-style decoder: causal attention, its output layer tied to the embedding."""
    words, length, width, depth, heads, batch = (8192, 256, 384, 6, 6, 32) if size == "real" else (11, 6, 8, 1, 2, 2)
    tokens = torch.randint(words, (batch, length + 1))
    return Decoder(words, length, width, depth, heads), token_loss, tokens[:, :-1], tokens[:, 1:]


def depthwise(size: str = "tiny") -> Problem:
    """Inverted bottlenecks of depthwise convolutions with squeeze-and-excitation and SiLU, as in EfficientNet."""
    if size == "real":
        return _classified(_depthwise_net(32, 2), 256, 32)
    return _classified(_depthwise_net(4, 1), 3, 8)


def lstm(size: str = "tiny") -> Problem:
    words, width, batch, length = (8192, 256, 64, 8) if size == "real" else (11, 4, 3, 3)
    tokens = torch.randint(words, (batch, length + 1))
    return Recurrent(nn.LSTM, words, width), token_loss, tokens[:, :-1], tokens[:, 1:]


def mlp(size: str = "tiny") -> Problem:
    if size == "real":
        return _classified(models.mlp(3072, 2048, 2048, 10), 256, 32)
    return _classified(models.mlp(12, 8, 8, 10), 4, 2)


def unet(size: str = "tiny") -> Problem:
    """Segmentation with nearest upsampling and GroupNorm."""
    width, depth, batch, side = (32, 4, 16, 128) if size == "real" else (4, 2, 2, 8)
    model = UNet(
        width, depth, classes=5, up=lambda n, m: nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(n, m, 1))
    )
    return model, F.cross_entropy, _images(batch, side), torch.randint(5, (batch, side, side))


def dlrm(size: str = "tiny") -> Problem:
    """Clicks from dense features and bags of categories; the dense features are the input."""
    tables, rows, width, dense, batch, bag = (8, 10_000, 64, 13, 2048, 4) if size == "real" else (3, 7, 4, 5, 4, 2)
    x = (torch.randn(batch, dense), torch.randint(rows, (batch, tables, bag)))
    model = Dlrm(tables, rows, width, dense)
    return model, F.binary_cross_entropy_with_logits, x, torch.randint(2, (batch,)).float()


NETS: dict[str, Family] = {
    "plain20": plain20, "resnet18": resnet18, "resnet18_gelu": resnet18_gelu, "vit": vit, "decoder": decoder,
    "depthwise": depthwise, "lstm": lstm, "mlp": mlp, "unet": unet, "dlrm": dlrm,
}  # fmt: skip


class Decoder(nn.Module):
    def __init__(self, words: int, length: int, width: int, depth: int, heads: int):
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "before": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
                "mlp": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"),
                                     nn.Linear(4 * width, width)),
            })
            for _ in range(depth)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.2)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            q, k, v = block["qkv"](block["before"](z)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            z = z + block["out"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            z = z + block["mlp"](z)
        return self.head(self.norm(z))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], words: int, width: int):
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.cells = kind(width, width, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.words(tokens))[0])


class Dlrm(nn.Module):
    def __init__(self, tables: int, rows: int, width: int, dense: int):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        z = self.bottom(dense)
        vectors = torch.stack([z, *(bag(ids) for bag, ids in zip(self.bags, categories.unbind(1), strict=True))], 1)
        products = torch.bmm(vectors, vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([z, products], 1)).squeeze(1)


class UNet(nn.Module):
    """Halves the image `depth` times and doubles it again, with a skip connection at every size."""

    def __init__(self, width: int, depth: int, classes: int, up: Callable[[int, int], nn.Module], channels: int = 3):
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(_double_conv(n, m) for n, m in pairwise([channels, *widths]))
        self.up = nn.ModuleList(up(n, m) for n, m in pairwise(reversed(widths)))
        self.join = nn.ModuleList(_double_conv(2 * m, m) for m in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down[:-1]:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, join, skip in zip(self.up, self.join, reversed(kept), strict=True):
            x = up(x)
            if x.shape != skip.shape:  # an odd number of pixels was halved
                x = F.pad(x, (0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2]))
            x = join(torch.cat([skip, x], 1))
        return self.head(x)


def _double_conv(n: int, m: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n, m, 3, padding=1), nn.GroupNorm(2, m), nn.ReLU(),
        nn.Conv2d(m, m, 3, padding=1), nn.GroupNorm(2, m), nn.ReLU(),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None):
        super().__init__()
        self.body, self.shortcut, self.after = body, shortcut or nn.Identity(), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.body(x) + self.shortcut(x))


def _residual_net(width: int, activation: type[nn.Module]) -> nn.Sequential:
    """ResNet-18 with another activation."""
    layers: list[nn.Module] = [*_conv_norm(3, width), activation()]
    n = width
    for stage in range(4):
        for stride in (2 if stage else 1, 1):
            m = width * 2**stage
            body = nn.Sequential(*_conv_norm(n, m, 3, stride), activation(), *_conv_norm(m, m))
            layers.append(Residual(body, nn.Sequential(*_conv_norm(n, m, 1, stride)) if n != m else None, activation()))
            n = m
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 10))


def _conv_norm(n: int, m: int, size: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(n, m, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(m)]


class SqueezeExcite(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width // 2, 1), nn.SiLU(), nn.Conv2d(width // 2, width, 1),
            nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


def _depthwise_net(width: int, blocks: int) -> nn.Sequential:
    layers: list[nn.Module] = [*_conv_norm(3, width), nn.SiLU()]
    for stage in range(2):
        m = width * 2**stage
        for _ in range(blocks):
            body = nn.Sequential(
                *_conv_norm(m, 4 * m, 1), nn.SiLU(), *_conv_norm(4 * m, 4 * m, groups=4 * m), nn.SiLU(),
                SqueezeExcite(4 * m), *_conv_norm(4 * m, m, 1),
            )  # fmt: skip
            layers.append(Residual(body))
        layers += [*_conv_norm(m, 2 * m, 3, 2), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


# Others, tiny


def gru(size: str = "tiny") -> Problem:
    tokens = torch.randint(11, (3, 4))
    return Recurrent(nn.GRU, 11, 4), token_loss, tokens[:, :-1], tokens[:, 1:]


def group_norm(size: str = "tiny") -> Problem:
    """Depthwise 7 x 7 and GroupNorm with GELU, no batch statistics."""
    body = nn.Sequential(nn.Conv2d(6, 6, 7, padding=3, groups=6), nn.GroupNorm(3, 6), nn.Conv2d(6, 12, 1), nn.GELU(),
                         nn.Conv2d(12, 6, 1))  # fmt: skip
    model = nn.Sequential(
        nn.Conv2d(3, 6, 2, 2), Residual(body), nn.AvgPool2d(2), nn.Hardswish(), nn.Flatten(), nn.Linear(24, 10)
    )
    return _classified(model, 2, 8)


def unet_transposed(size: str = "tiny") -> Problem:
    """Transposed convolutions, and images of an odd number of pixels."""
    model = UNet(4, 2, classes=3, up=lambda n, m: nn.ConvTranspose2d(n, m, 2, 2))
    return model, F.cross_entropy, torch.randn(2, 3, 7, 10), torch.randint(3, (2, 7, 10))


def unet_bilinear(size: str = "tiny") -> Problem:
    def up(n: int, m: int) -> nn.Module:
        return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Conv2d(n, m, 1))

    model = UNet(4, 1, classes=1, up=up)
    return model, dice_loss, _images(2, 8), torch.randint(2, (2, 1, 8, 8)).float()


def dice_loss(output: Tensor, y: Tensor) -> Tensor:
    p = output.sigmoid().flatten(1)
    overlap = 2 * (p * y.flatten(1)).sum(1) + 1
    return (1 - overlap / (p.sum(1) + y.flatten(1).sum(1) + 1)).mean()


def _molecules() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two molecules: positions, kinds of atoms, some edges, and each atom's molecule."""
    molecule = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    edges = (molecule[:, None] == molecule).fill_diagonal_(False).nonzero()
    return torch.randn(7, 3), torch.randint(5, (7,)), edges[torch.randperm(len(edges))[:15]].T.contiguous(), molecule


def schnet(size: str = "tiny") -> Problem:
    return SchNet(_index_add), F.mse_loss, _molecules(), torch.randn(2, 1)


def schnet_scatter(size: str = "tiny") -> Problem:
    return SchNet(_scatter_add), F.mse_loss, _molecules(), torch.randn(2, 1)


def schnet_in_place(size: str = "tiny") -> Problem:
    return SchNet(_index_add_in_place), F.mse_loss, _molecules(), torch.randn(2, 1)


def _index_add(rows: int, index: Tensor, z: Tensor) -> Tensor:
    return torch.zeros(rows, z.shape[1], dtype=z.dtype, device=z.device).index_add(0, index, z)


def _scatter_add(rows: int, index: Tensor, z: Tensor) -> Tensor:
    return z.new_zeros(rows, z.shape[1]).scatter_add(0, index[:, None].expand_as(z), z)


def _index_add_in_place(rows: int, index: Tensor, z: Tensor) -> Tensor:
    return z.new_zeros(rows, z.shape[1]).index_add_(0, index, z)


class SchNet(nn.Module):
    """Continuous-filter convolutions: messages along edges, filtered by radial basis functions of their lengths."""

    def __init__(self, collect: Callable[[int, Tensor, Tensor], Tensor], width: int = 6, bases: int = 4):
        super().__init__()
        self.collect = collect
        self.atoms = nn.Embedding(5, width)
        self.register_buffer("centres", torch.linspace(0, 3, bases))
        self.filters = nn.ModuleList(_softplus_net(bases, width, width) for _ in range(2))
        self.updates = nn.ModuleList(_softplus_net(width, width, width) for _ in range(2))
        self.head = _softplus_net(width, width, 1)

    def forward(self, positions: Tensor, kinds: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
        to, source = edges
        lengths = (positions[to] - positions[source]).norm(dim=1, keepdim=True)
        bases = torch.exp(-2 * (lengths - self.centres) ** 2)
        h = self.atoms(kinds)
        for filters, update in zip(self.filters, self.updates, strict=True):
            h = h + update(self.collect(h.shape[0], to, h[source] * filters(bases)))
        return self.collect(2, molecule, self.head(h))


def _softplus_net(n: int, m: int, k: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n, m), nn.Softplus(), nn.Linear(m, k))


def graph_attention(size: str = "tiny") -> Problem:
    """Attention over edges, its softmax by scattered maxima and sums."""
    positions, _, edges, molecule = _molecules()
    return GraphAttention(), F.cross_entropy, (positions, edges), molecule


class GraphAttention(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.values, self.scores, self.head = nn.Linear(3, width), nn.Linear(2 * width, 1), nn.Linear(width, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        to, source = edges
        v = self.values(nodes)
        scores = F.leaky_relu(self.scores(torch.cat([v[to], v[source]], 1)), 0.2).squeeze(1)
        highest = torch.full((len(v),), -torch.inf, dtype=v.dtype).scatter_reduce(0, to, scores.detach(), "amax")
        weights = torch.exp(scores - highest[to])
        totals = torch.zeros(len(v), dtype=v.dtype).scatter_add(0, to, weights)
        return self.head(F.elu(_index_add(len(v), to, v[source] * (weights / totals[to])[:, None])))


def encoder(size: str = "tiny") -> Problem:
    """torch's own transformer layers with a padding mask."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    x = torch.randn(3, 5, 8), _padding(3, 5)
    return Encoder(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)), F.mse_loss, x, torch.randn(3, 8)


class Encoder(nn.Module):
    def __init__(self, layers: nn.TransformerEncoder):
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0).mean(1)


def gaussian(size: str = "tiny") -> Problem:
    """A density by torch.distributions, with validation of its arguments left on."""
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Unflatten(1, (2, 2)))
    return net, negative_log_likelihood, torch.randn(4, 3), torch.randn(4, 2)


def negative_log_likelihood(output: Tensor, y: Tensor) -> Tensor:
    mean, spread = output.unbind(1)
    return -Normal(mean, F.softplus(spread)).log_prob(y).mean()


def soft_labels(size: str = "tiny") -> Problem:
    """Labels made soft by F.one_hot."""
    model, _, x, y = mlp()
    return model, lambda z, y: F.cross_entropy(z, 0.9 * F.one_hot(y, 10).to(z.dtype) + 0.01), x, y


OTHERS: dict[str, Family] = {
    "gru": gru, "group_norm": group_norm, "unet_transposed": unet_transposed, "unet_bilinear": unet_bilinear,
    "schnet": schnet, "schnet_scatter": schnet_scatter, "schnet_in_place": schnet_in_place,
    "graph_attention": graph_attention, "encoder": encoder, "gaussian": gaussian, "soft_labels": soft_labels,
}  # fmt: skip


# Hugging Face


class Wide(nn.Module):
    """A model that computes in float64 where its code asks for float32 (norms, rotary embeddings)."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **x: Any) -> Any:
        with _WideMode():
            return self.model(**x)


class _WideMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = Tensor.double if func is Tensor.float else func
        args, kwargs = tree_map(lambda z: torch.float64 if z is torch.float32 else z, (args, kwargs or {}))
        return func(*args, **kwargs)


_WORDS = 17
_SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
_TEXT = {**_SMALL, "vocab_size": _WORDS, "max_position_embeddings": 8}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _text(model: nn.Module, mask: bool, per_token: bool) -> Problem:
    """With a mask, sentences have several lengths, other ones in every batch."""
    x, kept = {"input_ids": torch.randint(_WORDS, (3, 5))}, ~_padding(3, 5)
    y = torch.randint(_WORDS, (3, 5)) if per_token else torch.randint(2, (3,))
    if mask:
        x["attention_mask"] = kept.long()
    return model, token_loss, x, torch.where(kept, y, -100) if mask and per_token else y


def _pictures(model: nn.Module, side: int) -> Problem:
    return model, token_loss, {"pixel_values": _images(2, side)}, torch.randint(2, (2,))


def bert(mask: bool) -> Family:
    def family(size: str = "tiny") -> Problem:
        config = hf.BertConfig(**_TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return _text(hf.BertForSequenceClassification(config), mask, per_token=False)

    return family


def gpt2(mask: bool) -> Family:
    def family(size: str = "tiny") -> Problem:
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = hf.GPT2Config(vocab_size=_WORDS, n_positions=8, n_embd=8, n_layer=1, n_head=2, **off, **_IDS)
        return _text(hf.GPT2LMHeadModel(config), mask, per_token=True)

    return family


def llama(mask: bool) -> Family:
    def family(size: str = "tiny") -> Problem:
        config = hf.LlamaConfig(**_TEXT, num_key_value_heads=1, **_IDS)
        return _text(Wide(hf.LlamaForCausalLM(config)), mask, per_token=True)

    return family


def t5(size: str = "tiny") -> Problem:
    """An encoder and a decoder, relative positions, cross-attention."""
    config = hf.T5Config(vocab_size=_WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, dropout_rate=0.0)
    model, loss_fn, x, y = _text(Wide(hf.T5ForConditionalGeneration(config)), mask=True, per_token=True)
    return model, loss_fn, {**x, "decoder_input_ids": torch.randint(_WORDS, (3, 5))}, y


def hf_vit(size: str = "tiny") -> Problem:
    config = hf.ViTConfig(
        **_SMALL, image_size=8, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return _pictures(hf.ViTForImageClassification(config), 8)


def convnext(size: str = "tiny") -> Problem:
    config = hf.ConvNextConfig(hidden_sizes=[4, 6], depths=[1, 1], num_stages=2)
    return _pictures(hf.ConvNextForImageClassification(config), 16)


def swin(size: str = "tiny") -> Problem:
    """Two blocks of windows, the second shifted."""
    config = hf.SwinConfig(
        image_size=8, patch_size=2, embed_dim=4, depths=[2], num_heads=[2], window_size=2, drop_path_rate=0.0
    )
    return _pictures(hf.SwinForImageClassification(config), 8)


HUGGING_FACE: dict[str, Family] = {
    "bert": bert(mask=False), "bert_mask": bert(mask=True), "gpt2": gpt2(mask=False), "gpt2_mask": gpt2(mask=True),
    "llama": llama(mask=False), "llama_mask": llama(mask=True), "t5": t5, "hf_vit": hf_vit, "convnext": convnext,
    "swin": swin,
}  # fmt: skip
FAMILIES = NETS | OTHERS | HUGGING_FACE
