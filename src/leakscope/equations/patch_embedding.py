"""Solve for the patches of one image behind a patch embedding with learned positions.

Positions are added to the embedding's outputs, so that their gradient *is* the signal D (T, d) that comes back to
these outputs. The weights' gradient is dW = D'P for the T patches P (T, inputs): linear least squares, d equations for
T unknowns in each column. A bias has the gradient D'1, which checks D itself.

Noise of level n on the entries of dW makes an error of n / s_i along the direction of D's singular value s_i. Where
there are more equations than unknowns, n is what they leave. Directions that noise hides are taken from a prior (grey,
with the spread of pixels) by Wiener's filter: min |D'P - dW|^2 / n^2 + |P - grey|^2 / spread^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.errors import NotApplicable

#: Standard deviation of pixels under the prior, as a share of their range: that of uniform ones.
SPREAD = 1 / math.sqrt(12)


@dataclass(frozen=True, eq=False, kw_only=True)
class SolvedPatches:
    """The patches (T, inputs) and how well the equations determine them.

    ``residual``: what they leave of the gradients of weights and bias, relative to these, the larger one. ``errors``
    (T,): the expected error along each of the ``directions`` (rows, up to T), in units of the patches; weakest last.
    ``span``: how far black and white are apart in these units.
    """

    patches: Tensor
    residual: float
    errors: Tensor
    directions: Tensor
    span: float

    @property
    def error(self) -> float:
        """Return the expected root mean square error of the pixels, as a share of their range."""
        return float(self.errors.square().mean().sqrt()) / self.span

    def free_directions(self, most: float) -> int:
        """Count unknowns that the equations do not determine, where the expected error exceeds ``most``.

        >>> errors = torch.tensor([1e-6, 0.3])
        >>> found = SolvedPatches(
        ...     patches=torch.zeros(2, 5), residual=0.0, errors=errors, directions=torch.eye(2), span=1.0
        ... )
        >>> found.free_directions(1e-4), found.free_directions(0.5)
        (5, 0)
        """
        weak = int((self.errors > most * self.span).sum())
        return weak * self.patches.shape[1] if self.error > most else 0


def solve_patches(
    signals: Tensor, gradient: Tensor, bias_gradient: Tensor | None, grey: Tensor, span: float
) -> SolvedPatches:
    """Solve D'P = dW for the patches, from signals D (T, d) and the weights' gradient dW (d, inputs), in float64.

    ``grey`` (T, inputs) and ``span``: what a grey image is there, and how far apart its extremes are.

    >>> draws = torch.Generator().manual_seed(0)
    >>> signals, patches = (torch.rand(shape, generator=draws).double() for shape in ((3, 8), (3, 5)))
    >>> found = solve_patches(signals, signals.T @ patches, signals.sum(0), torch.full((3, 5), 0.5), 1.0)
    >>> torch.allclose(found.patches, patches), found.residual < 1e-14, found.free_directions(1e-4)
    (True, True, 0)
    """
    signals, gradient, grey = signals.double(), gradient.double(), grey.double()
    if not bool(signals.any()) or not bool(gradient.any()):
        raise NotApplicable("nothing came back to the patch embedding: its gradient is zero")
    tokens = len(signals)
    left, sizes, right = torch.linalg.svd(signals.T, full_matrices=False)
    along = left.T @ (gradient - signals.T @ grey)
    outside = gradient - signals.T @ grey - left @ along
    beside = None if bias_gradient is None else bias_gradient.double() - signals.sum(0)
    level = _level(outside, beside, gradient, tokens)
    spread = SPREAD * span
    filtered = sizes / (sizes.square() + (level / spread) ** 2)
    patches = grey + right.T @ (filtered[:, None] * along)
    errors = torch.full((tokens,), spread, dtype=torch.float64)
    errors[: len(sizes)] = level / (sizes.square() + (level / spread) ** 2).sqrt()
    residual = float((gradient - signals.T @ patches).norm() / gradient.norm())
    if beside is not None:
        # Relative to the signals, too: those of different tokens may cancel in the bias.
        residual = max(residual, float(beside.norm() / max(signals.norm(), signals.sum(0).norm())))
    return SolvedPatches(patches=patches, residual=residual, errors=errors, directions=right, span=span)


def _level(outside: Tensor, beside: Tensor | None, gradient: Tensor, tokens: int) -> float:
    """Return the noise on the entries of the gradient: what no patches explain.

    Without more equations than unknowns, patches explain anything: then it is what a certificate allows, or what the
    bias shows, whichever is more.
    """
    units, inputs = gradient.shape
    if units > tokens:
        return float(outside.norm()) / math.sqrt((units - tokens) * inputs)
    seen = 0.0 if beside is None else float(beside.square().mean().sqrt())
    return max(seen, EXPLAINED * float(gradient.square().mean().sqrt()))
