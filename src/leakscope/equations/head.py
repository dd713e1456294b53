"""Head first: each example's features and output gradients from the gradient of the last linear layer alone; float64.

One example behind a head with a bias is closed form for any loss: the bias gradient is the output gradient delta, and
f = delta'G / |delta|^2. A batch of n < C examples under cross-entropy is a small nonlinear system
(equations/head_system.py). Either way the features must give, through the head's own weights, the output gradients that
were found with them. That is the certificate: what remains of it says whether the solution is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.task import Reduction
from leakscope.equations.head_search import HeadProblem, label_choices, search
from leakscope.equations.head_solution import EXACT, REFUSED, HeadSolution, exact_residual
from leakscope.equations.last_layer import softmax_signals
from leakscope.network.activations import Activation


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
    reduction: Reduction = "mean",
    scale: float | None = 1.0,
    cross_entropy: bool = True,
    generator: torch.Generator | None = None,
) -> HeadSolution:
    """Each example's features and output gradients, or :class:`NotApplicable`.

    ``labels`` (n,) where they are known, or soft ones (n, C); else those of ``readings``, likeliest first, and their
    neighbours are tried, and the residual decides. ``nonnegative``: the features come out of a ReLU. ``scale``: what
    the gradient was multiplied by, None where this is not known. Without ``cross_entropy`` nothing is known of the
    loss, and only one example can be solved. ``generator`` draws the starts; without one a fixed seed is used.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, f = torch.randn((4, 6), generator=draws).double(), torch.rand((2, 6), generator=draws).double()
    >>> signal = (torch.softmax(f @ weight.T, 1) - torch.eye(4).double()[[1, 3]]) / 2
    >>> gradients, y = (signal.T @ f, signal.sum(0)), torch.tensor([1, 3])
    >>> solution = solve_head(weight, torch.zeros(4), *gradients, examples=2, labels=y)
    >>> solution.exact, bool((solution.features - f).norm() < 1e-6 * f.norm())
    (True, True)
    """
    problem = HeadProblem(
        _wide(weight),
        torch.zeros(len(weight), dtype=torch.float64) if bias is None else _wide(bias),
        _wide(weight_gradient),
        None if bias_gradient is None else _wide(bias_gradient),
        examples=examples,
        nonnegative=nonnegative,
        unit=1 / examples if reduction == "mean" else 1.0,
        scale=scale,
        rounding=torch.finfo(weight_gradient.dtype).eps / 4,
    )
    _check(problem, cross_entropy)
    if examples == 1 and problem.sums is not None:
        return _one_example(problem, labels, cross_entropy and len(weight) > 1)
    if examples == 1 and scale is not None and not (labels is not None and labels.is_floating_point()):
        return _one_without_bias(problem, labels)
    problem.check_rank()
    choices = label_choices(problem, readings) if labels is None else [labels.detach().cpu()]
    return search(problem, choices, generator or torch.Generator().manual_seed(0))


def _wide(value: Tensor) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise NotApplicable("the head or its gradient holds NaN or infinite entries")
    return value.detach().double().cpu()


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
    if not problem.starts:
        raise NotApplicable(
            f"{examples} examples of {classes} classes: solving the head's equations would take minutes"
        )


def _one_example(problem: HeadProblem, labels: Tensor | None, cross_entropy: bool) -> HeadSolution:
    """Closed form; where no hard label explains the output gradient, the rank of the weight gradient certifies it."""
    delta, observed = problem.sums, problem.observed
    assert delta is not None
    features = delta @ observed / delta.square().sum()
    gap = observed - torch.outer(delta, features)
    rank_one = float(gap.norm() / observed.norm())
    if rank_one > REFUSED:
        raise NotApplicable(
            f"the head's gradient is not that of one example: {rank_one:.1e} of it is missing from the matrix of rank "
            "one that its bias gradient calls for. The update was pruned or altered, or is that of several steps"
        )
    deviation = max(float(gap.square().mean().sqrt()), problem.noise)
    error = deviation * math.sqrt(len(features)) / float(delta.norm() * features.norm().clamp_min(1e-300))
    note = "the loss is not cross-entropy over classes"
    if cross_entropy:
        chosen = delta.argmin()[None] if labels is None else labels.detach().cpu()
        targets = problem.targets(chosen)[0]
        logits = problem.weight @ features + problem.bias
        signal = torch.softmax(logits, 0) - targets
        if not chosen.is_floating_point():
            signal[chosen[0]] = -(signal.sum() - signal[chosen[0]])  # 1 - p without cancellation
        scale = float(delta.norm() / signal.norm()) if problem.scale is None else problem.scale
        residual = max(rank_one, float((signal - delta / scale).norm() / (delta / scale).norm()))
        if residual <= REFUSED:
            return HeadSolution(
                output_gradients=delta[None],
                features=features[None],
                labels=chosen.argmax(1) if chosen.is_floating_point() else chosen,
                losses=-(targets @ torch.log_softmax(logits, 0))[None],
                residual=residual,
                error=error,
                exact=residual <= exact_residual(float(signal.norm()), 1, problem.rounding),
                scale=scale,
            )
        if rank_one > EXACT:
            raise NotApplicable(
                f"no label explains the head's gradient: the nearest leaves {residual:.1e} of it. The update was "
                "altered, or is that of several steps"
            )
        note = f"no hard label explains the output gradient (off by {residual:.1e}): soft labels, or another scale"
    return HeadSolution(
        output_gradients=delta[None],
        features=features[None],
        labels=None,
        losses=None,
        residual=rank_one,
        error=error,
        exact=rank_one <= EXACT,
        scale=1.0 if problem.scale is None else problem.scale,
        notes=(f"{note}; the certificate is that the weight gradient has rank one",),
    )


def _one_without_bias(problem: HeadProblem, labels: Tensor | None) -> HeadSolution:
    known, scale = None if labels is None else (int(labels[0]),), problem.amplitude
    gradient = (problem.observed / scale).numpy()
    best = softmax_signals(problem.weight.numpy(), problem.bias.numpy(), gradient, known, Activation("identity"))[0]
    delta = torch.from_numpy(best.signal) * scale
    features = delta @ problem.observed / delta.square().sum()
    rank_one = float((problem.observed - torch.outer(delta, features)).norm() / problem.observed.norm())
    residual = max(best.mismatch, rank_one)
    if residual > REFUSED:
        raise NotApplicable(f"no example explains the head's gradient: the nearest leaves {residual:.1e} of it")
    logits = problem.weight @ features + problem.bias
    return HeadSolution(
        output_gradients=delta[None],
        features=features[None],
        labels=torch.tensor([best.label]),
        losses=(torch.logsumexp(logits, 0) - logits[best.label])[None],
        residual=residual,
        error=max(rank_one, best.mismatch),
        exact=residual <= exact_residual(float(delta.norm() / scale), 1, problem.rounding),
        scale=scale,
    )
