"""Rivals of ``head-first``: attacks that match the whole update, where the head is of no use or nothing is certified.

``inverting-gradients`` always; on networks without kinks ``idlg`` too. Under noise its plain least squares come to what
the noise leaves, where a search with a prior is lost (DLG's LeNet, two CIFAR-10 images, noise of 1e-3: 39 dB against
20); where the noise is strong, it is the prior that is right, and least squares explain the noise. Which of both it is
can be seen: of N numbers with noise, least squares over d unknowns leave (N - d) / N of what the true inputs leave. A
result that leaves no more than the true inputs would is as good an explanation, and has a prior in its favour. So has
one that is far smoother where the update hardly determines the picture: on a ViT that was not trained, least squares
leave half of what the search leaves and are 3 dB behind it, sixteen times as rough.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leakscope.attacks.gradient_matching import GradientMatching, several_steps
from leakscope.attacks.idlg import IDLG
from leakscope.attacks.inverting_gradients import InvertingGradients
from leakscope.contracts.attack import Progress
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.matching import Victim
from leakscope.matching.priors import total_variation
from leakscope.matching.unexplained import unexplained
from leakscope.matching.victim import forward_flops
from leakscope.network.kinks import kinks

#: Evaluations times multiplications of a forward pass up to which searches go on without a certificate, and up to which
#: least squares are tried: a batch of four of a small ConvNet, which takes them three quarters of a minute, is worth it
#: (untrained, tanh: 65 dB against 43).
MOST_WORK, MOST_LEAST_SQUARES = 1e11, 4e11
#: Where least squares stop: what rounding leaves. A thousand times as much is 17 dB less on a smooth ConvNet.
EXPLAINED = 1e-13
#: A picture of least squares may be so many times as rough as the other one, unless it leaves this little beside it.
ROUGHER, FAR_LESS = 3.0, 0.05


def rivals_for(observation: Observation, iterations: int) -> tuple[GradientMatching, ...]:
    """A search of so many steps; least squares where the update is one smooth gradient of a network small enough."""
    search, least_squares = InvertingGradients(iterations=iterations), IDLG(tolerance=EXPLAINED)
    if several_steps(observation) or kinks(observation.model, observation.input_shape):
        return (search,)
    work = forward_work(observation) * (observation.num_examples or 1)
    return (search, least_squares) if least_squares.iterations * work <= MOST_LEAST_SQUARES else (search,)


def match_whole_update(
    rivals: tuple[GradientMatching, ...],
    observation: Observation,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> list[Reconstruction]:
    """What each of them finds; each begins where it would begin by itself with this seed."""
    results: list[Reconstruction] = []
    reached = 0
    for place, rival in enumerate(rivals):
        later, before = sum(other.iterations for other in rivals[place + 1 :]), reached

        def tell(done: int, total: int, value: float, before: int = before, later: int = later) -> None:
            nonlocal reached
            reached = before + total
            assert progress is not None
            progress(before + done, reached + later, value)

        results.append(rival.run(observation, generator.clone_state(), None if progress is None else tell))
    return results


def best_match(results: list[Reconstruction], observation: Observation) -> Reconstruction:
    """The search's result, or that of least squares where it explains more than noise would let it."""
    search, *least_squares = results
    if not least_squares:
        return search
    left, least = (_left_by(observation, one) for one in (search, *least_squares))
    better = is_better(observation, least_squares[0].inputs, least, search.inputs, left)
    return least_squares[0] if better else search


def is_better(observation: Observation, inputs: Tensor, least: float, other: Tensor, left: float) -> bool:
    """Whether ``inputs`` of least squares, which leave ``least``, are to be preferred to others that leave ``left``."""
    equations = sum(value.numel() for value in observation.message.update.values())
    unknowns = (observation.num_examples or 1) * math.prod(observation.input_shape)
    if least >= left * fair_ratio(equations, unknowns):
        return False
    pictures = observation.inputs.smooth
    return least < FAR_LESS * left or not pictures or roughness(inputs) <= ROUGHER * roughness(other)


def roughness(pictures: Tensor) -> float:
    """The mean difference of neighbours.

    >>> roughness(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
    0.5
    """
    return float(total_variation(pictures, "l1mean_avg"))


def fair_ratio(equations: int, unknowns: int) -> float:
    """What least squares leave of noise, relative to what the true inputs leave of it; root mean squares.

    >>> round(fair_ratio(8308, 256), 4), fair_ratio(100, 400)
    (0.9845, 0.0)
    """
    return math.sqrt(max(0.0, 1 - unknowns / equations))


def forward_work(observation: Observation) -> float:
    """Multiplications of a forward pass of one example."""
    like = next(iter(observation.message.update.values()))
    # Two, for BatchNorm in train mode cannot normalise a single number.
    return forward_flops(Victim.of(observation).model, like.new_zeros((2, *observation.input_shape))) / 2


def _left_by(observation: Observation, result: Reconstruction) -> float:
    return math.inf if result.labels is None else unexplained(observation, result.inputs, result.labels)
