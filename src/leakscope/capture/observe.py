"""Observe captured updates: weights before and after, or an update, as real systems hold them.

What is not said is not known: the knowledge grants just the facts that were given.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from leakscope.capture.sign import SignCheck, check_sign, logit_layer
from leakscope.capture.state import CapturedState, RunningMovement, counted_steps, read_state, running_movement
from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import refuse
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import Box, ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.made import Made
from leakscope.contracts.observation import BatchNormMode, LocalTraining, Message, Observation, UpdateKind
from leakscope.contracts.protocol import BATCHNORM, draws_units
from leakscope.contracts.task import Classification, Reduction, Task

SignChoice = Literal["check", "flip", "trust"]
#: Weights after training; an update, "weight_delta" = before minus after; or "difference" = after minus before.
CapturedKind = Literal["weights", "gradient", "weight_delta", "difference"]

DROPOUT = (
    "the model has dropout, and clients usually train with it on; attacks simulate the network without it, so that a "
    "failed attack is no sign of safety"
)


@dataclass(frozen=True, kw_only=True)
class CaptureFacts:
    """What is known of a captured update besides its tensors; ``None`` means not known.

    ``sign``: "check" refuses an update that certainly points the wrong way, "flip" turns it (or swaps before and
    after), "trust" takes it as it is. ``batchnorm`` follows from the buffers where these were sent. ``knowledge`` is
    what the facts given add up to unless it is given itself; then what it denies is withheld. ``running``: the system
    must not stop for it, so NaN, an empty update, frozen parameters that moved and a wrong sign are recorded.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    num_examples: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    optimizer: str | None = None
    momentum: float | None = None
    batch_order: tuple[tuple[int, ...], ...] | None = None
    value_range: ValueRange | None = None
    labels: Tensor | None = None
    batchnorm: BatchNormMode | None = None
    task: Task = Classification()
    reduction: Reduction = "mean"
    channel: Channel | None = None
    model_name: str | None = None
    knowledge: Knowledge | None = None
    sign: SignChoice = "check"
    running: bool = False
    made_by: str | None = None
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.sign not in ("check", "flip", "trust"):
            raise UserError(f"sign: expected 'check', 'flip' or 'trust', got {self.sign!r}")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise UserError(f"learning_rate (--lr): expected a number above 0, got {self.learning_rate}")

    @property
    def training(self) -> LocalTraining:
        return LocalTraining(**{name: getattr(self, name) for name in LocalTraining.GRANTED_BY})

    @property
    def told_steps(self) -> int | None:
        if self.num_examples is None or self.epochs is None or not self.batch_size:
            return None
        return self.epochs * math.ceil(self.num_examples / self.batch_size)

    @property
    def step_examples(self) -> int | None:
        if self.num_examples is None or self.batch_size is None:
            return self.num_examples
        return min(self.num_examples, self.batch_size)


def observe_captured(
    content: Any, kind: str, before: Any, model: nn.Module, facts: CaptureFacts | Mapping[str, Any]
) -> Observation:
    """Observe weights after training, or an update, as ``kind`` says; ``before`` None: the model's own weights."""
    if kind not in get_args(CapturedKind):
        raise UserError(f"kind: expected one of {', '.join(get_args(CapturedKind))}, got {kind!r}")
    known = facts if isinstance(facts, CaptureFacts) else CaptureFacts(**facts)
    flip, weights = known.sign == "flip", kind == "weights"
    if weights and flip:
        if before is None:
            raise UserError("sign='flip' swaps before and after: expected both, got no weights before")
        before, content = content, before
    finite, what = not known.running, "after" if weights else "update"
    own = before is None
    first, problems = read_state("before", model.state_dict() if own else before, model, finite=finite and not own)
    second, more = read_state(what, content, model, trained_only=not weights, finite=finite)
    refuse("what was captured does not fit the model", problems + more, most=20)
    notes = [*first.notes, *second.notes]
    if weights:
        update = {name: value - second.parameters[name] for name, value in first.parameters.items()}
        after = second.buffers
    else:
        turn = -1.0 if flip != (kind == "difference") else 1.0
        update = {name: turn * value for name, value in second.parameters.items()}
        after = {name: first.buffers.get(name, value) - turn * value for name, value in second.buffers.items()}
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    moved = [name for name, value in update.items() if weights and name not in trained and bool(value.any())]
    if moved:
        words = f"{', '.join(moved)}: the model has them frozen (requires_grad=False), but the client moved them"
        if not known.running:
            raise UserError(words)
        notes.append(words)
    sent = {name: value for name, value in update.items() if name in trained or not weights}
    message: UpdateKind = "gradient" if kind == "gradient" else "weight_delta"
    return _observe(with_weights(model, first), sent, message, (first.buffers, after), known, notes)


