"""The nets that are measured, for 3 x 32 x 32 images and ten classes."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from threepass.models import mlp, plain


class Residual(nn.Module):
    """ResNet's basic block: relu(shortcut(a) + two normed convolutions of a)."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(*_normed(channels, out, 3, stride), nn.ReLU(), *_normed(out, out, 3, 1))
        changes = channels != out or stride != 1
        self.shortcut = nn.Sequential(*_normed(channels, out, 1, stride)) if changes else nn.Identity()

    def forward(self, a: Tensor) -> Tensor:
        return F.relu(self.shortcut(a) + self.body(a))


def _normed(channels: int, out: int, size: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]


def resnet18(width: int = 64) -> nn.Sequential:
    """ResNet-18 with the first layer that is usual for CIFAR: 3 x 3, stride 1, no pooling."""
    layers: list[nn.Module] = [*_normed(3, width, 3, 1), nn.ReLU()]
    channels = width
    for stage in range(4):
        out = width * 2**stage
        layers += [Residual(channels, out, 2 if stage else 1), Residual(out, out, 1)]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Attention(nn.Module):
    """Self-attention with several heads, through torch's fused kernel. a: (batch, tokens, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, a: Tensor) -> Tensor:
        q, k, v = self.qkv(a).view(*a.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        hidden = 4 * width
        self.think = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, a: Tensor) -> Tensor:
        a = a + self.attend(a)
        return a + self.think(a)


class ViT(nn.Module):
    """ViT-Tiny with 4 x 4 patches: 64 tokens, learned positions, the mean over tokens instead of a class token."""

    def __init__(self, width: int = 192, depth: int = 12, heads: int = 3, patch: int = 4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(
            nn.init.trunc_normal_(self.patches.weight.new_empty(1, (32 // patch) ** 2, width), std=0.02)
        )
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(tokens).mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain20": lambda: plain(20),
    "plain32": lambda: plain(32),
    "mlp": lambda: mlp(3072, 2048, 2048, 10),
    "resnet18": resnet18,
    "vit": ViT,
}
