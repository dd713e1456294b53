"""The span of a dense layer's inputs, read from the layer's weight gradient; float64.

For a layer z = W x + b with signals D (examples x units) the gradient is G = D'X, so its rows lie in the span of the
inputs, exactly and whatever follows the layer. Where entries of G were set to zero, those that are left still have rank
n: :func:`completed_span` fits a matrix of that rank to them by alternating least squares. How well a span explains a
gradient is told without the truth by :func:`span_residual`.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Directions beyond those asked for, and passes of the block power iteration.
OVERSAMPLED, PASSES = 8, 12
#: Singular values so small, relative to the largest, are rounding.
ROUNDING = 1e-13
#: Weights of entries that were set to zero, and passes with them: small numbers first, then unknown ones.
SOFT_ZEROS = ((0.1, 20), (0.01, 30), (1e-3, 50), (1e-5, 150))
SETTLED = 1e-7
#: A row is asked where it has so many entries for each direction.
FIT_ENTRIES = 4
#: Rows that a completion reads; each column needs only a few equations.
MOST_ROWS = 1536


def leading_span(gradient: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``count`` orthonormal rows that carry most of the gradient's rows, and its leading singular values, some more.

    By block power iteration, so that wide layers cost a few products.

    >>> draws = torch.Generator().manual_seed(0)
    >>> inputs = torch.randn((2, 6), generator=draws).double()
    >>> span, sizes = leading_span(torch.randn((9, 2), generator=draws).double() @ inputs, 2, draws)
    >>> bool((inputs - inputs @ span.T @ span).norm() < 1e-12), bool(sizes[2] < 1e-12 * sizes[0])
    (True, True)
    """
    width = min(count + OVERSAMPLED, *gradient.shape)
    start = torch.randn((gradient.shape[1], width), generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(start)[0]
    for _ in range(PASSES):
        left, sizes, _ = torch.linalg.svd(gradient @ basis, full_matrices=False)
        carried = max(int((sizes > ROUNDING * sizes[0]).sum()), min(count, width))
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
    """The entries that are not exactly zero, and the share that is, among rows and columns that are not all zero.

    Units that no example made active, and inputs that are zero for all, have zeros of their own.

    >>> visible_zeros(torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]]))[1]
    0.25
    """
    mask = gradient != 0
    live = mask[mask.any(1)][:, mask.any(0)]
    return mask, float(1 - live.double().mean()) if live.numel() else 1.0


def completed_span(gradient: Tensor, mask: Tensor, span: Tensor, generator: torch.Generator) -> Tensor:
    """The span of the matrix of rank len(span) that agrees with the gradient where ``mask`` is true.

    Alternating least squares from ``span``, with the other entries as small numbers of falling weight: so the start is
    that of a whole matrix and the end that of one with holes.

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
            if change <= SETTLED:
                break
    return span


def _rich_rows(gradient: Tensor, mask: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows with more entries than unknowns, so many at most; at random, as rows of one activation pattern are alike."""
    rich = (mask.sum(1) > count).nonzero().flatten()
    chosen = rich[torch.randperm(len(rich), generator=generator)[:MOST_ROWS]]
    return gradient[chosen], mask[chosen]


def row_coefficients(values: Tensor, weights: Tensor, basis: Tensor) -> Tensor:
    """For each row of ``values`` (r, c) the coefficients (r, n) on the rows of ``basis`` (n, c), by weighted least
    squares."""
    count = len(basis)
    pairs = (basis[:, None] * basis[None]).reshape(count * count, -1)
    systems = (weights @ pairs.T).reshape(-1, count, count)
    sides = (weights * values) @ basis.T
    ridge = 1e-12 * float(systems.diagonal(dim1=1, dim2=2).mean()) + 1e-300
    systems = systems + ridge * torch.eye(count, dtype=systems.dtype)
    solution: Tensor = torch.linalg.solve(systems, sides)
    return solution


def span_residual(gradient: Tensor, mask: Tensor, span: Tensor, generator: torch.Generator) -> float:
    """The relative size of entries that the span does not predict: coefficients of each row are fitted on a random half
    of its entries and tried on the other half; the median over rows.

    A span that holds the rows has zero, a random one about one; entries that were set to zero are not asked.

    >>> draws = torch.Generator().manual_seed(0)
    >>> inputs = torch.linalg.qr(torch.randn((30, 2), generator=draws).double())[0].T
    >>> rows = torch.randn((50, 2), generator=draws).double() @ inputs
    >>> everything = torch.ones_like(rows, dtype=torch.bool)
    >>> span_residual(rows, everything, inputs, draws) < 1e-10
    True
    """
    narrow = gradient.shape[1] < FIT_ENTRIES * len(span)  # too few columns to leave some out
    gradient, mask = _rich_rows(gradient, mask, len(span) if narrow else FIT_ENTRIES * len(span) - 1, generator)
    if not len(gradient):
        return 1.0
    half = torch.rand(gradient.shape, generator=generator) < 0.5
    fitted = row_coefficients(gradient, (mask & (half | narrow)).double(), span) @ span
    tested = mask & (~half | narrow)
    sizes = (gradient * tested).norm(dim=1)
    gaps = ((fitted - gradient) * tested).norm(dim=1) / sizes
    return min(float(gaps[sizes > 0].median()), 1.0) if bool((sizes > 0).any()) else 1.0
