"""CAFE: Catastrophic Data Leakage in Vertical Federated Learning. Jin, Chen, Hsu, Yu, Chen. NeurIPS 2021.

The server of vertical learning knows which samples are in each batch. Step I recovers for each sample n and worker the
back-signal v_n of the worker's first dense layer from bias gradients, step II the layer's inputs h_n from weight
gradients (both in back_signals.py), step III the data:

    min_x  a ||grad L(x_s) - g_s||^2 + b TV(x) 1[TV(x) >= xi] + c ||h_s - h(x_s)||^2

``method="direct"`` (default): steps I and II are linear least squares while the model stands still, so they are solved
outright, with a test which samples the batches determine at all; then each h_n alone determines its part of the
picture, sample by sample, and the gradient term, three times as dear, is left out. A worker that begins with its dense
layer gives its features away without a search. ``"nested"`` is Algorithm 3 (step I over many rounds, then II, then
III), ``"single-loop"`` Algorithm 4 (each round moves all three, so that the model may train meanwhile).
``"gradients"`` skips steps I and II: plain gradient matching on the same rounds, the comparison in the paper.

Differences from the published code. The terms are relative to the size of what is observed, TV is the joint one of all
channels and fades by ``fade`` over the run (``relative=False``: sums, as published). Steps I and II of the loops are
projections, which need no learning rate (``steps="descent"``: the published ones). Adam counts steps by row and
corrects its bias once; the published code takes the global iteration and corrects twice. Labels that are not known are
read by step I off the last layer, where the label's own entry is the negative one (``labels="joint"``: searched, as
published).
Recorded rounds are visited over and over, in their order, each with the weights it was played with.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from leakscope.attacks.back_signals import InputSystem, RunningSteps, Steps, explained, solve_inputs, solve_signals
from leakscope.attacks.base import Attack, MissingKnowledge, NotApplicable, Progress, Reconstruction
from leakscope.attacks.cafe_data import StepThree
from leakscope.labels import find_head
from leakscope.limits.diagnosis import Diagnosis
from leakscope.limits.index_alignment import Identifiability, identify, index_matrix
from leakscope.loss import as_labels
from leakscope.matching.optimisers import Schedule
from leakscope.observation import Message, Observation
from leakscope.vertical import FirstDense, VerticalModel, first_dense

#: More of the gradients than this unexplained, and the rounds do not fit together.
AGREEMENT = 0.25

_PUBLISHED: dict[str, Any] = {
    "method": "single-loop",
    "iterations": 20_000,
    "steps": "descent",
    "relative": False,
    "gradient": 1e-2,
    "distance": "squared-l2",
    "tv": 1e-4,
    "fade": 1.0,
    "representation": 1e-3,
    "labels": "joint",
    "start": "uniform",
    "schedule": "constant",
}
_VARIANT: dict[str, Any] = {"method": "gradients", "iterations": 2000, "lr": 0.05, "tv": 1e-3, "fade": 1.0}


@dataclass(frozen=True, kw_only=True)
class CAFE(Attack):
    """Solve each sample's part in the first dense layers from sums over announced batches, then search the data.

    Presets: "cifar10", "mnist", "linnaeus", "yale" as published; "dlg", "cosine", "sapag", "batchnorm" and
    "group-consistency" are plain gradient matching on the same rounds.
    """

    requires: ClassVar[tuple[str, ...]] = ("num_examples", "batch_indices")
    reads_rounds: ClassVar[bool] = True
    presets = MappingProxyType(
        {
            "cifar10": {**_PUBLISHED, "signal_lr": 5e-3, "input_lr": 8e-3, "lr": 2e-2, "threshold": 90.0},
            "mnist": {**_PUBLISHED, "signal_lr": 1e-2, "input_lr": 1e-2, "lr": 1e-2, "threshold": 25.0},
            "linnaeus": {**_PUBLISHED, "signal_lr": 5e-3, "input_lr": 5e-3, "lr": 1e-2, "threshold": 110.0},
            "yale": {**_PUBLISHED, "signal_lr": 1e-2, "input_lr": 1e-2, "lr": 1e-2, "threshold": 32.0},
            "dlg": {**_VARIANT, "tv": 0.0},
            "cosine": {**_VARIANT, "distance": "cosine"},
            "sapag": {**_VARIANT, "distance": "gaussian-kernel"},
            "batchnorm": {**_VARIANT, "batchnorm": 1e-3},
            "group-consistency": {**_VARIANT, "group": 3, "consistency": 1e-3},
        }
    )

    method: Literal["direct", "nested", "single-loop", "gradients"] = "direct"
    iterations: int = 120
    first_iterations: int = 2000
    steps: Steps = "projection"
    signal_lr: float = 5e-3
    input_lr: float = 8e-3
    lr: float = 0.1
    schedule: Schedule = "cosine"
    start: Literal["grey", "normal", "uniform"] = "grey"
    relative: bool = True
    gradient: float = 1.0
    distance: str = "relative-squared-l2"
    tv: float = 0.04
    fade: float = 0.05
    threshold: float = 0.0
    representation: float = 1.0
    batchnorm: float = 0.0
    group: int = 1
    consistency: float = 0.0
    labels: Literal["recover", "joint"] = "recover"

    def __post_init__(self) -> None:
        if self.method not in ("direct", "nested", "single-loop", "gradients"):
            raise ValueError(f"method: expected 'direct', 'nested', 'single-loop' or 'gradients', got {self.method!r}")
        if self.steps not in ("projection", "descent") or self.labels not in ("recover", "joint"):
            raise ValueError(
                "steps and labels: expected 'projection' or 'descent', and 'recover' or 'joint', got "
                f"{self.steps!r} and {self.labels!r}"
            )
        if self.first_iterations < 1 or not (self.signal_lr > 0 and self.input_lr > 0):
            raise ValueError(
                "first_iterations, signal_lr and input_lr: expected at least 1 and positive numbers, got "
                f"{self.first_iterations}, {self.signal_lr} and {self.input_lr}"
            )
        self._step_three()

    def _step_three(self) -> StepThree:
        names = [field.name for field in dataclasses.fields(StepThree) if field.init]
        return StepThree(**{name: getattr(self, name) for name in names})

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        layers, batches = _readable(observation)
        samples = observation.num_examples
        assert samples is not None  # granted
        known = identify(batches, samples)
        targets, flags, notes, how = self._labels(observation, batches, known)
        search = self._step_three()
        if self.method != "direct" and observation.training.learning_rate is None:
            flags = (*flags, "steps not simulated")
        info: dict[str, Any] = {"labels": how, "rounds": len(batches), "index_rank": known.rank}
        info |= {"steps": self.iterations, "restarts": 1, "compiled": False}
        if self.method == "gradients":
            picture = search.match(observation, layers, targets, generator, progress)
            seen, left = torch.zeros((len(layers), samples), dtype=torch.bool), None
        elif self.method == "direct":
            signals, inputs, left, error = _solve(observation, layers, batches, known)
            info["expected_error"], apart = error, left
            seen = _seen(observation, signals, known)
            picture = _trusting(search, error).invert(observation, layers, inputs, seen, generator, progress)
        else:
            tables = self._tables(observation, layers, generator)
            nested = self.method == "nested"
            if nested:
                self._settle(observation, layers, tables)
            picture = search.match(observation, layers, targets, generator, progress, tables=tables, running=not nested)
            signals, found = [table.signals for table in tables], [table.inputs for table in tables]
            left = explained(observation.messages, layers, signals, found, complete=known.identifiable)
            # What can be seen is a matter of the rounds, not of how far the loop came.
            signals, _, apart, _ = _solve(observation, layers, batches, known)
            seen = _seen(observation, signals, known)
        diagnosis = None
        if left is not None:
            info["unexplained"] = left
            more, told, diagnosis = _opinion(observation, layers, known, seen, left, apart)
            flags, notes = (*flags, *more), (*notes, *told)
        labels = targets if picture.label_logits is None else as_labels(picture.label_logits)
        return Reconstruction(
            inputs=picture.inputs,
            labels=labels,
            scores=picture.scores,
            history={"objective": [_thinned(picture.curve)]} if picture.curve else {},
            flags=tuple(dict.fromkeys(flags)),
            notes=notes,
            info=info,
            diagnosis=diagnosis,
        )

    def _labels(
        self, observation: Observation, batches: list[tuple[int, ...]], known: Identifiability
    ) -> tuple[Tensor | None, tuple[str, ...], tuple[str, ...], str]:
        """Targets (None where they are searched), flags, notes, and how they were found."""
        if observation.labels is not None:
            return observation.labels, (), (), "known"
        if self.labels == "joint":
            return None, (), (), "joint"
        try:
            head = find_head(observation.model, observation.input_shape, observation.num_classes)
            if head.bias_name is None:
                raise ValueError("the last layer has no bias")
            if any(head.bias_name not in message.update for message in observation.messages):
                raise ValueError(f"the messages have no gradient of {head.bias_name}")
        except ValueError as error:
            done = "not recovered" if self.method == "direct" else "searched along"
            return None, ("labels uncertain",), (f"labels {done}, for they cannot be read: {error}",), done
        gradients = _gradients(observation.messages, head.bias_name)
        rows = solve_signals(index_matrix(batches, known.samples), gradients).rows
        # (p - y) / K: only the label's own entry is negative. One output: the sign itself tells.
        labels = (rows[:, 0] < 0).long() if rows.shape[1] == 1 else rows.argmin(1)
        clear = bool(known.determined.all()) and (rows.shape[1] == 1 or bool(((rows < 0).sum(1) == 1).all()))
        flags = () if clear else ("labels uncertain",)
        return labels.to(observation.device), flags, (), "step I on the last layer"

    def _tables(
        self, observation: Observation, layers: tuple[FirstDense, ...], generator: torch.Generator
    ) -> list[RunningSteps]:
        """The start of steps I and II as published: V in +-8e-4, H in [0, 0.08]; projections start from zero."""
        tables = []
        for layer in layers:
            signals = torch.rand((observation.num_examples or 1, layer.units), generator=generator).double()
            inputs = torch.rand((observation.num_examples or 1, layer.inputs), generator=generator).double()
            scale = 1.0 if self.steps == "descent" else 0.0
            signals, inputs = scale * 8e-4 * (2 * signals - 1), scale * 0.08 * inputs
            tables.append(RunningSteps(signals, inputs, self.steps, self.signal_lr, self.input_lr))
        return tables

    def _settle(self, observation: Observation, layers: tuple[FirstDense, ...], tables: list[RunningSteps]) -> None:
        """Algorithm 3: step I to its end, then step II to its end."""
        for part in ("bias", "weight"):
            for layer, table in zip(layers, tables, strict=True):
                name = f"{layer.name}.{part}"
                messages = [message for message in observation.messages if name in message.update]
                see = table.see_bias if part == "bias" else table.see_weight
                for step in range(self.first_iterations):
                    message = messages[step % len(messages)]
                    see(torch.tensor(message.indices), message.update[name].cpu().double())


def _readable(observation: Observation) -> tuple[tuple[FirstDense, ...], list[tuple[int, ...]]]:
    """The first dense layers and the announced batches; NotApplicable where the attack has nothing to work on."""
    model = observation.model
    if not isinstance(model, VerticalModel):
        raise NotApplicable(f"CAFE reads rounds of a VerticalModel, got a {type(model).__name__}")
    if any(message.kind != "gradient" for message in observation.messages):
        raise NotApplicable("CAFE reads gradients, got weight updates")
    batches = [message.indices for message in observation.messages if message.indices is not None]
    if len(batches) < len(observation.messages):
        raise MissingKnowledge("CAFE needs to know batch_indices, which messages of this observation lack")
    try:
        layers = first_dense(model)
    except ValueError as error:
        raise NotApplicable(str(error)) from error
    bare = [layer.share.name for layer in layers if not layer.bias]
    if bare:
        raise NotApplicable(f"CAFE reads the bias gradient of the first dense layer; none in {', '.join(bare)}")
    if observation.messages[0].partial:
        raise NotApplicable("CAFE needs whole messages, the first one at least, got a partial one")
    for part, messages in (
        ("bias", observation.messages),
        ("weight", [m for m in observation.messages if not m.partial]),
    ):
        lost = [
            f"{layer.name}.{part}" for layer in layers if any(f"{layer.name}.{part}" not in m.update for m in messages)
        ]
        if lost:
            raise NotApplicable(
                f"the messages have no gradient of their own for {', '.join(lost)}: frozen, shared or computed"
            )
    return layers, batches


def _gradients(messages: tuple[Message, ...], name: str) -> Tensor:
    return torch.stack([message.update[name].detach().cpu().double() for message in messages])


def _solve(
    observation: Observation, layers: tuple[FirstDense, ...], batches: list[tuple[int, ...]], known: Identifiability
) -> tuple[list[Tensor], list[Tensor], float, float]:
    """Steps I and II outright: V and H of each worker, the share of gradients left, and the error to be expected."""
    assert observation.num_examples is not None
    matrix = index_matrix(batches, observation.num_examples)
    biases = [_gradients(observation.messages, f"{layer.name}.bias") for layer in layers]
    first = solve_signals(matrix, torch.cat(biases, dim=1))
    tables = first.rows.split([layer.units for layer in layers], dim=1)
    signals = [_above_rounding(observation, rows, known) for rows in tables]
    whole = [message for message in observation.messages if not message.partial]
    second = [
        solve_inputs(whole, f"{layer.name}.weight", rows, known.determined)
        for layer, rows in zip(layers, signals, strict=True)
    ]
    left = max(first.residual, *(solution.residual for solution in second))
    error = math.hypot(first.error, max(solution.error for solution in second))
    return signals, [solution.rows for solution in second], left, error


def _trusting(search: StepThree, error: float) -> StepThree:
    """The search for representations with this relative error: the larger it is, the more the prior counts."""
    error = min(error, 1.0)
    return dataclasses.replace(
        search, representation=search.representation * (1 - error**2), fade=max(search.fade, error)
    )


def _seen(observation: Observation, signals: list[Tensor], known: Identifiability) -> Tensor:
    """(workers, samples): whether the rounds tell a sample's back-signal, and it is more than rounding.

    A sample for which every unit of a worker is dead sends nothing back, and that worker's part of it stays hidden.
    """
    whole = [message for message in observation.messages if not message.partial]
    tables = [_above_rounding(observation, table, known) for table in signals]
    return torch.stack([InputSystem.of(whole, table, known.determined).determined for table in tables])


def _above_rounding(observation: Observation, signals: Tensor, known: Identifiability) -> Tensor:
    """The back-signals, with those set to zero that are nothing but rounding: such a sample tells nothing."""
    condition = known.condition if math.isfinite(known.condition) else 1e3
    floor = 10 * torch.finfo(observation.dtype).eps * condition
    sizes = torch.linalg.vector_norm(signals, dim=1)
    return torch.where((sizes > floor * sizes.max())[:, None], signals, 0.0)


def _opinion(
    observation: Observation,
    layers: tuple[FirstDense, ...],
    known: Identifiability,
    seen: Tensor,
    left: float,
    apart: float,
) -> tuple[list[str], list[str], Diagnosis]:
    """Flags, notes and a diagnosis from what the equations themselves tell.

    ``left`` is what the result leaves of the gradients, ``apart`` what the best solution would leave.
    """
    flags, notes = [], []
    unknowns = known.samples * math.prod(observation.input_shape)
    outcome: Literal["not identifiable", "undecided"] = "undecided"
    reason = "steps I and II determine every sample; how well step III inverts the workers is not known to it"
    hidden = ~seen
    if not known.identifiable:
        flags.append("not identifiable")
        notes.append(known.reason)
    elif bool(hidden.any()):
        flags.append("not identifiable")
    if bool(hidden.any()):
        names = [
            f"{int(row.sum())} for {layer.share.name!r}" for layer, row in zip(layers, hidden, strict=True) if row.any()
        ]
        notes.append(f"samples whose representation the rounds do not determine: {', '.join(names)}")
        outcome, reason = "not identifiable", notes[0]
    if left > AGREEMENT:
        flags.append("rounds disagree" if apart > AGREEMENT else "did not converge")
        notes.append(f"{left:.1%} of the gradients of the first dense layers are not explained by one row a sample")
        outcome, reason = "undecided", notes[-1]
    return flags, notes, Diagnosis(outcome=outcome, reason=reason, unknowns=unknowns, residual=left)


def _thinned(curve: list[float]) -> list[float]:
    every = -(-len(curve) // 200)
    return curve[::every]
