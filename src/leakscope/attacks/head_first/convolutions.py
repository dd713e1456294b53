"""The stage of ``head-first`` that peels convolutions, down to the lowest layer whose input is determined.

One convolution is factored, and least squares go down from it (:mod:`leakscope.equations.peeling`). The forward pass
from there to the head gives each example's features and logits; of its possible labels the one whose derivative at the
cut is the observed one is right.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.attacks.candidates import REPLAYED, Candidate, Stage, certify
from leakscope.attacks.gradient_matching import several_steps
from leakscope.attacks.head_first.case import Case
from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.channel import Channel
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.task import Classification
from leakscope.equations.convolution_factor import visible_rank
from leakscope.equations.embedding import Embedding
from leakscope.equations.local_networks import LocalNetworks, rounding
from leakscope.equations.peel_start import startable
from leakscope.equations.peeling import Cut, Peel, peel
from leakscope.labels import nearest_labels
from leakscope.matching.known_values import KnownValues
from leakscope.matching.least_squares import Preconditioner, Progress
from leakscope.matching.recipe import plain_steps
from leakscope.network.gates import GatedNetwork, read_gated
from leakscope.network.layers import Head, find_head

#: How far the derivative at the cut may be from that of the best label (sine of the angle).
RIGHT_LABEL = 1e-2
#: Levenberg-Marquardt steps from near to where float32 ends: about 150 products each.
NEWTON_STEPS = 12
#: What a descent may leave of the values for least squares to come to the image from there: from 3e-2 most do not.
NEARLY = 1e-2
#: What the image leaves of values that the peel found exactly. Where it leaves more, the lowest values are left out, in
#: so many rounds at most (an image of a batch of four, with values exact to 1e-3: 66 dB, without them: every bit).
CLEAN, ROUNDS = 1e-4, 3
#: Lengths of descents in ``iterations``, one after the other until one leads on: single images need the first, images
#: of a batch the last. Below a max pooling, whose places are found by descent alone, each is longer by POOLED.
LENGTHS, POOLED = (1 / 3, 1, 10 / 3), 4
#: Equations for each unknown, and what a descent may leave of the values, for equations that were too few to be solved
#: from there; the second where there are fewer. Of two batches behind ResNet18s one with 1.1 was solved from 4e-2, and
#: one with 1.0 from 1e-3, not from 7e-3.
ENOUGH, SOLVABLE, SOLVABLE_FEW = 1.05, 5e-2, 3e-3
#: Multiplications of forward passes that a descent longer than ``iterations`` may take, for all images: some minutes.
LONG_WORK = 6e12
#: The share of the update that images may leave before searches are tried, too: noise in the place of images leaves 1.
LEFT = 0.3
#: Steps that may be all that shows of an update.
SHOWN = (2, 1)
#: Share of the update, as noise on each entry, that local steps after the first may be where they are left out.
REMAINDER = 2e-5
#: What rounding of weights may leave, in units of what it leaves on average.
ROUNDED = 2.0
#: BatchNorm in train mode hides the scale but for its epsilon. Where images of these scales explain the update, too,
#: that bytes are whole at one scale alone is no proof.
OTHER_SCALES = (0.5, 2.0)
#: Products that may be spent on counting free directions: the equations are well conditioned or of no use.
FREE_PRODUCTS = 1200


class PeelConvolutions(Stage[Case]):
    """Factor a convolution and solve the layers below it, whatever the head tells."""

    def applies(self, case: Case) -> bool:
        seen, channel = case.observation, case.observation.channel or Channel()
        untouched = not (
            channel.mixed > 1 or channel.unreliable or channel.rounding != "none" or channel.dropped_layers
        )
        return (
            untouched
            and plain_steps(seen) is not None
            and (case.held is None or case.below is not None)
            and not seen.has_rounds
            and not channel.survivors(seen.message.update)
            and isinstance(seen.task, Classification)
            and len(seen.input_shape) == 3
            and seen.num_examples is not None
        )

    def propose(self, case: Case) -> Iterator[Candidate]:
        try:
            held, case.known = recover_at_convolution(case.observation)
            case.before = case.held
            case.hold(held)
        except NotApplicable as error:
            case.notes.append(f"convolutions were not peeled: {error}")
        return iter(())


class InvertValues(Stage[Case]):
    """Find each example from what the peel knows of the layers above it; the whole update is replayed."""

    def applies(self, case: Case) -> bool:
        return case.known is not None

    def propose(self, case: Case) -> Iterator[Candidate]:
        known, held = case.known, case.held
        assert known is not None
        assert held is not None
        narrow = known.to(torch.float32)
        steps = case.attack.iterations
        if narrow.pooled:
            narrow, steps = narrow.whitened(), POOLED * steps
        lengths = [math.ceil(length * steps) for length in LENGTHS]
        lengths = [length for length in lengths if length <= max(steps, LONG_WORK / narrow.work)]
        narrow, starts = approach(narrow, lengths)
        parts = narrow.parts
        plain = dataclasses.replace(narrow, metrics={}).parts
        tell = case.told(sum(lengths) * len(parts))
        rows, helpers = find_examples(parts, starts, lengths, tell)
        deeper = known.go_on(torch.cat(rows))
        if deeper is not None:
            known = dataclasses.replace(deeper, equations=None)
            narrow = known.to(torch.float32)
            parts, plain = (narrow.whitened() if narrow.pooled else narrow).parts, narrow.parts
            rows, helpers = find_examples(parts, torch.cat(rows), lengths, None)
        inputs = known.inputs.project(known.inputs.from_unit(torch.cat(rows).double().reshape(known.shape)))
        share, method = case.whole(inputs), f"values at {held.layer}"

        def free() -> tuple[int | None, ...]:
            if known.network.batched and any(case.whole(scale * inputs) < EXPLAINED for scale in OTHER_SCALES):
                return (None,) * len(inputs)
            found = zip(plain, rows, helpers, strict=True)
            counts = (part.free_directions(row, FREE_PRODUCTS, helper) for part, row, helper in found)
            return tuple(itertools.chain.from_iterable(counts))

        # The share is that of the whole update, in one precision or the other.
        # Rounding of weights would explain an image of another scale, where BatchNorm in train mode hides it, too.
        tolerance = EXPLAINED if known.network.batched else explained_by_rounding(case.observation)
        proofs = certify(case.observation, inputs, held.labels, share, free, method, tolerance, replay=False)
        found = case.candidate(inputs, method, residual=share, certificates=proofs, settles=share < REPLAYED)
        if several_steps(case.observation):
            # What is held is that of the first step: searches cannot compare it with the sum of all of them.
            found = dataclasses.replace(found, distance=share, labels=held.labels, notes=held.notes)
            case.hold(case.before)
        case.latest = found
        if share > LEFT or (several_steps(case.observation) and not found.settles):
            case.known = None  # searches may come nearer
        yield found


def _noise(observation: Observation) -> dict[str, float]:
    """Return what the rounding of weights leaves of each tensor of their difference: its standard deviation."""
    if observation.message.kind == "gradient":
        return {}
    steps, weights = plain_steps(observation) or 1, dict(observation.model.named_parameters())
    return {name: rounding(weights[name], steps) for name in observation.message.update if name in weights}


def explained_by_rounding(observation: Observation) -> float:
    """Return the share of the update that its rounding explains; a larger one than images may leave proves nothing."""
    squares, count, update = 0.0, 0, observation.message.update
    for name, noise in _noise(observation).items():
        size = float(update[name].double().square().mean())
        if size > 0:
            squares += noise**2 / size * update[name].numel()
            count += update[name].numel()
    return max(EXPLAINED, min(ROUNDED * math.sqrt(squares / max(count, 1)), REPLAYED))


def approach(known: KnownValues, lengths: Sequence[int]) -> tuple[KnownValues, Tensor]:
    """Guess the examples; descend with all of a batch until equations that were too few can be solved from there."""
    starts = known.start()
    if known.equations is None or len(known) == 1:
        return known, starts
    most = SOLVABLE if known.equations.share >= ENOUGH else SOLVABLE_FEW
    for steps in (*lengths, lengths[-1]):
        starts = known.descend(starts, steps).reshape(starts.shape)
        solved = known.solve_equations(starts.flatten()) if known.leaves(starts.flatten()) < most else None
        if solved is not None:
            return solved, starts
    return known, starts


def find_examples(
    parts: Sequence[KnownValues], starts: Tensor, lengths: Sequence[int], tell: Progress | None
) -> tuple[list[Tensor], list[Preconditioner | None]]:
    """Find each part of a batch by itself."""
    rows, helpers = list[Tensor](), list[Preconditioner | None]()
    for number, (part, start) in enumerate(zip(parts, starts.chunk(len(parts)), strict=True), start=1):
        row, left, helper = find_example(part, start, lengths)
        rows.append(row)
        helpers.append(helper)
        if tell is not None:
            tell(sum(lengths) * number, sum(lengths) * len(parts), left)
    return rows, helpers


def find_example(
    known: KnownValues, start: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, float, Preconditioner | None]:
    """Find one example by descents of these lengths, followed by least squares once they lead on; keep the best."""
    best, least, helper = start.flatten(), math.inf, None
    found = best
    for steps in (0, *lengths):
        seen, found = known, known.descend(found, steps) if steps else found
        if known.leaves(found) > NEARLY and steps < lengths[-1]:
            continue
        near, left, latest = seen.finish(found, steps=NEWTON_STEPS, tolerance=EXPLAINED)
        for _ in range(ROUNDS):
            if not CLEAN < left < NEARLY or len(seen.known) == 1:
                break
            # The lowest values have the errors of all that was solved above them.
            seen = seen.above
            near, left, latest = seen.finish(near, steps=NEWTON_STEPS, tolerance=EXPLAINED, damping=left)
        if left < least:
            best, least, helper = seen.whole_bytes(near, left), left, latest or helper
        if left < NEARLY:
            break
    return best, least, helper


def recover_at_convolution(observation: Observation) -> tuple[Embedding, KnownValues]:
    """Recover what the lowest convolution that the peel reaches received, and all values that it knows.

    NotApplicable says why there is none.
    """
    network, gradients, head = _read(observation)
    found = _peel(observation, network, gradients, _adjoint(observation, head))
    found.keep_first_step()
    held, order = _labelled(observation, head, network, found)
    values = {step: value[order] for step, value in found.values.items() if step}
    equations = None if found.open is None or not found.open.step else found.open.reordered(order)
    deeper = None if several_steps(observation) else _deeper(network, found, order)
    return held, KnownValues(network, values, observation.inputs, equations, deeper=deeper)


def _deeper(network: GatedNetwork, found: Peel, order: Tensor) -> Callable[[Tensor], dict[int, Tensor] | None] | None:
    """Return how the peel goes on with inputs that are nearly right, where it ended at a max pooling."""
    if network.batched or not any(step.kind == "max" for step in network.steps[: min(found.values)]):
        return None

    def go_on(inputs: Tensor) -> dict[int, Tensor] | None:
        if not found.go_on(network.onwards(0, inputs[order.argsort()])):
            return None
        return {step: value[order] for step, value in found.values.items() if step}

    return go_on


def _adjoint(observation: Observation, head: Head) -> Tensor | None:
    """Return the derivative at what the head reads, of one example behind a head with a bias."""
    delta = None if head.bias_name is None else observation.message.update.get(head.bias_name)
    if delta is None or observation.num_examples != 1:
        return None
    module = observation.model.get_submodule(head.module_name)
    assert isinstance(module, nn.Linear)
    return delta.detach().double().cpu()[None] @ module.weight.detach().double().cpu()


def _peel(
    observation: Observation, network: GatedNetwork, gradients: dict[str, Tensor], adjoint: Tensor | None
) -> Peel:
    """Peel with all steps, or as few as show: those after the loss has vanished change next to nothing."""
    steps, noise, examples = plain_steps(observation) or 1, _noise(observation), observation.num_examples or 1
    refusal: NotApplicable | None = None
    for shown in (steps, *_fewer_steps(network, gradients, examples, steps, noise)):
        if shown < steps:
            sizes = {name: float(gradients[name].square().mean().sqrt()) for name in noise}
            noise = {name: max(value, REMAINDER * sizes[name]) for name, value in noise.items()}
        try:
            return peel(network, gradients, examples, steps=shown, noise=noise, adjoint=adjoint)
        except NotApplicable as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _fewer_steps(
    network: GatedNetwork, gradients: dict[str, Tensor], examples: int, steps: int, noise: dict[str, float]
) -> list[int]:
    """List numbers of steps that may be all that shows: not more directions than theirs and some of the next one's."""
    layers = startable(LocalNetworks([network]), gradients, examples) if steps > 1 else []
    if not layers:
        return []
    layer = max(layers, key=lambda one: one.step)
    places = examples * math.prod(network.steps[network.steps[layer.step].sources[0]].shape[1:])
    rank = visible_rank(gradients[layer.weight_name], noise.get(layer.weight_name, 0.0))
    return [few for few in SHOWN if few < steps and few * places <= rank <= (few + 1.1) * places]


