"""Count the directions in which inputs can move without a trace in the equations that were solved.

Explaining an update is not determining the inputs: behind average pooling many images have the same gradient. The null
space of the equations A is probed: start from a random direction v and minimise ||A w|| by conjugate gradients on A'A.
They move w within the row space of A alone, so what remains is the part of v that A does not see. Of d unknowns with f
free directions, ||w||^2 / ||v||^2 tends to f / d, in each example of a batch by itself.

Small systems are decomposed instead, and their counts are exact. In a large one two probes overlook a single free
direction where both are nearly orthogonal to it: with ``SEEN`` in one case of four million.
"""

import math
from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor

from leakscope.equations.conjugate_gradients import Product, iterate

#: An example has no free direction once so few are left of its unknowns; see above for what this overlooks.
SEEN = 1e-3
#: A direction is free where moving the inputs along it by the whole range, root mean square, changes the update by less
#: than this share: inputs that are 70 dB off then leave 1e-6 of it, as exact ones do. With 1e-2 images of 115 dB behind
#: femnist-cnn were not certified.
INVISIBLE = 3e-3
#: Unknowns up to which the system is decomposed: a fraction of a second, and fewer products than a probe may take.
SMALL = 256

Change = Callable[[Tensor], float]


def count_free_directions(
    normal: Product,
    change: Change,
    shape: tuple[int, ...],
    like: Tensor,
    *,
    limit: int,
    precondition: Product | None = None,
) -> tuple[int | None, ...]:
    """Count the free directions of each example; None where ``limit`` products do not tell.

    ``normal`` multiplies a flat row of unknowns of ``shape`` (examples, ...) by A'A, ``precondition`` by an approximate
    inverse. ``change``: the relative change of the update by a row. Large counts are estimates, to a few per cent.

    >>> sees = torch.tensor([1.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    >>> change = lambda row: float((sees * row).norm())
    >>> count_free_directions(lambda row: sees**2 * row, change, (2, 2), sees, limit=50)
    (0, 1)
    """
    if math.prod(shape) <= SMALL:
        return _decomposed(normal, change, shape, like)
    counts: tuple[int | None, ...] = (0,) * shape[0]
    for seed in range(2):  # a second probe where the first found nothing
        counts = _probed(normal, change, shape, like, limit, precondition, seed)
        if any(count != 0 for count in counts):
            break
    return counts


def _probed(
    normal: Product,
    change: Change,
    shape: tuple[int, ...],
    like: Tensor,
    limit: int,
    precondition: Product | None,
    seed: int,
) -> tuple[int | None, ...]:
    draws = torch.Generator().manual_seed(seed)
    probe = torch.randn(math.prod(shape), generator=draws, dtype=torch.float64).to(like)
    length = probe.reshape(shape[0], -1).square().sum(1)
    unknowns = probe.numel() // shape[0]
    steps = islice(iterate(normal, -normal(probe), precondition), limit)
    left, ended = probe, False
    while not ended:
        some = list(islice(steps, 20))
        ended = len(some) < 20
        left = probe + some[-1][0] if some else left
        shares = unknowns * left.reshape(shape[0], -1).square().sum(1) / length
        if bool((shares <= SEEN).all()):
            return (0,) * shape[0]
        if change(_of_size_one(left)) <= INVISIBLE:
            if precondition is None:
                return _whole(shares)
            # What is left is free, but its length was changed on the way: it is not the share that counts. Without the
            # preconditioner the count takes longer.
            counts = _probed(normal, change, shape, like, 4 * limit, None, seed)
            return _whole(shares.clamp_max(unknowns)) if None in counts else counts
    return (None,) * shape[0]


def free_inputs_of_dense(signals: Tensor, inputs: Tensor) -> tuple[int, ...]:
    """Count the free directions of each of the ``inputs`` (n, d) of a dense layer with ``signals`` (n, units).

    The layer's gradient is signals' inputs: what no combination of units tells apart is free in all d directions.

    >>> inputs = torch.ones((3, 5), dtype=torch.float64)
    >>> free_inputs_of_dense(torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 2, 2]]).double(), inputs)
    (0, 5, 5)
    """
    vectors, sizes, _ = torch.linalg.svd(signals)
    sizes = torch.nn.functional.pad(sizes, (0, len(signals) - len(sizes)))
    gradient = float((signals.T @ inputs).norm().clamp_min(1e-300))
    # One example moved by the whole range changes the gradient by the size of a signal times the root of d.
    free = sizes * math.sqrt(inputs.shape[1]) / gradient <= INVISIBLE
    shares = vectors[:, free].square().sum(1)
    return tuple(0 if share <= SEEN else inputs.shape[1] for share in shares.tolist())


def _decomposed(normal: Product, change: Change, shape: tuple[int, ...], like: Tensor) -> tuple[int, ...]:
    unit = torch.eye(math.prod(shape), dtype=like.dtype, device=like.device)
    _, vectors = torch.linalg.eigh(torch.stack([normal(row) for row in unit]).double())
    free = [vector for vector in vectors.T if change(_of_size_one(vector.to(like))) <= INVISIBLE]
    if not free:
        return (0,) * shape[0]
    return _whole(torch.stack(free).reshape(len(free), shape[0], -1).square().sum((0, 2)))


def _of_size_one(row: Tensor) -> Tensor:
    return row / row.square().mean().sqrt()


def _whole(shares: Tensor) -> tuple[int, ...]:
    return tuple(0 if share <= SEEN else max(1, round(share)) for share in shares.tolist())
