"""Mixtures taken apart: from weighted means of examples and the shares of their classes back to the examples.

A batch of n mixtures of its own n examples is n equations for n unknown pictures, M x = mixtures, and M follows from
the soft labels: column by column where every example has a class of its own. Where examples share a class, its column
is that of their sum, and each example is in so many mixtures as a mixture has examples: the ways to divide them are
tried, and what a picture can be decides. Nothing outside its box is one, and a wrong way leaves traces of one example
in another, which are rough. With M near to singular (all shares one half in a cycle of even length, say) there is no
way back, and that is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Shares of soft labels below this are none, and above one minus it, all.
NO_SHARE = 1e-3
#: Ways to divide the classes that are tried.
MOST_WAYS = 2000
#: The largest factor by which errors of mixtures may grow in their parts.
MOST_GROWTH = 1e3
#: What parts may stick out of their box, root mean square, where mixtures are exact to rounding.
OUTSIDE = 1e-3


class MixturesRefused(ValueError):
    """The mixtures cannot be taken apart; the text says why."""


@dataclass(frozen=True, eq=False)
class Shares:
    """``matrix`` (n, n): the share of each example, a column, in each mixture; ``labels`` (n,) of the examples.

    ``certain``: no mixture may be one of two examples of the same class, whose shares their labels do not tell.
    """

    matrix: Tensor
    labels: Tensor
    certain: bool = True

    @property
    def growth(self) -> float:
        """The largest factor by which an error of the mixtures grows in their parts; infinite where M is singular."""
        smallest = float(torch.linalg.svdvals(self.matrix)[-1])
        return 1 / smallest if smallest > 1e-12 else float("inf")

    def parts(self, mixtures: Tensor) -> Tensor:
        """The examples, by least squares."""
        flat = mixtures.double().flatten(1).cpu()
        solved: Tensor = torch.linalg.lstsq(self.matrix, flat, driver="gelsd").solution
        return solved.reshape(mixtures.shape)


@dataclass(frozen=True, eq=False)
class Parts:
    """The examples in [0, 1] and their shares. ``forced``: no other way of dividing the classes is possible."""

    pictures: Tensor
    shares: Shares
    forced: bool


def possible_shares(soft_labels: Tensor, images: int) -> list[Shares]:
    """All M that soft labels (n, C) of mixtures of ``images`` examples allow; MixturesRefused where it is not known.

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
        raise MixturesRefused(
            f"{n} mixtures of {images} examples show {len(classes)} classes: which example is in which does not follow"
        )
    divided = [list(_divided(soft[:, label])) for label in classes]
    ways = 1
    for label, options in zip(classes, divided, strict=True):
        if not options:
            raise MixturesRefused(f"the shares of class {int(label)} are not those of whole examples")
        ways *= len(options)
    if ways > MOST_WAYS:
        raise MixturesRefused(f"{ways} ways to divide the classes among the mixtures are too many to try")
    found = []
    for way in itertools.product(*divided):
        matrix = torch.cat(way, 1)
        if matrix.shape[1] == n:
            counts = torch.tensor([columns.shape[1] for columns in way])
            alone = ((matrix > 1 - NO_SHARE) * counts.repeat_interleave(counts)).max()
            found.append(Shares(matrix, classes.repeat_interleave(counts), certain=int(alone) < 2))
    if not found:
        raise MixturesRefused(f"the shares of {len(classes)} classes are not those of {n} examples")
    return found


def _divided(column: Tensor) -> Iterator[Tensor]:
    """The ways to divide a class's shares into examples of two shares each, or of one that is whole: (n, examples)."""
    alone = (column > 1 - NO_SHARE).nonzero()[:, 0].tolist()
    shared = ((column > 0) & (column <= 1 - NO_SHARE)).nonzero()[:, 0].tolist()
    if len(shared) % 2:
        return
    for pairs in _pairings(shared):
        groups = [*pairs, *((row,) for row in alone)]
        columns = torch.zeros((len(column), len(groups)), dtype=column.dtype)
        for place, rows in enumerate(groups):
            columns[list(rows), place] = column[list(rows)]
        yield columns


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


def take_apart(mixtures: Tensor, ways: Sequence[Shares], *, exact: bool, bounded: bool = True) -> Parts:
    """The examples in mixtures (n, ...) given in [0, 1]; MixturesRefused where there is no way back.

    ``exact``: the mixtures are, to rounding, so that parts outside of [0, 1] refute a way. ``bounded``: examples lie
    in [0, 1] at all.

    >>> examples = torch.tensor([[[[0.0, 0.0, 1.0]]], [[[0.2, 0.2, 0.2]]]]).double()
    >>> shares = Shares(torch.tensor([[0.7, 0.3], [0.4, 0.6]]).double(), torch.tensor([0, 1]))
    >>> found = take_apart((shares.matrix @ examples.flatten(1)).reshape(2, 1, 1, 3), [shares], exact=True)
    >>> found.forced, bool((found.pictures - examples).abs().max() < 1e-9)
    (True, True)
    """
    usable = [way for way in ways if way.growth <= MOST_GROWTH]
    if not usable:
        raise MixturesRefused("the shares do not determine the examples: their matrix is singular, or nearly so")
    tried = [(way, way.parts(mixtures)) for way in usable]
    if exact and bounded:
        tried = [(way, parts) for way, parts in tried if outside(parts) <= OUTSIDE]
        if not tried:
            raise MixturesRefused("no division of the classes gives examples within their bounds")
    scores = [_strangeness(parts, bounded) for _, parts in tried]
    way, parts = tried[scores.index(min(scores))]
    # A way that was left out because nothing follows from it is not refuted.
    forced = len(tried) == 1 and len(usable) == len(ways) and way.certain
    return Parts(parts.clamp(0, 1) if bounded else parts, way, forced)


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
