"""The network at each local step of a client that takes several plain steps on the same batch.

The update is then a sum over steps: at each layer it is the weight gradient of one large batch, every image once for
each step, whose derivatives come back through the weights *of their step*. What a layer read and the derivative at its
output give the gradient of each step by itself, so that the weights of the next step are known exactly. Units are those
of the update: the learning rate is in the derivatives. One step is the plain case, in which nothing is to be found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from leakscope.network.gates import Ahead, GatedNetwork, Step, WeightedLayer, apply_step


class LocalNetworks:
    """Networks of the same structure, one a step; each takes its share of the images, in the order of the steps."""

    def __init__(self, each: Sequence[GatedNetwork]) -> None:
        self.each = tuple(each)
        first = self.each[0]
        self.steps: tuple[Step, ...] = first.steps
        self.layers: tuple[WeightedLayer, ...] = first.layers
        self.batched, self.relu_behind = first.batched, first.relu_behind

    @classmethod
    def between(cls, network: GatedNetwork, update: Mapping[str, Tensor], steps: int) -> LocalNetworks:
        """Guess the networks of all steps: weights go from those before to those after evenly.

        The first is right. Others become right layer by layer, where :meth:`settle` is told what a step changed.
        """
        found = cls([network, *(network.to(torch.float64) for _ in range(steps - 1))])
        for number, step in enumerate(network.steps):
            for name, value in found.parameters(number).items():
                if f"{step.name}.{name}" in update:
                    share = update[f"{step.name}.{name}"].double() / steps
                    found.settle(number, name, share.expand(steps, *value.shape))
        return found

    def __len__(self) -> int:
        return len(self.each)

    def parameters(self, number: int) -> dict[str, Tensor]:
        """Return weight and bias of a step as the client received them, by their names in the module."""
        module = self.steps[number].module
        own = {} if module is None else dict(module.named_parameters(recurse=False))
        return {name: value.detach() for name, value in own.items()}

    def settle(self, number: int, name: str, changes: Tensor) -> float:
        """Tell what each step takes from a parameter (steps, ...); return how far it moves, relative to its size."""
        before, moved = self.parameters(number)[name], 0.0
        for network, change in zip(self.each[1:], changes.cumsum(0), strict=False):
            module: Any = network.steps[number].module
            value, new = getattr(module, name), before - change
            moved = max(moved, float((new - value).norm() / before.norm().clamp_min(1e-300)))
            with torch.no_grad():
                value.copy_(new)
        return moved

    def split(self, value: Tensor) -> tuple[Tensor, ...]:
        """Split what belongs to images into the shares of the steps."""
        return value.split(len(value) // len(self.each))

    def onwards(self, number: int, value: Tensor) -> Ahead:
        """Run all steps that depend on nothing but the value of one step, each image with the weights of its step."""
        ahead = [net.onwards(number, part) for net, part in zip(self.each, self.split(value), strict=True)]
        if len(ahead) == 1:
            return ahead[0]
        values, gates = ([getattr(one, name) for one in ahead] for name in ("values", "gates"))
        return Ahead(*({step: torch.cat([one[step] for one in kind]) for step in kind[0]} for kind in (values, gates)))

    def forward(self, number: int, value: Tensor, *, bias: bool = False) -> Tensor:
        """Return what a layer gives for what it reads."""
        pairs = zip(self.each, self.split(value), strict=True)
        return torch.cat([apply_step(network.steps[number], [part], None, bias=bias) for network, part in pairs])

    def pull_back(self, number: int, signal: Tensor, shape: tuple[int, ...], gate: Tensor | None) -> Tensor:
        """Return the derivative at what one step reads, of ``shape``, for that at its output."""
        gates = [None] * len(self.each) if gate is None else self.split(gate)
        found = []
        for network, part, own in zip(self.each, self.split(signal), gates, strict=True):
            start = part.new_zeros((len(part), *shape), requires_grad=True)
            with torch.enable_grad():
                out = apply_step(network.steps[number], [start], own, bias=False)
                found.append(torch.autograd.grad(out, start, part.reshape(out.shape))[0])
        return torch.cat(found)

    def gradients(self, layer: WeightedLayer, values: Tensor, signals: Tensor) -> Tensor:
        """Return the weight gradient of each step (steps, ...) for what a layer reads and the derivative behind it."""
        pairs = zip(self.split(values), self.split(signals.flatten(2)), strict=True)
        return torch.stack([layer.weight_gradient(*pair).reshape(layer.module.weight.shape) for pair in pairs])


def rounding(weight: Tensor, steps: int) -> float:
    """Return the standard deviation that rounding of weights leaves in their difference before and after some steps.

    >>> 1e-8 < rounding(torch.ones(3), 1) < 1e-7
    True
    """
    spacing = torch.finfo(weight.dtype).eps * torch.exp2(torch.frexp(weight.detach()).exponent.double() - 1)
    return float((steps / 12 * spacing.square().mean()).sqrt())