def _labelled(observation: Observation, head: Head, network: GatedNetwork, found: Peel) -> tuple[Embedding, Tensor]:
    """Hold the lowest cut whose derivatives tell the labels: far down the errors of derivatives are larger."""
    for cut in reversed(found.cuts):
        try:
            return _embedding(observation, head, network, found, cut)
        except NotApplicable:
            if cut is found.cuts[0]:
                raise
    raise NotApplicable(found.ended)


def _read(observation: Observation) -> tuple[GatedNetwork, dict[str, Tensor], Head]:
    try:
        head = find_head(observation.model, observation.input_shape, observation.num_classes)
    except ValueError as error:
        raise NotApplicable(str(error)) from error
    if not (head.gives_logits(observation.task) or head.follows_softmax(observation.task)):
        raise NotApplicable(f"something follows the last linear layer {head.module_name!r}: its outputs are no logits")
    training = observation.batchnorm == "train"
    network = read_gated(observation.model, observation.input_shape, head.module_name, training=training)
    return network, {name: value.detach().cpu() for name, value in observation.message.update.items()}, head


def _embedding(
    observation: Observation, head: Head, network: GatedNetwork, found: Peel, cut: Cut
) -> tuple[Embedding, Tensor]:
    reader = next(layer for layer in network.layers if network.steps[layer.step].sources[0] == cut.step)
    module = observation.model.get_submodule(head.module_name)
    assert isinstance(module, nn.Linear)
    features = network.onwards(cut.step, cut.values).values[len(network.steps) - 1].flatten(1)
    bias = 0.0 if module.bias is None else module.bias.detach().double().cpu()
    logits = features @ module.weight.detach().double().cpu().T + bias
    gradient = observation.message.update.get(f"{head.module_name}.weight")
    if network.batched and gradient is not None:
        # Derivatives at the cut depend on the labels of the whole batch.
        own = torch.linalg.lstsq(features.T, gradient.detach().double().cpu().T).solution
        labels, output_gradients, apart = nearest_labels(own, logits, head)
    else:
        labels, output_gradients, apart = _labels(network, cut, logits, head, module)
    if apart > RIGHT_LABEL:
        raise NotApplicable(f"no label explains the derivative at {network.steps[reader.step].name!r}")
    order = _order(observation, labels)
    held = Embedding(
        output_gradients=output_gradients[order],
        features=cut.values.flatten(1)[order],
        adjoints=cut.signals.flatten(1)[order],
        signals=found.signals[reader.step].flatten(1)[order],
        labels=labels[order],
        losses=F.cross_entropy(head.outputs(logits), labels, reduction="none")[order],
        residual=cut.residual,
        error=cut.residual,
        exact=True,
        layer=network.steps[reader.step].name,
        peeled=(),
        notes=(
            f"factored {found.started!r} and peeled down to the input of {network.steps[reader.step].name!r}, where "
            f"the peel ended: {found.ended}",
        ),
    )
    return held, order


