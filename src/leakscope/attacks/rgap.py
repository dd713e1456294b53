"""R-GAP: solve one example layer by layer from the last to the first, without a search.

Junyi Zhu and Matthew Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021. Where a network is a chain of
convolutions or linear layers, each followed by an activation f that can be inverted, the input x of a layer follows
from the input y of the next one and the loss's derivative k by what the layer gives out:

    z = f^-1(y),    k = (W_next' k_next) f'(z),    W x = z - b  and  K x = dL/dw        (see equations/constraints.py)

The recursion starts at the logits: k is the gradient of the last bias; without a bias it follows from Lambert's W (one
output, as in the paper) or from the length of the layer's input (several classes); see equations/last_layer.py.

Differences from the paper and its code: padded pixels are no unknowns; the equations of a layer are brought to one
scale and solved by sparse normal equations with corrections, in float64; the margin is in closed form instead of 30 000
steps of descent, and if two margins or labels explain the update, both are followed and the better residual wins. A
LeakyReLU net without any bias is homogeneous, so both are exact: there the larger picture that fits the value range is
taken. Biases, linear layers anywhere, average pooling, several classes, BatchNorm that uses running statistics and
residual blocks (two rows in ``info["layers"]``) are allowed. Several local steps are taken for one gradient; several
examples give one mixture. Where a layer has fewer independent equations than unknowns, its solution of least length is
passed on and everything before it is an approximation.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from leakscope.attacks.candidates import certify
from leakscope.attacks.gradient_matching import several_steps
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import RECOVERED, Diagnosis, Reconstruction
from leakscope.contracts.settings import setting
from leakscope.equations.constraints import ResidualSystem, operation_offset, signal_at_input, stage_system
from leakscope.equations.last_layer import LastSignal, logistic_signals, softmax_signals
from leakscope.equations.linear_system import MAX_RANKED, Array, LinearSystem, Solution
from leakscope.labels import mean_gradient_scale
from leakscope.matching.determinacy import ACCURATE
from leakscope.network.chain import BATCH_NORMS, Chain, Operation, ResidualStage, Stage, read_chain

CLIP = "Largest size of a tanh output that is inverted; None: what the update's precision can tell from 1."


@dataclass(frozen=True, kw_only=True)
class RGAP(Attack):
    """Solve a chain of layers one by one from the output, without a search."""

    clip: float | None = setting(None, CLIP, gt=0, lt=1)
    ranks: bool = setting(True, "Compute the rank of each layer's equations.")

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        basis = solver_basis(observation, self.clip, residual=True, batch_norm=observation.batchnorm == "eval")
        return reconstruction(observation, *walk_back(Solver(**basis, ranks=self.ranks), observation, progress))


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """Hold the input ``x`` of a stage, the loss's derivative by it and at the logits (``start``), worst residual."""

    x: Array = field(repr=False)
    signal: Array = field(repr=False)
    start: Array = field(repr=False)
    label: int
    residual: float
    layers: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Solver:
    """Solve one stage after the other; ``linear``: what comes out is in proportion to what the walk began with."""

    linear: ClassVar[bool] = True

    chain: Chain
    update: dict[str, Tensor]
    clip: float
    ranks: bool

    def start(self, last: LastSignal) -> Walk:
        """Go through the last stage: its outputs follow from the input that its linear layer must have had."""
        head = self.chain.stages[-1]
        layer = head.operations[-1]
        k = last.signal
        size = float(k @ k)
        gradient = self.update[str(layer.weight_name)].numpy()
        features = gradient.T @ k / size if size > 0 else np.zeros(gradient.shape[1])
        outputs = _weight(layer) @ features + operation_offset(layer)
        walk = Walk(x=features, signal=k, start=k, label=last.label, residual=last.mismatch, layers=())
        return self._solve(walk, head, outputs, k)

    def step(self, walk: Walk, number: int) -> Walk:
        stage = self.chain.stages[number]
        if isinstance(stage, ResidualStage):
            return self._solve_block(walk, stage, *self._behind(stage, stage.outer, walk.x, walk.signal))
        return self._solve(walk, stage, *self._behind(stage, stage, walk.x, walk.signal))

    def _behind(self, stage: Stage, linear: Stage, values: Array, signal: Array) -> tuple[Array, Array]:
        outputs = stage.activation.inverse(torch.from_numpy(values), self.clip)
        layer = linear.operations[-1]
        if isinstance(layer.module, nn.Linear) and layer.bias_name in self.update:
            return outputs.numpy(), self.update[layer.bias_name].numpy()  # seen, not computed: free of earlier errors
        return outputs.numpy(), signal * stage.activation.derivative(outputs).numpy()

    def _solve(self, walk: Walk, stage: Stage, outputs: Array, signal: Array) -> Walk:
        system = stage_system(stage, outputs, signal, self.update)
        solution = system.solve()
        row = self._row(stage.name, system, max(solution.residual, self.misfit(stage, signal, solution.x)))
        return _onward(walk, solution, signal_at_input(stage, signal), row)

    def _solve_block(self, walk: Walk, block: ResidualStage, outputs: Array, signal: Array) -> Walk:
        systems = ResidualSystem(block=block, outputs=outputs, output_gradient=signal, update=self.update)
        first = systems.first.solve()
        hidden = first.x[block.unknowns :]
        inside = {
            "layer": f"{block.name} (inner)",
            "rows": systems.first.rows,
            "unknowns": block.outer.unknowns,
            "rank": systems.hidden_rank(MAX_RANKED) if self.ranks else None,
            "condition": 1.0,  # that of the block's own system counts
            "residual": max(first.residual, self.misfit(block.outer, signal, hidden)),
        }
        at_hidden = signal_at_input(block.outer, signal)
        received, inner_signal = self._behind(block.inner, block.inner, hidden, at_hidden)
        system = systems.second(hidden, received, inner_signal)
        solution = system.solve()
        misfits = [self.misfit(block.inner, inner_signal, solution.x)]
        if block.shortcut is not None:
            misfits.append(self.misfit(block.shortcut, signal, solution.x))
        row = self._row(block.name, system, max(solution.residual, *misfits))
        return _onward(walk, solution, systems.signal_at_input(inner_signal), row, inside)

    def _row(self, name: str, system: LinearSystem, residual: float) -> dict[str, Any]:
        spectrum = system.spectrum_up_to(MAX_RANKED) if self.ranks else None
        return {
            "layer": name,
            "rows": system.rows,
            "unknowns": system.unknowns,
            "rank": None if spectrum is None else spectrum.rank,
            "condition": None if spectrum is None else spectrum.condition,
            "residual": residual,
        }

    def misfit(self, stage: Stage, signal: Array, x: Array) -> float:
        """Return the share of a first linear layer's gradient that is not k x'; its reduced equations cannot tell."""
        layer = stage.operations[0]
        if len(stage.operations) > 1 or not isinstance(layer.module, nn.Linear) or layer.weight_name not in self.update:
            return 0.0
        gradient = self.update[layer.weight_name].numpy()
        size = float(np.linalg.norm(gradient))
        return float(np.linalg.norm(gradient - np.outer(signal, x))) / size if size > 0 else 0.0


