"""Head first: each example's features and output gradients from the gradient of the last linear layer alone; float64.

One example behind a head with a bias is closed form for any loss: the bias gradient is the output gradient delta, and
f = delta'G / |delta|^2. A batch of n < C examples under cross-entropy is a small nonlinear system
(equations/head_system.py). Either way the features must give, through the head's own weights, the output gradients that
were found with them. That is the certificate: what remains of it says whether the solution is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from leakscope.equations.head_system import ROUNDING, STEPS, HeadSystem, least_squares
from leakscope.equations.last_layer import softmax_signals
from leakscope.network.activations import Activation

#: Residuals up to this are those of rounding; above the other, the update is not the gradient of such a batch.
EXACT, REFUSED = 1e-6, 0.1
#: Expected relative error of the features up to which they count as exact.
EXACT_FEATURES = 1e-3
#: The smallest singular value of G, relative to its largest, that still carries an example.
LEAST_RANK = 1e-6
#: Features behind a ReLU are not negative; a larger share of negative ones (L1) shows that they are wrong.
NEGATIVE_SHARE = 1e-4
#: Starts for one choice of labels, and choices of labels.
STARTS, READINGS = 12, 20
#: Larger batches would take minutes.
MOST_EXAMPLES = 50
#: Spread of the logits about their mean at which searches start.
SPREADS = (0.1, 1.0, 2.0, 3.0)


class HeadRefused(ValueError):
    """The last layer's gradient does not give the examples away; the text says what was seen instead."""


@dataclass(frozen=True, eq=False)
class HeadSolution:
    """What the head's gradient says of each of n examples, in the order of ``labels``.

    ``output_gradients`` (n, C): each example's share of the gradient at the logits; they add up to the bias gradient,
    so that the 1/n of a mean is inside. ``features`` (n, d): the head's inputs, None where only the output gradients
    follow. ``labels`` and ``losses`` (n,), None for a loss that is not cross-entropy. ``residual`` is the certificate:
    the largest relative gap between what was observed and what the solution gives. ``error``: the relative error of the
    features to be expected from the gradient's rounding or noise. ``exact``: the residual is that of rounding.
    ``scale``: what the gradient was multiplied by.
    """

    output_gradients: Tensor
    features: Tensor | None
    labels: Tensor | None
    losses: Tensor | None
    residual: float
    error: float
    exact: bool
    scale: float = 1.0
    notes: tuple[str, ...] = ()


def solve_head(
    weight: Tensor,
    bias: Tensor | None,
    weight_gradient: Tensor,
    bias_gradient: Tensor | None,
    *,
    examples: int,
    labels: Tensor | None = None,
    readings: Sequence[Tensor] = (),
    nonnegative: bool = False,
    reduction: str = "mean",
    scale: float | None = 1.0,
    cross_entropy: bool = True,
    generator: torch.Generator | None = None,
) -> HeadSolution:
    """Each example's features and output gradients, or :class:`HeadRefused`.

    ``labels`` (n,) where they are known; else those of ``readings``, likeliest first, and their neighbours are tried,
    and the residual decides. ``nonnegative``: the features come out of a ReLU. ``scale``: what the gradient was
    multiplied by, None where this is not known. Without ``cross_entropy`` nothing is known of the loss, and one example
    is solved.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, f = torch.randn((4, 6), generator=draws).double(), torch.rand((2, 6), generator=draws).double()
    >>> signal = (torch.softmax(f @ weight.T, 1) - torch.eye(4).double()[[1, 3]]) / 2
    >>> gradients, y = (signal.T @ f, signal.sum(0)), torch.tensor([1, 3])
    >>> solution = solve_head(weight, torch.zeros(4), *gradients, examples=2, labels=y)
    >>> solution.exact, bool((solution.features - f).norm() < 1e-6 * f.norm())
    (True, True)
    """
    weight, observed = weight.detach().double().cpu(), weight_gradient.detach().double().cpu()
    shift = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.detach().double().cpu()
    sums = None if bias_gradient is None else bias_gradient.detach().double().cpu()
    _check(observed, sums, examples, cross_entropy)
    if not bool(observed.any()):
        raise HeadRefused("the head's gradient is zero throughout: it says nothing of the examples")
    if examples == 1 and sums is not None and bool(sums.any()):
        return _one_example(weight, shift, observed, sums, scale, cross_entropy and len(weight) > 1)
    problem = _Problem(weight, shift, observed, sums, examples, nonnegative, reduction, scale)
    if examples == 1 and scale is not None and sums is None:
        return _one_without_bias(problem, labels)
    problem.check_rank()
    choices = [labels.detach().cpu()] if labels is not None else list(islice(_choices(problem, readings), READINGS))
    return _search(problem, choices, generator or torch.Generator().manual_seed(0))


