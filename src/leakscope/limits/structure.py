"""What a model is made of, found by running a copy of it on one marked input."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """A layer with parameters, in the order of execution.

    ``reads_input``: it received exactly the input's values in their order, flattened at most. ``trainable``: its
    weights are in the update.
    """

    name: str
    module: nn.Module
    reads_input: bool
    trainable: bool

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @property
    def size(self) -> str:
        """Its size in a few characters, such as "64 -> 10"."""
        module = self.module
        if isinstance(module, nn.Linear):
            return f"{module.in_features} -> {module.out_features}"
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            kernel = "x".join(str(n) for n in module.kernel_size)
            return f"{module.in_channels} -> {module.out_channels}, kernel {kernel}"
        return f"{sum(p.numel() for p in module.parameters(recurse=False))} parameters"

    @property
    def has_bias(self) -> bool:
        bias = getattr(self.module, "bias", None)
        return isinstance(bias, nn.Parameter) and bias.requires_grad


@dataclass(frozen=True)
class Structure:
    """The layers that ran, the number of outputs, and the number of entries that an update has."""

    layers: tuple[Layer, ...]
    outputs: int
    entries: int

    @property
    def first(self) -> Layer:
        return self.layers[0]


def structure(model: nn.Module, input_shape: tuple[int, ...]) -> Structure:
    """Run a copy of ``model`` on one input of ``input_shape``; the caller's model is left as it is.

    >>> found = structure(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), (2, 3))
    >>> found.first.kind, found.first.size, found.first.reads_input, found.outputs, found.entries
    ('Linear', '6 -> 3', True, 3, 21)
    """
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if entries == 0:
        raise ValueError("the model has no trainable parameters, so an update of it is empty")
    probe = copy.deepcopy(model).eval().to(device="cpu", dtype=torch.float64)
    size = math.prod(input_shape)
    marked = (torch.arange(1, size + 1, dtype=torch.float64) / size).reshape(1, *input_shape)
    layers: list[Layer] = []

    def recorder(name: str):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            received = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
            reads = (
                received is not None
                and received.numel() == size
                and torch.equal(received.detach().flatten(), marked.flatten())
            )
            trainable = all(p.requires_grad for p in module.parameters(recurse=False))
            layers.append(Layer(name, module, reads, trainable))

        return hook

    for name, module in probe.named_modules():
        # A container that also owns a parameter (a class token, say) is not a layer: its children are.
        inner = any(any(True for _ in child.parameters()) for child in module.children())
        if not inner and any(True for _ in module.parameters(recurse=False)):
            # The hooks live on this copy only, so they need no removal.
            module.register_forward_pre_hook(recorder(name))
    try:
        with torch.no_grad():
            output = probe(marked)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(
            f"the model does not run on inputs of shape {input_shape}: {error}. Check input_shape, which is without "
            "the batch."
        ) from error
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[0] != 1:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"expected a model that returns one row of logits an example, (B, classes), got {got}")
    if not layers:
        raise ValueError("the model runs no layer with parameters")
    return Structure(tuple(layers), int(output.shape[1]), entries)
