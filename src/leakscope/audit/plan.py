"""The grid as a list of jobs, in a fixed order, each with a key of everything its result depends on.

Three kinds of jobs: attempts, controls, and findings. Those on the same client form a group, so that its update is made
once for all of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch

from leakscope import __version__
from leakscope.attacks import ATTACKS
from leakscope.audit.controls import CONTROLS, Control
from leakscope.audit.findings import FINDINGS
from leakscope.audit.loading import tensor_bytes
from leakscope.audit.setup import Setup
from leakscope.audit.spec import AuditSpec
from leakscope.audit.utility import Course
from leakscope.results.records import JobRecord


@dataclass(frozen=True)
class Job:
    """One thing to do; numbers point into the spec's lists.

    An attempt has an attack; a control has its name, no defence (None), and an attack unless it is a guess from
    held-out examples; a finding has its ``finding`` kind and no attack.
    """

    key: str
    position: int
    protocol: int
    defense: int | None
    seed: int
    batch: int
    attack: int | None = None
    control: str | None = None
    finding: str | None = None


def canonical(value: Any) -> str:
    """One text for equal JSON values; infinity and NaN, which a setting may be, have theirs too.

    >>> canonical({"b": 1, "a": [1.0, None]})
    '{"a":[1.0,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


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
    """What all runs in a store have in common; the rest may grow (``audit/growth.py``).

    How the work is spread and judged is left out, for it changes no result.
    """
    spec = setup.spec
    utility = {} if setup.course is None else {"utility": _training_of(setup.course)}
    return {
        "leakscope version": __version__,
        "torch version": torch.__version__,
        "model": {"name": spec.model.name, "fingerprint": setup.model_fingerprint},
        "data": {"name": setup.spec.data.name, "fingerprint": setup.data_fingerprint},
        "task": spec.task.identity(),
        "candidates for identification": setup.candidates_fingerprint,
        "LPIPS weights": setup.lpips_fingerprint,
        "batch": spec.batch,
        "knowledge": spec.knowledge,
        "pictures": setup.pictures,
        "device": spec.device,
        "dtype": spec.dtype,
        "threads": spec.threads,
        **utility,
    }


def _training_of(course: Course) -> dict[str, Any]:
    """What trainings under different defences must have in common to be compared."""
    return {**course.spec.identity(), "examples": course.fingerprint}


def make_plan(setup: Setup) -> list[Job]:
    """Every job: protocol x (defences, then controls) x attack x seed x batch; then the findings."""
    keys = _Keys(setup)
    return [Job(keys.of(**place), number, **place) for number, place in enumerate(_places(setup))]


def count_plan(setup: Setup) -> Iterator[Job]:
    """The jobs of :func:`make_plan`, with numbers for keys: to be counted without a look at the examples."""
    return (Job(str(number), number, **place) for number, place in enumerate(_places(setup)))


def _places(setup: Setup) -> Iterator[dict[str, Any]]:
    return chain(_attempts(setup), _findings(setup))


def _attempts(setup: Setup) -> Iterator[dict[str, Any]]:
    spec = setup.spec
    attacks, seeds, batches = range(len(spec.attacks)), spec.seeds, range(len(setup.batches))
    for protocol in range(len(spec.protocols)):
        attempts = product(range(len(spec.defenses)), [None], attacks, seeds, batches)
        controls = (
            product([None], [control.name], attacks if control.guess is None else [None], *clients)
            for control in _controls(spec)
            for clients in [(seeds[: control.seeds], batches[: control.clients])]
        )
        for defense, control, attack, seed, batch in chain(attempts, *controls):
            if is_repeated(setup, protocol, defense, attack):
                continue
            place = {"protocol": protocol, "defense": defense, "seed": seed, "batch": batch}
            yield {**place, "attack": attack, "control": control}


def is_repeated(setup: Setup, protocol: int, defense: int | None, attack: int | None) -> bool:
    """Whether an attack that leaves out what it knows of the defence has nothing to leave out here.

    It would repeat the same attack that knows; without that one in the list it is run.
    """
    spec = setup.spec
    if attack is None or not spec.attacks[attack].instance.ignore_defense:
        return False
    knowing = repr(dataclasses.replace(spec.attacks[attack].instance, ignore_defense=False))
    if knowing not in [part.identity() for part in spec.attacks]:
        return False
    protection = None if defense is None else spec.defenses[defense].instance
    if protection is None or not setup.knowledge.defense:
        return True
    return spec.protocols[protocol].instance.channel(protection, spec.batch) is None


def _controls(spec: AuditSpec) -> list[Control]:
    undefended = any(part.instance is None for part in spec.defenses)
    asked = [control for name, control in CONTROLS.items() if name in spec.controls]
    return [control for control in asked if not (undefended and control.stands_for_undefended)]


def _findings(setup: Setup) -> Iterator[dict[str, Any]]:
    """What each protocol has to tell: of the first client of a setting, or of every client."""
    spec = setup.spec
    for protocol, part in enumerate(spec.protocols):
        of_protocol = part.instance.findings()
        for kind in [kind for kind in FINDINGS if kind in of_protocol and _is_asked(spec, kind)]:
            if FINDINGS[kind].per == "training":
                seeds = [] if spec.utility is None else spec.utility.seeds
                for defense, seed in product(range(len(spec.defenses)), seeds):
                    yield {"protocol": protocol, "defense": defense, "seed": seed, "batch": 0, "finding": kind}
                continue
            some = slice(None) if FINDINGS[kind].per == "client" else slice(1)
            clients = product(range(len(spec.defenses)), spec.seeds[some], range(len(setup.batches))[some])
            for defense, seed, batch in clients:
                yield {"protocol": protocol, "defense": defense, "seed": seed, "batch": batch, "finding": kind}


