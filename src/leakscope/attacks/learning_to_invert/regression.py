"""Regress inputs from updates, for ``learning-to-invert``: hashed features, ridge regression, a small network.

An update becomes a row of features: each tensor divided by its root mean square, hashed within itself where the update
is too long (a random sign and a random bucket for each entry; Weinberger et al., "Feature Hashing for Large Scale
Multitask Learning", ICML 2009). Ridge regression is in its dual form, K the kernel of the training rows:

    f(u) = mean + k(u, U) (K + penalty I)^-1 (X - mean)

with the plain products of updates as they are (exact where inputs are linear in the update), or with
exp(-|u - v|^2 / width) of scaled ones. A small network then corrects the ridge regression's answers. It is trained on
leave-one-out answers, which look like those to a new update: x_i - a_i / ((K + penalty I)^-1)_ii with a the
coefficients. Everything is chosen by the error on held-out rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

#: Penalties that are tried, in parts of the kernel's mean diagonal.
PENALTIES = tuple(10.0**power for power in range(-12, 3))
#: Widths of the Gaussian kernel that are tried, in parts of the median squared distance.
WIDTHS = (0.25, 1.0, 4.0)
#: Rows on which penalty and width are chosen; all rows serve the last fits.
PATH_ROWS = 1000
#: Epochs without a lower held-out error after which the network is done.
PATIENCE = 6


def hashed(values: Tensor, buckets: Tensor, signs: Tensor, count: int) -> Tensor:
    """Entries added up in ``count`` buckets with random signs; products of rows stay what they are in the mean.

    >>> hashed(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0]), torch.tensor([1.0, 1.0, -1.0]), 2).tolist()
    [-3.0, 2.0]
    """
    return values.new_zeros(count).index_add_(0, buckets, values * signs)


@dataclass(frozen=True, eq=False)
class Featuriser:
    """An update as one row of at most ``count`` scaled numbers, and the scale of each of its tensors."""

    #: For each tensor its buckets and signs; None where it goes in as it is.
    hashes: Mapping[str, tuple[Tensor, Tensor] | None]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, update: Mapping[str, Tensor], count: int, generator: torch.Generator) -> Featuriser:
        sizes = [value.numel() for value in update.values()]
        total = sum(sizes)
        shares = sizes if total <= count else [max(1, count * size // total) for size in sizes]
        hashes: dict[str, tuple[Tensor, Tensor] | None] = {}
        for (name, value), size, share in zip(update.items(), sizes, shares, strict=True):
            if share == size:
                hashes[name] = None
                continue
            buckets = torch.randint(share, (size,), generator=generator)
            signs = 2.0 * torch.randint(2, (size,), generator=generator) - 1
            hashes[name] = buckets.to(value.device), signs.to(value)
        return cls(hashes, tuple(shares))

    def __call__(self, update: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        parts, scales = [], []
        for (name, rule), count in zip(self.hashes.items(), self.counts, strict=True):
            flat = update[name].flatten()
            scale = flat.square().mean().sqrt()
            flat = flat / scale if float(scale) > 0 else flat
            parts.append(flat if rule is None else hashed(flat, *rule, count))
            scales.append(scale)
        return torch.cat(parts), torch.stack(scales)

    def unscaled(self, features: Tensor, scales: Tensor) -> Tensor:
        counts = torch.tensor(self.counts, device=scales.device)
        return features * scales.repeat_interleave(counts, dim=1)


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean of the targets, whatever the update: what somebody who learned nothing answers."""

    mean: Tensor
    name: str = "mean"

    def __call__(self, rows: Tensor) -> Tensor:
        return self.mean.expand(len(rows), -1)


@dataclass(frozen=True, eq=False)
class KernelRidge:
    """Ridge regression in its dual form; without a ``width`` it is linear."""

    rows: Tensor
    centre: Tensor
    coefficients: Tensor
    mean: Tensor
    penalty: float
    width: float | None

    @property
    def name(self) -> str:
        return "linear ridge" if self.width is None else "Gaussian kernel ridge"

    def __call__(self, rows: Tensor) -> Tensor:
        # A small penalty makes large coefficients, whose products single precision would lose.
        products = kernel(rows - self.centre, self.rows, self.width).double() @ self.coefficients
        return products.to(self.mean) + self.mean

    def leave_one_out(self, targets: Tensor) -> Tensor:
        """The answer to each of its own rows, had it been fitted without that row (the mean stays)."""
        penalised = with_penalty(kernel(self.rows, self.rows, self.width), self.penalty)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(penalised))
        return targets - (self.coefficients / inverse.diagonal()[:, None]).to(targets)


@dataclass(frozen=True, eq=False)
class Corrected:
    base: KernelRidge
    layers: nn.Sequential

    @property
    def name(self) -> str:
        return f"{self.base.name} with a network"

    def __call__(self, rows: Tensor) -> Tensor:
        answers = self.base(rows)
        with torch.no_grad():
            correction: Tensor = self.layers(answers)
        return answers + correction


Regressor = Mean | KernelRidge | Corrected


@dataclass(frozen=True, eq=False)
class Pairs:
    rows: Tensor
    targets: Tensor
    held_rows: Tensor = field(repr=False)
    held_targets: Tensor = field(repr=False)

    def error(self, regressor: Regressor) -> float:
        return float((regressor(self.held_rows) - self.held_targets).double().square().mean())


