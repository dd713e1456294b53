"""The stages of ``head-first`` that take the update as it is, in their order.

The whole update is matched as ``inverting-gradients`` does; on networks without kinks as ``idlg`` does, too. Under
noise its plain least squares come to what the noise leaves, where a search with a prior is lost (DLG's LeNet, two
CIFAR-10 images, noise of 1e-3: 39 dB against 20); where the noise is strong, or the update hardly determines the
picture, the prior is right: :meth:`~leakscope.attacks.candidates.Candidate.better_than` decides.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from leakscope.attacks.candidates import Candidate, Stage, certify
from leakscope.attacks.gradient_matching import GradientMatching, several_steps
from leakscope.attacks.head_first.case import LEAST_PRODUCTS, MOST_WORK, SETTLED, Case
from leakscope.attacks.idlg import IDLG
from leakscope.attacks.inverting_gradients import InvertingGradients
from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.errors import NotApplicable
from leakscope.equations.determinacy import free_inputs_of_dense
from leakscope.equations.embedding import peel_embedding, recover_embedding
from leakscope.matching import GradientMap, LevenbergMarquardt
from leakscope.matching.determinacy import ACCURATE, free_directions, movement
from leakscope.matching.gradient_map import affordable_steps
from leakscope.matching.held import MASKS, WEIGHTINGS, DroppedMatching, HeldMatching, Weighting
from leakscope.matching.search import Watch

WHOLE_UPDATE = "whole update"
#: Where an update that is off by what a certificate allows moves the inputs by more, Gauss-Newton steps are not worth
#: their time: 4e-6 was seen where images came back at 109 dB, 5e-5 on a transformer with many images for one update.
MOST_MOVEMENT = ACCURATE / 5
#: Evaluations times multiplications of a forward pass up to which least squares are tried: a batch of four of a small
#: ConvNet, which takes them three quarters of a minute, is worth it (untrained, tanh: 65 dB against 43).
MOST_LEAST_SQUARES = 4 * MOST_WORK


class SolveHead(Stage[Case]):
    """Solve for each example's features and output gradients from the gradient of the last linear layer."""

    def applies(self, case: Case) -> bool:
        return True

    def propose(self, case: Case) -> Iterator[Candidate]:
        try:
            found = recover_embedding(case.observation, case.generator, peel=False)
            if several_steps(case.observation) and not found.exact:
                raise NotApplicable("the update is that of several local steps, and not nearly one gradient")
            case.hold(found)
        except NotApplicable as error:
            case.notes.append(f"the last layer could not be solved ({error}); the whole update is matched instead")
        return iter(())


class PeelDense(Stage[Case]):
    """Solve dense layers below the head, one by one; where they reach the input, nothing is left to search."""

    def applies(self, case: Case) -> bool:
        return case.held is not None

    def propose(self, case: Case) -> Iterator[Candidate]:
        assert case.held is not None
        held = peel_embedding(case.observation, case.held)
        case.hold(held)
        if held.reaches_input:
            inputs = held.features.reshape(-1, *case.observation.input_shape)
            found = case.candidate(inputs, "algebra", residual=held.residual)
            dropped = () if case.observation.channel is None else case.observation.channel.dropped_layers
            # Where units were dropped the network is another one, and an input that was dropped is not the client's.
            if held.layer not in dropped:
                free = free_inputs_of_dense(held.signals, held.features)
                facts = (held.labels, held.residual, free, found.method)
                proofs = certify(case.observation, found.inputs, *facts, replay=not dropped)
                found = dataclasses.replace(found, certificates=proofs)
            yield found


