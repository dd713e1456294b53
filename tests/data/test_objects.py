"""What people hold in memory becomes examples, or a hint says what would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from leakscope.data import READ_AT_MOST, from_object, from_tensors

X, Y = torch.rand(6, 1, 4, 4), torch.arange(6) % 3


class Pictures(Dataset[Any]):
    """Pictures as numpy arrays with plain numbers for labels; counts what is read."""

    classes = ("a", "b", "c", "d")

    def __init__(self, count: int = 6) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Any, int]:
        self.read.append(number)
        return X[number % 6].numpy(), int(Y[number % 6])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            yield X[0], 1


@pytest.mark.parametrize(
    "source",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        (X.numpy().astype(">f8"), Y.numpy().astype(np.int32)),
        (X.numpy()[::-1][::-1], Y.numpy()),
        TensorDataset(X, Y),
        Pictures(),
        DataLoader(TensorDataset(X, Y), batch_size=4),
        DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
        DataLoader(Pictures(), batch_size=4, collate_fn=lambda items: (X[: len(items)], Y[: len(items)])),
    ],
    ids=["tensors", "arrays", "big-endian", "strided", "dataset", "arrays in it", "loader", "shuffled", "own collate"],
)
def test_whatever_they_come_in_the_examples_are_the_same(source: Any) -> None:
    examples = from_object(source)
    count = len(examples)
    assert count >= 4
    assert torch.allclose(examples.x[:4], X[:4])
    assert examples.y[:4].tolist() == Y[:4].tolist()
    assert examples.private


def test_only_what_is_needed_is_read() -> None:
    pictures = Pictures(count=10**9)
    assert len(from_object(pictures, limit=5)) == 5
    assert pictures.read == [0, 1, 2, 3, 4]
    assert len(from_object(DataLoader(Pictures(10**6), batch_size=100, shuffle=True))) == READ_AT_MOST
    assert len(from_object(Stream(), limit=7)) == 7


def test_the_number_of_classes_is_the_datasets() -> None:
    assert from_object(Pictures()).num_classes == 4
    assert from_object(DataLoader(Pictures())).num_classes == 4
    assert from_object(Pictures(), num_classes=9).num_classes == 9


class Picture:
    """Stands for a PIL image."""

    def getdata(self) -> list[int]:
        return []


class Given(Dataset[Any]):
    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        return self.item


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (7, "Dataset or DataLoader"),
        ((X, [1, 2]), "torch.as_tensor"),
        ((np.array([["a"]]), Y), "array of numbers"),
        (Given((Picture(), 1)), r"transforms.ToTensor\(\)"),
        (Given({"image": X[0], "label": 1}), "keys image, label"),
        (Given(X[0]), r"pairs \(x, y\), got Tensor"),
        (TensorDataset(X[:0], Y[:0]), "empty"),
    ],
)
def test_what_cannot_be_read_comes_with_a_hint(source: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_object(source)


def test_pictures_of_several_sizes_are_named() -> None:
    class Sizes(Given):
        def __getitem__(self, number: int) -> Any:
            return torch.rand(1, 4 + number, 4), 0

    with pytest.raises(ValueError, match=r"one shape.*\(1, 4, 4\), \(1, 5, 4\)"):
        from_object(Sizes(None))


def test_examples_pass_through() -> None:
    examples = from_tensors(X, Y)
    assert from_object(examples) is examples
    with pytest.raises(ValueError, match="Examples bring theirs"):
        from_object(examples, num_classes=3)
