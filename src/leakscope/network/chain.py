"""Read a feed-forward network as a chain of stages: linear operations, then one activation that can be inverted.

The closed-form attacks (R-GAP, Zhu and Blaschko, ICLR 2021; Hybrid, Chen and Campbell, BMVC 2022) walk from the loss to
the input, one stage at a time. The model is traced symbolically to find the order of its layers, and what is no such
chain is refused by name. A sum of two paths has two unknowns for one value; it is read on demand, where equations for
both are known (limits/residual.py).
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from leakscope.contracts.errors import NotApplicable, UserError
from leakscope.network.activations import INVERTIBLE, Activation, activation_of
from leakscope.network.paths import Sum, find_path, label, shape_before, shape_of, trace

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
POOLINGS = (nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
#: Affine with their running statistics only.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_LINEAR = (*CONVOLUTIONS, nn.Linear, *POOLINGS)
PASSED = (nn.Flatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
PASSED_FUNCTIONS = (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, nn.functional.dropout)
PASSED_METHODS = ("flatten", "view", "reshape", "squeeze", "unsqueeze", "contiguous")
_WINDOW = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
_POOLING_FUNCTIONS: Mapping[Any, tuple[type[nn.Module], tuple[str, ...]]] = {
    nn.functional.avg_pool1d: (nn.AvgPool1d, _WINDOW),
    nn.functional.avg_pool2d: (nn.AvgPool2d, (*_WINDOW, "divisor_override")),
    nn.functional.adaptive_avg_pool1d: (nn.AdaptiveAvgPool1d, ("output_size",)),
    nn.functional.adaptive_avg_pool2d: (nn.AdaptiveAvgPool2d, ("output_size",)),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One affine map in float64: a convolution, a linear layer, an average pooling, or a BatchNorm in eval mode.

    Shapes are without the batch; ``weight_name`` and ``bias_name`` are those of ``model.named_parameters()``.
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
        """Apply the map to a batch, which may come flattened; differentiable."""
        output: Tensor = self.module(x.reshape(-1, *self.input_shape))
        return output


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """Affine operations, then one activation (identity where there is none)."""

    operations: tuple[Operation, ...]
    activation: Activation

    @property
    def name(self) -> str:
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
        """Tell whether the first operation with weights, other than those of a BatchNorm, is a convolution."""
        weighted = [one.module for one in self.operations if one.weight_name is not None]
        first = next((module for module in weighted if not isinstance(module, BATCH_NORMS)), None)
        return isinstance(first, CONVOLUTIONS)

    def linear(self, x: Tensor) -> Tensor:
        for operation in self.operations:
            x = operation(x)
        return x

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualStage(Stage):
    """``activation(shortcut(x) + outer(inner(x)))``; ``operations`` are those of all three.

    Only ``inner`` has an activation; a shortcut None passes x on. Its equations are in limits/residual.py.
    """

    inner: Stage
    outer: Stage
    shortcut: Stage | None

    @property
    def name(self) -> str:
        """Return what the names of its operations begin with, such as "blocks.0"; all of them where this is nothing."""
        words = zip(*(operation.name.split(".") for operation in self.operations), strict=False)
        return ".".join(first for first, *_ in itertools.takewhile(lambda w: len(set(w)) == 1, words)) or super().name

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.outer.output_shape

    def linear(self, x: Tensor) -> Tensor:
        passed = x if self.shortcut is None else self.shortcut.linear(x)
        return self.outer.linear(self.inner(x)) + passed.reshape(-1, *self.output_shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """A model as stages in the order of execution; ``model`` is the float64 copy whose modules the stages hold."""

    model: nn.Module
    stages: tuple[Stage, ...]

    def run(self, x: Tensor, start: int = 0) -> Tensor:
        """Compute the flat output for the input ``x`` of stage ``start``; differentiable in ``x`` and the weights."""
        for stage in self.stages[start:]:
            x = stage(x)
        return x.flatten(1)

    def parameters(self, start: int = 0) -> dict[str, nn.Parameter]:
        operations = [operation for stage in self.stages[start:] for operation in stage.operations]
        names = [name for o in operations for name in (o.weight_name, o.bias_name) if name is not None]
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name] for name in names if parameters[name].requires_grad}


def read_chain(
    model: nn.Module, input_shape: tuple[int, ...], *, residual: bool = False, batch_norm: bool = False
) -> Chain:
    """Read the stages of ``model``, or raise :class:`NotApplicable` that names the layer which stands in the way.

    ``residual`` allows a :class:`ResidualStage`; ``batch_norm``: BatchNorm uses running statistics, so it is affine.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    >>> [(stage.name, stage.activation.name, stage.unknowns) for stage in read_chain(net, (1, 4, 4)).stages]
    [('0', 'tanh', 16), ('3', 'identity', 8)]
    """
    twin = copy.deepcopy(model).eval().to(device="cpu", dtype=torch.float64)
    graph = trace(twin)
    sample = torch.rand((2, *input_shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        with torch.no_grad():
            expected = twin(sample)
            path = find_path(graph, sample, residual=residual)
    except NotApplicable:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"the model does not run on inputs of shape {tuple(input_shape)}: {error}. Check input_shape, which is "
            "without the batch."
        ) from error
    stages = _Reader(graph=graph, model=twin, batch_norm=batch_norm).stages(path)
    _check_weights(stages)
    chain = Chain(model=twin, stages=tuple(stages))
    with torch.no_grad():
        outputs = chain.run(sample)
    if not (isinstance(expected, Tensor) and torch.allclose(outputs, expected.flatten(1), rtol=1e-9, atol=1e-12)):
        raise NotApplicable("the model computes something else than its layers in a row (hooks?)")
    return chain


@dataclass(frozen=True, kw_only=True, eq=False)
class _Reader:
    graph: fx.GraphModule
    model: nn.Module
    batch_norm: bool

    def stages(self, path: Iterable[fx.Node | Sum]) -> list[Stage]:
        stages: list[Stage] = []
        pending: list[Operation] = []
        for step in path:
            if isinstance(step, Sum):
                stages, pending = [*stages, *_closed(pending), self._block(step)], []
                continue
            piece = self._piece(step)
            if isinstance(piece, Operation):
                pending.append(piece)
            elif piece is not None and pending:
                stages, pending = [*stages, Stage(operations=tuple(pending), activation=piece)], []
            elif piece is not None:
                # Behind a sum, an activation belongs to the block.
                if not (stages and isinstance(stages[-1], ResidualStage) and stages[-1].activation.name == "identity"):
                    raise NotApplicable(f"the activation {label(step, self.graph)} follows no linear layer")
                stages[-1] = dataclasses.replace(stages[-1], activation=piece)
        return [*stages, *_closed(pending)]

    def _block(self, joined: Sum) -> ResidualStage:
        """Read a sum: one path is linear, the other has one activation with linear layers on both sides of it."""
        name = label(joined.node, self.graph)
        (shortcut, _), (body, nodes) = sorted(
            ((self.stages(path), path) for path in joined.paths), key=lambda pair: _activations(pair[0])
        )
        if _activations(shortcut):
            nodes = tuple(n for path in joined.paths for n in path if isinstance(self._piece(n), Activation))
            words = ", ".join(label(n, self.graph) for n in nodes)
            raise NotApplicable(f"both paths that {name} joins have activations ({words})")
        if _activations(body) != 1 or len(body) != 2:
            words = ", ".join(label(n, self.graph) for n in nodes) or "nothing"
            raise NotApplicable(
                f"{name} joins a path that is not linear layers, one activation, linear layers ({words})"
            )
        (inner, outer), linear = body, shortcut[0] if shortcut else None
        operations = tuple(operation for stage in (*body, *shortcut) for operation in stage.operations)
        identity = Activation("identity")
        return ResidualStage(operations=operations, activation=identity, inner=inner, outer=outer, shortcut=linear)

    def _piece(self, node: fx.Node) -> Operation | Activation | None:
        """Return what a node does to the values of an example; None where they stay as they are."""
        module = _module_of(node, self.model)
        if passes(node, module):
            if math.prod(shape_before(node)) != math.prod(shape_of(node)):
                raise NotApplicable(f"{label(node, self.graph)} mixes the examples of a batch")
            return None
        if isinstance(module, BATCH_NORMS) and (not self.batch_norm or module.running_mean is None):
            words = "is no linear layer unless it uses running statistics (eval mode)"
            raise NotApplicable(f"layer {label(node, self.graph)} {words}")
        if type(module) in _LINEAR or isinstance(module, BATCH_NORMS):
            return self._operation(node, module)
        activation = activation_of(node, module)
        if activation is None:
            raise NotApplicable(
                f"layer {label(node, self.graph)} is neither a convolution, a linear layer or an "
                f"average pooling nor an activation that can be inverted ({', '.join(INVERTIBLE)})"
            )
        return activation

    def _operation(self, node: fx.Node, module: Any) -> Operation:
        shown, before = f"layer {label(node, self.graph)}", shape_before(node)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        parameters: dict[str, str] = {}
        for part in () if isinstance(module, POOLINGS) else ("weight", "bias"):
            value = getattr(module, part)
            if value is not None and id(value) not in names:
                raise NotApplicable(f"the {part} of {shown} is computed from other parameters")
            if value is not None:
                parameters[f"{part}_name"] = names[id(value)]
        if isinstance(module, nn.Linear) and len(before) != 1:
            raise NotApplicable(f"{shown} is applied to a map of shape {before}, not to a flat vector")
        if isinstance(module, nn.AvgPool2d) and module.divisor_override is not None:
            raise NotApplicable(f"{shown} has a divisor of its own")
        name = str(node.target if node.op == "call_module" else node.name)
        return Operation(name=name, module=module, input_shape=before, output_shape=shape_of(node), **parameters)


def _closed(operations: list[Operation]) -> list[Stage]:
    return [Stage(operations=tuple(operations), activation=Activation("identity"))] if operations else []


def _activations(stages: Iterable[Stage]) -> int:
    return sum(stage.activation.name != "identity" for stage in stages)


def _check_weights(stages: Iterable[Stage]) -> None:
    used = [o.weight_name for stage in stages for o in stage.operations if o.weight_name is not None]
    repeated = sorted({name for name in used if used.count(name) > 1})
    if repeated:
        raise NotApplicable(f"{', '.join(repeated)} is used twice: its gradient is a sum of two")
    if not used:
        raise NotApplicable("the model has no layer with weights")


def passes(node: fx.Node, module: nn.Module | None) -> bool:
    """Tell whether the values of an example come out as they went in, in the same order."""
    if module is not None:
        return type(module) in PASSED
    if node.target is nn.functional.dropout:
        return node.kwargs.get("training") is False or (len(node.args) > 2 and node.args[2] is False)
    return node.target in PASSED_FUNCTIONS or (node.op == "call_method" and node.target in PASSED_METHODS)


def _module_of(node: fx.Node, model: nn.Module) -> nn.Module | None:
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    if node.target not in _POOLING_FUNCTIONS:
        return None
    cls, names = _POOLING_FUNCTIONS[node.target]
    options = dict(zip(names, node.args[1:], strict=False)) | {k: v for k, v in node.kwargs.items() if k in names}
    return cls(**options)
