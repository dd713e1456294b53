"""Head first: the strongest attack of the house on trained networks, in batches, with repeated labels.

An attack of this project's own, in three steps; docs/strength.md explains and measures each of them.

1. *Head first.* The gradient of the last linear layer gives each example's features and output gradients exactly, and
   dense layers below it are peeled one by one (:mod:`leakscope.equations.embedding`). An MLP ends here.
2. *Match below the cut* with features and adjoints held (:mod:`leakscope.matching.held`): the softmax, which misleads a
   search in every trained network, is out of the way. Among a few weightings that one is taken whose short trial
   explains the whole update best.
3. *From near to exact.* In ReLU networks masks are decoded and what is then linear is solved
   (:mod:`leakscope.attacks.head_first.finish`). A residual of rounding and no free direction are a certificate. Further
   rounds of matching and solving go on until one explains the update. Networks without kinks are finished by
   Gauss-Newton steps.
   Under noise of a known level the most probable pictures are looked for (:mod:`leakscope.attacks.head_first.noise`).

Where the head tells nothing (pruned, too many examples, several local steps) the whole update is matched, as
``inverting-gradients`` does with its default settings, and on networks without kinks as ``idlg`` does
(:mod:`leakscope.attacks.head_first.rivals`); a note says why.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from leakscope.attacks.gradient_matching import several_steps
from leakscope.attacks.head_first.finish import DECODED, Finish, Finisher
from leakscope.attacks.head_first.noise import with_known_noise
from leakscope.attacks.head_first.rivals import (
    MOST_WORK,
    best_match,
    forward_work,
    is_better,
    match_whole_update,
    rivals_for,
)
from leakscope.attacks.mixtures import is_mixed, solve_parts
from leakscope.attacks.proof import gives_update
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.certificate import EXPLAINED, Certificate
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.equations.determinacy import free_inputs_of_dense
from leakscope.equations.embedding import Embedding, recover_embedding
from leakscope.matching import DirectionL1, Victim
from leakscope.matching.dropped import MASKS, DroppedMatching, searched_layers
from leakscope.matching.held import WEIGHTINGS, HeldMatching, Weighting
from leakscope.matching.search import Watch
from leakscope.matching.unexplained import unexplained
from leakscope.network.kinks import kinks
from leakscope.network.recorder import record_layers

#: What the rounding of a batch's gradient alone may leave: below this there is nothing left to gain by another round.
SETTLED = 3e-6
#: With a residual below this masks are right but for a few, and the residual tells more than the whole update's
#: distance, in which one wrong mask outweighs all pixels.
NEARLY = 1e-4
#: Rounds where noise or rounding leaves no certificate to be reached.
NOISY_TRIES = 2
#: How much more total variation counts where masks are searched, and the share of it that remains in the end.
MASKS_TV, MASKS_LEAST_TV = 5.0, 0.3
WHOLE_UPDATE = "whole update"


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Inputs that some step found, in the model's space, and what they leave of the whole update.

    ``residual``: what they leave of the equations that were solved. ``free``: the directions of each example that these
    do not determine.
    """

    inputs: Tensor
    distance: float
    way: str
    residual: float = math.inf
    free: tuple[int | None, ...] = ()
    curve: tuple[float, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def rank(self) -> tuple[bool, float]:
        """Smaller is better: by the residual where that is small, else by what is left of the update."""
        if self.residual < NEARLY:
            return False, self.residual
        return True, self.distance if math.isfinite(self.distance) else math.inf

    def certificates(self) -> tuple[Certificate, ...]:
        """Certify each example; none where the equations that were solved are not explained."""
        if not self.residual < EXPLAINED:
            return ()
        return tuple(Certificate.of_share(self.residual, count, self.way) for count in self.free)


def _better(first: _Candidate | None, second: _Candidate) -> _Candidate:
    return second if first is None or second.rank < first.rank else first


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
        # Matching the whole update then begins where inverting-gradients begins with this seed.
        untouched = generator.clone_state()
        result, embedding = self._without_noise(observation, generator, untouched, progress)
        return with_known_noise(result, observation, embedding, untouched, self.iterations, progress)

    def _without_noise(
        self,
        observation: Observation,
        generator: torch.Generator,
        untouched: torch.Generator,
        progress: Progress | None,
    ) -> tuple[Reconstruction, Embedding | None]:
        """What is found by taking the update as it is, and what its head told."""
        try:
            embedding = recover_embedding(observation, generator)
            if several_steps(observation) and not embedding.exact:
                raise NotApplicable("the update is that of several local steps, and not nearly one gradient")
        except NotApplicable as error:
            note = f"the head tells nothing, so the whole update is matched, as inverting-gradients does: {error}"
            rivals = rivals_for(observation, self.iterations)
            result = best_match(match_whole_update(rivals, observation, untouched, progress), observation)
            info = {**result.info, "way": WHOLE_UPDATE}
            return dataclasses.replace(result, notes=(note, *result.notes), info=info), None
        below = _Below(self, observation, embedding, generator, untouched, progress)
        return below.reconstruct(), embedding


class _Below:
    """The work below the cut of one embedding."""

    def __init__(
        self,
        attack: HeadFirst,
        observation: Observation,
        embedding: Embedding,
        generator: torch.Generator,
        untouched: torch.Generator,
        progress: Progress | None,
    ) -> None:
        self.attack, self.observation, self.embedding = attack, observation, embedding
        self.generator, self.untouched, self.progress = generator, untouched, progress
        self.victim = Victim.of(observation)
        self.update = dict(observation.message.update)
        self.notes = list(embedding.notes)
        self.smooth = not kinks(observation.model, observation.input_shape)
        self.steps = self.tries = 0

    def reconstruct(self) -> Reconstruction:
        best = self._algebra() if self.embedding.reaches_input else self._search()
        # Where masks of units are unknown, the distance of the network's mean would prefer what explains that one.
        rival = self.attack.rival and not self._dropped_below()
        if best.residual >= SETTLED and rival and not self.embedding.reaches_input:
            best = self._rivalled(best)
        return self._result(best)

    def _algebra(self) -> _Candidate:
        """The cut is the input itself: nothing is left to search."""
        inputs = self.embedding.features.reshape(-1, *self.observation.input_shape)
        free = free_inputs_of_dense(self.embedding.signals, self.embedding.features)
        return dataclasses.replace(self._candidate(inputs, "algebra"), residual=self.embedding.residual, free=free)

    def _search(self) -> _Candidate:
        """Searches below the cut, each finished where that can be done, until one has a certificate."""
        matching = self._matching()
        exact = self.embedding.exact
        finish: Finish | None = None
        if self.attack.solve and self.embedding.seen is None and (exact or not self.smooth):
            finisher = Finisher(self.observation, self.embedding, self.victim, self._targets(), self.notes)
            finish = finisher.for_network(self.smooth)
        work = forward_work(self.observation) * len(self.embedding.features)
        best: _Candidate | None = None
        searched = isinstance(matching, DroppedMatching)
        pruned = self.embedding.seen is not None and not searched
        for number in range(self.attack.tries if exact or pruned else min(self.attack.tries, NOISY_TRIES)):
            found = self._round(matching, number, best, finish is not None)
            best = _better(best, found)
            if finish is None:
                if pruned:  # few entries, no noise: to search on from the best pays
                    continue
                break
            best = _better(best, self._finished(finish, found))
            if best.residual < SETTLED or self.smooth or self.steps * work > MOST_WORK:
                break
        assert best is not None
        return best

    def _round(self, matching: HeldMatching, number: int, best: _Candidate | None, finished: bool) -> _Candidate:
        """One search: from a random start, or on from the best so far, where masks that the solver has put right help.

        One example, known exactly: its masks are decoded from far away, so that a short search does, and then another
        random start.
        """
        single = len(self.embedding.features) == 1 and self.embedding.exact
        steps = self.attack.iterations
        if isinstance(matching, DroppedMatching):
            return self._match(matching, matching.start(self.generator), MASKS, steps)
        if best is not None and (number > 1 or not single):
            return self._match(matching.near(), matching.start_near(best.inputs), WEIGHTINGS[0], steps)
        short = finished and single and number == 0 and not self.smooth
        weighting = WEIGHTINGS[0] if short else self._choose(matching)
        return self._match(matching, matching.start(self.generator), weighting, max(1, steps // 3) if short else steps)

    def _match(self, matching: HeldMatching, start: Tensor, weighting: Weighting, steps: int) -> _Candidate:
        self.tries += 1
        result = matching.run(start, weighting, steps, self._watch(steps))
        found = self._candidate(matching.to_model(matching.pictures(result.points[0])), weighting.name)
        falling = result.still_falling(0, steps)
        curve = tuple(float(value[0]) for value in result.curves)
        return dataclasses.replace(found, curve=curve, flags=("did not converge",) if falling else ())

    def _choose(self, matching: HeldMatching) -> Weighting:
        """The weighting whose short trial, from one start, leaves least of the whole update."""
        count = max(1, self.attack.iterations // 6)
        start = matching.start(self.generator)
        distances = []
        for weighting in WEIGHTINGS:
            point = matching.run(start, weighting, count, self._watch(count)).points[0]
            distance = self._distance(matching.to_model(matching.pictures(point)))
            distances.append(distance if math.isfinite(distance) else math.inf)
        return WEIGHTINGS[distances.index(min(distances))]

    def _matching(self) -> HeldMatching:
        names, first = self._weights_below()
        like = next(iter(self.update.values()))
        facts: dict[str, Any] = {
            "model": self.victim.model,
            "layer": self.victim.model.get_submodule(self.embedding.layer),
            "features": self.embedding.features.to(like),
            "adjoints": self.embedding.adjoints.to(like),
            "gradients": {name: self.update[name] for name in names},
            "inputs": self.observation.inputs,
            "first": first,
            "survivors": self.victim.tensors.survivors,
            "seen": None if self.embedding.seen is None else self.embedding.seen.to(like),
        }
        dropped, channel = self._dropped_below(), self.observation.channel
        if not dropped or channel is None:
            return HeldMatching(**facts, tv=self.attack.tv)
        self.notes.append(f"masks of the inputs of {', '.join(dropped)} are searched along")
        facts |= {"tv": MASKS_TV * self.attack.tv, "least_tv": MASKS_LEAST_TV}
        return DroppedMatching(**facts, dropped=dropped, probability=channel.units_dropped)

    def _dropped_below(self) -> list[str]:
        """Layers below the cut whose inputs the client's network dropped, which ones is not known."""
        channel = self.observation.channel
        if channel is None or not channel.dropped_layers or self.embedding.reaches_input:
            return []
        return searched_layers(
            self.observation.model, self.embedding.layer, channel.dropped_layers, self.victim_input(1)
        )

    def _masks_known(self) -> bool:
        """Whether the client's network dropped units, and which ones was read rather than searched."""
        channel = self.observation.channel
        return channel is not None and bool(channel.dropped_layers) and not self._dropped_below()

    def _weights_below(self) -> tuple[list[str], frozenset[str]]:
        """Weights of two or more dimensions that act before the cut, and those among them that read the input."""
        record = record_layers(self.observation.model, self.victim_input(2), evaluate=True)
        layers = [call.name for call in record.calls]
        before = layers[: layers.index(self.embedding.layer)]
        owners = {name: name.rpartition(".")[0] for name in self.update}
        # A class token, say, or positions: they belong to no layer, and stand beside the input.
        beside = {name for name, owner in owners.items() if owner not in layers}
        names = [n for n, value in self.update.items() if value.dim() > 1 and (owners[n] in before or n in beside)]
        return names, frozenset(name for name in names if name in beside or owners[name] == before[0])

    def _finished(self, finish: Finish, near: _Candidate) -> _Candidate:
        """What finishing makes of a search, or the search itself."""
        solution = finish(near.inputs)
        if solution is None:
            return near
        solved = self._candidate(solution.inputs, f"{near.way}, {solution.way}")
        return dataclasses.replace(
            solved, residual=solution.residual, free=solution.free, curve=near.curve, flags=near.flags
        )

    def _rivalled(self, best: _Candidate) -> _Candidate:
        """The best so far, or what matching the whole update finds with these labels where that explains it better."""
        known = dataclasses.replace(self.observation.knowledge, labels="yes")
        labels = self.embedding.labels
        if labels is None or self.observation.labels is not None:
            observation = self.observation
        else:
            observation = dataclasses.replace(
                self.observation, knowledge=known, labels=labels.to(self.observation.device), label_counts=None
            )
        rivals = rivals_for(observation, self.attack.iterations)
        try:
            told = self._told(sum(rival.iterations for rival in rivals))
            results = match_whole_update(rivals, observation, self.untouched, told)
        except (RuntimeError, NotApplicable) as error:  # the steps of an LSTM, say, are not unrolled
            self.notes.append(f"the whole update is not matched: {str(error).strip().splitlines()[0]}")
            return best
        search, *least_squares = (
            dataclasses.replace(
                self._candidate(result.inputs, WHOLE_UPDATE),
                curve=tuple(result.history["objective"][0]),
                flags=result.flags,
            )
            for result in results
        )
        best = _better(best, search)
        for rival in least_squares:
            left = self._unexplained(best)
            if is_better(observation, rival.inputs, self._unexplained(rival), best.inputs, left):
                best = rival
        return best

    def _unexplained(self, one: _Candidate) -> float:
        held = self._held_output_gradients(one.inputs)
        return unexplained(self.observation, one.inputs, self._targets(), held)

    def _candidate(self, inputs: Tensor, way: str) -> _Candidate:
        inputs = inputs.detach().to(next(iter(self.update.values())))
        return _Candidate(inputs, self._distance(inputs), way)

    def _distance(self, inputs: Tensor) -> float:
        """What these inputs leave of the direction of the whole update, by the client's own loss."""
        victim, held = self.victim, self._held_output_gradients(inputs)
        update, _ = victim.gradient(victim.tensors, inputs, self._targets(), held)
        return float(DirectionL1()(self.update, victim.sent_update(update, victim.tensors)))

    def _held_output_gradients(self, like: Tensor) -> Tensor | None:
        """What stands for the loss where there are no labels."""
        return self.embedding.output_gradients.to(like) if self.embedding.labels is None else None

    def _targets(self) -> Tensor:
        """The labels; any will do where the output gradient stands for the loss."""
        known, device = self.observation.labels, self.observation.device
        labels = self.embedding.labels if known is None else known  # soft ones, too
        count = len(self.embedding.features)
        return torch.zeros(count, dtype=torch.int64, device=device) if labels is None else labels.to(device)

    def victim_input(self, count: int) -> Tensor:
        return next(iter(self.update.values())).new_zeros((count, *self.observation.input_shape))

    def _watch(self, steps: int) -> Watch:
        tell = self._told(steps)
        return lambda done, values, _best: None if tell is None else tell(done, steps, float(values[0]))

    def _proves(self, found: _Candidate) -> bool:
        """Whether solved inputs give the whole update; decoded masks were checked in every layer of it.

        Where units were dropped the network is another one, and an input that was dropped is not the client's.
        """
        if found.residual >= EXPLAINED or found.way.endswith(DECODED):
            return True
        channel = self.observation.channel
        if channel is not None and channel.dropped_layers:
            return self.embedding.reaches_input and self.embedding.layer not in channel.dropped_layers
        return gives_update(self.observation, found.inputs, self.embedding.labels)

    def _told(self, steps: int) -> Progress | None:
        """Tells of ``steps`` further steps; how many there will be in all depends on what they find."""
        before, self.steps = self.steps, self.steps + steps
        progress, total = self.progress, max(self.attack.iterations, self.steps)
        return None if progress is None else (lambda done, _, value: progress(before + done, total, value))

    def _result(self, found: _Candidate) -> Reconstruction:
        embedding, observation = self.embedding, self.observation
        certificates = found.certificates() if self._proves(found) else ()
        certified = bool(certificates) and all(one.holds for one in certificates)
        flags = list(() if certified else found.flags)
        known = observation.labels is not None or observation.label_counts is not None
        if not (known or embedding.exact or certified):
            flags.append("labels uncertain")
        if several_steps(observation):
            flags.append("steps not simulated")
        return Reconstruction(
            inputs=found.inputs,
            labels=None if embedding.labels is None else embedding.labels.to(found.inputs.device),
            scores=torch.full((len(found.inputs),), found.distance),
            history={"objective": [list(found.curve)] if found.curve else []},
            flags=tuple(dict.fromkeys(flags)),
            notes=tuple(self.notes),
            info={
                "steps": self.steps,
                "restarts": max(self.tries, 1),
                "compiled": False,
                "distance": found.distance,
                "labels": "known" if known else "head",
                "way": found.way,
                "cut": embedding.layer,
                "head_residual": embedding.residual,
                "residual": found.residual if math.isfinite(found.residual) else None,
                "defence_undone": certified and self._masks_known(),
            },
            certificates=certificates,
        )
