"""Clipping of gradients and noise on them, of the batch or of each example: DP-SGD does both for a promise."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.channel import Channel, NoiseLaw
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction
from leakscope.defenses.accounting import epsilon_of, noise_multiplier_for


@dataclass(frozen=True, kw_only=True)
class GradientClipping(Defense):
    """Scale the batch's gradient down to a norm of at most ``norm``, at each local step: g / max(1, |g| / C).

    Liu et al., "Data Reconstruction Attacks and Defenses: A Systematic Evaluation": over all tensors together. It is
    not the clipping that differential privacy needs (``dp-sgd``); their DP-SGD is [gradient-clipping, gradient-noise].

    Promise: none. The direction is untouched, and the length of the gradient is one number: every attack that compares
    directions (``inverting-gradients``) or solves for the scale (``head-first``) is blind to it.
    """

    norm: float = setting(4.0, "The largest norm of the batch's gradient.", gt=0)

    def protect_gradient(self, gradient: Gradient, generator: torch.Generator) -> Gradient:
        squares = torch.stack([value.double().square().sum() for value in gradient.values()]).sum()
        factor = self.channel().clip_factor(float(squares.sqrt()))
        return {name: value * factor for name, value in gradient.items()}

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return Channel(clip=self.norm)


@dataclass(frozen=True, kw_only=True)
class GradientNoise(Defense):
    """Add independent noise of standard deviation ``sigma`` to every entry of the message.

    Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019, section 5. ``sigma`` is absolute, not relative to the
    update's size, as in the systematic evaluation of Liu et al. Laplace noise has the density exp(-|e| / b) / 2b with
    b = sigma / sqrt(2).

    Promise: a floor under the error of every unbiased attack (``leakscope limits``). No differential privacy, for
    nothing bounds what one example adds. An attack with a prior goes below the floor: ``inverting-gradients`` and
    ``gauss-newton`` with ``smoothness`` tell how far.
    """

    sigma: float = setting(0.01, "Standard deviation of the noise, in units of the update.", ge=0)
    law: NoiseLaw = setting("gaussian", "The law of the noise.")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        # Drawn on the CPU, so that the noise is the same on every device.
        return {name: value + self._noise(value.shape, generator).to(value) for name, value in update.items()}

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return Channel(noise=self.sigma, noise_law=self.law if self.sigma else "gaussian")

    def _noise(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        if self.law == "gaussian":
            return self.sigma * torch.randn(shape, generator=generator)
        # By the inverse of its distribution function; in double precision, whose least step does not cut the tails.
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
        tails = torch.log1p(-2 * uniform.abs().clamp(max=0.5 - 2**-54))
        return -self.sigma / math.sqrt(2) * uniform.sign() * tails


@dataclass(frozen=True, kw_only=True)
class DPSGD(Defense):
    """Clip each example's gradient to norm ``clip``; noise for ``epsilon`` (1 unless told) or a ``noise_multiplier``.

    The noise on the sum of the examples' gradients has a standard deviation of the multiplier times ``clip``. Abadi et
    al., "Deep Learning with Differential Privacy", CCS 2016; the noise is that of the Renyi accountant. With ``clip`` 3
    and ``epsilon`` of 10, 5, 1 and 0.1 it is the baseline of fake gradients in Jin et al., "CAFE", 2021.

    Promise: (epsilon, delta) for ``steps`` noisy gradients, when one example is taken out of the data; the number of
    examples counts as known. The defaults are for FedSGD in one round. A client that sends more says so in ``steps``:
    for FedAvg, epochs times rounds at ``sampling_rate`` 1 is a safe count. A ``sampling_rate`` below 1 is right only
    where each example enters each batch by a draw of its own, not for shuffled batches.
    """

    clip: float = setting(3.0, "The largest norm of an example's gradient.", gt=0)
    epsilon: float | None = setting(None, "The promise of all steps together; 1 unless told.", gt=0)
    noise_multiplier: float | None = setting(None, "The noise on the sum in units of clip, instead of epsilon.", ge=0)
    delta: float = setting(1e-5, "Chance with which the promise may fail.", gt=0, lt=1)
    steps: int = setting(1, "Noisy gradients that the promise is for.", ge=1)
    sampling_rate: float = setting(1.0, "Chance with which an example is in a batch.", gt=0, le=1)

    def problems(self) -> list[str]:
        if self.epsilon is None and self.noise_multiplier is None:
            # Filled in here, so that the repr, which identifies the defence, tells the promise.
            object.__setattr__(self, "epsilon", 1.0)
        elif self.epsilon is not None and self.noise_multiplier is not None:
            got = f"{self.epsilon} and {self.noise_multiplier}"
            return [f"epsilon, noise_multiplier: expected only one, got {got}; each follows from the other"]
        try:
            _ = self.noise  # an epsilon out of reach is told now, not by the client
        except ValueError as error:
            return [str(error)]
        return []

    @property
    def noise(self) -> float:
        """The noise multiplier in use: the given one, or the least that keeps to ``epsilon``.

        >>> round(DPSGD(epsilon=1.0).noise, 2), round(DPSGD(epsilon=1.0, steps=600, sampling_rate=0.05).noise, 2)
        (4.05, 5.08)
        """
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        return noise_multiplier_for(self.promised, self.sampling_rate, self.steps, self.delta)

    @property
    def promised(self) -> float:
        """The epsilon at ``delta`` that ``steps`` gradients keep to; infinite without noise.

        >>> round(DPSGD(noise_multiplier=4.0).promised, 2), DPSGD(epsilon=2.0).promised
        (1.01, 2.0)
        """
        if self.epsilon is not None:
            return self.epsilon
        return epsilon_of(self.noise, self.sampling_rate, self.steps, self.delta)

    def epsilon_for(self, passes: int | None) -> float:
        """For shuffled passes through the data, each example once in each.

        >>> round(DPSGD(epsilon=1.0).epsilon_for(5), 2), DPSGD(epsilon=1.0, steps=5).epsilon_for(5)
        (2.42, 1.0)
        """
        steps = self.steps if passes is None else max(self.steps, math.ceil(passes / self.sampling_rate))
        return self.promised if steps == self.steps else epsilon_of(self.noise, self.sampling_rate, steps, self.delta)

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        sigma = self.noise * self.clip
        return Channel(clip=self.clip, clip_per="example", noise=sigma / examples if reduction == "mean" else sigma)

    def protect_example_gradients(self, gradients: Gradient, generator: torch.Generator) -> Gradient:
        factors = clip_factors(gradients, self.clip)
        protected = {}
        for name, value in gradients.items():
            scaled = value * factors.to(value).reshape(-1, *[1] * (value.dim() - 1))
            # All noise goes to the first example, for only the sum or the mean of the rows leaves the client. It is
            # drawn on the CPU, so that it is the same on every device.
            scaled[0] += self.noise * self.clip * torch.randn(value.shape[1:], generator=generator).to(value)
            protected[name] = scaled
        return protected


def clip_factors(gradients: Gradient, clip: float) -> Tensor:
    """For each example the factor, at most 1, that brings the norm over all tensors together down to ``clip``.

    >>> clip_factors({"w": torch.tensor([[3.0, 0.0], [0.3, 0.0]]), "b": torch.tensor([4.0, 0.4])}, clip=1.0).tolist()
    [0.2, 1.0]
    """
    squares = [value.double().reshape(len(value), -1).square().sum(1) for value in gradients.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    return torch.where(norms > clip, clip / norms, torch.ones_like(norms))
