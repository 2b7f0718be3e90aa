"""Nets that are measured and are not among `threepass.models`."""

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    """PyTorch's own nn.TransformerEncoder on the patches of an image: 64 tokens for 32 x 32 pixels.

    All is as PyTorch has it by default (norms after the residuals, ReLU), but without dropout: so methods compute the
    same numbers and are checked against each other.
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
