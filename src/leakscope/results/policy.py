"""From where on a reconstruction counts as a leak."""

from __future__ import annotations

from dataclasses import dataclass

from leakscope.contracts.settings import Described, setting


@dataclass(frozen=True, kw_only=True)
class Policy(Described):
    """Limits of the verdict; ``None`` switches one off. They are those that the table of measures names.

    >>> Policy().max_psnr, Policy().min_lift
    (20.0, 3.0)
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
