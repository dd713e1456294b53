"""The vision transformer of Surrogate Model Extension (Zhu, Yao, Blaschko, ICML 2023): one patch covers the image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakscope.contracts.checks import PIECES
from leakscope.contracts.errors import UserError
from leakscope.contracts.task import Shape
from leakscope.models.common import image_shape, positive_int, sequence


class Attention(nn.Module):
    """Multi-head self-attention, written out: fused kernels cannot be differentiated twice everywhere."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
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

    def __init__(self, dim: int, heads: int, mlp_ratio: int, *, plain_attention: bool) -> None:
        super().__init__()
        self.plain_attention = plain_attention
        if not plain_attention:
            self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = _perceptron(dim, mlp_ratio * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x) if self.plain_attention else x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


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
        for name, value in (("dim", dim), ("heads", heads), ("layers", layers), ("mlp_ratio", mlp_ratio)):
            positive_int(value, f"s3-vit: {name}")
        PIECES.check("s3-vit: layers", layers)
        if dim % heads:
            raise UserError(f"s3-vit: dim must be a multiple of heads, got dim={dim} and heads={heads}")
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
