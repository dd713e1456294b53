"""CAFE: Catastrophic Data Leakage in Vertical Federated Learning. Jin, Chen, Hsu, Yu, Chen. NeurIPS 2021.

The server of vertical learning knows which samples are in each batch. Step I recovers for each sample n and worker the
output gradient v_n of the worker's first dense layer from bias gradients, step II the layer's inputs h_n from weight
gradients (both in attacks/cafe/rounds.py), step III the data:

    min_x  a ||grad L(x_s) - g_s||^2 + b TV(x) 1[TV(x) >= xi] + c ||h_s - h(x_s)||^2

``method="direct"`` (default) solves steps I and II outright by linear least squares while the model stands still, with
a test which samples the batches determine; then each h_n alone determines its part of the picture, and the gradient
term, three times as dear, is left out. A worker that begins with its dense layer needs no search. ``"nested"`` is
Algorithm 3 (step I over many rounds, then II, then III), ``"single-loop"`` Algorithm 4 (each round moves all three, so
that the model may train meanwhile). ``"gradients"`` skips steps I and II, the comparison in the paper.

Differences from the published code. The terms are relative to the size of what is observed, TV is the joint one of all
channels and fades by ``fade`` over the run (``relative=False``: sums, as published). Steps I and II of the loops are
projections, which need no learning rate (``steps="descent"``: the published ones). Adam counts steps by row and
corrects its bias once; the published code takes the global iteration and corrects twice. Unknown labels are read by
step I off the last layer, where the label's own entry is the negative one (``labels="joint"``: searched, as published).
Recorded rounds are visited over and over, in their order, each with the weights it was played with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from leakscope.attacks.cafe.data import Data, RoundSearch, invert
from leakscope.attacks.cafe.rounds import Rounds, RunningSteps, Steps, Tables, settle, share_unexplained, solve
from leakscope.attacks.gradient_matching import require_searchable
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import Start
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Diagnosis, Reconstruction
from leakscope.contracts.settings import setting
from leakscope.matching import DISTANCES
from leakscope.matching.optimisers import Schedule
from leakscope.network.layers import find_head

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
    """Vertical: solve each sample's part in the first dense layers from announced batches, then search the data.

    Presets "dlg", "cosine", "sapag", "batchnorm" and "group-consistency" match gradients on the same rounds.
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

    method: Literal["direct", "nested", "single-loop", "gradients"] = setting(
        "direct", "Solve steps I and II outright, approach them in loops, or match gradients only."
    )
    iterations: int = setting(120, "Steps of step III: for each sample if direct, rounds visited otherwise.", ge=1)
    first_iterations: int = setting(2000, "Rounds visited by step I and by step II of the nested loops.", ge=1)
    steps: Steps = setting("projection", "How the loops move in steps I and II.")
    signal_lr: float = setting(5e-3, "Step size of step I under descent.", gt=0)
    input_lr: float = setting(8e-3, "Step size of step II under descent.", gt=0)
    lr: float = setting(0.1, "Step size of Adam.", gt=0)
    schedule: Schedule = setting("cosine", "How the step size falls over the run.")
    start: Start = setting("grey", "Where the search starts.")
    relative: bool = setting(True, "Terms relative to the size of what is observed, or sums as published.")
    gradient: float = setting(1.0, "Weight of the gradient term (alpha); the direct method has none.", ge=0)
    distance: str = setting("relative-squared-l2", "How two updates are compared.", choices=DISTANCES)
    tv: float = setting(0.04, "Weight of total variation (beta) at the start.", ge=0)
    fade: float = setting(0.05, "What the weight of total variation is multiplied by over the search.", gt=0, le=1)
    threshold: float = setting(0.0, "Total variation from which on it counts (xi).", ge=0)
    representation: float = setting(1.0, "Weight of the representation term (gamma).", ge=0)
    batchnorm: float = setting(0.0, "Weight of the BatchNorm-statistics prior; 0 leaves it out.", ge=0)
    group: int = setting(1, "Pictures of each sample searched side by side.", ge=1)
    consistency: float = setting(0.0, "Weight of their squared distance from their mean.", ge=0)
    labels: Literal["recover", "joint"] = setting(
        "recover", "Labels that are not known: read off the last layer by step I, or searched with the data."
    )

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        rounds = Rounds.of(observation)
        targets, how, uncertain, remarks = self._labels(rounds)
        simulates = self.method != "direct"  # gradients, for which labels and the weights of every round are needed
        if simulates and targets is None:
            require_searchable(observation)
        data, solved, left = self._recover(rounds, targets, generator, progress)
        flags, notes, diagnosis = ((), (), None) if solved is None else _opinion(rounds, solved, left)
        unsimulated = simulates and observation.training.learning_rate is None
        flags = (*uncertain, *(("steps not simulated",) if unsimulated else ()), *flags)
        searched = None if data.label_logits is None else observation.task.decode(data.label_logits)
        info: dict[str, Any] = {
            "labels": how,
            "rounds": len(rounds.batches),
            "index_rank": rounds.identifiability.rank,
            "steps": self.iterations,
            "restarts": 1,
            "compiled": False,
        }
        if solved is not None:
            info |= {} if simulates else {"expected_error": solved.error}
            info["unexplained"] = left
        return Reconstruction(
            inputs=data.inputs,
            labels=targets if searched is None else searched,
            scores=data.scores,
            history={"objective": [data.curve[:: -(-len(data.curve) // 200)]]} if data.curve else {},
            flags=tuple(dict.fromkeys(flags)),
            notes=(*remarks, *notes),
            info=info,
            diagnosis=diagnosis,
        )

    def _recover(
        self, rounds: Rounds, targets: Tensor | None, generator: torch.Generator, progress: Progress | None
    ) -> tuple[Data, Tables | None, float]:
        """Return the data, what steps I and II can determine, and the share that the tables leave unexplained."""
        if self.method == "direct":
            solved = solve(rounds)
            # The larger the error of the representations, the more the prior counts.
            error = min(solved.error, 1.0)
            weight, fade = self.representation * (1 - error**2), max(self.fade, error)
            settings = dataclasses.replace(self, representation=weight, fade=fade)
            data = invert(settings, rounds, solved.inputs, solved.determined, generator, progress)
            return data, solved, solved.unexplained
        if self.method == "gradients":
            return RoundSearch(self, rounds, targets, generator).run((), progress), None, 0.0
        tables = [RunningSteps.start(self, rounds.samples, layer, generator) for layer in rounds.layers]
        if self.method == "nested":
            settle(rounds, tables, self.first_iterations)
        search = RoundSearch(self, rounds, targets, generator)
        data = search.run(tables, progress, move_tables=self.method == "single-loop")
        # What can be determined is a matter of the rounds, not of how far the loop came.
        reached = [table.output_gradients for table in tables], [table.inputs for table in tables]
        complete = rounds.identifiability.identifiable
        return data, solve(rounds), share_unexplained(rounds.messages, rounds.layers, *reached, complete=complete)

    def _labels(self, rounds: Rounds) -> tuple[Tensor | None, str, tuple[str, ...], tuple[str, ...]]:
        """Return the labels, how they were found, flags and notes."""
        observation = rounds.observation
        if observation.labels is not None:
            return observation.labels, "known", (), ()
        if self.labels == "joint":
            return None, "joint", (), ()
        try:
            bias = _head_bias(rounds)
        except ValueError as error:
            how = "not recovered" if self.method == "direct" else "searched along"
            return None, how, ("labels uncertain",), (f"labels {how}, for they cannot be read: {error}",)
        (rows,), _, _ = rounds.solve_output_gradients([bias])
        # (p - y) / K: only the label's own entry is negative. One output: the sign itself tells.
        single = rows.shape[1] == 1
        labels = (rows[:, 0] < 0).long() if single else rows.argmin(1)
        determined = bool(rounds.identifiability.determined.all())
        clear = determined and (single or bool(((rows < 0).sum(1) == 1).all()))
        flags = () if clear else ("labels uncertain",)
        return labels.to(observation.device), "step I on the last layer", flags, ()


def _head_bias(rounds: Rounds) -> str:
    observation = rounds.observation
    if not observation.task.has_classes:
        raise UserError(f"{observation.task!r} has no classes")
    head = find_head(observation.model, observation.input_shape, observation.num_classes)
    if head.bias_name is None:
        raise UserError("the last layer has no bias")
    if any(head.bias_name not in message.update for message in rounds.messages):
        raise UserError(f"the messages have no gradient of {head.bias_name}")
    return head.bias_name


def _opinion(rounds: Rounds, solved: Tables, left: float) -> tuple[tuple[str, ...], tuple[str, ...], Diagnosis]:
    identifiability, hidden = rounds.identifiability, ~solved.determined
    flags: list[str] = []
    notes: list[str] = []
    outcome: Literal["not identifiable", "undecided"] = "undecided"
    reason = "steps I and II determine every sample; how well step III inverts the workers is not known to it"
    if not identifiability.identifiable or bool(hidden.any()):
        flags.append("not identifiable")
    if not identifiability.identifiable:
        notes.append(identifiability.reason)
    if bool(hidden.any()):
        rows = zip(rounds.layers, hidden, strict=True)
        names = [f"{int(row.sum())} for {layer.share.name!r}" for layer, row in rows if row.any()]
        notes.append(f"samples whose representation the rounds do not determine: {', '.join(names)}")
        outcome, reason = "not identifiable", notes[0]
    if left > AGREEMENT:
        flags.append("rounds disagree" if solved.unexplained > AGREEMENT else "did not converge")
        share = f"{left:.1%} of the gradients of the first dense layers"
        notes.append(f"{share} are not explained by one row per sample")
        outcome, reason = "undecided", notes[-1]
    unknowns = rounds.samples * rounds.observation.inputs.size
    diagnosis = Diagnosis(outcome=outcome, reason=reason, unknowns=unknowns, residual=left)
    return tuple(flags), tuple(notes), diagnosis
