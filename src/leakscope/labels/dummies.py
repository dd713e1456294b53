"""What the model says about inputs that are no data: the adversary's stand-in for the private batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.labels.head import Head, run_dummies
from leakscope.observation import ValueRange

DUMMIES = 256


@dataclass(frozen=True, eq=False)
class DummyStatistics:
    """Estimated mean softmax (C,), and mean and spread of the sum of the head's inputs."""

    probabilities: Tensor
    feature_sum: float
    feature_sum_deviation: float


def dummy_inputs(
    input_shape: tuple[int, ...], box: ValueRange | None, generator: torch.Generator, count: int = DUMMIES
) -> Tensor:
    """Standard normal inputs, clamped to the box where it is known.

    >>> x = dummy_inputs((1, 2, 2), ValueRange(), torch.Generator().manual_seed(0))
    >>> tuple(x.shape), x.min().item(), x.max().item()
    ((256, 1, 2, 2), 0.0, 1.0)
    """
    dummies = torch.randn((count, *input_shape), generator=generator, device=generator.device)
    if box is None:
        return dummies
    low, high = box.bounds(dummies)
    return torch.minimum(torch.maximum(dummies, low), high)


def cautious_mean(probabilities: Tensor) -> Tensor:
    """The mean of softmax rows, drawn towards 1/C by as much as the rows disagree (mean total variation).

    A network that says the same of every dummy, as an untrained one does, will say it of the private batch
    too; one that is sure of something else each time says nothing about private data.

    >>> cautious_mean(torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])).tolist()
    [0.5, 0.25, 0.25]
    >>> cautious_mean(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])).tolist()
    [0.375, 0.375, 0.125, 0.125]
    """
    mean = probabilities.mean(dim=0)
    disagreement = (probabilities - mean).abs().sum(dim=1).mean() / 2
    return (1 - disagreement) * mean + disagreement / len(mean)


def dummy_statistics(model: nn.Module, head: Head, dummies: Tensor) -> DummyStatistics:
    """The model's statistics on ``dummies`` in evaluation mode; the model itself is left alone.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False))
    >>> _ = nn.init.zeros_(net[0].weight)
    >>> dummy_statistics(net, Head("0.weight", None, "0"), torch.ones(3, 2)).feature_sum
    2.0
    """
    twin = copy.deepcopy(model).eval()
    like = next(twin.parameters())
    sums: list[Tensor] = []

    def remember(module: nn.Module, args: Any) -> None:
        sums.append(args[0].detach().double().flatten(1).sum(dim=1))

    handle = twin.get_submodule(head.module_name).register_forward_pre_hook(remember)
    try:
        logits = run_dummies(twin, dummies.to(device=like.device, dtype=like.dtype))
    finally:
        handle.remove()
    probabilities = cautious_mean(logits.double().softmax(dim=1))
    if not bool(torch.isfinite(probabilities).all()):
        raise ValueError("the model gives non-finite outputs for dummy inputs, so labels cannot be counted")
    return DummyStatistics(probabilities, float(sums[-1].mean()), float(sums[-1].std(correction=0)))
