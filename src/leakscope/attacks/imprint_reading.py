"""What the update of an imprint says: one picture an occupied bin, and whether it is one example.

Nothing here knows the truth. A picture is *plausible* if its measurement lies in the bin it was read from and its
values in their range: a mixture whose examples pull in opposite directions seldom is. Mixtures of examples that pull in
the same direction are weighted means, and look plausible; three witnesses tell them apart, see :func:`read_bins`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, jvp

from leakscope.attacks.imprint import Imprint, Imprinted
from leakscope.contracts.observation import Observation
from leakscope.contracts.task import Classification, outputs_of

#: Root-mean-square distance from the grid of 8-bit values, in its steps, below which a picture lies on it; values that
#: lie anywhere have 0.29.
ON_GRID = 0.1
#: ... where so many different values inside the range say so.
GRID_VALUES = 16
#: A bin's own gradient and that of its picture agree up to this share. By chance they do once in some thousand times.
GRADIENTS_AGREE = 1e-4
#: Rounding in a sum of examples, in units of the precision.
ROUNDING = 8
#: Distance from its bin, in mean widths of a bin, and from the range of values, at which a picture is still plausible.
NEAR_BIN, NEAR_RANGE = 0.02, 0.01
#: Pictures that are passed through the rest of the model together.
CHUNK = 16


@dataclass(frozen=True, eq=False)
class BinReading:
    """The occupied bins, in ascending order: ``places`` among all ``bins``, pictures (flat), what is thought of them.

    ``uncertainty`` is the relative error of a picture's length, ``scores`` the distance from what one example would
    look like: outside its bin or range, or by its gradient, whichever is largest. ``labels`` fit the gradient best.
    """

    bins: int
    places: Tensor
    pictures: Tensor
    strengths: Tensor
    uncertainty: Tensor
    plausible: Tensor
    alone: Tensor
    scores: Tensor
    labels: Tensor | None

    def best_first(self) -> Tensor:
        """Occupied bins by what they are worth: alone, then plausible, then the strongest."""
        share = self.strengths / self.strengths.max().clamp_min(1e-30) if len(self.strengths) else self.strengths
        return (4.0 * self.alone + 2.0 * self.plausible + share).argsort(descending=True, stable=True)

    def expected_error(self) -> float:
        return float(self.uncertainty.max()) if len(self.uncertainty) else torch.inf


def bin_sums(weight: Tensor, bias: Tensor, *, cumulative: bool) -> tuple[Tensor, Tensor]:
    """Sums of g x (rows) and of g over the examples of each bin; ``cumulative`` units see all higher bins too.

    Three examples 2, 3 and 5 with g = 1, 1, -1; two thresholds below 2 and 5: the top bin is its own row.

    >>> sums, gradients = bin_sums(torch.tensor([[0.0], [-5.0]]), torch.tensor([1.0, -1.0]), cumulative=True)
    >>> sums.flatten().tolist(), gradients.tolist()
    ([5.0, -5.0], [2.0, -1.0])
    """
    if not cumulative:
        return weight, bias
    above = torch.cat([weight[1:], torch.zeros_like(weight[:1])])
    return weight - above, bias - torch.cat([bias[1:], torch.zeros_like(bias[:1])])


def read_bins(observation: Observation, model: Imprinted, tolerance: float) -> BinReading:
    """Read every occupied bin off the update.

    Alone are plausible pictures of which one of these holds: there are as many occupied bins as examples, and all are
    plausible; its values lie on the grid of 8-bit pictures; or, where no picture does, its own gradient is its bin's.
    """
    update, block = observation.message.update, model.imprint
    cumulative = not block.sparse
    rows, bias = (update[f"imprint.{block.reader}.{name}"].double() for name in ("weight", "bias"))
    sums, gradients = bin_sums(rows, bias, cumulative=cumulative)
    sizes = torch.linalg.vector_norm(torch.cat([sums, gradients[:, None]], 1), dim=1)
    whole = torch.linalg.vector_norm(torch.cat([rows, bias[:, None]], 1), dim=1).max()
    places = torch.nonzero(sizes > tolerance * whole).flatten()
    sums, gradients = sums[places], gradients[places]
    rounding = _rounding(observation, bias, block)[places] / gradients.abs().clamp_min(1e-300)
    pictures, measured, uncertainty = _scaled(sums, gradients, rounding, block, places)
    outside = _outside(measured, block, places) - 4 * rounding * measured.abs() / _width(block)
    beyond = _beyond(pictures, observation)
    plausible = (outside <= NEAR_BIN) & (beyond <= NEAR_RANGE + uncertainty)
    on_grid = _on_grid(pictures, observation)
    mismatch, labels = _witness(observation, model, pictures, gradients)
    agree = mismatch <= GRADIENTS_AGREE
    every = len(places) == observation.num_examples and bool(plausible.all())
    witnessed = torch.full_like(plausible, every) | (on_grid if bool(on_grid.any()) else agree)
    fits = torch.where(torch.isfinite(mismatch), mismatch, torch.zeros_like(mismatch))
    scores = torch.stack([outside.clamp(min=0), beyond, fits]).amax(0)
    if labels is not None:
        labels = torch.where(agree, labels, torch.full_like(labels, -1))
    return BinReading(
        len(bias), places, pictures.to(observation.dtype), gradients.abs(), uncertainty, plausible,
        plausible & witnessed, scores, labels,
    )  # fmt: skip


def _rounding(observation: Observation, bias: Tensor, block: Imprint) -> Tensor:
    """What rounding may have done to each bin's bias gradient, in absolute terms."""
    precision = torch.finfo(observation.dtype).eps
    if block.sparse:
        return ROUNDING * precision * bias.abs()
    sums = torch.full_like(bias, ROUNDING * precision * float(bias.abs().max()))
    if observation.message.kind == "gradient":
        return sums
    # Weights after the step are rounded, so that their difference has the precision of the weights.
    thresholds = block.measure.bias.detach().double().abs() * precision
    return sums + thresholds + torch.cat([thresholds[1:], thresholds[:1] * 0])


