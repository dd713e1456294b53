"""Build the imprint block of Robbing the Fed, and read its update.

Row i of the first layer is the measurement h, its bias the negative threshold -c_i: unit i is active for inputs with
h x > c_i (ReLU), or with c_i < h x < c_(i+1) (the sparse form, a Hardtanh). Thresholds that cut the data into bins of
equal mass leave many inputs alone in their bin. What comes after treats all units alike, so that an input gives every
unit it activates the same output gradient.

An image is *plausible* if its measurement lies in the bin it was read from and its values in their range: a mixture
whose examples pull in opposite directions seldom is. Mixtures that pull in the same direction are weighted means, and
look plausible; three tests tell them apart (:func:`read_bins`).
"""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.utils import skip_init

from leakscope.contracts.observation import Observation
from leakscope.contracts.task import Classification, outputs_of
from leakscope.matching.determinacy import ACCURATE
from leakscope.matching.search import AT_ONCE

Connection = Literal["add", "replace"]


class Imprint(nn.Module):
    """Measure, compare with thresholds, hand one number on.

    ``edges`` are those of the bins; the highest is of use to the sparse form only. With ``connection`` "add" the output
    is the input plus a pattern times that number, with "replace" the pattern alone. ``reader`` names the layer whose
    update is read. In the sparse form the measurement is frozen and a layer of zeros beside it is trained: weights
    after a step are rounded, and beside large thresholds a small step would be lost.
    """

    row: Tensor
    edges: Tensor

    def __init__(
        self, row: Tensor, edges: Tensor, pattern: Tensor, *, gain: float, sparse: bool, connection: Connection
    ) -> None:
        super().__init__()
        bins, size = len(edges) - 1, len(row)
        self.sparse, self.connection, self.gain = sparse, connection, gain
        self.register_buffer("row", row.clone(), persistent=False)
        self.register_buffer("edges", edges.clone(), persistent=False)
        # Every weight is set below; drawing them first would move the global random state.
        self.measure = skip_init(nn.Linear, size, bins)
        self.beside = skip_init(nn.Linear, size, bins) if sparse else None
        self.activation: nn.Module = nn.Hardtanh(0.0, gain) if sparse else nn.ReLU()
        self.combine = skip_init(nn.Linear, bins, 1)
        self.spread = skip_init(nn.Linear, 1, size, bias=False)
        scales = gain / edges.diff() if sparse else torch.full((bins,), gain, dtype=torch.float64)
        with torch.no_grad():
            self.measure.weight.copy_(scales[:, None] * row)
            self.measure.bias.copy_(-scales * edges[:-1])
            if self.beside is not None:
                self.measure.requires_grad_(False)
                for parameter in self.beside.parameters():
                    parameter.zero_()
            self.combine.weight.fill_(1 / (bins * gain))
            self.spread.weight.copy_(pattern[:, None])
            # An input whose measurement is in the middle passes unchanged.
            middle = scales * (edges[bins // 2] - edges[:-1])
            active = middle.clamp(0, gain) if sparse else middle.clamp(min=0)
            self.combine.bias.fill_(-float(active.sum()) / (bins * gain))

    @property
    def reader(self) -> str:
        return "measure" if self.beside is None else "beside"

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        measured = self.measure(flat) if self.beside is None else self.measure(flat) + self.beside(flat)
        number = self.combine(self.activation(measured))
        shift = self.spread(number).reshape(x.shape)
        return x + shift if self.connection == "add" else shift


class Imprinted(nn.Module):
    def __init__(self, imprint: Imprint, model: nn.Module) -> None:
        super().__init__()
        self.imprint = imprint
        self.model = model

    def forward(self, x: Tensor) -> object:
        return self.model(self.imprint(x))


#: RMS distance from the 8-bit grid, in its steps, of a picture with so many values on it; 0.29 for any values.
ON_GRID, GRID_VALUES = 0.1, 16
#: Rounding in a sum of examples, in units of the precision.
ROUNDING = 8
#: A picture is plausible this near to its bin (in widths) and to the value range; contrast below this share is none.
NEAR = 0.01


@dataclass(frozen=True, eq=False)
class BinReading:
    """Hold the occupied bins, in ascending order: ``places`` among all ``bins``, pictures (flat) and verdicts.

    ``strengths`` are the sizes of their sums, ``errors`` what rounding and noise leave open, in units of the range.
    ``scores`` are distances from a single example: by bin, range or gradient, whichever is largest. ``labels`` are
    those whose gradient is the bin's, or -1. ``noisy``: bins that must be empty are not. ``cumulative``: a unit sees
    all higher bins too.
    """

    bins: int
    places: Tensor
    pictures: Tensor
    strengths: Tensor
    errors: Tensor
    plausible: Tensor
    alone: Tensor
    scores: Tensor
    labels: Tensor | None
    noisy: bool
    cumulative: bool

    def expected_error(self) -> float:
        return float(self.errors.max()) if len(self.errors) else math.inf


def bin_sums(weight: Tensor, bias: Tensor, *, cumulative: bool) -> tuple[Tensor, Tensor]:
    """Return sums of g x (rows) and of g over the examples of each bin; ``cumulative`` units see all higher bins too.

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

    A plausible picture is alone if there are as many occupied bins as examples, all plausible, and no local step can
    have moved another one into its bin; if its values lie on the grid of 8-bit pictures; or, where no picture's do, if
    its own gradient is its bin's.
    """
    update, block = observation.message.update, model.imprint
    edges = block.edges.double()
    rows, bias = (update[f"imprint.{block.reader}.{name}"].double() for name in ("weight", "bias"))
    sums, gradients = bin_sums(rows, bias, cumulative=not block.sparse)
    both = torch.cat([sums, gradients[:, None]], 1)
    sizes = torch.linalg.vector_norm(both, dim=1)
    noise = empty_size(sizes, observation.num_examples)
    whole = torch.linalg.vector_norm(torch.cat([rows, bias[:, None]], 1), dim=1).max()
    # The length of a row of noise varies little: by one part in the square root of twice its entries.
    limit = max(float(tolerance * whole), noise * (1 + 6 / math.sqrt(2 * both.shape[1])))
    places = torch.nonzero(sizes > limit).flatten()
    sums, gradients, per_entry = sums[places], gradients[places], noise / math.sqrt(both.shape[1])
    altered = (_rounding(observation, bias, block)[places] + 3 * per_entry) / gradients.abs().clamp_min(1e-300)
    pictures, factors, measured, uncertainty = _scaled(sums, gradients, altered, block, places)
    # From a step of one in the model's units to units of the range.
    ends = [observation.inputs.to_unit(torch.full((1, *observation.input_shape), value)) for value in (0.0, 1.0)]
    blur = per_entry * factors.abs() * float((ends[1] - ends[0]).mean())
    low, high, inner = edges[places], edges[places + 1].clone(), edges[1:-1]
    width = float(inner[-1] - inner[0]) / (len(inner) - 1) if len(inner) > 1 else 1.0
    if not block.sparse:
        high[places == len(edges) - 2] = torch.inf  # nothing ends the top bin of a ReLU
    outside = torch.maximum(low - measured, measured - high).clamp(min=0) / width - 4 * altered * measured.abs() / width
    beyond = _beyond(pictures, observation)
    plausible = (outside <= NEAR) & (beyond <= NEAR + uncertainty + 3 * blur)
    on_grid = _on_grid(pictures, observation)
    mismatch, labels = _witness(observation, model, pictures, gradients)
    agree = mismatch <= ACCURATE  # by chance they do once in some thousand times
    # Steps that keep the sign of a gradient only make white pictures, which the top bin would not contradict.
    varied = pictures.amax(1) - pictures.amin(1) > NEAR * pictures.abs().amax(1)
    counted = varied & _undisturbed(observation, block, places, pictures, sums, gradients)
    if len(places) != observation.num_examples or not bool(plausible.all()):
        counted = torch.zeros_like(plausible)
    witnessed = counted | (on_grid if bool(on_grid.any()) else agree)
    fits = torch.where(torch.isfinite(mismatch), mismatch, torch.zeros_like(mismatch))
    if labels is not None:
        labels = torch.where(agree, labels, torch.full_like(labels, -1))
    return BinReading(
        bins=len(bias),
        places=places,
        pictures=pictures.to(observation.dtype),
        strengths=sizes[places],
        errors=torch.hypot(uncertainty, blur),
        plausible=plausible,
        alone=plausible & witnessed,
        scores=torch.stack([outside.clamp(min=0), beyond, fits]).amax(0),
        labels=labels,
        noisy=noise > tolerance * float(whole),
        cumulative=not block.sparse,
    )


def empty_size(sizes: Tensor, examples: int | None) -> float:
    """Return the size of an empty bin's sums: what rounding or added noise leave. 0 where none need be empty.

    Of k bins k - n at least are empty, and nothing is smaller; so the middle one of the k - n smallest is such a bin.

    >>> empty_size(torch.tensor([5.0, 0.1, 0.2, 0.1, 7.0, 0.1, 0.1, 0.2]), 2)
    0.10000000149011612
    """
    spare = 0 if examples is None else len(sizes) - examples
    return float(sizes.sort().values[spare // 2]) if spare > 0 else 0.0


def _rounding(observation: Observation, bias: Tensor, block: Imprint) -> Tensor:
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pictures, factors, measurements and relative errors; the bin's middle where it is surer than the bias."""
    low, high = block.edges.double()[places], block.edges.double()[places + 1]
    middle, half = (low + high) / 2, (high - low) / 2
    along = sums @ block.row.double()
    measured = along / gradients
    by_bin = half / middle.abs().clamp_min(1e-300)
    inner = (places > 0) & (places < len(block.edges) - 2)
    use_bin = inner & (by_bin < rounding) & (along != 0)
    factors = torch.where(use_bin, middle / along, 1 / gradients)
    pictures = (sums * factors[:, None]).nan_to_num(0.0, 0.0, 0.0)
    return pictures, factors, measured.nan_to_num(torch.inf), torch.where(use_bin, by_bin, rounding)


def _beyond(pictures: Tensor, observation: Observation) -> Tensor:
    """Return how far values lie beyond their range: root-mean-square, in units of the range; 0 where it is unknown."""
    inputs, batch = observation.inputs, pictures.reshape(-1, *observation.input_shape)
    return (inputs.to_unit(batch) - inputs.to_unit(inputs.project(batch))).flatten(1).square().mean(1).sqrt()


def _on_grid(pictures: Tensor, observation: Observation) -> Tensor:
    answers = torch.zeros(len(pictures), dtype=torch.bool, device=pictures.device)
    if not observation.inputs.bounded:
        return answers
    for place, picture in enumerate(pictures):
        levels = 255 * observation.inputs.to_unit(picture.reshape(1, *observation.input_shape)).flatten()
        levels = levels[(levels.round() > 0) & (levels.round() < 255)]
        distance = float((levels - levels.round()).square().mean().sqrt())
        answers[place] = len(levels.round().unique()) >= GRID_VALUES and distance < ON_GRID
    return answers


def _witness(
    observation: Observation, model: Imprinted, pictures: Tensor, gradients: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return how far each bin's gradient is from its picture's, for the label that fits best, and that label.

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
    for part in batch.split(AT_ONCE):
        with torch.no_grad():
            entering = rest.imprint(part)
        try:
            values, slopes = jvp(logits, (entering,), (pattern.expand_as(entering).contiguous(),))[:2]
        except (RuntimeError, NotImplementedError):  # an operation without a forward derivative
            return unknown
        mean = (values.softmax(1) * slopes).sum(1, keepdim=True)
        predicted.append(((mean - slopes) * weight).detach().double())
    differences = (torch.cat(predicted) * factor - gradients[:, None]).abs()
    mismatch, labels = differences.min(1)
    return mismatch / gradients.abs().clamp_min(1e-300), labels


def _undisturbed(
    observation: Observation, block: Imprint, places: Tensor, pictures: Tensor, sums: Tensor, gradients: Tensor
) -> Tensor:
    """Find bins that no other picture can have been in, before, while or after local steps moved them.

    Several steps move the thresholds of the sparse form by what the update says, and shift what higher bins add to
    lower ones in the other. Only steps along the gradient add up to a sum of inputs.
    """
    if observation.message.kind == "gradient" or is_one_step(observation):
        return torch.ones_like(places, dtype=torch.bool)
    if not block.sparse or observation.training.optimizer != "sgd":
        return torch.zeros_like(places, dtype=torch.bool)
    weight, bias = block.measure.weight.detach().double()[places], block.measure.bias.detach().double()[places]
    gain = block.gain
    before = pictures @ weight.T + bias
    after = before - (pictures @ sums.T + gradients)
    outside = ((before <= 0) & (after <= 0)) | ((before >= gain) & (after >= gain))
    return (outside | torch.eye(len(places), dtype=torch.bool, device=places.device)).all(0)


def is_one_step(observation: Observation) -> bool:
    training, examples = observation.training, observation.num_examples or 0
    whole = training.batch_size is not None and training.batch_size >= examples
    return training.epochs == 1 and whole and training.optimizer == "sgd"


def _factor(observation: Observation) -> float | None:
    task, training, examples = observation.task, observation.training, observation.num_examples
    if not isinstance(task, Classification) or observation.num_classes < 2 or observation.batchnorm == "train":
        return None
    if examples is None or len(observation.output_shape) != 1:
        return None
    share = 1 / examples if observation.reduction == "mean" else 1.0
    if observation.message.kind == "gradient":
        return share
    rate = training.learning_rate
    return rate * share if is_one_step(observation) and rate is not None else None
