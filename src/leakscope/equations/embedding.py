"""What the last linear layers of a model leak by themselves: each example's features in front of them.

The head's gradient gives each example's output gradient and features (equations/head.py), and so does that of each
dense layer below it in turn (equations/dense.py). The lowest layer that is reached is the cut.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.channel import Channel
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.task import Classification
from leakscope.equations.dense import TOLERANCE, peel_dense
from leakscope.equations.head import complete_head, solve_head
from leakscope.equations.head_system import REFUSED, HeadProblem, HeadSolution
from leakscope.equations.mixtures import solve_mixed_head
from leakscope.labels import counts_to_labels, label_candidates, mean_gradient_scale, nearest_labels
from leakscope.labels.counts import dummy_inputs
from leakscope.network.dense_path import dense_path
from leakscope.network.layers import Head, find_head
from leakscope.network.recorder import probe

#: Of a noisy update, the largest gap between a dense layer's outputs and those that its inputs give.
LOOSEST = 0.3 * REFUSED
#: Inputs below this share of an example's largest, or so many times their expected error, are those that a network
#: dropped, or of silent units.
SILENT, SILENT_ERRORS = EXPLAINED, 4.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Embedding(HeadSolution):
    """The inputs of ``layer``, the cut, for each of n examples, and what the head's gradient says of them besides.

    ``features`` (n, d): flat, float64. ``adjoints`` (n, d): what came back to them, so that the observed gradient of
    every weight below the cut is that of sum_i <adjoints_i, h(x_i)> with h the model up to the cut. ``signals``
    (n, units): what came back to the outputs of ``layer``. ``residual`` is that of all layers down to the cut.
    ``reaches_input``: the features are the examples. ``seen`` (d,) or (n, d): which features were; None for all.
    """

    layer: str
    features: Tensor
    adjoints: Tensor
    signals: Tensor
    peeled: tuple[str, ...] = ()
    reaches_input: bool = False
    seen: Tensor | None = None

    @property
    def silence(self) -> float:
        """Return the share of the largest feature below which one may be zero: rounding, or the update's noise."""
        if self.exact:
            return SILENT
        error = self.error * float(self.features.square().mean().sqrt())
        return max(SILENT, SILENT_ERRORS * error / float(self.features.abs().max().clamp_min(1e-300)))


def recover_embedding(
    observation: Observation, generator: torch.Generator | None = None, *, peel: bool = True
) -> Embedding:
    """Recover each example's features at the lowest cut that stays exact, at the head without ``peel``.

    NotApplicable says what the adversary saw instead.

    >>> from torch import nn
    >>> draws = torch.Generator().manual_seed(0)
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> x, y = torch.rand((2, 1, 2, 2), generator=draws), torch.tensor([2, 0])
    >>> loss = nn.functional.cross_entropy(net(x), y)
    >>> update = dict(zip(("1.weight", "1.bias"), torch.autograd.grad(loss, list(net.parameters()))))
    >>> seen = Observation.from_update(net, update, input_shape=(1, 2, 2), num_classes=3, num_examples=2)
    >>> found = recover_embedding(seen, draws)
    >>> found.layer, found.reaches_input, found.labels.tolist()
    ('1', True, [0, 2])
    """
    head = _observed_head(observation)
    if observation.channel is not None and observation.channel.survivors(observation.message.update):
        return _completed(observation, observation.channel, head)
    solution = _solve(observation, head, generator or torch.Generator().manual_seed(0))
    if solution.features is None:
        raise NotApplicable("only the output gradients follow from the head's gradient: " + "; ".join(solution.notes))
    weight = dict(observation.model.named_parameters())[head.weight_name].detach().double().cpu()
    reaches = dense_path(observation.model, head.module_name).reads_input[0]
    at_head = _at_head(solution, weight, layer=head.module_name, reaches_input=reaches)
    if head.follows_softmax(observation.task):
        at_head = _behind_softmax(observation, head, at_head)
    at_head = _undropped(at_head, observation.channel)
    return peel_embedding(observation, at_head) if peel else at_head


def _at_head(solution: HeadSolution, weight: Tensor, **facts: Any) -> Embedding:
    delta = solution.output_gradients
    return Embedding(**vars(solution), adjoints=delta @ weight, signals=delta, **facts)


def _behind_softmax(observation: Observation, head: Head, found: Embedding) -> Embedding:
    """Find the label by replay; the derivative by the model's outputs is that by its probabilities."""
    module = observation.model.get_submodule(head.module_name)
    assert isinstance(module, nn.Linear)
    logits = found.features @ module.weight.detach().double().cpu().T + module.bias.detach().double().cpu()
    labels, output_gradients, apart = nearest_labels(found.signals, logits, head)
    if apart > REFUSED:
        raise NotApplicable(f"behind the softmax no label explains the head's gradient: the nearest leaves {apart:.1e}")
    if observation.labels is not None and not torch.equal(labels, observation.labels.cpu()):
        raise NotApplicable("the label that was found is not the known one")
    outputs = head.outputs(logits)
    return dataclasses.replace(
        found,
        output_gradients=output_gradients,
        labels=labels,
        losses=nn.functional.cross_entropy(outputs, labels, reduction="none"),
        residual=max(found.residual, apart),
        notes=("the loss is the cross-entropy of probabilities: solved for one example, its label by replay",),
    )


