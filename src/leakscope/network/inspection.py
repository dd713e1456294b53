"""Find layers that a server planted in a model to carry inputs home, before a client trains it.

Every test asks for something that has no chance of happening by itself in a layer of this size, by initialisation or
training; layers too small to tell are left alone. A row is what one unit multiplies its input with. Only weights are
read. Nothing found is no proof: a server can hide a layer, or choose ordinary weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import UserError

SuspicionKind = Literal["imprint", "rank one", "constant outgoing weights", "mirrored weights", "outsized units"]
#: Units whose outgoing weights are all alike, from which on that is no chance; and to how many units at least.
CONSTANT_COLUMNS, CONSTANT_ROWS = 8, 3
#: Share of a layer's units that have to be mirrored.
MIRRORED = 0.25
CONSEQUENCES: Mapping[SuspicionKind, str] = {
    "imprint": "The update of this layer holds single inputs, readable by subtraction (Robbing the Fed, Fowl et al. "
    "2022).",
    "rank one": "All its units compute the same of their input; no initialisation and no training makes such a layer.",
    "constant outgoing weights": "The update of the layer before holds a polynomial of the inputs, from which they are "
    "solved (malicious initialisation, as in tensor-based reconstruction).",
    "mirrored weights": "Its units are active for few inputs each, whose data is then in the update (trap weights, "
    "Boenisch et al. 2021).",
    "outsized units": "These units rule the update, and what they show is chosen by whoever set them.",
}


@dataclass(frozen=True)
class Suspicion:
    """A suspicious layer, how many of its units are suspicious, and why."""

    layer: str
    kind: SuspicionKind
    units: int
    reason: str

    @property
    def consequence(self) -> str:
        return CONSEQUENCES[self.kind]


@dataclass(frozen=True)
class ModelInspection:
    """What :func:`inspect_model` found in ``layers`` layers."""

    layers: int
    suspicions: tuple[Suspicion, ...]

    @classmethod
    def of(cls, layers: list[WeightLayer]) -> ModelInspection:
        return cls(len(layers), tuple(one for layer in layers for one in _suspicions(layer, layers)))

    @property
    def suspicious(self) -> bool:
        return bool(self.suspicions)

    def as_dict(self) -> dict[str, Any]:
        found = [{**dataclasses.asdict(one), "consequence": one.consequence} for one in self.suspicions]
        return {"suspicious": self.suspicious, "layers": self.layers, "suspicions": found}


@dataclass(frozen=True, eq=False)
class WeightLayer:
    """A matrix of weights (units x inputs) and the shift of each unit, if any; in float64."""

    name: str
    weight: Tensor
    bias: Tensor | None
    shared_inputs: bool = True  # a grouped convolution's units read different inputs


def inspect_model(model: nn.Module) -> ModelInspection:
    """Inspect every layer of a model received from a server; the model is neither run nor changed.

    >>> planted = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> inspect_model(planted).suspicious
    False
    >>> _ = nn.init.constant_(planted[1].weight, 1 / 16)
    >>> _ = planted[1].bias.data.copy_(-torch.linspace(0.1, 0.9, 8))
    >>> inspect_model(planted).suspicions[0].kind
    'imprint'
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"inspect_model: expected a torch.nn.Module, got {type(model).__name__}")
    return ModelInspection.of(list(_layers_of(model)))


def inspect_weights(weights: Mapping[str, Tensor]) -> ModelInspection:
    """Inspect a state dictionary alone, without any code of the model: tensors named ``weight`` and ``bias``.

    >>> inspect_weights({"fc.weight": torch.eye(8), "fc.bias": torch.zeros(8)}).suspicious
    False
    """
    layers = []
    for name, value in weights.items():
        if _is_layer(name, value):
            # One channel a filter is a convolution over one channel, or one that reads each channel by itself.
            by_itself = value.dim() > 2 and value.shape[1] == 1 and value[0].numel() < WIDE
            bias = _bias_beside(name, value, weights)
            layers.append(_layer(name.removesuffix(".weight"), value, bias, not by_itself))
    return ModelInspection.of(layers)


