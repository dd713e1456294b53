"""Vision transformers: the standard one, and that of Surrogate Model Extension (Zhu, Yao, Blaschko, ICML 2023).

The standard one is that of Dosovitskiy et al. (ICLR 2021): pre-norm layers behind one patch embedding and learned
positions. In that of Surrogate Model Extension one patch covers the image, unless a patch size is given.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.checks import PIECES
from leakscope.contracts.errors import UserError
from leakscope.contracts.task import Shape
from leakscope.models.common import image_shape, positive_int, sequence


class Attention(nn.Module):
    """Multi-head self-attention, written out: fused kernels cannot be differentiated twice everywhere."""

    def __init__(self, dim: int, heads: int, *, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.projection = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        head = dim // self.heads
        query, key, value = (
            part.reshape(batch, tokens, self.heads, head).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        weights = torch.softmax(query @ key.transpose(-2, -1) / head**0.5, dim=-1)
        return self.projection((weights @ value).transpose(1, 2).reshape(batch, tokens, dim))


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return sequence(fc1=nn.Linear(inputs, hidden), activation=nn.GELU(), fc2=nn.Linear(hidden, outputs))


class Layer(nn.Module):
    """Attention and a two-layer perceptron; ``plain_attention`` drops the first residual and its norm."""

    def __init__(self, dim: int, heads: int, mlp_ratio: int, *, plain_attention: bool, bias: bool = False) -> None:
        super().__init__()
        self.plain_attention = plain_attention
        if not plain_attention:
            self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, bias=bias)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = _perceptron(dim, mlp_ratio * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x) if self.plain_attention else x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def _check_sizes(model: str, /, **sizes: int) -> None:
    for name, value in sizes.items():
        positive_int(value, f"{model}: {name}")
    for name in sizes.keys() & {"layers", "depth"}:
        PIECES.check(f"{model}: {name}", sizes[name])
    if sizes["dim"] % sizes["heads"]:
        got = f"dim={sizes['dim']} and heads={sizes['heads']}"
        raise UserError(f"{model}: dim must be a multiple of heads, got {got}")


class StandardVisionTransformer(nn.Module):
    """Convolution over patches -> class token -> positions -> pre-norm layers -> norm -> linear head."""

    def __init__(
        self,
        *,
        input_shape: Shape,
        num_classes: int,
        patch: int = 4,
        dim: int = 96,
        depth: int = 4,
        heads: int = 4,
        mlp_ratio: int = 4,
        learned_positions: bool = True,
        pool: Literal["class", "mean"] = "class",
    ) -> None:
        super().__init__()
        channels, height, width = image_shape("vit", input_shape)
        _check_sizes("vit", patch=patch, dim=dim, depth=depth, heads=heads, mlp_ratio=mlp_ratio)
        if pool not in ("class", "mean"):
            raise UserError(f"vit: pool: expected 'class' or 'mean', got {pool!r}")
        self.patch = patch
        self.embedding = nn.Conv2d(channels, dim, patch, stride=patch)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, dim)) if pool == "class" else None
        tokens = math.ceil(height / patch) * math.ceil(width / patch) + (pool == "class")
        self.position: Tensor
        if learned_positions:
            self.position = nn.Parameter(0.02 * torch.randn(1, tokens, dim))
        else:
            self.register_buffer("position", _sinusoids(tokens, dim))
        self.layers = nn.Sequential(
            *(Layer(dim, heads, mlp_ratio, plain_attention=False, bias=True) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # Zeros at the right and below, where patches do not divide the image.
        x = F.pad(x, (0, -x.shape[3] % self.patch, 0, -x.shape[2] % self.patch))
        tokens = self.embedding(x).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            tokens = torch.cat((self.class_token.expand(x.shape[0], -1, -1), tokens), dim=1)
        tokens = self.norm(self.layers(tokens + self.position))
        return self.head(tokens[:, 0] if self.class_token is not None else tokens.mean(1))


def _sinusoids(tokens: int, dim: int) -> Tensor:
    angles = torch.arange(tokens)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.sin(), angles.cos()), dim=1)[None, :, :dim]


class VisionTransformer(nn.Module):
    """Patches -> embedding -> class token and positions -> layers -> two-layer head on the class token."""

    def __init__(
        self,
        *,
        input_shape: Shape,
        num_classes: int,
        patch_size: int | None = None,
        dim: int = 384,
        heads: int = 4,
        layers: int = 4,
        mlp_ratio: int = 2,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape("s3-vit", input_shape)
        _check_sizes("s3-vit", dim=dim, heads=heads, layers=layers, mlp_ratio=mlp_ratio)
        self.patch = (height, width)
        if patch_size is not None:
            size = positive_int(patch_size, "s3-vit: patch_size")
            if height % size or width % size:
                raise UserError(
                    f"s3-vit: patch_size={size} does not divide images of {height}x{width}. "
                    "Choose a divisor of both sides, or leave it out for one patch."
                )
            self.patch = (size, size)
        tokens = (height // self.patch[0]) * (width // self.patch[1])
        self.embedding = nn.Linear(channels * self.patch[0] * self.patch[1], dim)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.zeros(1, tokens + 1, dim))
        self.layers = sequence(
            **{f"layer{i}": Layer(dim, heads, mlp_ratio, plain_attention=i == 1) for i in range(1, layers + 1)}
        )
        self.norm = nn.LayerNorm(dim)
        self.head = _perceptron(dim, mlp_ratio * dim, num_classes)

    def patches(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, tokens, features), features ordered row, column, channel."""
        batch, channels, height, width = x.shape
        rows, columns = self.patch
        x = x.reshape(batch, channels, height // rows, rows, width // columns, columns)
        return x.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, rows * columns * channels)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embedding(self.patches(x))
        start = self.class_token.expand(tokens.shape[0], -1, -1)
        tokens = self.layers(torch.cat((start, tokens), dim=1) + self.position)
        return self.head(self.norm(tokens[:, 0]))
