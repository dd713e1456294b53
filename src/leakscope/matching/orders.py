"""Count, enumerate and draw visiting orders of a client's local steps.

An order is one tuple of example numbers a local step; each epoch visits every example once, in batches. Two orders are
the same to an adversary where they differ by the places of examples within a batch, or by the names of examples of
equal labels, which a search is free to exchange. Each epoch is written as a number of examples of each class in each
batch; examples of a class that met the same batches so far are alike, so each epoch splits the classes further.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import torch

from leakscope.contracts.protocol import visits

#: One tuple of example numbers a local step.
Order = tuple[tuple[int, ...], ...]
#: Examples that cannot be told apart.
_Class = tuple[int, ...]
#: Draws for each order that is wanted: where few orders exist, many draws repeat one.
_DRAWS = 20


def steps_in_order(num_examples: int, batch_size: int, epochs: int) -> Order:
    """Return the visits of a client that does not shuffle.

    >>> steps_in_order(3, 2, 1)
    ((0, 1), (2,))
    """
    rows = tuple(range(num_examples))
    epoch = tuple(rows[i : i + batch_size] for i in range(0, num_examples, batch_size))
    return epoch * epochs


def least_orders(labels: Sequence[Hashable], batch_size: int, epochs: int) -> int:
    """Return how many orders exist at least (exactly for batches of one): arrangements by exchanges of equal labels.

    >>> least_orders([0, 1], 1, 2), least_orders([0, 0], 1, 2), least_orders([0, 1, 2], 2, 2)
    (4, 2, 9)
    """
    examples = len(labels)
    sizes = [len(batch) for batch in steps_in_order(examples, batch_size, 1)]
    epoch = math.factorial(examples) // math.prod(map(math.factorial, sizes))
    exchanges = math.prod(math.factorial(count) for count in Counter(labels).values())
    return -(-(epoch**epochs) // exchanges)


def all_orders(labels: Sequence[Hashable], batch_size: int, epochs: int) -> Iterator[Order]:
    """Yield every order once; ``labels`` tell which examples can be told apart.

    >>> list(all_orders([0, 1], 1, 1))
    [((0,), (1,)), ((1,), (0,))]
    >>> list(all_orders([0, 0], 1, 2))
    [((0,), (1,), (0,), (1,)), ((0,), (1,), (1,), (0,))]
    """
    sizes = tuple(len(batch) for batch in steps_in_order(len(labels), batch_size, 1))
    classes = [tuple(row for row, other in enumerate(labels) if other == label) for label in dict.fromkeys(labels)]
    return _epochs(tuple(classes), sizes, epochs)


def draw_orders(
    labels: Sequence[Hashable], batch_size: int, epochs: int, most: int, generator: torch.Generator
) -> list[Order]:
    """Return the order of a client that does not shuffle, and draw others of one that does, ``most`` in all."""
    examples = len(labels)
    found = {steps_in_order(examples, batch_size, epochs): None}
    for _ in range(_DRAWS * most):
        batches = [tuple(batch.tolist()) for batch in visits(examples, batch_size, epochs, generator)]
        if len(found) == most:
            break
        found.setdefault(same_order(batches, labels))
    return list(found)


def candidate_orders(
    labels: Sequence[Hashable], batch_size: int, epochs: int, most: int, generator: torch.Generator
) -> tuple[list[Order], bool]:
    found = list(itertools.islice(all_orders(labels, batch_size, epochs), most + 1))
    if len(found) <= most:
        return found, True
    return draw_orders(labels, batch_size, epochs, most, generator), False


def same_order(order: Sequence[tuple[int, ...]], labels: Sequence[Hashable]) -> Order:
    """Return the order as :func:`all_orders` writes it: the names of examples with equal labels exchanged.

    >>> same_order([(1,), (0,), (0,), (1,)], [0, 0])
    ((0,), (1,), (1,), (0,))
    """
    history: dict[int, list[int]] = {row: [] for row in range(len(labels))}
    for step, batch in enumerate(order):
        for row in batch:
            history[row].append(step)
    names: dict[int, int] = {}
    for label in dict.fromkeys(labels):
        rows = [row for row, other in enumerate(labels) if other == label]
        names |= dict(zip(sorted(rows, key=history.__getitem__), rows, strict=True))
    return tuple(tuple(sorted(names[row] for row in batch)) for batch in order)


def _epochs(classes: tuple[_Class, ...], sizes: tuple[int, ...], epochs: int) -> Iterator[Order]:
    if not epochs:
        yield ()
        return
    for parts in _arrangements(classes, sizes):
        batches = tuple(tuple(sorted(row for part in parts for row in part[place])) for place in range(len(sizes)))
        finer = tuple(piece for part in parts for piece in part if piece)
        for rest in _epochs(finer, sizes, epochs - 1):
            yield (*batches, *rest)


def _arrangements(classes: tuple[_Class, ...], left: tuple[int, ...]) -> Iterator[tuple[tuple[_Class, ...], ...]]:
    """Yield, for each class, which of its examples are in each batch; ``left`` is the room in each batch."""
    if not classes:
        yield ()
        return
    first, *others = classes
    for counts in _shares(len(first), left):
        ends = [0, *itertools.accumulate(counts)]
        part = tuple(first[start:end] for start, end in itertools.pairwise(ends))
        room = tuple(size - count for size, count in zip(left, counts, strict=True))
        for rest in _arrangements(tuple(others), room):
            yield (part, *rest)


def _shares(count: int, left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(left) == 1:
        yield (count,)
        return
    for own in range(min(count, left[0]), max(0, count - sum(left[1:])) - 1, -1):
        for rest in _shares(count - own, left[1:]):
            yield (own, *rest)
