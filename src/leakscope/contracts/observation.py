"""What a client sends, and all that an adversary sees of it: no private inputs, no fact that the knowledge denies."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

import leakscope
from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import BYTES, COUNT, FLOAT, expected, is_whole, refuse, whole
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import Box, InputSpace, ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.made import Made
from leakscope.contracts.spool import Spool, StoredTensors, frozen_tensors, layout_of
from leakscope.contracts.task import Classification, Reduction, Task

UpdateKind = Literal["gradient", "weight_delta"]
#: Where a client's draws came from. Never the seed itself: an attack must not compute the noise from it.
Randomness = Literal["system", "seeded"]
BatchNormMode = Literal["eval", "train"]
#: "train": the client dropped units at random, and the model here is the mean of its networks.
DropoutMode = Literal["eval", "train"]
#: Bytes of updates that an observation of many messages holds in memory.
IN_MEMORY = 2**28


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """The client's recipe as far as the adversary knows it; ``None`` means not known."""

    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    optimizer: str | None = None
    momentum: float | None = None
    batch_order: tuple[tuple[int, ...], ...] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)  # for what a file says
    #: The field of Knowledge that grants each fact.
    GRANTED_BY = MappingProxyType(
        {"epochs": "local_epochs", "batch_size": "batch_size", "learning_rate": "learning_rate"}
        | {"optimizer": "learning_rate", "momentum": "learning_rate", "batch_order": "batch_order"}
    )

    def problems(self, examples: int | None) -> list[str]:
        """What is wrong with the recipe, for a client of so many examples, if that is known."""
        counts = {name: n for name in ("epochs", "batch_size") if (n := getattr(self, name)) is not None}
        problems = whole(**counts)
        if self.learning_rate is not None:
            fits = "a number of at least 0", lambda n: _finite(n) and n >= 0
            problems += expected(*fits, learning_rate=self.learning_rate)
        if self.momentum is not None:
            fits = "a number of at least 0 and below 1", lambda n: _finite(n) and 0 <= n < 1
            problems += expected(*fits, momentum=self.momentum)
        problems += expected("a name or None", lambda n: n is None or isinstance(n, str), optimizer=self.optimizer)
        if (steps := self.batch_order) is not None:
            most = math.inf if examples is None else examples
            inside = all(is_whole(number, 0) and number < most for step in steps for number in step)
            if not inside or not all(steps):
                problems.append(f"batch_order: expected batches of sample numbers in 0..{most - 1}, got others")
        if not problems and self.epochs is not None and examples is not None:
            size = min(self.batch_size or examples, examples)
            problem = COUNT.problem(self.epochs * -(-examples // size), "Is epochs or batch_size mistaken?")
            problems += [] if problem is None else [f"local steps: {problem}"]
        return [f"training.{line}" for line in problems]

    def granted(self, knowledge: Knowledge) -> LocalTraining:
        names = [name for name, granted_by in self.GRANTED_BY.items() if knowledge.grants(granted_by)]
        return LocalTraining(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Message:
    """One thing sent.

    ``kind`` "weight_delta" is weights before minus after: it points as a gradient does, and no attack flips a sign.
    ``indices`` are the samples of the batch, where the protocol reveals them; a ``partial`` message lacks tensors.
    """

    update: Mapping[str, Tensor]
    kind: UpdateKind = "gradient"
    indices: tuple[int, ...] | None = None
    partial: bool = False
    batchnorm_statistics: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("gradient", "weight_delta"):
            raise UserError(f"Message.kind: expected 'gradient' or 'weight_delta', got {self.kind!r}")
        if not isinstance(self.update, Mapping):
            got = f"{type(self.update).__name__}. Build it with dict(zip(names, tensors))."
            raise UserError(f"Message.update: expected a mapping of parameter names to tensors, got {got}")
        object.__setattr__(self, "update", frozen_tensors(self.update))
        if self.batchnorm_statistics is not None:
            object.__setattr__(self, "batchnorm_statistics", frozen_tensors(self.batchnorm_statistics))

    def sorted_by(self, order: Mapping[str, int]) -> Message:
        """Sort the tensors by this order; those without a place come last."""
        update, names = self.update, sorted(self.update, key=lambda name: order.get(name, len(order)))
        if names == list(update):
            return self
        ordered = (
            update.in_order(names) if isinstance(update, StoredTensors) else {name: update[name] for name in names}
        )
        return dataclasses.replace(self, update=ordered)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Message:
        def moved(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            if isinstance(tensors, StoredTensors):
                return tensors.to(device, dtype)
            return {name: value.to(device=device, dtype=dtype) for name, value in tensors.items()}

        statistics = None if self.batchnorm_statistics is None else moved(self.batchnorm_statistics)
        return dataclasses.replace(self, update=moved(self.update), batchnorm_statistics=statistics)


class WorkStore(Protocol):
    """Where equal work of several attacks is kept, so that it is done once."""

    def recall(self, key: Hashable, generator: torch.Generator, numbers: int, work: Callable[[], Any]) -> Any:
        """Return what ``work`` finds, drawing from ``generator``, or what equal work has found before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """All that an adversary sees: the model as the client received it, the messages, and what else is known.

    Build one with ``protocol.observe(...)``, or from a captured update with :meth:`from_update`. ``num_classes`` is the
    number of the model's outputs; ``output_shape`` that of its outputs for one example, where they are no row.
    ``auxiliary`` are inputs and targets of examples of the same kind, none of them the client's. No attack reads
    ``made``. ``shared`` keeps work that several attacks have in common.
    """

    model: nn.Module = field(repr=False)
    messages: tuple[Message, ...] = field(repr=False)
    inputs: InputSpace
    num_classes: int
    task: Task = Classification()
    knowledge: Knowledge = Knowledge.honest_server
    num_examples: int | None = None
    labels: Tensor | None = field(default=None, repr=False)
    label_counts: Tensor | None = field(default=None, repr=False)
    training: LocalTraining = LocalTraining()
    channel: Channel | None = None
    defense: Defense | None = None
    auxiliary: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    reduction: Reduction = "mean"
    batchnorm: BatchNormMode = "eval"
    dropout: DropoutMode = "eval"
    output_shape: tuple[int, ...] = ()
    model_name: str | None = None
    randomness: Randomness | None = None
    made: Made | None = field(default=None, repr=False)
    shared: WorkStore | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # A copy, so that neither the caller's later training nor an attack can change what was observed.
        object.__setattr__(self, "model", copy.deepcopy(self.model))
        self._settle()

    def _settle(self) -> None:
        # In the model's order, whatever file or mapping they came from: some distances weigh tensors by depth.
        order = {name: place for place, (name, _) in enumerate(self.model.named_parameters())}
        object.__setattr__(self, "messages", tuple(message.sorted_by(order) for message in self.messages))
        object.__setattr__(self, "output_shape", tuple(self.output_shape) or (self.num_classes,))
        problems = [*self._problems(), *(f"{fact} although the knowledge denies it" for fact in self._denied_facts())]
        refuse("not a valid observation", problems)

    def _problems(self) -> list[str]:
        problems = [] if self.messages else ["messages: expected at least one Message, got none"]
        problems += whole(num_classes=self.num_classes)
        if self.randomness not in (None, *get_args(Randomness)):
            problems.append(f"randomness: expected 'system', 'seeded' or None, got {self.randomness!r}")
        examples = self.num_examples
        if examples is None:
            problems += self.training.problems(None)
        else:
            problems += whole(num_examples=examples) or self._sizes_and_labels(examples)
        if self.auxiliary is not None:
            problems += [f"auxiliary: {line}" for line in self._problems_of_auxiliary(self.auxiliary)]
        parameters = dict(self.model.named_parameters())
        for message in self.messages:
            problems += update_problems(message.update, parameters, message.partial)
        indices = [message.indices for message in self.messages if message.indices is not None]
        if examples is not None and any(not 0 <= i < examples for batch in indices for i in batch):
            problems.append(f"batch indices: expected sample numbers in 0..{examples - 1}, got others")
        return problems

    def _sizes_and_labels(self, examples: int) -> list[str]:
        problem = BYTES.problem(FLOAT * examples * (self.inputs.size + math.prod(self.output_shape)))
        if problem is not None:
            return [f"num_examples: inputs and outputs of {examples} examples: {problem}"]
        problems = self.training.problems(examples)
        if self.labels is not None and not problems:
            problems += [f"labels: {line}" for line in self.task.problems_of(self.labels, examples, self.output_shape)]
        counts = self.label_counts
        if counts is not None and (counts.dim() != 1 or counts.is_floating_point() or bool((counts < 0).any())):
            got = f"{counts.dtype} {tuple(counts.shape)}"
            problems.append(f"label_counts: expected whole numbers, one a class, got {got}")
        elif counts is not None and int(counts.sum()) != examples:
            problems.append(f"label_counts: expected {examples} in all, got {int(counts.sum())}")
        return problems

    def _problems_of_auxiliary(self, pair: Any) -> list[str]:
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
            return [f"expected a pair of tensors (inputs, targets), got {type(pair).__name__}"]
        x, y = pair
        if tuple(x.shape[1:]) != self.inputs.shape or len(x) < 1:
            return [f"expected inputs of shape (examples, *{self.inputs.shape}), got {tuple(x.shape)}"]
        return self.inputs.problems(x) + self.task.problems_of(y, len(x), self.output_shape)

    def _denied_facts(self) -> list[str]:
        statistics = any(message.batchnorm_statistics is not None for message in self.messages)
        facts = {
            "labels are given": ("labels", self.labels is not None),
            "label counts are given": ("label_counts", self.label_counts is not None),
            "batch indices are given": ("batch_indices", any(m.indices is not None for m in self.messages)),
            "num_examples is given": ("num_examples", self.num_examples is not None),
            "the value range of inputs is given": ("normalisation", self.inputs != self.inputs.unknown()),
            "BatchNorm statistics of the batch are given": ("batchnorm_statistics", statistics),
            "the defence's channel is given": ("defense", self.channel is not None),
            "the defence is given": ("defense", self.defense is not None),
            "auxiliary examples are given": ("auxiliary_data", self.auxiliary is not None),
        }
        for name, granted_by in LocalTraining.GRANTED_BY.items():
            facts[f"training.{name} is given"] = (granted_by, getattr(self.training, name) is not None)
        return [fact for fact, (name, given) in facts.items() if given and not self.knowledge.grants(name)]

    @classmethod
    def from_update(
        cls,
        model: nn.Module,
        update: Mapping[str, Tensor],
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        num_examples: int | None = None,
        kind: UpdateKind = "gradient",
        knowledge: Knowledge = Knowledge.honest_server,
        value_range: ValueRange | None = None,
        **facts: Any,
    ) -> Observation:
        """The observation of an update captured elsewhere; ``facts`` are further fields of Observation."""
        return cls(
            model=model,
            messages=(Message(update=update, kind=kind),),
            inputs=Box(tuple(input_shape), value_range),
            num_classes=num_classes,
            num_examples=num_examples,
            knowledge=knowledge,
            **facts,
        )

    @classmethod
    def from_state_dicts(cls, before: Any, after: Any, **facts: Any) -> Observation:
        """The older name of ``leakscope.capture.from_state_dicts``."""
        return _moved("from_state_dicts")(before, after, **facts)

    @classmethod
    def from_arrays(cls, arrays: Any, **facts: Any) -> Observation:
        """The older name of ``leakscope.capture.from_arrays``."""
        return _moved("from_arrays")(arrays, **facts)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.inputs.shape

    @property
    def value_range(self) -> ValueRange | None:
        return self.inputs.value_range

    @property
    def has_rounds(self) -> bool:
        """Whether the messages are of batches of the examples, one a round, rather than one of all of them."""
        first = self.messages[0]
        batch = self.training.batch_size if first.kind == "gradient" else None
        return len(self.messages) > 1 or first.indices is not None or batch not in (None, self.num_examples)

    def relaxed(self) -> Observation:
        """The same observation with inputs that have gradients: itself, unless they live in a discrete space."""
        if not self.inputs.discrete:
            return self
        space = self.inputs.relaxed_space()
        return self.with_facts(
            model=self.inputs.relaxed(self.model),
            inputs=space if self.knowledge.normalisation else space.unknown(),
            auxiliary=None if self.auxiliary is None else (self.relax(self.auxiliary[0]), self.auxiliary[1]),
        )

    def relax(self, x: Tensor) -> Tensor:
        """Inputs of the client's model as the model of :meth:`relaxed` reads them."""
        return self.inputs.to_unit(x).to(self.dtype) if self.inputs.discrete else x

    def with_facts(self, **facts: Any) -> Observation:
        """The same observation with other facts, checked again; it shares the model, which nobody may change."""
        changed = copy.copy(self)
        for name, value in facts.items():
            object.__setattr__(changed, name, value)
        changed._settle()
        return changed

    def without_channel(self) -> Observation:
        """The same observation for somebody who does not know the defence."""
        return self.with_facts(channel=None, defense=None, knowledge=dataclasses.replace(self.knowledge, defense=False))

    @property
    def message(self) -> Message:
        """The only message; UserError where there are several."""
        if len(self.messages) != 1:
            raise UserError(f"expected an observation with one message, got {len(self.messages)}")
        return self.messages[0]

    @property
    def device(self) -> torch.device:
        return next(iter(self.messages[0].update.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.messages[0].update.values())).dtype

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Observation:
        """Move the observation to another device or precision; integers keep their type."""
        facts: dict[str, Any] = {
            name: value.to(device=device)
            for name in ("labels", "label_counts")
            if (value := getattr(self, name)) is not None
        }
        if self.auxiliary is not None:
            x, y = self.auxiliary
            facts["auxiliary"] = self.inputs.cast(x, dtype or x.dtype).to(device), y.to(device=device)
        model = copy.deepcopy(self.model).to(device=device, dtype=dtype)
        return self.with_facts(model=model, messages=tuple(m.to(device, dtype) for m in self.messages), **facts)

    def with_update(self, update: Mapping[str, Tensor]) -> Observation:
        """The same observation with another update, for blind controls and for defences of a captured update."""
        return self.with_facts(messages=(dataclasses.replace(self.message, update=update),))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write PATH.safetensors (tensors) and PATH.json (facts), each atomically."""
        from leakscope.contracts.files import save_observation

        save_observation(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Observation:
        """Read what :meth:`save` wrote. The structure comes from ``model``; no code is taken from the file."""
        from leakscope.contracts.files import load_observation

        return load_observation(path, model)


def _moved(name: str) -> Any:
    # The room ``capture`` comes after this one, and is reached by the package's front.
    warnings.warn(f"Observation.{name} is now leakscope.capture.{name}", DeprecationWarning, stacklevel=3)
    return getattr(leakscope.capture, name)


def update_problems(update: Mapping[str, Tensor], parameters: Mapping[str, Tensor], partial: bool) -> list[str]:
    """What of an update does not fit the parameters; a ``partial`` one may lack some."""
    problems = [] if update else ["update: expected at least one tensor, got none"]
    # A frozen parameter (requires_grad=False) is not trained, so the client sends nothing for it.
    missing = [name for name, p in parameters.items() if p.requires_grad and name not in update and not partial]
    if missing:
        problems.append(f"update lacks {', '.join(missing)}; it must have one tensor for each trainable parameter")
    if extra := [name for name in update if name not in parameters]:
        problems.append(f"update has {', '.join(extra)}, which the model has no parameter for")
    for name, value in layout_of(update).items():
        own = parameters.get(name, value)
        if own.dtype != value.dtype:
            problems.append(f"update[{name!r}]: expected {own.dtype} as in the model, got {value.dtype}")
        if own.shape != value.shape:
            problems.append(f"update[{name!r}]: expected shape {tuple(own.shape)}, got {tuple(value.shape)}")
    return problems


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def gathered(messages: Iterable[Message], in_memory: int = IN_MEMORY) -> tuple[Message, ...]:
    """The messages, of whose updates so many bytes are held in memory; the others are on disk, to the last bit."""
    held, kept = 0, []
    spool: Spool | None = None
    for message in messages:
        size = held_bytes(message)
        if held + size > in_memory:
            spool = spool or Spool()
            message, size = dataclasses.replace(message, update=spool.add(message.update)), 0
        kept.append(message)
        held += size
    return tuple(kept)


def held_bytes(message: Message) -> int:
    """Bytes of the update that are in memory."""
    stored = isinstance(message.update, StoredTensors)
    return 0 if stored else sum(value.numel() * value.element_size() for value in message.update.values())
