"""The one table of measures, from which policy, verdict, console and pages are made; and intervals of means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal

import numpy as np
from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import InputSpace
from leakscope.contracts.task import Task
from leakscope.metrics import image

Better = Literal["higher", "lower"]
NOT_TOLD = "not measured, and the job does not say why"
PSNR_CAP = 200.0


@dataclass(frozen=True)
class Measure:
    """A number of one example; ``better`` is the direction in which the adversary gains.

    ``key`` is its name in an example's record, ``digits`` how many a table shows after the point (None: a share).
    ``of`` is what it compares: inputs, or targets whose guesses are right or wrong ("labels") or near or far
    ("targets"). ``limit`` is the key of the policy that bounds it, of every example or over a setting (``per``).
    ``compute(originals, reconstructions)`` gives its values (B,) from inputs in unit space, both (B, ...).
    ``otherwise`` is why it is missing where a job does not say.
    """

    name: str
    label: str
    better: Better
    span: str
    meaning: str
    _: KW_ONLY
    key: str = ""
    compute: Callable[[Tensor, Tensor], Tensor] | None = None
    unit: str = ""
    digits: int | None = 3
    of: Literal["inputs", "labels", "targets"] = "inputs"
    limit: str | None = None
    per: Literal["example", "setting"] = "example"
    otherwise: str = NOT_TOLD

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key or self.name)

    @property
    def title(self) -> str:
        return f"{self.label}, {self.unit}" if self.unit else self.label

    def applies(self, inputs: InputSpace, task: Task) -> bool:
        """Whether it means something for examples that live here and a client that minimises this."""
        if self.of == "inputs":
            return self.name in inputs.measures
        return task.discrete if self.of == "labels" else not task.discrete


_NO_GUESS = "the attack guesses no labels"
_CLOSE, _SHARE = "0 and up, lower = closer", "share from 0 to 100 %"
_ALL = (
    Measure(
        *("mse", "MSE", "lower", "0 to 1, lower = closer", "Mean squared error in unit space [0, 1]."),
        compute=image.mse,
        digits=4,
    ),
    Measure(
        *("rmse", "RMSE", "lower", "0 to 1, lower = closer", "Root of the mean squared error."),
        compute=image.rmse,
        digits=4,
    ),
    Measure(
        *("rmse_maxnorm", "RMSE, max-norm", "lower", "0 to 1"),
        "RMSE after the error is divided by its largest entry, for comparison with published tables: it tells the "
        "error's shape, not its size.",
        compute=image.rmse_maxnorm,
        digits=4,
    ),
    Measure(
        *("psnr", "PSNR", "higher", "0 dB and up, higher = closer"),
        "Peak signal-to-noise ratio, −10·log₁₀ of the mean squared error, for each example in unit space [0, 1]. About "
        "20 dB is recognisable, above 30 dB nearly identical; 200 dB stands for an exact copy.",
        compute=partial(image.psnr, cap=PSNR_CAP),
        unit="dB",
        digits=1,
        limit="max_psnr",
    ),
    Measure(
        *("ssim", "SSIM", "higher", "−1 to 1, higher = closer"),
        "Structural similarity: luminance, contrast and structure in local windows. Images only.",
        compute=image.ssim,
        limit="max_ssim",
    ),
    Measure("lpips", "LPIPS", "lower", _CLOSE, "Perceptual distance between deep features; needs a network for it."),
    Measure(
        *("label_accuracy", "Labels", "higher", _SHARE),
        "How many labels the attack named correctly, where it names labels.",
        key="label_correct",
        digits=None,
        of="labels",
        limit="max_label_accuracy",
        per="setting",
        otherwise=_NO_GUESS,
    ),
    Measure(
        *("target_error", "Target error", "lower", _CLOSE),
        "Root-mean-square distance of the recovered targets from the true ones, in their own units.",
        of="targets",
        otherwise=_NO_GUESS,
    ),
    Measure(
        *("identification", "Identified", "higher", _SHARE),
        "Whether the reconstruction is nearer to its own original than to every other candidate of the data; the "
        "chance of a blind guess is stated beside it.",
        key="identified",
        digits=None,
        limit="max_identification",
        per="setting",
    ),
)
#: Measures by name; add your own here, and name it in the ``measures`` of the input spaces it is for.
MEASURES: dict[str, Measure] = {measure.name: measure for measure in _ALL}


def interval(
    values: Sequence[float] | np.ndarray | Tensor,
    statistic: Literal["mean", "median"] = "mean",
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the statistic, which a share ``level`` of resamples keeps to.

    NaN values are left out. One value gives (value, value), none gives (nan, nan).

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
