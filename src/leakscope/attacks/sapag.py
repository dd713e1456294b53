"""SAPAG: A Self-Adaptive Privacy Attack From Gradients. Yijue Wang et al. 2020.

Minimise over x:  sum_l Q_l (1 - exp(-||grad_l(x) - g_l||^2 / s_l)),  a Gaussian kernel a tensor whose width s_l adapts
to the observed gradient's variance.

The paper's code is not available; widths, weights and optimiser are choices. Q_l is one for every tensor;
``decreasing=True`` lets it fall as 1 / (l + 1), as a public re-implementation has it, and recovered less here. With
s_l = Var(g_l) and raw sums the kernel underflows at the start, so means replace sums and s_l is never below ``guard``
times the current mean squared difference. So guarded, progress shows in the widths, not in the objective; the best
iterate is judged by the relative squared distance. Plain Adam replaces AdamW, as weight decay means nothing for pixels.
"""

from dataclasses import dataclass

from leakscope.attacks.gradient_matching import GradientMatching, weighted
from leakscope.contracts.inputs import Start
from leakscope.contracts.observation import Observation
from leakscope.contracts.settings import setting
from leakscope.matching import Adam, GaussianKernel, Matcher, Pixels, RelativeSquaredL2, TotalVariation


@dataclass(frozen=True, kw_only=True)
class SAPAG(GradientMatching):
    """Match tensor by tensor under an adaptive Gaussian kernel."""

    iterations: int = setting(600, "Steps of the search.", ge=1)
    lr: float = setting(0.05, "Step size of Adam.", gt=0)
    guard: float = setting(1.0, "Least width of a kernel, in current mean squared differences.", ge=0)
    decreasing: bool = setting(False, "Whether the weight of a tensor falls with its depth.")
    tv: float = setting(1e-3, "Weight of total variation.", ge=0)
    start: Start = setting("grey", "Where the search starts.")

    def matcher(self, observation: Observation) -> Matcher:
        return self.engine(
            distance=GaussianKernel(guard=self.guard, decreasing=self.decreasing),
            judge=RelativeSquaredL2(),
            priors=weighted(TotalVariation(weight=self.tv)),
            canvas=Pixels(start=self.start),
            optimiser=Adam(lr=self.lr),
        )
