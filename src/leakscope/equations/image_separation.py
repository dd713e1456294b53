"""Tell the images of a batch apart that are known up to a mixture: what is behind a ReLU has exact zeros.

Images are not negative, and observed are mixtures of them. A combination of the mixtures that gives one image is zero
wherever this image is, and no other combination is zero so often.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable

#: Entries below these shares of an image's largest count as its zeros, in turn, while the images are separated.
ZEROS = (1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-5, 1e-5)
#: Share of the largest range within which values of a channel are the same but for rounding.
SAME = 1e-4
#: Places whose values are compared with each: more have no new zeros.
NEIGHBOURS = 8
#: Random starts an image from which sparse directions are found, the smoothing of absolute values in turn, and rounds.
STARTS, SMOOTHINGS, DESCENTS = 8, (1.0, 1e-1, 1e-2, 1e-3), 5
#: Share of the loudest unit below which a unit is left out of linear programmes, how many of these are run for each
#: image, and how far the edge of another image is from those that were found.
LOUD, PROGRAMMES, NEW = 1e-2, 4, 1e-4
#: Share of the largest value that one image may have below zero (what is left of another one leaves a tenth), and the
#: share of its units that are zero at least: edges that are no images are zero at a few units only.
MIXED, SPARSE = 1e-2, 0.1
#: Cosine above which two directions are of one image.
ALIKE = 0.9
#: Values within so many times the median of what is negative are zeros.
BLURRED = 5.0


def separate_images(mixed: Tensor, *, noisy: bool) -> tuple[Tensor, Tensor]:
    """Return images that are not negative, and the matrix that makes them of the mixed ones.

    Linear programmes find the combinations that are nowhere negative and zero most often. Each image is then the null
    vector of its own zeros; zeros and vector are refined in turn.
    """
    count = len(mixed)
    flat = mixed.flatten(1)
    u, s, rows = torch.linalg.svd(flat, full_matrices=False)
    scale = flat.shape[1] ** 0.5
    rows, back = rows * scale, (u / s).T * scale
    own = _edges(rows, noisy=noisy) if count > 1 else rows.new_ones(1, 1)
    matrix = own @ back
    values = matrix @ flat
    sign = torch.where(values.mean(1) < 0, -1.0, 1.0).to(values)[:, None]
    return (sign * values).reshape(mixed.shape), sign * matrix


def separate_shifted_images(mixed: Tensor, constants: Tensor, *, noisy: bool) -> tuple[Tensor, Tensor]:
    """Return the same where one number a channel is not known, of which all places have ``constants`` (images) times.

    Differences between the places of a channel are free of it, and zero wherever both values are. Each channel is then
    moved until its zeros are zero.
    """
    flat = mixed.flatten(2)
    apart = [flat - flat.roll(step, 2) for step in range(1, min(flat.shape[2], NEIGHBOURS + 1))]
    u, s, rows = torch.linalg.svd(torch.cat(apart, 2).flatten(1), full_matrices=False)
    scale = rows.shape[1] ** 0.5
    rows, back = rows * scale, (u / s).T * scale
    matrix = _null_vectors(rows, _sparse_directions(rows), noisy=noisy) @ back
    matrix = matrix / (matrix @ constants)[:, None]
    values = torch.einsum("kb,bcp->kcp", matrix, flat)
    # What is smallest behind a ReLU is so at many places, what is largest at one.
    often = [int(near.sum()) for near in (_near_smallest(values), _near_smallest(-values))]
    sign = 1.0 if often[0] >= often[1] else -1.0
    values = sign * values
    zeros = torch.where(_near_smallest(values), values, torch.nan).transpose(0, 1).flatten(1).nanmedian(1).values
    values = values - zeros[:, None]
    return values.reshape(mixed.shape), sign * matrix


def _near_smallest(values: Tensor) -> Tensor:
    """Mark what is as small as the smallest value of its channel (images, channels, places).

    >>> _near_smallest(torch.tensor([[[3.0, 3.00005, 3.001, 4.0]]])).tolist()
    [[[True, True, False, False]]]
    """
    above = values - values.amin((0, 2), keepdim=True)
    return above < SAME * above.max()


def _sparse_directions(rows: Tensor) -> Tensor:
    """Return as many directions as there are rows that are zero on many columns: least sums of absolute values."""
    count = len(rows)
    if count == 1:
        return rows.new_ones(1, 1)
    draws = torch.Generator().manual_seed(0)
    found = F.normalize(torch.randn((STARTS * count, count), generator=draws, dtype=torch.float64), dim=1).to(rows)
    for smooth in SMOOTHINGS:
        for _ in range(DESCENTS):
            weights = ((found @ rows).square() + smooth**2).rsqrt()
            found = torch.stack([torch.linalg.eigh(rows * weight @ rows.T)[1][:, 0] for weight in weights])
    kept: list[Tensor] = []
    for direction in found[(found @ rows).abs().sum(1).argsort()]:
        if all(float((direction @ other).abs()) < ALIKE for other in kept):
            kept.append(direction)
        if len(kept) == count:
            return torch.stack(kept)
    raise NotApplicable("images are too much alike to be separated")


def _edges(rows: Tensor, *, noisy: bool) -> Tensor:
    """Return the combination of ``rows`` that gives each image.

    Combinations that are nowhere negative form a cone, and images are edges of it. A linear programme leads to an edge;
    to a new one, where its objective is what the edges before leave open. The best ones count.
    """
    count, draws = len(rows), torch.Generator().manual_seed(0)
    sizes, middle = rows.norm(dim=0), rows.mean(1, keepdim=True).T.cpu().numpy()
    loud = rows[:, sizes > LOUD * sizes.max()].T.cpu().numpy()
    found, doubtful = rows.new_zeros(0, count), list[tuple[float, Tensor]]()
    for _ in range(PROGRAMMES * count):
        objective = _beyond(found, torch.randn(count, generator=draws, dtype=torch.float64).to(rows))
        limits = {"A_ub": -loud, "b_ub": np.zeros(len(loud)), "A_eq": middle, "b_eq": [1.0], "bounds": (None, None)}
        programme = linprog(-objective.cpu().numpy(), **limits, method="highs")
        if programme.status:
            continue
        edge = _null_vectors(rows, F.normalize(torch.from_numpy(programme.x).to(rows), dim=0)[None], noisy=noisy)[0]
        values = edge @ rows / (edge @ rows).abs().max()
        zeros = float((values.abs() < ZEROS[0]).double().mean())
        if float(-values.min()) > MIXED or zeros < SPARSE:
            doubtful.append((zeros, edge))
        elif float(_beyond(found, edge).norm()) > NEW:
            found = torch.cat([found, edge[None]])
        if len(found) == count:
            return found
    for _, edge in sorted(doubtful, key=lambda pair: -pair[0]):
        if len(found) < count and float(_beyond(found, edge).norm()) > NEW:
            found = torch.cat([found, edge[None]])
    if len(found) < count:
        raise NotApplicable("images that are not negative, and not too much alike, are not what was mixed")
    return found


def _beyond(directions: Tensor, vector: Tensor) -> Tensor:
    """Return what of a vector is orthogonal to all directions."""
    span = torch.linalg.qr(directions.T).Q
    return vector - span @ (span.T @ vector)


def _null_vectors(rows: Tensor, own: Tensor, *, noisy: bool) -> Tensor:
    for share in ZEROS:
        values = own @ rows
        values = values / values.abs().amax(1, keepdim=True)
        refined = []
        for vector, value in zip(own, values, strict=True):
            # Nothing is negative: what is shows how large errors are, where noise is known to be the reason.
            below = value[value < 0]
            errors = BLURRED * float(below.abs().median()) if noisy and len(below) else 0.0
            zeros = rows[:, value.abs() < max(share, min(errors, ZEROS[0]))]
            null = torch.linalg.eigh(zeros @ zeros.T)[1][:, 0]
            null = null * torch.sign(null @ vector)
            refined.append(null if zeros.shape[1] >= len(rows) and float(null @ vector) > 0.9 else vector)
        own = torch.stack(refined)
    return own
