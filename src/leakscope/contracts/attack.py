"""The contract of an attack. The author of an attack writes ``run``; everything around it is done here, once."""

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self, final

import torch
from torch import nn

from leakscope.contracts.checks import EXAMPLES, brief, check_seed
from leakscope.contracts.errors import MissingKnowledge, NotApplicable, UserError
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import batches_suffice
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import Described, setting

#: Told how many steps are done, of how many, and the objective.
Progress = Callable[[int, int, float], None]


def check_device(device: Any) -> None:
    """Raise UserError unless torch can calculate on the device here."""
    try:
        # Only a number that comes back holds for every kind of device: "meta" takes tensors and has no numbers.
        torch.ones(1, device=torch.device(device)).sum().item()
    except (RuntimeError, AssertionError, ImportError, ValueError, TypeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:120]
        here = "cpu or cuda" if torch.cuda.is_available() else "cpu, as this machine has no CUDA device"
        raise UserError(f"{brief(device)} is no device to calculate on ({why}); expected {here}") from error


@dataclass(frozen=True, kw_only=True)
class Attack(Described, ABC):
    """An attack: settings are keyword-only fields, data is given in the call, and the ``repr`` is complete."""

    #: Fields of Knowledge that must be granted.
    requires: ClassVar[tuple[str, ...]] = ("num_examples",)
    #: Whether it reads messages of several rounds on announced batches; all others read one message.
    reads_rounds: ClassVar[bool] = False
    #: Whether it makes use of the defence's channel, where the adversary knows it.
    reads_channel: ClassVar[bool] = False
    #: Whether it runs the defence's own code, where the adversary knows it; that needs no channel.
    runs_defense: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    ignore_defense: bool = setting(False, "Whether what is known of the defence is left out.")

    @classmethod
    def published(cls, name: str) -> Mapping[str, Any]:
        if name not in cls.presets:
            raise UserError(f"{cls.__name__} has no preset {name!r}; it has: {', '.join(cls.presets) or 'none'}")
        return cls.presets[name]

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The attack with the settings published under ``name``, some of them changed."""
        return cls(**{**cls.published(name), **changes})

    def prepare(self, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        """Return the model that a server who may choose it sends out, drawn from a setting: one for every client."""
        return model

    @property
    def chooses_model(self) -> bool:
        """Whether it sends out a model of its own where it may."""
        return type(self).prepare is not Attack.prepare

    @abstractmethod
    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        """Recover inputs from what the adversary sees, drawing all randomness from ``generator``."""

    def knows_defense(self, observation: Observation) -> bool:
        """Whether it makes use of what the adversary knows of the defence."""
        by_channel = self.reads_channel and observation.channel is not None
        return not self.ignore_defense and (by_channel or (self.runs_defense and observation.defense is not None))

    def missing(self, observation: Observation) -> list[str]:
        """What this attack needs and the observation lacks; one phrase each."""
        return [name for name in self.requires if not observation.knowledge.grants(name)]

    @final
    def __call__(
        self,
        observation: Observation,
        *,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> Reconstruction:
        """Check, seed, run, time and guard: the same for every attack."""
        if not isinstance(observation, Observation):
            fix = "Make one with protocol.observe(...) or Observation.from_update(...)."
            raise UserError(f"expected an Observation, got {type(observation).__name__}. {fix}")
        if self.ignore_defense:
            observation = observation.without_channel()
        if missing := self.missing(observation):
            withheld = f"{type(self).__name__} needs to know {', '.join(missing)}, which this threat model withholds"
            raise MissingKnowledge(f"{withheld}. Grant it in the Knowledge, or choose an attack that works without.")
        if not self.reads_rounds and observation.has_rounds:
            got = f"{len(observation.messages)} messages on batches of them. Use an attack that reads rounds."
            raise NotApplicable(f"{type(self).__name__} reads one update of all examples, got {got}")
        for number, message in enumerate(observation.messages):
            if broken := [n for n, value in message.update.items() if not bool(torch.isfinite(value).all())]:
                got = f"message {number}: the update has NaN or infinite entries in {', '.join(broken)}"
                raise UserError(f"{got}. Expected finite numbers; was the update captured whole?")
        if device is not None:
            check_device(device)
        check_seed(seed)
        EXAMPLES.check("num_examples", observation.num_examples or 0, "Attack an update of fewer examples.")
        if dtype is None and observation.dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32  # half precision is how an update travels, not how one searches
        if device is not None or dtype is not None:
            observation = observation.to(device=device, dtype=dtype)
        started = time.perf_counter()
        with batches_suffice():
            result = self.run(observation.relaxed(), torch.Generator().manual_seed(seed), progress)
        if observation.inputs.discrete:
            result = dataclasses.replace(result, inputs=observation.inputs.from_unit(result.inputs))
        info = {
            **result.info,
            "seconds": time.perf_counter() - started,
            "seed": seed,
            "device": str(observation.device),
            "dtype": str(observation.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }
        channel = observation.channel
        stand_in = observation.dropout == "train" or (channel is not None and (channel.inexact or channel.mixed > 1))
        if stand_in and not result.defence_undone:
            result = dataclasses.replace(result, flags=tuple(dict.fromkeys((*result.flags, "defence approximated"))))
        if (shape := tuple(result.inputs.shape[1:])) != (expected := observation.input_shape):
            raise RuntimeError(f"{type(self).__name__} returned inputs of shape {shape}, expected {expected}")
        return dataclasses.replace(result, info=info)