def _scaled(
    sums: Tensor, gradients: Tensor, rounding: Tensor, block: Imprint, places: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures, their measurements by the bias gradient, and the relative error of their length.

    A picture is the quotient of a bin's sums. Where the bias gradient is less certain than the bin itself, the
    measurement is taken to be in the middle of the bin.
    """
    low, high = block.edges.double()[places], block.edges.double()[places + 1]
    middle, half = (low + high) / 2, (high - low) / 2
    along = sums @ block.row.double()
    measured = along / gradients
    by_bin = half / middle.abs().clamp_min(1e-300)
    inner = (places > 0) & (places < len(block.edges) - 2)
    use_bin = inner & (by_bin < rounding) & (along != 0)
    factors = torch.where(use_bin, middle / along, 1 / gradients)
    pictures = sums * factors[:, None]
    return pictures.nan_to_num(0.0, 0.0, 0.0), measured.nan_to_num(torch.inf), torch.where(use_bin, by_bin, rounding)


def _width(block: Imprint) -> float:
    """The mean width of a bin, the two outermost apart."""
    inner = block.edges.double()[1:-1]
    return float(inner[-1] - inner[0]) / (len(inner) - 1) if len(inner) > 1 else 1.0


def _outside(measured: Tensor, block: Imprint, places: Tensor) -> Tensor:
    """How far each measurement lies outside its bin, in mean widths of a bin."""
    low, high = block.edges.double()[places], block.edges.double()[places + 1].clone()
    if not block.sparse:
        high[places == len(block.edges) - 2] = torch.inf  # nothing ends the top bin of a ReLU
    return torch.maximum(low - measured, measured - high).clamp(min=0) / _width(block)


def _beyond(pictures: Tensor, observation: Observation) -> Tensor:
    """How far values lie beyond their range: root-mean-square, in units of the range; 0 where it is not known."""
    if not observation.inputs.bounded or not len(pictures):
        return pictures.new_zeros(len(pictures))
    unit = observation.inputs.to_unit(pictures.reshape(-1, *observation.input_shape)).flatten(1)
    return (unit - unit.clamp(0, 1)).square().mean(1).sqrt()


def _on_grid(pictures: Tensor, observation: Observation) -> Tensor:
    """Whether a picture's values are those of an 8-bit picture, by the values strictly within the range."""
    answers = torch.zeros(len(pictures), dtype=torch.bool)
    if not observation.inputs.bounded or not len(pictures):
        return answers
    levels = 255 * observation.inputs.to_unit(pictures.reshape(-1, *observation.input_shape)).flatten(1)
    nearest = levels.round()
    within = (nearest > 0) & (nearest < 255)
    for place in range(len(pictures)):
        inside = within[place]
        distance = (levels[place] - nearest[place])[inside]
        distinct = len(nearest[place][inside].unique())
        answers[place] = distinct >= GRID_VALUES and float(distance.square().mean().sqrt()) < ON_GRID
    return answers


def _witness(
    observation: Observation, model: Imprinted, pictures: Tensor, gradients: Tensor
) -> tuple[Tensor, Tensor | None]:
    """How far each bin's gradient is from that of its picture, for the label that fits best, and that label.

    The gradient by the number that the block hands on is sum_c (p_c - [c = y]) ds_c with ds the derivative of the
    logits along the block's pattern: one forward derivative serves all labels.
    """
    factor = _factor(observation)
    unknown = torch.full_like(gradients, torch.inf), None
    if factor is None or not len(pictures):
        return unknown
    rest = copy.deepcopy(model).eval()
    pattern = rest.imprint.spread.weight.detach().reshape(1, *observation.input_shape)
    weight = float(rest.imprint.combine.weight.detach()[0, 0])
    batch = pictures.reshape(-1, *observation.input_shape).to(observation.dtype)
    tensors = {**dict(rest.model.named_parameters()), **dict(rest.model.named_buffers())}
    tensors = {name: value.detach() for name, value in tensors.items()}

    def logits(x: Tensor) -> Tensor:
        return outputs_of(functional_call(rest.model, tensors, (x,)))

    predicted = []
    for start in range(0, len(batch), CHUNK):
        with torch.no_grad():
            entering = rest.imprint(batch[start : start + CHUNK])
        try:
            values, slopes = jvp(logits, (entering,), (pattern.expand_as(entering).contiguous(),))[:2]
        except (RuntimeError, NotImplementedError):  # an operation without a forward derivative
            return unknown
        mean = (values.softmax(1) * slopes).sum(1, keepdim=True)
        predicted.append(((mean - slopes) * weight).detach().double())
    differences = (torch.cat(predicted) * factor - gradients[:, None]).abs()
    mismatch, labels = differences.min(1)
    return mismatch / gradients.abs().clamp_min(1e-300), labels


def _factor(observation: Observation) -> float | None:
    """What the loss's gradient of one example counts in the update; None where that is not known or no such number."""
    task, training, examples = observation.task, observation.training, observation.num_examples
    if not isinstance(task, Classification) or observation.num_classes < 2 or observation.batchnorm == "train":
        return None
    if examples is None or len(observation.output_shape) != 1:
        return None
    share = 1 / examples if observation.reduction == "mean" else 1.0
    if observation.message.kind == "gradient":
        return share
    one_step = training.epochs == 1 and training.batch_size is not None and training.batch_size >= examples
    rate = training.learning_rate
    return rate * share if one_step and rate is not None and training.optimizer == "sgd" else None
