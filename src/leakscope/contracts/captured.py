"""Observations of captured updates: weights before and after, or an update, as real systems hold them.

The functions here stand behind :meth:`Observation.from_state_dicts` and :meth:`Observation.from_arrays`. They take what
was captured apart, list all that is wrong with it at once, check which way it points, and read what the buffers tell.
What is not said is not known: the knowledge grants just the facts that were given.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from leakscope.contracts.captured_state import CapturedState, read_state
from leakscope.contracts.checks import refuse
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import Box, ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.made import Made
from leakscope.contracts.observation import BatchNormMode, LocalTraining, Message, Observation, UpdateKind
from leakscope.contracts.protocol import BATCHNORM
from leakscope.contracts.running_statistics import RunningMovement, counted_steps, running_movement
from leakscope.contracts.task import Classification, Reduction, Task
from leakscope.contracts.update_sign import SignCheck, check_sign, logit_layer

SignChoice = Literal["check", "flip", "trust"]
CapturedKind = Literal["weights", "gradient", "weight_delta"]


@dataclass(frozen=True, kw_only=True)
class CaptureFacts:
    """What is known of a captured update besides its tensors; ``None`` means not known.

    ``sign``: "check" refuses an update that certainly points the wrong way, "flip" turns it (or swaps before and
    after), "trust" takes it as it is. ``batchnorm`` follows from the buffers where these were sent. ``knowledge`` is
    what the facts given add up to unless it is given itself.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    num_examples: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    optimizer: str | None = None
    momentum: float | None = None
    value_range: ValueRange | None = None
    labels: Tensor | None = None
    batchnorm: BatchNormMode | None = None
    task: Task = Classification()
    reduction: Reduction = "mean"
    model_name: str | None = None
    knowledge: Knowledge | None = None
    sign: SignChoice = "check"
    made_by: str | None = None
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.sign not in ("check", "flip", "trust"):
            raise UserError(f"sign: expected 'check', 'flip' or 'trust', got {self.sign!r}")

    @property
    def told_steps(self) -> int | None:
        """Local steps, where the recipe says."""
        if self.num_examples is None or self.epochs is None or not self.batch_size:
            return None
        return self.epochs * math.ceil(self.num_examples / self.batch_size)


def observe_captured(content: Any, kind: str, before: Any, model: nn.Module, facts: Mapping[str, Any]) -> Observation:
    """The observation of weights after training, or of an update, as ``kind`` says."""
    if kind == "weights":
        return observe_weights(before, content, model, CaptureFacts(**facts))
    if kind not in get_args(UpdateKind):
        raise UserError(f"kind: expected one of {', '.join(get_args(CapturedKind))}, got {kind!r}")
    return observe_update(content, cast(UpdateKind, kind), before, model, CaptureFacts(**facts))


def observe_weights(before: Any, after: Any, model: nn.Module, facts: CaptureFacts) -> Observation:
    """The observation of a client that received ``before`` (None: the model's own weights) and returned ``after``."""
    if facts.sign == "flip":
        if before is None:
            raise UserError("sign='flip' swaps before and after: expected both, got no weights before")
        before, after = after, before
    first, problems = _own_state(model), list[str]()
    if before is not None:
        first, problems = read_state("before", before, model)
    second, more = read_state("after", after, model)
    problems += more
    refuse("the captured weights do not fit the model", problems)
    received = with_weights(model, first)
    update = {name: first.parameters[name] - second.parameters[name] for name in _trained(model)}
    frozen = [n for n in first.parameters if n not in update and not _equal(first.parameters[n], second.parameters[n])]
    if frozen:
        names = ", ".join(frozen)
        raise UserError(f"{names}: the model has them frozen (requires_grad=False), but the client moved them")
    notes = [*first.notes, *second.notes]
    return _observe(received, update, "weight_delta", (first.buffers, second.buffers), facts, notes)


def observe_update(update: Any, kind: UpdateKind, before: Any, model: nn.Module, facts: CaptureFacts) -> Observation:
    """The observation of an update itself; ``before`` are the weights the client received, None those of the model."""
    first, problems = _own_state(model), list[str]()
    if before is not None:
        first, problems = read_state("before", before, model)
    moved, more = read_state("update", update, model, trained_only=True)
    refuse("the captured update does not fit the model", problems + more)
    received = with_weights(model, first)
    turn = -1.0 if facts.sign == "flip" else 1.0
    parameters = {name: turn * value for name, value in moved.parameters.items()}
    buffers = {name: first.buffers.get(name, value) - turn * value for name, value in moved.buffers.items()}
    notes = [*first.notes, *moved.notes]
    return _observe(received, parameters, kind, (first.buffers, buffers), facts, notes)


