"""Gauss-Newton: the inputs by least squares on the gradient, with second-order steps.

An attack of this project's own. The residual r(x) = G(x) - g has far more entries than unknowns, so near a solution
Levenberg-Marquardt squares its error with every step (:mod:`leakscope.matching.least_squares`), in float64.

One example behind a head with a bias: the bias's gradient *is* the output gradient of the logits, so it is held and the
loss does not enter at all: no label is needed, and a saturated softmax does not flatten the equations.

Where the adversary knows the defence, its noise counts by tensor; ``noise`` says it by hand. Least squares is then the
maximum-likelihood estimate, which no unbiased attack can beat (:mod:`leakscope.limits.cramer_rao`).
``smoothness`` adds a Gaussian prior on the differences of neighbouring pixels: the most probable input instead of the
most likely.

It fails where the gradient is not smooth (ReLU, max pooling: by default it declines) and may stall where examples are
alike. Such a result has the flag "ill-conditioned": nothing follows from it about safety.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakscope.attacks.candidates import certify
from leakscope.attacks.gradient_matching import as_gradient, find_readings, several_steps
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.certificate import EXPLAINED, Certificate
from leakscope.contracts.channel import Channel
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.matching import Fit, GradientMap, LevenbergMarquardt, Roughness
from leakscope.matching.determinacy import free_directions
from leakscope.matching.gradient_map import affordable_steps
from leakscope.network.kinks import kinks
from leakscope.network.layers import find_head

#: Starts that end this near to each other, root mean square, have found the same inputs.
SAME = 1e-3
#: So many products with the Jacobian must be affordable, by the size of the model.
LEAST_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class GaussNewton(Attack):
    """Levenberg-Marquardt on the difference of gradients, for nets without kinks.

    A restart that explains the update ends them, or two that come to rest at the same inputs; what they leave is noise.
    """

    reads_channel: ClassVar[bool] = True

    steps: int = setting(60, "Trial steps at most, accepted or not.", ge=1)
    restarts: int = setting(
        3, "Tries from different starts, one after another; one that explains the update ends them.", ge=1
    )
    damping: float = setting(1e-3, "mu at the start: how much of the mean diagonal of J'J is added to it.", gt=0)
    dense: int = setting(5000, "Unknowns up to which the Jacobian is made.", ge=0)
    noise: float = setting(0.0, "Standard deviation of noise on the update, where the channel does not tell it.", ge=0)
    smoothness: float = setting(
        0.0,
        "Standard deviation of neighbouring pixels' differences under the prior, where noise is known; 0 for none.",
        ge=0,
    )
    hold_output_gradient: bool = setting(
        True, "Take the loss's gradient at the output from the head's bias where it is seen."
    )
    smooth_only: bool = setting(True, "Decline models with kinks such as ReLU.")
    reached: float = setting(1e-5, "Relative norm of the residual at which the objective counts as reached.", gt=0)

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        kinked = kinks(observation.model, observation.input_shape) if self.smooth_only else ()
        if kinked:
            why = f"the model has {', '.join(kinked)}, where the gradient jumps and Newton's steps do not fit"
            raise NotApplicable(f"{why}; smooth_only=False tries all the same")
        wide = observation.to(dtype=torch.float64)
        levels = self._noise_levels(wide)
        held = self._output_gradient(wide) if self.hold_output_gradient and levels is None else None
        readings, flags, notes = find_readings(wide, generator)
        if not readings and held is None:
            raise NotApplicable("the labels are not known and cannot be read off the update; grant or give them")
        # Where the held output gradient stands for the loss, any label will do.
        targets = readings[0].labels if readings else torch.zeros(1, dtype=torch.int64, device=wide.device)
        method = readings[0].method if readings else "joint"
        # In units of its noise every entry counts as much as it tells.
        mapping = dataclasses.replace(GradientMap.of(wide, targets, output_gradient=held), scales=levels)
        observed = mapping.joined(as_gradient(wide))
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
                "output_gradient_held": held is not None,
            },
            certificates=self._certificates(observation, mapping, best, relative, method),
        )

    def _certificates(
        self, observation: Observation, mapping: GradientMap, best: Fit, relative: float, method: str
    ) -> tuple[Certificate, ...]:
        if relative > EXPLAINED or mapping.scales is not None or several_steps(observation):
            return ()
        facts = (mapping.pictures(best.x), None if method == "joint" else mapping.targets, relative)
        return certify(
            observation, *facts, lambda: free_directions(mapping, best.x, best.preconditioner), "Gauss-Newton"
        )

    def _search(
        self,
        mapping: GradientMap,
        observed: Tensor,
        enough: float,
        generator: torch.Generator,
        progress: Progress | None,
    ) -> tuple[list[Fit], bool]:
        """Return the fits, and whether the best explains the update, or another start ended there too."""
        search = LevenbergMarquardt(steps=self.steps, damping=self.damping, dense=self.dense)
        noisy = mapping.scales is not None
        prior = Roughness(mapping.shape, 1 / self.smoothness) if self.smoothness and noisy else None
        fits: list[Fit] = []
        for _ in range(self.restarts):
            start = torch.rand(mapping.unknowns, generator=generator, dtype=torch.float64).to(observed)
            fit = search.run(mapping, observed, start, prior=prior, progress=progress)
            fits.append(fit)
            # In units of the noise, of as many draws as there are entries, the norm is within a few per cent of this.
            most = 1.2 * math.sqrt(len(observed)) if noisy else enough * float(observed.norm())
            if (fit.at_rest or not noisy) and float(fit.residual.norm()) <= most:
                return fits, bool(observed.any())
            for other in fits[:-1]:
                # What is left is then noise, or a defence's doing, and no fault of the search.
                if fit.at_rest and other.at_rest and float((fit.x - other.x).square().mean().sqrt()) < SAME:
                    return fits, True
        return fits, False

    def _noise_levels(self, observation: Observation) -> dict[str, float] | None:
        """Return the known noise on each tensor, by hand or from the defence's channel; None without any."""
        channel = Channel(noise=self.noise) if observation.channel is None or self.noise else observation.channel
        if not channel.noisy:
            return None
        levels = {name: channel.level(name) for name in observation.message.update}
        least = 1e-6 * max(levels.values())
        return {name: max(level, least) for name, level in levels.items()}

    def _output_gradient(self, observation: Observation) -> Tensor | None:
        if observation.num_examples != 1:
            return None
        try:
            head = find_head(observation.model, observation.input_shape, observation.num_classes)
        except ValueError:
            return None
        if head.bias_name is None or not head.gives_logits(observation.task):
            return None
        return as_gradient(observation).get(head.bias_name)
