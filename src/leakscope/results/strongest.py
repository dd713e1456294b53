"""Find the strongest reconstruction of each example, and say when it is above the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from leakscope.metrics import MEASURES
from leakscope.results.baselines import Baselines
from leakscope.results.coverage import BEYOND_DOUBT
from leakscope.results.policy import Policy
from leakscope.results.reasons import InScenario
from leakscope.results.records import NAN, ExampleRecord, Row


@dataclass(frozen=True, kw_only=True)
class StrongestExample(ExampleRecord, InScenario):
    """Hold the best reconstruction of one example, over attacks and seeds, by PSNR."""

    values: Mapping[str, float] = field(repr=False)
    attack: str
    attack_name: str
    seed: int
    key: str
    protocol: str
    defense: str
    baseline_psnr: float = NAN
    leaks: bool = False

    @property
    def psnr(self) -> float:
        return self.value("psnr")

    @property
    def ssim(self) -> float:
        return self.value("ssim")

    @property
    def exposure(self) -> float:
        """Return PSNR for ordering; what was not measured comes last."""
        return -math.inf if math.isnan(self.psnr) else self.psnr

    @property
    def lift(self) -> float:
        """Return PSNR above the control of the same attack."""
        return self.psnr - self.baseline_psnr

    @property
    def identified(self) -> bool | None:
        value = self.value("identified")
        return None if math.isnan(value) else value > 0

    def __str__(self) -> str:
        return f"example {self.index} at {self.psnr:.1f} dB by {self.attack_name}, defence {self.defense}"


def above_policy(example: StrongestExample, policy: Policy) -> bool:
    """Check that PSNR reaches the limit, and that there is the lift, or a certificate, which needs no baseline."""
    lifted = policy.min_lift <= 0 or example.lift >= policy.min_lift
    return example.psnr >= policy.max_psnr and (example.certified or lifted)


def contradicts_its_certificate(example: StrongestExample, policy: Policy) -> bool:
    """Check for a certified example whose PSNR is low or unknown: one of the two is wrong."""
    return example.certified and not example.psnr >= min(policy.max_psnr, BEYOND_DOUBT)


def tried(row: Row, example: ExampleRecord, baselines: Baselines) -> StrongestExample:
    baseline = baselines.value(row.job.attack, example.index, MEASURES["psnr"])
    same = {name: getattr(row.job, name) for name in ("attack", "attack_name", "seed", "protocol", "defense")}
    return StrongestExample(key=row.key, baseline_psnr=baseline, **vars(example), **same)


def strongest(tries: list[StrongestExample], policy: Policy) -> StrongestExample:
    """Return the highest PSNR; first what is above the policy and certified, lest a strong prior hide a leak."""

    def order(example: StrongestExample) -> tuple[bool, bool, float]:
        above = above_policy(example, policy)
        return above, above and example.certified, example.exposure

    return max(tries, key=order)  # keeps the first of equals, so the order of the plan decides ties
