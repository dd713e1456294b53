"""Attacks and models that are quick, or that misbehave in one certain way, for the tests of the audit."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.attacks import standard_attacks
from leakscope.audit import Audit, audit
from leakscope.audit.findings import Subject
from leakscope.contracts.attack import Attack
from leakscope.contracts.certificate import Certificate
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import Protocol
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.task import Classification
from leakscope.federation import FedSGD
from leakscope.results import FindingRow, Row

#: What a test waives whose audit passes by an attack of its own.
STANDARD = standard_attacks([FedSGD()])


def net(seed: int = 0) -> nn.Module:
    """Logistic regression on 1x4x4 pictures of three classes; its bias gives a single example away."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def examples(count: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(count) % 3


def in_worker() -> bool:
    return multiprocessing.parent_process() is not None or Path(sys.argv[0]).name == "default_worker.py"  # of Ray


@dataclass(frozen=True, kw_only=True)
class Quotient(Attack):
    """x = dL/dW / dL/db, exact for one example; noise in, noise out. It takes its time where SLOW is set."""

    slow: float = 0.0

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        time.sleep(self.slow if "SLOW" in os.environ else 0)
        update = observation.message.update
        weight, bias = update["1.weight"], update["1.bias"]
        row = int(bias.abs().argmax())
        x = (weight[row] / bias[row]).reshape(1, *observation.input_shape)
        count = observation.num_examples or 1
        if progress is not None:
            progress(1, 1, 0.0)
        return Reconstruction(
            x.expand(count, *x.shape[1:]).clone(),
            bias.argmin().repeat(count),
            torch.zeros(count),
            history={"objective": [[1.0, 0.5, float("nan")]]},
            info={"steps": 1, "restarts": 1},
        )


@dataclass(frozen=True, kw_only=True)
class Proved(Quotient):
    """The closed form with a certificate, as head-first gives one."""

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        found = super().run(observation, generator, progress)
        proof = Certificate(residual=0.1, tolerance=1.0, free_directions=0, method="division")
        return dataclasses.replace(found, certificates=(proof,) * len(found.inputs))


@dataclass(frozen=True, kw_only=True)
class Guess(Attack):
    """Random pixels, whatever was observed."""

    flags: tuple[str, ...] = ()
    nan: bool = False

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        shape = (observation.num_examples or 1, *observation.input_shape)
        x = torch.rand(shape, generator=generator)
        return Reconstruction(x * float("nan") if self.nan else x, None, torch.zeros(shape[0]), flags=self.flags)


@dataclass(frozen=True, kw_only=True)
class Malicious(Attack):
    """Sends out a model with zero weights, and looks whether the client used it."""

    requires = ("num_examples", "choose_weights")

    def prepare(self, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        if any(bool(parameter.any()) for parameter in observation.model.parameters()):
            raise RuntimeError("the client was sent another model")
        return Guess().run(observation, generator)


@dataclass(frozen=True, kw_only=True)
class Vandal(Attack):
    """Reads rounds, learns nothing, and leaves the model it was given in ruins."""

    reads_rounds = True

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        Malicious().prepare(observation.model.requires_grad_(False), observation.input_shape)
        return Guess().run(observation, generator)


@dataclass(frozen=True, kw_only=True)
class Trouble(Attack):
    """Raises, or ends the process it runs in, for the examples of one seed."""

    how: str = "raise"

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        if self.how == "refuse":
            raise NotApplicable("only models without bias")
        if self.how == "missing":
            raise MissingKnowledge("needs the labels")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "raise":
            raise RuntimeError("the line search failed")
        if not in_worker():
            raise RuntimeError("would end the parent")
        if self.how == "exit":
            os._exit(7)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        raise RuntimeError("slept through")


@dataclass(frozen=True, kw_only=True)
class OnceFailing(Attack):
    """Fails as long as a file is missing, for the tests of resuming."""

    marker: str

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        if not Path(self.marker).exists():
            raise OSError("out of something")
        return Guess().run(observation, generator)


class Fatal(nn.Module):
    """Ends a worker process as soon as a client uses it there; harmless in the parent, and to the start-up check."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        if in_worker() and len(x) == 1:
            os._exit(7)
        out: Tensor = self.inner(x)
        return out


class Elsewhere(nn.Module):
    """Answers otherwise in a worker: code of the same name that is not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + (1.0 if in_worker() else 0.0)
        return out


def fatal_net() -> nn.Module:
    return Fatal()


def random_net() -> nn.Module:
    """Other weights in every process, whatever the seed."""
    return net(seed=os.getpid())


def dying_factory() -> nn.Module:
    """Cannot even be built in a worker."""
    if in_worker():
        os.kill(os.getpid(), signal.SIGKILL)
    return net()


def unpicklable_net() -> nn.Module:
    model = net()
    model.secret = lambda: None  # type: ignore[assignment]
    return model


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 16))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T + self.bias


def linear() -> nn.Module:
    return Linear()


def environment() -> dict[str, str]:
    """The environment in which a fresh interpreter finds what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def subject(
    protocol: Protocol,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    defense: Defense | None = None,
    *,
    seed: int = 0,
    seen: Observation | None = None,
    **options: Any,
) -> Subject:
    """One client as a finding sees it; ``seen`` where it is not what this protocol makes of the rest."""

    def draws() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    if seen is None:
        seen = protocol.observe(model, x, y, defense, generator=draws(), **options)
    return Subject(protocol, defense, Classification(), seen, x, y, draws)


BASE: dict[str, Any] = {
    "attacks": [Quotient(), Guess()],
    "defenses": ["none", {"gradient-noise": {"sigma": 0.3}}],
    "examples": 3,
}


def run(out: Path | None = None, **changes: Any) -> Audit:
    return audit(**{**BASE, "model": net(), "data": examples(), "out": out, **changes})


def timeless(rows: Sequence[Row | FindingRow]) -> list[tuple[Any, ...]]:
    """Rows without what may differ between two runs of the same job; keys of private data are salted in each folder."""
    kept = []
    for row in rows:
        if isinstance(row, FindingRow):
            kept.append((row.position, row.kind, row.status, row.subject(), row.content, row.error))
            continue
        result = json.loads(json.dumps(row.raw))
        if result is not None:
            result.pop("peak_memory_mb", None)
            result.get("info", {}).pop("seconds", None)
        kept.append((row.position, row.status, row.job, result, row.error))
    return kept
