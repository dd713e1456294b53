"""What theory says of a model, an input shape and a batch size, before any attack is run."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import is_whole, refuse
from leakscope.contracts.errors import NotApplicable, UserError
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.tables import cell, html_facts, latex_table
from leakscope.contracts.task import label_count
from leakscope.equations.decomposition import Decomposition, JacobianRank
from leakscope.limits.bounds import Order, order_bounds
from leakscope.limits.counting import Proposition, linear_first, one_hidden_layer, propositions
from leakscope.limits.cramer_rao import PROBES, STEPS, Floor, Method, affordable_floor, cramer_rao
from leakscope.limits.effort import MAX_OPERATIONS, effort_of
from leakscope.limits.jacobian import decompose_at, gradient_map_at
from leakscope.limits.reach import LayerReach, layer_reaches, lowest_layer
from leakscope.limits.security import LayerSystem, layer_systems, security_metric
from leakscope.matching.gradient_map import GradientMap
from leakscope.network.layers import Structure, structure


@dataclass(frozen=True)
class Limits:
    """Facts and conditions; :attr:`conclusion` is the one sentence, ``leakscope.report.limits_tables`` prints them.

    ``identifiable``: a batch is locally determined by its gradient and labels; None where counts alone do not exclude
    it. ``closed_form``: the first linear layer gives one example exactly. ``span_readable``: its gradient gives the
    span of the batch. ``layers``: the linear system of each layer, for one example; ``floor``: the least error behind
    ``channel``; ``orders``: published orders of it. ``point`` names the inputs at which rank and floor were taken.
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
    point: str
    layers: tuple[LayerSystem, ...]
    layers_reason: str | None
    channel: Channel | None
    floor: Floor | None
    floor_reason: str | None
    orders: tuple[Order, ...]
    orders_reason: str | None
    reach: tuple[LayerReach, ...] = ()

    @property
    def lowest(self) -> tuple[str, str] | None:
        """Return the layer whose gradient determines the batch, and the lowest one whose input then follows."""
        return lowest_layer(self.reach, self.batch)

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
            directions = f"{lost} of {self.unknowns} directions"
            return f"Not identifiable: in {directions} the inputs can change without a trace in the gradient."
        counted = "Not excluded: there are enough observed entries, which is necessary but not sufficient."
        if self.lowest is None:
            return counted
        whose = "the input" if self.batch == 1 else f"all {self.batch} inputs"
        if self.lowest[1] != self.first_layer:
            whose = f"what {self.lowest[1]!r} reads" + (f", for all {self.batch} inputs" if self.batch > 1 else "")
        return f"{counted} By the counts of each layer, the gradient determines {whose}."

    @property
    def security(self) -> float | None:
        """Return c(M) of the layers; None where the model is no chain of layers that can be solved one by one."""
        return security_metric(self.layers) if self.layers else None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it; an infinite number becomes None."""
        facts = dataclasses.asdict(self)
        facts["jacobian"]["full"] = self.jacobian.full
        for layer, entry in zip(self.layers, facts["layers"], strict=True):
            entry["deficiency"] = layer.deficiency
        if self.floor is not None:
            facts["floor"]["psnr"] = self.floor.psnr
            # JSON has no infinity: what is null for that reason is told from what was not computed.
            facts["floor"]["infinite"] = math.isinf(self.floor.rmse)
        facts |= {name: getattr(self, name) for name in ("security", "identifiable", "conclusion")}
        return {name: plain_values(value) for name, value in facts.items()}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def to_latex(self) -> str:
        return latex_table([{"fact": name, "value": cell(value)} for name, value in self._shown().items()])

    def _repr_html_(self) -> str:
        return html_facts("Limits", self._shown(), [self.conclusion])

    def _shown(self) -> dict[str, Any]:
        floor = None if self.floor is None else f"{self.floor.psnr:.1f} dB (RMSE {self.floor.rmse:.3g})"
        return {
            "inputs": f"{self.batch} of shape {' x '.join(map(str, self.input_shape))}",
            "first layer": f"{self.first_layer} ({self.first_layer_kind} {self.first_layer_size})",
            "observed entries": self.gradient_entries,
            "unknowns": self.unknowns,
            "rank of the Jacobian": self.jacobian.rank,
            "best PSNR of an unbiased attack": floor,
            "security c(M)": self.security,
        }


def limits(
    model: nn.Module,
    input_shape: tuple[int, ...],
    batch: int,
    num_classes: int | None = None,
    *,
    value_range: ValueRange | None = None,
    seed: int = 0,
    inputs: Tensor | None = None,
    labels: Tensor | None = None,
    channel: Channel | None = None,
    exact: bool = False,
    probes: int = PROBES,
    progress: Callable[[str, int, int], None] | None = None,
) -> Limits:
    """Compute what a gradient of ``model`` on ``batch`` examples can tell at most; ``model`` itself is not touched.

    ``input_shape`` is without the batch. ``value_range`` is the box of the inputs, [0, 1] without it. Rank and floor
    are taken at ``inputs`` with ``labels``, or at a random batch in the box with the labels 0, 1, 2, ... The floor is
    for what ``channel`` lets through, and not computed without one. Above a thousand unknowns the rank is only
    computed, and the floor only exact, with ``exact``; otherwise the floor is estimated with ``probes``. A batch is
    determined only up to the order of its examples, and priors may fill in what the gradient does not show.

    >>> facts = limits(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), (1, 2, 2), batch=1)
    >>> facts.gradient_entries, facts.unknowns, facts.closed_form, facts.jacobian.rank
    (15, 4, True, 4)
    """
    shape = _checked(model, input_shape, batch, num_classes)
    if not exact and not effort_of(model, shape).whole:
        raise UserError(
            f"limits: one pass of one example takes more than {MAX_OPERATIONS:.0e} operations, too much for theory to "
            "be quick; take smaller inputs or a smaller model, or ask for it all the same (--exact)"
        )
    net = structure(model, shape)
    if len(net.output_shape) != 1:
        raise UserError(f"model: expected one row of logits for each example, got outputs {net.output_shape}")
    if num_classes is not None and num_classes != net.outputs:
        raise UserError(
            f"num_classes: the model has {net.outputs} outputs, got {num_classes}. Pass that number or leave it out."
        )
    refuse("limits", example_problems(inputs, labels, (batch, *shape), net.outputs))
    unknowns = batch * math.prod(shape)
    with_labels = unknowns + batch * net.outputs
    linear = linear_first(net)
    mapping, flat = gradient_map_at(
        model, shape, batch, net.outputs, value_range=value_range, seed=seed, inputs=inputs, labels=labels
    )
    jacobian_progress, floor_progress = (progress and partial(progress, name) for name in ("Jacobian", "floor"))
    spectrum = decompose_at(mapping, flat, exact=exact, vectors=channel is not None, progress=jacobian_progress)
    floor: Floor | str = "not computed: it needs the noise of a defence (--noise; also --clip, --prune, --dropout)"
    if channel is not None:
        floor = _floor(mapping, flat, channel, spectrum, exact, probes=probes, seed=seed, progress=floor_progress)
    layers: tuple[LayerSystem, ...] | str
    try:
        layers = layer_systems(model, shape, value_range=value_range, seed=seed)
    except NotApplicable as error:
        layers = str(error)
    orders = _orders(net, math.prod(shape), batch, channel, floor)
    return Limits(
        input_shape=shape,
        batch=batch,
        num_classes=net.outputs,
        first_layer=net.first.name or "model",
        first_layer_kind=net.first.kind,
        first_layer_size=net.first.size,
        gradient_entries=net.entries,
        unknowns=unknowns,
        unknowns_with_labels=with_labels,
        count_met=net.entries >= unknowns,
        count_met_with_labels=net.entries >= with_labels,
        closed_form=not isinstance(linear, str) and batch == 1 and net.first.has_bias,
        span_readable=not isinstance(linear, str) and batch <= linear.out_features,
        first_linear=_first_linear_sentence(linear, batch, net.first.has_bias),
        propositions=propositions(net, shape, batch),
        jacobian=JacobianRank(unknowns, reason=spectrum) if isinstance(spectrum, str) else spectrum.summary(),
        seed=seed,
        point="a random batch in the box" if inputs is None else "the batch that was given",
        layers=() if isinstance(layers, str) else layers,
        layers_reason=layers if isinstance(layers, str) else None,
        channel=channel,
        floor=None if isinstance(floor, str) else floor,
        floor_reason=floor if isinstance(floor, str) else None,
        orders=() if isinstance(orders, str) else orders,
        orders_reason=orders if isinstance(orders, str) else None,
        reach=layer_reaches(model, shape),
    )


def _floor(
    mapping: GradientMap, flat: Tensor, channel: Channel, spectrum: Decomposition | str, exact: bool, **options: Any
) -> Floor | str:
    if channel.beyond_theory is not None:
        return channel.beyond_theory
    plan: tuple[Method, int] | str = ("auto", STEPS) if exact else affordable_floor(mapping, probes=options["probes"])
    if isinstance(plan, str):
        return plan
    method, steps = plan
    at_hand = None if isinstance(spectrum, str) else spectrum
    try:
        return cramer_rao(mapping, flat, channel, method=method, steps=steps, decomposition=at_hand, **options)
    except RuntimeError as error:
        return f"the model cannot be differentiated twice: {str(error).strip().splitlines()[0]}"


def _orders(
    net: Structure, features: int, batch: int, channel: Channel | None, floor: Floor | str
) -> tuple[Order, ...] | str:
    first = one_hidden_layer(net)
    if isinstance(first, str):
        return f"only for one hidden dense layer; here {first}"
    facts: dict[str, float | None] = {}
    if channel is not None:
        # The noise of the channel is all the noise that there is. A defence that is not in it is left open.
        noise = None
        if channel.noise_law == "gaussian" and not isinstance(channel.noise, Mapping):
            noise = channel.noise or None
        facts = {"sigma": noise, "noise": noise, "clip": channel.clip, "dropout": channel.dropout or None}
        if not isinstance(floor, str):
            facts["gradient_norm"] = floor.gradient_norm
            if channel.prune and not channel.dropout and floor.surviving > 0:
                facts["pruned"] = max(0.0, 1 - floor.surviving)  # by rounding a little below
    return order_bounds(batch=batch, features=features, width=first.out_features, **facts)


def _first_linear_sentence(linear: nn.Linear | str, batch: int, bias: bool) -> str:
    if isinstance(linear, str):
        return f"no closed form: {linear}"
    if batch == 1 and bias:
        return "one example is recovered exactly in closed form, if any unit's bias gradient is not zero"
    if batch == 1:
        return "one example is recovered up to its norm; the layer has no bias"
    units = linear.out_features
    if batch <= units:
        return f"the span of the batch is readable, as long as the batch ({batch}) is at most the units ({units})"
    return f"only {units} dimensions of the span of the {batch} examples are readable, one a unit"


def _checked(model: nn.Module, input_shape: tuple[int, ...], batch: int, num_classes: int | None) -> tuple[int, ...]:
    if not isinstance(model, nn.Module):
        raise UserError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    shape = tuple(input_shape)
    if not shape or not all(map(is_whole, shape)):
        raise UserError(f"input_shape: expected positive sizes without the batch, got {input_shape!r}")
    for name, value in (("batch", batch), ("num_classes", num_classes)):
        if value is not None and not is_whole(value):
            raise UserError(f"{name}: expected an integer of at least 1, got {value!r}")
    return shape


def example_problems(inputs: Tensor | None, labels: Tensor | None, shape: tuple[int, ...], outputs: int) -> list[str]:
    """List what is wrong with examples that were given: inputs of this shape, with labels for a model's outputs."""
    problems = []
    if (inputs is None) != (labels is None):
        problems.append("inputs and labels: expected both or neither")
    if inputs is not None and tuple(inputs.shape) != shape:
        problems.append(f"inputs: expected shape {shape}, got {tuple(inputs.shape)}")
    if labels is not None:
        classes = label_count(outputs)
        if tuple(labels.shape) != shape[:1] or labels.is_floating_point():
            problems.append(f"labels: expected {shape[0]} class numbers, got {tuple(labels.shape)} of {labels.dtype}")
        elif not bool(((labels >= 0) & (labels < classes)).all()):
            problems.append(f"labels: expected classes below the model's {classes}, got up to {int(labels.max())}")
    return problems


def plain_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
