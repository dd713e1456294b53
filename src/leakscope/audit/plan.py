"""The grid as a list of jobs, in a fixed order, each with a key of everything its result depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from leakscope import __version__
from leakscope.audit.setup import Setup, tensor_bytes


@dataclass(frozen=True)
class Job:
    """One cell of the grid: numbers point into the spec's lists, ``control`` jobs have no defence."""

    key: str
    position: int
    protocol: int
    defense: int | None
    attack: int
    seed: int
    batch: int

    @property
    def control(self) -> bool:
        return self.defense is None


def canonical(value: Any) -> str:
    """One text for equal JSON values.

    >>> canonical({"b": 1, "a": [1.0, None]})
    '{"a":[1.0,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(value: Any) -> str:
    """sha256 of the canonical text, in hex.

    >>> content_hash({})[:8]
    '44136fa3'
    """
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def derived_seed(seed: int, batch: int, purpose: str) -> int:
    """A seed for each batch and purpose, the same for every defence, so that they are compared fairly.

    >>> derived_seed(0, 0, "attack") == derived_seed(0, 1, "attack")
    False
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{batch}/{purpose}".encode()).digest()[:4], "big") >> 1


def identity(setup: Setup) -> dict[str, Any]:
    """What a store belongs to. How the work is spread and judged is left out, for it changes no result."""
    spec = setup.spec
    return {
        "leakscope version": __version__,
        "torch version": torch.__version__,
        "model": {"name": spec.model.name, "fingerprint": setup.model_fingerprint},
        "data": {"name": setup.data.name, "fingerprint": setup.data_fingerprint},
        "candidates for identification": setup.candidates_fingerprint,
        "LPIPS weights": setup.lpips_fingerprint,
        "examples": sum(len(batch) for batch in setup.batches),
        "batch": spec.batch,
        "protocols": [part.identity() for part in spec.protocols],
        "defenses": [part.identity() for part in spec.defenses],
        "attacks": [part.identity() for part in spec.attacks],
        "knowledge": spec.knowledge,
        "seeds": spec.seeds,
        "controls": spec.controls,
        "pictures": setup.pictures,
        "device": spec.device,
        "dtype": spec.dtype,
        "threads": spec.threads,
    }


def make_plan(setup: Setup) -> list[Job]:
    """Every job: protocol x (defences, then the control) x attack x seed x batch."""
    spec = setup.spec
    prints = [_batch_fingerprint(setup, number) for number in range(len(setup.batches))]
    settings: list[int | None] = [*range(len(spec.defenses)), *([None] if spec.controls else [])]
    common = {
        "leakscope": __version__,
        "torch": torch.__version__,
        "model": setup.model_fingerprint,
        "candidates": setup.candidates_fingerprint,
        "lpips": setup.lpips_fingerprint,
        "knowledge": spec.knowledge,
        "device": spec.device,
        "dtype": spec.dtype,
        "threads": spec.threads,
        "pictures": setup.pictures,
    }
    jobs: list[Job] = []
    for protocol in range(len(spec.protocols)):
        for defense in settings:
            for attack in range(len(spec.attacks)):
                for seed in spec.seeds:
                    for batch in range(len(setup.batches)):
                        key = content_hash(
                            {
                                **common,
                                "protocol": spec.protocols[protocol].identity(),
                                "defense": "none" if defense is None else spec.defenses[defense].identity(),
                                "control": defense is None,
                                "attack": spec.attacks[attack].identity(),
                                "seed": seed,
                                "batch": batch,
                                "examples": prints[batch],
                            }
                        )
                        jobs.append(Job(key, len(jobs), protocol, defense, attack, seed, batch))
    return jobs


def describe(setup: Setup, job: Job) -> dict[str, Any]:
    """The job as the store and the report tell it."""
    spec = setup.spec
    return {
        "protocol": spec.protocols[job.protocol].identity(),
        "defense": "none" if job.defense is None else spec.defenses[job.defense].identity(),
        "control": job.control,
        "attack": spec.attacks[job.attack].identity(),
        "attack_name": spec.attacks[job.attack].name,
        "seed": job.seed,
        "batch": job.batch,
        "indices": list(setup.batches[job.batch]),
        "knowledge": spec.knowledge,
    }


def plan_summary(setup: Setup, jobs: list[Job]) -> dict[str, Any]:
    """How many jobs there are, in all and for each protocol and defence, so that missing ones are noticed."""
    counts: dict[tuple[str, str], int] = {}
    for job in jobs:
        if not job.control:
            told = describe(setup, job)
            cell = (told["protocol"], told["defense"])
            counts[cell] = counts.get(cell, 0) + 1
    settings = [{"protocol": p, "defense": d, "jobs": n} for (p, d), n in counts.items()]
    return {"total": len(jobs), "settings": settings}


def _batch_fingerprint(setup: Setup, number: int) -> str:
    x, y = setup.batch(number)
    box = setup.data.value_range
    digest = hashlib.sha256(f"{tuple(x.shape)} {x.dtype} {box.low} {box.high} {setup.data.num_classes}".encode())
    digest.update(tensor_bytes(x))
    digest.update(tensor_bytes(y))
    return digest.hexdigest()
