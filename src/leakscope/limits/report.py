"""What theory says of a model, an input shape and a batch size, before any attack is run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from leakscope.limits.jacobian import JacobianRank, jacobian_rank
from leakscope.limits.propositions import Proposition, linear_first, propositions
from leakscope.limits.structure import structure
from leakscope.observation import ValueRange


@dataclass(frozen=True)
class Limits:
    """Facts and conditions; :meth:`rows` is the table of them, :attr:`conclusion` the one sentence.

    ``identifiable``: whether a batch is locally determined by its gradient, labels being known; None where only the
    counts are available and they do not exclude it. ``closed_form``: the first linear layer gives one example exactly.
    ``span_readable``: its gradient gives the span of the batch.
    """

    input_shape: tuple[int, ...]
    batch: int
    num_classes: int
    first_layer: str
    first_layer_kind: str
    first_layer_size: str
    gradient_entries: int
    unknowns: int
    unknowns_with_labels: int
    count_met: bool
    count_met_with_labels: bool
    closed_form: bool
    span_readable: bool
    first_linear: str
    propositions: tuple[Proposition, ...]
    jacobian: JacobianRank
    seed: int

    @property
    def identifiable(self) -> bool | None:
        if not self.count_met:
            return False
        # The rank goes first: where every unit is dead at the random input, the closed form has nothing to solve.
        return self.jacobian.full if self.jacobian.full is not None else (True if self.closed_form else None)

    @property
    def conclusion(self) -> str:
        if not self.count_met:
            return (
                f"Not identifiable: {self.gradient_entries} observed entries cannot determine {self.unknowns} "
                "unknown input values without prior knowledge of them."
            )
        if self.identifiable and self.closed_form:
            return "Identifiable: the input follows from the first layer's gradient in closed form."
        if self.identifiable:
            return "Identifiable: every small change of the inputs shows in the gradient."
        if self.jacobian.full is False:
            lost = self.jacobian.unknowns - (self.jacobian.rank or 0)
            return (
                f"Not identifiable: in {lost} of {self.unknowns} directions the inputs can change without a trace "
                "in the gradient."
            )
        return "Not excluded: there are enough observed entries, which is necessary but not sufficient."

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and meaning of each fact, for a table."""
        found = self.jacobian
        missing = found.reason or ""
        rows = [
            (
                "first layer",
                f"{self.first_layer}: {self.first_layer_kind} {self.first_layer_size}",
                "the first layer with parameters that reads the input",
            ),
            ("observed gradient entries", str(self.gradient_entries), "equations: one a trainable weight"),
            ("unknown input values", str(self.unknowns), "batch size times values an example"),
            (
                "unknowns with labels",
                str(self.unknowns_with_labels),
                "the same and one value a class and example, where the labels are not known",
            ),
            (
                "count, labels known",
                _met(self.count_met),
                "at least as many equations as unknowns; necessary, not sufficient",
            ),
            ("count, labels unknown", _met(self.count_met_with_labels), "the same with the labels' unknowns"),
            ("first linear layer", _yes(self.closed_form or self.span_readable), self.first_linear),
        ]
        rows += [(p.name, _met(p.met) if p.applies else "does not apply", p.statement) for p in self.propositions]
        rows += [
            (
                "rank of the Jacobian",
                "not computed" if found.rank is None else f"{found.rank} of {found.unknowns}",
                missing or "directions of the inputs that show in the gradient, at a random input in the box",
            ),
            ("smallest singular value", _number(found.smallest), missing or "how faintly the weakest one shows"),
            ("largest singular value", _number(found.largest), missing or "how strongly the strongest one shows"),
            (
                "condition number",
                _number(found.condition),
                missing or "the ratio of the two; where it is large, rounding or a little noise hides directions",
            ),
            (
                "conclusion",
                {True: "identifiable", False: "not identifiable", None: "open"}[self.identifiable],
                self.conclusion,
            ),
        ]
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it; an infinite number becomes None."""
        facts = dataclasses.asdict(self)
        facts["jacobian"]["full"] = self.jacobian.full
        facts["identifiable"] = self.identifiable
        facts["conclusion"] = self.conclusion
        plain = _plain(facts)
        assert isinstance(plain, dict)
        return plain


def limits(
    model: nn.Module,
    input_shape: tuple[int, ...],
    batch: int,
    num_classes: int | None = None,
    *,
    value_range: ValueRange | None = None,
    seed: int = 0,
) -> Limits:
    """What a gradient of ``model`` on ``batch`` examples can tell at most; ``model`` itself is not touched.

    ``input_shape`` is without the batch. ``num_classes`` is checked against the model's outputs where given.
    ``value_range`` is the box of the random input at which the rank is taken, [0, 1] without it. A batch is determined
    only up to the order of its examples, and priors on the inputs may fill in what the gradient does not show.

    >>> import torch
    >>> found = limits(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), (1, 2, 2), batch=1)
    >>> found.gradient_entries, found.unknowns, found.closed_form, found.jacobian.rank
    (15, 4, True, 4)
    """
    shape = _checked(model, input_shape, batch, num_classes)
    found = structure(model, shape)
    if num_classes is not None and num_classes != found.outputs:
        raise ValueError(
            f"num_classes: the model has {found.outputs} outputs, got {num_classes}. Pass that number or leave it out."
        )
    features = math.prod(shape)
    unknowns = batch * features
    with_labels = unknowns + batch * found.outputs
    layer = linear_first(found)
    if isinstance(layer, str):
        closed, span, sentence = False, False, f"no closed form: {layer}"
    else:
        closed = batch == 1 and found.first.has_bias
        span = batch <= layer.out_features
        sentence = _first_linear_sentence(batch, layer.out_features, found.first.has_bias)
    return Limits(
        input_shape=shape,
        batch=batch,
        num_classes=found.outputs,
        first_layer=found.first.name or "model",
        first_layer_kind=found.first.kind,
        first_layer_size=found.first.size,
        gradient_entries=found.entries,
        unknowns=unknowns,
        unknowns_with_labels=with_labels,
        count_met=found.entries >= unknowns,
        count_met_with_labels=found.entries >= with_labels,
        closed_form=closed,
        span_readable=span,
        first_linear=sentence,
        propositions=propositions(found, shape, batch),
        jacobian=jacobian_rank(model, shape, batch, found.outputs, value_range=value_range, seed=seed),
        seed=seed,
    )


def _first_linear_sentence(batch: int, units: int, bias: bool) -> str:
    if batch == 1 and bias:
        return "one example is recovered exactly in closed form, if any unit's bias gradient is not zero"
    if batch == 1:
        return "one example is recovered up to its length; the layer has no bias"
    if batch <= units:
        return f"the span of the batch is readable, as long as the batch ({batch}) is at most the units ({units})"
    return f"only {units} dimensions of the span of the {batch} examples are readable, one a unit"


def _checked(model: nn.Module, input_shape: tuple[int, ...], batch: int, num_classes: int | None) -> tuple[int, ...]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    shape = tuple(input_shape)
    if not shape or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"input_shape: expected positive sizes without the batch, got {input_shape!r}")
    for name, value in (("batch", batch), ("num_classes", num_classes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
    return shape


def _met(value: bool | None) -> str:
    return "met" if value else "not met"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _number(value: float | None) -> str:
    if value is None:
        return "not computed"
    return "infinite" if math.isinf(value) else f"{value:.3g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
