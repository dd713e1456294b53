"""R-GAP: one example solved layer by layer from the last to the first, without a search.

Junyi Zhu and Matthew Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021. Where a network is a chain of
convolutions or linear layers, each followed by an activation f that can be inverted, the input x of a layer follows
from the input y of the next one and the loss's derivative k by what the layer gives out:

    z = f^-1(y),    k = (W_next' k_next) f'(z),    W x = z - b  and  K x = dL/dw        (see limits/constraints.py)

The recursion starts at the logits: k is the gradient of the last bias; without a bias and with one output (logistic
loss, as in the paper) it follows from <w, dL/dw> by Lambert's W, without a bias and with several classes from the
length that the layer's input must have for softmax and gradient to agree (limits/last_layer.py).

Differences from the paper and its code: padded pixels are no unknowns; the equations of a layer are brought to one
scale and solved by sparse normal equations with corrections, in float64 whatever the update's precision; the margin is
in closed form instead of 30 000 steps of descent, and if two margins or labels explain the update, both are followed
and the better residual wins. In a LeakyReLU net without any bias both are exact, for it is homogeneous: there the
larger picture that fits the value range is taken, and a note says so. Biases, linear layers anywhere, average pooling
and several classes are allowed. A weight difference of several local steps is taken for one gradient; several examples
give one mixture.

Where a layer has fewer independent equations than unknowns, its solution of least length is passed on and everything
before it is an approximation; ``info["layers"]`` has rows, rank and unknowns of each.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leakscope.attacks.base import Attack, NotApplicable, Progress, Reconstruction
from leakscope.attacks.gradient_matching import can_replay, hides_steps
from leakscope.labels import local_steps, mean_gradient_scale
from leakscope.limits.activations import Unsupported
from leakscope.limits.chain import Chain, Operation, Stage, read_chain
from leakscope.limits.constraints import operation_offset, signal_at_input, stage_system
from leakscope.limits.last_layer import LastSignal, logistic_signals, softmax_signals
from leakscope.limits.security import MAX_UNKNOWNS
from leakscope.observation import Observation

#: Possibilities at the logits that are followed to the next layer.
_FOLLOWED = 4


@dataclass(frozen=True, kw_only=True)
class RGAP(Attack):
    """Solve for the input of every layer, last one first; no search.

    ``clip`` is the largest size of a tanh output that is inverted (0.9999 in published code); None takes the largest
    that the update's precision can tell from 1. ``ranks`` computes the rank of each layer's equations for the report.
    """

    requires = ("num_examples",)

    clip: float | None = None
    ranks: bool = True

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < 1:
            raise ValueError(f"clip: expected 0 < clip < 1 or None, got {self.clip}")

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        try:
            chain = read_chain(observation.model, observation.input_shape)
        except Unsupported as error:
            raise NotApplicable(str(error)) from error
        update, scaled, why = _gradient(observation)
        clip = 1 - 4 * torch.finfo(observation.dtype).eps if self.clip is None else self.clip
        solver = _Solver(chain=chain, update=update, clip=clip, ranks=self.ranks)
        signals = _last_signals(observation, chain.stages[-1], update, None if scaled else why)
        followed = signals
        if _homogeneous(chain):
            # Of one label all walks are multiples of each other: following one is enough.
            followed = list({signal.label: signal for signal in reversed(signals)}.values())
        walks = _consistent([solver.start(signal) for signal in followed])
        for number in reversed(range(len(chain.stages) - 1)):
            walks = _consistent([solver.step(walk, number) for walk in walks])
            if progress is not None:
                progress(len(chain.stages) - number, len(chain.stages), walks[0].residual)
        if _homogeneous(chain):
            walks = [_multiple(walk, signal) for walk in walks for signal in signals if signal.label == walk.label]
        walk, notes = _choose(walks, observation)
        return _reconstruction(observation, walk, notes)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Walk:
    """A recursion that has come to the input ``x`` of a stage, with the loss's derivative by it.

    ``start`` is the derivative at the logits it began with, ``residual`` the worst of the layers so far.
    """

    x: np.ndarray = field(repr=False)
    signal: np.ndarray = field(repr=False)
    start: np.ndarray = field(repr=False)
    label: int
    residual: float
    layers: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Solver:
    chain: Chain
    update: dict[str, Tensor]
    clip: float
    ranks: bool

    def start(self, last: LastSignal) -> _Walk:
        """Through the last stage: its outputs follow from the input that its linear layer must have had."""
        head = self.chain.stages[-1]
        layer = head.operations[-1]
        k = last.signal
        size = float(k @ k)
        gradient = self.update[str(layer.weight_name)].numpy()
        features = gradient.T @ k / size if size > 0 else np.zeros(gradient.shape[1])
        outputs = _weight(layer) @ features + operation_offset(layer)
        began = _Walk(x=features, signal=k, start=k, label=last.label, residual=last.mismatch, layers=())
        return self._solve(began, head, outputs, k)

    def step(self, walk: _Walk, number: int) -> _Walk:
        """Through one more stage towards the input."""
        stage = self.chain.stages[number]
        outputs = stage.activation.inverse(torch.from_numpy(walk.x), self.clip)
        layer = stage.operations[-1]
        if isinstance(layer.module, nn.Linear) and layer.bias_name in self.update:
            signal = self.update[layer.bias_name].numpy()  # seen, not computed: free of earlier errors
        else:
            signal = walk.signal * stage.activation.derivative(outputs).numpy()
        return self._solve(walk, stage, outputs.numpy(), signal)

    def _solve(self, walk: _Walk, stage: Stage, outputs: np.ndarray, signal: np.ndarray) -> _Walk:
        system = stage_system(stage, outputs, signal, self.update)
        solution = system.solve()
        row: dict[str, Any] = {"layer": stage.name, "rows": system.rows, "unknowns": system.unknowns}
        spectrum = system.spectrum_up_to(MAX_UNKNOWNS) if self.ranks else None
        row["rank"] = None if spectrum is None else spectrum.rank
        row["residual"] = max(solution.residual, self._misfit(stage, signal, solution.x))
        return dataclasses.replace(
            walk,
            x=solution.x,
            signal=signal_at_input(stage, signal),
            residual=max(walk.residual, row["residual"]),
            layers=(row, *walk.layers),
        )

    def _misfit(self, stage: Stage, signal: np.ndarray, x: np.ndarray) -> float:
        """How much of a first linear layer's gradient is not k x'; its reduced equations cannot tell."""
        layer = stage.operations[0]
        if len(stage.operations) > 1 or not isinstance(layer.module, nn.Linear) or layer.weight_name not in self.update:
            return 0.0
        gradient = self.update[layer.weight_name].numpy()
        size = float(np.linalg.norm(gradient))
        return float(np.linalg.norm(gradient - np.outer(signal, x))) / size if size > 0 else 0.0


def _gradient(observation: Observation) -> tuple[dict[str, Tensor], bool, str]:
    """The update as one mean gradient in float64; whether its length is known, and if not, why."""
    scale, notes = mean_gradient_scale(observation)
    factor = 1.0 if scale is None else scale
    update = {n: v.detach().to("cpu", torch.float64) / factor for n, v in observation.message.update.items()}
    return update, scale is not None, "" if scale is not None else notes[0]


def _last_signals(
    observation: Observation, head: Stage, update: dict[str, Tensor], no_scale: str | None
) -> list[LastSignal]:
    """What the loss's derivative at the logits can be."""
    layer = head.operations[-1]
    if not isinstance(layer.module, nn.Linear) or layer.weight_name not in update:
        raise NotApplicable(
            f"the recursion starts at the gradient of a linear layer that gives the logits; {layer.name!r} "
            f"({layer.kind}) is none, or is frozen"
        )
    known = None if observation.labels is None else int(observation.labels[0])
    if layer.bias_name in update:
        signal = update[layer.bias_name].numpy()
        label = int(signal[0] < 0) if len(signal) == 1 else int(signal.argmin())
        return [LastSignal(signal=signal, label=label if known is None else known)]
    if no_scale is not None:
        raise NotApplicable(
            f"the last layer {layer.name!r} has no bias, so the update's length is needed, but {no_scale}"
        )
    weight, gradient = _weight(layer), update[layer.weight_name].numpy()
    if not gradient.any():
        return [LastSignal(signal=np.zeros(len(weight)), label=known or 0)]
    bias = None if layer.module.bias is None else layer.module.bias.detach().numpy()
    labels = None if known is None else (known,)
    if len(weight) == 1 and bias is None and head.activation.homogeneous:
        return logistic_signals(weight, gradient, labels or (0, 1), head.activation)
    found = softmax_signals(weight, bias, gradient, labels, head.activation)
    return [signal for signal in found if signal.mismatch <= 10 * found[0].mismatch + 1e-9][:_FOLLOWED]


