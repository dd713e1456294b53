"""Head first: the strongest attack of the house on trained networks, in batches, with repeated labels.

An attack of this project's own, in three steps; docs/strength.md explains and measures each of them.

1. *Head first.* The gradient of the last linear layer gives each example's features and output gradients exactly, and
   dense layers below it are peeled one by one (:mod:`leakscope.equations.embedding`). An MLP ends here.
2. *Match below the cut* with features and adjoints held (:mod:`leakscope.matching.held`): the softmax, which misleads a
   search in every trained network, is out of the way. Among a few weightings that one is taken whose short trial
   explains the whole update best.
3. *From near to exact.* In ReLU networks masks are decoded and what is then linear is solved
   (:mod:`leakscope.equations.gated_inverse`), and the residual is a certificate. Other starts are tried until one ends
   with it. Networks without kinks are finished by Gauss-Newton steps.

Where the head tells nothing (pruned, too many examples, several local steps) the attack is ``inverting-gradients`` with
its default settings, and a note says why.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakscope.attacks.inverting_gradients import InvertingGradients
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.equations.embedding import Embedding, recover_embedding
from leakscope.equations.gated_inverse import GatedProblem, SolverSettings
from leakscope.equations.head_solution import HeadRefused
from leakscope.matching import DirectionL1, Victim
from leakscope.matching.held import WEIGHTINGS, HeldMatching, Weighting
from leakscope.network.activations import Unsupported
from leakscope.network.gates import GatedNetwork, read_gated
from leakscope.network.recorder import record_layers

#: A certificate below this is one: the layers' gradients are explained to the rounding of float32.
CERTIFIED = 1e-6


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Inputs that some step found: in the model's space, with what they leave of the whole update."""

    inputs: Tensor
    distance: float
    certificate: float
    curve: list[float]
    way: str

    @property
    def rank(self) -> tuple[bool, float]:
        return self.certificate >= CERTIFIED, self.distance


@dataclass(frozen=True, kw_only=True)
class HeadFirst(Attack):
    """Recover features and output gradients from the head, match below it, decode masks and solve."""

    reads_channel: ClassVar[bool] = True

    iterations: int = setting(300, "Steps of each search below the cut.", ge=1)
    tries: int = setting(3, "Starts at most; one that ends with a certificate ends them.", ge=1)
    tv: float = setting(0.03, "Weight of total variation.", ge=0)
    solve: bool = setting(True, "Decode the masks of ReLU networks and solve what is then linear.")

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        try:
            embedding = recover_embedding(observation, generator)
        except HeadRefused as error:
            return self._without_head(observation, generator, progress, str(error))
        return _Below(self, observation, embedding, generator, progress).reconstruct()

    def _without_head(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None, why: str
    ) -> Reconstruction:
        result = InvertingGradients(iterations=self.iterations).run(observation, generator, progress)
        note = f"the head tells nothing, so the whole update is matched as inverting-gradients does: {why}"
        return dataclasses.replace(result, notes=(note, *result.notes), info={**result.info, "way": "whole update"})


