"""Clipping of the batch's gradient: g / max(1, |g| / C).

Liu et al., "Data Reconstruction Attacks and Defenses: A Systematic Evaluation": of the gradient of the whole batch,
over all tensors together, at each local step. One gradient is sent clipped; a weight update is that of clipped steps.
It is not the clipping that differential privacy needs, which is of each example's gradient (``dp-sgd``); their DP-SGD
is [gradient-clipping, gradient-noise].

Promise: none. The direction is untouched, and the length of the gradient is one number: every attack that compares
directions (``inverting-gradients``) or solves for the scale (``head-first``) is blind to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction


@dataclass(frozen=True, kw_only=True)
class GradientClipping(Defense):
    """Scale the batch's gradient down to a norm of at most ``norm``, at each local step."""

    norm: float = setting(4.0, "The largest norm of the batch's gradient.", gt=0)

    def protect_gradient(self, gradient: Gradient, generator: torch.Generator) -> Gradient:
        squares = torch.stack([value.double().square().sum() for value in gradient.values()]).sum()
        factor = self.channel().clip_factor(float(squares.sqrt()))
        return {name: value * factor for name, value in gradient.items()}

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return Channel(clip=self.norm)
