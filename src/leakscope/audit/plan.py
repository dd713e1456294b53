"""The grid as a list of jobs, in a fixed order, each with a key of everything its result depends on.

Three kinds of jobs: attempts, controls, and findings. Those on the same client form a group, so that its update is made
once for all of them.

A folder grows: what is asked for now joins what was asked for before, and what is done is not done again. The union of
two grids is no grid, so the store keeps the list of all jobs that were ever planned in it: only then are those of an
earlier run that never finished still missed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch

from leakscope.attacks import ATTACKS, standard_attacks
from leakscope.audit.controls import CONTROLS, Control
from leakscope.audit.findings import FINDINGS
from leakscope.audit.keys import Keys, content_hash, is_training
from leakscope.audit.setup import Setup
from leakscope.audit.spec import AuditSpec
from leakscope.results.records import JobRecord
from leakscope.results.store import Store, StoreError

#: Keys of a spec that are lists and may grow; the number of examples grows too.
AXES = ("protocols", "defenses", "attacks", "seeds", "controls", "findings")


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


def make_plan(setup: Setup) -> list[Job]:
    """Every job: protocol x (defences, then controls) x attack x seed x batch; then the findings."""
    keys = Keys(setup)
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
            if is_training(kind):
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
    return spec.utility is not None if is_training(kind) else kind in spec.findings


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


@dataclass(frozen=True)
class Plan:
    """Everything that a folder holds or waits for: jobs in order, whose numbers point into the lists of ``axes``."""

    axes: Mapping[str, Any]
    jobs: tuple[Job, ...] = ()
    floors: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    #: The standard attacks of each protocol, without which the verdict passes nothing.
    standard: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, setup: Setup, jobs: Sequence[Job]) -> Plan:
        """What a spec asks for."""
        spec = setup.spec
        parts = {name: [part.identity() for part in getattr(spec, name)] for name in AXES[:3]}
        kinds = {name: list(getattr(spec, name)) for name in AXES[3:]}
        axes = {"examples": sum(len(batch) for batch in setup.batches), **parts, **kinds}
        floors = {part.identity(): "floor" in part.instance.findings() for part in spec.protocols}
        standard = {part.identity(): standard_attacks([part.instance], setup.knowledge) for part in spec.protocols}
        return cls(axes, tuple(jobs), floors, standard)

    @classmethod
    def read(cls, store: Store) -> Plan:
        """What was planned in ``store`` so far; StoreError where that is damaged."""
        planned = store.meta("planned")
        try:
            jobs = tuple(Job(*values) for values in planned["jobs"])
            plan = cls(planned["axes"], jobs, planned["floors"], planned.get("standard", {}))
            _numbered(plan.jobs, plan.axes)
            for job in plan.jobs:
                _moved(job, plan.axes, plan.axes)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise StoreError(
                f"{store.directory}: its list of planned jobs is damaged ({error!r}). Restore it from a copy, or "
                "choose another --out."
            ) from error
        return plan

    def grown(self, new: Plan, finished: Mapping[str, str]) -> Plan:
        """This plan and ``new`` as one, in the order in which one run of all of it would have had them."""
        axes = {name: [*self.axes[name], *(x for x in new.axes[name] if x not in self.axes[name])] for name in AXES}
        examples = max(self.axes["examples"], new.axes["examples"])
        union = {job.key: job for job in self.jobs}
        told = {_subject(job): job.key for job in self.jobs if _per_setting(job)}
        for job in new.jobs:
            moved = _moved(job, new.axes, axes)
            if _per_setting(moved):  # one client stands for a setting; which one an earlier run may have chosen
                key = told.get(_subject(moved), moved.key)
                if key != moved.key and finished.get(key) in ("done", "refused"):
                    continue
                union.pop(key, None)
            union[moved.key] = moved
        floors, standard = {**self.floors, **new.floors}, {**self.standard, **new.standard}
        return Plan({"examples": examples, **axes}, _numbered(union.values(), axes), floors, standard)

    def numbered(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of ``jobs`` that belong to this plan, in their places."""
        places = {job.key: job.position for job in self.jobs}
        return [dataclasses.replace(job, position=places[job.key]) for job in jobs if job.key in places]

    def meta(self, setup: Setup, known: Mapping[str, Any]) -> dict[str, Any]:
        """What the store keeps of it; ``known`` is what all of its runs have in common."""
        lists = {name: values for name, values in self.axes.items() if name != "findings"}
        jobs = [dataclasses.astuple(job) for job in self.jobs]
        return {
            "spec_hash": content_hash({**known, **lists}),
            "identity": known,
            "plan": self.summary(setup),
            "planned": {"axes": self.axes, "jobs": jobs, "floors": self.floors, "standard": self.standard},
        }

    def summary(self, setup: Setup) -> dict[str, Any]:
        """How many attempts, controls and findings there are, in all and per setting, so that missing ones are noticed.

        ``has_floor``: theory has something to say of what a client of this protocol sends. ``label_chance`` is the
        share of the most frequent label, which a guess from no information names. ``standard`` names the attacks that
        a pass of each protocol needs.
        """
        counts: dict[tuple[str, str], int] = {}
        theory: Counter[tuple[str, str]] = Counter()
        for job in self.jobs:
            if job.control is None and job.defense is not None:
                cell = self.axes["protocols"][job.protocol], self.axes["defenses"][job.defense]
                counts[cell] = counts.get(cell, 0) + (job.finding is None)
                theory[cell] += job.finding is not None and not is_training(job.finding)
        settings = [
            {"protocol": p, "defense": d, "jobs": n, "has_floor": self.floors[p], "findings": theory[p, d]}
            for (p, d), n in counts.items()
        ]
        findings = sum(job.finding is not None for job in self.jobs)
        total = len(self.jobs) - findings
        examples = self.axes["examples"]
        facts = {"total": total, "findings": findings, "settings": settings, "examples": examples}
        return {**facts, "label_chance": label_chance(setup), "standard": self.standard}


def _moved(job: Job, before: Mapping[str, Any], after: Mapping[str, Any]) -> Job:
    """The job with its numbers pointing into longer lists."""

    def place(name: str, number: int | None) -> Any:
        return None if number is None else after[name].index(before[name][number])

    protocol, defense = place("protocols", job.protocol), place("defenses", job.defense)
    return dataclasses.replace(job, protocol=protocol, defense=defense, attack=place("attacks", job.attack))


def _numbered(jobs: Any, axes: Mapping[str, Any]) -> tuple[Job, ...]:
    """In the order of a plan (see ``make_plan``), with positions from 0: attempts and controls, then findings."""
    controls, findings = list(CONTROLS), list(FINDINGS)

    def order(job: Job) -> tuple[int, ...]:
        kind = -1 if job.finding is None else findings.index(job.finding)
        control = -1 if job.control is None else controls.index(job.control)
        numbers = (-1 if number is None else number for number in (job.defense, job.attack))
        return (int(job.finding is not None), job.protocol, kind, control, *numbers, *_client(job, axes))

    ordered = sorted(jobs, key=order)
    return tuple(dataclasses.replace(job, position=number) for number, job in enumerate(ordered))


def _client(job: Job, axes: Mapping[str, Any]) -> tuple[int, int]:
    return seed_place(job, axes["seeds"]), job.batch


def _per_setting(job: Job) -> bool:
    return job.finding is not None and FINDINGS[job.finding].per == "setting"


def _subject(job: Job) -> tuple[Any, ...]:
    return job.finding, job.protocol, job.defense
