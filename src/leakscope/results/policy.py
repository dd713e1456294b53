"""Set from where on a reconstruction counts as a leak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from leakscope.contracts.settings import Described, setting

if TYPE_CHECKING:
    from leakscope.metrics import Measure


@dataclass(frozen=True)
class Limit:
    """Limit one measure of the table."""

    measure: Measure
    value: float

    def reached(self, value: float) -> bool:
        """Check whether a value of one example is as good for the adversary; NaN is not."""
        return value >= self.value if self.measure.better == "higher" else value <= self.value


@dataclass(frozen=True, kw_only=True)
class Policy(Described):
    """Set the limits of the verdict; ``None`` switches one off. They are those that the table of measures names.

    >>> [(limit.measure.name, limit.value) for limit in Policy(max_ssim=0.5).limits]
    [('psnr', 20.0), ('ssim', 0.5)]
    """

    max_psnr: float = setting(20.0, "a reconstruction this good leaks, if it also has the lift (dB)")
    min_lift: float = setting(
        3.0, "by how much it must exceed its zero-information control (dB); 0 or less: no control is needed"
    )
    max_ssim: float | None = setting(None, "any attempt with this SSIM leaks; no lift is asked for", ge=-1, le=1)
    max_identification: float | None = setting(None, "a larger share of identified examples leaks", ge=0, le=1)
    max_label_accuracy: float | None = setting(
        None, "a larger share of recovered labels leaks, where it also exceeds chance", ge=0, le=1
    )
    waive: tuple[str, ...] = setting((), "standard attacks that need not be run for a pass; the report names them")

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Return the limits that are set, in the order of the table of measures."""
        from leakscope.metrics import MEASURES  # needs torch, which a command line that only reads a policy does not

        named = [(measure, getattr(self, measure.limit)) for measure in MEASURES.values() if measure.limit is not None]
        return tuple(Limit(measure, value) for measure, value in named if value is not None)
