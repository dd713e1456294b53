"""Solve for the patches of one image behind a patch embedding with learned positions.

Positions are added to the embedding's outputs, so that their gradient *is* the signal D (T, d) that comes back to
these outputs. The weights' gradient is dW = D'P for the T patches P (T, inputs): linear least squares, d equations for
T unknowns in each column. A bias has the gradient D'1, which checks D itself.

Noise of level n on the entries of dW makes an error of n / s_i along the direction of D's singular value s_i. Where
there are more equations than unknowns, n is what they leave. Directions that noise hides are taken from a prior (grey,
with the spread of pixels) by Wiener's filter: min |D'P - dW|^2 / n^2 + |P - grey|^2 / spread^2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.errors import NotApplicable

#: Standard deviation of pixels under the prior, as a share of their range: that of uniform ones.
SPREAD = 1 / math.sqrt(12)


#: The noise of thousands of equations varies by a hundredth, that of one column's by some tenths: right patches leave
#: so many times as much as estimated at most, of all and of each column.
FLUCTUATION, COLUMN_FLUCTUATION = 1.2, 2.0
#: The largest byte, and how many expected errors must lie between a pixel and the next byte. Rounding is not alike
#: everywhere: of half a million pixels one was off by 8 expected errors.
BYTE, CERTAIN = torch.iinfo(torch.uint8).max, 12.0


@dataclass(frozen=True, eq=False, kw_only=True)
class SolvedPatches:
    """The patches (T, inputs), the equations they were solved from, and how well these determine them.

    ``residual``: what they leave of the gradients of weights and bias, relative to these, the larger one. ``errors``
    (T,): the expected error along each of the ``directions`` (rows, up to T), in units of the patches; weakest last.
    ``levels`` (inputs,): the noise on the entries of each column of the gradient. ``span``: how far black and white are
    apart in units of the patches.
    """

    patches: Tensor
    signals: Tensor
    gradient: Tensor
    residual: float
    errors: Tensor
    directions: Tensor
    levels: Tensor
    span: float

    @property
    def level(self) -> float:
        """Return the noise on the entries of the gradient."""
        return float(self.levels.square().mean().sqrt())

    @property
    def error(self) -> float:
        """Return the expected root mean square error of the pixels, as a share of their range."""
        return float(self.errors.square().mean().sqrt()) / self.span

    def free_directions(self, most: float) -> int:
        """Count unknowns that the equations do not determine, where the expected error exceeds ``most``."""
        weak = int((self.errors > most * self.span).sum())
        return weak * self.patches.shape[1] if self.error > most else 0

    def explained_by(self, patches: Tensor) -> bool:
        """Return whether these patches leave of the gradient no more than its noise."""
        left = (self.gradient - self.signals.T @ patches).square().mean(0).sqrt()
        each = left <= COLUMN_FLUCTUATION * self.levels.clamp_min(self.level)
        return bool(each.all()) and float(left.square().mean().sqrt()) <= FLUCTUATION * self.level


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
    if len(gradient) > tokens:  # the noise on the entries of each column is what no patches explain
        levels = outside.norm(dim=0) / math.sqrt(len(gradient) - tokens)
    else:  # they explain anything: it is what a certificate allows, or what the bias shows, whichever is more
        seen = 0.0 if beside is None else float(beside.square().mean().sqrt())
        levels = torch.full_like(gradient[0], max(seen, EXPLAINED * float(gradient.square().mean().sqrt())))
    level, spread = float(levels.square().mean().sqrt()), SPREAD * span
    filtered = sizes / (sizes.square() + (level / spread) ** 2)
    patches = grey + right.T @ (filtered[:, None] * along)
    errors = torch.full((tokens,), spread, dtype=torch.float64)
    errors[: len(sizes)] = level / (sizes.square() + (level / spread) ** 2).sqrt()
    residual = float((gradient - signals.T @ patches).norm() / gradient.norm())
    if beside is not None:
        # Relative to the signals, too: those of different tokens may cancel in the bias.
        residual = max(residual, float(beside.norm() / max(signals.norm(), signals.sum(0).norm())))
    return SolvedPatches(
        patches=patches,
        signals=signals,
        gradient=gradient,
        residual=residual,
        errors=errors,
        directions=right,
        levels=levels,
        span=span,
    )


def whole_bytes(solved: SolvedPatches, black: Tensor, white: Tensor) -> Tensor | None:
    """Return the patches with whole bytes for pixels, from ``black`` (T, inputs) to ``white``; None if they do not fit.

    Tokens whose bytes are certain are rounded; the equations that are left determine the others better, and so on. The
    patches of an image that is none of bytes leave far more of the gradient than noise when they are rounded.

    >>> draws = torch.Generator().manual_seed(0)
    >>> signals = torch.rand((3, 8), generator=draws).double()
    >>> patches = torch.randint(256, (3, 5), generator=draws).double() / 255
    >>> black, white = torch.zeros(3, 5).double(), torch.ones(3, 5).double()
    >>> rounded = (signals.T @ patches).float()
    >>> found = whole_bytes(solve_patches(signals, rounded, None, white / 2, 1.0), black, white)
    >>> torch.equal(found, patches)
    True
    """
    if solved.signals.shape[1] < len(solved.signals):
        return None  # fewer equations than tokens
    range_, values = white - black, solved.patches.clone()
    open_ = torch.ones(len(values), dtype=torch.bool)
    while bool(open_.any()):
        inverse = torch.linalg.pinv(solved.signals[open_].T)
        values[open_] = inverse @ (solved.gradient - solved.signals[~open_].T @ values[~open_])
        certain = CERTAIN * solved.level * inverse.norm(dim=1) <= 0.5 / BYTE * solved.span
        if not bool(certain.any()):
            return None
        sure = open_.nonzero()[certain, 0]
        share = ((values - black) / range_.where(range_ != 0, 1.0))[sure]
        values[sure] = black[sure] + range_[sure] * (BYTE * share).round().clamp(0, BYTE) / BYTE
        open_[sure] = False
    return values if solved.explained_by(values) else None
