"""Quantisation of the update: signs, few bits a value, or half precision.

"uniform": 2^bits - 1 values, evenly spaced from -m to m, the largest magnitude of the tensor; each entry goes to the
nearest, or with ``stochastic`` up or down so that its mean is kept. Alistarh et al., "QSGD: Communication-Efficient
SGD via Gradient Quantization and Encoding", NeurIPS 2017, who scale by the tensor's length. 32 bits is the update as
it is. "sign": the sign times the mean magnitude of the tensor. Bernstein et al., "signSGD: Compressed Optimisation for
Non-Convex Problems", ICML 2018, send the sign alone; the scale, one more number a tensor, is that of Karimireddy et
al., "Error Feedback Fixes SignSGD", ICML 2019, here without the memory of the error. "float16" and "bfloat16" are how
values travel; the tensors keep the model's own type, and what half precision cannot hold is cut to its largest number.

Promise: fewer bytes. Half precision and 8 bits hide next to nothing, for an update has far more entries than the
examples have unknowns. Signs stop attacks that solve equations. ``inverting-gradients`` tells what is left:
knowing the defence it takes the sign of what it simulates, and the bounds within which a rounded value was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction

_HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class GradientQuantisation(Defense):
    """Round every entry of the message to one of few ``values``."""

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
            half = _HALF[self.values]
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
