"""Surrogate Model Extension (SME): A Fast and Accurate Weight Update Attack on Federated Learning. Zhu, Yao, Blaschko.
ICML 2023.

A client trains from w_0 to w_T and sends the difference, which one gradient at the right point between both ends
explains well, for local gradients lie nearly in a plane. Minimise over x in the valid box and beta in [0, 1]:

    1 - cos(w_0 - w_T, grad(w_0 - beta (w_0 - w_T), x)) + weight * TV(x)

Neither the client's learning rate nor its optimiser, batch size or number of steps is needed. With ``beta=0`` and
``beta_lr=0`` this is Inverting Gradients on the update, the paper's baseline. ``beta`` is the weight on the *after*
end, as alpha in the paper's code, table 1 and figure 4; equation 5 and algorithm 1 write alpha for the *before* end.

Differences. The default compares directions by their L1 distance instead of the cosine, starts from grey, and takes
330 steps of Adam with a cosine schedule in [0, 1] space instead of 1000 in the model's: 5 to 10 dB more on FEMNIST. The
derivative by beta costs a tenth to a third of a step here; as beta moves by about ``beta_lr`` a step, it is taken at
every ``beta_every``-th step and kept in between. ``preset("paper")`` takes it at every step and has all published
settings; ``preset("paper-ig")`` is the baseline, ``preset("paper-vit")`` the setting for transformers. A gradient
(FedSGD) has no segment: plain gradient matching.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from leakscope.attacks.gradient_matching import NORMAL_START, GradientMatching, weighted
from leakscope.contracts.inputs import Start
from leakscope.contracts.observation import Observation
from leakscope.contracts.settings import setting
from leakscope.matching import DISTANCES, Matcher, Pixels, SegmentGradient, Simulation, SingleGradient, as_distance
from leakscope.matching.optimisers import Adam, Schedule
from leakscope.matching.priors import BatchNormStatistics, TotalVariation, TVVariant

_PAPER = {
    "iterations": 1000,
    "distance": "cosine",
    "tv": 0.01,
    "tv_variant": "l1mean_avg",
    "lr": 1.0,
    "schedule": "step",
    **NORMAL_START,
    "beta_every": 1,
}


@dataclass(frozen=True, kw_only=True)
class SME(GradientMatching):
    """Match a weight update by one gradient at a searched point between both ends; needs no recipe."""

    presets = MappingProxyType(
        {
            "paper": _PAPER,
            "paper-ig": {**_PAPER, "beta": 0.0, "beta_lr": 0.0},
            "paper-vit": {**_PAPER, "lr": 0.1, "schedule": "constant"},
        }
    )

    iterations: int = setting(330, "Steps of the search.", ge=1)
    distance: str = setting("direction-l1", "How two updates are compared.", choices=DISTANCES)
    tv: float = setting(0.05, "Weight of total variation.", ge=0)
    tv_variant: TVVariant = setting("l1mean_avg", "Which definition of total variation.")
    batchnorm: float = setting(0.0, "Weight of the BatchNorm-statistics prior; 0 leaves it out.", ge=0)
    beta: float = setting(0.5, "Where the search for the point begins: 0 before, 1 after.", ge=0, le=1)
    beta_lr: float = setting(1e-3, "Step size of Adam for beta; 0 keeps it where it is.", ge=0)
    beta_every: int = setting(20, "Steps between two derivatives by beta.", ge=1)
    lr: float = setting(0.3, "Step size of Adam.", gt=0)
    schedule: Schedule = setting("cosine", "How the step size falls over the run.")
    start: Start = setting("grey", "Where the search starts.")
    space: Literal["unit", "model"] = setting("unit", "Whether inputs in [0, 1] or the model's own are searched.")

    def matcher(self, observation: Observation) -> Matcher:
        variation = TotalVariation(weight=self.tv, variant=self.tv_variant)
        simulation: Simulation = SingleGradient()
        if observation.message.kind == "weight_delta":
            simulation = SegmentGradient(beta=self.beta, step=self.beta_lr, every=self.beta_every)
        return self.engine(
            distance=as_distance(self.distance),
            priors=weighted(variation, BatchNormStatistics(weight=self.batchnorm)),
            canvas=Pixels(space=self.space, start=self.start),
            optimiser=Adam(lr=self.lr, schedule=self.schedule),
            simulation=simulation,
        )