def kernel(a: Tensor, b: Tensor, width: float | None) -> Tensor:
    """Products of rows, or exp(-distance^2 / width).

    >>> kernel(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0], [1.0, 2.0]]), None).tolist()
    [[5.0, 5.0]]
    >>> kernel(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]]), 2.0).tolist()
    [[1.0]]
    """
    return a @ b.T if width is None else torch.exp(-squared_distances(a, b) / width)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    return (a.square().sum(1)[:, None] + b.square().sum(1)[None] - 2 * a @ b.T).clamp_min(0)


def ridge_coefficients(matrix: Tensor, targets: Tensor, penalty: float) -> Tensor | None:
    """(K + penalty * mean(diag K) I)^-1 targets in double precision; None where rounding leaves K indefinite.

    >>> ridge_coefficients(torch.tensor([[2.0, 0.0], [0.0, 6.0]]), torch.tensor([[4.0], [8.0]]), 0.5).round().tolist()
    [[1.0], [1.0]]
    """
    factor, failure = torch.linalg.cholesky_ex(with_penalty(matrix, penalty))
    return None if int(failure) else torch.cholesky_solve(targets.double(), factor)


def with_penalty(matrix: Tensor, penalty: float) -> Tensor:
    wide = matrix.double()
    return wide + penalty * wide.diagonal().mean() * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)


def choose_ridge(pairs: Pairs, widths: Sequence[float | None]) -> tuple[KernelRidge, float] | None:
    """Fit ridge regressions to the first rows, by ``widths`` of the median distance; return the best and its error.

    >>> x = torch.linspace(0, 1, 8, dtype=torch.float64)[:, None]
    >>> ridge, error = choose_ridge(Pairs(x[::2], 3 * x[::2], x[1::2], 3 * x[1::2]), [None])
    >>> ridge.name, error < 1e-15
    ('linear ridge', True)
    """
    few = replace(pairs, rows=pairs.rows[:PATH_ROWS], targets=pairs.targets[:PATH_ROWS])
    distances = squared_distances(few.rows, few.rows)
    apart = distances[~torch.eye(len(distances), dtype=torch.bool, device=distances.device)]
    unit, least = float(apart.median()) if len(apart) else 1.0, torch.finfo(distances.dtype).tiny
    absolute = [None if width is None else max(width * unit, least) for width in widths]
    tried = [fit for width in absolute for fit in _path(few, width, PENALTIES)]
    return min(tried, key=lambda fit: fit[1], default=None)


def refit_ridge(ridge: KernelRidge, error: float, pairs: Pairs) -> tuple[KernelRidge, float]:
    """The same with all rows, where more are there and it helps; they may do with a smaller penalty."""
    if len(pairs.rows) == len(ridge.rows):
        return ridge, error
    whole = _path(pairs, ridge.width, (ridge.penalty, ridge.penalty / 10))
    return min([(ridge, error), *whole], key=lambda fit: fit[1])


def _path(pairs: Pairs, width: float | None, penalties: Sequence[float]) -> Iterator[tuple[KernelRidge, float]]:
    centre, mean = pairs.rows.mean(0), pairs.targets.mean(0)
    rows = pairs.rows - centre
    matrix = kernel(rows, rows, width)
    if not float(matrix.diagonal().mean()) > 0:
        return  # all rows are equal: there is nothing to learn from
    across = kernel(pairs.held_rows - centre, rows, width).double()
    for penalty in penalties:
        coefficients = ridge_coefficients(matrix, pairs.targets - mean, penalty)
        if coefficients is None:
            continue
        error = float((across @ coefficients + mean - pairs.held_targets).square().mean())
        yield KernelRidge(rows, centre, coefficients, mean, penalty, width), error


def fit_network(
    ridge: KernelRidge,
    pairs: Pairs,
    generator: torch.Generator,
    *,
    hidden: int,
    epochs: int,
    lr: float,
    tell: Callable[[float], None] = lambda error: None,
) -> tuple[Regressor, float]:
    """Fit a network that corrects a ridge regression, at its least held-out error; the ridge if it never helps."""
    count = len(ridge.rows)
    rows, targets = ridge.leave_one_out(pairs.targets[:count]), pairs.targets[:count]
    held = ridge(pairs.held_rows)
    layers = _layers((rows.shape[1], hidden, hidden, targets.shape[1]), rows, generator)
    rule = torch.optim.Adam(layers.parameters(), lr=lr)
    best, weights, since = pairs.error(ridge), None, 0
    for _ in range(epochs):
        for batch in torch.randperm(count, generator=generator).split(64):
            rule.zero_grad()
            nn.functional.mse_loss(rows[batch] + layers(rows[batch]), targets[batch]).backward()
            rule.step()
        with torch.no_grad():
            error = float((held + layers(held) - pairs.held_targets).double().square().mean())
        tell(error)
        since += 1
        if error < best:
            best, since = error, 0
            weights = {name: value.clone() for name, value in layers.state_dict().items()}
        if since >= PATIENCE or not math.isfinite(error):
            break
    if weights is None:
        return ridge, best
    layers.load_state_dict(weights)
    return Corrected(ridge, layers), best


def _layers(sizes: tuple[int, ...], like: Tensor, generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for ins, outs in pairwise(sizes):
        layer = nn.utils.skip_init(nn.Linear, ins, outs, device=like.device, dtype=like.dtype)
        with torch.no_grad():
            layer.weight.copy_(math.sqrt(2 / ins) * torch.randn(outs, ins, generator=generator))
            layer.bias.zero_()
        layers += [layer, nn.ReLU()]
    with torch.no_grad():
        layer.weight.zero_()  # it begins with no correction
    return nn.Sequential(*layers[:-1])
