"""Factor a convolution's weight gradient: what the layer received, and what came back to it, for the whole batch.

A convolution of stride 1 has for each offset o of its kernel the gradient G_o = D S_o X, with X (places, channels) its
input, D (channels, places) the derivative at its output, and S_o the known shift by o, which is zero outside of the
image. The shifts of one image generate all matrices, and only scalars commute with them: X and D are determined up to a
mixing of the images, if X has as many independent rows as there are places in the batch. The input's column at a corner
is a null vector of all shifts that leave the image; its neighbours follow by least squares. Inputs behind a ReLU are
not negative and have exact zeros, which undoes the mixing. One factor an image remains, which the layer in front tells.

No loss, label, head or activation behind the layer enters. This was not found in the literature; docs/strength.md cites
what is near to it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable

#: Singular values below this share of the largest are rounding of a float32 gradient.
ROUNDED = 1e-6
#: What the equations of the shifts, and negative entries behind a ReLU, may leave of a gradient that was rounded only.
CONSISTENT, NEGATIVE = 1e-3, 1e-3
#: Entries below these shares of an image's largest count as its zeros, in turn, while the images are separated.
ZEROS = (1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-5, 1e-5)
#: Values within so many times the median of what is negative are zeros.
BLURRED = 5.0

Place = tuple[int, int]


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvolutionFactors:
    """``inputs`` (images, channels, height, width) and ``signals`` at the output, up to one factor an image.

    The first is too large by what the second is too small. Three certificates: ``gap``, the ratio of singular values
    that tells the number of images from the null space of a corner; ``consistency``, what the least squares of the
    shifts leave; ``negative``, the most negative entry relative to the largest. Each is small where the factors hold.
    ``blur``: known noise as a share of the smallest singular value that counts; each may be as large.
    """

    inputs: Tensor
    signals: Tensor
    gap: float
    consistency: float
    negative: float
    blur: float = 0.0

    @property
    def holds(self) -> bool:
        blurred = max(1.0, self.blur / CONSISTENT)
        return (
            self.consistency < CONSISTENT * blurred
            and self.negative < NEGATIVE * blurred
            and self.gap < CONSISTENT * blurred
        )


def factor_convolution(
    gradient: Tensor, size: tuple[int, int], *, images: int | None = None, noise: float = 0.0
) -> ConvolutionFactors:
    """Factor the ``gradient`` (outputs, inputs, rows, columns) of a kernel that reads maps of ``size``.

    Its stride is 1, and its padding keeps the size: without padding the corner has no shift that leaves the image.

    ``images``: how many there are, where that is known; the rank of the gradient tells it otherwise. ``noise``: the
    standard deviation of the entries' errors, where they are larger than rounding to float32.
    NotApplicable where the gradient does not have the rank that determines the factors.

    >>> draws = torch.Generator().manual_seed(0)
    >>> x = torch.randn((2, 20, 3, 3), generator=draws, dtype=torch.float64).relu()
    >>> signal = torch.randn((2, 24, 3, 3), generator=draws, dtype=torch.float64)
    >>> found = factor_convolution(torch.nn.grad.conv2d_weight(x, (24, 20, 3, 3), signal, padding=1), (3, 3))
    >>> len(found.inputs), found.holds
    (2, True)
    """
    gradient = gradient.detach().double()
    height, width = size
    places = height * width
    stacked = gradient.permute(0, 2, 3, 1).flatten(0, 2)
    spectrum, loud = _spectrum(stacked, noise)
    least = max(ROUNDED * float(spectrum[0]), loud)
    count = _images(spectrum, places, gradient.shape[1], images, least)
    right = torch.linalg.svd(stacked, full_matrices=False)
    left = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
    # BatchNorm in train mode takes one direction of each batch from the signals.
    rank = min(count * places, _rank(left.S, least))
    basis, rows = left.U[:, :rank], right.Vh[: count * places]
    shifts = torch.einsum("cr,cdij,nd->ijrn", basis, gradient, rows)
    columns, gap, consistency = _grow(shifts, size, count)
    mixed = torch.linalg.solve(columns, rows).reshape(count, height, width, -1).permute(0, 3, 1, 2)
    signals = _signals(shifts, columns, basis, size, count)
    inputs, mixing = _separate(mixed, noisy=noise > 0)
    if int(torch.linalg.matrix_rank(mixing)) < count:
        raise NotApplicable("images are too much alike to be separated")
    # (D inverse(M)) (M X) = D X
    signals = torch.einsum("bchw,bk->kchw", signals, torch.linalg.inv(mixing))
    negative = float((-inputs.flatten(1).amin(1) / inputs.flatten(1).amax(1)).clamp_min(0).max())
    blur = loud / float(right.S[count * places - 1])
    return ConvolutionFactors(
        inputs=inputs, signals=signals, gap=gap, consistency=consistency, negative=negative, blur=blur
    )


def visible_rank(gradient: Tensor, noise: float) -> int:
    """Count the directions of a kernel's inputs that its gradient shows above noise and rounding."""
    spectrum, loud = _spectrum(gradient.detach().double().permute(0, 2, 3, 1).flatten(0, 2), noise)
    return _rank(spectrum, max(ROUNDED * float(spectrum[0]), loud))


def _spectrum(stacked: Tensor, noise: float) -> tuple[Tensor, float]:
    """Return the singular values of a gradient, and the largest one that its noise has by itself."""
    # Squares tell the rank in a tenth of the time, so that refusals cost little.
    spectrum = torch.linalg.eigvalsh(stacked.T @ stacked).flip(0).clamp_min(0).sqrt()
    return spectrum, noise * (len(stacked) ** 0.5 + stacked.shape[1] ** 0.5)


