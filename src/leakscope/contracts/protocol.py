"""The contract of a protocol, a client at work, and the one place where facts are withheld from the adversary."""

import copy
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import refuse
from leakscope.contracts.defense import Defense, Gradient, as_defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import Box, InputSpace, ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import (
    BatchNormMode,
    DropoutMode,
    LocalTraining,
    Message,
    Observation,
    UpdateKind,
)
from leakscope.contracts.settings import Described, setting
from leakscope.contracts.task import Classification, Reduction, Task, outputs_of

BATCHNORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
#: torch keeps the Mersenne twister as 624 words of eight bytes each, behind 24 bytes of other state.
_WORDS = slice(24, 24 + 624 * 8)


@dataclass(frozen=True, eq=False)
class ClientSide:
    """What a client works with: its own copy of the model, its examples, its task, its defence and its draws.

    ``shared`` is the model as server and clients know it, that of a defence where it changes the model.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    task: Task
    defense: Defense
    generator: torch.Generator
    shared: nn.Module

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.trained.items()}

    def at(self, places: Tensor) -> Self:
        rows = places.to(self.x.device)
        return replace(self, x=self.x[rows], y=self.y[rows])


@dataclass(frozen=True, kw_only=True)
class Protocol(Described, ABC):
    """How an update comes about. Settings are keyword-only fields; data is given to :meth:`observe`."""

    kind: ClassVar[UpdateKind]
    #: Whether it sends one message a round on batches of the examples, rather than one of all of them.
    sends_rounds: ClassVar[bool] = False
    default_knowledge: ClassVar[Knowledge] = Knowledge.honest_server

    batchnorm: BatchNormMode = setting("eval", "Whether BatchNorm uses its running statistics or those of the batch.")
    dropout: DropoutMode = setting("eval", "Whether the client's dropout is off, or drops units as in training.")

    def __post_init__(self) -> None:
        if getattr(self, "kind", None) not in get_args(UpdateKind):
            raise UserError(f"{type(self).__name__}: expected a class attribute kind, 'gradient' or 'weight_delta'")
        super().__post_init__()

    def observe(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        defense: Defense | Sequence[Defense] | None = None,
        knowledge: Knowledge | None = None,
        generator: torch.Generator | None = None,
        *,
        value_range: ValueRange | None = None,
        inputs: InputSpace | None = None,
        task: Task | None = None,
        num_classes: int | None = None,
        model_name: str | None = None,
        auxiliary: tuple[Tensor, Tensor] | None = None,
    ) -> Observation:
        """Return what an adversary with this ``knowledge`` sees after a client trained a copy of ``model`` on (x, y).

        Dropout and BatchNorm are in the modes that the settings say. ``inputs`` is the space of valid inputs, or
        ``value_range`` the bounds of a box; without them [0, 1] is taken where the data fits, and otherwise the
        adversary has no bounds. ``task`` is what the client minimises, classification unless told. A list of defences
        is a chain. ``auxiliary`` are inputs and targets of examples of the same kind that are not the client's.
        Noise, masks and the order of batches are drawn from ``generator``; without one, from the system's randomness,
        as a real client's are.
        """
        knowledge = self.default_knowledge if knowledge is None else knowledge
        client, outputs = self.client_side(model, x, y, defense, generator, task, num_classes, inputs)
        x, y, task = client.x, client.y, client.task
        space = _input_space(x, value_range) if inputs is None else inputs
        with batches_suffice():
            messages, recipe = self._exchange(client, knowledge)
        return Observation(
            model=client.shared,
            messages=messages,
            inputs=space if knowledge.normalisation else space.unknown(),
            num_classes=math.prod(outputs),
            output_shape=outputs,
            task=task,
            knowledge=knowledge,
            num_examples=x.shape[0] if knowledge.num_examples else None,
            labels=y.clone() if knowledge.labels == "yes" else None,
            label_counts=task.counts(y, outputs) if knowledge.labels != "no" else None,
            training=recipe.granted(knowledge),
            channel=self.channel(client.defense, len(x)) if knowledge.defense else None,
            defense=client.defense if knowledge.defense else None,
            auxiliary=auxiliary if knowledge.auxiliary_data else None,
            reduction=self.reduction,
            batchnorm=self.batchnorm,
            dropout="train" if self.dropout == "train" and draws_units(model, x) else "eval",
            model_name=model_name,
            randomness="system" if generator is None else "seeded",
        )

    def client_side(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        defense: Defense | Sequence[Defense] | None = None,
        generator: torch.Generator | None = None,
        task: Task | None = None,
        num_classes: int | None = None,
        inputs: InputSpace | None = None,
    ) -> tuple[ClientSide, tuple[int, ...]]:
        """Check the arguments; return a client of this protocol and the shape of an example's outputs."""
        self.check(model, x)
        task = Classification() if task is None else task
        outputs = check_batch(model, x, y, num_classes, task, inputs)
        draws = system_generator() if generator is None else generator
        defense = as_defense(defense).for_model(model, tuple(x.shape[1:]), outputs)
        shared = defense.protect_model(model, tuple(x.shape[1:]))
        # Copies: a model may change its input in place, and the caller's data is the truth of the comparison.
        twin = defense.protect_copy(client_copy(shared, self.batchnorm, self.dropout))
        x, y = x.detach().clone(), y.clone()
        return ClientSide(twin, x, y, task, defense, draws, shared), outputs

    def send(self, client: ClientSide) -> Gradient:
        """The update of a client that sends one, as it leaves the client: for training, where nobody attacks."""
        with batches_suffice():
            messages, _ = self._exchange(client, Knowledge.eavesdropper)
        if len(messages) != 1:
            raise UserError(f"{type(self).__name__}: expected a protocol of one message, got {len(messages)} messages")
        return dict(messages[0].update)

    @property
    def reduction(self) -> Reduction:
        """Whether an update is the mean over a client's examples or their sum."""
        return "mean"

    def check(self, model: nn.Module, x: Tensor) -> None:
        """ValueError where this protocol cannot train such a model on such inputs."""

    def findings(self) -> tuple[str, ...]:
        """What is worth telling of a setting or client beside its attacks; names in ``leakscope.audit.FINDINGS``."""
        return ()

    def rehearsal(self) -> Self:
        """A protocol that meets the same problems in less time; itself unless it plays many rounds."""
        return self

    def passes(self, examples: int) -> int:
        """How often at most each of a client's examples enters a gradient that leaves it in one round."""
        return 1

    def easiest(self) -> Self:
        """The case of this protocol from which most can be recovered; positive controls are run on it."""
        return replace(self, batchnorm="eval", dropout="eval")

    def easiest_examples(self, examples: int) -> int:
        """Return how many of a client's examples positive controls take: one, unless that makes it another training."""
        return examples if self.sends_rounds else 1

    def channel(self, defense: Defense, examples: int) -> Channel | None:
        """What becomes of a message of this protocol under a defence; None where nobody has worked that out."""
        return defense.channel(examples=examples, reduction=self.reduction)

    @abstractmethod
    def _exchange(self, client: ClientSide, knowledge: Knowledge) -> tuple[tuple[Message, ...], LocalTraining]:
        """What is sent, as far as the knowledge reveals it, and the whole recipe."""


