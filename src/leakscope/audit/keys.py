"""Keys of jobs: hashes of everything that a result depends on; seeds that follow from a job; and what computed."""

import hashlib
import json
import platform
from typing import Any

import numpy
import torch

from leakscope import __version__
from leakscope.audit.findings import FINDINGS
from leakscope.audit.parts import part_at
from leakscope.audit.setup import Setup
from leakscope.audit.utility import Course, tensors_hash


def canonical(value: Any) -> str:
    """Return one text for equal JSON values, infinity and NaN included.

    >>> canonical({"b": 1, "a": [1.0, None]})
    '{"a":[1.0,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def content_hash(value: Any) -> str:
    """Hash the canonical text with sha256.

    >>> content_hash({})[:8]
    '44136fa3'
    """
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def derived_seed(seed: int, batch: int, purpose: str) -> int:
    """Derive a seed for each batch and purpose, the same for every defence, so that they are compared fairly.

    >>> derived_seed(0, 0, "attack") == derived_seed(0, 1, "attack")
    False
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{batch}/{purpose}".encode()).digest()[:4], "big") >> 1


def identity(setup: Setup) -> dict[str, Any]:
    """Return what all runs in a store have in common; the rest may grow (``Plan.grown``) or changes no result."""
    spec = setup.spec
    return {
        "leakscope version": __version__,
        "torch version": torch.__version__,
        "model": {"name": spec.model.name, "fingerprint": setup.model_fingerprint},
        "data": {"name": spec.data.name, "fingerprint": setup.data_fingerprint},
        "task": spec.task.identity(),
        "candidates for identification": setup.candidates_fingerprint,
        "LPIPS weights": setup.lpips_fingerprint,
        "batch": spec.batch,
        "knowledge": spec.knowledge,
        "pictures": setup.pictures,
        "device": spec.device,
        "dtype": spec.dtype,
        "threads": spec.threads,
        **({} if setup.course is None else {"utility": _training_of(setup.course)}),
    }


def _training_of(course: Course) -> dict[str, Any]:
    """Return what trainings under different defences must have in common to be compared."""
    return {**course.spec.identity(), "examples": course.fingerprint}


class Keys:
    def __init__(self, setup: Setup) -> None:
        spec = self._spec = setup.spec
        # With more attacked examples the adversary has fewer of its own, and results change.
        self._auxiliary = tensors_hash(setup.salt, *(setup.auxiliary or ()))
        self._prints = [_batch_fingerprint(setup, number) for number in range(len(setup.batches))]
        everywhere = {
            "leakscope": __version__,
            "torch": torch.__version__,
            "task": spec.task.identity(),
            "threads": spec.threads,
        }
        self._training = {**everywhere, "training": None if setup.course is None else _training_of(setup.course)}
        self._common = {
            **everywhere,
            "model": setup.model_fingerprint,
            "candidates": setup.candidates_fingerprint,
            "lpips": setup.lpips_fingerprint,
            "knowledge": spec.knowledge,
            "device": spec.device,
            "dtype": spec.dtype,
            "pictures": setup.pictures,
        }

    def of(self, *, protocol: int, defense: int | None, seed: int, batch: int, **job: Any) -> str:
        setting = {
            "protocol": self._spec.protocols[protocol].identity(),
            "defense": part_at(self._spec.defenses, defense).identity(),
            "seed": seed,
        }
        if is_training(job.get("finding")):  # owes nothing to the attacks, nor to the examples they are about
            return content_hash({**self._training, **job, **setting})
        if job.get("attack") is not None:
            attack = self._spec.attacks[job["attack"]]
            job["attack"] = attack.identity()
            if "auxiliary_data" in attack.instance.requires:
                job["auxiliary"] = self._auxiliary
        client = {"batch": batch, "examples": self._prints[batch]}
        return content_hash({**self._common, **job, **setting, **client})


def _batch_fingerprint(setup: Setup, number: int) -> str:
    x, y = setup.batch(number)
    facts = f"{tuple(x.shape)} {x.dtype} {setup.data.inputs!r} {setup.data.num_classes}"
    return tensors_hash(f"{setup.salt}{facts}", x, y)


def is_training(finding: str | None) -> bool:
    """Tell whether a finding is a training of its own."""
    return finding is not None and FINDINGS[finding].per == "training"


def versions() -> dict[str, str]:
    """Return the versions that numbers may depend on; no name of a host or a user."""
    return {
        "leakscope": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
    }