def _homogeneous(chain: Chain) -> bool:
    """Whether s times the input makes s times the logits for every s > 0."""
    operations = [operation for stage in chain.stages for operation in stage.operations]
    return all(s.activation.homogeneous for s in chain.stages) and not any(o.bias_name for o in operations)


def _multiple(walk: _Walk, signal: LastSignal) -> _Walk:
    """The walk that would have begun with ``signal``: the input is as much longer as the derivative is shorter."""
    length = float(np.linalg.norm(signal.signal))
    return walk if length == 0 else dataclasses.replace(walk, x=walk.x * (float(np.linalg.norm(walk.start)) / length))


def _consistent(walks: list[_Walk]) -> list[_Walk]:
    """Those that explain the equations so far about as well as the best."""
    best = min(walk.residual for walk in walks)
    return [walk for walk in walks if walk.residual <= 10 * best + 1e-9]


def _choose(walks: list[_Walk], observation: Observation) -> tuple[_Walk, tuple[str, ...]]:
    """The one picture to return of several that explain the update; by the value range, for nothing else is left."""
    if len(walks) == 1:
        return walks[0], ()
    box = observation.value_range
    if box is None:
        chosen = min(walks, key=lambda walk: float(np.linalg.norm(walk.x)))
        how = "the one of least length"
    else:

        def rank(walk: _Walk) -> tuple[float, float]:
            unit = box.to_unit(torch.from_numpy(walk.x).reshape(1, *observation.input_shape))
            outside = float((unit - unit.clamp(-0.05, 1.05)).abs().max())
            return outside, -float(np.linalg.norm(walk.x))

        chosen = min(walks, key=rank)
        how = "the largest that fits the value range"
    return chosen, (f"{len(walks)} inputs explain the update equally well; returned is {how}",)


