"""Read a piecewise-linear network below a cut as affine steps, and gates that choose the piece an example is on.

A ReLU multiplies each number by 0 or 1; a max pooling passes one number of each window on. With these gates held the
network is affine in its input, and each weight's gradient is linear in what the layer receives: this is what
equations/gated_inverse.py solves.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.network.chain import BATCH_NORMS, CONVOLUTIONS, PASSED, PASSED_FUNCTIONS, PASSED_METHODS, POOLINGS
from leakscope.network.paths import ADDITIONS, label, note_shapes, shape_of, trace
from leakscope.network.recorder import record_layers

#: By the number of a gate's step: what a ReLU multiplies by, or the places that a max pooling passes on.
Gates = dict[int, Tensor]
_AVERAGE_FUNCTIONS = (F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, torch.mean, "mean")
_RELU_FUNCTIONS = (F.relu, torch.relu, F.relu_, torch.relu_, "relu", "relu_")
StepKind = Literal["input", "weighted", "affine", "reshape", "add", "relu", "max"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One operation on the values of ``sources``, affine unless it is a gate (kinds "relu" and "max").

    ``slope``: factor of a shut ReLU, 0 or a LeakyReLU's. ``average``: the average pooling with a max pooling's windows.
    """

    name: str
    kind: StepKind
    sources: tuple[int, ...]
    shape: tuple[int, ...]
    module: nn.Module | None = None
    function: Callable[[Tensor], Tensor] | None = None
    average: Callable[[Tensor], Tensor] | None = None
    slope: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedLayer:
    """A convolution or linear layer; ``gate`` is the step of a ReLU that reads its output number by number, if any."""

    step: int
    weight_name: str
    bias_name: str | None
    module: nn.Linear | nn.Conv1d | nn.Conv2d
    gate: int | None
    first: bool

    def patches(self, values: Tensor) -> Tensor:
        """Return what each output number reads: (examples, inputs of a unit, places)."""
        module = self.module
        if isinstance(module, nn.Linear):
            return values.reshape(len(values), -1, 1)
        if isinstance(module, nn.Conv1d):
            values = values[:, :, None]
        # One-dimensional convolutions have a first axis of length one.
        size, stride, dilation = ((1, *part)[-2:] for part in (module.kernel_size, module.stride, module.dilation))
        before, after = padding_of(module)
        if before == after:
            return F.unfold(values, size, dilation=dilation, padding=before, stride=stride)
        values = F.pad(values, (before[1], after[1], before[0], after[0]))
        return F.unfold(values, size, dilation=dilation, stride=stride)

    def weight_gradient(self, values: Tensor, signal: Tensor) -> Tensor:
        """Return the gradient (units, inputs of a unit) for a derivative (examples, units, places) at the output."""
        return torch.einsum("ncl,npl->cp", signal, self.patches(values))


@dataclass(frozen=True, eq=False)
class Pass:
    """One run: what gates and weighted layers received, the state of the gates, the values at the cut."""

    received: dict[int, Tensor]
    inputs: dict[int, Tensor]
    gates: Gates
    features: Tensor


@dataclass(frozen=True, eq=False)
class Ahead:
    """What one step's value gives further on: values and states of the gates, by step."""

    values: dict[int, Tensor]
    gates: Gates


