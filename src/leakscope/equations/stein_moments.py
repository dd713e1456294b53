"""Recover features from Stein moments of a dense layer's gradient; float64.

Wang, Lee, Lei, "Reconstructing Training Data from Model Gradient, Provably", AISTATS 2023. For a layer of random rows
w_j ~ N(0, I) under an activation s, with the gradient rows G_j = a_j sum_i c_i s'(<w_j, x_i>) x_i:

    E[a G (x) He_p(w)] = E[a^2] sum_i c_i E[s^(p+1)] x_i^(p+1)        He_1 = w, He_2 = ww' - I, He_3, ...

The order-two moment P spans the features, the next one that does not vanish separates them inside that span. Which
orders vanish is read from the activation: E[s'''] = 0 for ReLU, which needs order four; E[s''] = 0 for odd activations,
where P comes from slices of order three; for a quadratic activation everything beyond order two vanishes, and the
features are not identifiable.

Slices of these tensors, and second moments with different weights, are symmetric matrices M_s = sum_i c_si x_i x_i'.
Jennrich's method (Harshman 1970; Leurgans, Ross, Abel 1993) diagonalises them together: the eigenvectors of
M(u) M(v)^-1 for two random combinations are the x_i. The best of several draws by the visible residual is polished by
alternating least squares on all matrices.

Differences from the paper, each of which lowers the error: the rows are regressed on the weights rather than multiplied
with them, which removes the part of the sampling error that weights explain (``whiten``; the paper's form is there for
its table); order three is read in all slices that the gradient itself spans; moments of all orders are diagonalised
together; the weights a_j are read from the head and may be many (one for each direction of the head's rows), so that a
head of random rows gives several second moments, which separate features by themselves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError


def least_squares(design: Tensor, rows: Tensor) -> Tensor:
    """Solve ``design`` (m, k) times a solution nearest to ``rows`` (m, n); least norm where it is open.

    Normal equations with a driver that gives the same bits each time, which the default one of a tall system does not.

    >>> least_squares(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [6.0]])).round(decimals=5).tolist()
    [[3.0]]
    """
    solution: Tensor = torch.linalg.lstsq(design.T @ design, design.T @ rows, driver="gelsd").solution
    return solution


def diagonalising_vectors(matrices: Tensor, generator: torch.Generator) -> tuple[Tensor, float]:
    """Unit rows x_i (n, n), up to sign and order, and the relative residual of all ``matrices`` (s, n, n).

    >>> draws = torch.Generator().manual_seed(0)
    >>> x = torch.nn.functional.normalize(torch.randn((3, 3), generator=draws).double(), dim=1)
    >>> slices = torch.einsum("i,ia,ib,ic->cab", torch.tensor([1.0, -2.0, 3.0]).double(), x, x, x)
    >>> vectors, residual = diagonalising_vectors(slices, draws)
    >>> residual < 1e-10, bool(((vectors @ x.T).abs().amax(0) > 1 - 1e-12).all())
    (True, True)
    """
    matrices = (matrices + matrices.transpose(1, 2)) / 2
    count = matrices.shape[1]
    if count == 1:
        return torch.ones((1, 1), dtype=matrices.dtype), 0.0
    best, least = torch.linalg.eigh(matrices.square().sum(0))[1].T, torch.inf
    for _ in range(30):
        mixed = torch.randn((2, len(matrices)), generator=generator, dtype=matrices.dtype)
        first, second = torch.einsum("ps,sab->pab", mixed, matrices)
        try:
            columns = torch.linalg.eig(torch.linalg.solve(second, first, left=False))[1]
        except RuntimeError:  # LAPACK gives up on a pair that is singular
            continue
        vectors = torch.nn.functional.normalize(columns.real.T, dim=1)
        residual = _residual(matrices, vectors)
        if bool(torch.isfinite(vectors).all()) and residual < least:
            best, least = vectors, residual
    polished = _polished(matrices, best)
    reached = _residual(matrices, polished)
    return (polished, reached) if reached <= least else (best, least)


def _loadings(matrices: Tensor, vectors: Tensor) -> Tensor:
    products = (vectors[:, :, None] * vectors[:, None, :]).flatten(1)
    solution: Tensor = torch.linalg.lstsq(products.T, matrices.flatten(1).T, driver="gelsd").solution.T
    return solution


def _residual(matrices: Tensor, vectors: Tensor) -> float:
    if not bool(torch.isfinite(vectors).all()):
        return torch.inf
    fitted = torch.einsum("si,ia,ib->sab", _loadings(matrices, vectors), vectors, vectors)
    return float((matrices - fitted).norm() / matrices.norm().clamp_min(1e-300))


def _polished(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Alternating least squares for the left factor with the right one held, both made equal again in between."""
    best, least = vectors, _residual(matrices, vectors)
    unfolded = matrices.transpose(0, 1).flatten(1)
    for _ in range(100):
        loadings = _loadings(matrices, vectors)
        rows = (loadings.T[:, :, None] * vectors[:, None, :]).flatten(1)
        left = torch.linalg.lstsq(rows.T, unfolded.T, driver="gelsd").solution
        left = torch.nn.functional.normalize(left, dim=1)
        left = left * torch.sign((left * vectors).sum(1, keepdim=True))
        vectors = torch.nn.functional.normalize(left + vectors, dim=1)
        residual = _residual(matrices, vectors)
        if not residual < least * (1 - 1e-12):
            break
        best, least = vectors, residual
    return best


