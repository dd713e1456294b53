"""What Can We Learn from Gradients? Jia Qian, Lars Kai Hansen. 2021.

Minimise over inputs x and label logits y, started uniformly in [0, 1]:
``|| G(x, y) - g ||^2 + lambda ||x||_F`` for one example,
``|| G(x, y) - g ||^2 + lambda sum_{k != k'} <x_k, x_k'>^2`` for a batch, lambda decaying from 0.1.

Choices where the paper is silent or contradicts itself. The norm is squared; ``squared=False`` for the plain one. The
printed decay fires only in the first iterations while the text says it goes on; here lambda is multiplied by ``decay``
every ``every`` iterations. Objective and lambda are relative to the observed update's squared length, norms and inner
products to the number of inputs. L-BFGS by default, ``optimizer="adam"`` for large batches as the paper recommends.
"""

import math
from dataclasses import dataclass
from typing import Literal

from leakscope.attacks.gradient_matching import LABELS, GradientMatching, LabelChoice, weighted
from leakscope.contracts.observation import Observation
from leakscope.contracts.settings import setting
from leakscope.matching import LBFGS, Adam, L2Norm, Matcher, Optimiser, Orthogonality, Pixels, Prior, RelativeSquaredL2


@dataclass(frozen=True, kw_only=True)
class LearnFromGradients(GradientMatching):
    """Search by L-BFGS or Adam with a decaying norm or orthogonality prior."""

    iterations: int = setting(2000, "Steps of the search.", ge=1)
    labels: LabelChoice = setting("joint", LABELS)
    weight: float = setting(0.1, "The prior's weight at the start.", ge=0)
    decay: float = setting(0.9, "Factor of the prior's weight.", gt=0, le=1)
    every: int = setting(10, "Steps between two decays.", ge=1)
    squared: bool = setting(True, "Squared norm instead of the plain one.")
    optimizer: Literal["lbfgs", "adam"] = setting("lbfgs", "Which optimiser.")
    lr: float = setting(0.05, "Step size of Adam.", gt=0)

    def matcher(self, observation: Observation) -> Matcher:
        prior: Prior
        size = observation.inputs.size
        if observation.num_examples == 1:
            weight = self.weight / (size if self.squared else math.sqrt(size))
            prior = L2Norm(weight=weight, squared=self.squared, decay=self.decay, every=self.every)
        else:
            prior = Orthogonality(weight=self.weight / size**2, decay=self.decay, every=self.every)
        optimiser: Optimiser = LBFGS(history=100) if self.optimizer == "lbfgs" else Adam(lr=self.lr)
        return self.engine(
            distance=RelativeSquaredL2(),
            priors=weighted(prior),
            canvas=Pixels(start="uniform", clamp=self.optimizer == "adam"),
            optimiser=optimiser,
            tolerance=1e-10,
        )
