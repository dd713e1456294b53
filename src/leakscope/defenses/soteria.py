"""Soteria: the gradient of one dense layer is that of a pruned representation.

Sun, Li, Wang, Wang, Wang, Li, Chen, Zhao, "Soteria: Provable Defense against Privacy Leakage in Federated Learning
from Representation Perspective", CVPR 2021. With r the representation that enters the layer, each example's r' is r
without the elements of largest |r_i| / |dr_i / dx|: those that move the reconstruction of x most for their size. The
layer's outputs, and the gradients of all other weights, stay as they are; the gradient of its weight is the sum over
examples of delta r'^T. The published code prunes the same elements for all examples of a batch, and adds 0.1 to |r_i|;
for one example it is the same rule.

Promise: the paper claims a certified distance between x and what an attack finds that reads the defended layer alone.
Balunovic, Dimitrov, Staab, Vechev, "Bayesian Framework for Gradient Leakage", ICLR 2022, leave the defended weight out
of the matching and recover the input from the other layers; so does every matching attack here that knows the defence.
It takes one backward pass an element of the representation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction
from leakscope.network.layers import structure
from leakscope.network.recorder import change_input, change_output


@dataclass(frozen=True, kw_only=True)
class Soteria(Defense):
    """Prune the representation that enters ``layer``, in the gradient of that layer's weight alone."""

    fraction: float = setting(0.8, "Share of the representation's elements that are pruned.", ge=0, lt=1)
    layer: str | None = setting(None, "The dense layer that is defended; the last one unless told.")

    def for_model(self, model: nn.Module, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Soteria:
        layers = structure(model, input_shape).layers
        dense = [layer.name for layer in layers if isinstance(layer.module, nn.Linear) and layer.trainable]
        if not dense or self.layer not in (None, *dense):
            known = ", ".join(dense) or "it has none"
            raise UserError(f"layer: expected a trained dense layer of the model ({known}), got {self.layer!r}")
        return dataclasses.replace(self, layer=dense[-1] if self.layer is None else self.layer)

    def protect_copy(self, model: nn.Module) -> nn.Module:
        if self.layer is not None and self.fraction:
            pruning = _Pruning(self.fraction)
            change_input(model, pruning.hold)
            change_output(model.get_submodule(self.layer), pruning.prune)
        return model

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel | None:
        if not self.fraction:
            return Channel()
        return None if self.layer is None else Channel(unreliable=(f"{self.layer}.weight".removeprefix("."),))


@dataclass(eq=False)
class _Pruning:
    """Holds what the model reads, by which the representation is differentiated when the layer gives its outputs."""

    fraction: float
    inputs: list[Tensor] = field(default_factory=list)

    def hold(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x
        self.inputs[:] = [x.detach().requires_grad_()]
        return self.inputs[0]

    def prune(self, layer: nn.Module, representation: Tensor, output: Tensor) -> Tensor:
        """Give the layer's outputs with another derivative by its weight."""
        assert isinstance(layer, nn.Linear)
        if not torch.is_grad_enabled():
            return output
        (x,) = self.inputs
        self.inputs.clear()
        if representation.dim() != 2:
            raise UserError(f"soteria: expected a layer that reads (examples, n), got {tuple(representation.shape)}")
        pruned = pruned_representation(representation, x, self.fraction)
        through = nn.functional.linear(representation, layer.weight.detach(), layer.bias)
        by_weight = nn.functional.linear(pruned, layer.weight)
        return through + by_weight - by_weight.detach()


def pruned_representation(representation: Tensor, x: Tensor, fraction: float) -> Tensor:
    """Each row without the share of its elements that have the largest |r_i| / |dr_i / dx|.

    >>> x = torch.tensor([[1.0, 1.0]], requires_grad=True)
    >>> pruned_representation(x * torch.tensor([[2.0, 1.0]]) + torch.tensor([[0.0, 5.0]]), x, 0.5).tolist()
    [[2.0, 0.0]]
    """
    sizes = []
    for element in range(representation.shape[1]):
        (slope,) = torch.autograd.grad(representation[:, element].sum(), x, retain_graph=True, allow_unused=True)
        sizes.append(representation.new_zeros(len(x)) if slope is None else slope.flatten(1).norm(dim=1))
    pruned = representation.detach().clone()
    # An element that nothing moves is a constant, or a unit that is off; it says nothing, or is zero already.
    scores = torch.where(torch.stack(sizes, 1) > 0, pruned.abs() / torch.stack(sizes, 1), torch.zeros_like(pruned))
    largest = scores.sort(dim=1, descending=True, stable=True).indices[:, : int(fraction * pruned.shape[1])]
    return pruned.scatter(1, largest, 0.0)