Elementwise = Callable[[Tensor], Tensor]
#: Expected derivatives below this share of the largest count as zero.
VANISHING = 1e-3
#: Directions of the head's rows that are read, and features up to which an order-four moment is of use.
MOST = 12


@dataclass(frozen=True)
class ActivationClass:
    """Which moments carry signal: the expected derivatives of orders two, three and four under a standard Gaussian."""

    second: float
    third: float
    fourth: float

    @property
    def orders(self) -> tuple[int, ...]:
        sizes = {2: abs(self.second), 3: abs(self.third), 4: abs(self.fourth)}
        largest = max(sizes.values())
        return tuple(order for order, size in sizes.items() if largest > 0 and size > VANISHING * max(largest, 1e-3))

    @property
    def reason(self) -> str | None:
        if not self.orders:
            return "the activation is linear: the moments of its gradient are zero"
        if self.orders == (2,):
            return "the activation is quadratic: all moments beyond the second vanish, so only the span follows"
        return None


def activation_class(activation: Elementwise) -> ActivationClass:
    """E[s''], E[s'''], E[s''''] = E[s He_p] by quadrature, which needs no derivative.

    >>> found = activation_class(torch.relu)
    >>> found.orders, round(found.second, 4), round(found.fourth, 4)
    ((2, 4), 0.3989, -0.3989)
    >>> activation_class(torch.tanh).orders, activation_class(torch.square).orders
    ((3,), (2,))
    """
    t = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    density = torch.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    values = activation(t[None].clone())[0] * density
    polynomials = (t**2 - 1, t**3 - 3 * t, t**4 - 6 * t**2 + 3)
    return ActivationClass(*(float(torch.trapezoid(values * he, t)) for he in polynomials))


def head_loadings(head: Tensor) -> Tensor:
    """Return the weights a (q, m) of the units: directions of the rows of a head (classes, m), each of mean square one.

    Output gradients of cross-entropy sum to zero over the classes, so what all rows have in common carries nothing.

    >>> head_loadings(torch.tensor([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]]).double()).abs().round(decimals=6).tolist()
    [[1.0, 1.0]]
    """
    centred = head - head.mean(0)
    _, sizes, rows = torch.linalg.svd(centred, full_matrices=False)
    # What centring leaves of equal rows is rounding, and no direction.
    floor = max(1e-6 * float(sizes[0]), 1e-12 * float(head.norm()))
    kept = int((sizes > floor).sum())
    return rows[: min(kept, MOST)] * math.sqrt(head.shape[1])


def stein_span(
    gradient: Tensor,
    weight: Tensor,
    loadings: Tensor,
    count: int,
    activation: ActivationClass,
    generator: torch.Generator,
    *,
    whiten: bool = True,
) -> Tensor:
    """Return ``count`` orthonormal rows from the second moment, or from slices of the third where the second vanishes.

    The eigenvectors of largest |eigenvalue|: the coefficients c_i have either sign. ``whiten`` false is the published
    form: plain products, and one random contraction of the third moment.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight = torch.randn((4000, 5), generator=draws).double()
    >>> x = torch.eye(5)[:2].double()
    >>> gradient = ((weight @ x.T > 0) * torch.tensor([1.0, -1.0])).double() @ x
    >>> ones = torch.ones((1, 4000)).double()
    >>> span = stein_span(gradient, weight, ones, 2, activation_class(torch.relu), draws)
    >>> bool((x - x @ span.T @ span).norm(dim=1).max() < 0.05)
    True
    """
    if 2 in activation.orders:
        moments = [second_moment(gradient, weight, loading, whiten) for loading in loadings]
    elif 3 in activation.orders:
        # The gradient's own leading directions are the slices that carry signal.
        slices = torch.randn((1, gradient.shape[1]), generator=generator, dtype=torch.float64)
        if whiten:
            slices = torch.linalg.svd(gradient.T @ gradient)[2][:count]
        slices = torch.nn.functional.normalize(slices, dim=1)
        moments = [_third_moment(gradient, weight, loading, one) for loading in loadings for one in slices]
    else:
        raise UserError(f"activation: expected a second or third moment, got orders {activation.orders}")
    squares = sum((moment @ moment for moment in moments), start=torch.zeros_like(moments[0]))
    return torch.linalg.eigh(squares)[1].flip(1)[:, :count].T


