"""One cell of the matrix of ``strength.py``: its batches, their updates, and what attacks make of them."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from leakscope import __version__
from leakscope.attacks import make_attack
from leakscope.cli.output import parse_part
from leakscope.contracts.attack import Attack
from leakscope.contracts.certificate import ROUNDING
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import Protocol
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.data import Examples
from leakscope.defenses import DPSGD, GradientPruning
from leakscope.federation import FedAvg, FedSGD
from leakscope.metrics import evaluate
from strength_table import CERTIFIED, NONE

#: How labels may lie in a batch; one image has only "distinct".
LABELS = ("distinct", "repeated", "equal")


@dataclass(frozen=True)
class Cell:
    """A place in the matrix; ``disturbance`` is what becomes of the update on its way."""

    model: str
    state: str
    batch: int
    labels: str
    disturbance: str = NONE
    knowledge: str = "honest_server"
    known_labels: str = "no"

    def describe(self) -> str:
        words = [self.model, self.state if self.state == "untrained" else f"{self.state} ep", f"batch {self.batch}"]
        words += [self.labels] if self.batch > 1 else []
        return ", ".join(words + ([self.disturbance] if self.disturbance != NONE else []))

    def sees(self) -> Knowledge:
        return replace(Knowledge.preset(self.knowledge), labels=self.known_labels)


def draw(labels: Sequence[int], kind: str, size: int, count: int, first: int = 0) -> list[list[int]]:
    """The places of ``count`` batches without a common image, from ``first`` on; more batches begin with the same.

    >>> draw([3, 3, 5, 3, 7, 5, 7, 3], "distinct", 2, 2), draw([3, 3, 5, 3, 7, 5, 7, 3], "equal", 2, 2)
    ([[0, 2], [1, 4]], [[0, 1], [2, 5]])
    >>> draw([3, 3, 5, 3, 7, 5, 7, 3], "repeated", 3, 1, first=1)
    [[1, 2, 3]]
    """
    left = list(range(first, len(labels)))
    batches, times = [], {"distinct": 1, "repeated": 2, "equal": size}[kind]
    for _ in range(count):
        numbers = Counter(labels[place] for place in left)
        lead = next((labels[place] for place in left if numbers[labels[place]] >= times), None)
        room, chosen = {lead: times}, []
        for place in left:
            # The label that occurs several times keeps its seats.
            owed = 0 if labels[place] == lead else room[lead]
            if len(chosen) + owed < size and room.setdefault(labels[place], 1):
                room[labels[place]] -= 1
                chosen.append(place)
        if len(chosen) < size:
            raise ValueError(f"batch of {size} with {kind} labels: expected more than {len(labels) - first} images")
        batches.append(chosen)
        left = [place for place in left if place not in chosen]
    return batches


@dataclass(frozen=True, kw_only=True)
class RelativeNoise(Defense):
    """Gaussian noise on the message, its standard deviation a share of each tensor's root mean square."""

    share: float = setting(1e-3, "Of each tensor's root mean square.", gt=0)

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return {
            name: value + self.share * value.square().mean().sqrt() * torch.randn(value.shape, generator=generator)
            for name, value in update.items()
        }


@dataclass(frozen=True, kw_only=True)
class HalfPrecision(Defense):
    """The message travels as float16."""

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return {name: value.half().to(value) for name, value in update.items()}


def disturbed(disturbance: str, batch: int) -> tuple[Protocol, Defense | None]:
    """How the update of a batch comes about, by the word of ``--disturb``."""
    kind, _, given = disturbance.partition(":")
    if kind == NONE:
        return FedSGD(), None
    if kind == "train":
        return FedSGD(batchnorm="train"), None
    if kind == "noise":
        return FedSGD(), RelativeNoise(share=float(given or 1e-3))
    if kind == "clip":
        return FedSGD(), DPSGD(clip=float(given or 0.1), noise_multiplier=0.0)
    if kind == "float16":
        return FedSGD(), HalfPrecision()
    if kind == "prune":
        return FedSGD(), GradientPruning(fraction=float(given or 0.9))
    if kind == "fedavg":
        return FedAvg(epochs=int(given or 5), batch_size=batch), None
    raise ValueError(
        f"--disturb: expected none, train, noise:X, clip:X, float16, prune:X or fedavg:N, got {disturbance!r}"
    )