def _rank(spectrum: Tensor, least: float) -> int:
    return int(((spectrum > least) & (spectrum > 0)).sum())


def _images(spectrum: Tensor, places: int, channels: int, images: int | None, least: float) -> int:
    rank = _rank(spectrum, least)
    count = images or round(rank / places)
    if not count or count * places > channels:
        raise NotApplicable(f"{count or 1} images of {places} places do not fit into {channels} channels")
    if rank < count * places:
        raise NotApplicable(f"the inputs have rank {rank}, not one for each of {count} x {places} places")
    if count * places < len(spectrum) and spectrum[count * places] > 30 * least:
        raise NotApplicable(f"the gradient has a higher rank than {count} images of {places} places give")
    return count


def _readers(place: Place, kernel: tuple[int, ...], size: Place) -> list[tuple[Place, Place | None]]:
    """List, for each offset of the kernel, the output that reads an input's place there; None outside of the map."""
    found: list[tuple[Place, Place | None]] = []
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            output = place[0] - row + kernel[0] // 2, place[1] - column + kernel[1] // 2
            inside = 0 <= output[0] < size[0] and 0 <= output[1] < size[1]
            found.append(((row, column), output if inside else None))
    return found


def _grow(shifts: Tensor, size: Place, count: int) -> tuple[Tensor, float, float]:
    """Find the inputs' columns (places of the batch, the same) from one corner on, diagonal by diagonal."""
    kernel = tuple(shifts.shape[:2])
    corner = _readers((0, 0), kernel, size)
    null = torch.cat([shifts[offset] for offset, output in corner if output is None])
    spectrum = torch.linalg.svd(null)
    values = F.pad(spectrum.S, (0, null.shape[1] - len(spectrum.S)))
    gap = float(values[-count] / values[-count - 1].clamp_min(1e-300)) if count < len(values) else 0.0
    found = {(0, 0): spectrum.Vh[-count:].T}
    signals: dict[Place, list[Tensor]] = defaultdict(list)
    worst = 0.0
    for diagonal in range(size[0] + size[1] - 1):
        ring = [(row, diagonal - row) for row in range(size[0]) if 0 <= diagonal - row < size[1]]
        for place in ring if diagonal else ():
            known = [
                (shifts[offset], None if output is None else torch.stack(signals[output]).mean(0))
                for offset, output in _readers(place, kernel, size)
                if output is None or output in signals
            ]
            matrix = torch.cat([shift for shift, _ in known])
            wanted = torch.cat([shift.new_zeros(len(shift), count) if s is None else s for shift, s in known])
            found[place] = torch.linalg.lstsq(matrix, wanted, driver="gelsd").solution
            left = (matrix @ found[place] - wanted).norm() / wanted.norm().clamp_min(1e-300)
            worst = max(worst, float(left))
        for place in ring:
            for offset, output in _readers(place, kernel, size):
                if output is not None:
                    signals[output].append(shifts[offset] @ found[place])
    columns = torch.stack([found[row, column] for row in range(size[0]) for column in range(size[1])], 2)
    return columns.reshape(count * size[0] * size[1], -1), gap, worst


def _signals(shifts: Tensor, columns: Tensor, basis: Tensor, size: Place, count: int) -> Tensor:
    """Return the signals (images, channels, rows, columns): each output's, as the mean of what its inputs say."""
    by_place = columns.reshape(-1, count, *size)
    total = basis.new_zeros(basis.shape[1], count, *size)
    readers = basis.new_zeros(size)
    for row in range(size[0]):
        for column in range(size[1]):
            for offset, output in _readers((row, column), tuple(shifts.shape[:2]), size):
                if output is not None:
                    total[:, :, output[0], output[1]] += shifts[offset] @ by_place[:, :, row, column]
                    readers[output] += 1
    return torch.einsum("cr,rbhw->bchw", basis, total / readers)


def _separate(mixed: Tensor, *, noisy: bool) -> tuple[Tensor, Tensor]:
    """Return images that are not negative, and the matrix that makes them of the mixed ones.

    Units that one image alone switches on are the extreme rays of all units' values: successive projections find them.
    Each image is then the null vector of its own zeros; zeros and vector are refined in turn.
    """
    count = len(mixed)
    flat = mixed.flatten(1)
    u, s, rows = torch.linalg.svd(flat, full_matrices=False)
    scale = flat.shape[1] ** 0.5
    rows, back = rows * scale, (u / s).T * scale
    own = _null_vectors(rows, _extreme_rays(rows, count), noisy=noisy) if count > 1 else rows.new_ones(1, 1)
    matrix = own @ back
    values = matrix @ flat
    sign = torch.where(values.mean(1) < 0, -1.0, 1.0).to(values)[:, None]
    return (sign * values).reshape(mixed.shape), sign * matrix


def _extreme_rays(rows: Tensor, count: int) -> Tensor:
    sizes = rows.norm(dim=0)
    loud = rows[:, sizes > 1e-2 * sizes.max()]
    # A functional that is positive on all of them: they lie in one half-space, for nothing is negative.
    inside = loud.mean(1)
    for _ in range(300):
        outside = inside @ loud <= 1e-3 * (inside @ loud).abs().mean()
        if not bool(outside.any()):
            break
        inside = inside + 0.1 * F.normalize(loud[:, outside], dim=0).mean(1) * inside.norm()
    height = inside @ loud
    kept = height > 1e-6 * height.max()
    points = loud[:, kept] / height[kept]
    left, chosen = points.clone(), list[int]()
    for _ in range(count):
        chosen.append(int(left.norm(dim=0).argmax()))
        direction = F.normalize(left[:, chosen[-1]], dim=0)
        left = left - direction[:, None] * (direction @ left)
    return F.normalize(torch.linalg.pinv(points[:, chosen]), dim=1)


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