def _reconstruction(observation: Observation, walk: _Walk, notes: tuple[str, ...]) -> Reconstruction:
    examples = observation.num_examples or 1
    x = torch.from_numpy(walk.x).to(device=observation.device, dtype=observation.dtype)
    flags: list[str] = []
    if not bool(torch.isfinite(x).all()):
        x = torch.zeros_like(x)
        flags.append("non-finite objective")
    if _several_steps(observation):
        flags.append("steps not simulated")
    if examples > 1:
        flags.append("mixture")
        notes += (f"one mixture of {examples} examples was solved for; it stands in every row",)
    if walk.residual > 0.1:
        notes += (f"no single input explains the update: the equations are off by {walk.residual:.0%}",)
    short = [row for row in walk.layers if row["rank"] is not None and row["rank"] < row["unknowns"]]
    for row in short:
        left = row["unknowns"] - row["rank"]
        notes += (f"layer {row['layer']!r} leaves {left} of {row['unknowns']} directions of its input open",)
    labels = observation.labels
    if labels is None and examples == 1:
        labels = torch.tensor([walk.label], device=observation.device)
    return Reconstruction(
        inputs=x.reshape(1, *observation.input_shape).repeat(examples, *(1 for _ in observation.input_shape)),
        labels=labels,
        scores=torch.full((examples,), walk.residual if math.isfinite(walk.residual) else math.inf),
        flags=tuple(flags),
        notes=notes,
        info={"steps": len(walk.layers), "restarts": 1, "compiled": False, "layers": list(walk.layers)},
    )


def _several_steps(observation: Observation) -> bool:
    """Whether it is a weight update of more than one plain step, which one gradient only approximates."""
    if observation.message.kind == "gradient":
        return False
    facts, examples = observation.training, observation.num_examples
    if not can_replay(observation) or examples is None or facts.epochs is None or facts.batch_size is None:
        return hides_steps(observation)
    return local_steps(examples, facts.epochs, facts.batch_size) > 1


def _weight(layer: Operation) -> np.ndarray:
    module = layer.module
    assert isinstance(module, nn.Linear)
    return np.asarray(module.weight.detach().numpy())
