"""PRECODE: a variational bottleneck in front of the head, whose random numbers make the gradients random.

Scheliga, Maeder, Seeland, "PRECODE - A Generic Model Extension to Prevent Deep Gradient Leakage", WACV 2022. Between
features r and head stands

    (mu, log s^2) = W_e r + b_e,    z = mu + s * noise,    r' = W_d z + b_d,    outputs = head(r').

Everybody shares the larger model; its new weights come from ``seed``. While it trains, a client draws the noise from
its own random numbers. The KL term of the paper, of weight 0.001, is left out: a defence here changes the model and
what is sent, not the loss.

Promise: the paper reports that matching attacks fail. They fail as far as they match the tensors behind the noise:
Balunovic et al., "Bayesian Framework for Gradient Leakage", ICLR 2022, and its own authors, "Combining Variational
Modeling with Partial Gradient Perturbation to Prevent Deep Gradient Leakage", 2022, leave those out and recover the
input. So do the matching attacks here that know the defence, with the network of the mean, z = mu. They do not search
the noise, so a result carries the flag "defence approximated", and no audit calls it safe.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction
from leakscope.network.layers import find_head

_TENSORS = ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias", "head.weight", "head.bias")


@dataclass(frozen=True, kw_only=True)
class Precode(Defense):
    """Put a variational bottleneck of ``size`` random numbers in front of the model's head."""

    size: int = setting(64, "Random numbers of the bottleneck.", ge=1)
    seed: int = setting(0, "Draws the bottleneck's weights, the same for everybody.", ge=0)
    layer: str | None = setting(None, "The head; found by running the model unless told.")

    def for_model(self, model: nn.Module, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Precode:
        name = find_head(model, input_shape, math.prod(output_shape)).module_name
        parent = name.rpartition(".")[0]
        if name and isinstance(model.get_submodule(parent), VariationalBottleneck):
            name = parent  # protected already
        if self.layer not in (None, name):
            raise UserError(f"layer: expected the model's head {name!r}, got {self.layer!r}; leave it out")
        return dataclasses.replace(self, layer=name)

    def protect_model(self, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        if self.layer is None:
            raise UserError("precode: expected a layer; call for_model first, as protocols do")
        if isinstance(model.get_submodule(self.layer), VariationalBottleneck):
            return model
        larger = copy.deepcopy(model)
        head = larger.get_submodule(self.layer)
        assert isinstance(head, nn.Linear)
        bottleneck = VariationalBottleneck(head, self.size, torch.Generator().manual_seed(self.seed))
        if not self.layer:
            return bottleneck
        parent, _, own = self.layer.rpartition(".")
        setattr(larger.get_submodule(parent), own, bottleneck)
        return larger

    def protect_copy(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, VariationalBottleneck):
                module.sampling = True
        return model

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel | None:
        if self.layer is None:
            return None
        names = tuple(f"{self.layer}.{tensor}".removeprefix(".") for tensor in _TENSORS)
        return Channel(unreliable=names, inexact=True)


class VariationalBottleneck(nn.Module):
    """A head behind a bottleneck; with ``sampling`` its numbers are random, else their mean."""

    def __init__(self, head: nn.Linear, size: int, generator: torch.Generator) -> None:
        super().__init__()
        like = head.weight
        self.encoder = _linear(head.in_features, 2 * size, generator).to(like)
        self.decoder = _linear(size, head.in_features, generator).to(like)
        self.head = head
        self.sampling = False

    def forward(self, features: Tensor) -> Tensor:
        mean, log_variance = self.encoder(features).chunk(2, dim=-1)
        if self.sampling:
            mean = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        outputs: Tensor = self.head(self.decoder(mean))
        return outputs


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A layer as torch starts it, from this generator."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    bound = 1 / math.sqrt(inputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return layer