def _observe(
    model: nn.Module,
    update: Mapping[str, Tensor],
    kind: UpdateKind,
    buffers: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    facts: CaptureFacts,
    notes: list[str],
) -> Observation:
    if not facts.running and not any(bool(value.any()) for value in update.values()):
        same = "before and after are equal in every trained parameter" if kind == "weight_delta" else "it is all zero"
        raise UserError(f"the update is empty: {same}. Was the same file captured twice?")
    if kind == "gradient":
        told = [name for name in ("epochs", "batch_size", "learning_rate") if getattr(facts, name) is not None]
        if told and not facts.running:
            names = ", ".join(told)
            raise UserError(f"{names}: a gradient has no local training; expected kind 'weight_delta' with it")
        facts = replace(facts, **dict.fromkeys(LocalTraining.GRANTED_BY))  # type: ignore[arg-type]
    sign = _checked_sign(model, update, kind, counted_steps(*buffers), facts)
    movement = running_movement(model, *buffers, facts.input_shape, facts.step_examples, facts.told_steps)
    if facts.channel is not None:  # a defence alters buffers as it alters weights, and then they tell no batch
        movement = replace(movement, statistics=None, note="")
    notes += [movement.note] if movement.note else []
    example = torch.ones((1, *facts.input_shape)).to(next(model.parameters()))
    notes += [DROPOUT] if draws_units(model, example) else []
    if movement.steps is not None and facts.told_steps not in (None, movement.steps):
        notes.append(f"the BatchNorm layers counted {movement.steps} steps, the recipe says {facts.told_steps}")
    by = facts.made_by or "leakscope.capture"
    made = Made(by=by, sources=facts.sources, sign=sign.answer, sign_reason=sign.reason, notes=tuple(notes))
    return _assembled(model, update, kind, movement, facts, made)


def _checked_sign(
    model: nn.Module, update: Mapping[str, Tensor], kind: UpdateKind, counters: Mapping[str, float], facts: CaptureFacts
) -> SignCheck:
    cross_entropy = isinstance(facts.task, Classification)
    layer = logit_layer(model, tuple(facts.input_shape), facts.num_classes) if cross_entropy else None
    sign = check_sign(update, layer, facts.num_examples, counters)
    if sign.answer != "wrong" or facts.sign == "trust" or facts.running:
        return sign
    remedy = "swap before and after" if kind == "weight_delta" else "negate it"
    other = {"check": "sign='flip' (--sign flip) does it for you", "flip": "leave sign='flip' (--sign flip) out"}
    raise UserError(
        f"the update points the wrong way: {sign.reason}. Expected a gradient, or weights before minus weights after: "
        f"{remedy}; {other[facts.sign]}. If it is right (the number of examples is mistaken, or the client smooths its "
        "labels), sign='trust' (--sign trust) takes it as it is."
    )


def _assembled(
    model: nn.Module,
    update: Mapping[str, Tensor],
    kind: UpdateKind,
    movement: RunningMovement,
    facts: CaptureFacts,
    made: Made,
) -> Observation:
    training, examples = facts.training, facts.num_examples
    if kind == "weight_delta" and movement.steps == 1 and examples and (facts.epochs, facts.batch_size) == (None, None):
        training = replace(training, epochs=1, batch_size=examples)  # as the layers counted
    told = {name for fact, name in LocalTraining.GRANTED_BY.items() if getattr(training, fact) is not None}
    knowledge = facts.knowledge or Knowledge(
        labels="no" if facts.labels is None else "yes",
        num_examples=examples is not None,
        batchnorm_statistics=True,
        normalisation=facts.value_range is not None,
        defense=facts.channel is not None,
        **dict.fromkeys(told, True),
    )
    statistics = movement.statistics if knowledge.batchnorm_statistics else None
    knowledge = replace(knowledge, batchnorm_statistics=statistics is not None)
    parameters = dict(model.named_parameters())
    tensors = {name: value.to(parameters[name]) for name, value in update.items()}
    # As one trains, unless the buffers stood still.
    trains = movement.moved is not False and any(isinstance(module, BATCHNORM) for module in model.modules())
    return Observation(
        model=model,
        messages=(Message(update=tensors, kind=kind, batchnorm_statistics=statistics),),
        inputs=Box(tuple(facts.input_shape), facts.value_range if knowledge.normalisation else None),
        num_classes=facts.num_classes,
        task=facts.task,
        knowledge=knowledge,
        num_examples=examples if knowledge.num_examples else None,
        labels=facts.labels if knowledge.grants("labels") else None,
        training=training.granted(knowledge),
        channel=facts.channel if knowledge.defense else None,
        reduction=facts.reduction,
        batchnorm=facts.batchnorm or ("train" if trains else "eval"),
        model_name=facts.model_name,
        made=made,
    )


def with_weights(model: nn.Module, state: CapturedState) -> nn.Module:
    """Copy the model as the client received it; buffers that were not captured stay those of the model."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in twin.state_dict().items():
            captured = state.parameters.get(name, state.buffers.get(name))
            if captured is not None:
                value.copy_(captured)
    return twin
