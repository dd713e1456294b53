"""Factor a convolution's weight gradient: what the layer received, and what came back to it, for the whole batch.

A convolution of stride 1 has for each offset o of its kernel the gradient G_o = D S_o X, with X (places, channels) its
input, D (channels, places) the derivative at its output, and S_o the known shift by o, which is zero outside of the
image. The shifts of one image generate all matrices, and only scalars commute with them: X and D are determined up to a
mixing of the images, if X has as many independent rows as there are places in the batch. The input's column at a corner
is a null vector of all shifts that move it out of the outputs; its neighbours follow by least squares. Inputs behind a
ReLU are not negative and have exact zeros, which undoes the mixing. One factor an image remains, which the layer in
front tells.

Without padding every output is seen through every offset. Where derivatives sum to zero, as in front of BatchNorm in
train mode, G_o then hides one constant a channel: X has one visible row less, and zeros of the ReLU tell the constants.

No loss, label, head or activation behind the layer enters. This was not found in the literature; docs/strength.md cites
what is near to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.image_separation import separate_images, separate_shifted_images

#: Singular values below this share of the largest are rounding of a float32 gradient.
ROUNDED = 1e-6
#: What the equations of the shifts, and negative entries behind a ReLU, may leave of a gradient that was rounded only.
CONSISTENT, NEGATIVE = 1e-3, 1e-3

Place = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Which output a convolution of stride 1 gives for what it reads where: its ``kernel``, ``padding`` and sizes."""

    kernel: Place
    padding: Place
    size: Place

    @property
    def outputs(self) -> Place:
        rows, columns = (n + 2 * p - k + 1 for n, p, k in zip(self.size, self.padding, self.kernel, strict=True))
        return rows, columns

    @property
    def tells_places(self) -> bool:
        """Return whether shifts by the offsets tell all places of the inputs: without padding, or at a corner.

        >>> [Geometry(kernel=(3, 3), padding=(p, p), size=(4, 4)).tells_places for p in range(3)]
        [True, True, False]
        >>> Geometry(kernel=(3, 3), padding=(0, 1), size=(4, 4)).tells_places
        False
        """
        corner = all(0 < p < k - 1 for p, k in zip(self.padding, self.kernel, strict=True))
        return min(self.kernel) > 1 and min(self.outputs) > 0 and (corner or not any(self.padding))

    @property
    def offsets(self) -> list[Place]:
        return _grid(self.kernel)

    def output(self, place: Place, offset: Place) -> Place | None:
        """Return the output that reads a place at an offset of the kernel; None outside of the map.

        >>> valid = Geometry(kernel=(3, 3), padding=(0, 0), size=(5, 5))
        >>> valid.outputs, [offset for offset in valid.offsets if valid.output((0, 0), offset)]
        ((3, 3), [(0, 0)])
        """
        row, column = (at - o + p for at, o, p in zip(place, offset, self.padding, strict=True))
        inside = 0 <= row < self.outputs[0] and 0 <= column < self.outputs[1]
        return (row, column) if inside else None


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
    gradient: Tensor,
    size: Place,
    *,
    padding: Place | None = None,
    images: int | None = None,
    noise: float = 0.0,
) -> ConvolutionFactors:
    """Factor the ``gradient`` (outputs, inputs, rows, columns) of a kernel that reads maps of ``size`` with stride 1.

    ``padding``: zeros on each side; None keeps the size. ``images``: how many there are, where that is known; the rank
    of the gradient tells it otherwise. ``noise``: the standard deviation of the entries' errors, where they are larger
    than rounding to float32.
    NotApplicable where the gradient does not have the rank that determines the factors.

    >>> draws = torch.Generator().manual_seed(0)
    >>> x = torch.randn((2, 20, 3, 3), generator=draws, dtype=torch.float64).relu()
    >>> signal = torch.randn((2, 24, 3, 3), generator=draws, dtype=torch.float64)
    >>> found = factor_convolution(torch.nn.grad.conv2d_weight(x, (24, 20, 3, 3), signal, padding=1), (3, 3))
    >>> len(found.inputs), found.holds
    (2, True)
    """
    gradient = gradient.detach().double()
    kernel = gradient.shape[2], gradient.shape[3]
    geometry = Geometry(kernel=kernel, padding=padding or (kernel[0] // 2, kernel[1] // 2), size=size)
    if not geometry.tells_places:
        raise NotApplicable(f"a kernel {kernel} with padding {geometry.padding} does not tell the places of its inputs")
    most = most_images(geometry, gradient.shape[1], len(gradient))
    places = size[0] * size[1]
    stacked = gradient.permute(0, 2, 3, 1).flatten(0, 2)
    spectrum, loud = _spectrum(stacked, noise)
    least = max(ROUNDED * float(spectrum[0]), loud)
    count, known = _images(spectrum, geometry, most, images, least)
    right = torch.linalg.svd(stacked, full_matrices=False)
    left = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
    # BatchNorm in train mode takes one direction of each batch from the signals.
    rank = min(count * geometry.outputs[0] * geometry.outputs[1], _rank(left.S, least))
    basis, rows = left.U[:, :rank], right.Vh[:known]
    shifts = torch.einsum("cr,cdij,nd->ijrn", basis, gradient, rows)
    columns, gap, consistency = (_grow if any(geometry.padding) else _interpolate)(shifts, geometry, count)
    signals = torch.einsum("cr,rbhw->bchw", basis, _signals(shifts, columns, geometry))
    mixed = torch.linalg.lstsq(columns.flatten(1), rows, driver="gelsd").solution
    mixed = mixed.reshape(count, *size, -1).permute(0, 3, 1, 2)
    if known < count * places:
        constants = torch.linalg.svd(columns.flatten(1)).Vh[-1].reshape(count, places).mean(1)
        inputs, mixing = separate_shifted_images(mixed, constants, noisy=noise > 0)
    else:
        inputs, mixing = separate_images(mixed, noisy=noise > 0)
    if int(torch.linalg.matrix_rank(mixing)) < count:
        raise NotApplicable("images are too much alike to be separated")
    # (D inverse(M)) (M X) = D X
    signals = torch.einsum("bchw,bk->kchw", signals, torch.linalg.inv(mixing))
    negative = float((-inputs.flatten(1).amin(1) / inputs.flatten(1).amax(1)).clamp_min(0).max())
    blur = loud / float(right.S[known - 1])
    return ConvolutionFactors(
        inputs=inputs, signals=signals, gap=gap, consistency=consistency, negative=negative, blur=blur
    )


def most_images(geometry: Geometry, inputs: int, outputs: int) -> int:
    """Count the images whose factors a kernel between so many channels tells.

    They have no more places than there are input channels, and the shifts that leave the outputs at a corner leave one
    direction an image.

    >>> same = Geometry(kernel=(3, 3), padding=(1, 1), size=(4, 4))
    >>> most_images(same, 64, 12), most_images(same, 64, 11), most_images(same, 63, 12)
    (4, 3, 3)
    """
    if not geometry.tells_places:
        return 0
    places = geometry.size[0] * geometry.size[1]
    leaving = sum(geometry.output((0, 0), offset) is None for offset in geometry.offsets)
    return min(inputs // places, leaving * outputs // max(places - 1, 1))


def visible_rank(gradient: Tensor, noise: float) -> int:
    """Count the directions of a kernel's inputs that its gradient shows above noise and rounding."""
    spectrum, loud = _spectrum(gradient.detach().double().permute(0, 2, 3, 1).flatten(0, 2), noise)
    return _rank(spectrum, max(ROUNDED * float(spectrum[0]), loud))


def _spectrum(stacked: Tensor, noise: float) -> tuple[Tensor, float]:
    """Return the singular values of a gradient, and the largest one that its noise has by itself."""
    # Squares tell the rank in a tenth of the time, so that refusals cost little; those of the shorter side, for a first
    # linear layer may read ten thousand numbers with a hundred units.
    short = stacked if len(stacked) < stacked.shape[1] else stacked.T
    spectrum = torch.linalg.eigvalsh(short @ short.T).flip(0).clamp_min(0).sqrt()
    return spectrum, noise * (len(stacked) ** 0.5 + stacked.shape[1] ** 0.5)


def _rank(spectrum: Tensor, least: float) -> int:
    return int(((spectrum > least) & (spectrum > 0)).sum())


def _images(spectrum: Tensor, geometry: Geometry, most: int, images: int | None, least: float) -> tuple[int, int]:
    """Return the number of images, and of directions of their places that the gradient shows."""
    rank, places = _rank(spectrum, least), geometry.size[0] * geometry.size[1]
    count = images or round(rank / places)
    known = count * places
    if not 0 < count <= most:
        raise NotApplicable(f"its kernel and channels tell the places of {most} images, not of {count or 1}")
    if geometry.padding == (0, 0) and rank == known - 1:
        known -= 1
    if rank < known:
        raise NotApplicable(f"the inputs have rank {rank}, not one for each of {count} x {places} places")
    if known < len(spectrum) and spectrum[known] > 30 * least:
        raise NotApplicable(f"the gradient has a higher rank than {count} images of {places} places give")
    return count, known


def _grow(shifts: Tensor, geometry: Geometry, count: int) -> tuple[Tensor, float, float]:
    """Find the inputs' columns (directions, images, places) from one corner on, diagonal by diagonal."""
    height, width = geometry.size
    null = torch.cat([shifts[offset] for offset in geometry.offsets if geometry.output((0, 0), offset) is None])
    spectrum = torch.linalg.svd(null)
    values = F.pad(spectrum.S, (0, null.shape[1] - len(spectrum.S)))
    gap = float(values[-count] / values[-count - 1].clamp_min(1e-300)) if count < len(values) else 0.0
    found = {(0, 0): spectrum.Vh[-count:].T}
    signals: dict[Place, list[Tensor]] = defaultdict(list)
    worst = 0.0
    for diagonal in range(height + width - 1):
        ring = [(row, diagonal - row) for row in range(height) if 0 <= diagonal - row < width]
        for place in ring if diagonal else ():
            outputs = {offset: geometry.output(place, offset) for offset in geometry.offsets}
            known = [
                (shifts[offset], None if output is None else torch.stack(signals[output]).mean(0))
                for offset, output in outputs.items()
                if output is None or output in signals
            ]
            matrix = torch.cat([shift for shift, _ in known])
            wanted = torch.cat([shift.new_zeros(len(shift), count) if s is None else s for shift, s in known])
            found[place] = torch.linalg.lstsq(matrix, wanted, driver="gelsd").solution
            left = (matrix @ found[place] - wanted).norm() / wanted.norm().clamp_min(1e-300)
            worst = max(worst, float(left))
        for place in ring:
            for offset in geometry.offsets:
                if (output := geometry.output(place, offset)) is not None:
                    signals[output].append(shifts[offset] @ found[place])
    return torch.stack([found[place] for place in _grid(geometry.size)], 2), gap, worst


def _interpolate(shifts: Tensor, geometry: Geometry, count: int) -> tuple[Tensor, float, float]:
    """Find the same without padding: with y(z) the sum of y_p z^p, and s(z) that of signals, K_o y(z) = z^o s(z).

    At each of as many points z as there are places y(z) is a null vector. The degree of s tells the vectors' factors.
    """
    places, offsets = (torch.tensor(_grid(sides)).double() for sides in (geometry.size, geometry.kernel))
    # Half a step from one: there, both sides are zero where derivatives sum to zero.
    angles = 2 * torch.pi * (places + 0.5) / torch.tensor(geometry.size)
    flat = shifts.flatten(0, 1)
    squares = torch.einsum("orn,orm->nm", flat, flat)
    inputs, outputs, gap = list[Tensor](), list[Tensor](), 0.0
    for angle in angles:
        mean = torch.einsum("o,orn->rn", _turns(-offsets @ angle), flat.to(torch.complex128)) / len(offsets)
        null, share = _null_space(squares - len(offsets) * mean.mH @ mean, count)
        inputs.append(null)
        outputs.append(mean @ null)
        gap = max(gap, share)
    back = _turns(-places @ angles.T) / len(places)
    beyond = back[(places >= torch.tensor(geometry.outputs)).any(1)]
    ahead = torch.einsum("qz,zrb->qrzb", beyond, torch.stack(outputs)).flatten(2).flatten(0, 1)
    factors, share = _null_space(ahead.mH @ ahead, count)
    mixed = torch.einsum("pz,znb,zbk->pnk", back, torch.stack(inputs), factors.unflatten(0, (len(places), count)))
    # Real ones are among their mixtures by complex factors.
    u, s, _ = torch.linalg.svd(torch.cat([mixed.real, mixed.imag], 2).flatten(0, 1), full_matrices=False)
    columns = (u * s)[:, :count].unflatten(0, (len(places), -1)).permute(1, 2, 0)
    means = _signals(shifts, columns, geometry)
    left, whole = 0.0, 0.0
    for output, reading in _readings(shifts, columns, geometry):
        wanted = 0.0 if output is None else means[:, :, output[0], output[1]]
        left += float((reading - wanted).square().sum())
        whole += float(reading.square().sum())
    return columns, max(gap, share), (left / max(whole, 1e-300)) ** 0.5


def _grid(sides: Place) -> list[Place]:
    return [(row, column) for row in range(sides[0]) for column in range(sides[1])]


def _turns(angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles), angles)


def _null_space(squares: Tensor, count: int) -> tuple[Tensor, float]:
    """Return the null space of a matrix from its ``squares``, and the ratio of singular values behind it."""
    values, vectors = torch.linalg.eigh(squares)
    return vectors[:, :count], float(values[count - 1].clamp_min(0) / values[count].clamp_min(1e-300)) ** 0.5


def _readings(shifts: Tensor, columns: Tensor, geometry: Geometry) -> Iterator[tuple[Place | None, Tensor]]:
    """Yield what each offset says of the output that reads a place there; of None, outside of the map: zero."""
    for number, place in enumerate(_grid(geometry.size)):
        for offset in geometry.offsets:
            yield geometry.output(place, offset), shifts[offset] @ columns[:, :, number]


def _signals(shifts: Tensor, columns: Tensor, geometry: Geometry) -> Tensor:
    """Return the signals (directions, images, rows, columns): each output's, as the mean of what its inputs say."""
    total = shifts.new_zeros(shifts.shape[2], columns.shape[1], *geometry.outputs)
    readers = shifts.new_zeros(geometry.outputs)
    for output, reading in _readings(shifts, columns, geometry):
        if output is not None:
            total[:, :, output[0], output[1]] += reading
            readers[output] += 1
    return total / readers
