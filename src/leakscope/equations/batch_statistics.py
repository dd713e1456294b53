"""Solve for what convolutions read whose outputs a BatchNorm in train mode normalises.

With dy the derivative at BatchNorm's output, the derivative at the convolution's is, in each channel, kappa (dy - mean
dy - xhat dgamma / n): dgamma is observed, but kappa = gamma / sigma and xhat, the normalised outputs, depend on the
input that is looked for. Where xhat is known, the weight gradient is linear and homogeneous in the input and 1 / kappa
together: 1 / kappa is the null vector of a matrix with one row a channel, and the input follows. It gives the next
xhat. Only the share of dy that lies along xhat changes, so that this converges, from xhat = 0, by a factor of two to
four a round. The scale of the input is not determined: BatchNorm removes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.robust_solve import DEAD, RIDGE, agreement

#: Rounds for xhat, and what it may still move in the last: below the rounding of a float32 gradient.
ROUNDS, MOVED = 60, 1e-6
#: The same where gradients are noisy: the gain's then follows from xhat, which takes twice as many rounds.
MOVED_NOISY = 1e-5
#: Mixtures of the input channels that tell kappa: far more equations than it has unknowns, and far fewer products.
MIXTURES = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class NormalisedLayer:
    """A convolution with the BatchNorm behind it: ``signal`` is the derivative at the output of both.

    ``rows`` gives the matrix from a channel of what is read to the weight gradient, for a derivative at the output;
    ``forward`` the outputs for what is read. ``gradient``: the kernel's (outputs, offsets, inputs). ``noisy``: the
    gain's gradient says less than what it follows from.
    """

    signal: Tensor
    gradient: Tensor
    gain: Tensor
    gain_gradient: Tensor
    bias_gradient: Tensor
    eps: float
    noisy: bool = False
    rows: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor], Tensor]

    def derivative(self, normalised: Tensor) -> Tensor:
        """Return the derivative at the convolution's output, but for the factor of each channel."""
        places = self.signal.numel() / self.signal.shape[1]
        gain_gradient = (self.signal * normalised).sum((0, 2, 3)) if self.noisy else self.gain_gradient
        along = (gain_gradient / places).reshape(1, -1, 1, 1)
        return self.signal - self.signal.mean((0, 2, 3), keepdim=True) - normalised * along

    def normalise(self, value: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return the normalised outputs for what is read, and the factor of each channel's derivative."""
        out = self.forward(value)
        centred = out - out.mean((0, 2, 3), keepdim=True)
        deviation = (centred.square().mean((0, 2, 3), keepdim=True) + eps).sqrt().clamp_min(1e-300)
        return centred / deviation, self.gain.reshape(1, -1, 1, 1) / deviation

    def signals(self, value: Tensor, *, scaled: bool = True) -> Tensor:
        """Return the derivative at the convolution's output where it reads ``value``, whose scale may be unknown."""
        normalised, factor = self.normalise(value, self.eps if scaled else 0.0)
        return self.derivative(normalised) * factor

    def signal_above(self, value: Tensor, signals: Tensor) -> Tensor:
        """Return the derivative at the output of BatchNorm for one at the convolution's, which reads ``value``."""
        normalised, factor = self.normalise(value, self.eps)
        if not bool((factor != 0).all()):
            raise NotApplicable("BatchNorm multiplies some channels by zero")
        along = self.bias_gradient.reshape(1, -1, 1, 1) + normalised * self.gain_gradient.reshape(1, -1, 1, 1)
        return signals / factor + along * signals.shape[1] / signals.numel()


def solve_normalised(
    layers: Sequence[NormalisedLayer], reshape: Callable[[Tensor], Tensor], start: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Solve for what all ``layers`` read, but for its scale; return also the weights of each layer's channels.

    ``reshape`` makes a value of a solution (places, channels), ``start`` is one that is nearly right, if any is known.
    NotApplicable where rounds do not end.
    """
    sizes = [layer.gradient.flatten(1).norm(dim=1) for layer in layers]
    alive = torch.cat([(size > DEAD * size.max()).double() for size in sizes])
    wanted = [layer.gradient / size.clamp_min(1e-300)[:, None, None] for layer, size in zip(layers, sizes, strict=True)]
    signs = torch.cat([layer.gain.sign() for layer in layers])
    normalised = [torch.zeros_like(layer.signal) if start is None else layer.normalise(start)[0] for layer in layers]
    weights = alive
    for _ in range(ROUNDS):
        matrices = [_unit_rows(layer, x) for layer, x in zip(layers, normalised, strict=True)]
        solution = _null_solution(matrices, wanted, weights, signs)
        weights = agreement(torch.cat([_left(*one, solution) for one in zip(matrices, wanted, strict=True)])) * alive
        value = reshape(solution)
        new = [layer.normalise(value)[0] for layer in layers]
        moved = max(float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in zip(normalised, new, strict=True))
        normalised = new
        if moved < (MOVED_NOISY if any(layer.noisy for layer in layers) else MOVED):
            return value, weights.split([len(one) for one in sizes])
    raise NotApplicable(f"the statistics of the batch still move by {moved:.0e}")


def _unit_rows(layer: NormalisedLayer, normalised: Tensor) -> Tensor:
    """Return the matrix (outputs, offsets, places) for derivatives of norm one in each output channel."""
    derivative = layer.derivative(normalised)
    size = derivative.transpose(0, 1).flatten(1).norm(dim=1).clamp_min(1e-300)
    return layer.rows(derivative / size.reshape(1, -1, 1, 1)).reshape(*layer.gradient.shape[:2], -1)


def _left(matrix: Tensor, wanted: Tensor, solution: Tensor) -> Tensor:
    """Return what each channel leaves of its gradient, whatever its factor."""
    given = matrix @ solution
    factor = (given * wanted).sum((1, 2), keepdim=True)
    return (given - factor * wanted).flatten(1).norm(dim=1)


def _null_solution(matrices: list[Tensor], wanted: list[Tensor], weights: Tensor, signs: Tensor) -> Tensor:
    """Solve matrix x = factor wanted for x and one factor a channel, of norm one in all."""
    parts = weights.sqrt().split([len(one) for one in matrices])
    matrices = [part[:, None, None] * matrix for part, matrix in zip(parts, matrices, strict=True)]
    flat = torch.cat([matrix.flatten(0, 1) for matrix in matrices])
    normal = flat.T @ flat
    normal += RIDGE * normal.diagonal().mean() * torch.eye(len(normal)).to(normal)
    root, failed = torch.linalg.cholesky_ex(normal)
    if int(failed):
        raise NotApplicable("the equations do not have full rank")
    draws = torch.Generator().manual_seed(0)
    mixing = torch.randn((wanted[0].shape[2], MIXTURES), generator=draws, dtype=torch.float64).to(normal)
    products = [torch.einsum("ckn,cki->nci", *one) for one in zip(matrices, [w @ mixing for w in wanted], strict=True)]
    seen = torch.linalg.solve_triangular(root, torch.cat(products, 1).flatten(1), upper=False)
    seen = seen.reshape(len(normal), -1, MIXTURES).transpose(0, 1).flatten(1)
    # Mixtures have lengths of their own.
    lengths = torch.cat([(w @ mixing).flatten(1).norm(dim=1) for w in wanted])
    factors = torch.linalg.eigh(seen @ seen.T / lengths[:, None] / lengths)[1][:, -1] / lengths
    factors = factors * torch.sign((factors * signs).sum())
    right = torch.cat(
        [
            (f[:, None, None] * w).flatten(0, 1)
            for f, w in zip(factors.split([len(p) for p in parts]), wanted, strict=True)
        ]
    )
    return torch.cholesky_solve(flat.T @ right, root)