def default_knowledge(protocols: Sequence[Protocol]) -> Knowledge:
    """Return the default of several protocols if they agree, else the honest server."""
    defaults = {protocol.default_knowledge for protocol in protocols}
    return defaults.pop() if len(defaults) == 1 else Knowledge.honest_server


def client_copy(model: nn.Module, batchnorm: BatchNormMode, dropout: DropoutMode = "eval") -> nn.Module:
    """Copy the model in the client's mode; all that is not BatchNorm follows that of dropout."""
    client = copy.deepcopy(model).train(dropout == "train")
    for module in client.modules():
        if isinstance(module, BATCHNORM):
            module.train(batchnorm == "train")
    return client


def draws_units(model: nn.Module, x: Tensor) -> bool:
    """Tell whether the model draws random numbers in training, as dropout does, whether it is a layer or a function.

    False where it does not run on one such input in training: an error of its own says so where that matters.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
    >>> draws_units(net, torch.ones(1, 4)), draws_units(net[0], torch.ones(1, 4))
    (True, False)
    """
    twin = client_copy(model, "eval", "train")
    answers = []
    try:
        for seed in (0, 1):
            with torch.no_grad(), own_randomness(seed):
                answers.append(outputs_of(twin(x[:1].clone())))
    except Exception:  # noqa: BLE001 - the user's model may raise anything
        return False
    return not torch.equal(*answers)


