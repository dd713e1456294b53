"""The vocabulary: what a client sends, and all that an adversary sees of it.

An :class:`Observation` is the only thing an attack is given. It has no field for private inputs, and every fact
that the :class:`Knowledge` denies is ``None`` in it, so an attack cannot use what the threat model withholds.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

LabelKnowledge = Literal["no", "counts", "yes"]
UpdateKind = Literal["gradient", "weight_delta"]
BatchNormMode = Literal["eval", "train"]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What an adversary knows besides the model and the update; one field for each thing.

    >>> Knowledge.honest_server.labels, Knowledge.full.labels
    ('no', 'yes')
    >>> Knowledge.preset("eavesdropper").learning_rate
    False
    """

    labels: LabelKnowledge = "no"
    num_examples: bool = True
    local_epochs: bool = False
    batch_size: bool = False
    learning_rate: bool = False
    batch_order: bool = False
    batch_indices: bool = False
    batchnorm_statistics: bool = False
    normalisation: bool = False
    choose_weights: bool = False
    choose_structure: bool = False

    eavesdropper: ClassVar[Knowledge]
    honest_server: ClassVar[Knowledge]
    vertical_server: ClassVar[Knowledge]
    malicious_server: ClassVar[Knowledge]
    full: ClassVar[Knowledge]

    def __post_init__(self) -> None:
        if self.labels not in ("no", "counts", "yes"):
            raise ValueError(f"Knowledge.labels: expected 'no', 'counts' or 'yes', got {self.labels!r}")

    @classmethod
    def preset(cls, name: str) -> Knowledge:
        """The preset called ``name``, one of KNOWLEDGE_PRESETS."""
        if name not in KNOWLEDGE_PRESETS:
            raise ValueError(
                f"unknown knowledge preset {name!r}: expected one of {', '.join(KNOWLEDGE_PRESETS)}, "
                "or a mapping of the fields of Knowledge"
            )
        return KNOWLEDGE_PRESETS[name]

    def describe(self) -> list[str]:
        """The threat model in plain words, one sentence a line."""
        lines = ["The adversary sees the model's structure, the weights the client received, and the update it sent."]
        lines.append(
            {
                "no": "It does not know the labels and must infer them.",
                "counts": "It knows how many examples each class has, not which example has which label.",
                "yes": "It knows every label.",
            }[self.labels]
        )
        facts = {
            "num_examples": "the number of examples",
            "local_epochs": "the number of local epochs",
            "batch_size": "the local batch size",
            "learning_rate": "the client's learning rate and optimiser",
            "batch_order": "the order in which the client visited its examples",
            "batch_indices": "which examples are in each batch",
            "batchnorm_statistics": "the BatchNorm statistics of the private batch itself",
            "normalisation": "the input normalisation and value range",
        }
        known = [words for name, words in facts.items() if getattr(self, name)]
        unknown = [words for name, words in facts.items() if not getattr(self, name)]
        if known:
            lines.append("It knows " + ", ".join(known) + ".")
        if unknown:
            lines.append("It does not know " + ", ".join(unknown) + ".")
        powers = {"choose_weights": "the weights", "choose_structure": "the structure"}
        chosen = [words for name, words in powers.items() if getattr(self, name)]
        lines.append(
            f"It may choose {' and '.join(chosen)} of the model."
            if chosen
            else "It follows the protocol and may not change the model."
        )
        return lines


Knowledge.eavesdropper = Knowledge()
Knowledge.honest_server = Knowledge(local_epochs=True, batch_size=True, learning_rate=True, normalisation=True)
# In vertical learning the server itself announces the batches, unless indices are shuffled securely.
Knowledge.vertical_server = dataclasses.replace(Knowledge.honest_server, batch_indices=True)
Knowledge.malicious_server = dataclasses.replace(Knowledge.honest_server, choose_weights=True, choose_structure=True)
Knowledge.full = Knowledge(
    labels="yes",
    local_epochs=True,
    batch_size=True,
    learning_rate=True,
    batch_order=True,
    batch_indices=True,
    batchnorm_statistics=True,
    normalisation=True,
    choose_weights=True,
    choose_structure=True,
)

KNOWLEDGE_PRESETS: Mapping[str, Knowledge] = MappingProxyType(
    {
        "eavesdropper": Knowledge.eavesdropper,
        "honest_server": Knowledge.honest_server,
        "vertical_server": Knowledge.vertical_server,
        "malicious_server": Knowledge.malicious_server,
        "full": Knowledge.full,
    }
)


