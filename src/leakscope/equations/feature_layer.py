"""A dense layer's gradient and what surrounds it, read from an observation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.equations.feature_separation import DenseGradient
from leakscope.network.dense_path import dense_path
from leakscope.network.layers import find_head


def read_dense_gradient(observation: Observation, layer: str | None = None) -> DenseGradient:
    """The gradient, weights and surroundings of ``layer``, or of the widest dense layer below the head."""
    if observation.has_rounds:
        raise NotApplicable("the update is that of several rounds, or of batches of the examples")
    try:
        head = find_head(observation.model, observation.input_shape, observation.num_classes)
    except ValueError as error:
        if layer is None:
            raise NotApplicable(str(error)) from error
        head = None
    path = None if head is None else dense_path(observation.model, head.module_name)
    steps = () if path is None else path.steps
    if layer is None:
        if not steps:
            assert path is not None
            raise NotApplicable(
                f"no dense layer with an activation lies below the head: {path.reason}. Name a layer, or use "
                "recover_embedding, which reads the features in front of the head itself"
            )
        layer = max(steps, key=lambda step: step.module.out_features).name
    module = dict(observation.model.named_modules()).get(layer)
    if not isinstance(module, nn.Linear):
        raise NotApplicable(f"layer: expected the name of a dense layer (nn.Linear), got {layer!r}")
    step = next((step for step in steps if step.name == layer), None)
    below_head = step is not None and step is steps[0] and head is not None
    head_weight = head_gradient = None
    if below_head and head is not None:
        head_weight = dict(observation.model.named_parameters())[head.weight_name]
        head_gradient = observation.message.update.get(head.weight_name)
    names = {id(parameter): name for name, parameter in observation.model.named_parameters()}
    update = observation.message.update
    gradient = update.get(names.get(id(module.weight), ""))
    if gradient is None:
        raise NotApplicable(f"{layer!r} is frozen: the update says nothing of it")
    sums = None if module.bias is None else update.get(names.get(id(module.bias), ""))
    return DenseGradient(
        name=layer,
        gradient=_wide(gradient),
        bias_gradient=None if sums is None else _wide(sums),
        weight=_wide(module.weight),
        bias=None if module.bias is None else _wide(module.bias),
        activation=None if step is None else step.activation,
        head=None if head_weight is None else _wide(head_weight),
        head_gradient=None if head_gradient is None else _wide(head_gradient),
    )


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(device="cpu", dtype=torch.float64)