def _suspicions(layer: WeightLayer, layers: list[WeightLayer]) -> Iterator[Suspicion]:
    weight = layer.weight
    yield from _of_common_inputs(layer, layers) if layer.shared_inputs else ()
    mirrored, factor = mirrored_rows(weight)
    if len(mirrored) >= max(LEAST_UNITS, MIRRORED * len(weight)):
        reason = f"the positive weights of {len(mirrored)} units are their negative ones times {factor:.3g}"
        yield Suspicion(layer.name, "mirrored weights", len(mirrored), reason)
    outsized, what = outsized_rows(weight), "are over a hundred times those of the others"
    if not len(outsized) and len(unit := unit_variance_rows(weight)) not in (0, len(weight)):
        outsized, what = unit, "are standard normal numbers, the others far smaller"
    if len(outsized):
        reason = f"the weights of {len(outsized)} of {len(weight)} units {what}"
        yield Suspicion(layer.name, "outsized units", len(outsized), reason)


def _of_common_inputs(layer: WeightLayer, layers: list[WeightLayer]) -> Iterator[Suspicion]:
    weight, columns = layer.weight, constant_columns(layer.weight)
    group = parallel_rows(weight, layer.bias)
    before = _unit_variance_before(layer, columns, layers)
    # Equal rows have nothing but constant columns, and are no sign of this attack by themselves.
    equal = len(columns) == weight.shape[1] and not before
    if len(weight) >= CONSTANT_ROWS and len(columns) >= CONSTANT_COLUMNS and _varies(weight[0, columns]) and not equal:
        reason = f"{len(columns)} of its {weight.shape[1]} inputs go to every unit with one weight, each with its own"
        yield Suspicion(layer.name, "constant outgoing weights", len(columns), f"{reason}{before}")
    elif group is not None and group.ladder:
        yield Suspicion(layer.name, "imprint", len(group.units), _imprint_reason(layer, group, layers))
    elif rank_one(weight) and not (group is not None and group.common_threshold):
        alive = int((weight != 0).any(1).sum())
        yield Suspicion(layer.name, "rank one", alive, f"the rows of all {alive} units are multiples of one row")


def _imprint_reason(layer: WeightLayer, group: ParallelRows, layers: list[WeightLayer]) -> str:
    units = f"{len(group.units)} of {len(layer.weight)} units"
    form = "each is open in an interval of its own" if group.tiling else "each switches on a little later"
    reason = f"{units} measure the same of their input and differ in their threshold only: {form}"
    later = layers[layers.index(layer) + 1 :]
    after = next((one for one in later if one.weight.shape[1] == len(layer.weight)), None)
    if after is not None and equal_columns(after.weight, group.units):
        reason += f"; {after.name} treats them all alike"
    return reason


def _unit_variance_before(layer: WeightLayer, columns: Tensor, layers: list[WeightLayer]) -> str:
    earlier = layers[: layers.index(layer)]
    before = next((one for one in reversed(earlier) if len(one.weight) == layer.weight.shape[1]), None)
    if before is None or not len(columns) or len(unit_variance_rows(before.weight[columns])) < len(columns) / 2:
        return ""
    return f"; the weights of {before.name} that lead to them are standard normal numbers"


def _layers_of(model: nn.Module) -> Iterator[WeightLayer]:
    known: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or type(module).__name__ == "ParametrizationList":
            continue  # a row of a table is no unit; a parametrisation is read through the layer that has it
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        computed = getattr(module, "parametrizations", None)
        for name in computed if isinstance(computed, nn.ModuleDict) else ():
            own[name] = getattr(module, name)
        for name, value in own.items():
            if value is None or id(value) in known or not _is_layer(name, value):
                continue
            known.add(id(value))
            label = path if name == "weight" else f"{path}.{name}".lstrip(".")
            transposed = isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
            matrix = value.transpose(0, 1) if transposed else value
            yield _layer(label, matrix, _bias_beside(name, matrix, own), getattr(module, "groups", 1) == 1)


