"""Read the dense layers that lead to the head, with elementwise activations between them, from the symbolic trace."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from leakscope.contracts.errors import NotApplicable
from leakscope.network.chain import passes
from leakscope.network.paths import label, trace

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class DenseStep:
    """A dense layer below the head, and what becomes of its outputs on their way into the layer above, in float64."""

    name: str
    module: nn.Linear
    activation: Elementwise


@dataclass(frozen=True, eq=False)
class DensePath:
    """Dense layers from the head (excluded) downwards, and why there are no more.

    ``reads_input``: for each number of layers taken, from none on, whether the inputs reached are the model's.
    """

    steps: tuple[DenseStep, ...]
    reads_input: tuple[bool, ...]
    reason: str


def dense_path(model: nn.Module, head: str) -> DensePath:
    """Find the dense layers below ``head``, for a model in evaluation mode; none where its code cannot be traced.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    >>> path = dense_path(net, "3")
    >>> [step.name for step in path.steps], path.reads_input, path.reason
    (['1'], (False, True), 'the input is reached')
    """
    twin = copy.deepcopy(model).eval().to(device="cpu", dtype=torch.float64)
    steps: list[DenseStep] = []
    try:
        graph = trace(twin)
        node = _only_call(graph, head)
        while (found := _below(graph, twin, node)) is not None:
            step, node = found
            steps.append(step)
    except NotApplicable as error:
        return DensePath(tuple(steps), (False,) * (len(steps) + 1), str(error))
    return DensePath(tuple(steps), (*[False] * len(steps), True), "the input is reached")


def _below(graph: fx.GraphModule, model: nn.Module, node: fx.Node) -> tuple[DenseStep, fx.Node] | None:
    """Find the dense layer whose outputs a layer reads; None where it reads the input."""
    between: list[Elementwise] = []
    while True:
        read = node.args[0] if node.args else None
        if not isinstance(read, fx.Node):
            raise NotApplicable(f"{label(node, graph)} does not read the layer before it alone")
        node = read
        if node.op == "placeholder":
            if between:
                raise NotApplicable(f"an activation stands between the input and {label(node, graph)}")
            return None
        if sum(not _is_size(user) for user in node.users) != 1:
            raise NotApplicable(f"{label(node, graph)} is used twice")
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.Linear):
            _only_call(graph, str(node.target))
            return DenseStep(str(node.target), module, _chained(between)), node
        if passes(node, module):
            continue
        function = _function(node, module)
        if not _is_elementwise(function):
            raise NotApplicable(f"{label(node, graph)} is neither a dense layer nor an elementwise activation")
        between.insert(0, function)


def _only_call(graph: fx.GraphModule, name: str) -> fx.Node:
    calls = [node for node in graph.graph.nodes if node.op == "call_module" and node.target == name]
    weight = graph.get_submodule(name).weight
    shared = sum(weight is parameter for module in graph.modules() for parameter in module.parameters(recurse=False))
    if len(calls) != 1 or shared != 1:
        raise NotApplicable(f"layer {name!r} does not run once with weights of its own")
    return calls[0]


def _is_size(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target in ("size", "dim")) or node.target is getattr


def _function(node: fx.Node, module: nn.Module | None) -> Elementwise:
    rest, options = node.args[1:], dict(node.kwargs)
    if module is not None:
        return lambda x: module(x)
    if node.op == "call_method":
        return lambda x: getattr(x, str(node.target))(*rest, **options)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]  # a function's node holds the function
    return lambda x: target(x, *rest, **options)


def _chained(functions: list[Elementwise]) -> Elementwise:
    def run(x: Tensor) -> Tensor:
        for function in functions:
            x = function(x.clone())  # an activation in place must not change what the caller holds
        return x

    return run


def _is_elementwise(function: Elementwise) -> bool:
    row = torch.linspace(-2, 2, 12, dtype=torch.float64)[None]
    moved = row.clone()
    moved[0, 4] += 0.7
    with torch.no_grad():
        try:
            before, after = function(row.clone()), function(moved.clone())
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
    alike = isinstance(before, Tensor) and before.shape == row.shape
    return alike and bool(((before == after) | (row != moved)).all())
