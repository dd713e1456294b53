"""Find the span of a dense layer's inputs, and inputs that fit the gradient of the head behind it as well; float64.

For a layer z = W x + b with signals D (examples x units) the gradient is G = D'X, so its rows lie in the span of the
inputs, exactly and whatever follows the layer. Where entries of G were set to zero, those that are left still have rank
n: :func:`completed_span` fits a matrix of that rank to them.

With features Z (n, d), output gradients R (n, classes) and slopes D = s'(ZW' + b), both gradients are visible products:

    dA = R' s(ZW' + b)          dW = ((R A) * D)' Z

Where entries were set to zero or noise was added, the layer's own gradient leaves features partly open, but every entry
of the head's gradient weighs all of a feature. :func:`refine_features` starts from features that are roughly right: R
follows by least squares, then a Gauss-Newton step on Z by conjugate gradients with the slopes held, and both in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leakscope.equations.conjugate_gradients import conjugate_gradients
from leakscope.equations.dense import slope

#: Weights of entries that were set to zero, and passes with them: small numbers first, then unknown ones.
SOFT_ZEROS = ((0.1, 20), (0.01, 30), (1e-3, 50), (1e-5, 150))
#: Fits tell right from wrong where they have so many equations for each unknown.
EQUATIONS_PER_UNKNOWN = 4
#: Rows that are read; each column of a completion needs only a few equations.
MOST_ROWS = 1536


def leading_span(gradient: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ``count`` orthonormal rows that carry most of the gradient's, and some of its leading singular values.

    >>> draws = torch.Generator().manual_seed(0)
    >>> inputs = torch.randn((2, 6), generator=draws).double()
    >>> span, sizes = leading_span(torch.randn((9, 2), generator=draws).double() @ inputs, 2, draws)
    >>> bool((inputs - inputs @ span.T @ span).norm() < 1e-12), bool(sizes[2] < 1e-12 * sizes[0])
    (True, True)
    """
    width = min(count + 8, *gradient.shape)
    start = torch.randn((gradient.shape[1], width), generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(start)[0]
    for _ in range(12):  # block power iteration
        left, sizes, _ = torch.linalg.svd(gradient @ basis, full_matrices=False)
        rounding = max(gradient.shape) * torch.finfo(torch.float64).eps * sizes[0]
        carried = max(int((sizes > rounding).sum()), min(count, width))
        basis = torch.linalg.qr(gradient.T @ left[:, :carried])[0]
        if carried < width:
            break  # there is no more in it, and what the next pass would find is rounding
    _, sizes, rotation = torch.linalg.svd(gradient @ basis, full_matrices=False)
    return (rotation @ basis.T)[:count], torch.nn.functional.pad(sizes, (0, width - len(sizes)))


def rank_of(sizes: Tensor, tolerance: float = 1e-6) -> int:
    """How many singular values stand out, by the widest gap between neighbours; at least one.

    >>> rank_of(torch.tensor([5.0, 4.0, 3.0, 1e-3, 9e-4]))
    3
    """
    floor = float(sizes[0]) * tolerance
    kept = sizes[sizes > floor]
    if len(kept) < len(sizes):
        return max(len(kept), 1)
    return int((kept[:-1] / kept[1:]).argmax()) + 1 if len(kept) > 1 else 1


def visible_zeros(gradient: Tensor) -> tuple[Tensor, float]:
    """Return the entries that are not zero, and the share that is, among rows and columns that are not all zero.

    >>> visible_zeros(torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]]))[1]
    0.25
    """
    mask = gradient != 0
    live = mask[mask.any(1)][:, mask.any(0)]
    return mask, float(1 - live.double().mean()) if live.numel() else 1.0


def completed_span(gradient: Tensor, mask: Tensor, span: Tensor, generator: torch.Generator) -> Tensor:
    """Return the span of the matrix of rank len(span) that agrees with the gradient where ``mask`` is true.

    Alternating least squares from ``span``, with the other entries as small numbers of falling weight.

    >>> draws = torch.Generator().manual_seed(0)
    >>> inputs = torch.randn((2, 20), generator=draws).double()
    >>> whole = torch.randn((200, 2), generator=draws).double() @ inputs
    >>> pruned = torch.where(whole.abs() > whole.abs().quantile(0.3), whole, 0.0)
    >>> start, _ = leading_span(pruned, 2, draws)
    >>> span = completed_span(pruned, pruned != 0, start, draws)
    >>> bool((inputs - inputs @ span.T @ span).norm() / inputs.norm() < 1e-4)
    True
    """
    gradient, mask = _rich_rows(gradient, mask, len(span), generator)
    if not len(gradient):
        return span
    # No row may outweigh the others: what they say of the span does not depend on their size.
    gradient = gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1e-300)
    for weight, passes in SOFT_ZEROS:
        weights = torch.where(mask, 1.0, weight).double()
        for _ in range(passes):
            loadings = row_coefficients(gradient, weights, span)
            moved = torch.linalg.qr(row_coefficients(gradient.T, weights.T, loadings.T))[0].T
            change = float((moved - moved @ span.T @ span).norm())
            span = moved
            if change <= torch.finfo(torch.float32).eps:  # what was observed is not more exact
                break
    return span


