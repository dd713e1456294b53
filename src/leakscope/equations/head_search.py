"""The search for the solution of a head's equations: starts, choices of labels, and what makes a solution one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from leakscope.equations.head_solution import (
    EXACT_FEATURES,
    REFUSED,
    USELESS_FEATURES,
    HeadRefused,
    HeadSolution,
    exact_residual,
)
from leakscope.equations.head_system import HeadSystem, least_squares

#: Features behind a ReLU are not negative; a larger share of negative ones (L1) shows that they are wrong.
NEGATIVE_SHARE = 1e-4
#: The smallest singular value of G that still carries an example: relative to the largest, and to that of noise.
LEAST_RANK, LEAST_SIGNAL = 1e-7, 3.0
#: Starts for known labels, choices of unknown ones, and starts for all of these together.
STARTS, READINGS, STARTS_IN_ALL = 12, 20, 64
#: Spread of the logits about their mean at which searches start.
SPREADS = (0.1, 1.0, 2.0, 3.0)
#: Steps of a search, and of each of the refinements with the weights that noise gives.
STEPS, REFINING_STEPS, REFINEMENTS = 60, 40, 2
#: Weight of a negative feature, relative to the features' norm, while searching.
SIGN_WEIGHT = 10.0
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
    def relative_noise(self) -> float:
        return self.noise * math.sqrt(self.observed.numel()) / float(self.observed.norm())

    def check_rank(self) -> None:
        sizes, n = self.sizes, self.examples
        last = float(sizes[n - 1] / sizes[0]) if len(sizes) >= n else 0.0
        noise = self.noise * math.sqrt(self.observed.shape[1]) / float(sizes[0])
        if last < max(LEAST_RANK, LEAST_SIGNAL * noise):
            raise HeadRefused(
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


def search(problem: HeadProblem, choices: Sequence[Tensor], generator: torch.Generator) -> HeadSolution:
    """A few starts for every choice of labels, then more; the first solution that noise explains is taken."""
    best: HeadSolution | None = None
    rounds = (range(STARTS),) if len(choices) == 1 else (range(2), range(2, 4), range(4, STARTS))
    tried = 0
    for numbers in rounds:
        for labels in choices:
            for number in numbers if tried < STARTS_IN_ALL and problem.possible(labels) else ():
                tried += 1
                found, explained = _from_start(problem, labels, number, generator)
                if found is not None and (best is None or found.residual < best.residual):
                    best = found
                if found is not None and explained:
                    return _checked(problem, found)
    if best is None:
        raise HeadRefused(f"no labels of {problem.examples} examples explain the head's bias gradient")
    raise HeadRefused(
        f"no {problem.examples} examples explain the head's gradient: the nearest leave {best.residual:.1e} of it. The "
        "update was pruned or altered, is that of several steps, or the labels are others"
    )


def _checked(problem: HeadProblem, found: HeadSolution) -> HeadSolution:
    if found.residual > REFUSED:
        raise HeadRefused(
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
    for _ in range(REFINEMENTS):
        if not math.isfinite(value):
            return None, False
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


def label_choices(problem: HeadProblem, readings: Sequence[Tensor]) -> list[Tensor]:
    """The readings, then those that differ from them in one label, then in two; each once, ascending."""
    return list(islice(_choices(problem, readings), READINGS))


def _choices(problem: HeadProblem, readings: Sequence[Tensor]) -> Iterator[Tensor]:
    seen: set[tuple[int, ...]] = set()
    level = [tuple(sorted(int(label) for label in reading)) for reading in readings] or [_first_reading(problem)]
    while level:
        further: list[tuple[int, ...]] = []
        for labels in level:
            if labels in seen:
                continue
            seen.add(labels)
            if problem.possible(torch.tensor(labels)):
                yield torch.tensor(labels)
            further += _exchanged(labels, len(problem.weight))
        level = sorted(set(further) - seen, key=lambda labels: _surprise(problem, labels))


def _exchanged(labels: tuple[int, ...], classes: int) -> list[tuple[int, ...]]:
    places = [place for place in range(len(labels)) if labels.index(labels[place]) == place]
    return [
        tuple(sorted((*labels[:place], label, *labels[place + 1 :]))) for place in places for label in range(classes)
    ]


def _first_reading(problem: HeadProblem) -> tuple[int, ...]:
    """Without any reading: one by one the class whose entry is most negative."""
    entries = (problem.observed.sum(1) if problem.sums is None else problem.sums).clone()
    entries = entries / (problem.unit * entries.abs().max() if problem.scale is None else problem.amplitude)
    labels = []
    for _ in range(problem.examples):
        labels.append(int(entries.argmin()))
        entries[labels[-1]] += 1 - 1 / len(entries)
    return tuple(sorted(labels))


def _surprise(problem: HeadProblem, labels: tuple[int, ...]) -> float:
    """How uneven the mean softmax is that the labels call for: the more even, the likelier."""
    mean = problem.mean_softmax(problem.targets(torch.tensor(labels)), problem.amplitude)
    return 0.0 if mean is None else float((mean * mean.clamp_min(1e-9).log()).sum() - 1e3 * mean.clamp(max=0).sum())
