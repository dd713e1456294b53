"""Deep Leakage from Gradients. Ligeng Zhu, Zhijian Liu, Song Han. NeurIPS 2019.

Minimise over inputs x and label logits y:  sum_l || grad_l(x, softmax(y)) - g_l ||^2,  by L-BFGS.

Differences from the published code. The start is mid-grey with a little noise instead of N(0, 1): from there the
reference LeNet needs a third of the steps. Each step is searched for by backtracking, so that a run cannot diverge.
The objective is divided by the observed update's own squared length, which moves no minimum but lets one tolerance
serve every model. Restarts, where asked for, run side by side and the smallest objective wins. ``preset("paper")``
takes full steps from N(0, 1) as published (300 calls of 20 iterations).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from leakscope.attacks.gradient_matching import GradientMatching
from leakscope.matching import LBFGS, Matcher, Pixels, RelativeSquaredL2
from leakscope.observation import Observation


@dataclass(frozen=True, kw_only=True)
class DLG(GradientMatching):
    """Joint search of inputs and labels by L-BFGS on the squared distance of gradients."""

    presets = MappingProxyType(
        {"paper": {"iterations": 6000, "start": "normal", "space": "model", "line_search": "none"}}
    )

    iterations: int = 2000
    labels: Literal["recover", "joint"] = "joint"
    start: Literal["grey", "normal", "uniform"] = "grey"
    space: Literal["unit", "model"] = "unit"
    history: int = 100
    line_search: Literal["backtracking", "none"] = "backtracking"
    tolerance: float = 1e-10

    def matcher(self, observation: Observation) -> Matcher:
        return Matcher(
            distance=RelativeSquaredL2(),
            canvas=Pixels(space=self.space, start=self.start, clamp=False),
            optimiser=LBFGS(history=self.history, line_search=self.line_search),
            iterations=self.iterations,
            restarts=self.restarts,
            tolerance=self.tolerance,
            compile=self.compile,
        )