class _Below:
    """The work below the cut of one embedding."""

    def __init__(
        self,
        attack: HeadFirst,
        observation: Observation,
        embedding: Embedding,
        generator: torch.Generator,
        progress: Progress | None,
    ) -> None:
        self.attack, self.observation, self.embedding = attack, observation, embedding
        self.generator, self.progress = generator, progress
        self.victim = Victim.of(observation)
        self.notes = list(embedding.notes)

    def reconstruct(self) -> Reconstruction:
        if self.embedding.reaches_input:
            found = self._candidate(self.embedding.features.reshape(-1, *self.observation.input_shape), "algebra", [])
            found = dataclasses.replace(found, certificate=self.embedding.residual)
            return self._result(found, steps=0, tries=1)
        network = self._gated() if self.attack.solve and self.embedding.exact else None
        matching = self._matching()
        best: _Candidate | None = None
        steps = tries = 0
        single = len(self.embedding.features) == 1
        for number in range(self.attack.tries):
            quick = single and network is not None and number == 0
            weighting = WEIGHTINGS[0]
            if not quick:
                weighting, spent = self._choose(matching)
                steps += spent
            count = max(1, self.attack.iterations // 3) if quick else self.attack.iterations
            result = matching.run(matching.start(self.generator), weighting, count, self._watch)
            steps, tries = steps + count, tries + 1
            pictures = matching.to_model(matching.pictures(result.points[0]))
            curve = [float(value[0]) for value in result.curves]
            found = self._candidate(pictures, weighting.name, curve)
            if network is not None:
                found = min(found, self._solved(network, pictures, found), key=lambda one: one.rank)
            best = found if best is None else min(best, found, key=lambda one: one.rank)
            if network is None or best.certificate < CERTIFIED:
                break
        assert best is not None
        return self._result(best, steps, tries)

    def _gated(self) -> GatedNetwork | None:
        observation = self.observation
        if observation.batchnorm == "train" and self.victim.batchnorm_targets:
            self.notes.append("BatchNorm uses the statistics of the batch, so masks are not decoded")
            return None
        try:
            return read_gated(observation.model, observation.input_shape, self.embedding.layer)
        except Unsupported as error:
            self.notes.append(f"masks are not decoded: {error}")
            return None

    def _matching(self) -> HeldMatching:
        observation, embedding = self.observation, self.embedding
        like = next(iter(observation.message.update.values()))
        names, first = self._weights_below()
        return HeldMatching(
            model=self.victim.model,
            layer=self.victim.model.get_submodule(embedding.layer),
            features=embedding.features.to(like),
            adjoints=embedding.adjoints.to(like),
            gradients={name: observation.message.update[name] for name in names},
            inputs=observation.inputs,
            first=first,
            tv=self.attack.tv,
        )

    def _weights_below(self) -> tuple[list[str], frozenset[str]]:
        """Weights of two or more dimensions that act before the cut, and those among them that read the input."""
        observation = self.observation
        like = next(observation.model.parameters())
        probe = like.new_zeros((2, *observation.input_shape))
        record = record_layers(observation.model, probe, evaluate=True)
        layers = [call.name for call in record.calls]
        before = layers[: layers.index(self.embedding.layer)]
        owned = {name: name.rpartition(".")[0] for name in observation.message.update}
        containers = {name for name, owner in owned.items() if owner not in layers}  # a class token, say
        names = [
            name
            for name, value in observation.message.update.items()
            if value.dim() > 1 and (owned[name] in before or name in containers)
        ]
        first = frozenset(name for name in names if name in containers or owned[name] == before[0])
        return names, first

    def _choose(self, matching: HeldMatching) -> tuple[Weighting, int]:
        """The weighting whose short trial leaves least of the whole update, and the steps that this took."""
        count = max(1, self.attack.iterations // 6)
        start = matching.start(self.generator)
        distances = []
        for weighting in WEIGHTINGS:
            result = matching.run(start, weighting, count, self._watch)
            distances.append(self._distance(matching.to_model(matching.pictures(result.points[0]))))
        best = min(range(len(WEIGHTINGS)), key=lambda n: distances[n] if math.isfinite(distances[n]) else math.inf)
        return WEIGHTINGS[best], count * len(WEIGHTINGS)

    def _solved(self, network: GatedNetwork, near: Tensor, found: _Candidate) -> _Candidate:
        embedding, inputs = self.embedding, self.observation.inputs
        problem = GatedProblem(
            network,
            embedding.features,
            embedding.adjoints,
            {name: value.cpu() for name, value in self.observation.message.update.items()},
            project=inputs.project if inputs.bounded else (lambda x: x),
        )
        solution = problem.solve(near.cpu(), SolverSettings(exact=CERTIFIED))
        solved = self._candidate(solution.inputs.to(near), f"{found.way}, solved", found.curve)
        return dataclasses.replace(solved, certificate=solution.certificate)

    def _candidate(self, inputs: Tensor, way: str, curve: list[float]) -> _Candidate:
        like = next(iter(self.observation.message.update.values()))
        inputs = inputs.to(like)
        return _Candidate(inputs, self._distance(inputs), math.inf, curve, way)

    def _distance(self, inputs: Tensor) -> float:
        """What these inputs leave of the direction of the whole update, by the client's own loss."""
        victim, embedding = self.victim, self.embedding
        labels = embedding.labels
        held = None if labels is not None else embedding.output_gradients.to(inputs)
        targets = torch.zeros(len(inputs), dtype=torch.int64) if labels is None else labels
        update, _ = victim.gradient(victim.tensors, inputs, targets.to(inputs.device), held)
        return float(DirectionL1()(self.observation.message.update, victim.sent_update(update, victim.tensors)))

    def _watch(self, done: int, values: Tensor, _best: Tensor) -> None:
        if self.progress is not None:
            self.progress(done, self.attack.iterations, float(values[0]))

    def _result(self, found: _Candidate, steps: int, tries: int) -> Reconstruction:
        embedding, observation = self.embedding, self.observation
        certified = found.certificate < CERTIFIED
        return Reconstruction(
            inputs=found.inputs.detach(),
            labels=None if embedding.labels is None else embedding.labels.to(found.inputs.device),
            scores=torch.full((len(found.inputs),), found.distance),
            history={"objective": [found.curve]},
            flags=(),
            notes=tuple(self.notes),
            info={
                "steps": steps,
                "restarts": tries,
                "compiled": False,
                "distance": found.distance,
                "labels": "known" if observation.labels is not None else "head",
                "way": found.way,
                "cut": embedding.layer,
                "head_residual": embedding.residual,
                "certificate": found.certificate,
                "certified": certified,
            },
        )