def _onward(walk: Walk, solution: Solution, signal: Array, *rows: dict[str, Any]) -> Walk:
    worst = max(walk.residual, *(row["residual"] for row in rows))
    return dataclasses.replace(walk, x=solution.x, signal=signal, residual=worst, layers=(*rows, *walk.layers))


def solver_basis(observation: Observation, clip: float | None, **allowed: bool) -> dict[str, Any]:
    chain = read_chain(observation.model, observation.input_shape, **allowed)
    scale = 1.0 if (known := mean_gradient_scale(observation)[0]) is None else known
    update = {n: v.detach().to("cpu", torch.float64) / scale for n, v in observation.message.update.items()}
    clip = 1 - 4 * torch.finfo(observation.dtype).eps if clip is None else clip
    return {"chain": chain, "update": update, "clip": clip}


def walk_back(solver: Solver, observation: Observation, progress: Progress | None) -> tuple[Walk, tuple[str, ...]]:
    """Walk from the last stage to the input; return the walk that explains the update best, with notes."""
    stages = solver.chain.stages
    # Where s times the input makes s times the logits, and no search disturbs it, one walk stands for all of a label.
    similar = solver.linear and homogeneous(solver.chain)
    signals = last_signals(observation, stages[-1], solver.update)
    followed = list({signal.label: signal for signal in reversed(signals)}.values()) if similar else signals
    walks = consistent([solver.start(signal) for signal in followed])
    for number in reversed(range(len(stages) - 1)):
        walks = consistent([solver.step(walk, number) for walk in walks])
        if progress is not None:
            progress(len(stages) - number, len(stages), walks[0].residual)
    if similar:
        walks = [multiple(walk, signal) for walk in walks for signal in signals if signal.label == walk.label]
    return choose(walks, observation)


def last_signals(observation: Observation, head: Stage, update: dict[str, Tensor]) -> list[LastSignal]:
    layer = head.operations[-1]
    block = isinstance(head, ResidualStage)
    if block or not isinstance(layer.module, nn.Linear) or layer.weight_name not in update:
        last = f"{head.name!r} (a residual block)" if block else f"{layer.name!r} ({layer.kind})"
        start = "the recursion starts at the gradient of a linear layer that gives the logits"
        raise NotApplicable(f"{start}; {last} is none, or is frozen")
    if not observation.task.has_classes:
        raise NotApplicable(f"the recursion starts at the gradient of a cross-entropy, not of {observation.task!r}")
    true_label = None if observation.labels is None else int(observation.labels[0])
    if layer.bias_name in update:
        signal = update[layer.bias_name].numpy()
        label = int(signal[0] < 0) if len(signal) == 1 else int(signal.argmin())
        return [LastSignal(signal=signal, label=label if true_label is None else true_label)]
    scale, why = mean_gradient_scale(observation)
    if scale is None:
        raise NotApplicable(
            f"the last layer {layer.name!r} has no bias, so the update's length is needed, but {why[0]}"
        )
    weight, gradient = _weight(layer), update[layer.weight_name].numpy()
    if not gradient.any():
        return [LastSignal(signal=np.zeros(len(weight)), label=true_label or 0)]
    bias = None if layer.module.bias is None else layer.module.bias.detach().numpy()
    labels = None if true_label is None else (true_label,)
    if len(weight) == 1 and bias is None and head.activation.homogeneous:
        return logistic_signals(weight, gradient, labels or (0, 1), head.activation)
    signals = softmax_signals(weight, bias, gradient, labels, head.activation)
    return [signal for signal in signals if signal.mismatch <= 10 * signals[0].mismatch + 1e-9][:4]  # are followed