def _check(observed: Tensor, sums: Tensor | None, examples: int, cross_entropy: bool) -> None:
    classes = len(observed)
    if not bool(torch.isfinite(observed).all()) or not (sums is None or bool(torch.isfinite(sums).all())):
        raise HeadRefused("the head's gradient holds NaN or infinite entries")
    if examples == 1 and sums is not None:
        return
    if not cross_entropy or classes == 1:
        raise HeadRefused(
            f"{examples} example(s) behind a head {'without' if sums is None else 'with'} a bias, and a loss that is "
            "not cross-entropy over several classes: only one example behind a bias is closed form there"
        )
    most = classes - (1 if sums is not None else 2)
    if examples > most:
        raise HeadRefused(
            f"{examples} examples and {classes} classes: the head's gradient has {classes} rows that add up to zero, "
            f"so it determines at most {most} examples"
        )
    if examples > MOST_EXAMPLES:
        raise HeadRefused(f"{examples} examples: the system is solved for at most {MOST_EXAMPLES}")


def _one_example(
    weight: Tensor, bias: Tensor, observed: Tensor, delta: Tensor, scale: float | None, cross_entropy: bool
) -> HeadSolution:
    size = delta.square().sum()
    features = delta @ observed / size
    rank_one = float((observed - torch.outer(delta, features)).norm() / observed.norm())
    if rank_one > REFUSED:
        raise HeadRefused(
            f"the head's gradient is not that of one example: {rank_one:.1e} of it is missing from the nearest matrix "
            "of rank one with its bias gradient"
        )
    noise = float((observed - torch.outer(delta, features)).square().mean().sqrt())
    error = noise * math.sqrt(len(features)) / float(size.sqrt() * features.norm().clamp_min(1e-300))
    if cross_entropy:
        label = int(delta.argmin())
        logits = weight @ features + bias
        signal = torch.softmax(logits, 0)
        signal[label] = -(signal.sum() - signal[label])  # 1 - p without cancellation
        factor = float(delta.norm() / signal.norm()) if scale is None else scale
        gap = float((signal - delta / factor).norm() / (delta / factor).norm())
        if gap <= REFUSED:
            residual = max(gap, rank_one)
            return HeadSolution(
                output_gradients=delta[None],
                features=features[None],
                labels=torch.tensor([label]),
                losses=(torch.logsumexp(logits, 0) - logits[label])[None],
                residual=residual,
                error=error,
                exact=residual <= _rounding_of(float(signal.norm()), 1),
                scale=factor,
            )
        note = f"softmax minus a hard label does not give this output gradient (off by {gap:.1e}): soft labels?"
        if scale is not None:
            note += " Or the gradient was scaled."
    else:
        note = "the loss is not cross-entropy over classes"
    note += " The certificate is that the weight gradient has rank one."
    return HeadSolution(
        output_gradients=delta[None],
        features=features[None],
        labels=None,
        losses=None,
        residual=rank_one,
        error=error,
        exact=rank_one <= EXACT,
        scale=1.0 if scale is None else scale,
        notes=(note,),
    )


def _one_without_bias(problem: _Problem, labels: Tensor | None) -> HeadSolution:
    known = None if labels is None else (int(labels[0]),)
    scale = problem.amplitude
    gradient = (problem.observed / scale).numpy()
    best = softmax_signals(problem.weight.numpy(), problem.bias.numpy(), gradient, known, Activation("identity"))[0]
    delta = torch.from_numpy(best.signal) * scale
    features = delta @ problem.observed / delta.square().sum()
    rank_one = float((problem.observed - torch.outer(delta, features)).norm() / problem.observed.norm())
    residual = max(best.mismatch, rank_one)
    if residual > REFUSED:
        raise HeadRefused(f"no example explains the head's gradient: the nearest leaves {residual:.1e} of it")
    logits = problem.weight @ features + problem.bias
    return HeadSolution(
        output_gradients=delta[None],
        features=features[None],
        labels=torch.tensor([best.label]),
        losses=(torch.logsumexp(logits, 0) - logits[best.label])[None],
        residual=residual,
        error=rank_one,
        exact=residual <= _rounding_of(float(delta.norm() / scale), 1),
        scale=scale,
    )


