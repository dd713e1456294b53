"""Robbing the Fed: a server that may change the model reads inputs off it, one a bin.

Liam Fowl, Jonas Geiping, Wojtek Czaja, Micah Goldblum, Tom Goldstein, "Robbing the Fed: Directly Obtaining Private Data
in Federated Learning with Modified Models", ICLR 2022. Before the model comes an imprint block (``imprint.py``): units
that are active for inputs whose measurement h x exceeds thresholds c_0 < c_1 < ... With g_n the output gradient of
example n, which is the same at every unit that it activates,

    dW_i - dW_(i+1) = sum g_n x_n,   db_i - db_(i+1) = sum g_n   over the examples with c_i < h x_n < c_(i+1),

and for the top bin the same without a difference. An example alone in its bin is the quotient of the two, whatever the
batch, the model behind the block and the loss. The sparse form has units of which each is active in its bin only, so
that several local steps add up to the same quotient; its bins drift with each step, less with a smaller ``gain``.

Different from the published code: the top bin is read and no sum over all examples is shown as a picture; the intervals
of the sparse form tile; empty bins are told by a relative tolerance, and by the size of those that must be empty; one
number is handed on, on a pattern that is added to the input, so that the model behind it trains on ("replace" is the
published connection). A bias gradient that is hidden by rounding is replaced by what the bin says of the measurement.

Bins hold one example where as many are occupied as there are examples. Else a picture whose values lie on the grid of
8-bit pictures is no mixture of two (where some do), or one whose own gradient through the rest of the model, for some
label, is the bin's. All others count as mixtures. ``leakscope.limits.imprint_guarantee`` says how many to expect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from leakscope.attacks.robbing_the_fed.imprint import BinReading, Connection, Imprint, Imprinted, is_one_step, read_bins
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.checks import PARAMETERS
from leakscope.contracts.errors import NotApplicable, UserError
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import RECOVERED, Diagnosis, Reconstruction
from leakscope.contracts.settings import setting
from leakscope.models.split import VerticalModel

Measurement = Literal["mean", "dct", "random"]
Placement = Literal["measured", "normal", "laplace"]

#: Quantiles at (j + 1/2) / 9 of the mean brightness of 10,000 training images of CIFAR-10, values in [0, 1].
NATURAL_BRIGHTNESS = (0.2850, 0.3563, 0.4017, 0.4366, 0.4690, 0.5009, 0.5377, 0.5911, 0.6890)
#: Quantiles that :meth:`RobbingTheFed.fitted_to` takes of public examples.
FITTED = 17


@dataclass(frozen=True, kw_only=True)
class RobbingTheFed(Attack):
    """Malicious server: an imprint block before the model, from whose bins inputs are read off exactly."""

    requires = ("num_examples", "choose_structure")
    # For inputs that are normalised, so that the measurement has mean 0 and variance 1.
    presets = MappingProxyType(
        {
            "paper": {"bins": 100, "placement": "normal", "gain": 1e-3, "connection": "replace"},
            "paper-dct": {
                **{"bins": 64, "measurement": "dct", "frequency": 32, "placement": "laplace"},
                **{"gain": 1.0, "connection": "replace"},
            },
        }
    )

    bins: int = setting(128, "Bins of the measurement; more leave more examples alone.", ge=2)
    variant: Literal["relu", "sparse"] = setting(
        "relu", "Units above a threshold, for one step; or each in its interval, for several local steps."
    )
    measurement: Measurement = setting("mean", "What is compared with the thresholds.")
    frequency: int = setting(32, "Frequency of the cosine, for the measurement dct.", ge=1)
    placement: Placement = setting(
        "measured", "Bins of equal mass: by measured quantiles, or for a normal or Laplace distribution."
    )
    quantiles: tuple[float, ...] = setting(
        (),
        "Measured quantiles at (j + 1/2) / m, of public examples as the model reads them; none: the brightness of "
        "natural pictures in [0, 1]. RobbingTheFed.fitted_to(examples) takes them.",
    )
    center: float = setting(0.0, "Mean of the measurement, for placement normal and laplace.")
    spread: float = setting(1.0, "Standard deviation of the measurement, for placement normal and laplace.", gt=0)
    gain: float | None = setting(
        None, "Scale of the block's first layer; none: 0.001, and 1 for the sparse variant.", gt=0
    )
    connection: Connection = setting("add", "Whether the block adds to the input or replaces it.")
    seed: int = setting(0, "Seed of the pattern, and of the measurement random.", ge=0)
    tolerance: float = setting(1e-6, "Size of a bin's sums, relative to the largest, below which it is empty.", gt=0)

    def problems(self) -> list[str]:
        ascending = all(a < b for a, b in zip(self.quantiles, self.quantiles[1:], strict=False))
        if self.quantiles and (len(self.quantiles) < 2 or not ascending):
            return [f"quantiles: expected at least two, each above the one before, got {len(self.quantiles)} others"]
        if self.placement == "measured" and self.measurement != "mean" and not self.quantiles:
            return [
                f"quantiles: expected some for the measurement {self.measurement}, got none; take them of public "
                "examples with RobbingTheFed.fitted_to(examples), or choose placement normal or laplace"
            ]
        return []

    @classmethod
    def fitted_to(cls, examples: Tensor, **settings: Any) -> Self:
        """The attack with quantiles measured on public examples, (count, *shape) as the model reads them."""
        if examples.dim() < 2 or len(examples) < FITTED:
            raise UserError(f"examples: expected at least {FITTED}, (count, *shape), got {tuple(examples.shape)}")
        unfitted = cls(**{**settings, "placement": "normal"})
        measured = examples.flatten(1).double() @ unfitted._row(tuple(examples.shape[1:]))
        shares = (torch.arange(FITTED, dtype=torch.float64) + 0.5) / FITTED
        quantiles = tuple(torch.quantile(measured, shares).tolist())
        return cls(**{**settings, "placement": "measured", "quantiles": quantiles})

    def prepare(self, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        if isinstance(model, VerticalModel):
            raise NotApplicable("an imprint comes before the whole model, and workers of a vertical one share no input")
        if isinstance(model, Imprinted):
            raise NotApplicable("the model has an imprint already")
        PARAMETERS.check("bins: rows of the imprint", 2 * self.bins * math.prod(input_shape), "Choose fewer bins.")
        row = self._row(input_shape)
        draws = torch.Generator().manual_seed(self.seed + 1)
        # A small shift of the input, so that the model behind it keeps its use.
        pattern = 0.1 * (2 * torch.randint(2, row.shape, generator=draws).double() - 1)
        sparse = self.variant == "sparse"
        gain = self.gain if self.gain is not None else 1.0 if sparse else 1e-3
        imprint = Imprint(row, self._edges(), pattern, gain=gain, sparse=sparse, connection=self.connection)
        like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        return Imprinted(imprint.to(like), model).train(model.training)

    def _row(self, input_shape: tuple[int, ...]) -> Tensor:
        return measurement_row(self.measurement, input_shape, self.frequency, torch.Generator().manual_seed(self.seed))

    def _edges(self) -> Tensor:
        shares = [place / self.bins for place in range(1, self.bins)]
        if self.placement == "measured":
            measured = self.quantiles or NATURAL_BRIGHTNESS
            return bin_edges([interpolated_quantile(share, measured) for share in shares])
        standard = normal_quantile if self.placement == "normal" else laplace_quantile
        return bin_edges([self.center + self.spread * standard(share) for share in shares])

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        if not isinstance(observation.model, Imprinted):
            raise NotApplicable(
                "the model has no imprint: its update was made without one. The client must be sent what "
                "RobbingTheFed.prepare(model, input_shape) returns; an audit does so with --knowledge malicious_server"
            )
        layer = f"imprint.{observation.model.imprint.reader}"
        frozen = [name for name in ("weight", "bias") if f"{layer}.{name}" not in observation.message.update]
        if frozen:
            raise NotApplicable(f"the update has no gradient of the imprint's {' and '.join(frozen)}")
        reading = read_bins(observation, observation.model, self.tolerance)
        result = _shown(reading, observation)
        if progress is not None:
            progress(1, 1, float(result.scores.min()))
        info = {"steps": 1, "restarts": 1, "compiled": False, "layer": layer}
        info |= {"occupied_bins": len(reading.places), "alone": int(reading.alone.sum())}
        return replace(result, notes=(*result.notes, *self._misplaced(observation)), info=info)

    def _misplaced(self, observation: Observation) -> tuple[str, ...]:
        values = observation.value_range
        if self.placement != "measured" or self.quantiles or values is None:
            return ()
        if set(values.low) == {0.0} and set(values.high) == {1.0}:
            return ()
        return (
            "the thresholds are those of pictures with values in [0, 1], and these have another range: with quantiles "
            "of their own kind (RobbingTheFed.fitted_to) more of them are alone in their bin",
        )


def measurement_row(kind: Measurement, shape: Sequence[int], frequency: int, generator: torch.Generator) -> Tensor:
    """Return the measurement h: the mean, or one cosine along the flat input or random numbers, of length one.

    >>> measurement_row("mean", (1, 2, 2), 1, torch.Generator()).tolist()
    [0.25, 0.25, 0.25, 0.25]
    >>> [round(v, 3) for v in measurement_row("dct", (4,), 1, torch.Generator()).tolist()]
    [0.653, 0.271, -0.271, -0.653]
    """
    size = math.prod(shape)
    if kind == "mean":
        return torch.full((size,), 1 / size, dtype=torch.float64)
    if kind == "dct":
        row = torch.cos(math.pi / size * (torch.arange(size, dtype=torch.float64) + 0.5) * frequency)
    else:
        row = torch.randn(size, generator=generator, dtype=torch.float64)
    return row / torch.linalg.vector_norm(row)


#: The number that a standard normal variable stays below with this probability.
normal_quantile = NormalDist().inv_cdf


def laplace_quantile(share: float) -> float:
    """Return the number that a Laplace variable of unit variance (scale 1 / sqrt 2) stays below.

    >>> round(laplace_quantile(0.5), 3), round(laplace_quantile(0.75), 3)
    (0.0, 0.49)
    """
    tail = math.log(2 * min(share, 1 - share)) / math.sqrt(2)
    return tail if share <= 0.5 else -tail


def interpolated_quantile(share: float, quantiles: Sequence[float]) -> float:
    """Between measured quantiles at (j + 1/2) / m: linear in normal scores, so that tails go on as a normal's do.

    >>> standard = [normal_quantile((j + 0.5) / 5) for j in range(5)]
    >>> round(interpolated_quantile(0.999, standard), 3), round(normal_quantile(0.999), 3)
    (3.09, 3.09)
    """
    count = len(quantiles)
    scores = [normal_quantile((j + 0.5) / count) for j in range(count)]
    score = normal_quantile(share)
    right = min(max(sum(known < score for known in scores), 1), count - 1)
    slope = (quantiles[right] - quantiles[right - 1]) / (scores[right] - scores[right - 1])
    return quantiles[right - 1] + slope * (score - scores[right - 1])


def bin_edges(inner: Sequence[float]) -> Tensor:
    """Edges of the bins between ``inner`` thresholds: a lowest and a highest one far outside are added.

    >>> bin_edges([0.0, 0.5, 1.0]).tolist()
    [-10.0, 0.0, 0.5, 1.0, 11.0]
    """
    far = 10.0 * (inner[-1] - inner[0]) if len(inner) > 1 else 10.0
    return torch.tensor([inner[0] - far, *inner, inner[-1] + far], dtype=torch.float64)


def _shown(reading: BinReading, observation: Observation) -> Reconstruction:
    """Return one picture an example: the best bins, in ascending order."""
    examples = observation.num_examples
    assert examples is not None
    occupied, alone = len(reading.places), int(reading.alone.sum())
    grey = observation.inputs.from_unit(torch.full((1, *observation.input_shape), 0.5))
    pictures = reading.pictures.reshape(-1, *observation.input_shape)
    share = reading.strengths / reading.strengths.max().clamp_min(1e-30) if occupied else reading.strengths
    best_first = (4.0 * reading.alone + 2.0 * reading.plausible + share).argsort(descending=True, stable=True)
    order = best_first[:examples]
    order = order[reading.places[order].argsort()]
    rows, scores = [*pictures[order]], [*reading.scores[order].tolist()]
    shared = [place for place in order.tolist() if not reading.alone[place]]
    for extra in range(examples - len(rows)):
        # Of several in one bin the mixture is all there is, so it stands for each of them.
        rows.append(pictures[shared[extra % len(shared)]] if shared else grey[0].to(pictures))
        scores.append(torch.inf)
    every = alone == examples == occupied
    labels = reading.labels[order] if every and reading.labels is not None else None
    altered = reading.noisy or occupied > examples or occupied == 0
    flags = [*(["ill-conditioned"] if altered else []), *(["mixture"] if examples > 1 and not every else [])]
    return Reconstruction(
        inputs=observation.inputs.project(torch.stack(rows)),
        labels=labels if labels is None or bool((labels >= 0).all()) else None,
        scores=torch.tensor(scores, dtype=torch.float64),
        flags=tuple(flags) if every or flags else ("ill-conditioned",),
        notes=_notes(reading, examples, observation),
        diagnosis=_diagnosis(reading, examples, every, len(rows) * pictures[0].numel() if occupied else 0),
    )


def _notes(reading: BinReading, examples: int, observation: Observation) -> tuple[str, ...]:
    occupied, alone = len(reading.places), int(reading.alone.sum())
    several = observation.message.kind == "weight_delta" and not is_one_step(observation)
    lines = [f"{occupied} of {reading.bins} bins are occupied by {examples} examples; {alone} hold one for certain"]
    if occupied == 0:
        why = "no bin stands out from noise" if reading.noisy else "the imprint's update is zero in every bin"
        lines = [f"{why}: nothing can be read; grey pictures stand for the examples"]
    if several and observation.training.optimizer not in (None, "sgd"):
        lines.append("only steps along the gradient add up to inputs, and the client's optimiser takes others")
    elif several and reading.cumulative:
        lines.append("several local steps blur the bins of the relu variant; the variant sparse is made for them")
    elif reading.noisy or occupied > examples:
        lines.append(
            "the update was altered on its way, for bins that must be empty are not; against noise a smaller gain "
            "helps, which makes the imprint's part of the update larger"
        )
    return tuple(lines)


def _diagnosis(reading: BinReading, examples: int, every: bool, unknowns: int) -> Diagnosis | None:
    alone, error = int(reading.alone.sum()), reading.expected_error()
    if every and error <= RECOVERED:
        reason = (
            f"each of {examples} examples is alone in its bin, and its sums are its own: expected error {error:.1g}"
        )
        return Diagnosis(outcome="recovered", reason=reason, unknowns=unknowns, expected_rmse=error)
    if reading.noisy or len(reading.places) > examples or not len(reading.places):
        return None
    reason = (
        f"{alone} of {examples} examples are alone in their bin; of the others the imprint holds one weighted mean a "
        "bin, and the rest of the update was not used"
    )
    return Diagnosis(outcome="undecided", reason=reason, unknowns=unknowns)