def recover_mixtures(observation: Observation, generator: torch.Generator | None = None) -> HeadSolution:
    """Recover each mixture's soft labels and features at the head."""
    channel = observation.channel
    assert channel is not None
    if not isinstance(observation.task, Classification):
        raise NotApplicable("the task has no classes whose shares would tell how examples were mixed")
    head = _observed_head(observation.with_facts(channel=dataclasses.replace(channel, mixed=1)))
    if not head.gives_logits(observation.task):
        raise NotApplicable("a softmax follows the head, and mixed targets are read from logits")
    if channel.clip is not None or channel.survivors(observation.message.update):
        raise NotApplicable("the head's gradient is clipped or has holes, and its scale or its values are not known")
    scale, why = _scale(observation)
    if scale is None:
        raise NotApplicable(f"the scale of the head's gradient is not known: {why}")
    problem = _problem(observation, head, scale)
    present = observation.labels
    if present is None and observation.label_counts is not None:
        present = observation.label_counts.nonzero()[:, 0]
    return solve_mixed_head(problem, images=channel.mixed, present=present, generator=generator)


def _completed(observation: Observation, channel: Channel, head: Head) -> Embedding:
    zeros = "entries of the head's gradient were set to zero"
    if observation.num_examples != 1 or not isinstance(observation.task, Classification):
        raise NotApplicable(f"{zeros}: only one example with a class is completed")
    if head.follows_softmax(observation.task):
        raise NotApplicable(f"{zeros}, and a softmax follows the head")
    scale, why = mean_gradient_scale(observation)
    if scale is None or channel.clip is not None:
        raise NotApplicable(f"{zeros}, and its scale is not known: {why}")
    labels, _ = _labels(observation, torch.Generator().manual_seed(0))
    if labels is not None and labels.is_floating_point():
        raise NotApplicable(f"{zeros}, and the label is a soft one")
    stretched = 1 / (1 - channel.dropout) if channel.dropout_scaled else 1.0
    problem = _problem(observation, head, scale * stretched)
    solution, seen = complete_head(problem, None if labels is None else int(labels[0]))
    solution = dataclasses.replace(solution, output_gradients=solution.output_gradients / stretched)
    return _at_head(solution, problem.weight, layer=head.module_name, seen=seen)


def peel_embedding(observation: Observation, found: Embedding) -> Embedding:
    """Take the embedding at the head down as far as each dense layer's certificate holds."""
    if observation.channel is not None and observation.channel.survivors(observation.message.update):
        return found  # entries of the layers' gradients are missing
    path = dense_path(observation.model, found.layer)
    parameters = {id(parameter): name for name, parameter in observation.model.named_parameters()}
    update, reason = observation.message.update, path.reason
    tolerance = max(TOLERANCE, min(3 * found.residual, LOOSEST))
    for number, step in enumerate(path.steps, start=1):
        layer = observation.model.get_submodule(step.name)
        assert isinstance(layer, nn.Linear)
        names = [None if value is None else parameters.get(id(value)) for value in (layer.weight, layer.bias)]
        gradient, sums = (None if name is None else update.get(name) for name in names)
        if gradient is None:
            reason = f"{step.name!r} is frozen: the update says nothing of it"
            break
        try:
            facts = (layer.weight, layer.bias, gradient, sums, step.activation, found.features, found.adjoints)
            below = peel_dense(*facts, tolerance=tolerance, seen=found.seen)
        except NotApplicable as error:
            reason = f"{step.name!r} was not solved: {error}"
            break
        found = dataclasses.replace(
            found,
            layer=step.name,
            features=below.inputs,
            adjoints=below.adjoints,
            signals=below.signals,
            residual=max(found.residual, below.residual),
            peeled=(*found.peeled, step.name),
            reaches_input=path.reads_input[number],
            seen=None,
        )
        found = _undropped(found, observation.channel)
    return dataclasses.replace(found, notes=(*found.notes, f"it ends at {found.layer!r}: {reason}"))


def _undropped(found: Embedding, channel: Channel | None) -> Embedding:
    """Return the embedding of the network without dropout, where the client's dropped inputs of this layer.

    An input that was dropped is zero, as one is behind a silent unit: either way nothing comes back to it.
    """
    if channel is None or found.layer not in channel.dropped_layers:
        return found
    left, sizes = 1 - channel.units_dropped, found.features.abs()
    errors = SILENT_ERRORS * found.error * sizes.square().mean(1, keepdim=True).sqrt()
    seen = (sizes > torch.maximum(errors, SILENT * sizes.amax(1, keepdim=True))).to(found.features)
    return dataclasses.replace(
        found,
        features=left * found.features * seen,
        adjoints=found.adjoints * seen / left,
        seen=seen,
        notes=(*found.notes, f"{100 * float(seen.mean()):.0f} % of the inputs of {found.layer!r} were not dropped"),
    )


