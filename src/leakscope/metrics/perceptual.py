"""The Unreasonable Effectiveness of Deep Features as a Perceptual Metric (Zhang et al., 2018): LPIPS.

Version 0.1, five convolution stages of AlexNet: each stage's output is scaled to unit length over channels, the squared
difference of two pictures is weighted by the calibrated head, averaged over space and summed over stages. The weights
are read from an ``.npz`` file with the arrays conv0_w, conv0_b, ..., lin0, ..., lin4.
"""

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from leakscope.contracts.checks import BYTES, brief
from leakscope.contracts.errors import UserError
from leakscope.metrics.image import check_same_shape

FILE_NAME = "lpips_alex_v0.1.npz"
NO_WEIGHTS = f"no LPIPS weights: set LEAKSCOPE_DATA to a folder with {FILE_NAME}, or pass its path"
SMALLEST = 32
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_STRIDE_PADDING = ((4, 2), (1, 2), (1, 1), (1, 1), (1, 1))
_POOLED = (1, 2)
_CHUNK = 32


@dataclass(frozen=True, eq=False, repr=False)
class Lpips:
    """The measure with its weights; call it with originals and reconstructions (B, C, H, W) in unit space.

    >>> Lpips.reason((3, 16, 16))
    'LPIPS needs pictures of at least 32 pixels a side, got 16x16'
    """

    weights: Mapping[str, Tensor]

    @staticmethod
    def reason(shape: tuple[int, ...]) -> str | None:
        """Why LPIPS cannot be computed for examples of this shape, or None if it can."""
        if len(shape) != 3:
            return f"LPIPS is for pictures (C, H, W), got shape {tuple(shape)}"
        channels, height, width = shape
        if channels not in (1, 3):
            return f"LPIPS is for one or three channels, got {channels}"
        if min(height, width) < SMALLEST:
            return f"LPIPS needs pictures of at least {SMALLEST} pixels a side, got {height}x{width}"
        return None

    def __call__(self, original: Tensor, reconstruction: Tensor) -> Tensor:
        """The distance of each pair (B,), NaN where there is a :meth:`reason`; one channel becomes three."""
        check_same_shape(original, reconstruction)
        if self.reason(tuple(original.shape[1:])) is not None:
            return torch.full((len(original),), torch.nan, dtype=torch.float64, device=original.device)
        with torch.no_grad():
            parts = list(map(self._distance, original.split(_CHUNK), reconstruction.split(_CHUNK)))
        return torch.cat(parts) if parts else original.new_zeros(0, dtype=torch.float64)

    def _distance(self, a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(len(a), dtype=torch.float64, device=a.device)
        for stage, (feature_a, feature_b) in enumerate(zip(self.stages(a), self.stages(b), strict=True)):
            head = self.weights[f"lin{stage}"].to(a.device).reshape(1, -1, 1, 1)
            difference = (_unit_length(feature_a) - _unit_length(feature_b)).square()
            total += (difference * head).sum(dim=1).mean(dim=(1, 2)).double()
        return total

    def stages(self, pictures: Tensor) -> list[Tensor]:
        x = pictures.detach().float().expand(-1, 3, -1, -1) * 2 - 1
        shift, scale = (torch.tensor(triple, device=x.device).reshape(1, 3, 1, 1) for triple in (_SHIFT, _SCALE))
        x = (x - shift) / scale
        outputs = []
        for stage, (stride, padding) in enumerate(_STRIDE_PADDING):
            if stage in _POOLED:
                x = functional.max_pool2d(x, kernel_size=3, stride=2)
            weight, bias = (self.weights[f"conv{stage}_{part}"].to(x.device) for part in "wb")
            x = functional.conv2d(x, weight, bias, stride=stride, padding=padding).relu()
            outputs.append(x)
        return outputs


def find_lpips() -> Path | None:
    """The weights in the folder that LEAKSCOPE_DATA names, or None."""
    folder = os.environ.get("LEAKSCOPE_DATA")
    return Path(folder, FILE_NAME) if folder and Path(folder, FILE_NAME).is_file() else None


def load_lpips(path: str | os.PathLike[str] | None = None) -> Lpips:
    """Read the weights from ``path`` or from the folder LEAKSCOPE_DATA names; ValueError if there are none.

    >>> load_lpips("nowhere.npz")
    Traceback (most recent call last):
    leakscope.contracts.errors.UserError: nowhere.npz: no such file. LPIPS weights are a file lpips_alex_v0.1.npz.
    """
    source = find_lpips() if path is None else Path(path)
    if source is None:
        raise UserError(NO_WEIGHTS)
    if not source.is_file():
        raise UserError(f"{source}: no such file. LPIPS weights are a file {FILE_NAME}.")
    names = [f"conv{k}_{part}" for k in range(5) for part in "wb"] + [f"lin{k}" for k in range(5)]
    try:
        with zipfile.ZipFile(source) as archive:
            BYTES.check("its arrays", sum(archive.getinfo(f"{name}.npy").file_size for name in names))
        with np.load(source, allow_pickle=False) as arrays:
            weights = {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in names}
        lpips = Lpips(weights)
        lpips(torch.zeros(1, 3, 64, 64), torch.ones(1, 3, 64, 64))  # shapes that do not fit are told now
    except Exception as error:
        # NumPy and zipfile have many ways to stumble over a damaged file, a header being Python source among them.
        raise UserError(f"{source}: not a file of LPIPS weights ({brief(str(error))})") from error
    return lpips


def _unit_length(features: Tensor) -> Tensor:
    return features / (features.square().sum(dim=1, keepdim=True).sqrt() + 1e-10)
