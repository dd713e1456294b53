"""Dropout in the client's network: hidden units are dropped with probability p while it trains.

Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 2014; as a defence in Wei
et al., "A Framework for Evaluating Gradient Leakage Attacks in Federated Learning", 2020, and in Liu et al., "Data
Reconstruction Attacks and Defenses: A Systematic Evaluation". At every forward pass each input of every linear and
convolution layer but those that read the example is set to zero with probability p and else divided by 1 - p. The
masks are the client's own random numbers; the model that is shared has none.

Promise: none. An input that was dropped is zero and so is its column of the layer's gradient: in front of the head the
masks of each example of a batch are read off what the head gives away, and off every dense layer below it in turn, so
that an MLP keeps nothing (equations/embedding.py). The masks of convolutions, which share their weights, are searched
along with the input, as Scheliga et al., "Dropout Is NOT All You Need to Prevent Gradient Leakage", AAAI 2023, do
(matching/dropped.py). Both are what ``head-first`` does; other attacks simulate the plain network, which is the mean
over masks of every layer's outputs. Where masks were searched or left at their mean, a result carries the flag "defence
approximated", and no audit calls it safe.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from torch import nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction
from leakscope.network.layers import structure
from leakscope.network.recorder import change_input

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, kw_only=True)
class NetworkDropout(Defense):
    """Drop hidden units of the client's network with ``probability`` in each of its forward passes."""

    probability: float = setting(0.5, "Probability with which a unit is dropped.", ge=0, lt=1)
    layers: tuple[str, ...] = setting((), "Layers whose inputs are dropped; all behind the first unless told.")

    def for_model(
        self, model: nn.Module, input_shape: tuple[int, ...], output_shape: tuple[int, ...]
    ) -> NetworkDropout:
        modules = dict(model.named_modules())
        wrong = [name for name in self.layers if not isinstance(modules.get(name), _LAYERS)]
        if wrong:
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
        if not self.probability:
            return Channel()
        return Channel(inexact=True, units_dropped=self.probability, dropped_layers=self.layers)
