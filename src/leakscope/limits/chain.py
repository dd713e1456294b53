"""Reads a feed-forward network as a chain of stages: linear operations, then one activation that can be inverted.

The closed-form attacks (R-GAP, Zhu and Blaschko, ICLR 2021; Hybrid, Chen and Campbell, BMVC 2022) walk from the loss to
the input, one stage at a time. They need to know the order of the layers, which ``model.children()`` does not tell, so
the model is traced symbolically. Everything that is no such chain is refused by name: a ReLU loses what it sets to
zero, a max pooling what it passes over, and a sum of two paths has two unknowns for one value.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from leakscope.limits.activations import INVERTIBLE, Activation, Unsupported, activation_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
POOLINGS = (nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
_LINEAR = (*CONVOLUTIONS, nn.Linear, *POOLINGS)
_PASSED = (nn.Flatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
_PASSED_FUNCTIONS = (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, nn.functional.dropout)
_PASSED_METHODS = ("flatten", "view", "reshape", "squeeze", "unsqueeze", "contiguous")
_POOLING_FUNCTIONS: Mapping[Any, tuple[type[nn.Module], tuple[str, ...]]] = MappingProxyType(
    {
        nn.functional.avg_pool1d: (
            nn.AvgPool1d,
            ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
        ),
        nn.functional.avg_pool2d: (
            nn.AvgPool2d,
            ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
        ),
        nn.functional.adaptive_avg_pool1d: (nn.AdaptiveAvgPool1d, ("output_size",)),
        nn.functional.adaptive_avg_pool2d: (nn.AdaptiveAvgPool2d, ("output_size",)),
    }
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One affine map: a convolution, a linear layer or an average pooling, in float64; shapes are without the batch.

    ``weight_name`` and ``bias_name`` are names in ``model.named_parameters()``; None where there is none.
    """

    name: str
    module: nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    weight_name: str | None = None
    bias_name: str | None = None

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    def __call__(self, x: Tensor) -> Tensor:
        """The map on a batch, which may come flattened; differentiable."""
        output: Tensor = self.module(x.reshape(-1, *self.input_shape))
        return output


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """Affine operations without an activation between them, then one activation (identity where there is none)."""

    operations: tuple[Operation, ...]
    activation: Activation

    @property
    def name(self) -> str:
        """The names of its operations, such as "conv2" or "pool + fc"."""
        return " + ".join(operation.name for operation in self.operations)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.operations[0].input_shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.operations[-1].output_shape

    @property
    def unknowns(self) -> int:
        return math.prod(self.input_shape)

    @property
    def convolutional(self) -> bool:
        """Whether the first operation with weights is a convolution."""
        weighted = [operation for operation in self.operations if operation.weight_name is not None]
        return bool(weighted) and isinstance(weighted[0].module, CONVOLUTIONS)

    def linear(self, x: Tensor) -> Tensor:
        """What the activation receives."""
        for operation in self.operations:
            x = operation(x)
        return x

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """A model as stages in the order of execution; ``model`` is the float64 copy whose modules the stages hold."""

    model: nn.Module
    stages: tuple[Stage, ...]

    def run(self, x: Tensor, start: int = 0) -> Tensor:
        """The flat output for the input ``x`` of stage ``start``; differentiable in ``x`` and in the copy's weights."""
        for stage in self.stages[start:]:
            x = stage(x)
        return x.flatten(1)

    def parameters(self, start: int = 0) -> dict[str, nn.Parameter]:
        """The trainable weights of stage ``start`` and all after it, by their name in the model."""
        operations = [operation for stage in self.stages[start:] for operation in stage.operations]
        names = [name for o in operations for name in (o.weight_name, o.bias_name) if name is not None]
        known = dict(self.model.named_parameters())
        return {name: known[name] for name in names if known[name].requires_grad}


