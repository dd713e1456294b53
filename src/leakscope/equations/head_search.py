"""The search for the solution of a head's equations: starts, choices of labels, and what makes a solution one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations_with_replacement, islice

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.head_solution import EXACT_FEATURES, REFUSED, USELESS_FEATURES, HeadSolution, exact_residual
from leakscope.equations.head_system import HeadSystem, least_squares
from leakscope.labels import certain_counts_from_bias, counts_to_labels

#: Features behind a ReLU are not negative; a larger share of negative ones (L1) shows that they are wrong.
NEGATIVE_SHARE = 1e-4
#: The smallest singular value of G that still carries an example: relative to the largest, and to that of noise.
LEAST_RANK, LEAST_SIGNAL = 1e-7, 3.0
#: Starts for one choice of labels, choices of unknown ones, and starts for all of these together.
STARTS, READINGS, STARTS_IN_ALL = 12, 24, 72
#: Multiplications of a whole search: about a minute.
WORK = 4e11
#: If the bias gradient allows more label counts than that, only neighbours of readings are tried.
MOST_COUNTS = 3000
#: Spread of the logits about their mean at which searches start.
SPREADS = (0.1, 1.0, 2.0, 3.0)
#: Steps of a search, and of each of the refinements with the weights that noise gives.
STEPS, REFINING_STEPS, REFINEMENTS = 60, 40, 2
#: Weight of a negative feature, relative to the features' norm, while searching.
SIGN_WEIGHT = 10.0
#: Sums of squares that are larger after the search are not refined: right labels leave 1e-14 to 2e-3, wrong ones 0.05.
HOPELESS = 0.03
#: A solution leaves no more than so many standard deviations of noise and rounding unexplained, root-mean-square.
MOST_DEVIATIONS = 10.0


class HeadProblem:
    """The observed gradients with their singular values; the same for every choice of labels."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        observed: Tensor,
        sums: Tensor | None,
        *,
        examples: int,
        nonnegative: bool,
        unit: float,
        scale: float | None,
        rounding: float,
    ) -> None:
        self.weight, self.bias, self.observed, self.sums = weight, bias, observed, sums
        self.examples, self.nonnegative, self.unit, self.scale = examples, nonnegative, unit, scale
        self.rounding = rounding
        self.amplitude = unit * (1.0 if scale is None else scale)
        self.left, self.sizes, self.right = torch.linalg.svd(observed, full_matrices=False)
        spare = self.sizes[examples:]
        entries = len(spare) * observed.shape[1]
        floor = rounding * float(observed.square().mean().sqrt())
        # What exceeds the rank is noise: of a defence, or of rounding.
        self.noise = max(floor, float(spare.square().sum() / entries) ** 0.5) if entries else floor

    @property
    def starts(self) -> int:
        """How many starts there is time for: a step factorises a matrix with n^2 columns."""
        n = self.examples
        return min(STARTS_IN_ALL, int(WORK / (STEPS * n**4 * (n * len(self.weight) + n * (n + 1)))))

    @property
    def relative_noise(self) -> float:
        return self.noise * math.sqrt(self.observed.numel()) / float(self.observed.norm())

    def check_rank(self) -> None:
        sizes, n = self.sizes, self.examples
        last = float(sizes[n - 1] / sizes[0]) if len(sizes) >= n else 0.0
        noise = self.noise * math.sqrt(self.observed.shape[1]) / float(sizes[0])
        if last < max(LEAST_RANK, LEAST_SIGNAL * noise):
            raise NotApplicable(
                f"the head's gradient does not show {n} examples: its singular value number {n} is {last:.1e} of the "
                f"largest, and its noise {noise:.1e}. Two examples are alike, one is too sure to leave a trace, or the "
                "noise is too strong"
            )

    def targets(self, labels: Tensor) -> Tensor:
        """One-hot (n, C); soft labels are targets already."""
        if labels.is_floating_point():
            return labels.double()
        return torch.nn.functional.one_hot(labels.long(), len(self.weight)).double()

    def mean_softmax(self, targets: Tensor, amplitude: float) -> Tensor | None:
        """It follows from the bias gradient and the label counts."""
        return None if self.sums is None else self.sums / (amplitude * self.examples) + targets.mean(0)

    def possible(self, labels: Tensor) -> bool:
        """Whether the mean softmax that these labels call for is one."""
        if self.scale is None:
            return True
        mean = self.mean_softmax(self.targets(labels), self.amplitude)
        return mean is None or bool((mean > -1e-5 - 5 * self.relative_noise).all())

    def system(self, labels: Tensor, number: int) -> HeadSystem:
        """The equations; an unknown amplitude starts somewhat above the least that the labels allow."""
        n, targets, amplitude = self.examples, self.targets(labels), self.amplitude
        left = self.left[:, :n]
        if self.scale is None:
            classes = len(self.weight)
            amplitude = self._least_amplitude(targets) * classes / (classes - 1) * 1.5 ** (number % 4)
        return HeadSystem(
            left=left,
            sizes=self.sizes[:n],
            right=self.right[:n],
            weight=self.weight,
            bias=self.bias,
            targets=targets,
            sums=None if self.sums is None else left.T @ self.sums,
            amplitude=amplitude,
            free_scale=self.scale is None,
            noise=self.noise,
            rounding=self.rounding,
        )

    def _least_amplitude(self, targets: Tensor) -> float:
        """No class may have a negative mean softmax; without a bias a guess from the sizes of gradient and weights."""
        if self.sums is None:
            return float(self.sizes[0]) / math.sqrt(self.examples * self.observed.shape[1])
        counts = targets.sum(0)
        return float((-self.sums / counts.clamp_min(1e-9))[counts > 0].max().clamp_min(1e-300))


