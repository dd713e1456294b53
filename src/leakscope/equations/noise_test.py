"""Whether inputs explain a noisy update: what they leave of it must look like the noise, and like no more.

For the true inputs the sum over entries of ((observed - simulated) / sigma)^2 is chi-square with as many degrees of
freedom as there are entries, less the unknowns for inputs fitted to the update.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.special import gammaincc, ndtr
from torch import Tensor

from leakscope.contracts.channel import Channel
from leakscope.contracts.observation import Observation

#: Inputs are refuted where what they leave would be this rare.
RARE = 1e-3
#: Noise drowns an update whose norm is at most this many levels: to tell which of two known batches was sent, one then
#: errs in at least 31 % of cases, which is Phi(-0.5).
DROWNED = 0.5


@dataclass(frozen=True)
class NoiseTest:
    """``ratio``: the mean square that is left, in units of the noise's. ``p_value``: how often noise leaves so much."""

    ratio: float
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value >= RARE

    def describe(self) -> str:
        """Describe the outcome in one sentence.

        >>> NoiseTest(1.01, 0.2).describe()
        'the inputs explain the update down to its noise (chi-square test, p = 0.2)'
        """
        if self.passed:
            return f"the inputs explain the update down to its noise (chi-square test, p = {self.p_value:.2g})"
        return f"the inputs leave {math.sqrt(self.ratio):.3g} times the noise of the update: it tells more of them"


def noise_test(
    observed: Mapping[str, Tensor], simulated: Mapping[str, Tensor], channel: Channel, fitted: int = 0
) -> NoiseTest | None:
    """Test what ``simulated`` leaves of ``observed`` with ``fitted`` unknowns; None where entries are not all noisy.

    >>> import torch
    >>> noise = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    >>> test = noise_test({"w": 0.1 * noise}, {"w": torch.zeros(4000)}, Channel(noise=0.1))
    >>> test.passed, noise_test({"w": 0.2 * noise}, {"w": torch.zeros(4000)}, Channel(noise=0.1)).passed
    (True, False)
    """
    if channel.masked or channel.rounding != "none" or channel.inexact or channel.unreliable:
        return None
    levels = {name: channel.level(name) for name in observed}
    if not levels or not all(level > 0 for level in levels.values()):
        return None
    total = sum(
        float(((value.double() - simulated[name].double()) / levels[name]).square().sum())
        for name, value in observed.items()
    )
    free = sum(value.numel() for value in observed.values()) - fitted
    if free <= 0:
        return None  # so many unknowns explain anything
    if channel.noise_law == "laplace":
        p_value = ndtr((free - total) / math.sqrt(5 * free))  # the variance of a square: its kurtosis, 6, minus 1
    else:
        # The survival function of chi-square, without scipy.stats, which is slow to load.
        p_value = gammaincc(free / 2, total / 2)
    return NoiseTest(total / free, float(p_value))


def drowned(observation: Observation) -> bool:
    """Return whether the defence that is known hides any batch: it clips the update to less than its noise.

    Only a clipped norm bounds the signal, so that noise alone, however strong, drowns nothing by this rule. DP-SGD with
    an epsilon of 1 does (clip / noise = 0.27), with an epsilon of 4 it does not.
    """
    channel, sent = observation.channel, observation.message
    if channel is None or channel.clip is None or channel.clip_per == "step" or sent.kind != "gradient":
        return False
    if channel.dropout_scaled or channel.rounding != "none" or channel.inexact or channel.mixed > 1:
        return False
    least = min((channel.level(name) for name in sent.update), default=0.0)
    summed = observation.num_examples or 1 if channel.clips_examples and observation.reduction == "sum" else 1
    return summed * channel.clip <= DROWNED * least
