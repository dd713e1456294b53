"""Mixtures taken apart: from weighted means of examples and the shares of their classes back to the examples.

A batch of n mixtures of its own n examples is n equations for n unknown pictures, M x = mixtures, and M follows from
the soft labels: column by column where every example has a class of its own. Where examples share a class, its column
is that of their sum, and each example is in so many mixtures as a mixture has examples: the ways to divide them are
tried, and what a picture can be decides. Nothing outside its box is one, and a wrong way leaves traces of one example
in another, which are rough. A mixture of two examples of one class is tried with a grid of shares, for its label tells
none. With M near to singular (all shares one half in a cycle of even length, say) there is no way back, and that is
said. Where the mixtures are not exact, directions in which their errors would grow beyond the pictures are damped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable

#: Shares of soft labels below this are none, and above one minus it, all.
NO_SHARE = 1e-3
#: Ways to divide the classes that are tried.
MOST_WAYS = 2000
#: The largest factor by which errors of mixtures may grow in their parts.
MOST_GROWTH = 1e3
#: What parts may stick out of their box, root mean square: where shares are known, and where they are of the grid.
OUTSIDE, OUTSIDE_OF_GRID = 1e-3, 2e-2
#: Mixtures with a smaller error can refute a way.
TELLING = 1e-3
#: The shares of two examples of one class that are tried.
GRID = tuple(place / 40 for place in range(4, 37))
#: The spread of pictures about their mean, in units of their range.
SPREAD = 0.25


@dataclass(frozen=True, eq=False)
class Shares:
    """``matrix`` (n, n): the share of each example, a column, in each mixture; ``labels`` (n,) of the examples.

    ``certain``: all shares are known; those of two examples of one class in one mixture are not.
    """

    matrix: Tensor
    labels: Tensor
    certain: bool = True

    @property
    def growth(self) -> float:
        """The largest factor by which an error of the mixtures grows in their parts; infinite where M is singular."""
        smallest = float(torch.linalg.svdvals(self.matrix)[-1])
        return 1 / smallest if smallest > 1e-12 else float("inf")

    def parts(self, mixtures: Tensor, error: float = 0.0) -> Tensor:
        """The examples, by least squares about the mean of the mixtures; ``error`` is that of the mixtures."""
        flat = mixtures.double().flatten(1).cpu()
        mean = flat.mean(0)
        left, sizes, right = torch.linalg.svd(self.matrix)
        factors = sizes / (sizes.square() + (error / SPREAD) ** 2)
        rest = flat - self.matrix.sum(1, keepdim=True) * mean
        solved: Tensor = mean + right.T @ (factors[:, None] * (left.T @ rest))
        return solved.reshape(mixtures.shape)


@dataclass(frozen=True, eq=False)
class Parts:
    """The examples in [0, 1] and their shares. ``forced``: no other way of dividing the classes is possible."""

    pictures: Tensor
    shares: Shares
    forced: bool


def possible_shares(soft_labels: Tensor, images: int) -> list[Shares]:
    """All M that soft labels (n, C) of mixtures of ``images`` examples allow; NotApplicable where it is not known.

    >>> soft = torch.tensor([[0.6, 0.0, 0.4], [0.5, 0.5, 0.0], [0.0, 0.4, 0.6]])
    >>> found = possible_shares(soft, 2)
    >>> len(found), found[0].labels.tolist(), [[round(v, 1) for v in row] for row in found[0].matrix.tolist()]
    (1, [0, 1, 2], [[0.6, 0.0, 0.4], [0.5, 0.5, 0.0], [0.0, 0.4, 0.6]])
    """
    soft, n = soft_labels.detach().double().cpu(), len(soft_labels)
    soft = torch.where(soft > NO_SHARE, soft, 0.0)
    classes = (soft > 0).any(0).nonzero()[:, 0]
    if len(classes) == n:
        return [Shares(soft[:, classes], classes)]
    if len(classes) > n or images != 2:
        raise NotApplicable(
            f"{n} mixtures of {images} examples show {len(classes)} classes: which example is in which does not follow"
        )
    divided = [list(itertools.islice(_divided(soft[:, label]), MOST_WAYS + 1)) for label in classes]
    ways = math.prod(len(options) for options in divided)
    if ways > MOST_WAYS:
        raise NotApplicable(f"more than {MOST_WAYS} ways to divide the classes among the mixtures are too many to try")
    found = []
    for way in itertools.product(*divided):
        matrix = torch.cat([columns for columns, _ in way], 1)
        if matrix.shape[1] == n:
            counts = torch.tensor([columns.shape[1] for columns, _ in way])
            found.append(Shares(matrix, classes.repeat_interleave(counts), all(known for _, known in way)))
    if not found:
        raise NotApplicable(f"the shares of {len(classes)} classes are not those of {n} examples")
    return found


def _divided(column: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """The ways to divide a class's shares into examples of two shares each: (n, examples), and whether all are known.

    A mixture that is of this class alone holds one example twice, or two of them in shares that are tried.
    """
    alone = (column > 1 - NO_SHARE).nonzero()[:, 0].tolist()
    shared = ((column > 0) & (column <= 1 - NO_SHARE)).nonzero()[:, 0].tolist()
    if len(shared) % 2:
        return
    for pairs in dict.fromkeys(tuple(sorted(one)) for one in _pairings(sorted([*shared, *alone, *alone]))):
        halved = [row for row in alone if (row, row) not in pairs]
        for shares in itertools.product(GRID, repeat=len(halved)):
            first = dict(zip(halved, shares, strict=True))
            columns = torch.zeros((len(column), len(pairs)), dtype=column.dtype)
            for place, rows in enumerate(pairs):
                for row in rows:
                    share = float(column[row]) / 2 if rows[0] == rows[1] else first.get(row, float(column[row]))
                    columns[row, place] += share
                    if row in first and rows[0] != rows[1]:
                        first[row] = 1 - first[row]  # the other example's
            yield columns, not halved


def _pairings(rows: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """All ways to make pairs.

    >>> len(list(_pairings([0, 1, 2, 3]))), len(list(_pairings(range(6))))
    (3, 15)
    """
    if not rows:
        yield []
        return
    first, *others = rows
    for place, partner in enumerate(others):
        rest = [*others[:place], *others[place + 1 :]]
        yield from ([(first, partner), *pairs] for pairs in _pairings(rest))


def take_apart(mixtures: Tensor, ways: Sequence[Shares], *, error: float, bounded: bool = True) -> Parts:
    """The examples in mixtures (n, ...) given in [0, 1]; NotApplicable where there is no way back.

    ``error``: that of the mixtures, root mean square; where it is small, parts outside of [0, 1] refute a way.
    ``bounded``: examples lie in [0, 1] at all.

    >>> examples = torch.tensor([[[[0.0, 0.0, 1.0]]], [[[0.2, 0.2, 0.2]]]]).double()
    >>> shares = Shares(torch.tensor([[0.7, 0.3], [0.4, 0.6]]).double(), torch.tensor([0, 1]))
    >>> found = take_apart((shares.matrix @ examples.flatten(1)).reshape(2, 1, 1, 3), [shares], error=0.0)
    >>> found.forced, bool((found.pictures - examples).abs().max() < 1e-9)
    (True, True)
    """
    usable = [way for way in ways if way.growth <= MOST_GROWTH]
    if not usable:
        raise NotApplicable("the shares do not determine the examples: their matrix is singular, or nearly so")
    tried = [(way, way.parts(mixtures, error)) for way in usable]
    if error < TELLING and bounded:
        tried = [(way, parts) for way, parts in tried if outside(parts) <= _allowed(way, error)]
        if not tried:
            raise NotApplicable("no division of the classes gives examples within their bounds")
    scores = [_strangeness(parts, bounded) for _, parts in tried]
    way, parts = tried[scores.index(min(scores))]
    # A way that was left out because nothing follows from it is not refuted.
    forced = len(tried) == 1 and len(usable) == len(ways) and way.certain
    return Parts(parts.clamp(0, 1) if bounded else parts, way, forced)


def _allowed(way: Shares, error: float) -> float:
    return max(OUTSIDE if way.certain else OUTSIDE_OF_GRID, error * way.growth)


def outside(pictures: Tensor) -> float:
    """The root mean square by which values stick out of [0, 1].

    >>> outside(torch.tensor([0.5, 1.0, -0.2, 1.2]))
    0.1414...
    """
    return float((pictures - pictures.clamp(0, 1)).double().square().mean().sqrt())


def _strangeness(pictures: Tensor, bounded: bool) -> float:
    """How unlike pictures they are: outside of their box, and rough where they have neighbours."""
    strange = outside(pictures) if bounded else 0.0
    for axis in range(2, pictures.dim()):
        strange += float(pictures.diff(dim=axis).abs().mean())
    return strange
