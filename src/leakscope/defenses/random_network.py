"""Random numbers in the client's network: dropout of hidden units, and PRECODE's variational bottleneck.

The model that everybody shares draws nothing; the client's copy draws at every forward pass. Attacks that do not search
the draws simulate the network of the mean, and their results carry the flag "defence approximated".
"""

import copy
import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction
from leakscope.network.layers import find_head, structure
from leakscope.network.recorder import change_input

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, kw_only=True)
class NetworkDropout(Defense):
    """Drop hidden units of the client's network with ``probability`` in each of its forward passes.

    Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 2014; as a defence in
    Wei et al., "A Framework for Evaluating Gradient Leakage Attacks in Federated Learning", 2020, and Liu et al., "Data
    Reconstruction Attacks and Defenses: A Systematic Evaluation". Each input of every linear and convolution layer but
    those that read the example is set to zero with probability p and else divided by 1 - p.

    Promise: none. An input that was dropped is zero and so is its column of the layer's gradient: the masks of each
    example are read off the head and every dense layer below it in turn, so that an MLP keeps nothing
    (equations/embedding.py). The masks of convolutions, which share their weights, are searched along with the input,
    as in Scheliga et al., "Dropout Is NOT All You Need to Prevent Gradient Leakage", AAAI 2023; ``head-first`` does.
    """

    probability: float = setting(0.5, "Probability with which a unit is dropped.", ge=0, lt=1)
    layers: tuple[str, ...] = setting((), "Layers whose inputs are dropped; all behind the first unless told.")

    def for_model(self, model: nn.Module, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Self:
        modules = dict(model.named_modules())
        if wrong := [name for name in self.layers if not isinstance(modules.get(name), _LAYERS)]:
            raise UserError(f"layers: expected linear or convolution layers of the model, got {', '.join(wrong)}")
        if self.layers:
            return self
        layers = [layer for layer in structure(model, input_shape).layers if isinstance(layer.module, _LAYERS)]
        hidden = tuple(dict.fromkeys(layer.name for layer in layers[1:] if not layer.reads_input))
        if not hidden:
            raise UserError("network-dropout: expected a model with hidden units, got one without; it drops nothing")
        return dataclasses.replace(self, layers=hidden)

    def protect_copy(self, model: nn.Module) -> nn.Module:
        if self.probability:
            for name in self.layers:
                change_input(model.get_submodule(name), partial(nn.functional.dropout, p=self.probability))
        return model

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        dropped = Channel(inexact=True, units_dropped=self.probability, dropped_layers=self.layers)
        return dropped if self.probability else Channel()


_TENSORS = ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias", "head.weight", "head.bias")


@dataclass(frozen=True, kw_only=True)
class Precode(Defense):
    """Put a variational bottleneck of ``size`` random numbers in front of the model's head.

    Scheliga, Maeder, Seeland, "PRECODE - A Generic Model Extension to Prevent Deep Gradient Leakage", WACV 2022.
    Between features r and head stands

        (mu, log s^2) = W_e r + b_e,    z = mu + s * noise,    r' = W_d z + b_d,    outputs = head(r').

    Everybody shares the larger model; its new weights come from ``seed``. The KL term of the paper, of weight 0.001, is
    left out: a defence here changes the model and what is sent, not the loss.

    Promise: the paper reports that matching attacks fail, which they do as far as they match the tensors behind the
    noise: Balunovic et al., "Bayesian Framework for Gradient Leakage", ICLR 2022, and its own authors, "Combining
    Variational Modeling with Partial Gradient Perturbation to Prevent Deep Gradient Leakage", 2022, leave those out and
    recover the input. So do the matching attacks here that know the defence, with z = mu.
    """

    size: int = setting(64, "Random numbers of the bottleneck.", ge=1)
    seed: int = setting(0, "Draws the bottleneck's weights, the same for everybody.", ge=0)
    layer: str | None = setting(None, "The head; found by running the model unless told.")

    def for_model(self, model: nn.Module, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Self:
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
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    bound = 1 / math.sqrt(inputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return layer
