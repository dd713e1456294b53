"""Reconstructing Training Data from Model Gradient, Provably. Zihan Wang, Jason Lee, Qi Lei. AISTATS 2023.

A server that may choose the weights draws the rows of a dense layer from N(0, I); moments of that layer's gradient with
Hermite polynomials of its weights are then tensors sum_i c_i x_i (x) ... (x) x_i of its inputs, which a tensor
decomposition takes apart (:mod:`leakscope.equations.stein_moments`). This attack returns the inputs of a first layer;
deeper in a network they are features, which ``leakscope.recover_features`` returns.

Different from the paper: the span of the inputs is read from the gradient itself wherever that predicts more of it than
the moments do, which is always so for an untouched gradient; moments then only tell inputs apart inside the span. Signs
follow from the slopes of a ReLU, lengths from the gradient of a bias; without one inputs are stretched to the value
range. The constants behind the random units are ``head``; ``trained`` units keep their weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakscope.attacks.gaussian_neurons import HeadConstants, dense_and_head, with_gaussian_neurons
from leakscope.attacks.linear_layer import stretched
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.equations.feature_separation import RecoveredFeatures
from leakscope.equations.features import CERTAIN, recover_features
from leakscope.network.layers import structure


@dataclass(frozen=True, kw_only=True)
class ProvableReconstruction(Attack):
    """Malicious server: a first layer of random units, whose gradient's moments tell a batch's inputs apart."""

    requires = ("num_examples", "choose_weights")

    trained: int = setting(0, "Units of the layer that keep their weights.", ge=0)
    head: HeadConstants = setting("signs", "The head's weights behind random units: signs, or the published k / v.")
    seed: int = setting(0, "Seed of the random weights.", ge=0)

    def prepare(self, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        return with_gaussian_neurons(model, input_shape, trained=self.trained, head=self.head, seed=self.seed)

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        name, _ = dense_and_head(observation.model, observation.input_shape)
        first = structure(observation.model, observation.input_shape).linear_first
        if isinstance(first, str) or first.name != name:
            raise NotApplicable(
                f"the random layer {name!r} reads features and not the examples; leakscope.recover_features("
                "observation) recovers these, and attacks that read the whole update go on from there"
            )
        count = observation.num_examples
        assert count is not None
        try:
            found = recover_features(
                observation, layer=name, neurons=slice(self.trained, None), count=count, generator=generator
            )
        except NotApplicable as refusal:
            return _nothing(observation, str(refusal))
        inputs, notes = _pictures(found, observation)
        if len(inputs) < count:
            inputs = torch.cat((inputs, _grey(observation, count - len(inputs))))
            notes = (*notes, "grey pictures stand for examples that left nothing in the gradient")
        # What the inputs leave of the gradient's rows; what their span leaves of it where slopes do not say.
        gap = max(found.residual, 0.0 if found.quality is None else max(0.0, 1 - found.quality) ** 0.5)
        flags = ("ill-conditioned",) if gap > CERTAIN else ()
        if count > 1 and (not found.separated or len(found.span) < count or found.quality is None or gap > CERTAIN):
            flags = (*flags, "mixture")
        if progress is not None:
            progress(1, 1, gap)
        return Reconstruction(
            inputs=inputs,
            labels=None,
            scores=torch.full((count,), gap, dtype=torch.float64),
            flags=flags,
            notes=(*found.notes, *notes),
            info={
                **{"layer": name, "steps": 1, "restarts": 1, "compiled": False},
                **{"method": found.method, "residual": found.residual, "signed": found.signed},
            },
        )


def _pictures(found: RecoveredFeatures, observation: Observation) -> tuple[Tensor, tuple[str, ...]]:
    like = next(iter(observation.message.update.values()))
    features = found.features
    if features is not None and bool(torch.isfinite(features).all()):
        shaped = features.reshape(-1, *observation.input_shape).to(like)
        return observation.inputs.project(shaped), ()
    directions = found.directions.to(like)
    words = "no bias gradient tells lengths: inputs are stretched to the value range"
    if found.signed:
        return stretched(directions, observation), (words,)
    return stretched(directions, observation, upright=True), (f"{words}, and the sign is that of a positive mean",)


def _grey(observation: Observation, count: int) -> Tensor:
    like = next(iter(observation.message.update.values()))
    return observation.inputs.from_unit(torch.full((count, *observation.input_shape), 0.5).to(like))


def _nothing(observation: Observation, reason: str) -> Reconstruction:
    count = observation.num_examples or 1
    return Reconstruction(
        inputs=_grey(observation, count),
        labels=None,
        scores=torch.full((count,), torch.inf, dtype=torch.float64),
        flags=("ill-conditioned",),
        notes=(f"{reason}; grey pictures stand for the examples",),
        info={"steps": 1, "restarts": 1, "compiled": False},
    )
