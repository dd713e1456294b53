"""Head first: the strongest attack of the house on trained networks, in batches, with repeated labels.

An attack of this project's own: a list of stages, each of which adds to what is known or proposes candidates; the best
candidate is the result. docs/strength.md explains and measures them, docs/exact-inversion.md steps 0 and 3.

0. *Solve the patch embedding* of one image behind a ViT with learned positions: one least squares, for the gradient of
   the positions is the signal at the embedding's outputs (:mod:`leakscope.equations.patch_embedding`).
1. *Solve the head*: each example's features and output gradients (:mod:`leakscope.equations.embedding`).
2. *Peel dense layers* below it, one by one. An MLP ends here.
3. *Peel convolutions*: factor one of them, and solve the layers below it by least squares. ResNets are cut in their
   lower half, with BatchNorm in eval or train mode (:mod:`leakscope.equations.peeling`). Several plain local steps on
   the same batch are taken apart (:mod:`leakscope.equations.local_networks`). *Invert the values* that this tells
   (:mod:`leakscope.matching.known_values`), instead of step 4.
4. *Search below the cut* with features and adjoints held (:mod:`leakscope.matching.held`).
5. *Decode masks* of ReLU networks, and solve what is then linear; or *Gauss-Newton* steps on networks without kinks. A
   residual of rounding and no free direction are a certificate. Steps 4 and 5 repeat until one explains the update.
6. *Match the whole update* where the head cannot be solved (a note says why) or nothing else was.
7. *The most probable image* under noise of a known level (:mod:`leakscope.attacks.head_first.noise`).

MixUp is a wrapper around all of this (:mod:`leakscope.attacks.mixtures`).
"""

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import ClassVar

import torch

from leakscope.attacks.candidates import Stage
from leakscope.attacks.head_first.case import Case
from leakscope.attacks.head_first.convolutions import InvertValues, PeelConvolutions
from leakscope.attacks.head_first.noise import MostProbable
from leakscope.attacks.head_first.patches import SolvePatches
from leakscope.attacks.head_first.stages import (
    DecodeMasks,
    GaussNewtonSteps,
    MatchUpdate,
    PeelDense,
    SearchBelow,
    SolveHead,
)
from leakscope.attacks.mixtures import is_mixed, solve_parts
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting

STAGES: tuple[Stage[Case], ...] = (
    SolvePatches(),
    SolveHead(),
    PeelDense(),
    PeelConvolutions(),
    InvertValues(),
    SearchBelow(),
    DecodeMasks(),
    GaussNewtonSteps(),
    MatchUpdate(),
    MostProbable(),
)


@dataclass(frozen=True, kw_only=True)
class HeadFirst(Attack):
    """Recover features and output gradients from the head, match below it, decode masks and solve."""

    reads_channel: ClassVar[bool] = True

    iterations: int = setting(300, "Steps of each search below the cut.", ge=1)
    tries: int = setting(3, "Rounds of search and finish at most; one that ends with a certificate ends them.", ge=1)
    tv: float = setting(0.2, "Weight of total variation, which falls to zero over a search below the cut.", ge=0)
    solve: bool = setting(True, "Finish the search: decode masks and solve, or Gauss-Newton steps on smooth nets.")
    rival: bool = setting(True, "Without a certificate, match the whole update too, and keep what explains it better.")

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        if is_mixed(observation):
            solve = partial(self.run, generator=generator, progress=progress)
            return solve_parts(observation, generator.clone_state(), solve)
        case = Case(self, observation, generator, progress)
        for repeated, group in groupby(STAGES, key=lambda stage: stage.repeats):
            stages = tuple(group)
            for _ in range(case.rounds if repeated else 1):
                for stage in stages:
                    case.take(stage)
                if case.settled:
                    break
        return case.result()
