"""What the model says about inputs that are no data: the adversary's stand-in for the private batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import InputSpace
from leakscope.network.layers import Head
from leakscope.network.recorder import probe

DUMMIES = 256


@dataclass(frozen=True, eq=False)
class DummyStatistics:
    """Estimated mean softmax (C,), and mean and spread of the sum of the head's inputs."""

    probabilities: Tensor
    feature_sum: float
    feature_sum_deviation: float


def dummy_inputs(inputs: InputSpace, generator: torch.Generator, count: int = DUMMIES) -> Tensor:
    """Standard normal inputs, moved into the valid ones where these are known.

    >>> from leakscope.contracts.inputs import Box, ValueRange
    >>> x = dummy_inputs(Box((1, 2, 2), ValueRange()), torch.Generator().manual_seed(0))
    >>> tuple(x.shape), x.min().item(), x.max().item()
    ((256, 1, 2, 2), 0.0, 1.0)
    """
    return inputs.project(torch.randn((count, *inputs.shape), generator=generator, device=generator.device))


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
    like = next(model.parameters())
    record = probe(model, dummies.to(device=like.device, dtype=like.dtype), lambda name, _: name == head.module_name)
    sums = record.of(head.module_name)[-1].inputs.double().flatten(1).sum(dim=1)
    probabilities = cautious_mean(record.outputs.double().softmax(dim=1))
    if not bool(torch.isfinite(probabilities).all()):
        raise UserError("the model gives non-finite outputs for dummy inputs, so labels cannot be counted")
    return DummyStatistics(probabilities, float(sums.mean()), float(sums.std(correction=0)))
