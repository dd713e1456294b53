"""Factor a matrix whose left factor is zeros and ones, but for a known scale of each row.

In front of a ReLU and a mean over all places, the derivative of one image is the same number at all places of a channel
where the unit is active, and zero elsewhere. A 1x1 convolution there has the weight gradient diag(s) M P, with s known
from the layers above, M the masks (channels, places) and P what it reads. The columns of M are the binary vectors in
the span of the gradient's columns: a vector of the span is known by as many of its entries as there are places, so that
few candidates have to be tried (Slawski, Hein and Lutsik, 2013). They come in no order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable

#: Columns up to which all candidates are tried: 65,536 of them.
MOST_COLUMNS = 16
#: Singular values below this share of the largest are rounding of float32.
ROUNDED = 1e-6
#: How far the entries of a binary column may be from zero and one: true ones came within 1e-4, others to 1e-2.
BINARY = 1e-3
#: Masks in the span of the true ones up to which the true ones are looked for: some seconds.
MOST_CANDIDATES = 512
#: Random bases from which exchanges begin, and columns of the matrix that tell what is negative.
STARTS, WITNESSES = 10, 64
#: Share of the largest below which inputs count as zeros.
ZERO = 1e-5
#: Share of the largest scale below which rows are left out of the search, for rounding counts for more in them.
FAINT = 3e-2
#: What the factors may leave of the matrix, and negative entries relative to the largest.
LEFT, NEGATIVE = 1e-4, 1e-4

Cost = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class BinaryFactors:
    """``masks`` (rows, columns) of zeros and ones, and ``inputs`` (columns, ...): in the same order, which is any.

    ``apart``: how far a column is from binary; ``left``: what the factors leave of the matrix.
    """

    masks: Tensor
    inputs: Tensor
    apart: float
    left: float


def binary_factor(matrix: Tensor, scales: Tensor, columns: int) -> BinaryFactors:
    """Write a matrix as diag(scales) masks inputs with masks of so many ``columns``, and inputs that are not negative.

    NotApplicable where its rank is another, or where the binary vectors of its span are not as many.

    >>> draws = torch.Generator().manual_seed(0)
    >>> masks = (torch.rand((40, 3), generator=draws) > 0.5).double()
    >>> inputs, scales = (torch.rand(size, generator=draws, dtype=torch.float64) for size in ((3, 8), (40,)))
    >>> found = binary_factor(scales[:, None] * (masks @ inputs), scales, 3)
    >>> bool(torch.allclose(found.masks @ found.inputs, masks @ inputs))
    True
    """
    if columns > MOST_COLUMNS:
        raise NotApplicable(f"{columns} places have too many candidates for their masks")
    loud = scales.abs() > FAINT * scales.abs().max()
    scaled = matrix[loud] / scales[loud, None]
    u, s, _ = torch.linalg.svd(scaled, full_matrices=False)
    rank = int((s > ROUNDED * s[0]).sum())
    if rank != columns:
        raise NotApplicable(f"the gradient has rank {rank}, not one for each of {columns} places")
    candidates, apart = _binary_columns(u[:, :columns])
    if not columns <= candidates.shape[1] <= MOST_CANDIDATES:
        raise NotApplicable(f"{candidates.shape[1]} masks are in the gradient's span, for {columns} places")
    found = candidates[:, _basis(candidates, scaled)]
    inputs = torch.linalg.lstsq(found, scaled, driver="gelsd").solution
    if bool(inputs.min() < -NEGATIVE * inputs.max()):
        raise NotApplicable("what the masks give is negative")
    masks = matrix.new_zeros(len(matrix), columns)
    masks[loud] = found
    faint = ~loud & (scales != 0)
    masks[faint] = torch.linalg.lstsq(inputs.T, (matrix[faint] / scales[faint, None]).T).solution.T.round().clamp(0, 1)
    left = float((scales[:, None] * (masks @ inputs) - matrix).norm() / matrix.norm())
    if not left < LEFT:
        raise NotApplicable(f"masks and inputs leave {left:.1e} of the gradient")
    return BinaryFactors(masks=masks, inputs=inputs, apart=apart, left=left)


def _binary_columns(basis: Tensor) -> tuple[Tensor, float]:
    """Return the vectors of zeros and ones in the span of a basis, and how far from that they are."""
    count = basis.shape[1]
    permutation, _, _ = torch.linalg.lu(basis)
    order = permutation.T.argmax(1)
    free = basis @ torch.linalg.inv(basis[order[:count]])
    codes = torch.arange(1, 2**count)
    candidates = ((codes[:, None] >> torch.arange(count)) & 1).to(basis)
    # A few rows rule out almost all.
    for rows in (order[: 2 * count], order[: 8 * count], order):
        values = candidates @ free[rows].T
        apart = torch.minimum(values.abs(), (values - 1).abs()).amax(1)
        candidates, apart = candidates[apart < BINARY], apart[apart < BINARY]
    return (free @ candidates.T).round(), float(apart.max()) if len(apart) else 0.0


def _basis(candidates: Tensor, matrix: Tensor) -> Tensor:
    """Return the numbers of the candidates in whose terms a matrix is not negative, and has the most zeros.

    Sums and differences of the true masks may be binary, too. Candidates are exchanged one by one, first while this
    makes the sum of what is negative smaller, then while it makes more zeros.
    """
    draws, best, least = torch.Generator().manual_seed(0), torch.empty(0), torch.inf
    matrix = matrix[:, matrix.norm(dim=0).argsort(descending=True)[:WITNESSES]]
    rounding = ZERO * float(matrix.max())
    for _ in range(STARTS):
        order = torch.randperm(candidates.shape[1], generator=draws)
        chosen = order[_independent(candidates[:, order])]
        solution = torch.linalg.lstsq(
            candidates[:, chosen], torch.cat([matrix, candidates], 1), driver="gelsd"
        ).solution
        inputs, terms = solution[:, : matrix.shape[1]], solution[:, matrix.shape[1] :]
        for cost in (_negative, _other_than_zero):
            now = float(cost(inputs[None], rounding))
            while True:
                after = torch.stack(
                    [_after_exchange(inputs, terms, place, rounding, cost) for place in range(len(terms))]
                )
                place, candidate = divmod(int(after.argmin()), after.shape[1])
                if not float(after[place, candidate]) < (1 - 1e-6) * now:
                    break
                now, column = float(after[place, candidate]), terms[:, candidate]
                inputs, terms = (_exchanged(one, column[None], place)[0] for one in (inputs, terms))
                chosen[place] = candidate
        if now < least:
            best, least = chosen, now
    return best


def _negative(inputs: Tensor, _rounding: float) -> Tensor:
    return (-inputs).clamp_min(0).sum((1, 2))


def _other_than_zero(inputs: Tensor, rounding: float) -> Tensor:
    return (inputs > rounding).sum((1, 2)).double() + inputs[0].numel() * (inputs < -rounding).sum((1, 2))


def _after_exchange(inputs: Tensor, terms: Tensor, place: int, rounding: float, cost: Cost) -> Tensor:
    """Return the cost of inputs after each candidate takes a place of the basis."""
    fits = (terms[place].abs() > 0.1).nonzero()[:, 0]
    total = terms.new_full((terms.shape[1],), torch.inf)
    total[fits] = cost(_exchanged(inputs, terms[:, fits].T, place), rounding)
    return total


def _exchanged(values: Tensor, vectors: Tensor, place: int) -> Tensor:
    """Return coefficients in bases where one of the ``vectors``, in terms of the old basis, takes a place."""
    share = values[place] / vectors[:, place, None]
    values = values - vectors[:, :, None] * share[:, None]
    values[:, place] = share
    return values


def _independent(vectors: Tensor) -> Tensor:
    """Return the numbers of the columns that are independent of those before them."""
    kept, left = list[int](), vectors.clone()
    for column in range(vectors.shape[1]):
        size = left[:, column].norm()
        if float(size) > 1e-6 * float(vectors[:, column].norm()):
            direction = left[:, column] / size
            left = left - direction[:, None] * (direction @ left)
            kept.append(column)
    return torch.tensor(kept)
