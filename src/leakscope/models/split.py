"""A vertical model as one module: each worker reads its own features of every sample, a server joins the outputs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

from leakscope.contracts.checks import PIECES, brief
from leakscope.contracts.errors import UserError
from leakscope.contracts.task import Shape
from leakscope.models.common import activation_layer, positive_int, sequence, too_small

Groups = Mapping[str, Sequence[int | str]]
_TOLD = 8


@dataclass(frozen=True)
class Share:
    """The features of one worker: their ``places`` in a flattened sample, and the ``shape`` they have together."""

    name: str
    places: tuple[int, ...] = field(repr=False)
    shape: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # it never changes, and copying thousands of places with each model would be felt

    def take(self, x: Tensor) -> Tensor:
        places = torch.tensor(self.places, device=x.device)
        return x.flatten(1).index_select(1, places).reshape(-1, *self.shape)


def make_shares(input_shape: Sequence[int], slices: str | Groups = "quadrants", workers: int = 4) -> tuple[Share, ...]:
    """Divide the features of samples of this shape among workers.

    ``slices``: "quadrants" cuts an image in four; "strips" cuts the rows of an image, or the last axis of a signal or
    table, in ``workers`` bands; a mapping of names to numbers or ranges such as "3-9" gives each worker a group of
    features along the last axis, however many ``workers`` are asked for.

    >>> [share.shape for share in make_shares((3, 32, 32))]
    [(3, 16, 16), (3, 16, 16), (3, 16, 16), (3, 16, 16)]
    >>> [(share.name, share.places) for share in make_shares((5,), {"bank": ["0-2"], "shop": [4, 3]})]
    [('bank', (0, 1, 2)), ('shop', (4, 3))]
    """
    shape = tuple(input_shape)
    # On the CPU even where the weights of a model are not made yet.
    grid = torch.arange(math.prod(shape), device="cpu").reshape(shape)
    if isinstance(slices, Mapping):
        blocks = {str(name): grid[..., _columns(name, group, shape[-1])] for name, group in slices.items()}
    elif slices == "quadrants":
        if len(shape) != 3 or min(shape[1:]) < 2:
            raise UserError(
                f"slices: quadrants need images (channels, height, width) of at least 2x2, got {shape}; "
                "use 'strips' or name groups of features"
            )
        if workers != 4:
            raise UserError(f"workers: expected 4 for quadrants, got {workers!r}; use 'strips' for other numbers")
        halves = [grid.tensor_split(2, dim=1)[row].tensor_split(2, dim=2) for row in range(2)]
        names = ("top left", "top right", "bottom left", "bottom right")
        blocks = dict(zip(names, (block for row in halves for block in row), strict=True))
    elif slices == "strips":
        axis = 1 if len(shape) == 3 else len(shape) - 1
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= shape[axis]:
            raise UserError(f"workers: expected 1 to {shape[axis]} strips of inputs {shape}, got {brief(workers)}")
        PIECES.check("workers", workers)
        blocks = {f"strip {n + 1}": block for n, block in enumerate(grid.tensor_split(workers, dim=axis))}
    else:
        raise UserError(
            f"slices: expected 'quadrants', 'strips' or a mapping of names to features, got {brief(slices)}"
        )
    shares = tuple(Share(n, tuple(b.flatten().tolist()), tuple(b.shape)) for n, b in blocks.items())
    check_shares(shares, shape)
    return shares


def _columns(name: str, group: Sequence[int | str], length: int) -> list[int]:
    columns: list[int] = []
    for entry in group if isinstance(group, Iterable) and not isinstance(group, str) else [group]:
        first, dash, last = str(entry).partition("-")
        try:
            numbers = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            numbers = range(0)
        if not numbers:
            wanted = "feature numbers or rising ranges such as '3-9'"
            raise UserError(f"slices: {name}: expected {wanted}, got {brief(entry)}")
        if not 0 <= numbers[0] <= numbers[-1] < length:
            raise UserError(f"slices: {name}: expected some of the features 0 to {length - 1}, got {brief(entry)}")
        columns += numbers
    if not columns:
        raise UserError(f"slices: {name}: expected some of the features 0 to {length - 1}, got none")
    return columns


def check_shares(shares: Sequence[Share], input_shape: Sequence[int]) -> None:
    """Raise ValueError unless every feature of such a sample belongs to exactly one worker."""
    if not shares:
        raise UserError("slices: expected at least one worker, got none")
    size = math.prod(input_shape)
    owners = torch.zeros(size, dtype=torch.long, device="cpu")
    for share in shares:
        if math.prod(share.shape) != len(share.places) or not all(0 <= place < size for place in share.places):
            raise UserError(f"slices: {share.name}: {len(share.places)} places do not fit the shape {share.shape}")
        owners += torch.bincount(torch.tensor(share.places, device="cpu"), minlength=size)
    wrong = torch.nonzero(owners != 1).flatten().tolist()
    if wrong:
        told = ", ".join(f"{place} ({int(owners[place])} times)" for place in wrong[:_TOLD])
        more = f" and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
        raise UserError(f"slices: every feature must belong to exactly one worker; not so: {told}{more}")


def assemble(shares: Sequence[Share], parts: Sequence[Tensor], input_shape: Sequence[int]) -> Tensor:
    """Join the parts (B, ...) of all workers to whole samples.

    >>> x = torch.arange(32.0).reshape(2, 1, 4, 4)
    >>> shares = make_shares((1, 4, 4))
    >>> torch.equal(assemble(shares, [share.take(x) for share in shares], (1, 4, 4)), x)
    True
    """
    order = torch.tensor([place for share in shares for place in share.places], device=parts[0].device)
    together = torch.cat([part.flatten(1) for part in parts], dim=1)
    return together.index_select(1, torch.argsort(order)).reshape(-1, *input_shape)


class VerticalModel(nn.Module):
    """Workers that each read their share of a sample, and a head that reads their outputs one after another."""

    def __init__(
        self, *, workers: Sequence[nn.Module], head: nn.Module, shares: Sequence[Share], input_shape: Sequence[int]
    ) -> None:
        super().__init__()
        if len(workers) != len(shares):
            raise UserError(f"VerticalModel: expected a worker for each of {len(shares)} shares, got {len(workers)}")
        check_shares(shares, input_shape)
        self.shares = tuple(shares)
        self.input_shape = tuple(int(size) for size in input_shape)
        self.workers = nn.ModuleList(workers)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        outputs = [worker(share.take(x)) for worker, share in zip(self.workers, self.shares, strict=True)]
        answer: Tensor = self.head(torch.cat(outputs, dim=1))
        return answer

    def extra_repr(self) -> str:
        return "; ".join(f"{share.name}: {'x'.join(map(str, share.shape))}" for share in self.shares)


_DIMENSIONS = {2: (nn.Conv1d, nn.BatchNorm1d), 3: (nn.Conv2d, nn.BatchNorm2d)}
_POOLS = {"max": (nn.MaxPool1d, nn.MaxPool2d), "average": (nn.AvgPool1d, nn.AvgPool2d)}


def cafe_cnn(
    *,
    input_shape: Shape,
    num_classes: int,
    slices: str | Groups = "quadrants",
    workers: int = 4,
    filters: tuple[int, int] = (64, 128),
    hidden: int = 256,
    middle: int = 64,
    activation: str = "relu",
    pool: str = "max",
    batchnorm: bool = False,
    double_softmax: bool = False,
) -> VerticalModel:
    """Build the workers of CAFE's published code: two 5x5 convolutions with pooling, dense layers of 256, 64, classes.

    The attack reads the first dense layer, of ``hidden`` units. ``double_softmax`` applies a softmax before the loss
    applies its own, as that code does by mistake. Signals get one-dimensional convolutions.
    """
    if len(input_shape) not in _DIMENSIONS:
        raise UserError(f"cafe-cnn: expected images or signals, got shape {tuple(input_shape)}; use 'vertical-mlp'")
    if pool not in _POOLS:
        raise UserError(f"pool: expected 'max' or 'average', got {pool!r}")
    if not isinstance(filters, list | tuple) or len(filters) != 2:
        raise UserError(f"filters: expected two numbers, one a convolution, got {filters!r}")
    shares = make_shares(input_shape, slices, workers)
    sizes = [positive_int(size, "cafe-cnn: filters, hidden, middle") for size in (*filters, hidden, middle)]
    nets = [_cnn_worker(share, num_classes, sizes, activation, pool, batchnorm) for share in shares]
    return _joined(nets, shares, input_shape, num_classes, double_softmax)


def _cnn_worker(
    share: Share, num_classes: int, sizes: list[int], activation: str, pool: str, batchnorm: bool
) -> nn.Sequential:
    channels, *sides = share.shape
    if min(sides) < 2:
        raise too_small("cafe-cnn", share.shape, f"worker {share.name!r} needs 2 pixels a side")
    convolution, normalisation = _DIMENSIONS[len(share.shape)]
    pooling = _POOLS[pool][len(share.shape) - 2]
    first, second, hidden, middle = sizes
    layers: dict[str, nn.Module] = {}
    for number, (before, after) in enumerate(((channels, first), (first, second)), start=1):
        layers[f"conv{number}"] = convolution(before, after, 5, padding=2)
        if batchnorm:
            layers[f"norm{number}"] = normalisation(after)
        layers[f"activation{number}"] = activation_layer(activation)
        # An odd side keeps its last pixel, so 14 pixels become 4 in two steps.
        layers[f"pool{number}"] = pooling(2, ceil_mode=True)
        sides = [-(-side // 2) for side in sides]
    dense = _dense(second * math.prod(sides), (hidden, middle, num_classes), activation)
    return sequence(**layers, flatten=nn.Flatten(), **dense)


def vertical_mlp(
    *,
    input_shape: Shape,
    num_classes: int,
    slices: str | Groups = "strips",
    workers: int = 4,
    hidden: int = 64,
    middle: int = 32,
    activation: str = "relu",
) -> VerticalModel:
    """Build workers of dense layers only, for tables: the first dense layer reads the features themselves."""
    shares = make_shares(input_shape, slices, workers)
    sizes = tuple(positive_int(size, "vertical-mlp: hidden, middle") for size in (hidden, middle))
    nets = [
        sequence(flatten=nn.Flatten(), **_dense(len(share.places), (*sizes, num_classes), activation))
        for share in shares
    ]
    return _joined(nets, shares, input_shape, num_classes, False)


def _dense(width: int, sizes: tuple[int, ...], activation: str) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {}
    for number, size in enumerate(sizes, start=1):
        layers[f"fc{number}"] = nn.Linear(width, size)
        layers[f"dense_activation{number}"] = activation_layer(activation)
        width = size
    return layers


def _joined(
    nets: list[nn.Sequential], shares: tuple[Share, ...], input_shape: Shape, num_classes: int, double_softmax: bool
) -> VerticalModel:
    head = sequence(fc=nn.Linear(num_classes * len(nets), num_classes))
    if double_softmax:
        head.add_module("softmax", nn.Softmax(dim=1))
    return VerticalModel(workers=nets, head=head, shares=shares, input_shape=input_shape)
