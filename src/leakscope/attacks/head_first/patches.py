"""The stage of ``head-first`` that solves for one image behind a patch embedding with learned positions (ViT).

One least squares gives the patches (:mod:`leakscope.equations.patch_embedding`); no head, label or layer above enters.
The certificate needs all of them: the whole update is replayed, for a square system fits anything.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from leakscope.attacks.candidates import REPLAYED, Candidate, Stage, certify, gives_update
from leakscope.attacks.gradient_matching import several_steps
from leakscope.attacks.head_first.case import Case
from leakscope.attacks.head_first.convolutions import LEFT
from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.channel import Channel
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.equations.patch_embedding import SolvedPatches, solve_patches, whole_bytes
from leakscope.matching import GradientMap
from leakscope.matching.determinacy import ACCURATE
from leakscope.matching.gradient_map import affordable_steps
from leakscope.matching.refinement import Refined, noise_levels, refine
from leakscope.matching.unexplained import explain
from leakscope.network.patches import PatchEmbedding, find_patches
from leakscope.network.recorder import Call, record_layers

PATCHES = "patch embedding"
#: The expected error, as a share of the range, up to which solved patches are proposed: 26 dB. Searches of a ViT end at
#: 13 to 28 dB, and a worse start than theirs would cost them.
NEAR = 500 * ACCURATE
#: The expected error up to which an image is certified: 82 dB, for the estimate is off by 1 dB or 2.
CLEAR = 0.8 * ACCURATE
#: The expected error up to which the rest of the update improves an image by one step, 68 dB, and the iterations of
#: that step: 5 dB on a ViT of 96 units, in half a second.
REFINED, REFINING_STEPS = 4 * ACCURATE, 10
#: The expected error up to which no search comes nearer: 60 dB.
SETTLING = 10 * ACCURATE


class SolvePatches(Stage[Case]):
    """Solve the patch embedding of one image, whatever the head tells."""

    def applies(self, case: Case) -> bool:
        seen, channel = case.observation, case.observation.channel or Channel()
        # Noise and rounding show in what the equations leave, so that they need no exception.
        altered = channel.mixed > 1 or channel.unreliable or channel.dropped_layers
        return (
            seen.num_examples == 1
            and not altered
            and not several_steps(seen)
            and not seen.has_rounds
            and not channel.survivors(seen.message.update)
            and not seen.inputs.discrete
        )

    def propose(self, case: Case) -> Iterator[Candidate]:
        seen = case.observation
        try:
            place = find_patches(seen.model, seen.input_shape, seen.message.update)
        except (NotApplicable, RuntimeError):  # outputs without a derivative, say
            return  # most networks have none, and need no note that says so
        try:
            solved = recover_patches(seen, place)
        except NotApplicable as error:
            case.notes.append(f"the patch embedding was not solved: {error}")
            return
        image, method = place.image(solved.patches), PATCHES
        free = solved.free_directions(CLEAR)
        if seen.inputs.bounded and seen.inputs.smooth:
            whole = whole_bytes(solved, *(_uniform(seen, place, level) for level in (0.0, 1.0)))
            if whole is not None:
                image, method, free = place.image(whole), f"{PATCHES}, whole bytes", 0
        inputs = _inputs(seen, image)
        labels = find_label(seen, inputs)
        explained = solved.residual <= EXPLAINED and gives_update(seen, inputs, labels)
        if free and explained and labels is not None and solved.error <= REFINED:
            inputs, expected = refine_patches(seen, place, solved, inputs, labels)
            free = 0 if expected <= CLEAR else free
        # The whole update was replayed already: refining changes its explanation for the better, or is not accepted.
        facts = (labels, solved.residual, (free,), method)
        proofs = certify(seen, inputs, *facts, replay=False) if explained else ()
        found = Candidate(inputs=inputs, method=method, distance=solved.residual, labels=labels, certificates=proofs)
        if found.proved or (explained and solved.error <= SETTLING):
            yield dataclasses.replace(found, residual=solved.residual, settles=True)
            return
        # Clipping changes the length of an update, and nothing else.
        left = math.inf if labels is None else explain(seen, inputs, labels).left_at_best_length
        if left <= REPLAYED and solved.error <= SETTLING:
            yield dataclasses.replace(found, distance=left, residual=left, certificates=(), settles=True)
            return
        if labels is not None and left > LEFT:  # patches of noise leave 1 and more
            case.notes.append(f"the patch embedding was solved, but its image leaves {left:.0%} of the update")
            return
        case.notes.append(f"the patch embedding was solved, with an expected error of {solved.error:.1e}")
        yield dataclasses.replace(found, distance=left, certificates=())


def recover_patches(observation: Observation, place: PatchEmbedding) -> SolvedPatches:
    """Recover the patches of the image, and how well they are determined; NotApplicable says why there are none."""
    update = observation.message.update
    gradient = update[place.weight].flatten(1).cpu()
    bias = None if place.bias is None else update[place.bias].cpu()
    black, grey, white = (_uniform(observation, place, level) for level in (0.0, 0.5, 1.0))
    span = float((white - black)[place.pixel >= 0].square().mean().sqrt())
    solved = solve_patches(place.signals(update[place.position].cpu()), gradient, bias, grey, span)
    if solved.error > NEAR:
        known = int((solved.errors <= NEAR * span).sum())
        raise NotApplicable(f"{len(gradient)} units tell {known} directions of {place.tokens} patches from noise")
    return solved


def refine_patches(
    observation: Observation, place: PatchEmbedding, solved: SolvedPatches, inputs: Tensor, labels: Tensor
) -> Refined:
    """Improve the weak directions of the ``inputs`` by the rest of the update; the error is a share of the range."""
    wide = observation.to(dtype=torch.float64)
    update = dict(wide.message.update)
    mapping = dataclasses.replace(GradientMap.of(wide, labels), scales=noise_levels(update))
    steps = math.ceil(REFINING_STEPS * max(1.0, solved.error / ACCURATE))
    if affordable_steps(mapping) < steps:
        return Refined(inputs, math.inf)

    def flat(patches: Tensor) -> Tensor:
        return mapping.flat(place.image(patches).reshape(mapping.shape))

    # Not moved into the valid box: that would spoil the directions that are known best.
    start = flat(solved.patches)

    def spread(unknowns: Tensor) -> Tensor:
        moved = solved.directions.T @ (solved.errors[:, None] * unknowns.reshape(solved.patches.shape))
        return flat(solved.patches + moved) - start

    found = refine(mapping, mapping.joined(update), start, spread, solved.patches.numel(), steps)
    refined = _inputs(observation, mapping.pictures(found.x))
    return Refined(refined, found.error) if found.error < solved.error else Refined(inputs, math.inf)


def _inputs(observation: Observation, image: Tensor) -> Tensor:
    image = image.reshape(1, *observation.input_shape)
    return observation.inputs.project(image.to(device=observation.device, dtype=observation.dtype))


def _uniform(observation: Observation, place: PatchEmbedding, level: float) -> Tensor:
    """Return the patches of an image of one level: 0 is black, 1 is white."""
    unit = torch.full((1, *observation.input_shape), level, dtype=torch.float64)
    return place.patches(observation.inputs.from_unit(unit).flatten())


def find_label(observation: Observation, inputs: Tensor) -> Tensor | None:
    """Return the known label, or the class whose gradient at the last layer points where the observed one does."""
    if observation.labels is not None or not observation.task.has_classes:
        return observation.labels
    update = observation.message.update
    record = record_layers(observation.model, inputs, evaluate=True, differentiable=True)
    last = _last_parameters(observation.model, record.calls, update)
    if not last:
        return None
    observed = torch.cat([update[name].flatten() for name in last])
    best, label = -math.inf, None
    for target in range(max(2, observation.num_classes)):
        targets = torch.tensor([target], device=inputs.device)
        with torch.enable_grad():
            loss = observation.task.loss(record.outputs, targets, observation.reduction)
        parts = torch.autograd.grad(loss, list(last.values()), retain_graph=True, materialize_grads=True)
        cosine = float(torch.cosine_similarity(torch.cat([part.flatten() for part in parts]), observed, dim=0))
        if cosine > best:
            best, label = cosine, targets
    return label


def _last_parameters(model: nn.Module, calls: Sequence[Call], update: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Return the parameters of the last layer that the update has: the shortest way back from the loss."""
    told = {id(p): (name, p) for name, p in model.named_parameters() if name in update and p.requires_grad}
    for call in reversed(calls):
        if own := [told[id(p)] for p in call.module.parameters(recurse=False) if id(p) in told]:
            return dict(own)
    return {}