def second_moment(gradient: Tensor, weight: Tensor, loading: Tensor, whiten: bool = True) -> Tensor:
    """The symmetric moment (d, d) of the gradient's rows, each times its ``loading`` (m,), with the weights."""
    rows = gradient * loading[:, None]
    if whiten:
        centred = weight - weight.mean(0)
        system = centred.T @ centred
        # More inputs than units leave it singular.
        system.diagonal().add_(1e-9 * system.diagonal().mean())
        product = torch.linalg.solve(system, centred.T @ (rows - rows.mean(0)))
    else:
        product = weight.T @ rows / len(weight)
    return (product + product.T) / 2


def _third_moment(gradient: Tensor, weight: Tensor, loading: Tensor, direction: Tensor) -> Tensor:
    """The moment of order three contracted once, symmetric over its places; rows of ``weight`` of unit variance."""
    unit = weight / weight.std()
    rows = gradient * loading[:, None]
    outer = unit.T @ (unit * (rows @ direction)[:, None]) - (rows @ direction).sum() * _eye(unit.shape[1])
    mixed = rows.T @ (unit * (unit @ direction)[:, None]) - torch.outer(rows.sum(0), direction)
    return (outer + mixed + mixed.T) / (3 * len(unit))


def moment_matrices(
    rows: Tensor, weights: Tensor, loadings: Tensor, activation: ActivationClass
) -> tuple[Tensor, Tensor]:
    """Return moments of ``rows`` and ``weights`` (m, n) inside a span, and the map (n, n) with x = y map.

    They are matrices (s, n, n) sum_i c_si y_i y_i'.
    """
    reduced = weights - weights.mean(0)
    # Whitened, so that the rows need not have unit variance; features take the inverse map.
    values, vectors = torch.linalg.eigh(reduced.T @ reduced / len(reduced))
    root = (vectors * values.clamp_min(1e-300).sqrt()) @ vectors.T
    inverse = torch.linalg.inv(root)
    unit, rows = reduced @ inverse, rows @ root
    count = unit.shape[1]
    stacks = []
    for loading in loadings:
        carried = rows * loading[:, None]
        known = torch.cat((torch.ones_like(unit[:, :1]), unit), dim=1)
        product = least_squares(known, carried)
        if 2 in activation.orders:
            stacks.append(product[None, 1:])
        rest = carried - known @ product
        pairs = (unit[:, :, None] * unit[:, None, :] - _eye(count)).flatten(1)
        if 3 in activation.orders:
            stacks.append(_symmetric((rest.T @ pairs / len(unit)).reshape((count,) * 3)) / math.sqrt(2))
        if 4 in activation.orders and count <= MOST:
            upper = torch.triu(torch.ones(count, count)).flatten().bool()
            rest = rest - pairs[:, upper] @ least_squares(pairs[:, upper], rest)
            triples = torch.einsum("ja,jb,jc->jabc", unit, unit, unit)
            fourth = (rest.T @ triples.flatten(1) / len(unit)).reshape((count,) * 4)
            fourth = fourth - _singles(rest.T @ unit / len(unit))
            stacks.append(_symmetric(fourth).flatten(0, 1) / math.sqrt(6))
    return torch.cat(stacks), inverse


def _singles(product: Tensor) -> Tensor:
    """What He_3(w) takes off w (x) w (x) w: w in one place and the identity in the two others."""
    eye = _eye(len(product))
    terms = ("ab,cd->abcd", "ac,bd->abcd", "ad,bc->abcd")
    return sum((torch.einsum(term, product, eye) for term in terms), start=product.new_zeros(()))


def _symmetric(tensor: Tensor) -> Tensor:
    """The mean over the places that the gradient may take; the others are equal already."""
    swapped = [tensor.transpose(0, place) for place in range(tensor.dim())]
    return sum(swapped, start=torch.zeros_like(tensor)) / tensor.dim()


def _eye(count: int) -> Tensor:
    return torch.eye(count, dtype=torch.float64)