def search(problem: HeadProblem, choices: Iterable[Tensor], generator: torch.Generator) -> HeadSolution:
    """One start for every choice of labels, then more; the first solution that noise explains is taken."""
    best: HeadSolution | None = None
    source, tried = iter(choices), 0
    kept: list[Tensor] = []
    for number in range(STARTS):
        for labels in islice(source, READINGS) if number == 0 else kept:
            if number == 0:
                kept.append(labels)
            if tried == problem.starts or not problem.possible(labels):
                continue
            tried += 1
            found, explained = _from_start(problem, labels, number, generator)
            if found is not None and explained:
                return _checked(problem, found)
            if found is not None and (best is None or found.residual < best.residual):
                best = found
    nearest = "" if best is None else f"; the nearest leave {best.residual:.1e} of it"
    raise NotApplicable(
        f"no {problem.examples} examples explain the head's gradient{nearest}. The update was pruned or altered, is "
        "that of several steps, or the labels are others"
    )


def _checked(problem: HeadProblem, found: HeadSolution) -> HeadSolution:
    if found.residual > REFUSED:
        raise NotApplicable(
            f"the head's gradient is too noisy: the nearest examples leave {found.residual:.1e} of it unexplained"
        )
    return found


def _from_start(
    problem: HeadProblem, labels: Tensor, number: int, generator: torch.Generator
) -> tuple[HeadSolution | None, bool]:
    """Where the search from one start ends, and whether noise explains what is left."""
    system, spread = problem.system(labels, number), SPREADS[number % len(SPREADS)]
    mean = problem.mean_softmax(system.targets, system.amplitude)
    mean = torch.softmax(problem.bias, 0) if mean is None else mean.clamp_min(1e-6)
    logits = spread * torch.randn(system.targets.shape, generator=generator, dtype=torch.float64)
    for _ in range(5):
        logits = logits + torch.log(mean) - torch.log(torch.softmax(logits, 1).mean(0))
    unknowns = system.start(system.amplitude * (torch.softmax(logits, 1) - system.targets))
    each = torch.ones(problem.examples, dtype=torch.float64)
    weight = SIGN_WEIGHT / system.features(unknowns).norm(dim=1) if problem.nonnegative else None
    unknowns, value = least_squares(system.signed(each, weight), unknowns, STEPS)
    each, feature = system.deviations(unknowns)
    if not value < HOPELESS + 100 * len(problem.weight) * float(each.square().sum()):
        return None, False
    for _ in range(REFINEMENTS):
        each, feature = system.deviations(unknowns)
        equations = system.signed(1 / each, 1 / feature if problem.nonnegative else None)
        unknowns, value = least_squares(equations, unknowns, REFINING_STEPS)
    rest, _ = system.signed(1 / each, None)(unknowns)
    explained = float(rest.square().mean().sqrt()) < MOST_DEVIATIONS
    return _solution(problem, system, unknowns, labels), explained