def _rich_rows(gradient: Tensor, mask: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows with more entries than unknowns, so many at most; at random, as rows of one activation pattern are alike."""
    rich = (mask.sum(1) > count).nonzero().flatten()
    chosen = rich[torch.randperm(len(rich), generator=generator)[:MOST_ROWS]]
    return gradient[chosen], mask[chosen]


def row_coefficients(values: Tensor, weights: Tensor, basis: Tensor) -> Tensor:
    """Return coefficients (r, n) of ``values`` (r, c) on the rows of ``basis`` (n, c), by weighted least squares."""
    count = len(basis)
    pairs = (basis[:, None] * basis[None]).reshape(count * count, -1)
    systems = (weights @ pairs.T).reshape(-1, count, count)
    sides = (weights * values) @ basis.T
    ridge = 1e-12 * float(systems.diagonal(dim1=1, dim2=2).mean()) + 1e-300
    systems = systems + ridge * torch.eye(count, dtype=systems.dtype)
    solution: Tensor = torch.linalg.solve(systems, sides)
    return solution


def span_residual(gradient: Tensor, mask: Tensor, span: Tensor, generator: torch.Generator) -> float:
    """Return the relative size of entries that the span does not predict, the median over rows.

    Each row is fitted on a random half of its entries and tried on the other half; entries set to zero are not asked.

    >>> draws = torch.Generator().manual_seed(0)
    >>> inputs = torch.linalg.qr(torch.randn((30, 2), generator=draws).double())[0].T
    >>> rows = torch.randn((50, 2), generator=draws).double() @ inputs
    >>> everything = torch.ones_like(rows, dtype=torch.bool)
    >>> span_residual(rows, everything, inputs, draws) < 1e-10
    True
    """
    narrow = gradient.shape[1] < EQUATIONS_PER_UNKNOWN * len(span)  # too few columns to leave some out
    gradient, mask = _rich_rows(
        gradient, mask, len(span) if narrow else EQUATIONS_PER_UNKNOWN * len(span) - 1, generator
    )
    if not len(gradient):
        return 1.0
    half = torch.rand(gradient.shape, generator=generator) < 0.5
    fitted = row_coefficients(gradient, (mask & (half | narrow)).double(), span) @ span
    tested = mask & (~half | narrow)
    sizes = (gradient * tested).norm(dim=1)
    gaps = ((fitted - gradient) * tested).norm(dim=1) / sizes
    return min(float(gaps[sizes > 0].median()), 1.0) if bool((sizes > 0).any()) else 1.0


#: A round that lowers the residual by less than this share is the last.
AT_REST = 1e-4


@dataclass(frozen=True, eq=False)
class TwoGradients:
    """Hold weights and gradients of a dense layer (m, d) and of the head (classes, m), and which entries count."""

    weight: Tensor
    gradient: Tensor
    mask: Tensor
    head: Tensor
    head_gradient: Tensor
    head_mask: Tensor
    activation: Callable[[Tensor], Tensor]
    bias: Tensor | None = None

    def inner(self, features: Tensor) -> Tensor:
        product = features @ self.weight.T
        return product if self.bias is None else product + self.bias

    @cached_property
    def size(self) -> float:
        squares = (self.gradient * self.mask).square().sum() + (self.head_gradient * self.head_mask).square().sum()
        return float(squares.sqrt())


@dataclass(frozen=True, eq=False)
class Refined:
    features: Tensor
    output_gradients: Tensor
    residual: float


def refine_features(problem: TwoGradients, start: Tensor) -> Refined:
    """Return the features near ``start`` (n, d) that explain both gradients best; signs and lengths as in ``start``.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, head = (torch.randn(shape, generator=draws).double() for shape in ((300, 8), (4, 300)))
    >>> z, r = torch.randn((2, 8), generator=draws).double(), torch.randn((2, 4), generator=draws).double()
    >>> dense = ((r @ head) * (z @ weight.T > 0)).T @ z
    >>> last = r.T @ torch.relu(z @ weight.T)
    >>> mask = dense.abs() > dense.abs().median()
    >>> everything = torch.ones_like(last).bool()
    >>> problem = TwoGradients(weight, dense * mask, mask, head, last, everything, torch.relu)
    >>> found = refine_features(problem, z + 0.2 * torch.randn((2, 8), generator=draws))
    >>> found.residual < 1e-3, bool((torch.cosine_similarity(z, found.features) > 1 - 1e-6).all())
    (True, True)
    """
    # First every fourth unit alone, where these have enough equations; then all.
    coarse = TwoGradients(
        *(problem.weight[::4], problem.gradient[::4], problem.mask[::4]),
        *(problem.head[:, ::4], problem.head_gradient[:, ::4], problem.head_mask[:, ::4]),
        activation=problem.activation,
        bias=None if problem.bias is None else problem.bias[::4],
    )
    if coarse.head.shape[1] * len(coarse.head) >= EQUATIONS_PER_UNKNOWN * start.numel():
        start = _refined(coarse, start).features
    return _refined(problem, start)


def _refined(problem: TwoGradients, start: Tensor) -> Refined:
    best = fitted_output_gradients(problem, start)
    for _ in range(12):
        step, before = _gauss_newton(problem, best), best.residual
        for share in (1.0, 0.5, 0.2):
            found = fitted_output_gradients(problem, best.features + share * step)
            if found.residual < before:
                best = found
                break
        if not best.residual < before or best.residual > before * (1 - AT_REST):
            break
    return best


def with_best_signs(problem: TwoGradients, directions: Tensor) -> Tensor:
    best, least = directions, _head_fit(problem, directions)[1]
    for number in range(len(directions)):
        flipped = best.clone()
        flipped[number] *= -1
        residual = _head_fit(problem, flipped)[1]
        if residual < least:
            best, least = flipped, residual
    return best


def _head_fit(problem: TwoGradients, features: Tensor) -> tuple[Tensor, float]:
    outputs = problem.activation(problem.inner(features))
    weights = problem.head_mask.double()
    found = row_coefficients(problem.head_gradient, weights, outputs).T
    gap = (problem.head_gradient - found.T @ outputs) * weights
    return found, float(gap.norm())


def fitted_output_gradients(problem: TwoGradients, features: Tensor) -> Refined:
    found, gap = _head_fit(problem, features)
    signals = (found @ problem.head) * slope(problem.activation, problem.inner(features))
    rest = (problem.gradient - signals.T @ features) * problem.mask
    residual = (gap**2 + float(rest.square().sum())) ** 0.5 / max(problem.size, 1e-300)
    return Refined(features, found, residual)


def _gauss_newton(problem: TwoGradients, at: Refined) -> Tensor:
    inner = problem.inner(at.features)
    slopes = slope(problem.activation, inner)
    signals = (at.output_gradients @ problem.head) * slopes
    mask, head_mask = problem.mask.double(), problem.head_mask.double()

    gap = (problem.gradient - signals.T @ at.features) * mask
    head_gap = (problem.head_gradient - at.output_gradients.T @ problem.activation(inner)) * head_mask

    def from_head(last: Tensor) -> Tensor:
        return ((at.output_gradients @ last) * slopes) @ problem.weight

    # The layer's own equations are apart for each column of the features: small systems, made once.
    pairs = (signals[:, None] * signals[None]).flatten(0, 1)
    columns = (pairs @ mask).T.reshape(-1, len(signals), len(signals))

    def normal(step: Tensor) -> Tensor:
        moved = at.output_gradients.T @ ((step @ problem.weight.T) * slopes)
        return torch.einsum("lab,bl->al", columns, step) + from_head(moved * head_mask)

    side = signals @ gap + from_head(head_gap)
    # Features differ in how loud they are; dividing each by its own weight lets conjugate gradients treat them alike.
    loudness = signals.square().sum(1) + (at.output_gradients.square() @ head_mask * slopes.square()).sum(1)
    scale = 1 / loudness.clamp_min(1e-300).sqrt()[:, None]

    def damped(direction: Tensor) -> Tensor:
        return scale * normal(scale * direction) + 1e-6 * direction

    return scale * conjugate_gradients(damped, scale * side, steps=25, tolerance=1e-10)