def _is_asked(spec: AuditSpec, kind: str) -> bool:
    """Trainings are asked for by their own section, other findings by their kind."""
    return spec.utility is not None if FINDINGS[kind].per == "training" else kind in spec.findings


class _Keys:
    """Hashes of everything that a result depends on."""

    def __init__(self, setup: Setup) -> None:
        spec = self._spec = setup.spec
        self._auxiliary = _auxiliary_fingerprint(setup)
        self._prints = [_batch_fingerprint(setup, number) for number in range(len(setup.batches))]
        self._training = {
            "leakscope": __version__,
            "torch": torch.__version__,
            "task": spec.task.identity(),
            "threads": spec.threads,
            "training": None if setup.course is None else _training_of(setup.course),
        }
        self._common = {
            "leakscope": __version__,
            "torch": torch.__version__,
            "model": setup.model_fingerprint,
            "task": spec.task.identity(),
            "candidates": setup.candidates_fingerprint,
            "lpips": setup.lpips_fingerprint,
            "knowledge": spec.knowledge,
            "device": spec.device,
            "dtype": spec.dtype,
            "threads": spec.threads,
            "pictures": setup.pictures,
        }

    def of(self, *, protocol: int, defense: int | None, seed: int, batch: int, **job: Any) -> str:
        setting = {
            "protocol": self._spec.protocols[protocol].identity(),
            "defense": "none" if defense is None else self._spec.defenses[defense].identity(),
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


def is_training(finding: str | None) -> bool:
    """Whether a finding is a training of its own."""
    return finding is not None and FINDINGS[finding].per == "training"


def client_of(setup: Setup, job: Job) -> tuple[Any, ...]:
    """Whose update a job is about: jobs with the same answer share it.

    Where a server may choose the model, an attack that does has clients of its own. A training is about no client.
    """
    if is_training(job.finding):
        return "training", job.key
    spec = setup.spec
    defense = "none" if job.defense is None else spec.defenses[job.defense].identity()
    chooses = setup.knowledge.choose_weights or setup.knowledge.choose_structure
    own = job.attack if chooses and job.attack is not None and spec.attacks[job.attack].instance.chooses_model else None
    return job.protocol, defense, job.seed, job.batch, own


def grouped(setup: Setup, jobs: list[Job]) -> list[list[Job]]:
    """The jobs by client, in the order in which each client first occurs; attempts before findings."""
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(client_of(setup, job), []).append(job)
    return list(groups.values())


def in_turn(setup: Setup, jobs: list[Job]) -> list[list[Job]]:
    """The jobs as a time budget wants them, each a group of its own, so that they are begun in this order.

    Guesses without an attack; then attack by attack, in the order of the table: of one example after the other its
    controls, then every setting, and further seeds only after all examples. Findings are last. Controls go before the
    attempts that are compared with them, so that a leak which was seen stays one when more is run.
    """
    spec, table = setup.spec, list(ATTACKS)
    ranks = [table.index(part.name) if part.name in table else len(table) for part in spec.attacks]

    def order(job: Job) -> tuple[int, ...]:
        seed = seed_place(job, spec.seeds) if job.control is None else 0
        if job.attack is None:
            stage = -1 if job.finding is None else len(table) + 1
            return stage, 0, seed, job.batch, 0, job.position
        return ranks[job.attack], job.attack, seed, job.batch, int(job.control is None), job.position

    return [[job] for job in sorted(jobs, key=order)]


def seed_place(job: Job, seeds: list[int]) -> int:
    """Where a job's seed stands among those of the audit; the seeds of trainings are their own."""
    return job.seed if is_training(job.finding) else seeds.index(job.seed)


def describe(setup: Setup, job: Job) -> JobRecord:
    """The job as the store and the report tell it; a finding's attack is none."""
    spec = setup.spec
    attack = None if job.attack is None else spec.attacks[job.attack]
    return JobRecord(
        protocol=spec.protocols[job.protocol].identity(),
        defense="none" if job.defense is None else spec.defenses[job.defense].identity(),
        attack="none" if attack is None else attack.identity(),
        attack_name=job.finding or job.control or "none" if attack is None else attack.name,
        seed=job.seed,
        batch=job.batch,
        control=job.control,
        control_kind=None if job.control is None else CONTROLS[job.control].kind,
        indices=() if is_training(job.finding) else setup.batches[job.batch],
        knowledge=spec.knowledge,
        parts={
            "protocol": spec.protocols[job.protocol].facts(),
            "defense": {} if job.defense is None else spec.defenses[job.defense].facts(),
            "attack": {} if attack is None else attack.facts(),
        },
    )


def label_chance(setup: Setup) -> float | None:
    """The share of the most frequent label; None where there are no classes."""
    labels = setup.data.y
    if labels.is_floating_point() or labels.dim() != 1:
        return None
    return float(torch.unique(labels, return_counts=True)[1].max()) / len(labels)


def _auxiliary_fingerprint(setup: Setup) -> str:
    """Of the adversary's own examples: with more attacked examples there are fewer of them, and results change."""
    digest = hashlib.sha256(setup.salt.encode())
    for part in setup.auxiliary or ():
        digest.update(tensor_bytes(part))
    return digest.hexdigest()


def _batch_fingerprint(setup: Setup, number: int) -> str:
    x, y = setup.batch(number)
    facts = f"{tuple(x.shape)} {x.dtype} {setup.data.inputs!r} {setup.data.num_classes}"
    digest = hashlib.sha256(f"{setup.salt}{facts}".encode())
    digest.update(tensor_bytes(x))
    digest.update(tensor_bytes(y))
    return digest.hexdigest()