def _is_layer(name: str, value: Tensor) -> bool:
    """Tell whether a tensor is a layer's: called weight, or too wide for a table (as splines have) of equal rows."""
    if value.dim() < 2 or not value.is_floating_point():
        return False
    return "weight" in name.rpartition(".")[2] or value[0].numel() > WIDE


def _bias_beside(name: str, value: Tensor, own: Mapping[str, Tensor]) -> Tensor | None:
    """Return the shift of each unit: called bias where the matrix is called weight, or the only tensor to fit."""
    head, dot, last = name.rpartition(".")
    bias = own.get(f"{head}{dot}{last.replace('weight', 'bias')}")
    if bias is not None and bias is not value and bias.dim() == 1 and len(bias) == len(value):
        return bias
    fitting = [one for key, one in own.items() if one is not None and key.rpartition(".")[0] == head and one.dim() == 1]
    fitting = [one for one in fitting if len(one) == len(value) and one.is_floating_point()]
    return fitting[0] if len(fitting) == 1 else None


def _layer(name: str, value: Tensor, bias: Tensor | None, shared_inputs: bool = True) -> WeightLayer:
    matrix = value.detach().to(device="cpu", dtype=torch.float64).flatten(1)
    shifts = None if bias is None else bias.detach().to(device="cpu", dtype=torch.float64)
    return WeightLayer(name or "the model itself", matrix.nan_to_num(0.0, 0.0, 0.0), shifts, shared_inputs)


#: Layers with fewer inputs or units are not judged: there, rows agree by chance or by purpose.
LEAST_INPUTS, LEAST_UNITS = 8, 6
#: A group of parallel rows is this share of the layer or so many units: upsampling layers begin with up to 16 alike.
LEAST_SHARE, MANY_UNITS = 0.05, 17
#: Rows are parallel where 1 - |cosine| is below the first, in layers of few inputs (up to WIDE) below the second.
PARALLEL, PARALLEL_NARROW, WIDE = 1e-3, 1e-4, 64
#: ... and a whole layer of rank one where it is below this: what one training step leaves of parallel rows.
RANK_ONE = 1e-8
_NOBODY = torch.zeros(0, dtype=torch.long)
#: Rows and columns that are compared first; what is found is then looked at in full.
SAMPLED_ROWS, SAMPLED_COLUMNS = 1024, 1024
#: Thresholds count as different beyond this share of their range; and as a ladder where their standard deviation is
#: above the second share of their mean: units that learned the same weights learned the same threshold too.
DISTINCT, LADDER = 1e-6, 0.01
#: Relative differences below this are rounding.
EQUAL = 1e-5
#: How much longer than the others, and than usual, a row has to be.
OUTSIZED, UNUSUAL_LENGTH = 100.0, 20.0
#: Standard deviations of the entries of a row that pass for one, and how much smaller those of the other rows are.
UNIT_LOW, UNIT_HIGH, UNIT_BEYOND_OTHERS = 0.8, 1.25, 5.0