def named_attack(word: str) -> Attack:
    """An attack by NAME or NAME:key=value,key=value."""
    part = parse_part(word)
    name, options = (part, {}) if isinstance(part, str) else next(iter(part.items()))
    return make_attack(name, **options)


def observe(cell: Cell, net: nn.Module, data: Examples, places: Sequence[int], number: int) -> Observation:
    """What is seen of the update that the examples at ``places`` give."""
    protocol, defense = disturbed(cell.disturbance, cell.batch)
    part, draws = data.subset(places), torch.Generator().manual_seed(number)
    return protocol.observe(net, part.x, part.y, defense, cell.sees(), draws, inputs=part.inputs)


def measure(
    cell: Cell, word: str, seen: Observation, data: Examples, places: Sequence[int], number: int, tries: int = 1
) -> dict[str, Any]:
    """One row: what the attack made of one update. Where it gives a certificate and misses it, further seeds are tried.

    Which try counts is decided by the certificate alone, which needs no truth; the time is that of all of them.
    """
    attack, started = named_attack(word), cpu_seconds()
    best, least, made, refused = None, math.inf, 0, None
    try:
        for attempt in range(tries):
            result = attack(seen, seed=number + 1000 * attempt)
            made += 1
            doubt = max(certificates(result), default=result.info.get("residual") or math.inf)
            if best is None or doubt < least:
                best, least = result, doubt
            if "residual" not in result.info or least < CERTIFIED:
                break
    except (NotApplicable, MissingKnowledge) as error:
        refused = f"{type(error).__name__}: {error}"
    row = {**asdict(cell), "number": number, "attack": word, "images": list(places), "settings": repr(attack)}
    row |= {"seconds": round(cpu_seconds() - started, 2), "tries": made, "refused": refused, "version": __version__}
    if best is None:
        return {**row, "psnr": [], "certificate": [], "label_accuracy": None, "flags": []}
    truth = data.subset(places)
    unit = truth.inputs.to_unit
    told = evaluate(unit(truth.x), truth.y, unit(best.inputs), best.labels, inputs=truth.inputs)
    right = [found["label_correct"] for found in told.rows if found["label_correct"] is not None]
    claims = certificates(best)
    return {
        **row,
        # Nothing in [0, 1] is further away than 0 dB, and what is no number is not nearer.
        "psnr": [number_or_none(found["psnr"]) or 0.0 for found in told.rows],
        "certificate": [number_or_none(claims[place]) for place in told.order.tolist()] if claims else [],
        "label_accuracy": sum(right) / len(right) if right else None,
        "flags": list(best.flags),
    }


def certificates(result: Reconstruction) -> list[float]:
    """Return what each image leaves of the update, infinity where it is not determined; none without certificates."""
    return [
        ROUNDING * one.residual if one is not None and one.free_directions == 0 else math.inf
        for one in result.certificates
    ]


def number_or_none(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def cpu_seconds() -> float:
    """Of this process and of those it started, such as compilers."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def pace(net: nn.Module, data: Examples, places: Sequence[int], rounds: int = 5) -> float:
    """CPU seconds of one forward-backward pass of this batch: what times of different runs are compared by."""
    part, times = data.subset(places), []
    for _ in range(rounds):
        started = time.process_time()
        loss = nn.functional.cross_entropy(net(part.x), part.y)
        torch.autograd.grad(loss, list(net.parameters()))
        times.append(time.process_time() - started)
    return float(f"{sorted(times)[rounds // 2]:.4g}")
