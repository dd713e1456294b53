"""The one table of measures, from which policy, verdict, console and pages are made; and intervals of means."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import InputSpace
from leakscope.contracts.tables import shipped_table
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


#: How the values of measures of inputs are computed; that of LPIPS needs a network.
_COMPUTED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{"mse": image.mse, "rmse": image.rmse, "rmse_maxnorm": image.rmse_maxnorm, "ssim": image.ssim},
    "psnr": partial(image.psnr, cap=PSNR_CAP),
}


def _measure(name: str, facts: dict[str, Any]) -> Measure:
    digits = facts.get("digits", 3)
    return Measure(
        **{**facts, "name": name, "compute": _COMPUTED.get(name), "digits": None if digits == "share" else digits}
    )


#: Measures by name; add your own here, and name it in the ``measures`` of the input spaces it is for.
MEASURES: dict[str, Measure] = {
    name: _measure(name, facts) for name, facts in shipped_table(__package__, "measures.toml").items()
}


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
