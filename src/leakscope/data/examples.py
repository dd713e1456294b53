"""Private inputs with their labels, in the space that the model reads; how they are made, and split among clients."""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from leakscope.contracts.checks import is_whole, refuse, whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import Box, InputSpace, ValueRange
from leakscope.contracts.spool import tensor_bytes


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs (N, *shape) as float32 in model space, targets, and what is known about them.

    Targets are class numbers (N,) or (N, positions) as int64, or numbers (N, ...) as float32; ``num_classes`` is the
    number of classes, or of numbers an example has. ``space`` is where the inputs live, if not in the box of
    ``value_range``. ``private`` data is never shown in a report unless asked for. ``group`` says to whom an example
    belongs, such as a writer. ``range_known`` is false where the range was read off the examples themselves.

    >>> examples = Examples(torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 0, 1]), 2, ValueRange(), "demo")
    >>> len(examples), examples.shape, len(examples.batch(1, 2))
    (4, (1, 2, 2), 2)
    """

    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    num_classes: int
    value_range: ValueRange = field(default_factory=ValueRange)
    name: str = "examples"
    class_names: tuple[str, ...] | None = field(default=None, repr=False)
    credits: str = field(default="", repr=False)
    private: bool = True
    group: Tensor | None = field(default=None, repr=False)
    range_known: bool = True
    space: InputSpace | None = None

    def __post_init__(self) -> None:
        refuse(f"{self.name}: not valid examples", _problems(self))

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def inputs(self) -> InputSpace:
        return Box(self.shape, self.value_range) if self.space is None else self.space

    @property
    def public_inputs(self) -> InputSpace:
        """``inputs`` without bounds that were read off the examples themselves, which no adversary may know."""
        return self.inputs if self.range_known else self.inputs.unknown()

    def subset(self, indices: Sequence[int] | Tensor) -> Self:
        """The examples with these numbers, in this order."""
        index = torch.as_tensor(indices)
        if index.dim() != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise UserError(f"subset: expected a list of example numbers, got {indices!r}")
        index = index.to(torch.int64)
        if len(index) == 0 or int(index.min()) < 0 or int(index.max()) >= len(self):
            wanted = f"at least one number between 0 and {len(self) - 1}"
            raise UserError(f"subset: expected {wanted}, got {index.tolist()[:10]}")
        group = None if self.group is None else self.group[index]
        return dataclasses.replace(self, x=self.x[index], y=self.y[index], group=group)

    def batch(self, number: int, size: int) -> Self:
        """Examples number*size up to (number+1)*size: disjoint batches, always full."""
        if size < 1 or number < 0 or (number + 1) * size > len(self):
            needs = f"batch {number} of size {size} needs examples {number * size} to {(number + 1) * size - 1}"
            have = f"batch: {self.name} has {len(self)} examples"
            raise UserError(f"{have}, {needs}. Use a smaller batch or more data.")
        return self.subset(range(number * size, (number + 1) * size))

    def normalised(self, mean: float | Sequence[float], std: float | Sequence[float]) -> Self:
        """The same examples as (unit - mean) / std, one number a channel or one for all.

        >>> demo = Examples(torch.ones(1, 1, 2, 2), torch.zeros(1).long(), 1, ValueRange(), "demo")
        >>> demo.normalised(0.5, 0.25).x.max().item()
        2.0
        """
        box = ValueRange.normalised(_numbers(mean), _numbers(std))
        return dataclasses.replace(self, x=box.from_unit(self.value_range.to_unit(self.x)), value_range=box)

    def fingerprint(self, salt: str = "") -> str:
        """SHA-256 of the content, not of the name; with a secret ``salt`` nobody can check a guess of the content."""
        digest = hashlib.sha256(salt.encode())
        facts = (tuple(self.x.shape), self.num_classes, self.value_range.low, self.value_range.high)
        digest.update(repr(facts).encode())
        for tensor in (self.x, self.y, self.group):
            if tensor is not None:
                digest.update(tensor_bytes(tensor))
        return digest.hexdigest()


def from_tensors(
    x: Tensor,
    y: Tensor,
    num_classes: int | None = None,
    value_range: ValueRange | None = None,
    *,
    name: str = "tensors",
    private: bool = True,
) -> Examples:
    """Make examples from tensors in memory; private unless said otherwise.

    Without ``value_range`` it is [0, 1] if the inputs fit, else from their smallest to their largest value, which is
    not told to an attack. Integer inputs are taken as they are: scale bytes first.

    >>> from_tensors(torch.tensor([[0.0, 3.0]]), torch.tensor([1])).value_range
    ValueRange(low=(0.0,), high=(3.0,))
    """
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        got = f"{type(x).__name__} and {type(y).__name__}"
        raise UserError(f"from_tensors: expected two tensors, got {got}. Use torch.as_tensor on arrays and lists.")
    if x.is_complex() or y.is_complex():
        raise UserError(f"from_tensors: expected real inputs and targets, got {x.dtype} and {y.dtype}")
    # Copies, so that later changes of the caller's tensors do not reach the examples.
    x = x.detach().to(device="cpu", dtype=torch.float32, copy=True)
    y = y.detach().to(device="cpu", dtype=torch.float32 if y.is_floating_point() else torch.int64, copy=True)
    classes = classes_of(y) if num_classes is None else num_classes
    box = natural_range(x) if value_range is None else value_range
    known = value_range is not None or box == ValueRange()
    return Examples(x, y, classes, box, name, private=private, range_known=known)


def classes_of(y: Tensor) -> int:
    """How many classes there are as far as the targets tell, or how many numbers an example has.

    >>> classes_of(torch.tensor([0, 3, 1])), classes_of(torch.rand(5, 2))
    (4, 2)
    """
    if y.is_floating_point():
        return y[0].numel() if len(y) else 1
    return int(y.max()) + 1 if y.numel() else 1


def natural_range(x: Tensor) -> ValueRange:
    """[0, 1] if ``x`` fits in it, else the range of its own values.

    >>> natural_range(torch.tensor([0.2, 0.7]))
    ValueRange(low=(0.0,), high=(1.0,))
    """
    if x.numel() == 0 or not bool(torch.isfinite(x).all()):
        return ValueRange()  # the checks of Examples name the problem
    low, high = float(x.min()), float(x.max())
    if low >= 0.0 and high <= 1.0:
        return ValueRange()
    # One constant value spans no box; a box of width 1 around it keeps metrics defined.
    return ValueRange((low,), (high,)) if low < high else ValueRange((low - 0.5,), (low + 0.5,))


def _numbers(value: float | Sequence[float]) -> tuple[float, ...]:
    return tuple(float(v) for v in value) if isinstance(value, Sequence) else (float(value),)


def _problems(examples: Examples) -> list[str]:
    x, y, problems = examples.x, examples.y, []
    wanted = "float32" if examples.space is None else "inputs"
    if (examples.space is None and x.dtype != torch.float32) or x.dim() < 2 or x.numel() == 0:
        problems.append(f"x: expected {wanted} of shape (N, *shape), N at least 1, got {x.dtype} {tuple(x.shape)}")
    elif examples.space is not None:
        problems += examples.space.problems(x)
    elif not all(map(math.isfinite, torch.aminmax(x))):
        problems.append("x: expected finite values, got NaN or infinity. Clean the data first")
    if y.dtype not in (torch.int64, torch.float32) or y.shape[:1] != x.shape[:1]:
        wanted = f"{x.shape[:1].numel()} int64 labels, or float32 targets"
        problems.append(f"y: expected {wanted}, got {y.dtype} {tuple(y.shape)}")
    elif y.is_floating_point():
        problems += [] if bool(torch.isfinite(y).all()) else ["y: expected finite values, got NaN or infinity"]
    elif y.numel() and (int(y.min()) < 0 or int(y.max()) >= examples.num_classes):
        got = f"{int(y.min())} to {int(y.max())}. Check num_classes"
        problems.append(f"y: expected labels from 0 to {examples.num_classes - 1}, got {got}")
    if examples.num_classes < 1:
        problems.append(f"num_classes: expected at least 1, got {examples.num_classes}")
    names = examples.class_names
    if names is not None and len(names) != examples.num_classes:
        problems.append(f"class_names: expected {examples.num_classes}, got {len(names)}")
    if examples.group is not None and examples.group.shape != y.shape[:1]:
        problems.append(f"group: expected one number an example, got shape {tuple(examples.group.shape)}")
    channels = len(examples.value_range.low)
    if examples.space is not None:
        return problems  # its values are the space's to check
    if channels > 1 and x.dim() >= 2 and x.shape[1] != channels:
        problems.append(f"value_range: it has {channels} channels, the inputs have shape {tuple(x.shape)}")
    elif not problems:
        # Of one range for all channels the ends tell everything, and they need no copy of the examples.
        unit = examples.value_range.to_unit(torch.stack(torch.aminmax(x)) if channels == 1 else x)
        if float(unit.min()) < -1e-3 or float(unit.max()) > 1 + 1e-3:
            wanted = f"{examples.value_range.low} to {examples.value_range.high}"
            got = f"{float(x.min()):g} to {float(x.max()):g}. Give the range the inputs really have"
            problems.append(f"value_range: expected every input within {wanted}, got {got}")
    return problems


#: A dataset is read up to here unless more is asked for: as many as identification compares with.
READ_AT_MOST = 1000

_EXPECTED = "Examples, a pair (x, y) of tensors or numpy arrays, or a torch Dataset or DataLoader of such pairs"


def from_object(
    value: Any,
    *,
    limit: int | None = READ_AT_MOST,
    num_classes: int | None = None,
    value_range: ValueRange | None = None,
    name: str = "tensors",
) -> Examples:
    """Examples from ``value``; of a dataset or loader the first ``limit``, in the dataset's own order.

    >>> x, y = np.zeros((3, 1, 2, 2), dtype=np.float32), np.array([0, 1, 1])
    >>> len(from_object((x, y))), from_object((x, y)).num_classes
    (3, 2)
    """
    if isinstance(value, Examples):
        if num_classes is not None or value_range is not None:
            raise UserError("value_range, num_classes: expected with tensors or a dataset only; Examples bring theirs")
        return value
    if isinstance(value, Dataset | DataLoader):
        known = getattr(getattr(value, "dataset", value), "classes", None)
        if num_classes is None and isinstance(known, list | tuple):
            num_classes = len(known)
        name = type(getattr(value, "dataset", value)).__name__ if name == "tensors" else name
        value = _read(value, limit)
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise UserError(f"expected {_EXPECTED}, got {type(value).__name__}")
    return from_tensors(_tensor(value[0]), _tensor(value[1]), num_classes, value_range, name=name)


def _read(source: Any, limit: int | None) -> tuple[Tensor, Tensor]:
    if isinstance(source, DataLoader) and source.collate_fn is default_collate:
        source = source.dataset  # a shuffled loader would give others each time
    pairs: Iterator[tuple[Any, Any]]
    if isinstance(source, DataLoader):
        pairs = itertools.chain.from_iterable(zip(*_pair(batch), strict=True) for batch in source)
    else:
        if not isinstance(source, IterableDataset):
            if not hasattr(source, "__len__"):
                raise UserError(f"{type(source).__name__}: expected a dataset with a length, or an IterableDataset")
            source = map(source.__getitem__, range(len(source)))
        pairs = map(_pair, source)
    chosen = list(itertools.islice(pairs, limit))
    if not chosen:
        raise UserError("expected at least one example, got an empty dataset")
    inputs, targets = ([_tensor(item) for item in column] for column in zip(*chosen, strict=True))
    if len({(item.shape, item.dtype) for item in inputs}) > 1:
        shapes = sorted({str(tuple(item.shape)) for item in inputs})
        raise UserError(f"expected examples of one shape and type, got {', '.join(shapes[:4])}; resize them first")
    return torch.stack(inputs), torch.stack(targets)


def _pair(item: Any) -> tuple[Any, Any]:
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], item[1]
    got = f"the keys {', '.join(map(str, item))}" if isinstance(item, dict) else type(item).__name__
    raise UserError(f"expected the dataset to give pairs (x, y), got {got}; wrap it in one that does")


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float | np.generic):
        return torch.tensor(value.item() if isinstance(value, np.generic) else value)
    if not isinstance(value, np.ndarray):
        hint = "; add transforms.ToTensor()" if hasattr(value, "getdata") else "; use torch.as_tensor"
        raise UserError(f"expected tensors or numpy arrays, got {type(value).__name__}{hint}")
    if value.dtype.kind not in "buif":
        raise UserError(f"expected an array of numbers, got {value.dtype}")
    # torch reads the machine's own byte order and strides only.
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))


def split_by_group(examples: Examples, limit: int | None = None) -> list[Tensor]:
    """One client a group, such as a writer, in ascending order; of each at most its first ``limit`` examples.

    >>> group = torch.tensor([7, 3, 7, 7])
    >>> demo = Examples(torch.zeros(4, 2), torch.zeros(4).long(), 1, ValueRange(), "demo", group=group)
    >>> [rows.tolist() for rows in split_by_group(demo, limit=2)]
    [[1], [0, 2]]
    """
    problems = []
    if examples.group is None:
        fix = "use data with groups, or another split: iid or dirichlet"
        problems.append(f"{examples.name}: expected data that says to whom each example belongs, got none; {fix}")
    if limit is not None and not is_whole(limit):
        problems.append(f"limit: expected a whole number of at least 1, or None, got {limit!r}")
    refuse("split_by_group", problems)
    group = torch.as_tensor(examples.group)
    return [torch.nonzero(group == owner).flatten()[:limit] for owner in group.unique(sorted=True)]


def split_iid(count: int, clients: int, generator: torch.Generator) -> list[Tensor]:
    """``count`` examples dealt out at random, so that two clients differ by one example at most.

    >>> sorted(len(rows) for rows in split_iid(7, 3, torch.Generator().manual_seed(0)))
    [2, 2, 3]
    """
    refuse("split_iid", whole(count=count) + _client_problems(clients, count))
    return [rows.sort().values for rows in torch.randperm(count, generator=generator).tensor_split(clients)]


def split_dirichlet(labels: Tensor, clients: int, alpha: float, generator: torch.Generator) -> list[Tensor]:
    """Label skew: the examples of each class are shared out in proportions drawn from Dirichlet(alpha).

    Li, Diao, Chen and He, "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022,
    distribution-based label imbalance. Small alpha gives a class to few clients. Deviation: a client left with nothing
    is given one example of the largest client; the published code draws anew, which for small alpha need not end.
    """
    problems = []
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point() or len(labels) == 0:
        got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        problems.append(f"labels: expected class numbers of shape (N,), N at least 1, got {got}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not (alpha > 0 and math.isfinite(alpha)):
        problems.append(f"alpha: expected a positive number, got {alpha!r}")
    refuse("split_dirichlet", problems + _client_problems(clients, len(labels) if not problems else None))
    labels = labels.cpu()
    # Torch draws no Dirichlet from a generator of one's own; NumPy does, and safely for tiny alpha.
    draws = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for label in labels.unique(sorted=True):
        rows = torch.nonzero(labels == label).flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        ends = (draws.dirichlet(np.full(clients, float(alpha))).cumsum()[:-1] * len(rows)).round().astype(int)
        # Whom rounding favours is drawn for each class, or a few clients would get every class of one example.
        turns = torch.randperm(clients, generator=generator).tolist()
        for client, part in zip(turns, rows.tensor_split(ends.tolist()), strict=True):
            parts[client].append(part)
    dealt = [torch.cat(part) for part in parts]
    for client in range(clients):
        if len(dealt[client]) == 0:
            largest = max(range(clients), key=lambda other: len(dealt[other]))
            dealt[client], dealt[largest] = dealt[largest][-1:], dealt[largest][:-1]
    return [rows.sort().values for rows in dealt]


def _client_problems(clients: int, count: int | None) -> list[str]:
    if is_whole(clients) and is_whole(count) and clients > (count or 0):
        return [f"clients: expected at most {count}, one example each, got {clients}"]
    return whole(clients=clients)
