"""The rank of the Jacobian of the gradient with respect to the inputs: whether small changes of them show in it.

At a generic point, full rank means that the inputs are determined locally (up to the order of the examples); less means
that there are directions in which they can change without a trace, whatever the attack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from leakscope.matching import Victim
from leakscope.observation import Observation, ValueRange

#: Above these the Jacobian is not made: unknowns, and entries of the matrix (half a gigabyte in float64).
MAX_UNKNOWNS = 1024
MAX_ENTRIES = 2**26


@dataclass(frozen=True)
class JacobianRank:
    """What the singular values of the Jacobian say; all None, and a reason, where it was not computed.

    ``tolerance`` is the singular value below which a direction counts as lost to rounding; ``condition`` is infinite
    where the rank is not full.
    """

    unknowns: int
    rank: int | None = None
    smallest: float | None = None
    largest: float | None = None
    condition: float | None = None
    tolerance: float | None = None
    reason: str | None = None

    @property
    def full(self) -> bool | None:
        return None if self.rank is None else self.rank == self.unknowns


def jacobian_rank(
    model: nn.Module,
    input_shape: tuple[int, ...],
    batch: int,
    num_classes: int,
    *,
    value_range: ValueRange | None = None,
    seed: int = 0,
) -> JacobianRank:
    """The rank at a random batch in the box ([0, 1] without one) with known labels 0, 1, 2, ...; float64.

    A single linear layer of three classes has 3 x 2 weights and so shows two inputs of one example:

    >>> jacobian_rank(nn.Linear(2, 3), (2,), batch=1, num_classes=3).rank
    2
    """
    unknowns = batch * math.prod(input_shape)
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if unknowns > MAX_UNKNOWNS:
        return JacobianRank(unknowns, reason=f"{unknowns} unknowns; the rank is computed up to {MAX_UNKNOWNS}")
    if unknowns * entries > MAX_ENTRIES:
        return JacobianRank(
            unknowns,
            reason=f"the Jacobian has {unknowns} x {entries} entries; it is made up to {MAX_ENTRIES} in all",
        )
    try:
        matrix = _jacobian(model, input_shape, batch, num_classes, value_range or ValueRange(), seed)
    except RuntimeError as error:  # an operation without a forward derivative, or one that vmap does not know
        reason = str(error).strip().splitlines()[0]
        return JacobianRank(unknowns, reason=f"the model cannot be differentiated twice in forward mode: {reason}")
    if not bool(torch.isfinite(matrix).all()):
        return JacobianRank(unknowns, reason="the Jacobian has NaN or infinite entries at this input")
    return rank_of(matrix)


def rank_of(matrix: Tensor) -> JacobianRank:
    """Rank and singular values of a matrix with one row an unknown and one column an observed entry.

    >>> found = rank_of(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]]))
    >>> found.rank, found.smallest, found.largest, found.condition, found.full
    (2, 0.5, 3.0, 6.0, True)
    """
    unknowns, entries = matrix.shape
    if entries > unknowns:
        # The triangle of a QR decomposition has the same singular values and is much smaller.
        matrix = torch.linalg.qr(matrix.T, mode="r").R
    values = torch.linalg.svdvals(matrix)
    largest = float(values[0])
    tolerance = max(unknowns, entries) * torch.finfo(matrix.dtype).eps * largest
    rank = int((values > tolerance).sum())
    # With fewer entries than unknowns the remaining singular values are zero.
    smallest = float(values[-1]) if entries >= unknowns else 0.0
    condition = largest / smallest if rank == unknowns else math.inf
    return JacobianRank(unknowns, rank, smallest, largest, condition, tolerance)


def _jacobian(model: nn.Module, shape: tuple[int, ...], batch: int, classes: int, box: ValueRange, seed: int) -> Tensor:
    """One row an input value, one column an entry of the gradient."""
    update = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    # The observation copies the model, so nothing below can reach the caller's.
    observation = Observation.from_update(model, update, input_shape=shape, num_classes=classes, num_examples=batch).to(
        device="cpu", dtype=torch.float64
    )
    victim = Victim.of(observation)
    generator = torch.Generator().manual_seed(seed)
    x = box.from_unit(torch.rand((batch, *shape), generator=generator, dtype=torch.float64))
    labels = torch.arange(batch) % classes

    def gradient(flat: Tensor) -> Tensor:
        found, _ = victim.gradient(victim.known.weights, victim.known.fixed, flat.reshape(x.shape), labels)
        return torch.cat([value.flatten() for value in found.values()])

    def row(direction: Tensor) -> Tensor:
        return jvp(gradient, (x.flatten(),), (direction,))[1]

    # The fused kernels of attention have no second derivative; the plain one has.
    with sdpa_kernel(SDPBackend.MATH):
        return vmap(row, chunk_size=32)(torch.eye(x.numel(), dtype=torch.float64)).detach()