def _order(observation: Observation, labels: Tensor) -> Tensor:
    """Return the order of the examples in which their labels are the known ones, if any are."""
    known, counts = observation.labels, observation.label_counts
    if known is None:
        order = labels.argsort(stable=True)
        agrees = counts is None or torch.equal(labels.bincount(minlength=len(counts)), counts.cpu().long())
    else:
        order = labels.argsort(stable=True)[known.cpu().argsort(stable=True).argsort()]
        agrees = torch.equal(labels[order], known.cpu())
    if not agrees:
        raise NotApplicable("the labels that were found are not the known ones")
    return order


def _labels(
    network: GatedNetwork, cut: Cut, logits: Tensor, head: Head, module: nn.Linear
) -> tuple[Tensor, Tensor, float]:
    """Return each example's label, its output gradient, and how far the derivative at the cut is from theirs."""
    weight = module.weight.detach().double().cpu()
    start = cut.values.clone().requires_grad_()
    with torch.enable_grad():
        last = network.onwards(cut.step, start).values[len(network.steps) - 1].flatten(1)

    def adjoint(delta: Tensor) -> Tensor:
        return torch.autograd.grad(last, start, delta @ weight, retain_graph=True)[0].flatten(1)

    return nearest_labels(cut.signals.flatten(1), logits, head, adjoint)
