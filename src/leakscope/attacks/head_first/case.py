"""What the stages of ``head-first`` share: the observation, what is held at the cut, and the best candidate so far."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leakscope.attacks.candidates import Candidate, Stage
from leakscope.attacks.gradient_matching import several_steps
from leakscope.contracts.attack import Progress
from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.equations.embedding import Embedding
from leakscope.equations.gated_inverse import WORK, GatedProblem
from leakscope.equations.noise_test import NoiseTest
from leakscope.matching import DirectionL1, Victim
from leakscope.matching.held import DroppedMatching, HeldMatching, searched_layers
from leakscope.matching.known_values import KnownValues
from leakscope.matching.unexplained import unexplained
from leakscope.matching.victim import forward_flops
from leakscope.network.gates import read_gated
from leakscope.network.kinks import kinks
from leakscope.network.recorder import record_layers

if TYPE_CHECKING:
    from leakscope.attacks.head_first import HeadFirst

#: What the rounding of a batch's gradient alone may leave: below this there is nothing left to gain by another round.
SETTLED = 3 * EXPLAINED
#: Rounds where noise or rounding leaves no certificate to be reached.
NOISY_TRIES = 2
#: Evaluations times multiplications of a forward pass up to which searches go on without a certificate.
MOST_WORK = 1e11
#: So many times as much where a convolution's input is held: tens of thousands of features say what an image is.
PATIENCE_BELOW_CONVOLUTIONS = 4.0
#: Fewer products with the equations than this lead nowhere.
LEAST_PRODUCTS = 200


class Case:
    """One observation under attack.

    ``held``: features and adjoints of each example at the lowest cut that is known, None where the head is not solved.
    ``latest``: what the last search found. ``noise``: whether the best explains the update down to its noise.
    """

    def __init__(
        self, attack: HeadFirst, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> None:
        self.attack, self.observation, self.generator, self.progress = attack, observation, generator, progress
        # Matching the whole update begins where inverting-gradients begins with this seed.
        self.untouched = generator.clone_state()
        self.victim = Victim.of(observation)
        self.update = dict(observation.message.update)
        self.like = next(iter(self.update.values()))
        self.held: Embedding | None = None
        self.known: KnownValues | None = None
        self.before: Embedding | None = None
        self.best: Candidate | None = None
        self.latest: Candidate | None = None
        self.noise: NoiseTest | None = None
        self.notes: list[str] = []
        self.steps = self.searches = self._shown = 0

    def hold(self, found: Embedding | None) -> None:
        self.held = found
        for name in ("dropped_below", "solvable", "gated", "matching"):
            self.__dict__.pop(name, None)
        if self.best is not None:  # measured as what is found from now on
            self.best = dataclasses.replace(self.best, distance=self.distance(self.best.inputs))

    @property
    def finished(self) -> bool:
        """Return whether the best was solved as well as it can be, so that no other stage is worth its time."""
        return self.best is not None and self.best.settles

    def take(self, stage: Stage[Case]) -> None:
        """Let a stage propose, if it applies and anything is left to find, and keep the best."""
        if not self.finished and stage.applies(self):
            for found in stage.propose(self):
                self.best = found if found.better_than(self.best) else self.best

    @property
    def below(self) -> Embedding | None:
        """Return what is held, where something below it is still to be found."""
        return None if self.held is None or self.held.reaches_input else self.held

    @cached_property
    def smooth(self) -> bool:
        return not kinks(self.observation.model, self.observation.input_shape)

    @property
    def patience(self) -> float:
        """Return how many times as long as elsewhere a search may go on: below a convolution the end is exact."""
        held = self.held
        dense = held is None or isinstance(self.observation.model.get_submodule(held.layer), nn.Linear)
        return 1.0 if dense else PATIENCE_BELOW_CONVOLUTIONS

    @cached_property
    def work(self) -> float:
        # Two, for BatchNorm in train mode cannot normalise a single number.
        return forward_flops(self.victim.model, self.blank(2)) / 2 * (self.observation.num_examples or 1)

    @cached_property
    def dropped_below(self) -> list[str]:
        """List layers below the cut of whose inputs the client's network dropped an unknown part."""
        channel, model = self.observation.channel, self.observation.model
        if channel is None or not channel.dropped_layers or self.below is None:
            return []
        return searched_layers(model, self.below.layer, channel.dropped_layers, self.blank(1))

    @cached_property
    def solvable(self) -> bool:
        """Return whether inputs near the right ones lead on to the exact ones, by equations."""
        below = self.below
        if not self.attack.solve or below is None or below.seen is not None or (self.smooth and not below.exact):
            return False
        if self.observation.batchnorm == "train" and self.victim.batchnorm_targets:
            self.notes.append("BatchNorm uses the statistics of the batch, so the search is not finished")
            return False
        return self.smooth or self.gated is not None

    @cached_property
    def gated(self) -> GatedProblem | None:
        observation, held = self.observation, self.below
        assert held is not None
        try:
            network = read_gated(observation.model, observation.input_shape, held.layer)
        except NotApplicable as error:
            self.notes.append(f"masks are not decoded: {error}")
            return None
        gradients = {name: value.cpu() for name, value in self.update.items()}
        options: dict[str, Any] = {"project": observation.inputs.project, "silence": held.silence}
        options["work"] = WORK * self.patience
        problem = GatedProblem(network, held.features, held.adjoints, gradients, **options)
        if problem.affordable_products() < LEAST_PRODUCTS:
            self.notes.append(f"masks are not decoded: the network is too large ({network.work:.0e} multiplications)")
            return None
        return problem

    @cached_property
    def matching(self) -> HeldMatching:
        held, channel = self.below, self.observation.channel
        assert held is not None
        names, first = self._weights_below(held.layer)
        facts: dict[str, Any] = {
            "model": self.victim.model,
            "layer": self.victim.model.get_submodule(held.layer),
            "features": held.features.to(self.like),
            "adjoints": held.adjoints.to(self.like),
            "gradients": {name: self.update[name] for name in names},
            "inputs": self.observation.inputs,
            "first": first,
            "survivors": self.victim.tensors.survivors,
            "seen": None if held.seen is None else held.seen.to(self.like),
        }
        if not self.dropped_below or channel is None:
            return HeldMatching(**facts, tv=self.attack.tv)
        self.notes.append(f"masks of the inputs of {', '.join(self.dropped_below)} are searched along")
        # Total variation counts more where masks are searched, and does not fall to zero.
        facts |= {"tv": 5.0 * self.attack.tv, "least_tv": 0.3}
        return DroppedMatching(**facts, dropped=self.dropped_below, probability=channel.units_dropped)

    def _weights_below(self, cut: str) -> tuple[list[str], frozenset[str]]:
        """List weights of two or more dimensions that act before the cut, and those of them that read the input."""
        record = record_layers(self.observation.model, self.blank(2), evaluate=True)
        layers = [call.name for call in record.calls]
        before = layers[: layers.index(cut)]
        owners = {name: name.rpartition(".")[0] for name in self.update}
        # A class token, say, or positions: they belong to no layer, and stand beside the input.
        beside = {name for name, owner in owners.items() if owner not in layers}
        names = [n for n, value in self.update.items() if value.dim() > 1 and (owners[n] in before or n in beside)]
        return names, frozenset(name for name in names if name in beside or owners[name] == before[0])

    @property
    def pruned(self) -> bool:
        """Return whether entries of what is held are missing, and nothing else stands in the way of a search."""
        return self.held is not None and self.held.seen is not None and not self.dropped_below

    @property
    def rounds(self) -> int:
        if self.known is not None:
            return 1  # nothing is searched that another start could change
        exact = self.held is not None and self.held.exact
        return self.attack.tries if exact or self.pruned else min(self.attack.tries, NOISY_TRIES)

    @property
    def settled(self) -> bool:
        """Return whether another round has nothing to gain, or takes too long."""
        if self.best is None or self.below is None:
            return True
        if not self.solvable:
            return not self.pruned  # few entries, no noise: to search on from the best pays
        return self.best.residual < SETTLED or self.smooth or self.steps * self.work > MOST_WORK * self.patience

    @property
    def targets(self) -> Tensor:
        """Return the labels; any will do where the output gradient stands for the loss."""
        known, device = self.observation.labels, self.observation.device
        labels = known if known is not None or self.held is None else self.held.labels  # soft ones, too
        if labels is None:
            return torch.zeros(self.observation.num_examples or 1, dtype=torch.int64, device=device)
        return labels.to(device)

    @property
    def labels(self) -> Tensor | None:
        source = self.best if self.held is None else self.held
        return self.observation.labels if source is None or self.observation.labels is not None else source.labels

    def blank(self, count: int) -> Tensor:
        return self.like.new_zeros((count, *self.observation.input_shape))

    def candidate(self, inputs: Tensor, method: str, **facts: Any) -> Candidate:
        inputs = inputs.detach().to(self.like)
        return Candidate(inputs=inputs, method=method, distance=self.distance(inputs), **facts)

    def distance(self, inputs: Tensor, targets: Tensor | None = None) -> float:
        """Return what inputs leave of the update, by the client's own loss; where a cut is held, of its direction."""
        if self.held is None and targets is not None:
            return unexplained(self.observation, inputs, targets)
        # Without labels the output gradient stands for the loss.
        stands = targets is None and self.held is not None and self.held.labels is None
        held = self.held.output_gradients.to(inputs) if stands and self.held is not None else None
        victim = self.victim
        update, _ = victim.gradient(victim.tensors, inputs, self.targets if targets is None else targets, held)
        return float(DirectionL1()(self.update, victim.sent_update(update, victim.tensors)))

    def whole(self, inputs: Tensor) -> float:
        """Return what inputs leave of the whole update, with the labels that are held.

        Computed as the client computed it, and in float64: a unit within rounding of zero may be active in one alone.
        """
        wide = self.observation.to(dtype=torch.float64)
        inputs, targets = inputs.detach().to(wide.device), self.targets.to(wide.device)
        precisions = (self.observation, inputs.to(self.like)), (wide, inputs.double())
        return min(unexplained(observation, x, targets) for observation, x in precisions)

    def told(self, steps: int) -> Progress | None:
        """Report ``steps`` further steps; how many there will be in all depends on what they find."""
        before = self._shown = max(self._shown, self.steps)
        self.steps += steps
        progress, least = self.progress, max(self.attack.iterations, before + steps)
        if progress is None:
            return None

        def tell(done: int, total: int, value: float) -> None:
            self._shown = before + total
            progress(before + done, max(least, before + total), value)

        return tell

    def result(self) -> Reconstruction:
        found, held, observation = self.best, self.held, self.observation
        assert found is not None  # matching the whole update always proposes one
        certified = found.proved
        flags, channel = list(() if certified else found.flags), observation.channel
        known = observation.labels is not None or observation.label_counts is not None
        info = {"restarts": max(self.searches, 1), "compiled": False, **found.info}
        info |= {"steps": self.steps, "distance": found.distance, "method": found.method}
        labels = found.labels
        if held is not None:
            labels = None if held.labels is None else held.labels.to(found.inputs.device)
            if not (known or held.exact or certified):
                flags.append("labels uncertain")
            if several_steps(observation):
                flags.append("steps not simulated")
            info |= {"labels": "known" if known else "head", "cut": held.layer, "head_residual": held.residual}
            info["residual"] = found.residual if math.isfinite(found.residual) else None
        notes = (*(() if held is None else held.notes), *self.notes, *found.notes)
        info |= {"surprise": found.surprise} if found.surprise else {}
        if self.noise is not None:
            notes = (*notes, self.noise.describe())
            info |= {"noise_p_value": self.noise.p_value, "noise_ratio": self.noise.ratio}
        # Masks that were read rather than searched.
        undone = certified and channel is not None and bool(channel.dropped_layers) and not self.dropped_below
        return Reconstruction(
            inputs=found.inputs,
            labels=labels,
            scores=torch.full((len(found.inputs),), found.distance if found.score is None else found.score),
            history={"objective": [list(found.curve)] if found.curve else []},
            flags=tuple(dict.fromkeys(flags)),
            notes=notes,
            info=info,
            certificates=found.certificates,
            residual=found.residual if math.isfinite(found.residual) else None,
            defence_undone=undone,
        )