@dataclass(frozen=True, eq=False)
class ParallelRows:
    """Units with parallel rows, in ascending order of their thresholds.

    Unit i switches on where the common direction, times the input, passes ``thresholds[i]``, 0 without a bias.
    """

    units: Tensor
    thresholds: Tensor
    lengths: Tensor

    @property
    def ladder(self) -> bool:
        """Tell whether nearly all thresholds differ, by more than training would leave."""
        spread = float(self.thresholds[-1] - self.thresholds[0])
        distinct = 1 + int((self.thresholds.diff() > DISTINCT * spread).sum())
        wide = float(self.thresholds.std()) > LADDER * abs(float(self.thresholds.mean()))
        return spread > 0 and wide and distinct >= 0.8 * len(self.units)

    @property
    def common_threshold(self) -> bool:
        """Tell whether all thresholds are one, not zero: weights and biases then come of the same training steps."""
        first = float(self.thresholds[0])
        return first != 0 and float((self.thresholds - first).abs().max()) <= 0.01 * abs(first)

    @property
    def tiling(self) -> bool:
        """Tell whether the lengths are inverse to the steps between thresholds: each unit has its own interval."""
        steps = (self.thresholds.diff() * self.lengths[:-1])[1:]
        return _varies(self.lengths) and len(steps) > 1 and float(steps.std()) < 0.01 * float(steps.mean())


def parallel_rows(weight: Tensor, bias: Tensor | None) -> ParallelRows | None:
    """Find the largest group of units with parallel rows; None where it is too small to mean anything.

    >>> rows = torch.ones(8, 1) * torch.arange(1.0, 11.0)
    >>> group = parallel_rows(rows, -torch.arange(8.0))
    >>> len(group.units), group.ladder, group.tiling
    (8, True, False)
    >>> parallel_rows(torch.eye(10), None) is None
    True
    """
    lengths = torch.linalg.vector_norm(weight, dim=1)
    alive = torch.nonzero(lengths > 0).flatten()
    if weight.shape[1] < LEAST_INPUTS or len(alive) < LEAST_UNITS:
        return None
    tolerance = PARALLEL if weight.shape[1] > WIDE else PARALLEL_NARROW
    sample = alive[_evenly(len(alive), SAMPLED_ROWS)]
    part = nn.functional.normalize(weight[sample][:, _evenly(weight.shape[1], SAMPLED_COLUMNS)], eps=1e-30)
    near = (part @ part.T).abs() > 1 - 2 * tolerance  # a sample of the columns tells less exactly
    leader = int(sample[int(near.sum(1).argmax())])
    cosines = (weight[alive] @ weight[leader]) / (lengths[alive] * lengths[leader])
    units = alive[cosines.abs() > 1 - tolerance]
    if len(units) < LEAST_UNITS or (len(units) < MANY_UNITS and len(units) < LEAST_SHARE * len(weight)):
        return None
    along = weight[units] @ (weight[leader] / lengths[leader])
    thresholds = -(torch.zeros_like(along) if bias is None else bias[units]) / along
    order = thresholds.argsort()
    return ParallelRows(units[order], thresholds[order], along.abs()[order])


def rank_one(weight: Tensor) -> bool:
    """Tell whether all nonzero rows are multiples of one, of different entries; a constant matrix is not meant.

    >>> rank_one(torch.arange(1.0, 9.0)[:, None] * torch.arange(1.0, 9.0)), rank_one(torch.ones(8, 8))
    (True, False)
    """
    alive = weight[torch.linalg.vector_norm(weight, dim=1) > 0].double()
    if weight.shape[1] < LEAST_INPUTS or len(alive) < LEAST_UNITS:
        return False
    rows = nn.functional.normalize(alive, eps=1e-30)
    constant = float(rows[0].std()) < EQUAL * float(rows[0].abs().mean())
    return not constant and bool(((rows @ rows[0]).abs() > 1 - RANK_ONE).all())


def constant_columns(weight: Tensor) -> Tensor:
    """Return the inputs that have the same weight, not zero, to every unit.

    >>> constant_columns(torch.tensor([[1.0, 2.0, 0.0, 5.0], [1.0, 3.0, 0.0, 5.0], [1.0, 2.0, 0.0, 5.0]])).tolist()
    [0, 3]
    """
    low, high = weight.amin(0), weight.amax(0)
    size = torch.maximum(low.abs(), high.abs())
    return torch.nonzero((high - low <= EQUAL * size) & (size > 0)).flatten()


