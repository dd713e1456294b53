"""A differentiable view of the observed model: what update would a candidate batch have caused?

Plain autograd costs less a step than ``torch.func``, but works outside its transforms only; both are offered.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from leakscope.contracts.channel import Channel
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import BATCHNORM
from leakscope.contracts.task import Reduction, Task, outputs_of
from leakscope.network.recorder import tap


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is at work; plain autograd may not be called inside one.

    >>> in_transform(), torch.func.vmap(lambda x: x + float(in_transform()))(torch.zeros(2)).tolist()
    (False, [1.0, 1.0])
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def recording(tensors: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in tensors)


def gradients(value: Tensor, wanted: Sequence[Tensor], again: bool = False) -> tuple[Tensor, ...]:
    """Return the derivatives of one number, zeros where it does not depend on a tensor; ``again``: differentiably.

    >>> x, y = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> [found.tolist() for found in gradients((x * x).sum(), [x, y])]
    [[2.0, 2.0], [0.0]]
    """
    if not value.requires_grad:
        return tuple(torch.zeros_like(tensor) for tensor in wanted)
    return torch.autograd.grad(value, wanted, create_graph=again, materialize_grads=True)


def pull_back(value: Tensor, of: Tensor, weights: Tensor, again: bool = False) -> Tensor:
    """Return the derivative of <weights, value> (two rows) by ``of``; the graph stays. ``again``: differentiably.

    >>> x = torch.ones(2, requires_grad=True)
    >>> pull_back(x * x, x, torch.tensor([1.0, 3.0])).tolist()
    [2.0, 6.0]
    """
    if not value.requires_grad:
        return torch.zeros_like(of)
    with torch.enable_grad():
        # The product, for autograd loads a library of symbols before it reads weights that it is given.
        product = value @ weights
    (found,) = torch.autograd.grad(product, of, retain_graph=True, create_graph=again, materialize_grads=True)
    return found


Tensors = dict[str, Tensor]
#: An update, and the inputs of the recorded layers.
Answer = tuple[Tensors, Tensors]


class VictimTensors(NamedTuple):
    """Hold the tensors of a victim, passed to every call so that a compiled step takes them as inputs.

    ``weights`` are those the update speaks of, ``fixed`` all others, ``movement`` how far the client moved the weights,
    before minus after. ``survivors`` are ones where the defence let an entry through, as far as the adversary knows it.
    ``rounded`` is the gradient that was seen, where it was rounded to few values. The last three may be empty.
    """

    weights: Tensors
    fixed: Tensors
    movement: Tensors
    survivors: Tensors
    rounded: Tensors


@dataclass(frozen=True, eq=False)
class Victim:
    """The model as pure functions of its weights; made from an observation, never changing it."""

    model: nn.Module = field(repr=False)
    tensors: VictimTensors = field(repr=False)
    buffers: frozenset[str] = field(repr=False)
    reduction: Reduction
    task: Task
    channel: Channel
    batchnorm_targets: Mapping[str, tuple[Tensor, Tensor]] = field(repr=False)
    #: Whether a parameter or buffer has several names; looking for them at each call takes a hundredth of a step.
    tied: bool
    #: Whether inputs of layers are recorded at all.
    records: bool
    _tape: dict[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, observation: Observation, record: Iterable[str] = ()) -> Self:
        """The victim of the first message; the inputs of the layers named in ``record`` are recorded too."""
        model = copy.deepcopy(observation.model).eval()
        message = observation.messages[0]
        targets: dict[str, tuple[Tensor, Tensor]] = {}
        for name, module in model.named_modules():
            if not isinstance(module, BATCHNORM):
                continue
            if message.batchnorm_statistics is not None:
                statistics = message.batchnorm_statistics
                targets[name] = (statistics[f"{name}.mean"], statistics[f"{name}.var"])
            elif module.running_mean is not None and module.running_var is not None:
                targets[name] = (module.running_mean.clone(), module.running_var.clone())
            if observation.batchnorm == "train":
                # Batch statistics without the in-place update of the running ones, which torch.func forbids.
                module.train()
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
        layers = (*targets, *(name for name in record if name not in targets))
        tape, records = tap(model, layers), bool(layers)
        everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        weights = {name: everything[name].detach() for name in message.update}
        fixed = {name: value.detach() for name, value in everything.items() if name not in weights}
        buffers = frozenset(name for name, _ in model.named_buffers())
        movement = dict(message.update) if message.kind == "weight_delta" else {}
        channel = Channel() if observation.channel is None else observation.channel
        # A weight update may be compared in other units than it was rounded in.
        rounded = dict(message.update) if channel.rounds_evenly and message.kind == "gradient" else {}
        tensors = VictimTensors(weights, fixed, movement, channel.survivors(message.update), rounded)
        tied = _names(model, remove_duplicate=False) > _names(model, remove_duplicate=True)
        facts = (observation.reduction, observation.task, channel, targets, tied, records)
        return cls(model, tensors, buffers, *facts, tape)

    def loss(
        self, tensors: VictimTensors, x: Tensor, targets: Tensor, output_gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensors]:
        """Return the client's loss, or <output_gradient, outputs>, and the recorded inputs; ``targets`` may be soft."""
        self._tape.clear()
        # Copies of what a forward pass may change in place: counters and other buffers, and the input.
        fresh = {name: value.clone() if name in self.buffers else value for name, value in tensors.fixed.items()}
        x, targets = self.channel.mix(x, targets)
        values = {**tensors.weights, **fresh}
        outputs = outputs_of(functional_call(self.model, values, (x.clone(),), tie_weights=self.tied))
        recorded = dict(self._tape)
        self._tape.clear()
        if output_gradient is not None:
            return (outputs * output_gradient).sum(), recorded
        return self.task.loss(outputs, targets, self.reduction), recorded

    def gradient(
        self, tensors: VictimTensors, x: Tensor, targets: Tensor, output_gradient: Tensor | None = None
    ) -> Answer:
        """Return the gradient a client steps along, clipped as far as the adversary knows, and the recorded inputs."""

        if not self.channel.clips_examples or len(x) < 2:
            gradient, recorded = self._derivative(tensors, x, targets, output_gradient)
            return (gradient if self.channel.clip_per == "batch" else self.channel.clip_update(gradient)), recorded

        def clipped(picture: Tensor, target: Tensor) -> Tensors:
            return self.channel.clip_update(self._derivative(tensors, picture[None], target[None], output_gradient)[0])

        each = vmap(clipped)(x, targets)
        recorded = self.loss(tensors, x, targets)[1] if self.records else {}
        mean = self.reduction == "mean"
        return {name: value.mean(0) if mean else value.sum(0) for name, value in each.items()}, recorded

    def _derivative(self, tensors: VictimTensors, x: Tensor, targets: Tensor, output_gradient: Tensor | None) -> Answer:
        if in_transform():
            derivative = grad(
                lambda weights: self.loss(tensors._replace(weights=weights), x, targets, output_gradient), has_aux=True
            )
            return derivative(tensors.weights)
        again = recording((x, targets, output_gradient, *tensors.weights.values()))
        with torch.enable_grad():
            weights = {
                name: value if value.requires_grad else value.detach().requires_grad_()
                for name, value in tensors.weights.items()
            }
            loss, recorded = self.loss(tensors._replace(weights=weights), x, targets, output_gradient)
            found = gradients(loss, list(weights.values()), again)
        if not again:
            recorded = {name: value.detach() for name, value in recorded.items()}
        return dict(zip(weights, found, strict=True)), recorded

    def sent_update(self, update: Tensors, tensors: VictimTensors) -> Tensors:
        """What the adversary expects to see of an update that a client made, as far as it knows the defence."""
        expected = self.channel.stand_in(update, tensors.survivors)
        return self.channel.settled(expected, tensors.rounded) if tensors.rounded else expected


def _names(model: nn.Module, remove_duplicate: bool) -> int:
    parameters = model.named_parameters(remove_duplicate=remove_duplicate)
    return sum(1 for _ in (*parameters, *model.named_buffers(remove_duplicate=remove_duplicate)))


def forward_flops(model: nn.Module, x: Tensor) -> int:
    """Operations of one forward pass, a multiply-add being two, counted, not timed.

    >>> forward_flops(nn.Linear(4, 3), torch.zeros(2, 4))
    48
    """
    with torch.no_grad(), _FlopCounter() as counter:
        model(x)
    return counter.flops


class _FlopCounter(TorchDispatchMode):
    """Torch's own formulas, without its ``FlopCounterMode``, which loads the compiler: a second in every worker."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Keeping the compiler away from this class takes loading it; nothing compiles what is counted here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        if packet not in flop_registry and isinstance(func, OpOverload):
            with self:  # what is made of other operations, such as attention, is counted by them
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=result))
        return result
