"""Reads a model up to a cut as the steps and gates of a :class:`~leakscope.network.gates.GatedNetwork`."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.network.chain import BATCH_NORMS, CONVOLUTIONS, POOLINGS
from leakscope.network.gates import GatedNetwork, Step, WeightedLayer
from leakscope.network.paths import label, note_shapes, shape_of, trace
from leakscope.network.recorder import record_layers

_MAXIMA = (nn.MaxPool1d, nn.MaxPool2d)
_SAME = (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
_SAME_FUNCTIONS = (torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, F.dropout)
_SAME_METHODS = ("flatten", "view", "reshape", "squeeze", "unsqueeze", "contiguous")
_AVERAGE_FUNCTIONS = (F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, torch.mean, "mean")
_RELU_FUNCTIONS = (F.relu, torch.relu, F.relu_, torch.relu_, "relu", "relu_")
_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")


def read_gated(model: nn.Module, input_shape: tuple[int, ...], cut: str) -> GatedNetwork:
    """The steps of ``model`` up to what the layer called ``cut`` receives, in float64.

    :class:`NotApplicable` names the layer that is neither affine nor a gate. BatchNorm layers use running statistics.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    >>> [step.kind for step in read_gated(net, (1, 4, 4), "3").steps]
    ['input', 'weighted', 'relu', 'reshape']
    """
    twin = copy.deepcopy(model).eval().to(device="cpu", dtype=torch.float64).requires_grad_(False)
    graph = trace(twin)
    sample = torch.rand((2, *input_shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        try:
            twin(sample)
        # The model's code can fail on float64 in any way that code can.
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise NotApplicable(f"the model does not run in float64: {reason}") from error
        note_shapes(graph, sample)
    last = next((n for n in graph.graph.nodes if n.op == "call_module" and n.target == cut), None)
    if last is None:
        raise NotApplicable(f"the model does not call the layer {cut!r} by itself")
    network = _Reader(twin, graph).read(next(n for n in last.all_input_nodes))
    record = record_layers(twin, sample, lambda name, _: name == cut)
    ours = network.run(sample).features
    reference = [call.inputs.flatten(1) for call in record.calls]
    if len(reference) != 1 or not torch.allclose(ours.flatten(1), reference[0], rtol=1e-9, atol=1e-12):
        raise NotApplicable("the model computes something else than its layers say (hooks?)")
    return network


class _Reader:
    def __init__(self, model: nn.Module, graph: fx.GraphModule) -> None:
        self.model, self.graph = model, graph
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}

    def read(self, last: fx.Node) -> GatedNetwork:
        needed = _needed(last)
        numbers: dict[fx.Node, int] = {}
        steps: list[Step] = []
        for node in self.graph.graph.nodes:
            if node in needed:
                numbers[node] = len(steps)
                steps.append(self._step(node, numbers))
        if steps[0].kind != "input" or sum(step.kind == "input" for step in steps) != 1:
            raise NotApplicable("the model has several inputs")
        layers = tuple(self._layer(number, steps) for number, step in enumerate(steps) if step.kind == "weighted")
        if not layers:
            raise NotApplicable("no layer with weights is below the cut")
        names = [layer.weight_name for layer in layers]
        if len(set(names)) < len(names):
            raise NotApplicable("a weight is used twice: its gradient is a sum of two")
        return GatedNetwork(tuple(steps), layers)

    def _step(self, node: fx.Node, numbers: Mapping[fx.Node, int]) -> Step:
        sources = tuple(numbers[n] for n in node.all_input_nodes if n in numbers)
        name = str(node.target if node.op == "call_module" else node.name)
        facts: dict[str, Any] = {"name": name, "sources": sources, "shape": shape_of(node)}
        if node.op == "placeholder":
            return Step(kind="input", **facts)
        if node.target in _ADDITIONS and len(sources) == 2:
            return Step(kind="add", **facts)
        if len(sources) != 1:
            raise NotApplicable(f"{label(node, self.graph)} does not read the layer before it alone")
        if node.op == "call_module":
            return self._module_step(node, facts)
        return self._function_step(node, facts)

    def _module_step(self, node: fx.Node, facts: dict[str, Any]) -> Step:
        module = self.model.get_submodule(str(node.target))
        if isinstance(module, (*CONVOLUTIONS, nn.Linear)):
            return Step(kind="weighted", module=self._checked(node, module), **facts)
        if isinstance(module, BATCH_NORMS) and module.running_mean is not None:
            return Step(kind="affine", module=module, **facts)
        if isinstance(module, POOLINGS):
            return Step(kind="affine", function=module, **facts)
        if isinstance(module, nn.ReLU):
            return Step(kind="relu", **facts)
        if isinstance(module, nn.LeakyReLU):
            return Step(kind="relu", slope=float(module.negative_slope), **facts)
        if isinstance(module, _MAXIMA):
            return Step(kind="max", **_pooling(module), **facts)
        if type(module) in _SAME:
            return Step(kind="reshape", **facts)
        raise self._refusal(node)

    def _function_step(self, node: fx.Node, facts: dict[str, Any]) -> Step:
        options: dict[str, Any] = dict(node.kwargs)
        arguments: tuple[Any, ...] = node.args[1:]
        if node.target in _RELU_FUNCTIONS:
            return Step(kind="relu", **facts)
        if node.target is F.leaky_relu:
            slope = arguments[0] if arguments else options.get("negative_slope", 0.01)
            return Step(kind="relu", slope=float(slope), **facts)
        if node.target in (F.max_pool1d, F.max_pool2d):
            kind: Any = nn.MaxPool1d if node.target is F.max_pool1d else nn.MaxPool2d
            options.pop("return_indices", None)
            return Step(kind="max", **_pooling(kind(*arguments, **options)), **facts)
        if node.target in _AVERAGE_FUNCTIONS:
            call: Any = torch.mean if node.target == "mean" else node.target
            return Step(kind="affine", function=lambda x: call(x, *arguments, **options), **facts)
        if node.target in _SAME_FUNCTIONS or (node.op == "call_method" and node.target in _SAME_METHODS):
            return Step(kind="reshape", **facts)
        raise self._refusal(node)

    def _checked(self, node: fx.Node, module: Any) -> nn.Module:
        if id(module.weight) not in self.names:
            raise NotApplicable(f"the weight of {label(node, self.graph)} is computed from other parameters")
        if isinstance(module, nn.Linear):
            if len(shape_of(node)) != 1:
                raise NotApplicable(f"{label(node, self.graph)} is applied to each place of a map")
        elif module.groups != 1 or module.padding_mode != "zeros":
            raise NotApplicable(f"{label(node, self.graph)} has groups, or pads with something else than zeros")
        return module

    def _refusal(self, node: fx.Node) -> NotApplicable:
        return NotApplicable(
            f"{label(node, self.graph)} is neither an affine layer nor a ReLU, a LeakyReLU or a max pooling"
        )

    def _layer(self, number: int, steps: list[Step]) -> WeightedLayer:
        module: Any = steps[number].module
        bias = None if module.bias is None else self.names[id(module.bias)]
        return WeightedLayer(
            step=number,
            weight_name=self.names[id(module.weight)],
            bias_name=bias,
            module=module,
            gate=_gate_behind(number, steps),
            first=_reads_input(number, steps),
        )


def _needed(last: fx.Node) -> set[fx.Node]:
    """The nodes with tensors that ``last`` depends on."""
    needed: set[fx.Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if node in needed:
            continue
        if node.op == "get_attr":
            raise NotApplicable(f"the model uses the tensor {node.target!r} outside of a layer")
        needed.add(node)
        waiting += [n for n in node.all_input_nodes if n.meta.get("shape") is not None]
    return needed


def _gate_behind(number: int, steps: list[Step]) -> int | None:
    """The ReLU that reads the output of a step, through nothing but BatchNorm, sums and steps that keep the shape."""
    shape = steps[number].shape
    while True:
        readers = [n for n, step in enumerate(steps) if number in step.sources]
        if len(readers) != 1 or steps[readers[0]].shape != shape:
            return None
        number = readers[0]
        if steps[number].kind == "relu":
            return number
        if steps[number].kind not in ("reshape", "add") and not isinstance(steps[number].module, BATCH_NORMS):
            return None


def _reads_input(number: int, steps: list[Step]) -> bool:
    """Whether nothing with a gate or weights is before the step."""
    waiting = list(steps[number].sources)
    while waiting:
        step = steps[waiting.pop()]
        if step.kind in ("weighted", "relu", "max"):
            return False
        waiting += step.sources
    return True


def _pooling(module: Any) -> dict[str, Any]:
    """Of a max pooling: the places of its maxima in the flattened map, and the average over the same windows."""
    if module.dilation not in (1, (1, 1)):
        raise NotApplicable("a max pooling with dilation")
    module = copy.deepcopy(module)
    module.return_indices = True
    kind: Any = nn.AvgPool1d if isinstance(module, nn.MaxPool1d) else nn.AvgPool2d
    average = kind(module.kernel_size, module.stride, module.padding, module.ceil_mode)
    return {"function": lambda x: module(x)[1], "average": average}
