"""Tell the rows behind a gradient of a dense layer apart by independent component analysis; float64.

The weight gradient of a dense layer is G = D'X, one row of X an example: each row of G is a mixture of the same n rows.
Kariyappa et al., "Cocktail Party Attack", ICML 2023, centre and whiten G, then search the rotation that makes its rows
independent and natural. Two ways to search it are here.

*By fixed points* (the default): symmetric FastICA with the log-cosh contrast (Hyvarinen 1999). Pictures are unmixed by
their differences between neighbouring pixels, which are sparse and nearly uncorrelated between pictures, as whitening
assumes, whereas the pixels of any two pictures correlate (0.17 on average on CIFAR-10 against 0.03, and up to 0.8). All
differences at a pixel count as one group, for edges fall on the same pixels in every channel.

*By descent* (``iterations``): the paper's objective, by Adam over an n x n matrix with rows of unit length,
-negentropy + independence * mean(exp(T |cos|) - 1) + tv * TV + nonnegativity * min(|S+|, |S-|) + sparsity * |S|.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable, UserError

Domain = Literal["auto", "differences", "values"]
#: E[log cosh] of a standard normal number.
GAUSSIAN_LOG_COSH = 0.3745672075
#: The least ratio of two neighbouring singular values that is taken for the end of the signal.
LEAST_GAP = 10.0
#: Singular values below this share of the largest are the rounding of a float32 gradient: a few of its last digits.
ROUNDING = 8 * torch.finfo(torch.float32).eps
#: A fixed point has come to rest where it moves by less than this, as one minus a cosine: half of float64's digits.
AT_REST = torch.finfo(torch.float64).eps ** 0.5
#: Loops end by a test of their own, long before so many steps where there is something to find.
MOST_STEPS = 200


@dataclass(frozen=True, eq=False)
class Unmixed:
    """Hold ``sources`` (count, d), each up to sign and scale, and ``unmixing`` (count, m) with sources = unmixing @ G.

    ``residual``: the share of the gradient's norm that ``count`` rows cannot explain. ``negentropy`` (count,): how far
    each source is from normal, in the domain in which it was told apart. ``curve``: the paper's objective by step.
    """

    sources: Tensor
    unmixing: Tensor
    residual: float
    negentropy: Tensor
    settled: bool
    curve: tuple[float, ...] = ()

    def scaled(self, bias_gradient: Tensor) -> Tensor:
        """Return the sources with sign and scale: what makes a row of X of G = D'X makes 1 of the bias gradient D'1.

        >>> mixed = Unmixed(torch.tensor([[-2.0, -4.0]]), torch.tensor([[-2.0]]), 0.0, torch.ones(1), True)
        >>> mixed.scaled(torch.tensor([1.0])).tolist()
        [[1.0, 2.0]]
        """
        coefficients = self.unmixing @ bias_gradient.detach().to(self.unmixing)
        tiny = torch.finfo(coefficients.dtype).tiny
        return self.sources / torch.where(coefficients.abs() < tiny, tiny, coefficients)[:, None]


def count_sources(gradient: Tensor) -> int:
    """Count the rows mixed in a gradient (m, d) by where its singular values fall off; NotApplicable where nowhere.

    >>> draws = torch.Generator().manual_seed(0)
    >>> count_sources(torch.randn((9, 3), generator=draws) @ torch.randn((3, 50), generator=draws))
    3
    """
    values = _singular_values(gradient)
    if not len(values):
        raise NotApplicable("the gradient is zero, so nothing is mixed in it")
    # The Gram matrix squares them: below this they are its rounding, and say nothing of a gap.
    levels = values.clamp_min(1e-7 * float(values[0]))
    gaps = levels[:-1] / levels[1:]
    widest = int(gaps.argmax()) if len(gaps) else 0
    if not len(gaps) or float(gaps[widest]) < LEAST_GAP:
        raise NotApplicable(
            "the singular values of the gradient fall off nowhere: as many rows as it has room for, or noise; "
            "say how many examples there are"
        )
    return widest + 1


def independent_rows(gradient: Tensor) -> int:
    """How many rows a gradient (m, d) holds at most: its rank but for the rounding of float32.

    >>> independent_rows(torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [0.0, 0.0, 1.0]]))
    2
    """
    values = _singular_values(gradient)
    return int((values > ROUNDING * values.amax()).sum()) if len(values) else 0


def unmix(
    gradient: Tensor,
    count: int,
    generator: torch.Generator,
    *,
    picture: tuple[int, ...] | None = None,
    domain: Domain = "auto",
    start: Literal["fixed-point", "identity"] = "fixed-point",
    iterations: int = 0,
    lr: float = 1e-3,
    negentropy: float = 1.0,
    independence: float = 1.0,
    temperature: float = 12.0,
    tv: float = 0.0,
    nonnegativity: float = 0.0,
    sparsity: float = 0.0,
) -> Unmixed:
    """Return the ``count`` rows of X in ``gradient`` = D'X (m, d), up to sign and scale.

    ``picture``: the shape of one row, channels first; ``domain`` "auto" then unmixes by differences, else by values.
    ``iterations``: steps of the paper's objective from ``start``; ``tv`` counts for pictures only.

    >>> draws = torch.Generator().manual_seed(0)
    >>> voices = torch.randn((2, 4000), generator=draws) ** 3
    >>> unmixed = unmix(torch.randn((5, 2), generator=draws) @ voices, 2, draws)
    >>> cosines = torch.nn.functional.cosine_similarity(unmixed.sources[:, None], voices[None].double(), dim=2).abs()
    >>> bool((cosines.amax(1) > 0.999).all())
    True
    """
    gradient = gradient.detach().double().cpu()
    if gradient.dim() != 2:
        raise UserError(f"gradient: expected (units, inputs), got shape {tuple(gradient.shape)}")
    if picture is not None and math.prod(picture) != gradient.shape[1]:
        raise UserError(f"picture: expected a shape of {gradient.shape[1]} numbers, got {picture}")
    if count < 1:
        raise UserError(f"count: expected at least 1, got {count}")
    if count > min(gradient.shape):
        raise NotApplicable(
            f"{count} rows cannot be told apart in a gradient of {gradient.shape[0]} units and {gradient.shape[1]} "
            "inputs: there are fewer mixtures than rows"
        )
    if not bool(torch.isfinite(gradient).all()):
        raise UserError("gradient: expected finite numbers, got NaN or infinity")
    basis, to_basis, residual = row_space(gradient, count)
    by_differences = picture is not None and _has_axes(picture) and domain != "values"
    whitening, white = whiten(difference_groups(basis, picture) if by_differences and picture else basis[None])
    rotation, settled = torch.eye(count, dtype=torch.float64), True
    if start == "fixed-point":
        rotation, settled = fast_ica(white, generator)
    curve: tuple[float, ...] = ()
    # Linear maps of the rows, worked out once: a step costs n^2 d.
    parts, rows = white.permute(1, 0, 2).flatten(1), whitening @ basis
    differences = torch.zeros((count, 1), dtype=torch.float64)
    if tv and picture is not None and _has_axes(picture):
        pictures = rows.reshape(count, *picture)
        differences = torch.cat([pictures.diff(dim=axis).flatten(1) for axis in range(2, pictures.dim())], dim=1)
    others = ~torch.eye(count, dtype=torch.bool)

    def objective(rotation: Tensor) -> Tensor:
        total = -negentropy * _negentropy(rotation @ parts).mean()
        if independence and count > 1:
            cosines = (rotation @ rotation.T)[others]
            total = total + independence * torch.expm1(temperature * cosines.abs()).mean()
        if tv:
            total = total + tv * (rotation @ differences).abs().mean()
        if nonnegativity or sparsity:
            sources = rotation @ rows
            sides = torch.minimum(sources.clamp_min(0).norm(dim=1), sources.clamp_max(0).norm(dim=1))
            total = total + nonnegativity * sides.mean() + sparsity * sources.abs().mean()
        return total

    if iterations:
        rotation, curve = _descend(objective, rotation, iterations, lr)
    unmixing = rotation @ whitening @ to_basis
    flat = (rotation @ parts).reshape(count, -1)
    return Unmixed(unmixing @ gradient, unmixing, residual, _negentropy(flat), settled, curve)


def row_space(gradient: Tensor, count: int) -> tuple[Tensor, Tensor, float]:
    """Return an orthonormal basis (count, d) of the strongest rows, and ``to_basis`` with basis = to_basis @ gradient.

    The third is the share of the gradient's norm outside of it. Directions come from the smaller Gram matrix, which is
    ten times faster than a decomposition of the gradient, and are then refined on the gradient itself.

    >>> basis, to_basis, residual = row_space(torch.tensor([[3.0, 4.0], [6.0, 8.0]]).double(), 1)
    >>> basis.abs().round(decimals=6).tolist(), round(residual, 6)
    ([[0.6, 0.8]], 0.0)
    """
    live = gradient[gradient.abs().amax(1) > 0]  # the decomposition may fail on rows of zeros, such as dead units leave
    if len(live) < count:
        raise NotApplicable(f"the gradient holds fewer than {count} different rows: {len(live)} are not zero")
    directions = torch.linalg.eigh(_smaller_gram(live)).eigenvectors[:, -count:]
    rows = directions.T @ live if live.shape[0] <= live.shape[1] else directions.T
    span = torch.linalg.qr(rows.T).Q
    left, sizes, turn = torch.linalg.svd(gradient @ span, full_matrices=False)
    if float(sizes[-1]) <= 1e-12 * float(sizes[0]):
        raise NotApplicable(f"the gradient holds fewer than {count} different rows: its rank is smaller")
    basis = turn @ span.T
    outside = gradient - (left * sizes) @ basis
    return basis, (left / sizes).T, float(outside.norm() / gradient.norm())


def whiten(parts: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (n, n) that makes centred rows uncorrelated and of unit variance, and those rows; parts: (groups, n, d).

    >>> whitening, white = whiten(torch.tensor([[[1.0, -1.0, 2.0, -2.0], [3.0, 3.0, -3.0, -3.0]]]).double())
    >>> (white[0] @ white[0].T / 4).round(decimals=6).abs().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    centred = parts - parts.mean(2, keepdim=True)
    covariance = torch.einsum("gnd,gmd->nm", centred, centred) / (parts.shape[0] * parts.shape[2])
    variances, directions = torch.linalg.eigh(covariance)
    # Rows that the filter all but wipes out (a constant picture has no differences) keep a finite scale.
    variances = variances.clamp_min(1e-12 * float(variances[-1]))
    whitening = (directions / variances.sqrt()).T
    return whitening, torch.einsum("nm,gmd->gnd", whitening, centred)


def fast_ica(white: Tensor, generator: torch.Generator) -> tuple[Tensor, bool]:
    """Return the rotation (n, n) to independent rows of ``white`` (groups, n, d), and whether it came to rest.

    Symmetric fixed points of the contrast E log cosh(r), r the length of what a group has at one place.
    """
    groups, count, length = white.shape
    rotation = _orthogonal(torch.randn((count, count), generator=generator, dtype=torch.float64))
    for _ in range(MOST_STEPS):
        sources = torch.einsum("nm,gmd->gnd", rotation, white)
        radius = sources.square().sum(0).sqrt().clamp_min(1e-12)
        slope = torch.tanh(radius)
        pull = slope / radius
        # The mean of the derivative of each group member's pull, which keeps fixed points of either sign stable.
        bend = (groups - 1) * pull + 1 - slope.square()
        moved = torch.einsum("gnd,gmd->nm", sources * pull, white) / (groups * length)
        following = _orthogonal(moved - (bend.mean(1) / groups)[:, None] * rotation)
        change = float((1 - (following * rotation).sum(1).abs()).max())
        rotation = following
        if change < AT_REST:
            return rotation, True
    return rotation, False


def difference_groups(rows: Tensor, picture: tuple[int, ...]) -> Tensor:
    """Return differences to the next neighbour along each axis, and along all of them together: (groups, n, places).

    >>> difference_groups(torch.tensor([[0.0, 1.0, 2.0, 5.0]]), (1, 2, 2)).flatten().tolist()
    [2.0, 1.0, 2.0]
    """
    pictures = rows.reshape(len(rows), *picture)
    axes = [axis for axis in range(2, pictures.dim()) if pictures.shape[axis] > 1]
    steps = [(axis,) for axis in axes] + ([tuple(axes)] if len(axes) > 1 else [])
    parts = []
    for along in steps:
        stepped = pictures
        for axis in axes:
            stepped = stepped.diff(dim=axis) if axis in along else stepped.narrow(axis, 0, stepped.shape[axis] - 1)
        parts.append(stepped.flatten(2))
    return torch.cat(parts, dim=1).transpose(0, 1)


def _descend(
    objective: Callable[[Tensor], Tensor], rotation: Tensor, iterations: int, lr: float
) -> tuple[Tensor, tuple[float, ...]]:
    with torch.enable_grad():
        point = rotation.clone().requires_grad_()
        optimiser = torch.optim.Adam([point], lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, iterations)
        curve = []
        for _ in range(iterations):
            value = objective(torch.nn.functional.normalize(point, dim=1))
            (point.grad,) = torch.autograd.grad(value, point)
            curve.append(float(value.detach()))
            optimiser.step()
            schedule.step()
    return torch.nn.functional.normalize(point.detach(), dim=1), tuple(curve)


def _negentropy(sources: Tensor) -> Tensor:
    """How far rows of unit variance are from normal: (E log cosh - its value for a normal number) squared."""
    size = sources.abs()
    log_cosh = size + torch.log1p(torch.exp(-2 * size)) - math.log(2)
    return (log_cosh.mean(1) - GAUSSIAN_LOG_COSH).square()


def _has_axes(picture: tuple[int, ...]) -> bool:
    return any(size > 1 for size in picture[1:])


def _singular_values(gradient: Tensor) -> Tensor:
    gradient = gradient.detach().double().cpu()
    live = gradient[gradient.abs().amax(1) > 0]
    if not len(live):
        return gradient.new_zeros(0)
    values: Tensor = torch.linalg.eigvalsh(_smaller_gram(live)).flip(0).clamp_min(0).sqrt()
    return values


def _smaller_gram(gradient: Tensor) -> Tensor:
    return gradient @ gradient.T if gradient.shape[0] <= gradient.shape[1] else gradient.T @ gradient


def _orthogonal(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix)
    nearest: Tensor = left @ right
    return nearest
