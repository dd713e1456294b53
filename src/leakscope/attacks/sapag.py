"""SAPAG: A Self-Adaptive Privacy Attack From Gradients. Yijue Wang et al. 2020.

Minimise over x:  sum_l Q_l (1 - exp(-||grad_l(x) - g_l||^2 / s_l)),  a Gaussian kernel a tensor whose width s_l adapts
to the observed gradient's variance and whose weight Q_l = 1 / (l + 1) falls with depth.

The paper's own code is not available; widths, weights and optimiser are choices. With s_l = Var(g_l) and raw sums the
kernel underflows at the start and nothing moves, so means replace sums and s_l is never below ``guard`` times the
current mean squared difference. With every kernel so guarded each tensor's term has a constant value far from the
solution, so progress shows in the widths, not in the objective; the best iterate is therefore judged by the relative
squared distance. AdamW in the paper as cited second-hand; plain Adam here, weight decay having no meaning for pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leakscope.attacks.gradient_matching import GradientMatching
from leakscope.matching import Adam, GaussianKernel, Matcher, Pixels, Prior, RelativeSquaredL2, TotalVariation
from leakscope.observation import Observation


@dataclass(frozen=True, kw_only=True)
class SAPAG(GradientMatching):
    """Match gradients tensor by tensor under an adaptive Gaussian kernel."""

    iterations: int = 600
    lr: float = 0.05
    guard: float = 1.0
    tv: float = 1e-3
    start: Literal["grey", "normal", "uniform"] = "grey"

    def __post_init__(self) -> None:
        super().__post_init__()
        Adam(lr=self.lr)
        GaussianKernel(guard=self.guard)
        Pixels(start=self.start)
        if self.tv < 0:
            raise ValueError(f"tv: expected a weight >= 0, got {self.tv}")

    def matcher(self, observation: Observation) -> Matcher:
        priors: tuple[Prior, ...] = (TotalVariation(weight=self.tv),) if self.tv else ()
        return Matcher(
            distance=GaussianKernel(guard=self.guard),
            judge=RelativeSquaredL2(),
            priors=priors,
            canvas=Pixels(start=self.start),
            optimiser=Adam(lr=self.lr),
            iterations=self.iterations,
            restarts=self.restarts,
            compile=self.compile,
        )
