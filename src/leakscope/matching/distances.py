"""Measure how far a candidate's update is from the observed one.

Each distance is a frozen dataclass called as ``distance(observed, candidate)`` with two mappings of the same names;
``against(observed)`` works out once what the observed update alone decides. All are finite, with finite derivatives,
for a zero update too.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError

Update = Mapping[str, Tensor]
Weights = Literal["equal", "layers"]

#: Added under square roots, far below any float32 update's square: keeps derivatives at a zero update finite.
TINY = 1e-24


class Distance(Protocol):
    """Override ``against``, or ``__call__`` where nothing can be worked out before the candidate is known."""

    #: Whether only the direction of the updates counts, not their length.
    scale_free: bool = False
    #: Whether only sums over all entries count, so that an update may come as one tensor.
    joins: bool = False

    def __call__(self, observed: Update, candidate: Update) -> Tensor:
        return self.against(observed)(candidate)

    def against(self, observed: Update) -> Callable[[Update], Tensor]:
        return lambda candidate: self(observed, candidate)


def _total(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()


def _norm(update: Update) -> Tensor:
    return torch.sqrt(_total((value * value).sum() for value in update.values()) + TINY)


def _size(update: Update) -> Tensor:
    return _total(value.abs().sum() for value in update.values())


def layer_weights(names: Iterable[str]) -> list[float]:
    """One weight a tensor (``names`` are in the model's order): exp(-layer), 1 for all tensors of the first layer.

    >>> [round(w, 3) for w in layer_weights(["a.weight", "a.bias", "b.weight"])]
    [1.0, 1.0, 0.368]
    """
    owners = [name.rpartition(".")[0] for name in names]
    layers = list(dict.fromkeys(owners))
    return [math.exp(-layers.index(owner)) for owner in owners]


@dataclass(frozen=True, kw_only=True)
class SquaredL2(Distance):
    """Sum of squared differences over all entries (DLG), times ``scale``; "layers" count by :func:`layer_weights`.

    >>> float(SquaredL2()({"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}))
    25.0
    """

    weights: Weights = "equal"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.weights not in get_args(Weights):
            raise UserError(f"weights: expected one of {', '.join(get_args(Weights))}, got {self.weights!r}")

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return self.weights == "equal"

    def __call__(self, observed: Update, candidate: Update) -> Tensor:
        shares = layer_weights(observed) if self.weights == "layers" else [1.0] * len(observed)
        return self.scale * _total(
            w * ((candidate[name] - value) ** 2).sum()
            for w, (name, value) in zip(shares, observed.items(), strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class RelativeSquaredL2(Distance):
    """Sum of squared differences over the observed update's own squared length: same minimum, a scale of one.

    >>> float(RelativeSquaredL2()({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}))
    1.0
    """

    joins = True

    def against(self, observed: Update) -> Callable[[Update], Tensor]:
        square = _norm(observed) ** 2
        return lambda candidate: SquaredL2()(observed, candidate) / square


@dataclass(frozen=True, kw_only=True)
class L1(Distance):
    """Sum of absolute differences, relative to the observed update's own.

    >>> float(L1()({"w": torch.tensor([1.0, -1.0])}, {"w": torch.tensor([0.0, -1.0])}))
    0.5
    """

    joins = True

    def against(self, observed: Update) -> Callable[[Update], Tensor]:
        size = _size(observed) + TINY
        return lambda candidate: (
            _total((candidate[name] - value).abs().sum() for name, value in observed.items()) / size
        )


@dataclass(frozen=True, kw_only=True)
class Cosine(Distance):
    """One minus the cosine of the angle between the updates (Inverting Gradients), or its mean over tensors.

    >>> float(Cosine()({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 7.0])}))
    1.0
    """

    scale_free = True

    per: Literal["model", "tensor"] = "model"

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return self.per == "model"

    def __post_init__(self) -> None:
        if self.per not in ("model", "tensor"):
            raise UserError(f"per: expected 'model' or 'tensor', got {self.per!r}")

    def against(self, observed: Update) -> Callable[[Update], Tensor]:
        if self.per == "tensor":
            each = {name: Cosine().against({name: value}) for name, value in observed.items()}
            return lambda candidate: _total(angle({n: candidate[n]}) for n, angle in each.items()) / len(each)
        norm = _norm(observed)

        def angle(candidate: Update) -> Tensor:
            dot = _total((candidate[name] * value).sum() for name, value in observed.items())
            return 1 - dot / (norm * _norm(candidate))

        return angle


@dataclass(frozen=True, kw_only=True)
class DirectionL1(Distance):
    """L1 distance between the updates after scaling each to unit length, relative to the observed one.

    Blind to scale as the cosine is, but not quadratic near the solution: small entries keep pulling to the end.

    >>> update = {"w": torch.tensor([3.0, -4.0])}
    >>> round(float(DirectionL1()(update, {"w": torch.tensor([30.0, -40.0])})), 6)
    0.0
    """

    scale_free = True
    joins = True

    def against(self, observed: Update) -> Callable[[Update], Tensor]:
        norm = _norm(observed)
        size = _size(observed) / norm + TINY

        def apart(candidate: Update) -> Tensor:
            own = _norm(candidate)
            # The observed update stretched, rather than the candidate shrunk: that has the cheaper derivative.
            stretch = own / norm
            return (
                _total((candidate[name] - stretch * value).abs().sum() for name, value in observed.items()) / own / size
            )

        return apart


@dataclass(frozen=True, kw_only=True)
class Reweighted(Distance):
    """Sum over tensors of w_i times their ``distance``, w_i growing with the number of parameters that are not zero.

    ``counts`` are those numbers in the update's order; without them every entry counts. w_i is their ``power``,
    normalised: 1 is that of Liu et al., 0.5 leaves more to small tensors near the input.

    >>> update = {"w": torch.ones(3), "b": torch.ones(1)}
    >>> float(Reweighted()(update, {"w": torch.ones(3), "b": -torch.ones(1)}))
    0.5
    """

    distance: Distance = Cosine()
    counts: tuple[int, ...] | None = None
    power: float = 1.0

    @property
    def scale_free(self) -> bool:  # type: ignore[override]
        return self.distance.scale_free

    def __post_init__(self) -> None:
        if self.counts is not None and (any(count < 0 for count in self.counts) or not sum(self.counts)):
            raise UserError(f"counts: expected numbers of parameters, not all zero, got {self.counts}")
        if not self.power > 0:
            raise UserError(f"power: expected a positive number, got {self.power}")

    def against(self, observed: Update) -> Callable[[Update], Tensor]:
        counts = [value.numel() for value in observed.values()] if self.counts is None else self.counts
        if len(counts) != len(observed):
            raise UserError(f"counts: expected one for each of {len(observed)} tensors, got {len(counts)}")
        total = sum(count**self.power for count in counts)
        each = [
            (count**self.power / total, name, self.distance.against({name: observed[name]}))
            for count, name in zip(counts, observed, strict=True)
            if count
        ]
        return lambda candidate: _total(share * apart({name: candidate[name]}) for share, name, apart in each)


@dataclass(frozen=True, kw_only=True)
class GaussianKernel(Distance):
    """Sum over tensors of Q_l (1 - exp(-d_l / s_l)), d_l the mean squared difference (SAPAG), Q_l = 1 / (l + 1).

    s_l = Var(g_l) alone would underflow: it is never below ``guard`` times the current d_l, nor below 1e-12.

    >>> far = GaussianKernel()({"w": torch.tensor([0.0, 1e-3])}, {"w": torch.tensor([1e3, 1e3])})
    >>> round(float(far), 4)
    0.6321
    """

    guard: float = 1.0
    decreasing: bool = True

    def __post_init__(self) -> None:
        if self.guard < 0:
            raise UserError(f"guard: expected a number >= 0, got {self.guard}")

    def __call__(self, observed: Update, candidate: Update) -> Tensor:
        terms = []
        for depth, (name, value) in enumerate(observed.items()):
            square = ((candidate[name] - value) ** 2).mean()
            width = torch.maximum(value.var(unbiased=False).clamp_min(1e-12), self.guard * square.detach())
            quality = 1 / (depth + 1) if self.decreasing else 1.0
            terms.append(quality * (1 - torch.exp(-square / width)))
        return _total(terms)


DISTANCES: Mapping[str, Distance] = MappingProxyType(
    {
        "squared-l2": SquaredL2(),
        "relative-squared-l2": RelativeSquaredL2(),
        "l1": L1(),
        "cosine": Cosine(),
        "cosine-per-tensor": Cosine(per="tensor"),
        "reweighted-cosine": Reweighted(),
        "direction-l1": DirectionL1(),
        "reweighted-direction-l1": Reweighted(distance=DirectionL1(), power=0.5),
        "gaussian-kernel": GaussianKernel(),
    }
)


def as_distance(value: str | Distance) -> Distance:
    if not isinstance(value, str):
        return value
    if value not in DISTANCES:
        raise UserError(f"unknown distance {value!r}: expected one of {', '.join(DISTANCES)}")
    return DISTANCES[value]