def homogeneous(chain: Chain) -> bool:
    """Check that s times the input makes s times the logits for every s > 0."""
    inner = [stage.inner for stage in chain.stages if isinstance(stage, ResidualStage)]
    operations = [operation for stage in chain.stages for operation in stage.operations]
    shifts = any(o.bias_name or isinstance(o.module, BATCH_NORMS) for o in operations)
    return all(stage.activation.homogeneous for stage in (*chain.stages, *inner)) and not shifts


def multiple(walk: Walk, signal: LastSignal) -> Walk:
    length = float(np.linalg.norm(signal.signal))
    return walk if length == 0 else dataclasses.replace(walk, x=walk.x * (float(np.linalg.norm(walk.start)) / length))


def consistent(walks: list[Walk]) -> list[Walk]:
    best = min(walk.residual for walk in walks)
    return [walk for walk in walks if walk.residual <= 10 * best + 1e-9]


def choose(walks: list[Walk], observation: Observation) -> tuple[Walk, tuple[str, ...]]:
    if len(walks) == 1:
        return walks[0], ()
    inputs = observation.inputs

    def rank(walk: Walk) -> tuple[float, float]:
        length = float(np.linalg.norm(walk.x))
        if not inputs.bounded:
            return 0.0, length
        unit = inputs.to_unit(torch.from_numpy(walk.x).reshape(1, *observation.input_shape))
        return float((unit - unit.clamp(-0.05, 1.05)).abs().max()), -length

    how = "the largest that fits the value range" if inputs.bounded else "the one of least length"
    return min(walks, key=rank), (f"{len(walks)} inputs explain the update equally well; returned is {how}",)


def reconstruction(observation: Observation, walk: Walk, notes: tuple[str, ...]) -> Reconstruction:
    examples = observation.num_examples or 1
    unique = not notes and examples == 1 and not several_steps(observation)
    x = torch.from_numpy(walk.x).to(device=observation.device, dtype=observation.dtype)
    flags: list[str] = []
    if not bool(torch.isfinite(x).all()):
        x = torch.zeros_like(x)
        flags.append("non-finite objective")
    if several_steps(observation):
        flags.append("steps not simulated")
    if examples > 1:
        flags.append("mixture")
        notes += (f"one mixture of {examples} examples was solved for; it stands in every row",)
    empty = not any(bool(value.any()) for value in observation.message.update.values())
    if examples == 1 and (walk.residual > 0.1 or empty):  # a mixture never fits, and has its own flag
        flags.append("ill-conditioned")
    if walk.residual > 0.1:
        notes += (f"no single input explains the update: the equations are off by {walk.residual:.0%}",)
    for row in walk.layers:
        left = row["unknowns"] - (row["unknowns"] if row["rank"] is None else row["rank"])
        if left > 0:
            notes += (f"layer {row['layer']!r} leaves {left} of {row['unknowns']} directions of its input open",)
    labels = observation.labels
    if labels is None and examples == 1:
        labels = torch.tensor([walk.label], device=observation.device)
    open_ones = [None if row["rank"] is None else int(row["unknowns"] - row["rank"]) for row in walk.layers]
    free = None if None in open_ones else sum(filter(None, open_ones))
    condition = max(math.inf if row.get("condition") is None else float(row["condition"]) for row in walk.layers)
    diagnosis = None
    if free == 0 and unique and walk.residual * condition <= RECOVERED:
        reason = f"the equations of every layer have full rank and are met to {walk.residual:.1g}"
        facts: dict[str, Any] = {"unknowns": len(x), "residual": walk.residual, "hidden": 0}
        diagnosis = Diagnosis(outcome="recovered", reason=reason, **facts)
    if free == 0 and not walk.residual * condition <= ACCURATE:
        free = None  # errors would grow too far
    return Reconstruction(
        inputs=x.reshape(1, *observation.input_shape).repeat_interleave(examples, dim=0),
        labels=labels,
        scores=torch.full((examples,), walk.residual if math.isfinite(walk.residual) else math.inf),
        flags=tuple(flags),
        notes=notes,
        info={"steps": len(walk.layers), "restarts": 1, "compiled": False, "layers": list(walk.layers)},
        diagnosis=diagnosis,
        certificates=certify(
            *(observation, x.reshape(1, *observation.input_shape), labels),
            *(walk.residual, (free,), "layer by layer"),
        )
        if unique
        else (),
    )


def _weight(layer: Operation) -> Array:
    module = layer.module
    assert isinstance(module, nn.Linear)
    return np.asarray(module.weight.detach().numpy())