@dataclass(frozen=True)
class ValueRange:
    """The valid box of inputs in the space the model reads, one bound a channel (or one for all).

    ``to_unit`` maps it to [0, 1], the space in which pictures are shown and PSNR is measured.

    >>> ValueRange.normalised(mean=(0.5,), std=(0.25,))
    ValueRange(low=(-2.0,), high=(2.0,))
    """

    low: tuple[float, ...] = (0.0,)
    high: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", tuple(float(v) for v in self.low))
        object.__setattr__(self, "high", tuple(float(v) for v in self.high))
        if len(self.low) != len(self.high):
            raise ValueError(f"ValueRange: {len(self.low)} lower but {len(self.high)} upper bounds")
        if not all(a < b for a, b in zip(self.low, self.high, strict=True)):
            raise ValueError(f"ValueRange: every low must be below its high, got {self.low} and {self.high}")

    @classmethod
    def normalised(cls, mean: tuple[float, ...], std: tuple[float, ...]) -> ValueRange:
        """The box of pixels in [0, 1] after subtracting ``mean`` and dividing by ``std``."""
        if len(mean) != len(std) or any(s <= 0 for s in std):
            raise ValueError(f"normalisation: expected equally long mean and positive std, got {mean}, {std}")
        return cls(
            low=tuple((0.0 - m) / s for m, s in zip(mean, std, strict=True)),
            high=tuple((1.0 - m) / s for m, s in zip(mean, std, strict=True)),
        )

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bound, shaped to broadcast over a batch (B, C, ...) such as ``like``."""
        if len(self.low) == 1:
            shape: tuple[int, ...] = ()
        else:
            if like.dim() < 2 or like.shape[1] != len(self.low):
                raise ValueError(
                    f"ValueRange has {len(self.low)} channels but the inputs have shape {tuple(like.shape)}"
                )
            shape = (len(self.low),) + (1,) * (like.dim() - 2)
        low = torch.tensor(self.low, device=like.device, dtype=like.dtype).reshape(shape)
        high = torch.tensor(self.high, device=like.device, dtype=like.dtype).reshape(shape)
        return low, high

    def to_unit(self, x: Tensor) -> Tensor:
        low, high = self.bounds(x)
        return (x - low) / (high - low)

    def from_unit(self, x: Tensor) -> Tensor:
        low, high = self.bounds(x)
        return low + x * (high - low)


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """The client's recipe as far as the adversary knows it; ``None`` means not known."""

    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    optimizer: str | None = None
    momentum: float | None = None
    batch_order: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Message:
    """One thing sent.

    ``kind`` is "gradient", or "weight_delta" = weights before minus weights after, which for gradient descent is a
    positive combination of gradients: both kinds point the same way, and no attack has to flip a sign. ``indices`` are
    the numbers of the samples in the batch, where the protocol reveals them. A ``partial`` message holds some of the
    tensors only, those that were kept of it.
    """

    update: Mapping[str, Tensor]
    kind: UpdateKind = "gradient"
    indices: tuple[int, ...] | None = None
    partial: bool = False
    batchnorm_statistics: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("gradient", "weight_delta"):
            raise ValueError(f"Message.kind: expected 'gradient' or 'weight_delta', got {self.kind!r}")
        if not isinstance(self.update, Mapping):
            raise TypeError(
                f"Message.update: expected a mapping of parameter names to tensors, got "
                f"{type(self.update).__name__}. Build it with dict(zip(names, tensors))."
            )
        object.__setattr__(self, "update", _frozen_tensors(self.update))
        if self.batchnorm_statistics is not None:
            object.__setattr__(self, "batchnorm_statistics", _frozen_tensors(self.batchnorm_statistics))

    def sorted_by(self, order: Mapping[str, int]) -> Message:
        """The same message with its tensors in this order; those without a place come last."""
        names = sorted(self.update, key=lambda name: order.get(name, len(order)))
        if names == list(self.update):
            return self
        return dataclasses.replace(self, update={name: self.update[name] for name in names})

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Message:
        statistics = self.batchnorm_statistics
        return dataclasses.replace(
            self,
            update={k: v.to(device=device, dtype=dtype) for k, v in self.update.items()},
            batchnorm_statistics=None
            if statistics is None
            else {k: v.to(device=device, dtype=dtype) for k, v in statistics.items()},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """All that an adversary sees: the model as the client received it, the messages, and what else is known.

    Build one with ``protocol.observe(...)``, or from a captured update with :meth:`from_update`.
    """

    model: nn.Module = field(repr=False)
    messages: tuple[Message, ...] = field(repr=False)
    input_shape: tuple[int, ...]
    num_classes: int
    knowledge: Knowledge = Knowledge.honest_server
    num_examples: int | None = None
    value_range: ValueRange | None = None
    labels: Tensor | None = field(default=None, repr=False)
    label_counts: Tensor | None = field(default=None, repr=False)
    training: LocalTraining = LocalTraining()
    reduction: Reduction = "mean"
    batchnorm: BatchNormMode = "eval"
    model_name: str | None = None

    def __post_init__(self) -> None:
        # In the model's order, whatever file or mapping they came from: some distances weigh tensors by depth.
        order = {name: place for place, (name, _) in enumerate(self.model.named_parameters())}
        object.__setattr__(self, "messages", tuple(message.sorted_by(order) for message in self.messages))
        object.__setattr__(self, "input_shape", tuple(int(n) for n in self.input_shape))
        # A copy, so that neither the caller's later training nor an attack can change what was observed.
        object.__setattr__(self, "model", copy.deepcopy(self.model))
        self._validate()

    def _validate(self) -> None:
        problems: list[str] = []
        if not self.messages:
            problems.append("messages: expected at least one Message, got none")
        if any(n < 1 for n in self.input_shape) or not self.input_shape:
            problems.append(f"input_shape: expected positive sizes without the batch, got {self.input_shape}")
        if self.num_classes < 1:
            problems.append(f"num_classes: expected at least 1, got {self.num_classes}")
        if self.num_examples is not None and (not isinstance(self.num_examples, int) or self.num_examples < 1):
            problems.append(f"num_examples: expected a whole number of at least 1, got {self.num_examples}")
        parameters = dict(self.model.named_parameters())
        for message in self.messages:
            problems += _update_problems(message, parameters)
        known = self.knowledge
        if self.labels is not None and known.labels != "yes":
            problems.append("labels are given although the knowledge denies them")
        if self.label_counts is not None and known.labels == "no":
            problems.append("label counts are given although the knowledge denies them")
        indices = [message.indices for message in self.messages if message.indices is not None]
        if indices and not known.batch_indices:
            problems.append("batch indices are given although the knowledge denies them")
        if self.num_examples is not None and any(not 0 <= i < self.num_examples for batch in indices for i in batch):
            problems.append(f"batch indices: expected sample numbers in 0..{self.num_examples - 1}, got others")
        if self.num_examples is not None and not known.num_examples:
            problems.append("num_examples is given although the knowledge denies it")
        if problems:
            raise ValueError("not a valid observation:\n  - " + "\n  - ".join(problems))

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
        **facts: Any,
    ) -> Observation:
        """The observation of an update captured elsewhere; ``facts`` are further fields of Observation."""
        message = Message(update=update, kind=kind)
        return cls(
            model=model,
            messages=(message,),
            input_shape=input_shape,
            num_classes=num_classes,
            num_examples=num_examples,
            knowledge=knowledge,
            **facts,
        )

    @property
    def message(self) -> Message:
        """The only message; protocols of several rounds carry more, and attacks on them say so."""
        if len(self.messages) != 1:
            raise ValueError(f"expected an observation with one message, got {len(self.messages)}")
        return self.messages[0]

    @property
    def device(self) -> torch.device:
        return next(iter(self.messages[0].update.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.messages[0].update.values())).dtype

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Observation:
        """The same observation on another device or in another precision; integers keep their type."""

        def move(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device=device)

        return dataclasses.replace(
            self,
            model=copy.deepcopy(self.model).to(device=device, dtype=dtype),
            messages=tuple(m.to(device, dtype) for m in self.messages),
            labels=move(self.labels),
            label_counts=move(self.label_counts),
        )

    def with_update(self, update: Mapping[str, Tensor]) -> Observation:
        """The same observation with another update, for null controls and for defences of a captured update."""
        return dataclasses.replace(self, messages=(dataclasses.replace(self.message, update=update),))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write PATH.safetensors (tensors) and PATH.json (facts), each atomically."""
        from leakscope.observation_files import save_observation

        save_observation(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Observation:
        """Read what :meth:`save` wrote. The structure comes from ``model``; no code is taken from the file."""
        from leakscope.observation_files import load_observation

        return load_observation(path, model)


def _frozen_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    return MappingProxyType({name: value.detach().clone() for name, value in tensors.items()})


def _update_problems(message: Message, parameters: Mapping[str, Tensor]) -> list[str]:
    problems, update = [], message.update
    # A frozen parameter (requires_grad=False) is not trained, so the client sends nothing for it.
    expected_names = [] if message.partial else [name for name, value in parameters.items() if value.requires_grad]
    missing = [name for name in expected_names if name not in update]
    if not update:
        problems.append("update: expected at least one tensor, got none")
    extra = [name for name in update if name not in parameters]
    if missing:
        problems.append(f"update lacks {', '.join(missing)}; it must have one tensor for each trainable parameter")
    if extra:
        problems.append(f"update has {', '.join(extra)}, which the model has no parameter for")
    for name, value in update.items():
        expected = parameters.get(name)
        if expected is not None and expected.dtype != value.dtype:
            problems.append(f"update[{name!r}]: expected {expected.dtype} as in the model, got {value.dtype}")
        if expected is not None and expected.shape != value.shape:
            problems.append(f"update[{name!r}]: expected shape {tuple(expected.shape)}, got {tuple(value.shape)}")
    return problems
