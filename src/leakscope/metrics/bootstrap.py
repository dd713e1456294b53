"""Percentile bootstrap intervals: how far a mean over few examples can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from leakscope.contracts.errors import UserError


def interval(
    values: Sequence[float] | np.ndarray | Tensor,
    statistic: Literal["mean", "median"] = "mean",
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """The interval that holds the statistic in a share ``level`` of resamples; NaN values are left out.

    One value gives (value, value), none gives (nan, nan).

    >>> interval([20.0])
    (20.0, 20.0)
    >>> interval([1.0, 2.0, 3.0, 4.0, float("nan")])
    (1.5, 3.5)
    """
    if statistic not in ("mean", "median"):
        raise UserError(f"statistic: expected 'mean' or 'median', got {statistic!r}")
    if not 0 < level < 1 or resamples < 1:
        raise UserError(f"expected 0 < level < 1 and resamples >= 1, got {level} and {resamples}")
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=float).ravel()
    array = array[~np.isnan(array)]
    if len(array) < 2:
        only = float(array[0]) if len(array) else float("nan")
        return only, only
    rows = np.random.default_rng(seed).integers(0, len(array), (resamples, len(array)))
    replicates = getattr(np, statistic)(array[rows], axis=1)
    # No interpolation: between two infinite values (PSNR of equal pictures) it would give NaN.
    edges = np.quantile(replicates, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return float(edges[0]), float(edges[1])
