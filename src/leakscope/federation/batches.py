"""Which samples are in the batches of vertical learning, round by round."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Sampling = Literal["uniform", "epochs"]


def draw_batches(
    samples: int, batch: int, rounds: int, sampling: Sampling, generator: torch.Generator
) -> Iterator[Tensor]:
    """The sample numbers that a server announces in each round, in rising order.

    "uniform" draws each batch anew without replacement, "epochs" shuffles all samples and goes through them; what is
    left of an epoch that the batch size does not divide is dropped, as is usual.
    """
    order = torch.empty(0, dtype=torch.long)
    for _ in range(rounds):
        if sampling == "uniform" or len(order) < batch:
            order = torch.randperm(samples, generator=generator)
        yield order[:batch].sort().values
        order = order[batch:]


def default_rounds(samples: int, batch: int, sampling: Sampling) -> int:
    """A quarter more rounds than it takes at least for the batches to determine every sample.

    Batches drawn anew may leave a sample out for long: there are also so many that this happens once in a hundred
    times. The batches of one epoch add up to all samples, so each further epoch tells one fact less than it has
    batches.

    >>> default_rounds(80, 8, "uniform"), default_rounds(80, 8, "epochs"), default_rounds(20, 2, "uniform")
    (100, 110, 73)
    """
    batches = samples // batch
    if sampling == "uniform" and batch < samples:
        covered = math.log(100 * samples) / -math.log1p(-batch / samples)
        return math.ceil(max(1.25 * samples, covered))
    if batches < 2:
        return math.ceil(1.25 * samples)
    return math.ceil(1.25 * (samples - 1) / (batches - 1)) * batches
