"""When an attack may take the weight update of many local steps for one gradient.

Zhu, Yao, Blaschko, "Surrogate Model Extension (SME): A Fast and Accurate Weight Update Attack on Federated Learning",
ICML 2023. The attack looks for a point on the segment from w_0 to w_T whose gradient is parallel to the update w_0 -
w_T. Such a point exists for gradient flow in two dimensions, so two things matter: whether the gradients of the local
steps keep to two directions (:func:`leading_shares`), and how parallel the best point is (:func:`cosine_profile`).
``beta`` is 0 at w_0 and 1 at w_T, as in the paper's tables and code; its equation 5 uses the reversed letter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from leakscope.contracts.checks import expected, refuse, whole
from leakscope.contracts.errors import UserError

_COLUMNS = 2**17  # of the matrix of gradients in double precision at a time: 50 steps take 50 MB
BETA_TOLERANCE = 1e-3  # of the best point on the segment


@dataclass(frozen=True, kw_only=True)
class CosineProfile:
    """The cosine between an update and the gradients along its segment; NaN where the gradient is zero."""

    betas: tuple[float, ...]
    cosines: tuple[float, ...]
    best_beta: float
    best_cosine: float


def leading_shares(gradients: Tensor, directions: int = 2) -> Tensor:
    """Return for each row g of (steps, parameters) the share |P g| / |g| in the leading right singular directions.

    Computed in float64 from the steps x steps matrix of inner products, so that the parameters may be millions; a row
    1e6 times shorter than the longest keeps about four digits. The share of a zero row is 1.

    >>> shares = leading_shares(torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.8, 0.6], [0.0, 0.8, -0.6]]))
    >>> [round(share, 6) for share in shares.tolist()]
    [1.0, 0.8, 0.8]
    """
    problems = []
    if gradients.dim() != 2 or 0 in gradients.shape:
        problems.append(f"gradients: expected (steps, parameters), neither of them 0, got {tuple(gradients.shape)}")
    if not gradients.is_floating_point():
        problems.append(f"gradients: expected floating point, got {gradients.dtype}")
    refuse("leading_shares", problems + whole(directions=directions))
    steps = gradients.shape[0]
    gram = torch.zeros(steps, steps, dtype=torch.float64)
    for block in gradients.detach().split(_COLUMNS, dim=1):
        wide = block.to(device="cpu", dtype=torch.float64)
        gram += wide @ wide.T
    if not bool(torch.isfinite(gram).all()):
        raise UserError("gradients: expected finite values whose squares are finite, got NaN or infinity")
    # gram = U diag(s^2) U', and the part of row i along the k-th right singular vector is U_ik s_k.
    values, vectors = torch.linalg.eigh(gram)
    inside = vectors[:, -directions:].square() @ values[-directions:].clamp(min=0)
    squares = gram.diagonal()
    shares = torch.where(squares > 0, inside / squares.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    return shares.clamp(0, 1).sqrt()


def cosine_profile(
    update: Mapping[str, Tensor], gradient_at: Callable[[float], Mapping[str, Tensor]], points: int = 21
) -> CosineProfile:
    """Return the cosine between ``update`` = w_0 - w_T and the gradient at w_0 - beta update, for beta from 0 to 1.

    ``gradient_at(beta)`` is called at ``points`` even places, and then around the best of them, whose maximum is
    refined by Brent's bounded search. A valley between two places of the grid can be missed.

    >>> profile = cosine_profile({"w": torch.tensor([2.0, 0.0])}, lambda beta: {"w": torch.tensor([1.0, beta - 0.33])})
    >>> round(profile.best_beta, 3), round(profile.best_cosine, 6), round(profile.cosines[0], 3)
    (0.33, 1.0, 0.95)
    """
    refuse("cosine_profile", whole(2, points=points))
    shapes = {name: value.shape for name, value in update.items()}
    update_norm = math.sqrt(_dot(update, update))
    if not (math.isfinite(update_norm) and update_norm > 0):
        raise UserError(f"update: expected a direction, that is a finite norm above 0, got {update_norm:g}")

    def cosine(beta: float) -> float:
        gradient = gradient_at(beta)
        got = {name: value.shape for name, value in gradient.items()}
        if got != shapes:
            odd = ", ".join(sorted(name for name in {*shapes, *got} if shapes.get(name) != got.get(name)))
            raise UserError(f"gradient_at: expected the names and shapes of the update, got others for {odd}")
        norm = math.sqrt(_dot(gradient, gradient))
        if not (math.isfinite(norm) and norm > 0):
            return math.nan
        return min(1.0, max(-1.0, _dot(update, gradient) / (update_norm * norm)))

    betas = tuple(place / (points - 1) for place in range(points))
    cosines = tuple(cosine(beta) for beta in betas)
    finite = [place for place in range(points) if not math.isnan(cosines[place])]
    if not finite:
        return CosineProfile(betas=betas, cosines=cosines, best_beta=math.nan, best_cosine=math.nan)
    best = max(finite, key=lambda place: cosines[place])
    bracket = (betas[max(0, best - 1)], betas[min(points - 1, best + 1)])

    def loss(beta: float) -> float:
        value = cosine(float(beta))
        return 2.0 if math.isnan(value) else -value  # worse than any cosine

    # Finer than promised: near a minimum, where the gradient turns quickly, a thousandth of beta costs cosine.
    minimum = minimize_scalar(loss, bounds=bracket, method="bounded", options={"xatol": BETA_TOLERANCE / 10})
    # The search never looks at the ends of the bracket, so a maximum at w_0 or w_T is one of the grid.
    candidates = (cosines[best], betas[best]), (-float(minimum.fun), float(minimum.x))
    best_cosine, best_beta = max(candidates, key=lambda pair: pair[0])
    return CosineProfile(betas=betas, cosines=cosines, best_beta=best_beta, best_cosine=best_cosine)


def parallel_beta(curvatures: Sequence[float], start: Sequence[float], end: Sequence[float]) -> float:
    """Find where on the segment the gradient of 1/2 w' diag(h) w in two dimensions is parallel to start - end.

    With D = start - end: beta = (h1 w0x Dy - h2 w0y Dx) / ((h1 - h2) Dx Dy). If ``end`` lies on the gradient flow
    from ``start``, beta is between 0 and 1 (above 1/2 for positive curvatures) and the cosine there is +1.

    >>> e = math.exp(-1.0)
    >>> round(parallel_beta((1.0, 2.0), (1.0, 1.0), (e, e * e)), 4)
    0.7311
    """
    pairs = {"curvatures": tuple(curvatures), "start": tuple(start), "end": tuple(end)}
    two = expected("two finite numbers", lambda pair: len(pair) == 2 and all(map(math.isfinite, pair)), **pairs)
    refuse("parallel_beta", two)
    (h1, h2), (x, y) = curvatures, start
    dx, dy = x - end[0], y - end[1]
    if h1 == h2 or dx == 0 or dy == 0:
        raise UserError(
            "parallel_beta: expected two different curvatures and a step in both directions, got "
            f"curvatures {h1:g}, {h2:g} and step {dx:g}, {dy:g}; without them no one point is singled out"
        )
    return (h1 * x * dy - h2 * y * dx) / ((h1 - h2) * dx * dy)


def drift_bound(
    *,
    gradient_norm: float,
    lipschitz: float,
    smoothness: float,
    learning_rate: float,
    steps: int,
    loss_before: float,
    loss_after: float,
) -> float:
    """Theorem 4.3 as printed: (G2 + sqrt(T G^2 L^2 / (l_0 - l_T)))^2 with G^2 = G2^2 eta / (1 - eta beta / 2).

    ``gradient_norm`` G2 bounds the client's gradients, ``lipschitz`` L is the Lipschitz constant of the loss and
    ``smoothness`` beta that of its gradient (read off the dimensions; the text does not say). Constants are dropped, so
    it gives an order only. Infinite where the loss did not fall or eta beta is 2 or more. It assumes plain SGD.

    >>> constants = dict(gradient_norm=1.0, lipschitz=1.0, smoothness=1.0, learning_rate=1.0)
    >>> drift_bound(**constants, steps=2, loss_before=3.0, loss_after=2.0)
    9.0
    >>> drift_bound(**constants, steps=2, loss_before=3.0, loss_after=3.0)
    inf
    """
    sizes = {"gradient_norm": gradient_norm, "lipschitz": lipschitz, "smoothness": smoothness}
    problems = expected("a finite number of at least 0", lambda value: 0 <= value < math.inf, **sizes)
    problems += expected("a finite positive number", lambda rate: 0 < rate < math.inf, learning_rate=learning_rate)
    problems += whole(steps=steps)
    problems += expected("a finite number", math.isfinite, loss_before=loss_before, loss_after=loss_after)
    refuse("drift_bound", problems)
    fall, room = loss_before - loss_after, 1 - learning_rate * smoothness / 2
    if fall <= 0 or room <= 0:
        return math.inf
    spread = math.sqrt(steps * learning_rate / (room * fall)) * gradient_norm * lipschitz
    return (gradient_norm + spread) ** 2


def _dot(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return sum(float((value.double() * other[name].double()).sum()) for name, value in one.items())