def read_chain(model: nn.Module, input_shape: tuple[int, ...]) -> Chain:
    """The stages of ``model``, or :class:`Unsupported` that names the layer which stands in the way.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    >>> [(stage.name, stage.activation.name, stage.unknowns) for stage in read_chain(net, (1, 4, 4)).stages]
    [('0', 'tanh', 16), ('3', 'identity', 8)]
    """
    twin = copy.deepcopy(model).eval().to(device="cpu", dtype=torch.float64)
    graph = _trace(twin)
    sample = torch.rand((2, *input_shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        with torch.no_grad():
            expected = twin(sample)
            ShapeProp(graph).propagate(sample)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(
            f"the model does not run on inputs of shape {tuple(input_shape)}: {error}. Check input_shape, which is "
            "without the batch."
        ) from error
    chain = Chain(model=twin, stages=_stages(_path(graph), graph, twin))
    with torch.no_grad():
        found = chain.run(sample)
    if not (isinstance(expected, Tensor) and torch.allclose(found, expected.flatten(1), rtol=1e-9, atol=1e-12)):
        raise Unsupported("not supported because the model computes something else than its layers in a row (hooks?)")
    return chain


def _trace(model: nn.Module) -> fx.GraphModule:
    tracer = fx.Tracer()
    try:
        return fx.GraphModule(model, tracer.trace(model))
    # Tracing runs the model's own code on stand-ins for tensors, so it can fail in any way that code can.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Unsupported(f"not supported because the model's code cannot be traced: {reason}") from error


def _path(graph: fx.GraphModule) -> list[tuple[fx.Node, tuple[int, ...]]]:
    """The nodes that a tensor goes through, each with the shape that it comes out in; one way without branches."""
    path: list[tuple[fx.Node, tuple[int, ...]]] = []
    last: fx.Node | None = None
    for node in graph.graph.nodes:
        if node.op == "output":
            if node.args != (last,):
                raise Unsupported("not supported because the model returns something else than its last layer")
            continue
        shape = getattr(node.meta.get("tensor_meta"), "shape", None)
        if shape is None:
            continue  # a size, or arithmetic with sizes
        tensors = [n for n in node.all_input_nodes if getattr(n.meta.get("tensor_meta"), "shape", None) is not None]
        if node.op == "placeholder":
            if last is not None:
                raise Unsupported("not supported because the model has several inputs")
        elif node.op == "get_attr":
            raise Unsupported(f"not supported because the model uses the tensor {node.target!r} outside of a layer")
        elif node.target in (operator.add, torch.add, operator.iadd, "add", "add_") and len(tensors) == 2:
            raise Unsupported(
                f"not supported because {_label(node, graph)} joins two paths (a residual connection): only one of "
                "two summands can be solved for"
            )
        elif tensors != [last]:
            raise Unsupported(f"not supported because {_label(node, graph)} does not read the layer before it alone")
        last = node
        path.append((node, tuple(shape[1:])))
    return path


def _stages(path: list[tuple[fx.Node, tuple[int, ...]]], graph: fx.GraphModule, model: nn.Module) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    pending: list[Operation] = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for (_, before), (node, after) in itertools.pairwise(path):
        module = _module_of(node, graph, model)
        if _passes(node, module):
            if math.prod(before) != math.prod(after):
                raise Unsupported(f"not supported because {_label(node, graph)} mixes the examples of a batch")
        elif type(module) in _LINEAR:
            pending.append(_operation(node, module, before, after, names))
        else:
            found = activation_of(node, module)
            if found is None:
                known = ", ".join(INVERTIBLE)
                raise Unsupported(
                    f"not supported because layer {_label(node, graph)} is neither a convolution, a linear layer or an "
                    f"average pooling nor an activation that can be inverted ({known})"
                )
            if not pending:
                raise Unsupported(f"not supported because the activation {_label(node, graph)} follows no linear layer")
            stages.append(Stage(operations=tuple(pending), activation=found))
            pending = []
    if pending:
        stages.append(Stage(operations=tuple(pending), activation=Activation("identity")))
    used = [o.weight_name for stage in stages for o in stage.operations if o.weight_name is not None]
    repeated = sorted({name for name in used if used.count(name) > 1})
    if repeated:
        raise Unsupported(f"not supported because {', '.join(repeated)} is used twice: its gradient is a sum of two")
    if not used:
        raise Unsupported("not supported because the model has no layer with weights")
    return tuple(stages)


def _operation(
    node: fx.Node, module: Any, before: tuple[int, ...], after: tuple[int, ...], names: Mapping[int, str]
) -> Operation:
    label = f"layer {node.target!r} ({type(module).__name__})"
    parameters: dict[str, str | None] = {"weight": None, "bias": None}
    if not isinstance(module, POOLINGS):
        for part in parameters:
            value = getattr(module, part)
            if value is not None and id(value) not in names:
                raise Unsupported(f"not supported because the {part} of {label} is computed from other parameters")
            parameters[part] = None if value is None else names[id(value)]
    if isinstance(module, nn.Linear) and len(before) != 1:
        raise Unsupported(f"not supported because {label} is applied to a map of shape {before}, not to a flat vector")
    if isinstance(module, nn.AvgPool2d) and module.divisor_override is not None:
        raise Unsupported(f"not supported because {label} has a divisor of its own")
    name = node.target if node.op == "call_module" else node.name
    return Operation(
        name=str(name),
        module=module,
        input_shape=before,
        output_shape=after,
        weight_name=parameters["weight"],
        bias_name=parameters["bias"],
    )


def _passes(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the values of an example come out as they went in, in the same order."""
    if module is not None:
        return type(module) in _PASSED
    if node.target is nn.functional.dropout:
        return node.kwargs.get("training") is False or (len(node.args) > 2 and node.args[2] is False)
    return node.target in _PASSED_FUNCTIONS or (node.op == "call_method" and node.target in _PASSED_METHODS)


def _module_of(node: fx.Node, graph: fx.GraphModule, model: nn.Module) -> nn.Module | None:
    """The layer of a node; a pooling called as a function is turned into one."""
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    pooling: tuple[Callable[..., nn.Module], tuple[str, ...]] | None = _POOLING_FUNCTIONS.get(node.target)
    if pooling is None:
        return None
    cls, names = pooling
    return cls(
        **{**dict(zip(names, node.args[1:], strict=False)), **{k: v for k, v in node.kwargs.items() if k in names}}
    )


def _label(node: fx.Node, graph: fx.GraphModule) -> str:
    if node.op == "call_module":
        return f"{node.target!r} ({type(graph.get_submodule(str(node.target))).__name__})"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{node.name!r} ({name})"