@dataclass(frozen=True, eq=False)
class GatedNetwork:
    """The steps from the input (number 0) to the cut (the last one), and the weighted layers among them."""

    steps: tuple[Step, ...]
    layers: tuple[WeightedLayer, ...]

    @property
    def work(self) -> int:
        return sum(layer.module.weight.numel() * math.prod(self.steps[layer.step].shape[1:]) for layer in self.layers)

    @property
    def batched(self) -> bool:
        """Return whether examples depend on each other: BatchNorm uses the statistics of the batch."""
        return any(isinstance(step.module, BATCH_NORMS) and step.module.training for step in self.steps)

    def to(self, dtype: torch.dtype) -> GatedNetwork:
        modules: dict[int, Any] = {id(s.module): copy.deepcopy(s.module).to(dtype) for s in self.steps if s.module}
        steps = tuple(dataclasses.replace(step, module=modules.get(id(step.module))) for step in self.steps)
        layers = tuple(dataclasses.replace(layer, module=modules[id(layer.module)]) for layer in self.layers)
        return GatedNetwork(steps, layers)

    def run(self, x: Tensor) -> Pass:
        gates: Gates = {}
        values = [x]
        for number, step in enumerate(self.steps[1:], start=1):
            source = values[step.sources[0]]
            gate = _gate(step, source)
            if gate is not None:
                gates[number] = gate
            values.append(apply_step(step, [values[n] for n in step.sources], gates.get(number), bias=True))
        received = {number: values[self.steps[number].sources[0]] for number in gates}
        return Pass(received, self._inputs(values), gates, values[-1])

    def onwards(self, number: int, value: Tensor) -> Ahead:
        """Run all steps that depend on nothing but the value of one step."""
        values, gates = {number: value}, Gates()
        for later, step in enumerate(self.steps[number + 1 :], start=number + 1):
            if not step.sources or any(source not in values for source in step.sources):
                continue
            gate = _gate(step, values[step.sources[0]])
            if gate is not None:
                gates[later] = gate
            values[later] = apply_step(step, [values[n] for n in step.sources], gate, bias=True)
        return Ahead(values, gates)

    def received(
        self, number: int, value: Tensor, known: Mapping[int, Tensor], watched: int | None = None
    ) -> dict[int, Tensor]:
        """Return what ReLUs of ``known`` value receive that see the value of one step past other known values.

        Maxima of a ReLU's values are its value of the maxima, so that known ones are compared in front of it, too.
        ``watched``: a step whose value, which is not known, is returned, too.
        """
        values, found, seen = {number: value, **known}, dict[int, Tensor](), {number}
        for later in range(number + 1, 1 + max(known, default=number)):
            step = self.steps[later]
            if not step.sources or any(source not in values for source in step.sources):
                continue
            sees = any(source in seen for source in step.sources)
            if later in known:
                if sees:
                    found[later] = self._before_relu(later, values)
                continue
            held = [values[source] for source in step.sources]
            values[later] = apply_step(step, held, _gate(step, held[0]), bias=True)
            if sees:
                seen.add(later)
            if later == watched:
                found[later] = values[later]
        return found

    def relu_behind(self, number: int) -> int | None:
        """Return the ReLU whose values, or their maxima, a step passes on.

        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3))
        >>> read_gated(net, (1, 4, 4), "4").relu_behind(3)
        2
        """
        while self.steps[number].kind in ("max", "reshape"):
            number = self.steps[number].sources[0]
        return number if self.steps[number].kind == "relu" else None

    def _before_relu(self, number: int, values: Mapping[int, Tensor]) -> Tensor:
        """Return what a step would pass on without the ReLU behind it; its value where there is none."""
        step = self.steps[number]
        if self.relu_behind(number) is None:
            held = [values[source] for source in step.sources]
            return apply_step(step, held, _gate(step, held[0]), bias=True)
        if step.kind == "relu":
            return values[step.sources[0]]
        source = self._before_relu(step.sources[0], values)
        return apply_step(step, [source], _gate(step, source), bias=True)

    def held(
        self, x: Tensor, gates: Gates, *, bias: bool, slack: Mapping[int, Tensor] | None = None
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Return what weighted layers receive with ``gates`` held, and the values at the cut.

        Both are linear in ``x`` without bias. ``slack`` is added to what gates let through.
        """
        values = self._values(x, gates, bias, slack or {})
        return self._inputs(values), values[-1]

    def signal(self, layer: WeightedLayer, gates: Gates, adjoint: Tensor, *, open_gate: bool = False) -> Tensor:
        """Differentiate <adjoint, values at the cut> by the layer's output, with ``gates`` held, or its own open."""
        if open_gate and layer.gate is not None:
            gates = {**gates, layer.gate: torch.ones_like(gates[layer.gate])}
        start = adjoint.new_zeros((len(adjoint), *self.steps[0].shape), requires_grad=True)
        with torch.enable_grad():
            values = self._values(start, gates, False, {})
            total = (values[-1].flatten(1) * adjoint).sum()
            (signal,) = torch.autograd.grad(total, values[layer.step])
        return signal.flatten(2) if signal.dim() > 2 else signal[:, :, None]

    def shut_gates(self, silent: Tensor) -> dict[int, tuple[Tensor, bool]]:
        """Find ReLUs that only averages, maxima and reshapes separate from the cut, and which units cannot be active.

        ``silent`` (examples, features): where the value at the cut is zero. A mean of numbers that are not negative is
        zero only if all are. The second of each pair: each feature is one unit, so all others are surely active.
        """
        number = len(self.steps) - 1
        behind, single, spread = {number}, True, list[Step]()
        while self.steps[number].kind != "relu":
            step = self.steps[number]
            if step.kind not in ("affine", "reshape", "max") or step.module is not None or len(step.sources) != 1:
                return {}
            single = single and step.kind == "reshape"
            spread.insert(0, step)
            number = step.sources[0]
            if any(number in other.sources for n, other in enumerate(self.steps) if n not in behind):
                return {}
            behind.add(number)
        if self.steps[number].slope:
            return {}
        start = silent.new_zeros((len(silent), *self.steps[number].shape), dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            value = start
            for step in spread:
                value = step.average(value) if step.average is not None else apply_step(step, [value], None, bias=False)
            (touched,) = torch.autograd.grad((value.flatten(1) * silent.double()).sum(), start)
        return {number: (touched > 0, single)}

    def _values(self, x: Tensor, gates: Gates, bias: bool, slack: Mapping[int, Tensor]) -> list[Tensor]:
        values = [x]
        for number, step in enumerate(self.steps[1:], start=1):
            value = apply_step(step, [values[n] for n in step.sources], gates.get(number), bias=bias)
            values.append(value + slack[number] if number in slack else value)
        return values

    def _inputs(self, values: list[Tensor]) -> dict[int, Tensor]:
        return {layer.step: values[self.steps[layer.step].sources[0]] for layer in self.layers}


def _gate(step: Step, source: Tensor) -> Tensor | None:
    if step.kind == "relu":
        return torch.where(source > 0, source.new_ones(()), step.slope)
    return step.function(source) if step.kind == "max" and step.function is not None else None


def apply_step(step: Step, values: list[Tensor], gate: Tensor | None, *, bias: bool) -> Tensor:
    x = values[0]
    if step.kind in ("relu", "max"):
        assert gate is not None
        return x * gate if step.kind == "relu" else x.flatten(2).gather(2, gate.flatten(2)).reshape(gate.shape)
    if step.kind == "add":
        return x + values[1]
    if step.kind == "reshape":
        return x.reshape(len(x), *step.shape)
    if step.function is not None:
        return step.function(x)
    module: Any = step.module
    result: Tensor
    if bias and isinstance(module, BATCH_NORMS) and module.training:
        # Without running statistics, which change in place and cannot be differentiated many directions at a time.
        result = F.batch_norm(x, None, None, module.weight, module.bias, training=True, eps=module.eps)
    elif bias:
        result = module.forward(x)  # past hooks, which would change one of both ways only
    elif isinstance(module, nn.Linear):
        result = F.linear(x, module.weight)
    elif isinstance(module, BATCH_NORMS):
        assert module.running_var is not None  # read_gated refuses others
        scale = torch.rsqrt(module.running_var + module.eps) * (1 if module.weight is None else module.weight)
        result = x * scale.reshape(1, -1, *[1] * (x.dim() - 2))
    else:
        result = module._conv_forward(x, module.weight, None)
    return result


def padding_of(module: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the zeros that a convolution adds before and after its input, on two axes.

    >>> padding_of(nn.Conv2d(1, 1, 4, padding="same"))
    ((1, 1), (2, 2))
    """
    if isinstance(module.padding, str):
        same = module.padding == "same"
        total = [d * (k - 1) if same else 0 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        before, after = [t // 2 for t in total], [t - t // 2 for t in total]
    else:
        before = after = module.padding
    return (0, *before)[-2:], (0, *after)[-2:]


def read_gated(model: nn.Module, input_shape: tuple[int, ...], cut: str, *, training: bool = False) -> GatedNetwork:
    """Read the steps of ``model`` up to what the layer called ``cut`` receives, in float64.

    ``training``: BatchNorm uses the statistics of the batch, so that its steps are not affine.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    >>> [step.kind for step in read_gated(net, (1, 4, 4), "3").steps]
    ['input', 'weighted', 'relu', 'reshape']
    """
    twin = copy.deepcopy(model).eval().to(device="cpu", dtype=torch.float64).requires_grad_(False)
    for module in twin.modules():
        if training and isinstance(module, BATCH_NORMS):
            module.train()
            module.momentum = 0.0
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
        numbers = {node: number for number, node in enumerate(n for n in self.graph.graph.nodes if n in needed)}
        steps = [self._step(node, numbers) for node in numbers]
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
        if node.target in ADDITIONS and len(sources) == 2:
            return Step(kind="add", **facts)
        if len(sources) != 1:
            raise NotApplicable(f"{label(node, self.graph)} does not read the layer before it alone")
        return (self._module_step if node.op == "call_module" else self._function_step)(node, facts)

    def _module_step(self, node: fx.Node, facts: dict[str, Any]) -> Step:
        module = self.model.get_submodule(str(node.target))
        if isinstance(module, (*CONVOLUTIONS, nn.Linear)):
            return Step(kind="weighted", module=self._checked(node, module), **facts)
        if isinstance(module, BATCH_NORMS) and module.running_mean is not None:
            return Step(kind="affine", module=module, **facts)
        if isinstance(module, POOLINGS):
            return Step(kind="affine", function=module, **facts)
        if isinstance(module, nn.ReLU | nn.LeakyReLU):
            return Step(kind="relu", slope=float(getattr(module, "negative_slope", 0.0)), **facts)
        if isinstance(module, nn.MaxPool1d | nn.MaxPool2d):
            return Step(kind="max", **_pooling(module), **facts)
        if type(module) in (*PASSED, nn.Unflatten):
            return Step(kind="reshape", **facts)
        raise self._refusal(node)

    def _function_step(self, node: fx.Node, facts: dict[str, Any]) -> Step:
        options: dict[str, Any] = dict(_constants(node.kwargs))
        arguments: tuple[Any, ...] = _constants(node.args[1:])
        if node.target in _RELU_FUNCTIONS:
            return Step(kind="relu", **facts)
        if node.target is F.leaky_relu:
            slope = arguments[0] if arguments else options.get("negative_slope", 0.01)
            return Step(kind="relu", slope=float(slope), **facts)
        if node.target in (F.max_pool1d, F.max_pool2d):
            kind: Any = nn.MaxPool1d if node.target is F.max_pool1d else nn.MaxPool2d
            options.pop("return_indices", None)
            return Step(kind="max", **_pooling(kind(*arguments, **options)), **facts)
        if _is_zero_padding(node) or _is_slice(node):
            chosen: Any = node.target
            return Step(kind="affine", function=lambda x: chosen(x, *arguments, **options), **facts)
        if node.target in _AVERAGE_FUNCTIONS:
            call: Any = torch.mean if node.target == "mean" else node.target
            return Step(kind="affine", function=lambda x: call(x, *arguments, **options), **facts)
        if node.target in PASSED_FUNCTIONS or (node.op == "call_method" and node.target in PASSED_METHODS):
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
        what = "neither an affine layer nor a ReLU, a LeakyReLU or a max pooling"
        return NotApplicable(f"{label(node, self.graph)} is {what}")

    def _layer(self, number: int, steps: list[Step]) -> WeightedLayer:
        module: Any = steps[number].module
        return WeightedLayer(
            step=number,
            weight_name=self.names[id(module.weight)],
            bias_name=None if module.bias is None else self.names[id(module.bias)],
            module=module,
            gate=_gate_behind(number, steps),
            first=_reads_input(number, steps),
        )


def _constants(arguments: Any) -> Any:
    """Replace sizes that the model's code reads from a tensor by what they are."""
    return fx.node.map_arg(arguments, lambda node: node.meta["constant"])


def _is_zero_padding(node: fx.Node) -> bool:
    """Return whether a node pads each example with zeros, and not the batch."""
    if node.target is not F.pad:
        return False
    given: dict[str, Any] = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)) | dict(node.kwargs)
    fits = len(given["pad"]) // 2 <= len(shape_of(node))
    return fits and given.get("mode", "constant") == "constant" and not given.get("value")


def _is_slice(node: fx.Node) -> bool:
    """Return whether a node takes parts of each example: all of the first axis, ranges of the others."""
    index = node.args[1] if node.target is operator.getitem else None
    return isinstance(index, tuple) and index[0] == slice(None) and all(isinstance(one, slice) for one in index)


def _needed(last: fx.Node) -> set[fx.Node]:
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
    """Return the ReLU that reads a step's output, through nothing but BatchNorm, sums and steps that keep the shape."""
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
    before = [steps[source] for source in steps[number].sources]
    return all(s.kind not in ("weighted", "relu", "max") and _reads_input(steps.index(s), steps) for s in before)


def _pooling(module: Any) -> dict[str, Any]:
    """Return the places of a max pooling's maxima in the flattened map, and the average over the same windows."""
    if module.dilation not in (1, (1, 1)):
        raise NotApplicable("a max pooling with dilation")
    module = copy.deepcopy(module)
    module.return_indices = True
    kind: Any = nn.AvgPool1d if isinstance(module, nn.MaxPool1d) else nn.AvgPool2d
    average = kind(module.kernel_size, module.stride, module.padding, module.ceil_mode)
    return {"function": lambda x: module(x)[1], "average": average}
