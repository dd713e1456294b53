"""Fewer bytes: only some entries of the update are sent, the largest or random ones, or each in few bits.

Promise: fewer bytes. What is sent is true, and zeros show what is not: an attack that compares only the entries that
were sent (``inverting-gradients``, knowing the defence) loses equations, of which there are far more than unknowns.
For the same reason half precision and 8 bits hide next to nothing. Signs stop attacks that solve equations;
``inverting-gradients`` takes the sign of what it simulates, and the bounds within which a rounded value was.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakscope.contracts.channel import Channel, PruneScope
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction


@dataclass(frozen=True, kw_only=True)
class GradientDropout(Defense):
    """Set every entry of the message to zero with ``probability``, each by a draw of its own.

    Wei et al., "Gradient-Leakage Resilient Federated Learning", 2021, and Liu et al., "Data Reconstruction Attacks and
    Defenses: A Systematic Evaluation", who do not say whether the others are scaled; ``scaled`` keeps the mean.
    """

    probability: float = setting(0.5, "Probability with which an entry is set to zero.", ge=0, lt=1)
    scaled: bool = setting(False, "Whether the other entries are divided by the probability that they are sent.")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        factor = 1 / (1 - self.probability) if self.scaled else 1.0
        # Drawn on the CPU, so that it is the same on every device.
        draws = {n: torch.rand(v.shape, generator=generator, dtype=torch.float64) for n, v in update.items()}
        return {n: v * (draws[n] >= self.probability).to(v) * factor for n, v in update.items()}

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return Channel(dropout=self.probability, dropout_scaled=self.scaled and self.probability > 0)


@dataclass(frozen=True, kw_only=True)
class GradientPruning(Defense):
    """Set the ``fraction`` of entries with the smallest magnitude to zero; exactly floor(fraction * n) of them.

    Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019; Aji and Heafield, "Sparse Communication for Distributed
    Gradient Descent", EMNLP 2017. Theory takes one threshold for the whole update, published code one a tensor.
    """

    fraction: float = setting(0.9, "Share of the entries set to zero.", ge=0, lt=1)
    scope: PruneScope = setting("tensor", "Whether of each tensor or of the whole update.")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        if self.scope == "tensor":
            return {name: self._prune(value.flatten()).reshape(value.shape) for name, value in update.items()}
        pruned = self._prune(torch.cat([v.flatten() for v in update.values()]))
        parts = pruned.split([v.numel() for v in update.values()])
        return {name: part.reshape(v.shape) for (name, v), part in zip(update.items(), parts, strict=True)}

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return Channel(prune=self.fraction, prune_scope=self.scope)

    def _prune(self, flat: Tensor) -> Tensor:
        # A stable sort makes ties, such as many exact zeros, deterministic.
        smallest = torch.sort(flat.abs(), stable=True).indices[: int(self.fraction * flat.numel())]
        return flat.index_fill(0, smallest, 0)


@dataclass(frozen=True, kw_only=True)
class TopK(Defense):
    """Send the ``share`` of entries with the largest magnitude, and zeros for the others.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, without the memory of what
    was left out, which a client may keep for its next round. It is pruning by the share that is sent.
    """

    share: float = setting(0.1, "Share of the entries that is sent.", gt=0, le=1)
    scope: PruneScope = setting("tensor", "Whether of each tensor or of the whole update.")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return self.pruning.protect_message(update, generator)

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return self.pruning.channel(examples=examples, reduction=reduction)

    @property
    def pruning(self) -> GradientPruning:
        """The same as pruning.

        >>> TopK(share=0.9).pruning
        GradientPruning(fraction=0.1, scope='tensor')
        """
        return GradientPruning(fraction=round(1 - self.share, 12), scope=self.scope)


@dataclass(frozen=True, kw_only=True)
class GradientQuantisation(Defense):
    """Round every entry of the message to one of few ``values``.

    "uniform": 2^bits - 1 values, evenly spaced from -m to m, the largest magnitude of the tensor; each entry goes to
    the nearest, or with ``stochastic`` up or down so that its mean is kept. Alistarh et al., "QSGD", NeurIPS 2017, who
    scale by the tensor's length. 32 bits is the update as it is. "sign": the sign times the mean magnitude of the
    tensor. Bernstein et al., "signSGD", ICML 2018, send the sign alone; the scale is that of Karimireddy et al., "Error
    Feedback Fixes SignSGD", ICML 2019, here without the memory of the error. "float16" and "bfloat16" are how values
    travel; the tensors keep their type, and what half precision cannot hold is cut to its largest number.
    """

    values: Literal["uniform", "sign", "float16", "bfloat16"] = setting("uniform", "What an entry may be.")
    bits: int | None = setting(None, "Bits of an entry where values are uniform, 8 unless told.", ge=2, le=32)
    stochastic: bool = setting(False, "Whether uniform values are taken at random, so that the mean is kept.")

    def problems(self) -> list[str]:
        if self.values != "uniform":
            chosen = {"bits": self.bits is not None, "stochastic": self.stochastic}
            only = f"applies to values='uniform' only, got values={self.values!r}; leave it out"
            return [f"{name}: {only}" for name, told in chosen.items() if told]
        if self.bits is None:
            # Filled in here, so that the repr, which identifies the defence, tells it.
            object.__setattr__(self, "bits", 8)
        return []

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return {name: self._rounded(value, generator) for name, value in update.items()}

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        if self.values != "uniform" or self.bits is None:
            return Channel(rounding=self.values)
        if self.bits == 32:
            return Channel()
        return Channel(rounding="stochastic" if self.stochastic else "uniform", bits=self.bits)

    def _rounded(self, value: Tensor, generator: torch.Generator) -> Tensor:
        if self.values == "sign":
            return value.sign() * value.double().abs().mean().to(value)
        if self.values != "uniform" or self.bits is None:
            half = getattr(torch, self.values)
            most = torch.finfo(half).max
            return value.clamp(-most, most).to(half).to(value.dtype)
        if self.bits == 32:
            return value.clone()
        draws = torch.rand(value.shape, generator=generator, dtype=torch.float64) if self.stochastic else None
        return uniform(value, self.bits, draws)


def uniform(value: Tensor, bits: int, draws: Tensor | None = None) -> Tensor:
    """The nearest of 2^bits - 1 even values between -max|value| and max|value|; by ``draws`` in [0, 1), one beside it.

    >>> uniform(torch.tensor([3.0, 1.4, -0.8]), bits=3).tolist()
    [3.0, 1.0, -1.0]
    """
    wide = value.double()
    step = wide.abs().max() / (2 ** (bits - 1) - 1) if value.numel() else wide.new_zeros(())
    if step == 0:
        return value.clone()
    places = wide / step
    places = places.round() if draws is None else (places + draws.to(places)).floor()
    return (places * step).to(value)
