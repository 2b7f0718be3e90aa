"""Nets that are measured and are not among `threepass.models`, and what is put around a net to measure it.

ResNet-50, ConvNeXt-T, ViT-B/16 and GPT-2 have the layers and sizes of the published models. They have neither dropout
nor stochastic depth, so that all methods compute the same numbers and are checked against each other.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import models

WORDS = 50257  # GPT-2's vocabulary


class Encoder(nn.Module):
    """PyTorch's own nn.TransformerEncoder on the patches of an image: 64 tokens for 32 x 32 pixels.

    All is as PyTorch has it by default (norms after the residuals, ReLU), but without dropout.
    """

    def __init__(
        self, image: int = 32, patch: int = 4, width: int = 128, depth: int = 4, heads: int = 4, classes: int = 10
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, depth), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(tokens).mean(1))


class Blocks(nn.Module):
    """A first part, blocks one after the other, and a last part that gives the class scores."""

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], last: nn.Module):
        super().__init__()
        self.first, self.blocks, self.last = first, nn.Sequential(*blocks), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def resnet50(depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> Blocks:
    """ResNet-50 for images of 224 x 224 pixels, v1.5: the stride of a block is in its 3 x 3 convolution.

    Examples:
        >>> sum(p.numel() for p in resnet50().parameters())
        25557032
    """
    first = nn.Sequential(_conv_norm(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    blocks, n_in = [], width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            blocks.append(_Bottleneck(n_in, width * 2**stage, 2 if stage and not i else 1))
            n_in = 4 * width * 2**stage
    return Blocks(first, blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, classes)))


def _conv_norm(n_in: int, n_out: int, size: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(n_in, n_out, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(n_out))


class _Bottleneck(nn.Module):
    def __init__(self, n_in: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            _conv_norm(n_in, width, 1), nn.ReLU(), _conv_norm(width, width, 3, stride), nn.ReLU(),
            _conv_norm(width, 4 * width, 1),
        )  # fmt: skip
        changes = n_in != 4 * width or stride != 1
        self.shortcut = _conv_norm(n_in, 4 * width, 1, stride) if changes else nn.Identity()
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + self.shortcut(x))


def convnext(
    depths: Sequence[int] = (3, 3, 9, 3), widths: Sequence[int] = (96, 192, 384, 768), classes: int = 1000
) -> Blocks:
    """ConvNeXt; by default ConvNeXt-T.

    Examples:
        >>> sum(p.numel() for p in convnext().parameters())
        28589128
    """
    first = nn.Sequential(nn.Conv2d(3, widths[0], 4, 4), _ChannelNorm(widths[0]))
    blocks: list[nn.Module] = [_ConvNeXtBlock(widths[0]) for _ in range(depths[0])]
    for depth, (n_in, n_out) in zip(depths[1:], pairwise(widths), strict=True):
        blocks.append(nn.Sequential(_ChannelNorm(n_in), nn.Conv2d(n_in, n_out, 2, 2)))
        blocks += [_ConvNeXtBlock(n_out) for _ in range(depth)]
    head = nn.Linear(widths[-1], classes)
    return Blocks(first, blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), _ChannelNorm(widths[-1]), nn.Flatten(), head))


class _ChannelNorm(nn.LayerNorm):
    """A layer norm of the channels of every pixel."""

    def __init__(self, channels: int):
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _ConvNeXtBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.scale * self.mlp(self.spatial(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def vit_b16(image: int = 224, **options: Any) -> nn.Module:
    """ViT-B/16 that classifies the mean over the patches, without a class token.

    Examples:
        >>> sum(p.numel() for p in vit_b16().parameters())
        86566120
    """
    sizes = {"patch": 16, "width": 768, "depth": 12, "heads": 12, "classes": 1000}
    return models.vit(image, **sizes | options)


class GPT2(nn.Module):
    """The language model of transformers, by default GPT-2 124M; tokens -> the scores of every next token, as rows.

    options: of `GPT2Config`.
    """

    def __init__(self, **options: Any):
        super().__init__()
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise ImportError("model gpt2 is that of transformers: pip install 'threepass[hugging-face]'") from error
        without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        settings = {"attn_implementation": "sdpa", "use_cache": False, **without_dropout, **options}
        self.model = GPT2LMHeadModel(GPT2Config(**settings))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits.flatten(0, 1)


NETS: dict[str, Callable[..., nn.Module]] = {
    "encoder": Encoder,
    "imagenet-resnet50": resnet50,
    "convnext": convnext,
    "vit-b16": vit_b16,
    "gpt2": GPT2,
}


def by_name(name: str, **options: Any) -> nn.Module:
    """One of `NETS`, or of `threepass.models`."""
    return NETS[name](**options) if name in NETS else models.by_name(name, **options)


class Checkpointed(nn.Module):
    """A block whose activations are not kept for the backward pass, but recomputed there."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def with_checkpointing(model: nn.Module) -> nn.Module:
    """The model with activation checkpointing around each of its blocks."""
    if isinstance(model, GPT2):
        recompute_layers(model.model)
    elif isinstance(getattr(model, "blocks", None), nn.Sequential):
        model.blocks = nn.Sequential(*map(Checkpointed, model.blocks))  # type: ignore[arg-type]
    else:
        raise ValueError("checkpointing needs a model with its blocks in `model.blocks`, an nn.Sequential")
    return model


def recompute_layers(model: nn.Module, reentrant: bool = False) -> None:
    """Switches on the activation checkpointing of a Hugging Face model; its method has a new name since 5.23."""
    new = hasattr(model, "activation_checkpointing_enable")
    enable: Any = model.activation_checkpointing_enable if new else model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


class Autocast(nn.Module):
    """A model in mixed precision: float32 weights, bfloat16 where autocast has it, float32 scores."""

    def __init__(self, module: nn.Module, device: str):
        super().__init__()
        self.module, self.device = module, device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            z = self.module(x)
        return z.float()