class SearchBelow(Stage[Case]):
    """Match below the cut with features and adjoints held (:mod:`leakscope.matching.held`).

    From a random start, or on from the best so far. The masks of one example, known exactly, are decoded from far away,
    so that a short search does, and then another random start.
    """

    repeats = True

    def applies(self, case: Case) -> bool:
        return case.below is not None and case.known is None

    def propose(self, case: Case) -> Iterator[Candidate]:
        assert case.held is not None
        matching, steps, weighting = case.matching, case.attack.iterations, WEIGHTINGS[0]
        single = len(case.held.features) == 1 and case.held.exact
        if isinstance(matching, DroppedMatching):
            start, weighting = matching.start(case.generator), MASKS
        elif case.best is not None and (case.searches != 1 or not single):  # solved patches, before any search
            matching = matching.near()
            start = matching.start_near(case.best.inputs)
        elif single and case.searches == 0 and case.solvable and not case.smooth:
            start, steps = matching.start(case.generator), max(1, steps // 3)
        else:
            weighting = self._choose(case, matching)
            start = matching.start(case.generator)
        case.searches += 1
        result = matching.run(start, weighting, steps, _watch(case, steps))
        case.latest = case.candidate(
            matching.to_model(matching.pictures(result.points[0])),
            weighting.name,
            curve=tuple(float(value[0]) for value in result.curves),
            flags=("did not converge",) if result.still_falling(0, steps) else (),
        )
        yield case.latest

    def _choose(self, case: Case, matching: HeldMatching) -> Weighting:
        count = max(1, case.attack.iterations // 6)
        start = matching.start(case.generator)
        best: Candidate | None = None
        for weighting in WEIGHTINGS:
            point = matching.run(start, weighting, count, _watch(case, count)).points[0]
            found = case.candidate(matching.to_model(matching.pictures(point)), weighting.name)
            best = found if found.better_than(best) else best
        return next(weighting for weighting in WEIGHTINGS if best is not None and weighting.name == best.method)


class DecodeMasks(Stage[Case]):
    """Go from near to exact in a ReLU network: decode masks, solve what is then linear."""

    repeats = True

    def applies(self, case: Case) -> bool:
        # Of a batch whose values are known each example was found by itself, with more equations than there are here.
        single = case.held is not None and len(case.held.features) == 1
        return (case.known is None or single) and case.solvable and not case.smooth

    def propose(self, case: Case) -> Iterator[Candidate]:
        near, problem, held = case.latest, case.gated, case.held
        assert near is not None
        assert problem is not None
        assert held is not None
        solution = problem.solve(near.inputs.cpu())
        method = f"{near.method}, masks decoded"
        yield dataclasses.replace(
            case.candidate(solution.inputs, method, residual=solution.certificate),
            curve=near.curve,
            flags=near.flags,
            # Decoded masks were checked in every layer below the cut, and above it where only dense layers are.
            certificates=certify(
                *(case.observation, solution.inputs, held.labels, solution.certificate),
                *(lambda: problem.free_directions(solution.inputs), method),
                replay=not isinstance(case.observation.model.get_submodule(held.layer), nn.Linear),
            ),
        )


class GaussNewtonSteps(Stage[Case]):
    """Go from near to exact in a network without kinks: second-order steps with the output gradient held."""

    repeats = True

    def applies(self, case: Case) -> bool:
        return case.solvable and case.smooth

    def propose(self, case: Case) -> Iterator[Candidate]:
        near, held = case.latest, case.held
        assert near is not None
        assert held is not None
        wide = case.observation.to(dtype=torch.float64)
        mapping = GradientMap.of(wide, case.targets, held.output_gradients.to(wide.device))
        if affordable_steps(mapping) < LEAST_PRODUCTS / 2:  # half as many as of decoded masks: they converge faster
            case.notes.append("no Gauss-Newton steps: the network is too large for them")
            return
        try:
            observed, x = mapping.joined(wide.message.update), mapping.flat(near.inputs.double())
            size = float(observed.norm().clamp_min(1e-300))
            moved = movement(mapping.linearise(x), EXPLAINED * size, mapping.shape)
            if (most := math.hypot(*moved) / len(moved) ** 0.5) > MOST_MOVEMENT:
                case.notes.append(f"no Gauss-Newton steps: errors of 1e-6 in the update move the inputs by {most:.1e}")
                return
            # Steps come to rest after a handful, or lead nowhere.
            fit = LevenbergMarquardt(steps=30, tolerance=EXPLAINED / 3).run(mapping, observed, x)
            residual = float(fit.residual.norm()) / size
            if residual >= EXPLAINED:
                # The gradient alone, without a prior, is explained by inputs that are further away.
                case.notes.append(f"Gauss-Newton steps ended at a relative residual of {residual:.1e} and are left out")
                return
            facts: dict[str, Any] = {"residual": residual, "curve": near.curve, "flags": near.flags}
            found = case.candidate(mapping.pictures(fit.x), f"{near.method}, Gauss-Newton", **facts)
            proofs = certify(
                *(case.observation, found.inputs, held.labels, residual),
                *(lambda: free_directions(mapping, fit.x, fit.preconditioner), found.method),
            )
        except RuntimeError as error:  # an LSTM has no forward derivative, and some code insists on float32
            case.notes.append(f"no Gauss-Newton steps: {str(error).strip().splitlines()[0]}")
            return
        yield dataclasses.replace(found, certificates=proofs)


class MatchUpdate(Stage[Case]):
    """Match the whole update, where the head is of no use or nothing was solved."""

    def applies(self, case: Case) -> bool:
        if case.held is None or case.best is None:
            return True
        # Where masks of units are unknown, the distance of the network's mean would prefer what explains that one.
        wanted = case.attack.rival and case.below is not None and case.known is None and not case.dropped_below
        return wanted and case.best.residual >= SETTLED

    def propose(self, case: Case) -> Iterator[Candidate]:
        observation, rivals, alone = case.observation, rivals_for(case), case.held is None
        if case.held is not None and case.held.labels is not None and observation.labels is None:
            knowledge = dataclasses.replace(observation.knowledge, labels="yes")
            labels = case.held.labels.to(observation.device)
            observation = observation.with_facts(knowledge=knowledge, labels=labels, label_counts=None)
        equations = sum(value.numel() for value in case.update.values())
        # Of noise least squares leave so much, relative to what the true inputs leave of it.
        unknowns = (observation.num_examples or 1) * observation.inputs.size
        fit = math.sqrt(max(0.0, 1 - unknowns / equations))
        for rival in rivals:
            try:
                # Each begins where it would begin by itself with this seed.
                result = rival.run(observation, case.untouched.clone_state(), case.told(rival.iterations))
            except (RuntimeError, NotApplicable) as error:  # the steps of an LSTM, say, are not unrolled
                if case.best is None:
                    raise
                case.notes.append(f"the whole update is not matched: {str(error).strip().splitlines()[0]}")
                return
            case.steps += result.info["steps"] - rival.iterations  # it may have come to rest early
            known = alone and case.best is None and (len(rivals) == 1 or result.labels is None)
            inputs = result.inputs.detach().to(case.like)
            yield Candidate(
                inputs=inputs,
                labels=result.labels,
                method=WHOLE_UPDATE,
                distance=result.info["distance"] if known else case.distance(inputs, result.labels if alone else None),
                pictures=observation.inputs.smooth,
                fair=fit if isinstance(rival, IDLG) else 1.0,
                score=float(result.scores[0]) if alone else None,
                curve=tuple(result.history["objective"][0]),
                flags=result.flags,
                notes=result.notes if alone else (),
                info=result.info if alone else {},
            )


def rivals_for(case: Case) -> tuple[GradientMatching, ...]:
    """Return a search, and least squares where the update is one smooth gradient of a network small enough."""
    # They stop at what rounding leaves: with a thousand times as much a smooth ConvNet comes back at 17 dB less.
    search, least_squares = InvertingGradients(iterations=case.attack.iterations), IDLG(tolerance=1e-13)
    if several_steps(case.observation) or not case.smooth:
        return (search,)
    return (search, least_squares) if least_squares.iterations * case.work <= MOST_LEAST_SQUARES else (search,)


def _watch(case: Case, steps: int) -> Watch:
    tell = case.told(steps)
    return lambda done, values, _best: None if tell is None else tell(done, steps, float(values[0]))