def _rounding_of(signal: float, examples: int) -> float:
    """The residual that single precision leaves: softmax minus one is rounded to its last digits, however small."""
    return max(EXACT, 20 * ROUNDING * math.sqrt(examples) / max(signal, 1e-300))


class _Problem:
    """The observed gradients, their singular values, and the system for a choice of labels."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        observed: Tensor,
        sums: Tensor | None,
        examples: int,
        nonnegative: bool,
        reduction: str,
        scale: float | None,
    ) -> None:
        self.weight, self.bias, self.observed, self.sums = weight, bias, observed, sums
        self.examples, self.nonnegative, self.scale = examples, nonnegative, scale
        self.amplitude = (1.0 if scale is None else scale) / (examples if reduction == "mean" else 1)
        self.unit = self.amplitude / (1.0 if scale is None else scale)
        self.left, self.sizes, self.right = torch.linalg.svd(observed, full_matrices=False)
        spare = self.sizes[examples:]
        entries = len(spare) * observed.shape[1]
        # What exceeds the rank is noise: of a defence, or of rounding.
        self.noise = float(spare.square().sum() / entries) ** 0.5 if entries else 0.0

    def check_rank(self) -> None:
        sizes, n = self.sizes, self.examples
        if len(sizes) < n or float(sizes[n - 1] / sizes[0]) < LEAST_RANK:
            share = float(sizes[n - 1] / sizes[0]) if len(sizes) >= n else 0.0
            raise HeadRefused(
                f"the head's gradient shows fewer than {n} examples: its singular value number {n} is {share:.1e} of "
                "the largest. Two examples are alike, or one is too sure to leave a trace"
            )
        floor = self.noise * math.sqrt(self.observed.shape[1])
        if float(sizes[n - 1]) < floor:
            share = floor / float(sizes[0])
            raise HeadRefused(
                f"the head's gradient shows fewer than {n} examples above its noise, which is {share:.1e} of it"
            )

    def mean_softmax(self, onehot: Tensor, amplitude: float) -> Tensor | None:
        """It follows from the bias gradient and the label counts."""
        return None if self.sums is None else self.sums / (amplitude * self.examples) + onehot.mean(0)

    def possible(self, labels: Tensor) -> bool:
        """Whether the mean softmax that these labels call for is one."""
        if self.scale is None or self.sums is None:
            return True
        mean = self.mean_softmax(self.onehot(labels), self.amplitude)
        slack = 1e-5 + 5 * self.noise * math.sqrt(self.observed.shape[1]) / float(self.sizes[0])
        return mean is not None and bool((mean > -slack).all())

    def onehot(self, labels: Tensor) -> Tensor:
        """The targets (n, C); soft labels are targets already."""
        if labels.is_floating_point():
            return labels.double()
        return torch.nn.functional.one_hot(labels.long(), len(self.weight)).double()

    def system(self, labels: Tensor, amplitude: float) -> HeadSystem:
        n = self.examples
        left = self.left[:, :n]
        return HeadSystem(
            left=left,
            sizes=self.sizes[:n],
            right=self.right[:n],
            weight=self.weight,
            bias=self.bias,
            onehot=self.onehot(labels),
            sums=None if self.sums is None else left.T @ self.sums,
            amplitude=amplitude,
            free_scale=self.scale is None,
            noise=self.noise,
        )

    def least_amplitude(self, onehot: Tensor) -> float:
        """No class may have a negative mean softmax."""
        if self.sums is None:
            return float(self.sizes[0] / self.weight.norm(dim=0).mean().clamp_min(1e-6))
        counts = onehot.sum(0)
        return float((-self.sums / counts.clamp_min(1e-9))[counts > 0].max().clamp_min(1e-300))


def _search(problem: _Problem, choices: Sequence[Tensor], generator: torch.Generator) -> HeadSolution:
    """A few starts for every choice of labels, then the rest; the first solution down to rounding is taken."""
    best: HeadSolution | None = None
    rounds = (range(STARTS),) if len(choices) == 1 else (range(2), range(2, STARTS))
    for numbers in rounds:
        for labels in choices:
            if not problem.possible(labels):
                continue
            for number in numbers:
                found = _from_start(problem, labels, number, generator)
                if found is not None and (best is None or found.residual < best.residual):
                    best = found
                if best is not None and best.exact and best.features is not None:
                    return best
    if best is None:
        raise HeadRefused("no labels explain the head's gradient: its bias gradient is none of so many examples")
    if best.residual > REFUSED:
        raise HeadRefused(
            f"no {problem.examples} examples explain the head's gradient: the nearest leave {best.residual:.1e} of it. "
            "The update was pruned or altered, or is that of several steps"
        )
    return best


def _from_start(problem: _Problem, labels: Tensor, number: int, generator: torch.Generator) -> HeadSolution | None:
    onehot, amplitude = problem.onehot(labels), problem.amplitude
    if problem.scale is None:
        amplitude = (
            problem.least_amplitude(onehot) * (len(problem.weight) / (len(problem.weight) - 1)) * 1.5 ** (number % 4)
        )
    mean = problem.mean_softmax(onehot, amplitude)
    mean = torch.softmax(problem.bias, 0) if mean is None else mean
    spread = SPREADS[number % len(SPREADS)]
    logits = spread * torch.randn(onehot.shape, generator=generator, dtype=torch.float64)
    for _ in range(5):
        logits = logits + torch.log(mean.clamp_min(1e-6)) - torch.log(torch.softmax(logits, 1).mean(0))
    system = problem.system(labels, amplitude)
    unknowns = system.start(amplitude * (torch.softmax(logits, 1) - onehot))
    unknowns, value = least_squares(system.equations, unknowns, STEPS)
    return _solution(problem, system, unknowns, labels) if math.isfinite(value) else None


def _solution(problem: _Problem, system: HeadSystem, unknowns: Tensor, labels: Tensor) -> HeadSolution:
    _, amplitude = system.split(unknowns)
    delta, features = system.output_gradients(unknowns), system.features(unknowns)
    logits = features @ problem.weight.T + problem.bias
    signal = torch.softmax(logits, 1) - system.onehot
    gaps = [
        (delta / amplitude - signal).norm() / signal.norm(),
        (delta.T @ features - problem.observed).norm() / problem.observed.norm(),
    ]
    if problem.sums is not None:
        gaps.append((delta.sum(0) - problem.sums).norm() / (amplitude * signal.norm()))
    residual = max(float(gap) for gap in gaps)
    exact = residual <= _rounding_of(float(signal.norm()), len(delta))
    losses = -(system.onehot * torch.log_softmax(logits, 1)).sum(1)
    negative = float(features.clamp(max=0).abs().sum() / features.abs().sum())
    notes: tuple[str, ...] = ()
    if problem.nonnegative and exact and negative > NEGATIVE_SHARE:
        notes = (f"{100 * negative:.2g} % of the features are negative, which a ReLU cannot give: they are left out",)
    return HeadSolution(
        output_gradients=delta,
        features=None if notes else features,
        labels=labels.argmax(1) if labels.is_floating_point() else labels,
        losses=losses,
        residual=residual,
        error=math.nan,
        exact=exact,
        scale=amplitude / problem.unit,
        notes=notes,
    )


def _choices(problem: _Problem, readings: Sequence[Tensor]) -> Iterator[Tensor]:
    """The readings, then those that differ from them in one label, then in two; each once, ascending."""
    seen: set[tuple[int, ...]] = set()
    level = [tuple(sorted(int(label) for label in reading)) for reading in readings] or [_first_reading(problem)]
    classes = range(len(problem.weight))
    while level:
        further: list[tuple[int, ...]] = []
        for labels in level:
            if labels not in seen:
                seen.add(labels)
                yield torch.tensor(labels)
                swaps = {
                    tuple(sorted((*labels[:place], label, *labels[place + 1 :])))
                    for place in range(len(labels))
                    for label in classes
                }
                possible = [swap for swap in swaps - seen if problem.possible(torch.tensor(swap))]
                further += sorted(possible, key=lambda swap: _surprise(problem, swap))
        level = further


def _first_reading(problem: _Problem) -> tuple[int, ...]:
    """Without any reading: class by class the one whose entry is most negative."""
    entries = (problem.observed.sum(1) if problem.sums is None else problem.sums).clone() / abs(problem.amplitude)
    labels = []
    for _ in range(problem.examples):
        label = int(entries.argmin())
        labels.append(label)
        entries[label] += 1 - 1 / len(entries)
    return tuple(sorted(labels))


def _surprise(problem: _Problem, labels: tuple[int, ...]) -> float:
    """How far the mean softmax that the labels call for is from even: the likelier choice comes first."""
    mean = problem.mean_softmax(problem.onehot(torch.tensor(labels)), problem.amplitude)
    return 0.0 if mean is None else float((mean * mean.clamp_min(1e-9).log()).sum())
