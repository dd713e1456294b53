"""Data Reconstruction Attacks and Defenses: A Systematic Evaluation. Liu et al.

A network draws the pictures from noise, x = U_phi(z), and its weights phi are searched by Adam:

    sum_i w_i (1 - cos_i) + 0.01 TV(x) + 0.001 BN(x) + 0.1 R(x)

cos_i compares the update's i-th tensor with the candidate's, w_i is the share of that tensor in all parameters that are
not zero, BN the distance of BatchNorm statistics from the batch's own, where they are known, else from the running
ones. R compares the inputs f(x) of a dense layer with features z that were recovered beforehand: 1 - cos(f(x_i), z_i)^2
of each, or for larger batches |P f(x_i)|^2 / |f(x_i)|^2 with P the projection off the span of all z. The features also
enter every block of the drawing network.

Differences. The default compares directions of tensors by their L1 distance instead of the cosine and weighs them by
the square root of their size, which leaves more to the layers near the input. ``distance="cosine"`` is the published
one. The printed sum of reweighted cosines lacks the "1 -", and its weights are not normalised; here they add up to one.
A linear assignment at each step decides which feature belongs to which example, where published code compares with the
true ones. ``features="head"`` solves them from the gradient of the last layers (equations/embedding.py);
``"recovered"`` estimates them from the widest dense layer (equations/features.py), which stands more noise; ``"auto"``
takes the first that succeeds. ``trained`` is the paper's malicious server (attacks/gaussian_neurons.py). The paper's
network has 36 million weights and takes 10,000 steps of 1e-5: ``preset("paper")``. By default a network of 0.26 million
takes 500 larger steps with a cosine schedule; ``canvas="pixels"`` searches the pixels, as ``preset("quick")`` does: the
better choice for hundreds of steps. A weight update of several steps is taken for one gradient. ``consistency`` adds
the group consistency of GradInversion (Yin et al., 2021) to several restarts.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from leakscope.attacks.gaussian_neurons import HeadConstants, with_gaussian_neurons
from leakscope.attacks.gradient_matching import GradientMatching, several_steps, weighted
from leakscope.contracts.attack import Progress
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.equations.embedding import recover_embedding
from leakscope.equations.features import recover_features
from leakscope.matching import (
    DISTANCES,
    Adam,
    BatchNormStatistics,
    Canvas,
    Drawing,
    FeatureMatching,
    Matcher,
    Pixels,
    Reweighted,
    TotalVariation,
)
from leakscope.matching.optimisers import Schedule
from leakscope.matching.priors import FeatureForm

FeatureSource = Literal["auto", "head", "recovered", "none"]
FeatureChoice = Literal["auto", "direction", "span"]
#: How features are recovered from what was seen, with draws.
Source = Callable[[Observation, torch.Generator], "KnownFeatures"]
PIXEL_STEP = 0.1
DRAWING_STEP = PIXEL_STEP / 20
#: Up to so many examples features are matched one by one; beyond, their order is too uncertain.
ONE_BY_ONE = 8


@dataclass(frozen=True, eq=False)
class KnownFeatures:
    """Hold directions (n, d) of what ``layer`` received; where not ``separated``, only their span means something."""

    layer: str
    directions: Tensor
    separated: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class SystematicEvaluation(GradientMatching):
    """A network draws the pictures; tensors count by their size, and known features lead the way."""

    presets = MappingProxyType(
        {
            "paper": {
                **{"distance": "cosine", "canvas": "paper", "iterations": 10_000, "lr": 1e-5, "schedule": "step"},
                **{"features": "recovered", "trained": 2048, "head": "published"},
            },
            "quick": {"canvas": "pixels", "iterations": 200, "tv": 0.1},
        }
    )

    iterations: int = setting(500, "Steps of the search.", ge=1)
    canvas: Literal["tiny", "small", "paper", "pixels"] = setting(
        "tiny", "How large the network is that draws, or whether pixels are searched."
    )
    lr: float | None = setting(
        None, f"Step size of Adam; None takes {PIXEL_STEP} for pixels and {DRAWING_STEP} for a network.", gt=0
    )
    schedule: Schedule = setting("cosine", "How the step size falls over the run.")
    distance: Literal["direction-l1", "cosine"] = setting("direction-l1", "How two tensors of the update are compared.")
    reweight: bool = setting(True, "Whether tensors are compared one by one and count by size; else all as one.")
    tv: float = setting(0.01, "Weight of total variation.", ge=0)
    batchnorm: float = setting(0.001, "Weight of the BatchNorm-statistics prior; 0 leaves it out.", ge=0)
    features: FeatureSource = setting("auto", "Where features of a dense layer come from.")
    feature_weight: float = setting(0.1, "Weight of the distance from known features.", ge=0)
    feature_form: FeatureChoice = setting(
        "auto", f"Features compared one by one, or by their span; 'auto': one by one up to {ONE_BY_ONE} examples."
    )
    consistency: float = setting(0.0, "Weight that pulls restarts towards their mean.", ge=0)
    trained: int | None = setting(
        None,
        "Units of the dense layer that keep their weights where the server draws the others; None draws none.",
        ge=0,
    )
    head: HeadConstants = setting("signs", "The head's weights behind random units: signs, or the published k / v.")
    seed: int = setting(0, "Seed of the random units.", ge=0)

    @property
    def chooses_model(self) -> bool:
        return self.trained is not None

    def prepare(self, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        if self.trained is None:
            return model
        return with_gaussian_neurons(model, input_shape, trained=self.trained, head=self.head, seed=self.seed)

    def missing(self, observation: Observation) -> list[str]:
        lacking = self.trained is not None and not observation.knowledge.grants("choose_weights")
        return [*super().missing(observation), *(["choose_weights"] if lacking else [])]

    def matcher(self, observation: Observation) -> Matcher:
        distance = DISTANCES[f"reweighted-{self.distance}" if self.reweight else self.distance]
        if isinstance(distance, Reweighted):
            parameters = dict(observation.model.named_parameters())
            counts = tuple(int(parameters[name].count_nonzero()) for name in observation.message.update)
            distance = dataclasses.replace(distance, counts=counts if sum(counts) else None)
        canvas: Canvas = Pixels() if self.canvas == "pixels" else Drawing(size=self.canvas)
        step = PIXEL_STEP if self.canvas == "pixels" else DRAWING_STEP
        return self.engine(
            distance=distance,
            priors=weighted(TotalVariation(weight=self.tv), BatchNormStatistics(weight=self.batchnorm)),
            canvas=canvas,
            optimiser=Adam(lr=self.lr or step, schedule=self.schedule),
            consistency=self.consistency,
        )

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        matcher, note = self.matcher(observation), "features are not used"
        known, why = self._known_features(observation, generator)
        if known is not None:
            matcher = self._led(matcher, known, observation.num_examples or 1)
            note = f"features of {known.layer!r} by {known.source}"
        elif why:
            note = f"no features: {why}"
        result = self.search(observation, matcher, generator, progress)
        facts = {"features": known.source if known else "none", "feature_layer": known.layer if known else None}
        return dataclasses.replace(result, notes=(*result.notes, note), info={**result.info, **facts})

    def cautions(self, observation: Observation) -> tuple[str, ...]:
        return ("steps not simulated",) if several_steps(observation) else ()

    def _led(self, matcher: Matcher, known: KnownFeatures, examples: int) -> Matcher:
        one_by_one = known.separated and (examples <= ONE_BY_ONE if self.feature_form == "auto" else True)
        form: FeatureForm = "direction" if one_by_one and self.feature_form != "span" else "span"
        term = FeatureMatching(weight=self.feature_weight, layer=known.layer, features=known.directions, form=form)
        canvas = matcher.canvas
        if isinstance(canvas, Drawing) and known.separated and len(known.directions) == examples:
            canvas = dataclasses.replace(canvas, features=known.directions)
        return dataclasses.replace(matcher, priors=(*matcher.priors, term), canvas=canvas, record=(known.layer,))

    def _known_features(self, observation: Observation, generator: torch.Generator) -> tuple[KnownFeatures | None, str]:
        neurons = None if self.trained is None else slice(self.trained, None)
        head: Source = head_features
        dense: Source = partial(dense_features, neurons=neurons)
        sources = {"head": (head,), "recovered": (dense,), "auto": (head, dense)}
        reasons = []
        for source in sources.get(self.features, ()) if self.feature_weight else ():
            try:
                return source(observation, generator), ""
            except NotApplicable as error:
                reasons.append(str(error))
        if reasons and self.features != "auto":
            raise NotApplicable(f"features={self.features!r}: {reasons[0]}; use features='auto' or 'none'")
        return None, "; ".join(reasons)


def head_features(observation: Observation, generator: torch.Generator) -> KnownFeatures:
    """Solved from the gradient of the last layers, in the order in which labels are searched."""
    found = recover_embedding(observation, generator)
    features, labels = found.features, found.labels
    if labels is not None:
        features = features[torch.argsort(labels, stable=True)]
        if observation.labels is not None and observation.labels.dim() == 1:
            features = features[torch.argsort(torch.argsort(observation.labels.cpu(), stable=True))]
    like = next(iter(observation.message.update.values()))
    return KnownFeatures(found.layer, torch.nn.functional.normalize(features, dim=1).to(like), True, "the head")


def dense_features(
    observation: Observation, generator: torch.Generator, *, neurons: slice | None = None
) -> KnownFeatures:
    """Estimated from the gradient of the widest dense layer, whose ``neurons`` are random; in an order of their own."""
    found = recover_features(observation, neurons=neurons, generator=generator)
    like = next(iter(observation.message.update.values()))
    rows = found.directions if found.separated else found.span
    return KnownFeatures(found.layer, rows.to(like), found.separated, found.method)