def _observed_head(observation: Observation) -> Head:
    if observation.has_rounds:
        raise NotApplicable("the update is that of several rounds, or of batches of the examples")
    if observation.num_examples is None:
        raise NotApplicable("num_examples: expected a number, got None: what follows depends on it")
    if len(observation.output_shape) != 1:
        raise NotApplicable(f"the model's outputs are no row: their shape is {observation.output_shape}")
    try:
        head = find_head(observation.model, observation.input_shape, observation.num_classes)
    except ValueError as error:
        raise NotApplicable(str(error)) from error
    softmax = head.follows_softmax(observation.task)
    if not (softmax or head.gives_logits(observation.task)):
        raise NotApplicable(f"something follows the last linear layer {head.module_name!r}: its outputs are no logits")
    if softmax and (observation.num_examples != 1 or head.bias_name not in observation.message.update):
        raise NotApplicable(
            f"a softmax follows the last linear layer {head.module_name!r}, and the loss applies another one: there "
            "only one example behind a bias is solved. Return the logits instead: cross-entropy applies the softmax"
        )
    if head.weight_name not in observation.message.update:
        raise NotApplicable(f"the head {head.module_name!r} is frozen: the update says nothing of it")
    channel = observation.channel or Channel()
    if channel.unreliable:
        raise NotApplicable(f"the defence alters what the update says of {', '.join(channel.unreliable)}")
    if channel.mixed > 1:
        raise NotApplicable("the client trained on mixtures of its examples, whose targets are not known")
    if channel.rounding == "sign":
        raise NotApplicable("only the signs of the update are seen, and equations need its values")
    return head


def _scale(observation: Observation) -> tuple[float | None, tuple[str, ...]]:
    """Return the scale of the mean gradient, without a sum's n, or why it is not known."""
    scale, why = mean_gradient_scale(observation)
    if scale is not None and observation.reduction == "sum":
        scale /= observation.num_examples or 1
    return scale, why


def _solve(observation: Observation, head: Head, generator: torch.Generator) -> HeadSolution:
    """Solve with the scale that the threat model grants; where this does not fit, with the scale as an unknown."""
    scale, _ = _scale(observation)
    factors = (scale,) if scale is None else _factors(observation, scale)
    refused: NotApplicable | None = None
    best: HeadSolution | None = None
    for factor in factors:
        try:
            labels, readings = _labels(observation, generator)
            found = solve_head(
                _problem(observation, head, factor),
                labels=labels,
                readings=readings,
                cross_entropy=isinstance(observation.task, Classification) and head.gives_logits(observation.task),
                generator=generator,
            )
        except NotApplicable as error:
            refused = refused or error
            continue
        if found.exact and found.labels is not None:
            return found
        best = found if best is None or (found.labels is not None and found.residual < best.residual) else best
    if best is None:
        assert refused is not None
        raise refused
    if scale is None and not best.exact:
        raise NotApplicable(
            f"the weight update's recipe is not known, and one step explains it but for {best.residual:.1e}: it may be "
            "that of several steps"
        )
    return best


def _factors(observation: Observation, scale: float) -> tuple[float | None, ...]:
    """Return the scales to try: clipping multiplies the update, and may not be known."""
    channel = observation.channel
    if observation.message.kind == "weight_delta":
        return (scale,) if channel is None or channel.clip is None else (scale, None)
    if channel is None:
        return (scale, None)
    if channel.clip is None:
        return (scale,)
    norm = torch.stack([value.double().square().sum() for value in observation.message.update.values()]).sum().sqrt()
    return (scale, None) if float(norm) < 0.999 * channel.clip else (None, scale)


def _problem(observation: Observation, head: Head, scale: float | None) -> HeadProblem:
    update, examples = observation.message.update, observation.num_examples or 1
    module = observation.model.get_submodule(head.module_name)
    assert isinstance(module, nn.Linear)
    dummies = dummy_inputs(observation.inputs, torch.Generator().manual_seed(0), count=64).to(module.weight)
    record = probe(observation.model, dummies, lambda name, _: name == head.module_name)
    return HeadProblem(
        module.weight,
        module.bias,
        update[head.weight_name],
        None if head.bias_name is None else update.get(head.bias_name),
        examples=examples,
        nonnegative=bool((record.of(head.module_name)[-1].inputs >= 0).all()),
        unit=1 / examples if observation.reduction == "mean" else 1.0,
        scale=scale,
    )


def _labels(observation: Observation, generator: torch.Generator) -> tuple[Tensor | None, list[Tensor]]:
    if not observation.task.has_classes:
        return None, []
    if observation.labels is not None:
        return observation.labels, []
    if observation.label_counts is not None:
        return counts_to_labels(observation.label_counts.long()), []
    try:
        return None, [reading.labels for reading in label_candidates(observation, generator)]
    except ValueError:
        return None, []
