"""Vision transformers as people write them: small, each with another layout of patches, positions and attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHAPE, CLASSES, TOKENS, DIM = (3, 16, 16), 6, 16, 32


def image(seed: int = 0) -> Tensor:
    x = torch.rand((1, *SHAPE), generator=torch.Generator().manual_seed(seed))
    return (x + x.roll(1, 2) + x.roll(1, 3)) / 3


class Block(nn.Module):
    """A pre-norm layer with query, key and value of their own: the bias of the key has no gradient but rounding."""

    def __init__(self, dim: int = DIM, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Timm(nn.Module):
    """Two extra tokens, a convolution without bias, an image that the model itself normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, 0.4, 0.3]).reshape(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.3, 0.25]).reshape(3, 1, 1))
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, DIM, 4, 4, bias=False)
        self.cls_token, self.dist_token = (nn.Parameter(0.02 * torch.randn(1, 1, DIM)) for _ in range(2))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, TOKENS + 2, DIM))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed.proj((x - self.mean) / self.std).flatten(2).transpose(1, 2)
        start = torch.cat([self.cls_token, self.dist_token], 1).expand(len(x), -1, -1)
        x = self.norm(self.blocks(torch.cat([start, x], 1) + self.pos_embed))
        return self.head(x[:, :2].mean(1))


class Torchvision(nn.Module):
    """The encoder owns the positions, and attention is torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, DIM, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.encoder = nn.Module()
        self.encoder.pos_embedding = nn.Parameter(0.02 * torch.randn(1, TOKENS + 1, DIM))
        layers = (nn.TransformerEncoderLayer(DIM, 2, 64, 0.1, "gelu", batch_first=True, norm_first=True) for _ in "12")
        self.encoder.layers = nn.Sequential(*layers)
        self.encoder.ln = nn.LayerNorm(DIM)
        self.heads = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).reshape(len(x), DIM, -1).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.encoder.pos_embedding
        return self.heads(self.encoder.ln(self.encoder.layers(x))[:, 0])


class Columns(nn.Module):
    """A linear layer over patches cut column by column, scaled; positions from a table; a softmax at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Embedding(TOKENS + 3, DIM)
        self.tokens = nn.Linear(48, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.classify = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 3, 2, 5, 4, 1).reshape(len(x), TOKENS, 48)
        x = 3.0 * self.tokens(x) + self.where(torch.arange(TOKENS).flip(0))
        return torch.softmax(self.classify(self.blocks(x).mean(1)), -1)


class Map(nn.Module):
    """Positions are a map of features, added before tokens are made of it; overlapping patches with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, 6, 4, 1)
        self.place = nn.Parameter(0.02 * torch.randn(DIM, 4, 4))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks((self.stem(x) + self.place).flatten(2).transpose(1, 2)).mean(1))


NETS = {"timm": Timm, "torchvision": Torchvision, "columns": Columns, "map": Map}


def built(name: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return NETS[name]()