def check_batch(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    num_classes: int | None,
    task: Task | None = None,
    inputs: InputSpace | None = None,
) -> tuple[int, ...]:
    """Raise one ValueError with everything that is wrong with the batch; return the shape of an example's outputs."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise UserError(f"x and y: expected tensors, got {type(x).__name__} and {type(y).__name__}")
    problems = (Box((1,)) if inputs is None else inputs).problems(x)
    if x.dim() < 2 or x.shape[0] < 1:
        problems.append(f"x: expected (examples, ...) with at least one example, got {tuple(x.shape)}")
    if y.dim() < 1 or y.shape[0] != x.shape[0]:
        problems.append(f"y: expected one target for each of {x.shape[0]} examples, got {y.dtype} {tuple(y.shape)}")
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        problems.append("model: has no trainable parameter, so there is no update")
    elif x.is_floating_point() and parameter.dtype != x.dtype:  # whole numbers fit any precision
        problems.append(f"x is {x.dtype} but the model is {parameter.dtype}; convert one of them")
    refuse("not a usable batch", problems)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            answer = client_copy(model, "eval")(x[:1].clone())
        except RuntimeError as error:
            raise UserError(f"the model cannot read inputs of shape {tuple(x.shape[1:])}: {error}") from error
    outputs = tuple(outputs_of(answer).shape[1:])
    if num_classes is not None and num_classes != math.prod(outputs):
        raise UserError(f"num_classes is {num_classes} but the model has {math.prod(outputs)} outputs")
    refuse("not a usable batch", (Classification() if task is None else task).problems_of(y, len(x), outputs))
    return outputs


def _input_space(x: Tensor, value_range: ValueRange | None) -> Box:
    if value_range is None and bool((x >= 0).all()) and bool((x <= 1).all()):
        value_range = ValueRange()
    return Box(tuple(x.shape[1:]), value_range)


@contextmanager
def batches_suffice() -> Iterator[None]:
    """Turn torch's error into a UserError where BatchNorm in train mode has one value a channel.

    >>> with batches_suffice():
    ...     _ = nn.BatchNorm2d(2)(torch.ones(1, 2, 1, 1))
    Traceback (most recent call last):
    leakscope.contracts.errors.UserError: BatchNorm in train mode: expected two values a channel or more, got one: ...
    """
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        got = "got one: a local batch, perhaps the last one, has one example, and a layer maps of 1x1"
        remedy = (
            "Use local batches of at least two examples, or batchnorm='eval'; or correct what is told of the client"
        )
        raise UserError(f"BatchNorm in train mode: expected two values a channel or more, {got}. {remedy}.") from error


#: Told before each local step: its number, and the gradient it will follow.
Record = Callable[[int, Gradient], None]


@contextmanager
def own_randomness(source: torch.Generator | int) -> Iterator[None]:
    """For models that draw random numbers of their own: from a generator or a seed, leaving the global one alone."""
    with torch.random.fork_rng(devices=[]):
        seed = source if isinstance(source, int) else int(torch.randint(2**62, (1,), generator=source))
        torch.random.default_generator.manual_seed(seed)
        yield


def batch_gradient(client: ClientSide, reduction: Reduction = "mean") -> Gradient:
    """The gradient of the client's loss on its examples, with the defence's hooks applied in their order."""
    defense, draws = client.defense, client.generator
    x, y = defense.protect_batch(client.x, client.y, draws)
    if "protect_example_gradients" in defense.hooks:
        each = defense.protect_example_gradients(example_gradients(client, x, y), draws)
        gradient = {k: v.mean(0) if reduction == "mean" else v.sum(0) for k, v in each.items()}
    else:
        gradient = _gradient(client, x, y, reduction)
    return defense.protect_gradient(gradient, draws)


def example_gradients(client: ClientSide, x: Tensor, y: Tensor) -> Gradient:
    """Return the gradient of each example by itself, stacked along a first axis: all at once where vmap can."""
    # BatchNorm in train mode mixes examples, so each goes through the model alone.
    mixes = any(isinstance(module, BATCHNORM) and module.training for module in client.model.modules())
    if len(x) > 1 and not mixes:
        state = torch.random.get_rng_state()
        try:
            return _mapped_gradients(client, x, y)
        except RuntimeError:  # an operation that vmap does not know; a fault of the model is met again below
            torch.random.set_rng_state(state)
    singles = [_gradient(client, x[i : i + 1], y[i : i + 1], "mean") for i in range(len(x))]
    return {name: torch.stack([g[name] for g in singles]) for name in singles[0]}


def _mapped_gradients(client: ClientSide, x: Tensor, y: Tensor) -> Gradient:
    fixed = {name: p.detach() for name, p in client.model.named_parameters() if not p.requires_grad}
    fixed |= {name: value.detach().clone() for name, value in client.model.named_buffers()}

    def loss(weights: Gradient, picture: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(client.model, {**weights, **fixed}, (picture[None].clone(),))
        return client.task.loss(outputs_of(outputs), target[None])

    weights = {name: p.detach() for name, p in client.trained.items()}
    each: Gradient = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(weights, x, y)
    return {name: each[name].detach() for name in weights}


def _gradient(client: ClientSide, x: Tensor, y: Tensor, reduction: Reduction) -> Gradient:
    trained = client.trained
    loss = client.task.loss(outputs_of(client.model(x.clone())), y, reduction)
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
    return {name: gradient.detach() for name, gradient in zip(trained, gradients, strict=True)}


def visits(examples: int, batch_size: int, epochs: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """Which examples each local step is on; each epoch shuffled anew with a ``generator``, in their order without.

    >>> [batch.tolist() for batch in visits(3, 2, epochs=2)]
    [[0, 1], [2], [0, 1], [2]]
    """
    for _ in range(epochs):
        order = torch.arange(examples) if generator is None else torch.randperm(examples, generator=generator)
        yield from order.split(batch_size)


def train_locally(
    client: ClientSide,
    batches: Iterable[Tensor],
    learning_rate: float,
    optimizer: str = "sgd",
    momentum: float = 0.0,
    record: Record | None = None,
) -> tuple[Gradient, tuple[tuple[int, ...], ...]]:
    """Weights before minus after a step on each of the batches, and the examples of each; the client's model moves."""
    trained, before = client.trained, client.weights()
    sgd = partial(torch.optim.SGD, momentum=momentum)
    rule = (torch.optim.Adam if optimizer == "adam" else sgd)(trained.values(), lr=learning_rate)
    order: list[tuple[int, ...]] = []
    for batch in batches:
        gradient = batch_gradient(client.at(batch))
        if record is not None:
            record(len(order), gradient)
        for name, parameter in trained.items():
            parameter.grad = gradient[name]
        rule.step()
        order.append(tuple(batch.tolist()))
    return {name: before[name] - parameter.detach() for name, parameter in trained.items()}, tuple(order)


def system_generator() -> torch.Generator:
    """Fill the generator's whole state from the operating system: torch uses 32 bits of a seed, few enough to try.

    >>> one, two = (torch.rand(3, generator=system_generator()) for _ in range(2))
    >>> bool((one == two).any())
    False
    """
    generator = torch.Generator()
    state = generator.get_state()
    drawn = torch.frombuffer(bytearray(os.urandom(4 * 624)), dtype=torch.int32)
    state[_WORDS].view(torch.int64).copy_(drawn.long() & 0xFFFFFFFF)
    generator.set_state(state)
    return generator