def _observe(
    model: nn.Module,
    update: Mapping[str, Tensor],
    kind: UpdateKind,
    buffers: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    facts: CaptureFacts,
    notes: list[str],
) -> Observation:
    if not any(bool(value.any()) for value in update.values()):
        same = "before and after are equal in every trained parameter" if kind == "weight_delta" else "it is all zero"
        raise UserError(f"the update is empty: {same}. Was the same file captured twice?")
    recipe = {"epochs": facts.epochs, "batch_size": facts.batch_size, "learning_rate": facts.learning_rate}
    if kind == "gradient" and any(value is not None for value in recipe.values()):
        told = ", ".join(name for name, value in recipe.items() if value is not None)
        raise UserError(f"{told}: a gradient has no local training; expected kind 'weight_delta' with it")
    sign = _checked_sign(model, update, kind, counted_steps(*buffers), facts)
    movement = running_movement(model, *buffers, facts.input_shape, _batch(facts), facts.told_steps)
    notes += [movement.note] if movement.note else []
    if movement.steps is not None and facts.told_steps not in (None, movement.steps):
        notes.append(f"the BatchNorm layers counted {movement.steps} steps, the recipe says {facts.told_steps}")
    by = facts.made_by or "leakscope.Observation"
    made = Made(by=by, sources=facts.sources, sign=sign.answer, sign_reason=sign.reason, notes=tuple(notes))
    return _assembled(model, update, kind, movement, facts, made)


def _checked_sign(
    model: nn.Module, update: Mapping[str, Tensor], kind: UpdateKind, counters: Mapping[str, float], facts: CaptureFacts
) -> SignCheck:
    cross_entropy = isinstance(facts.task, Classification)
    layer = logit_layer(model, tuple(facts.input_shape), facts.num_classes) if cross_entropy else None
    sign = check_sign(update, layer, facts.num_examples, counters)
    if sign.answer != "wrong" or facts.sign == "trust":
        return sign
    remedy = "swap before and after" if kind == "weight_delta" else "negate it"
    other = {"check": "sign='flip' (--sign flip) does it for you", "flip": "leave sign='flip' (--sign flip) out"}
    raise UserError(
        f"the update points the wrong way: {sign.reason}. Expected a gradient, or weights before minus weights after: "
        f"{remedy}; {other[facts.sign]}. If it is right (the number of examples is mistaken, or the client smooths its "
        "labels), sign='trust' (--sign trust) takes it as it is."
    )


def _batch(facts: CaptureFacts) -> int | None:
    """Examples in a step, as far as is known."""
    if facts.num_examples is None or facts.batch_size is None:
        return facts.num_examples
    return min(facts.num_examples, facts.batch_size)


def _assembled(
    model: nn.Module,
    update: Mapping[str, Tensor],
    kind: UpdateKind,
    movement: RunningMovement,
    facts: CaptureFacts,
    made: Made,
) -> Observation:
    epochs, batch_size = facts.epochs, facts.batch_size
    if kind == "weight_delta" and movement.steps == 1 and epochs is None and batch_size is None:
        epochs, batch_size = (1, facts.num_examples) if facts.num_examples else (None, None)  # as the layers counted
    training = LocalTraining(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=facts.learning_rate,
        optimizer=facts.optimizer,
        momentum=facts.momentum,
    )
    rate = (facts.learning_rate, facts.optimizer, facts.momentum)
    knowledge = facts.knowledge or Knowledge(
        labels="no" if facts.labels is None else "yes",
        num_examples=facts.num_examples is not None,
        local_epochs=epochs is not None,
        batch_size=batch_size is not None,
        learning_rate=any(value is not None for value in rate),
        batchnorm_statistics=movement.statistics is not None,
        normalisation=facts.value_range is not None,
    )
    statistics = movement.statistics if knowledge.batchnorm_statistics else None
    read = batchnorm_mode(model, movement)
    parameters = dict(model.named_parameters())
    tensors = {name: value.to(parameters[name]) for name, value in update.items()}
    return Observation(
        model=model,
        messages=(Message(update=tensors, kind=kind, batchnorm_statistics=statistics),),
        inputs=Box(tuple(facts.input_shape), facts.value_range),
        num_classes=facts.num_classes,
        task=facts.task,
        knowledge=knowledge,
        num_examples=facts.num_examples,
        labels=facts.labels,
        training=training if facts.knowledge is None else training.granted(knowledge),
        reduction=facts.reduction,
        batchnorm=facts.batchnorm or read,
        model_name=facts.model_name,
        made=made,
    )


def batchnorm_mode(model: nn.Module, movement: RunningMovement) -> BatchNormMode:
    """The mode that the client's BatchNorm was in: "train", as one trains, unless its buffers stood still."""
    has_norms = any(isinstance(module, BATCHNORM) for module in model.modules())
    return "eval" if not has_norms or movement.moved is False else "train"


def _own_state(model: nn.Module) -> CapturedState:
    names, state = dict(model.named_parameters()), model.state_dict()
    wide = {name: value.detach().cpu().double() for name, value in state.items()}
    return CapturedState(
        {name: wide[name] for name in names if name in wide},
        {name: value for name, value in wide.items() if name not in names},
    )


def with_weights(model: nn.Module, state: CapturedState) -> nn.Module:
    """A copy of the model as the client received it; buffers that were not captured stay those of the model."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in twin.state_dict().items():
            captured = state.parameters.get(name, state.buffers.get(name))
            if captured is not None:
                value.copy_(captured)
    return twin


def _trained(model: nn.Module) -> list[str]:
    return [name for name, value in model.named_parameters() if value.requires_grad]


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b))
