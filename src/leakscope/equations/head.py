"""Head first: each example's features and output gradients from the gradient of the last linear layer alone; float64.

One example behind a head with a bias is closed form for any loss: the bias gradient is the output gradient delta, and
f = delta'G / |delta|^2. A batch of n < C examples under cross-entropy is a small nonlinear system
(equations/head_system.py). Either way the certificate is that the features give, through the head's own weights, the
output gradients that were found with them.

Where entries of one example's G = delta f' were set to zero, the matrix of rank one is completed. Under cross-entropy
the example's own class has the largest |delta|, so that pruning by magnitude leaves its row longest. From that row,
with delta there from the bias gradient or from what the features give back, alternating least squares fill in all
numbers with an entry in their row or column. Of the others, delta is the softmax of the features, and f is left open.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.head_system import (
    EXACT,
    READINGS,
    REFUSED,
    SPREADS,
    STARTS,
    STEPS,
    HeadProblem,
    HeadSolution,
    exact_residual,
    least_squares,
)
from leakscope.equations.last_layer import softmax_signals
from leakscope.labels import certain_counts_from_bias, counts_to_labels
from leakscope.network.activations import Activation

#: Weight of a negative feature, relative to the features' norm, while searching.
SIGN_WEIGHT = 10.0
#: Sums of squares that are larger after the search are not refined: right labels leave 1e-14 to 2e-3, wrong ones 0.05.
HOPELESS = 0.03
#: A solution leaves no more than so many standard deviations of noise and rounding unexplained, root-mean-square.
MOST_DEVIATIONS = 10.0


def solve_head(
    problem: HeadProblem,
    *,
    labels: Tensor | None = None,
    readings: Sequence[Tensor] = (),
    cross_entropy: bool = True,
    generator: torch.Generator | None = None,
) -> HeadSolution:
    """Solve for each example's features and output gradients, or raise :class:`NotApplicable`.

    ``labels`` (n,) where they are known, or soft ones (n, C); else those of ``readings``, likeliest first, and their
    neighbours are tried, and the residual decides. Without ``cross_entropy`` only one example can be solved.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, f = torch.randn((4, 6), generator=draws).double(), torch.rand((2, 6), generator=draws).double()
    >>> signal = (torch.softmax(f @ weight.T, 1) - torch.eye(4).double()[[1, 3]]) / 2
    >>> facts = {"examples": 2, "nonnegative": False, "unit": 0.5, "scale": 1.0}
    >>> problem = HeadProblem(weight, None, signal.T @ f, signal.sum(0), **facts)
    >>> solution = solve_head(problem, labels=torch.tensor([1, 3]))
    >>> solution.exact, bool((solution.features - f).norm() < 1e-6 * f.norm())
    (True, True)
    """
    _check(problem, cross_entropy)
    soft = labels is not None and labels.is_floating_point()
    if problem.examples == 1 and (problem.sums is not None or (problem.scale is not None and not soft)):
        return _one_example(problem, labels, cross_entropy and len(problem.weight) > 1)
    problem.check_solvable()
    choices = label_choices(problem, readings) if labels is None else [labels.detach().cpu()]
    return _search(problem, filter(problem.possible, choices), generator or torch.Generator().manual_seed(0))


def _check(problem: HeadProblem, cross_entropy: bool) -> None:
    examples, classes, bias = problem.examples, len(problem.weight), problem.sums is not None
    if not bool(problem.observed.any()) or (problem.sums is not None and not bool(problem.sums.any())):
        raise NotApplicable("the head's gradient is zero throughout: it says nothing of the examples")
    if examples == 1 and bias:
        return
    if not cross_entropy or classes == 1:
        raise NotApplicable(
            f"{examples} example(s) behind a head {'with' if bias else 'without'} a bias, and a loss that is not "
            "cross-entropy over several classes: only one example behind a bias is closed form there"
        )
    most = classes - (1 if bias else 2)
    if examples > most:
        raise NotApplicable(
            f"{examples} examples and {classes} classes: the head's gradient has {classes} rows that add up to zero, "
            f"so that it determines at most {max(most, 0)} examples{'' if bias else ' without a bias'}"
        )


def _one_example(problem: HeadProblem, labels: Tensor | None, cross_entropy: bool) -> HeadSolution:
    """Solve in closed form; where no hard label explains delta, the rank of the weight gradient certifies it."""
    observed, chosen = problem.observed, None if labels is None else labels.detach().cpu()
    delta = problem.sums
    if delta is None:
        known, gradient = None if chosen is None else (int(chosen[0]),), (observed / problem.amplitude).numpy()
        weights = problem.weight.numpy(), problem.bias.numpy()
        best = softmax_signals(*weights, gradient, known, Activation("identity"))[0]
        delta, chosen = torch.from_numpy(best.signal) * problem.amplitude, torch.tensor([best.label])
    features = delta @ observed / delta.square().sum()
    gap = observed - torch.outer(delta, features)
    rank_one = float(gap.norm() / observed.norm())
    if rank_one > REFUSED:
        raise NotApplicable(
            f"the head's gradient is not that of one example: {rank_one:.1e} of it is missing from the matrix of rank "
            "one that its bias gradient calls for. The update was pruned or altered, or is that of several steps"
        )
    deviation = max(float(gap.square().mean().sqrt()), problem.noise)
    found = HeadSolution(
        output_gradients=delta[None],
        features=features[None],
        labels=None,
        losses=None,
        residual=rank_one,
        error=deviation * math.sqrt(len(features)) / float(delta.norm() * features.norm().clamp_min(1e-300)),
        exact=rank_one <= EXACT,
        scale=1.0 if problem.scale is None else problem.scale,
    )
    note = "the loss is not cross-entropy over classes"
    if cross_entropy:
        chosen = delta.argmin()[None] if chosen is None else chosen
        targets = problem.targets(chosen)[0]
        logits = problem.weight @ features + problem.bias
        signal = torch.softmax(logits, 0) - targets
        if not chosen.is_floating_point():
            signal[chosen[0]] = -(signal.sum() - signal[chosen[0]])  # 1 - p without cancellation
        scale = float(delta.norm() / signal.norm()) if problem.scale is None else problem.scale
        residual = max(rank_one, float((signal - delta / scale).norm() / (delta / scale).norm()))
        if residual <= REFUSED:
            return replace(
                found,
                labels=chosen.argmax(1) if chosen.is_floating_point() else chosen,
                losses=-(targets @ torch.log_softmax(logits, 0))[None],
                residual=residual,
                exact=residual <= exact_residual(float(signal.norm()), 1, problem.rounding),
                scale=scale,
            )
        if rank_one > EXACT or problem.sums is None:
            raise NotApplicable(
                f"no label explains the head's gradient: the nearest leaves {residual:.1e} of it. The update was "
                "altered, or is that of several steps"
            )
        note = f"no hard label explains the output gradient (off by {residual:.1e}): soft labels, or another scale"
    return replace(found, notes=(f"{note}; the certificate is that the weight gradient has rank one",))


def _search(problem: HeadProblem, choices: Iterable[Tensor], generator: torch.Generator) -> HeadSolution:
    """Try one start for every choice of labels, then more; return the first solution that noise explains."""
    nearest, kept = math.inf, list(islice(choices, READINGS))
    for number, labels in islice(product(range(STARTS), kept), problem.starts):
        found, explained = _from_start(problem, labels, number, generator)
        if found is not None and explained:
            if found.residual > REFUSED:
                raise NotApplicable(
                    f"the head's gradient is too noisy: the nearest examples leave {found.residual:.1e} of it"
                )
            return found
        nearest = nearest if found is None else min(nearest, found.residual)
    told = f"; the nearest leave {nearest:.1e} of it" if math.isfinite(nearest) else ""
    raise NotApplicable(
        f"no {problem.examples} examples explain the head's gradient{told}. The update was pruned or altered, is "
        "that of several steps, or the labels are others"
    )


def _from_start(
    problem: HeadProblem, labels: Tensor, number: int, generator: torch.Generator
) -> tuple[HeadSolution | None, bool]:
    """Return where the search from one start ends, and whether noise explains what is left."""
    system = problem.system(problem.targets(labels), number)
    mean = problem.mean_softmax(system.targets, system.amplitude)
    mean = torch.softmax(problem.bias, 0) if mean is None else mean.clamp_min(1e-6)
    unknowns = system.start(mean, SPREADS[number % len(SPREADS)], generator)
    each = torch.ones(problem.examples, dtype=torch.float64)
    weight = SIGN_WEIGHT / system.features(unknowns).norm(dim=1) if problem.nonnegative else None
    unknowns, value = least_squares(system.signed(each, weight), unknowns, STEPS)
    each, feature = system.deviations(unknowns)
    if not value < HOPELESS + 100 * len(problem.weight) * float(each.square().sum()):
        return None, False
    for _ in range(2):  # the second time with the deviations at the first one's end
        each, feature = system.deviations(unknowns)
        equations = system.signed(1 / each, 1 / feature if problem.nonnegative else None)
        unknowns, value = least_squares(equations, unknowns, STEPS)
    rest, _ = system.signed(1 / each, None)(unknowns)
    explained = float(rest.square().mean().sqrt()) < MOST_DEVIATIONS
    found = problem.solution(system, unknowns, system.targets)
    return replace(found, labels=labels.argmax(1) if labels.is_floating_point() else labels), explained


def label_choices(problem: HeadProblem, readings: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the readings, then those with one label exchanged, the likeliest first; each once, ascending."""
    classes = len(problem.weight)
    known = torch.stack([torch.bincount(reading.long(), minlength=classes) for reading in readings or [_read(problem)]])
    yield from (counts_to_labels(counts) for counts in known)
    unit = torch.eye(classes, dtype=known.dtype)
    exchanged = [one - unit[old] + unit[new] for one in known for old in one.nonzero()[:, 0] for new in range(classes)]
    others = torch.stack(exchanged).unique(dim=0)
    others = others[~(others[:, None] == known[None]).all(2).any(1)]
    uneven = torch.zeros(len(others), dtype=torch.float64)
    if problem.sums is not None:
        mean_sums = problem.sums / (problem.amplitude * problem.examples)
        unscaled = problem.scale is None
        certain = (mean_sums < 0).long() if unscaled else certain_counts_from_bias(mean_sums, problem.examples)
        if int(certain.sum()) <= problem.examples:  # else noise has made some of them negative
            others = others[(others >= certain).all(1)]
        mean = mean_sums + others / problem.examples
        uneven = (mean * mean.clamp_min(1e-9).log()).sum(1)
    # An even mean softmax is the likelier one.
    yield from (counts_to_labels(others[place]) for place in uneven.argsort())


