"""Examples from what people have in memory: pairs of tensors or arrays, torch's datasets and loaders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import ValueRange
from leakscope.data.examples import Examples, from_tensors

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
    """The first examples. A shuffled loader would give others each time, so its dataset is read itself."""
    if isinstance(source, DataLoader) and source.collate_fn is default_collate:
        source = source.dataset
    pairs: Iterator[tuple[Any, Any]]
    if isinstance(source, DataLoader):
        pairs = itertools.chain.from_iterable(zip(*_pair(batch), strict=True) for batch in source)
    else:
        pairs = map(_pair, source if isinstance(source, IterableDataset) else _items(source))
    chosen = list(itertools.islice(pairs, limit))
    if not chosen:
        raise UserError("expected at least one example, got an empty dataset")
    inputs, targets = ([_tensor(item) for item in column] for column in zip(*chosen, strict=True))
    if len({(item.shape, item.dtype) for item in inputs}) > 1:
        shapes = sorted({str(tuple(item.shape)) for item in inputs})
        raise UserError(f"expected examples of one shape and type, got {', '.join(shapes[:4])}; resize them first")
    return torch.stack(inputs), torch.stack(targets)


def _items(dataset: Any) -> Iterator[Any]:
    if not hasattr(dataset, "__len__"):
        raise UserError(f"{type(dataset).__name__}: expected a dataset with a length, or an IterableDataset")
    return (dataset[number] for number in range(len(dataset)))


def _pair(item: Any) -> tuple[Any, Any]:
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], item[1]
    got = f"the keys {', '.join(map(str, item))}" if isinstance(item, dict) else type(item).__name__
    raise UserError(f"expected the dataset to give pairs (x, y), got {got}; wrap it in one that does")


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float | np.generic):
        return torch.tensor(value if isinstance(value, bool | int | float) else value.item())
    if not isinstance(value, np.ndarray):
        hint = "; add transforms.ToTensor()" if hasattr(value, "getdata") else "; use torch.as_tensor"
        raise UserError(f"expected tensors or numpy arrays, got {type(value).__name__}{hint}")
    if value.dtype.kind not in "buif":
        raise UserError(f"expected an array of numbers, got {value.dtype}")
    # torch reads the machine's own byte order and strides only.
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
