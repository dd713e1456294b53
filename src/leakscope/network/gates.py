"""A piecewise-linear network below a cut: affine steps, and gates that decide which piece of it an example is on.

A ReLU multiplies each number by 0 or 1, a max pooling passes one number of each window on. With these gates held the
network is affine in its input, and the gradient of every weight is linear in what the layer receives: that is what the
attacks on such networks solve (equations/masks.py, equations/gated_inverse.py). The model is read from its symbolic
trace, so residual connections, BatchNorm in eval mode and average pooling are steps like any other.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.network.chain import BATCH_NORMS, CONVOLUTIONS

#: By the number of a gate's step: what a ReLU multiplies by, or the places that a max pooling passes on.
Gates = dict[int, Tensor]
StepKind = Literal["input", "weighted", "affine", "reshape", "add", "relu", "max"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One operation: reads the values of ``sources``, and is affine unless it is a gate (kinds "relu" and "max").

    ``slope`` is what a gate of kind "relu" multiplies by when it is shut: 0, or that of a LeakyReLU. ``average`` is the
    average pooling with the windows of a max pooling.
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
    """A convolution or a linear layer: its step, the name of its weight, and the gate that its output alone opens.

    ``gate`` is the step of a ReLU that reads this output number by number (through a BatchNorm or a sum, perhaps);
    None where there is no such gate.
    """

    step: int
    weight_name: str
    bias_name: str | None
    module: nn.Module
    gate: int | None
    first: bool

    @property
    def weights(self) -> int:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight.numel()

    def patches(self, values: Tensor) -> Tensor:
        """What each output number reads: (examples, inputs of a unit, places)."""
        if isinstance(self.module, nn.Linear):
            return values.reshape(len(values), -1, 1)
        module = self.module
        assert isinstance(module, CONVOLUTIONS)
        if isinstance(module, nn.Conv1d):
            values = values[:, :, None]
        size, stride, dilation = (_pair(part) for part in (module.kernel_size, module.stride, module.dilation))
        before, after = _padding(module)
        if before == after:
            return F.unfold(values, size, dilation=dilation, padding=before, stride=stride)
        values = F.pad(values, (before[1], after[1], before[0], after[0]))
        return F.unfold(values, size, dilation=dilation, stride=stride)

    def weight_gradient(self, values: Tensor, signal: Tensor) -> Tensor:
        """The gradient (units, inputs of a unit) for a derivative (examples, units, places) at the output."""
        return torch.einsum("ncl,npl->cp", signal, self.patches(values))


@dataclass(frozen=True, eq=False)
class Pass:
    """One run: what each gate and each weighted layer received, the gates as they stood, and the values at the cut."""

    received: dict[int, Tensor]
    inputs: dict[int, Tensor]
    gates: Gates
    features: Tensor


@dataclass(frozen=True, eq=False)
class GatedNetwork:
    """The steps from the input (number 0) to the cut (the last one), and the layers with weights among them."""

    steps: tuple[Step, ...]
    layers: tuple[WeightedLayer, ...]

    @property
    def work(self) -> int:
        """Multiplications of one run on one example."""
        return sum(layer.weights * math.prod(self.steps[layer.step].shape[1:]) for layer in self.layers)

    def to(self, dtype: torch.dtype) -> GatedNetwork:
        """A copy in another precision."""
        modules = {id(s.module): copy.deepcopy(s.module).to(dtype) for s in self.steps if s.module is not None}
        steps = tuple(dataclasses.replace(step, module=modules.get(id(step.module))) for step in self.steps)
        layers = tuple(dataclasses.replace(layer, module=modules[id(layer.module)]) for layer in self.layers)
        return GatedNetwork(steps, layers)

    def run(self, x: Tensor) -> Pass:
        """As the model runs; the gates are those that ``x`` opens."""
        received: dict[int, Tensor] = {}
        gates: Gates = {}
        values: list[Tensor] = [x]
        for number, step in enumerate(self.steps[1:], start=1):
            source = values[step.sources[0]]
            if step.kind == "relu":
                received[number] = source
                gates[number] = torch.where(source > 0, source.new_ones(()), step.slope)
            elif step.kind == "max":
                received[number] = source
                gates[number] = _places_of_maxima(step, source)
            values.append(_apply(step, [values[n] for n in step.sources], gates.get(number), bias=True))
        return Pass(received, {layer.step: values[self._source(layer)] for layer in self.layers}, gates, values[-1])

    def held(
        self, x: Tensor, gates: Gates, *, bias: bool, slack: Mapping[int, Tensor] | None = None
    ) -> tuple[dict[int, Tensor], Tensor]:
        """With ``gates`` held: what weighted layers receive, and the values at the cut; linear in ``x`` without bias.

        ``slack`` is added to what gates let through.
        """
        values = self._values(x, gates, bias, slack or {})
        return {layer.step: values[self._source(layer)] for layer in self.layers}, values[-1]

    def signal(self, layer: WeightedLayer, gates: Gates, adjoint: Tensor, *, open_gate: bool = False) -> Tensor:
        """The derivative of <adjoint, values at the cut> by the layer's output, with ``gates`` held.

        ``open_gate``: as if the gate behind the layer let everything through.
        """
        if open_gate and layer.gate is not None:
            gates = {**gates, layer.gate: torch.ones_like(gates[layer.gate])}
        start = adjoint.new_zeros((len(adjoint), *self.steps[0].shape), requires_grad=True)
        with torch.enable_grad():
            values = self._values(start, gates, False, {})
            total = (values[-1].flatten(1) * adjoint).sum()
            (signal,) = torch.autograd.grad(total, values[layer.step])
        return signal.flatten(2) if signal.dim() > 2 else signal[:, :, None]

    def shut_gates(self, silent: Tensor) -> dict[int, tuple[Tensor, bool]]:
        """ReLUs that only averages, maxima and reshapes separate from the cut: which of their units cannot be active.

        ``silent`` (examples, features): where the value at the cut is zero. A mean of numbers that are not negative is
        zero only if all are. The second of each pair says that the others are active for sure: each feature is one
        unit.
        """
        behind = {len(self.steps) - 1}
        single = True
        found: dict[int, tuple[Tensor, bool]] = {}
        number = len(self.steps) - 1
        spread: list[Step] = []
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
                value = step.average(value) if step.average is not None else _apply(step, [value], None, bias=False)
            (touched,) = torch.autograd.grad((value.flatten(1) * silent.double()).sum(), start)
        found[number] = (touched > 0, single)
        return found

    def _values(self, x: Tensor, gates: Gates, bias: bool, slack: Mapping[int, Tensor]) -> list[Tensor]:
        values: list[Tensor] = [x]
        for number, step in enumerate(self.steps[1:], start=1):
            value = _apply(step, [values[n] for n in step.sources], gates.get(number), bias=bias)
            values.append(value + slack[number] if number in slack else value)
        return values

    def _source(self, layer: WeightedLayer) -> int:
        return self.steps[layer.step].sources[0]


def _apply(step: Step, values: list[Tensor], gate: Tensor | None, *, bias: bool) -> Tensor:
    x = values[0]
    if step.kind == "relu":
        assert gate is not None
        return x * gate
    if step.kind == "max":
        assert gate is not None
        return x.flatten(2).gather(2, gate.flatten(2)).reshape(gate.shape)
    if step.kind == "add":
        return x + values[1]
    if step.kind == "reshape":
        return x.reshape(len(x), *step.shape)
    if step.function is not None:
        return step.function(x)
    module: Any = step.module
    if bias:
        result: Tensor = module.forward(x)  # past hooks, which would change one of both ways only
        return result
    if isinstance(module, nn.Linear):
        return F.linear(x, module.weight)
    if isinstance(module, BATCH_NORMS):
        assert module.running_var is not None  # read_gated refuses others
        scale = torch.rsqrt(module.running_var + module.eps)
        scale = scale if module.weight is None else scale * module.weight
        return x * scale.reshape(1, -1, *[1] * (x.dim() - 2))
    convolved: Tensor = module._conv_forward(x, module.weight, None)
    return convolved


def _places_of_maxima(step: Step, source: Tensor) -> Tensor:
    assert step.function is not None
    return step.function(source)


def _pair(value: Any) -> tuple[int, int]:
    """Of two axes, where one-dimensional convolutions have a first of length one."""
    parts = tuple(value) if isinstance(value, Iterable) else (value, value)
    return (1, parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def _padding(module: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Zeros before and behind each axis."""
    if isinstance(module.padding, str):
        total = [0] * len(module.kernel_size)
        if module.padding == "same":
            total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        before, after = [t // 2 for t in total], [t - t // 2 for t in total]
    else:
        before = after = list(module.padding)
    if len(before) == 1:
        before, after = [0, *before], [0, *after]
    return (before[0], before[1]), (after[0], after[1])