def _read(problem: HeadProblem) -> Tensor:
    entries = (problem.observed.sum(1) if problem.sums is None else problem.sums).clone()
    entries = entries / (entries.abs().max() if problem.scale is None else problem.amplitude)
    labels = []
    for _ in range(problem.examples):
        labels.append(int(entries.argmin()))
        entries[labels[-1]] += 1 - 1 / len(entries)
    return torch.tensor(labels)


def complete_head(problem: HeadProblem, label: int | None = None) -> tuple[HeadSolution, Tensor]:
    """Solve for one example from what is left of the head's gradient; also return which features were seen.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, f = torch.randn((4, 40), generator=draws).double(), torch.rand(40, generator=draws).double()
    >>> delta = torch.softmax(weight @ f, 0) - torch.eye(4).double()[2]
    >>> gradient = torch.outer(delta, f)
    >>> pruned = torch.where(gradient.abs() > gradient.abs().quantile(0.8), gradient, 0.0)
    >>> sums = torch.where(delta.abs() == delta.abs().max(), delta, 0.0)
    >>> facts = {"examples": 1, "nonnegative": True, "unit": 1.0, "scale": 1.0}
    >>> found, seen = complete_head(HeadProblem(weight, None, pruned, sums, **facts))
    >>> int(found.labels), bool((found.features[0, seen] - f[seen]).abs().max() < 1e-9)
    (2, True)
    """
    observed, scale = problem.observed / problem.amplitude, problem.amplitude
    entries = observed != 0
    if not bool(entries.any()):
        raise NotApplicable("nothing is left of the head's gradient")
    chosen = int(observed.square().sum(1).argmax()) if label is None else label
    if not bool(entries[chosen].any()):
        raise NotApplicable(f"nothing is left of the row of class {chosen} in the head's gradient")
    own = 0.0 if problem.sums is None else float(problem.sums[chosen]) / scale
    if not own:  # no bias tells delta of the example's own class: it is the one that its features give back
        tried = -torch.logspace(-4, -1e-6, 400, dtype=torch.float64)  # from a sure model to a wrong one
        logits = (observed[chosen] / tried[:, None]) @ problem.weight.T + problem.bias
        back = torch.softmax(logits, 1)[:, chosen] - 1
        own = float(tried[(torch.log(-tried) - torch.log((-back).clamp_min(1e-12))).abs().argmin()])
    delta, features, seen = _alternate(observed, entries, chosen, own)
    # Classes of which nothing was seen take the softmax of the features; delta adds up to zero.
    missing = ~entries.any(1)
    missing[chosen] = False
    left = -delta[~missing].sum().clamp(max=0.0)
    share = torch.softmax(problem.weight @ features + problem.bias, 0) * missing
    signal = torch.where(missing, left * share / share.sum().clamp_min(1e-300), delta)
    residual = float((torch.outer(delta, features) * entries - observed).norm() / observed.norm())
    if residual > REFUSED:
        raise NotApplicable(
            f"what is left of the head's gradient is not of one example: {residual:.1e} of it is missing from the "
            "nearest matrix of rank one"
        )
    # What was not seen lies anywhere below the smallest entry that was.
    smallest = float(observed[entries].abs().min() / abs(own))
    solution = HeadSolution(
        output_gradients=scale * signal[None],
        features=features[None],
        labels=torch.tensor([chosen]),
        losses=-torch.log_softmax(problem.weight @ features + problem.bias, 0)[chosen][None],
        residual=residual,
        error=smallest * math.sqrt(int((~seen).sum()) / 3) / float(features.norm().clamp_min(1e-300)),
        exact=False,
        scale=scale,
        notes=(f"{int(seen.sum())} of {len(seen)} features of the head were seen; the others are small",),
    )
    return solution, seen


def _alternate(observed: Tensor, entries: Tensor, chosen: int, own: float) -> tuple[Tensor, Tensor, Tensor]:
    seen = entries.any(0)
    delta = torch.zeros(len(observed), dtype=torch.float64)
    delta[chosen] = own
    features = torch.where(entries[chosen], observed[chosen] / own, 0.0)
    for _ in range(STEPS):
        weights = entries * features.square()
        others = (observed * features).sum(1) / weights.sum(1).clamp_min(1e-300)
        delta = torch.where(weights.sum(1) > 0, others, delta)
        delta[chosen] = own  # fixes the scale, which a product leaves open
        weights = entries * delta.square()[:, None]
        features = torch.where(seen, (observed * delta[:, None]).sum(0) / weights.sum(0).clamp_min(1e-300), 0.0)
    return delta, features, seen
