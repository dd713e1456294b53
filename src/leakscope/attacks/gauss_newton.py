"""Gauss-Newton: the inputs by least squares on the gradient, with second-order steps.

An attack of this project's own. The residual r(x) = G(x) - g has far more entries than unknowns, so near a solution
Levenberg-Marquardt squares its error with every step: on smooth nets a handful of steps go from noise to the last digit
where first-order searches take thousands. See :mod:`leakscope.matching.least_squares` for the numerics. Everything
runs in float64 whatever the update's precision.

One example behind a head with a bias: the bias's gradient *is* the back-signal of the logits, so it is held and the
loss does not enter at all: no label is needed, and a saturated softmax does not flatten the equations.

``noise`` is the standard deviation of Gaussian noise on the update as far as the adversary knows it: least squares is
then the maximum-likelihood estimate, which no unbiased attack can beat (:mod:`leakscope.limits.cramer_rao`).
``smoothness`` adds a Gaussian prior on the differences of neighbouring pixels, with that standard deviation: the most
probable input instead of the most likely.

It fails where the gradient is not smooth (ReLU, max pooling: by default it declines) and may stall where examples are
told apart badly (equal labels, identical examples). Such a result has the flag "ill-conditioned": nothing follows from
it about safety.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.attacks.base import Attack, NotApplicable, Progress, Reconstruction
from leakscope.attacks.gradient_matching import as_gradient, find_targets, several_steps
from leakscope.labels import Head, find_head
from leakscope.limits.cramer_rao import affordable_steps
from leakscope.limits.smoothness import kinks
from leakscope.matching import Fit, GradientMap, LevenbergMarquardt, Roughness
from leakscope.observation import Observation

#: Starts that end this near to each other, root mean square, have found the same inputs.
SAME = 1e-3
#: So many products with the Jacobian must be affordable, by the size of the model.
LEAST_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class GaussNewton(Attack):
    """Levenberg-Marquardt on the difference of gradients, for nets without kinks.

    ``restarts`` are tries from different starts: one that explains the update ends them, or two that come to rest at
    the same inputs; what they leave is then noise. ``dense`` is the largest number of unknowns (examples x input size)
    for which the Jacobian is made. ``smooth_only`` declines models
    with ReLU and the like; without it they are tried.
    """

    steps: int = 60
    restarts: int = 3
    damping: float = 1e-3
    dense: int = 5000
    noise: float = 0.0
    smoothness: float = 0.0
    hold_back_signal: bool = True
    smooth_only: bool = True
    #: Relative length of the residual from which on the objective counts as reached.
    reached: float = 1e-5

    def __post_init__(self) -> None:
        problems = []
        for name in ("steps", "restarts"):
            if getattr(self, name) < 1:
                problems.append(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("damping", "reached"):
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"{name}: expected a positive number, got {getattr(self, name)}")
        for name in ("dense", "noise", "smoothness"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"{name}: expected a number >= 0, got {getattr(self, name)}")
        if self.smoothness and not self.noise:
            problems.append("smoothness: expected together with noise, against which the prior is weighed")
        if problems:
            raise ValueError("GaussNewton:\n  - " + "\n  - ".join(problems))

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        found = kinks(observation.model, observation.input_shape) if self.smooth_only else ()
        if found:
            raise NotApplicable(
                f"the model has {', '.join(found)}, where the gradient jumps and Newton's steps do not fit; "
                "smooth_only=False tries all the same"
            )
        wide = observation.to(dtype=torch.float64)
        observed = torch.cat([value.flatten() for value in as_gradient(wide).values()])
        signal = self._back_signal(wide) if self.hold_back_signal and not self.noise else None
        targets, flags, notes, method = find_targets(wide, generator)
        if targets is None:
            if signal is None:
                raise NotApplicable("the labels are not known and cannot be read off the update; grant or give them")
            # The held back-signal stands for the loss, so any label will do.
            targets = torch.zeros(1, dtype=torch.int64, device=wide.device)
        mapping = GradientMap.of(wide, targets, back_signal=signal)
        if affordable_steps(mapping) < LEAST_STEPS:
            raise NotApplicable(
                f"too large for second-order steps: an update of {mapping.entries} entries from {len(targets)} examples"
            )
        enough = max(self.reached, 4 * torch.finfo(observation.dtype).eps)
        fits, agreed = self._search(mapping, observed, enough, generator, progress)
        best = min(fits, key=lambda fit: fit.objective if math.isfinite(fit.objective) else math.inf)
        size = float(observed.norm())
        relative = float(best.residual.norm()) / size if size else math.inf
        if not agreed:
            rests = sum(fit.at_rest for fit in fits)
            flags = (*flags, "restarts disagree" if rests > 1 else "ill-conditioned")
        if not bool(torch.isfinite(best.x).all()):
            flags = (*flags, "non-finite objective")
        if several_steps(observation):
            flags = (*flags, "steps not simulated")
        return Reconstruction(
            inputs=mapping.pictures(best.x).nan_to_num().to(observation.dtype),
            labels=None if method == "joint" else targets,
            scores=torch.full((len(targets),), relative),
            history={"objective": [fit.curve for fit in fits]},
            flags=flags,
            notes=notes,
            info={
                "steps": best.steps,
                "restarts": len(fits),
                "compiled": False,
                "distance": best.objective,
                "labels": method,
                "residual": relative,
                "products": best.products,
                "jacobians": best.builds,
                "back_signal_held": signal is not None,
            },
        )

    def _search(
        self,
        mapping: GradientMap,
        observed: Tensor,
        enough: float,
        generator: torch.Generator,
        progress: Progress | None,
    ) -> tuple[list[Fit], bool]:
        """The fits, and whether the best can be trusted: it explains the update, or another start ended there too."""
        search = LevenbergMarquardt(steps=self.steps, damping=self.damping, dense=self.dense)
        prior = Roughness(mapping.shape, self.noise / self.smoothness) if self.smoothness else None
        fits: list[Fit] = []
        for _ in range(self.restarts):
            start = torch.rand(mapping.unknowns, generator=generator, dtype=torch.float64).to(observed)
            fit = search.run(mapping, observed, start, prior=prior, progress=progress)
            fits.append(fit)
            if self._explains(fit, observed, enough):
                return fits, bool(observed.any())
            for other in fits[:-1]:
                # What is left is then noise, or a defence's doing, and no fault of the search.
                if fit.at_rest and other.at_rest and float((fit.x - other.x).square().mean().sqrt()) < SAME:
                    return fits, True
        return fits, False

    def _explains(self, fit: Fit, observed: Tensor, enough: float) -> bool:
        """Whether what is left of the residual is rounding, or the noise that is known to be there."""
        residual = float(fit.residual.norm())
        if not self.noise:
            return residual <= enough * float(observed.norm())
        # Of as many draws as there are entries, the length is within a few per cent of this.
        return fit.at_rest and residual <= 1.2 * self.noise * math.sqrt(len(observed))

    def _back_signal(self, observation: Observation) -> Tensor | None:
        """The derivative of the loss by the logits of one example, where the head's bias shows it."""
        if observation.num_examples != 1:
            return None
        try:
            head = find_head(observation.model, observation.input_shape, observation.num_classes)
        except ValueError:
            return None
        if head.bias_name is None or not _is_last(observation, head):
            return None
        return as_gradient(observation).get(head.bias_name)


def _is_last(observation: Observation, head: Head) -> bool:
    """Whether the head's outputs are the model's, with no softmax or activation behind them."""
    twin = copy.deepcopy(observation.model).eval()
    seen: list[Tensor] = []
    twin.get_submodule(head.module_name).register_forward_hook(lambda module, args, output: seen.append(output))
    draws = torch.Generator().manual_seed(0)
    like = next(twin.parameters())
    with torch.no_grad():
        output = twin(torch.randn((8, *observation.input_shape), generator=draws).to(like))
    return torch.equal(seen[-1], output)
