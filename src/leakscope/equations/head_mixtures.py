"""The head of a batch of mixtures: each mixture's features, and the share that each class has in it, unknown before.

MixUp trains on weighted means of examples, whose targets are the same means of one-hot labels. Of the equations of a
head (equations/head_system.py) only those then remain that need no target: a class that no example has is in no
mixture, so that there the output gradient is the softmax itself. With n mixtures and C classes these are n (C - n)
equations, and n more of the bias gradient, for n^2 unknowns; that no target and, behind a ReLU, no feature is negative
tells the rest. Which classes are present is tried, the likeliest first: those whose bias gradient is lowest.

The certificate is one that wrong classes or an unmixed head do not meet: in every mixture no more classes than it has
examples have a share, all others none, to the rounding of the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.head_search import HOPELESS, MOST_DEVIATIONS, SIGN_WEIGHT, SPREADS, HeadProblem
from leakscope.equations.head_solution import EXACT_FEATURES, REFUSED, USELESS_FEATURES, HeadSolution, exact_residual
from leakscope.equations.head_system import Equations, HeadSystem, least_squares

#: Starts for each choice of classes, choices, and how many more classes than mixtures these are made of.
STARTS, CHOICES, MORE_CLASSES = 10, 40, 5
#: A choice gets another start before choices that come so many places later get their first.
HEAD_START = 4
#: Searches in all: at most the first, and fewer for many mixtures, each of whose steps takes some n^4 multiplications.
MOST_SEARCHES, SEARCHES_OF_ONE = 150, 2.5e5
#: Steps of a search, and of its refinement with the classes of each mixture known.
STEPS, REFINING_STEPS = 100, 60
#: Shares below this are none; those that a client draws are larger by far, or leave no trace.
LEAST_SHARE = 1e-3
#: More mixtures than this are not told apart in reasonable time.
MOST_MIXTURES = 16


def solve_mixed_head(
    problem: HeadProblem, *, images: int, present: Tensor | None = None, generator: torch.Generator | None = None
) -> HeadSolution:
    """Features, output gradients and soft labels (n, C) of each of n mixtures of at most ``images`` examples.

    ``present``: the classes of the batch, where they are known. NotApplicable where no such mixtures explain the head.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, f = torch.randn((6, 9), generator=draws).double(), torch.rand((2, 9), generator=draws).double()
    >>> soft = torch.zeros(2, 6).double()
    >>> soft[0, 1], soft[0, 4], soft[1, 1], soft[1, 4] = 0.6, 0.4, 0.45, 0.55
    >>> signal = (torch.softmax(f @ weight.T, 1) - soft) / 2
    >>> facts = {"examples": 2, "nonnegative": True, "unit": 0.5, "scale": 1.0, "rounding": 1e-16}
    >>> problem = HeadProblem(weight, torch.zeros(6).double(), signal.T @ f, signal.sum(0), **facts)
    >>> found = solve_mixed_head(problem, images=2)
    >>> found.exact, sorted([round(float(share), 6) for share in row[row > 0]] for row in found.labels)
    (True, [[0.45, 0.55], [0.6, 0.4]])
    """
    _check(problem, images)
    draws = torch.Generator().manual_seed(0) if generator is None else generator
    choices = list(_choices(problem, present))
    best: HeadSolution | None = None
    searches = min(MOST_SEARCHES, int(SEARCHES_OF_ONE / problem.examples**4))
    order = sorted(
        itertools.product(range(STARTS), range(len(choices))), key=lambda pair: HEAD_START * pair[0] + pair[1]
    )
    for number, place in order[:searches]:
        found, explained = _from_start(problem, choices[place], images, number, draws)
        if found is not None and explained:
            return found
        if found is not None and (best is None or found.residual < best.residual):
            best = found
    nearest = "" if best is None else f"; the nearest leave {best.residual:.1e} of it"
    raise NotApplicable(f"no {problem.examples} mixtures of {images} examples explain the head's gradient{nearest}")


def _check(problem: HeadProblem, images: int) -> None:
    n, classes = problem.examples, len(problem.weight)
    if problem.sums is None or problem.scale is None:
        raise NotApplicable("soft labels of mixtures follow only from a head with a bias and a gradient of known scale")
    # Each mixture has C - images classes without a share: fewer equations than unknowns certify nothing.
    most = min(max(classes - images, 0), MOST_MIXTURES)
    if n > most:
        raise NotApplicable(
            f"{n} mixtures of {images} examples and {classes} classes: at most {most} are told apart by their head"
        )
    problem.check_rank()


def _choices(problem: HeadProblem, present: Tensor | None) -> Iterator[Tensor]:
    """Classes that may be in the batch, one set a mixture or more than are there; the lowest bias gradients first."""
    if present is not None:
        yield present.unique().long().cpu()
        return
    assert problem.sums is not None
    sums, n = problem.sums, problem.examples
    likely = sums.argsort()[: n + MORE_CLASSES]
    lowest = [float(value) for value in sums[likely]]
    sets = sorted(
        itertools.combinations(range(len(likely)), n), key=lambda chosen: sum(lowest[place] for place in chosen)
    )
    yield from (likely[list(chosen)] for chosen in itertools.islice(sets, CHOICES))


def _from_start(
    problem: HeadProblem, classes: Tensor, images: int, number: int, generator: torch.Generator
) -> tuple[HeadSolution | None, bool]:
    """Where the search from one start ends, and whether noise and rounding explain what is left."""
    n, width = problem.examples, len(problem.weight)
    system = problem.system(torch.zeros((n, width), dtype=torch.float64), 0)
    open_shares = torch.zeros((n, width), dtype=torch.bool)
    open_shares[:, classes] = True
    unknowns = _start(problem, system, classes, number, generator)
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
    unknowns, _ = least_squares(weighted, unknowns, REFINING_STEPS)
    rest, _ = _equations(system, open_shares, 1 / system.deviations(unknowns)[0], None)(unknowns)
    if not bool(torch.isfinite(rest).all()):
        return None, False
    explained = float(rest.square().mean().sqrt()) < MOST_DEVIATIONS
    found = _solution(problem, system, unknowns, open_shares)
    return found, explained and found.residual <= REFUSED


def _start(
    problem: HeadProblem, system: HeadSystem, classes: Tensor, number: int, generator: torch.Generator
) -> Tensor:
    """Unknowns of random shares of these classes and random logits whose mean softmax the bias gradient calls for."""
    n, width = problem.examples, len(problem.weight)
    draws = torch.rand((n, len(classes)), generator=generator, dtype=torch.float64) ** 3
    shares = torch.zeros((n, width), dtype=torch.float64)
    shares[:, classes] = draws / draws.sum(1, keepdim=True)
    mean = problem.mean_softmax(shares, system.amplitude)
    assert mean is not None
    logits = SPREADS[number % len(SPREADS)] * torch.randn((n, width), generator=generator, dtype=torch.float64)
    for _ in range(5):
        logits = logits + torch.log(mean.clamp_min(1e-3)) - torch.log(torch.softmax(logits, 1).mean(0))
    return system.start(system.amplitude * (torch.softmax(logits, 1) - shares))


def _shares(system: HeadSystem, unknowns: Tensor) -> Tensor:
    """What the softmax has more than the output gradient: the targets (n, C)."""
    softmax = torch.softmax(system.features(unknowns) @ system.weight.T + system.bias, 1)
    return softmax - system.output_gradients(unknowns) / system.factor(unknowns)


def _equations(system: HeadSystem, open_shares: Tensor, each: Tensor, feature: Tensor | None) -> Equations:
    """Those of the head without targets: shares that are not open are zero, open ones not negative."""
    whole, entries = system.signed(each, feature), open_shares.numel()

    def equations(unknowns: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        rest, derivative = whole(unknowns)
        counts = torch.ones_like(rest)
        # What is left is minus the share.
        counts[:entries] = (~open_shares | (rest[:entries].reshape(open_shares.shape) > 0)).flatten().to(rest)
        return rest * counts, lambda: derivative() * counts[:, None]

    return equations


def _solution(problem: HeadProblem, system: HeadSystem, unknowns: Tensor, open_shares: Tensor) -> HeadSolution:
    shares = _shares(system, unknowns)
    soft = torch.where(open_shares & (shares > LEAST_SHARE), shares, 0.0)
    soft = soft / soft.sum(1, keepdim=True).clamp_min(1e-300)
    delta, features = system.output_gradients(unknowns), system.features(unknowns)
    logits = features @ problem.weight.T + problem.bias
    size = (torch.softmax(logits, 1) - soft).norm()
    gaps = [(shares - soft).norm() / size]
    gaps.append((delta.T @ features - problem.observed).norm() / problem.observed.norm())
    assert problem.sums is not None
    gaps.append((delta.sum(0) - problem.sums).norm() / (system.amplitude * size))
    residual = max(float(gap) for gap in gaps)
    error = system.expected_error(unknowns, problem.nonnegative)
    return HeadSolution(
        output_gradients=delta,
        features=None if error > USELESS_FEATURES else features,
        labels=soft,
        losses=-(soft * torch.log_softmax(logits, 1)).sum(1),
        residual=residual,
        error=error,
        exact=residual <= exact_residual(float(size), len(delta), problem.rounding) and error <= EXACT_FEATURES,
        scale=1.0 if problem.scale is None else problem.scale,
        notes=("the batch is one of mixtures; their soft labels follow from the head",),
    )
