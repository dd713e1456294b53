"""Find the way of a tensor through a model from its symbolic trace: layers in a row, or two paths added up."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from leakscope.contracts.errors import NotApplicable

ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")


@dataclass(frozen=True, kw_only=True)
class Sum:
    """Two paths that part at one tensor, and the node that adds them up; a path without nodes is the tensor itself."""

    node: fx.Node
    paths: tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]


def trace(model: nn.Module) -> fx.GraphModule:
    """Run the model's own code on stand-ins for tensors."""
    try:
        return fx.GraphModule(model, fx.Tracer().trace(model))
    # The model's code can fail on stand-ins in any way that code can.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
        raise NotApplicable(f"the model's code cannot be traced: {reason}") from error


class _ShapeNotes(fx.Interpreter):
    """Unlike torch's ShapeProp, it does not load a library for symbolic shapes, which takes longer than an attack."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["shape"] = tuple(result.shape) if isinstance(result, Tensor) else None
        n.meta["constant"] = None if isinstance(result, Tensor) else result
        return result


def note_shapes(graph: fx.GraphModule, sample: Tensor) -> None:
    """Run ``graph`` once, and note at each node the shape of its result, or the result where it is no tensor."""
    _ShapeNotes(graph).run(sample)


def find_path(graph: fx.GraphModule, sample: Tensor, *, residual: bool) -> list[fx.Node | Sum]:
    """Return the nodes between input and output for a batch like ``sample``; sums only where ``residual`` is set."""
    note_shapes(graph, sample)
    previous: dict[fx.Node, fx.Node | None] = {}  # what a node reads; for a sum, the node at which its paths part
    sums: dict[fx.Node, Sum] = {}
    last: fx.Node | None = None
    for node in graph.graph.nodes:
        if node.op == "output":
            (last,) = node.args
            if not isinstance(last, fx.Node) or not _is_tensor(last):
                raise NotApplicable("the model returns something else than its last layer")
            continue
        if not _is_tensor(node):
            continue  # a size, or arithmetic with sizes
        tensors = [n for n in node.all_input_nodes if _is_tensor(n)]
        if node.op == "placeholder":
            if previous:
                raise NotApplicable("the model has several inputs")
            previous[node] = None
        elif node.op == "get_attr":
            raise NotApplicable(f"the model uses the tensor {node.target!r} outside of a layer")
        elif node.target in ADDITIONS and len(tensors) == 2:
            if not residual:
                words = "joins two paths (a residual connection): only one of two summands can be solved for"
                raise NotApplicable(f"{label(node, graph)} {words}")
            previous[node], sums[node] = _join(node, tensors, previous, sums, graph)
        elif len(tensors) == 1:
            previous[node] = tensors[0]
        else:
            raise NotApplicable(f"{label(node, graph)} does not read the layer before it alone")
    path = [sums.get(node, node) for node in _back_to(None, last, previous)]
    used: set[fx.Node] = set()
    for step in path:
        used.update((step.node, *step.paths[0], *step.paths[1]) if isinstance(step, Sum) else (step,))
    if unused := next((node for node in previous if node not in used), None):
        raise NotApplicable(f"{label(unused, graph)} is not on the way to the output")
    return path[1:]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["shape"][1:])


def shape_before(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the one tensor that a node reads, without the batch."""
    return next(shape_of(read) for read in node.all_input_nodes if _is_tensor(read))


def label(node: fx.Node, graph: fx.GraphModule) -> str:
    if node.op == "call_module":
        return f"{node.target!r} ({type(graph.get_submodule(str(node.target))).__name__})"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{node.name!r} ({name})"


def _join(
    node: fx.Node,
    tensors: list[fx.Node],
    previous: Mapping[fx.Node, fx.Node | None],
    sums: Mapping[fx.Node, Sum],
    graph: fx.GraphModule,
) -> tuple[fx.Node, Sum]:
    first, second = tensors
    if len(node.args) != 2 or node.kwargs or shape_of(first) != shape_of(second):
        raise NotApplicable(f"{label(node, graph)} is no plain sum of two tensors of one shape")
    behind = set(_back_to(None, first, previous))
    start = next(n for n in reversed(_back_to(None, second, previous)) if n in behind)
    paths = (tuple(_back_to(start, first, previous)), tuple(_back_to(start, second, previous)))
    for inner in (n for path in paths for n in path if n in sums):
        raise NotApplicable(f"{label(node, graph)} joins more than two paths: {label(inner, graph)} is on one")
    return start, Sum(node=node, paths=paths)


def _back_to(start: fx.Node | None, node: fx.Node | None, previous: Mapping[fx.Node, fx.Node | None]) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    while node is not start and node is not None:
        nodes.append(node)
        node = previous[node]
    return nodes[::-1]


def _is_tensor(node: fx.Node) -> bool:
    return node.meta.get("shape") is not None