def _solution(problem: HeadProblem, system: HeadSystem, unknowns: Tensor, labels: Tensor) -> HeadSolution:
    amplitude = system.factor(unknowns)
    delta, features = system.output_gradients(unknowns), system.features(unknowns)
    logits = features @ problem.weight.T + problem.bias
    signal = torch.softmax(logits, 1) - system.targets
    size = signal.norm()
    gaps = [(delta / amplitude - signal).norm() / size]
    gaps.append((delta.T @ features - problem.observed).norm() / problem.observed.norm())
    if problem.sums is not None:
        gaps.append((delta.sum(0) - problem.sums).norm() / (amplitude * size))
    residual = max(float(gap) for gap in gaps)
    error = system.expected_error(unknowns, problem.nonnegative)
    exact = residual <= exact_residual(float(size), len(delta), problem.rounding) and error <= EXACT_FEATURES
    doubt = ""
    negative = float(features.clamp(max=0).abs().sum() / features.abs().sum())
    if problem.nonnegative and exact and negative > NEGATIVE_SHARE:
        doubt = f"{100 * negative:.2g} % of the features are negative, which a ReLU cannot give"
    elif error > USELESS_FEATURES:
        doubt = f"the features would be off by {100 * error:.0f} %, so badly are the examples told apart"
    return HeadSolution(
        output_gradients=delta,
        features=None if doubt else features,
        labels=labels.argmax(1) if labels.is_floating_point() else labels,
        losses=-(system.targets * torch.log_softmax(logits, 1)).sum(1),
        residual=residual,
        error=error,
        exact=exact,
        scale=amplitude / problem.unit,
        notes=(doubt,) if doubt else (),
    )


def label_choices(problem: HeadProblem, readings: Sequence[Tensor]) -> Iterator[Tensor]:
    """The readings, then what the bias gradient allows, nearest to a reading first; each once, ascending."""
    classes = len(problem.weight)
    known = torch.stack([torch.bincount(reading.long(), minlength=classes) for reading in readings or [_read(problem)]])
    yield from (counts_to_labels(counts) for counts in known)
    allowed = _allowed_counts(problem)
    if allowed is None:
        allowed = torch.cat([_exchanged(counts) for counts in known])
    allowed = allowed[~(allowed[:, None] == known[None]).all(2).any(1)]
    distance = (allowed[:, None] - known[None]).abs().sum(2).min(1).values if len(allowed) else allowed.sum(1)
    uneven = torch.zeros(len(allowed), dtype=torch.float64)
    if problem.sums is not None:
        mean = problem.sums / (problem.amplitude * problem.examples) + allowed / problem.examples
        uneven = (mean * mean.clamp_min(1e-9).log()).sum(1)
    # An even mean softmax is the likelier one.
    for place in (distance * 1e3 + uneven).argsort():
        yield counts_to_labels(allowed[place])


def _allowed_counts(problem: HeadProblem) -> Tensor | None:
    """All label counts that leave each class a positive mean softmax; None where they are too many or none."""
    if problem.sums is None:
        return None
    classes, n = len(problem.weight), problem.examples
    if problem.scale is None:
        certain = (problem.sums < 0).long()
    else:
        certain = certain_counts_from_bias(problem.sums / (problem.amplitude * n), n)
    free = n - int(certain.sum())
    if free < 0 or math.comb(free + classes - 1, free) > MOST_COUNTS:
        return None
    rows = [
        certain + torch.bincount(torch.tensor(added, dtype=torch.long), minlength=classes)
        for added in combinations_with_replacement(range(classes), free)
    ]
    return torch.stack(rows)


def _exchanged(counts: Tensor) -> Tensor:
    """All counts that differ in one label."""
    unit = torch.eye(len(counts), dtype=counts.dtype)
    rows = [counts - unit[old] + unit[new] for old in counts.nonzero()[:, 0] for new in range(len(counts))]
    return torch.stack(rows).unique(dim=0)


def _read(problem: HeadProblem) -> Tensor:
    """Without any reading: one by one the class whose entry is most negative."""
    entries = (problem.observed.sum(1) if problem.sums is None else problem.sums).clone()
    entries = entries / (entries.abs().max() if problem.scale is None else problem.amplitude)
    labels = []
    for _ in range(problem.examples):
        labels.append(int(entries.argmin()))
        entries[labels[-1]] += 1 - 1 / len(entries)
    return torch.tensor(labels)
