"""The contract of an attack. The author of an attack writes ``run``; everything around it is done here, once."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn

from leakscope.limits.diagnosis import RECOVERED, Diagnosis
from leakscope.limits.diagnosis import diagnose as diagnose_result
from leakscope.observation import Observation

__all__ = [
    "FLAGS",
    "RECOVERED",
    "Attack",
    "MissingKnowledge",
    "NotApplicable",
    "Progress",
    "Reconstruction",
    "with_diagnosis",
]

Progress = Callable[[int, int, float], None]

#: What each flag means. A pass with a raised flag is inconclusive, not a pass.
FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "did not converge": "The objective was still falling as the steps ran out; more steps may recover more.",
        "restarts disagree": "Restarts with equally good objectives found different inputs: this is one of several.",
        "non-finite restart": "A restart met NaN or infinity and was dropped; the others went on.",
        "non-finite objective": "Every restart met NaN or infinity; what is returned is a start value.",
        "labels uncertain": "The recovered labels are a guess; a wrong label misleads the search for the input.",
        "steps not simulated": "The local steps cannot be replayed (recipe unknown, or an optimiser other than plain "
        "gradient descent); the update was taken for one gradient.",
        "ill-conditioned": "The attack ended without explaining the update: the gradient is not smooth, its equations "
        "are badly conditioned, or the update was altered. That is a limit of this attack, not a sign of safety.",
        "not identifiable": "The announced batches do not determine every sample; those that they leave open are a "
        "guess.",
        "rounds disagree": "What the rounds tell does not fit together: the model moved too far between them, or the "
        "gradients were altered.",
        "mixture": "A batch of several examples went in; what came out may be mixtures of them.",
    }
)


class MissingKnowledge(ValueError):
    """The attack needs a fact that the threat model withholds."""


class NotApplicable(ValueError):
    """The attack cannot work on this model or update."""


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """An adversary's guess, with its own opinion of it; nothing here was compared with the truth.

    ``diagnosis`` tells a search that failed from inputs that the update does not determine.
    """

    inputs: Tensor
    labels: Tensor | None
    scores: Tensor
    history: Mapping[str, Any] = field(default_factory=dict, repr=False)
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None

    def __post_init__(self) -> None:
        unknown = [flag for flag in self.flags if flag not in FLAGS]
        if unknown:
            raise ValueError(f"unknown flags {unknown}: expected some of {', '.join(FLAGS)}")


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """An attack: settings are keyword-only fields, data is given in the call, and the ``repr`` is complete."""

    #: Fields of Knowledge that must be granted.
    requires: ClassVar[tuple[str, ...]] = ("num_examples",)
    #: Whether it reads messages of several rounds on announced batches; all others read one message.
    reads_rounds: ClassVar[bool] = False
    #: Published settings by name, for ``preset``.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The attack with the settings published under ``name``, some of them changed."""
        if name not in cls.presets:
            known = ", ".join(cls.presets) or "none"
            raise ValueError(f"{cls.__name__} has no preset {name!r}; it has: {known}")
        return cls(**{**cls.presets[name], **changes})

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model a server that may choose it sends out; most attacks leave it as it is."""
        return model

    @abstractmethod
    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        """Recover inputs from what the adversary sees, drawing all randomness from ``generator``."""

    def missing(self, observation: Observation) -> list[str]:
        """What this attack needs and the observation lacks; one phrase each."""
        return [name for name in self.requires if not getattr(observation.knowledge, name)]

    @final
    def __call__(
        self,
        observation: Observation,
        *,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
        diagnose: bool | None = None,
    ) -> Reconstruction:
        """Check, seed, run, time, guard, and say why: the same for every attack.

        ``diagnose`` is whether to tell a failed search from inputs that are not identifiable: None where this takes
        seconds, True even where it takes minutes, False never.
        """
        if not isinstance(observation, Observation):
            raise TypeError(
                f"expected an Observation, got {type(observation).__name__}. Make one with protocol.observe(...) "
                "or Observation.from_update(...)."
            )
        missing = self.missing(observation)
        if missing:
            raise MissingKnowledge(
                f"{type(self).__name__} needs to know {', '.join(missing)}, which this threat model withholds. "
                "Grant it in the Knowledge, or choose an attack that works without."
            )
        if not self.reads_rounds and _has_rounds(observation):
            raise NotApplicable(
                f"{type(self).__name__} reads one update of all examples, got {len(observation.messages)} messages on "
                "batches of them. Use cafe, which reads rounds of a vertical model."
            )
        for number, message in enumerate(observation.messages):
            broken = [n for n, value in message.update.items() if not bool(torch.isfinite(value).all())]
            if broken:
                raise ValueError(
                    f"message {number}: the update has NaN or infinite entries in {', '.join(broken)}. "
                    "Expected finite numbers; was the update captured whole?"
                )
        if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {device!r}: this machine has no CUDA device; use 'cpu'")
        if dtype is None and observation.dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32  # half precision is how an update travels, not how one searches
        if device is not None or dtype is not None:
            observation = observation.to(device=device, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        started = time.perf_counter()
        result = self.run(observation, generator, progress)
        info = {
            **result.info,
            "seconds": time.perf_counter() - started,
            "seed": seed,
            "device": str(observation.device),
            "dtype": str(observation.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }
        expected = observation.input_shape
        if tuple(result.inputs.shape[1:]) != expected:
            raise RuntimeError(
                f"{type(self).__name__} returned inputs of shape {tuple(result.inputs.shape[1:])}, expected {expected}"
            )
        result = dataclasses.replace(result, info=info)
        if diagnose is False:
            return result  # what an attack knows of itself costs nothing
        return with_diagnosis(observation, result, thorough=bool(diagnose))


def _has_rounds(observation: Observation) -> bool:
    first = observation.messages[0]
    batch = observation.training.batch_size if first.kind == "gradient" else None
    return len(observation.messages) > 1 or first.indices is not None or batch not in (None, observation.num_examples)


def with_diagnosis(observation: Observation, result: Reconstruction, *, thorough: bool = False) -> Reconstruction:
    """The result and why it is what it is, unless it says so itself."""
    if result.diagnosis is not None:
        return result
    if _has_rounds(observation):
        reason = "the calculation is for one update of all examples, and there are rounds on some of them"
        found = Diagnosis(outcome="undecided", reason=reason, unknowns=result.inputs.numel())
    elif "mixture" in result.flags:
        reason = "a mixture of examples is no candidate for any of them"
        found = Diagnosis(outcome="undecided", reason=reason, unknowns=result.inputs.numel())
    else:
        found = diagnose_result(observation, result.inputs, result.labels, thorough=thorough)
    return dataclasses.replace(result, diagnosis=found)