def equal_columns(weight: Tensor, columns: Tensor) -> bool:
    """Tell whether the columns of these inputs are equal and not zero.

    >>> equal_columns(torch.tensor([[1.0, 1.0, 4.0], [2.0, 2.0, 5.0]]), torch.tensor([0, 1]))
    True
    """
    part = weight[:, columns]
    size = float(part.abs().max()) if part.numel() else 0.0
    return size > 0 and float((part - part[:, :1]).abs().max()) <= EQUAL * size


def unit_variance_rows(weight: Tensor) -> Tensor:
    """Return units whose entries look like standard normal numbers, where other units' are far smaller.

    >>> draws = torch.Generator().manual_seed(0)
    >>> mixed = torch.cat([torch.randn(8, 256, generator=draws), 0.05 * torch.randn(24, 256, generator=draws)])
    >>> unit_variance_rows(mixed).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if weight.shape[1] < WIDE:
        return _NOBODY
    sizes = weight.square().mean(1).sqrt()
    centred = weight.mean(1).abs() < 6 / weight.shape[1] ** 0.5
    # Half of a normal variable's absolute values are below 0.674 of its deviation.
    bell = ((weight.abs().median(1).values / sizes.clamp_min(1e-30)) - 0.674).abs() < 3 / weight.shape[1] ** 0.5
    unit = (sizes > UNIT_LOW) & (sizes < UNIT_HIGH) & centred & bell
    others = sizes[~unit & (sizes > 0)]
    if len(others) and float(others.median()) * UNIT_BEYOND_OTHERS > float(sizes[unit].min() if unit.any() else 0):
        return _NOBODY
    return torch.nonzero(unit).flatten()


def outsized_rows(weight: Tensor) -> Tensor:
    """Return units whose rows are far longer than those of the others, and than rows usually are.

    >>> rows = torch.eye(16)
    >>> rows[3] *= 1e4
    >>> outsized_rows(rows).tolist()
    [3]
    """
    lengths = torch.linalg.vector_norm(weight, dim=1)
    alive = lengths[lengths > 0]
    if len(alive) < LEAST_UNITS:
        return _NOBODY
    # Many units may have died in training and be short, so the median would not do.
    usual = float(alive.quantile(0.75)) if len(alive) > 1 else 0.0
    return torch.nonzero(lengths > max(OUTSIZED * usual, UNUSUAL_LENGTH)).flatten()


def mirrored_rows(weight: Tensor) -> tuple[Tensor, float]:
    """Return units whose positive entries are their negative ones times one factor below 1, in any order; the factor.

    >>> negative = torch.linspace(0.1, 1.0, 10)
    >>> units, factor = mirrored_rows(torch.cat([-negative, 0.9 * negative.flip(0)]).repeat(6, 1))
    >>> len(units), round(factor, 3)
    (6, 0.9)
    """
    if weight.shape[1] < 2 * LEAST_INPUTS:
        return _NOBODY, 1.0
    units, factors = [], []
    balanced = ((weight > 0).sum(1) - (weight < 0).sum(1)).abs() <= 1
    for unit in torch.nonzero(balanced).flatten().tolist():
        row = weight[unit]
        positive, negative = row[row > 0].sort().values, (-row[row < 0]).sort().values
        if len(positive) != len(negative) or len(positive) < LEAST_INPUTS:
            continue
        ratios = positive / negative
        factor = float(ratios.median())
        if factor < 0.9995 and float((ratios - factor).abs().max()) < 1e-3 * factor:
            units.append(unit)
            factors.append(factor)
    return torch.tensor(units, dtype=torch.long), sum(factors) / len(factors) if factors else 1.0


def _evenly(count: int, most: int) -> Tensor:
    return torch.arange(count) if count <= most else torch.linspace(0, count - 1, most).round().long()


def _varies(values: Tensor) -> bool:
    return float(values.std()) > 0.01 * abs(float(values.mean()))
