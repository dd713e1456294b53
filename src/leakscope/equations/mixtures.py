"""MixUp undone: the shares of each class in the mixtures of a batch, and from these the examples themselves.

MixUp trains on weighted means of examples, whose targets are the same means of one-hot labels. Of the equations of a
head (equations/head_system.py) those remain that need no target: a class that no example has is in no mixture, so that
there the output gradient is the softmax itself. With n mixtures and C classes these are n (C - n) equations, and n more
of the bias gradient, for n^2 unknowns; that no target and, behind a ReLU, no feature is negative tells the rest. Which
classes are present is tried, those with the lowest bias gradient first. The certificate is that in every mixture no
more classes than it has examples have a share, to the rounding of the gradient.

The n mixtures of n examples are then n equations for n unknown pictures, M x = mixtures, and M follows from the soft
labels: column by column where every example has a class of its own. Where examples share a class, its column is that of
their sum, and the ways to divide it are tried. A picture lies in its box, and a wrong way leaves rough traces of one
example in another. A mixture of two examples of one class is tried with a grid of shares. Where mixtures are not exact,
directions in which their errors would grow beyond the pictures are damped.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.head import HOPELESS, MOST_DEVIATIONS, SIGN_WEIGHT
from leakscope.equations.head_system import (
    REFUSED,
    SPREADS,
    STARTS,
    STEPS,
    Equations,
    HeadProblem,
    HeadSolution,
    HeadSystem,
    least_squares,
)

#: How many more classes than mixtures the tried sets of classes are made of.
MORE_CLASSES = 5
#: Shares below this are none, and above one minus it, all; those that a client draws are larger by far.
NO_SHARE = 1e-3
#: Ways to divide the classes that are tried.
MOST_WAYS = 2000
#: The largest factor by which errors of mixtures may grow in their parts: what is no share would fill the range.
MOST_GROWTH = 1 / NO_SHARE
#: What parts may stick out of their box, root mean square, where shares are known (20 times as much with shares of the
#: grid); mixtures with a smaller error can refute a way.
OUTSIDE = NO_SHARE
#: The shares of two examples of one class that are tried.
GRID = tuple(place / 40 for place in range(4, 37))


def solve_mixed_head(
    problem: HeadProblem, *, images: int, present: Tensor | None = None, generator: torch.Generator | None = None
) -> HeadSolution:
    """Solve for features, output gradients and soft labels (n, C) of n mixtures of at most ``images`` examples.

    ``present``: the classes of the batch, where they are known.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, f = torch.randn((6, 9), generator=draws).double(), torch.rand((2, 9), generator=draws).double()
    >>> soft = torch.zeros(2, 6).double()
    >>> soft[0, 1], soft[0, 4], soft[1, 1], soft[1, 4] = 0.6, 0.4, 0.45, 0.55
    >>> signal = (torch.softmax(f @ weight.T, 1) - soft) / 2
    >>> facts = {"examples": 2, "nonnegative": True, "unit": 0.5, "scale": 1.0}
    >>> problem = HeadProblem(weight, None, signal.T @ f, signal.sum(0), **facts)
    >>> found = solve_mixed_head(problem, images=2)
    >>> found.exact, sorted([round(float(share), 6) for share in row[row > 0]] for row in found.labels)
    (True, [[0.45, 0.55], [0.6, 0.4]])
    """
    n, classes = problem.examples, len(problem.weight)
    if problem.sums is None or problem.scale is None:
        raise NotApplicable("soft labels of mixtures follow only from a head with a bias and a gradient of known scale")
    # Each mixture has C - images classes without a share: fewer equations than unknowns certify nothing.
    if n > (most := max(classes - images, 0)):
        raise NotApplicable(
            f"{n} mixtures of {images} examples and {classes} classes: at most {most} are told apart by their head"
        )
    problem.check_solvable()
    draws = generator or torch.Generator().manual_seed(0)
    choices, nearest = list(_choices(problem, present)), math.inf
    # A set of classes gets another start before sets that come four places later get their first.
    order = sorted(itertools.product(range(STARTS), range(len(choices))), key=lambda pair: 4 * pair[0] + pair[1])
    for number, place in order[: problem.starts]:
        found, explained = _from_start(problem, choices[place], images, number, draws)
        if found is not None and explained:
            return found
        nearest = nearest if found is None else min(nearest, found.residual)
    told = f"; the nearest leave {nearest:.1e} of it" if math.isfinite(nearest) else ""
    raise NotApplicable(f"no {problem.examples} mixtures of {images} examples explain the head's gradient{told}")


def _choices(problem: HeadProblem, present: Tensor | None) -> Iterator[Tensor]:
    """Yield sets of classes that may be in the batch, the lowest bias gradients first."""
    if present is not None:
        yield present.unique().long().cpu()
        return
    assert problem.sums is not None
    likely = problem.sums.argsort()[: problem.examples + MORE_CLASSES]
    lowest = problem.sums[likely].tolist()
    sets = itertools.combinations(range(len(likely)), problem.examples)
    for chosen in sorted(sets, key=lambda chosen: sum(lowest[place] for place in chosen)):
        yield likely[list(chosen)]


def _from_start(
    problem: HeadProblem, classes: Tensor, images: int, number: int, generator: torch.Generator
) -> tuple[HeadSolution | None, bool]:
    n, width = problem.examples, len(problem.weight)
    system = problem.system(torch.zeros((n, width), dtype=torch.float64), 0)
    open_shares = torch.zeros((n, width), dtype=torch.bool)
    open_shares[:, classes] = True
    draws = torch.rand((n, len(classes)), generator=generator, dtype=torch.float64) ** 3
    shares = torch.zeros((n, width), dtype=torch.float64)
    shares[:, classes] = draws / draws.sum(1, keepdim=True)
    mean = problem.mean_softmax(shares, system.amplitude)
    assert mean is not None
    spread = SPREADS[number % len(SPREADS)]
    unknowns = replace(system, targets=shares).start(mean.clamp_min(1e-3), spread, generator)
    sign = SIGN_WEIGHT / system.features(unknowns).norm(dim=1) if problem.nonnegative else None
    even = torch.ones(n, dtype=torch.float64)
    unknowns, value = least_squares(_equations(system, open_shares, even, sign), unknowns, STEPS)
    if not value < HOPELESS:
        return None, False
    # With the classes of each mixture, there are more equations; they decide.
    largest = _shares(system, unknowns).topk(min(images, len(classes)), dim=1).indices
    open_shares = torch.zeros_like(open_shares).scatter_(1, largest, True)
    each, feature = system.deviations(unknowns)
    weighted = _equations(system, open_shares, 1 / each, 1 / feature if problem.nonnegative else None)
    unknowns, _ = least_squares(weighted, unknowns, STEPS)
    rest, _ = _equations(system, open_shares, 1 / system.deviations(unknowns)[0], None)(unknowns)
    if not bool(torch.isfinite(rest).all()):
        return None, False
    explained = float(rest.square().mean().sqrt()) < MOST_DEVIATIONS
    shares = _shares(system, unknowns)
    soft = torch.where(open_shares & (shares > NO_SHARE), shares, 0.0)
    found = problem.solution(system, unknowns, soft / soft.sum(1, keepdim=True).clamp_min(1e-300))
    note = "the batch is one of mixtures; their soft labels follow from the head"
    return replace(found, notes=(*found.notes, note)), explained and found.residual <= REFUSED


def _shares(system: HeadSystem, unknowns: Tensor) -> Tensor:
    """Return the targets (n, C): what the softmax has more than the output gradient."""
    return torch.softmax(system.logits(unknowns), 1) - system.output_gradients(unknowns) / system.factor(unknowns)


def _equations(system: HeadSystem, open_shares: Tensor, each: Tensor, feature: Tensor | None) -> Equations:
    """Return the head's equations without targets: shares that are not open are zero, open ones not negative."""
    whole, entries = system.signed(each, feature), open_shares.numel()

    def equations(unknowns: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        rest, derivative = whole(unknowns)
        counts = torch.ones_like(rest)
        # What is left is minus the share.
        counts[:entries] = (~open_shares | (rest[:entries].reshape(open_shares.shape) > 0)).flatten().to(rest)
        return rest * counts, lambda: derivative() * counts[:, None]

    return equations


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
        """Return the largest factor by which an error of the mixtures grows; infinite where M is singular."""
        smallest = float(torch.linalg.svdvals(self.matrix)[-1])
        return 1 / smallest if smallest > 1e-12 else float("inf")

    def parts(self, mixtures: Tensor, error: float = 0.0) -> Tensor:
        """Solve for the examples by least squares about the mean of the mixtures, which have this ``error``."""
        flat = mixtures.double().flatten(1).cpu()
        mean = flat.mean(0)
        left, sizes, right = torch.linalg.svd(self.matrix)
        # Pictures spread about their mean by a quarter of their range.
        factors = sizes / (sizes.square() + (error / 0.25) ** 2)
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
    """Return all M that soft labels (n, C) of mixtures of ``images`` examples allow.

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
    """Yield ways to divide a class's shares into examples of two shares each: (n, examples), and whether all are known.

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
    """Yield all ways to make pairs.

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
    """Solve for the examples in mixtures (n, ...) given in [0, 1]; NotApplicable where there is no way back.

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
    if error < OUTSIDE and bounded:
        allowed = [max(OUTSIDE * (1 if way.certain else 20), error * way.growth) for way in usable]
        tried = [one for one, most in zip(tried, allowed, strict=True) if outside(one[1]) <= most]
        if not tried:
            raise NotApplicable("no division of the classes gives examples within their bounds")
    scores = [
        (outside(parts) if bounded else 0.0)
        + sum(float(parts.diff(dim=axis).abs().mean()) for axis in range(2, parts.dim()))
        for _, parts in tried
    ]
    way, parts = tried[scores.index(min(scores))]
    # A way that was left out because nothing follows from it is not refuted.
    forced = len(tried) == 1 and len(usable) == len(ways) and way.certain
    return Parts(parts.clamp(0, 1) if bounded else parts, way, forced)


def outside(pictures: Tensor) -> float:
    """Return the root mean square by which values stick out of [0, 1].

    >>> outside(torch.tensor([0.5, 1.0, -0.2, 1.2]))
    0.1414...
    """
    return float((pictures - pictures.clamp(0, 1)).double().square().mean().sqrt())
