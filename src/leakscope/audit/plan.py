"""Plan the grid as a list of jobs: attempts, controls and findings, each with a key of all its result depends on.

A folder grows: what is asked for now joins what was asked for before. The union of two grids is no grid, so the store
keeps the list of all jobs ever planned in it: only then are those of an earlier run that never finished still missed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from leakscope.attacks import message_kind, standard_attacks
from leakscope.audit.controls import CONTROLS, Control
from leakscope.audit.findings import FINDINGS
from leakscope.audit.keys import Keys, content_hash, is_training
from leakscope.audit.parts import part_at
from leakscope.audit.setup import Setup
from leakscope.audit.spec import AuditSpec
from leakscope.audit.utility import most_frequent
from leakscope.results.records import JobRecord
from leakscope.results.store import Store, StoreError

#: Keys of a spec that are lists and may grow; the number of examples grows too.
AXES = ("protocols", "defenses", "attacks", "seeds", "controls", "findings")


@dataclass(frozen=True)
class Job:
    """One thing to do; numbers point into the spec's lists.

    A control has no defence, and no attack where it is a guess from held-out examples; a finding has no attack.
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
    """List every job: protocol x (defences, then controls) x attack x seed x batch; then the findings."""
    keys, places = Keys(setup), chain(_attempts(setup), _findings(setup))
    return [Job(keys.of(**place), number, **place) for number, place in enumerate(places)]


def count_plan(setup: Setup) -> Iterator[Job]:
    """Yield the jobs of :func:`make_plan` with numbers for keys, which need the examples."""
    places = chain(_attempts(setup), _findings(setup))
    return (Job(str(number), number, **place) for number, place in enumerate(places))


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
    """Tell whether an attack that ignores the defence would repeat the one in the list that knows it."""
    spec = setup.spec
    if attack is None or not spec.attacks[attack].instance.ignore_defense:
        return False
    knowing = repr(dataclasses.replace(spec.attacks[attack].instance, ignore_defense=False))
    if knowing not in [part.identity() for part in spec.attacks]:
        return False
    used = part_at(spec.defenses, defense).instance
    known = used is not None and setup.knowledge.defense
    return not known or spec.protocols[protocol].instance.channel(used, spec.batch) is None


def _controls(spec: AuditSpec) -> list[Control]:
    undefended = any(part.instance is None for part in spec.defenses)
    asked = [control for name, control in CONTROLS.items() if name in spec.controls]
    return [control for control in asked if not (undefended and control.stands_for_undefended)]


def _findings(setup: Setup) -> Iterator[dict[str, Any]]:
    """Yield each protocol's findings; trainings are asked for by their own section, others by their kind."""
    spec, defenses = setup.spec, range(len(setup.spec.defenses))
    for protocol, part in enumerate(spec.protocols):
        for kind in [kind for kind in FINDINGS if kind in part.instance.findings()]:
            some = slice(None) if FINDINGS[kind].per == "client" else slice(1)
            if is_training(kind):
                clients = product(defenses, [] if spec.utility is None else spec.utility.seeds, [0])
            elif kind in spec.findings:
                clients = product(defenses, spec.seeds[some], range(len(setup.batches))[some])
            else:
                continue
            for defense, seed, batch in clients:
                yield {"protocol": protocol, "defense": defense, "seed": seed, "batch": batch, "finding": kind}


def client_of(setup: Setup, job: Job) -> tuple[Any, ...]:
    """Return whose update a job is about; an attack that chooses the model, where it may, has clients of its own."""
    if is_training(job.finding):
        return "training", job.key
    attack = part_at(setup.spec.attacks, job.attack).instance
    may_choose = setup.knowledge.choose_weights or setup.knowledge.choose_structure
    own = job.attack if may_choose and attack is not None and attack.chooses_model else None
    return job.protocol, part_at(setup.spec.defenses, job.defense).identity(), job.seed, job.batch, own


def is_attempt(job: Job) -> bool:
    return job.control is None and job.finding is None


def seed_place(job: Job, seeds: list[int]) -> int:
    """Return the place of a job's seed in the audit; the seeds of trainings are their own."""
    return job.seed if is_training(job.finding) else seeds.index(job.seed)


def describe(setup: Setup, job: Job) -> JobRecord:
    """Describe the job for the store and the report."""
    spec = setup.spec
    protocol, defense = spec.protocols[job.protocol], part_at(spec.defenses, job.defense)
    attack = part_at(spec.attacks, job.attack)
    return JobRecord(
        protocol=protocol.identity(),
        defense=defense.identity(),
        attack=attack.identity(),
        attack_name=job.finding or job.control or "none" if job.attack is None else attack.name,
        seed=job.seed,
        batch=job.batch,
        control=job.control,
        control_kind=None if job.control is None else CONTROLS[job.control].kind,
        indices=() if is_training(job.finding) else setup.batches[job.batch],
        knowledge=spec.knowledge,
        parts={"protocol": protocol.facts(), "defense": defense.facts(), "attack": attack.facts()},
    )


@dataclass(frozen=True)
class Plan:
    """Everything that a folder holds or waits for; numbers of jobs point into the lists of ``axes``."""

    axes: Mapping[str, Any]
    jobs: tuple[Job, ...] = ()
    floors: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    #: The standard attacks of each protocol, without which the verdict passes nothing.
    standard: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, setup: Setup, jobs: Sequence[Job]) -> Plan:
        spec = setup.spec
        parts = {name: [part.identity() for part in getattr(spec, name)] for name in AXES[:3]}
        kinds = {name: list(getattr(spec, name)) for name in AXES[3:]}
        axes = {"examples": sum(len(batch) for batch in setup.batches), **parts, **kinds}
        floors = {part.identity(): "floor" in part.instance.findings() for part in spec.protocols}
        standard = {part.identity(): standard_attacks([part.instance], setup.knowledge) for part in spec.protocols}
        return cls(axes, tuple(jobs), floors, standard)

    @classmethod
    def read(cls, store: Store) -> Plan:
        """Read what was planned in ``store`` so far; raise StoreError where that is damaged."""
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
        """Join this plan and ``new``, in the order in which one run of all of it would have had them."""
        axes = {name: joined(self.axes[name], new.axes[name]) for name in AXES}
        examples = max(self.axes["examples"], new.axes["examples"])
        union = {job.key: job for job in self.jobs}
        told = {(job.finding, job.protocol, job.defense): job.key for job in self.jobs if _per_setting(job)}
        for job in new.jobs:
            moved = _moved(job, new.axes, axes)
            if _per_setting(moved):  # one client stands for a setting; which one an earlier run may have chosen
                key = told.get((moved.finding, moved.protocol, moved.defense), moved.key)
                if key != moved.key and finished.get(key) in ("done", "refused"):
                    continue
                union.pop(key, None)
            union[moved.key] = moved
        floors, standard = {**self.floors, **new.floors}, {**self.standard, **new.standard}
        return Plan({"examples": examples, **axes}, _numbered(union.values(), axes), floors, standard)

    def numbered(self, jobs: Sequence[Job]) -> list[Job]:
        """Return those of ``jobs`` that belong to this plan, with their positions in it."""
        places = {job.key: job.position for job in self.jobs}
        return [dataclasses.replace(job, position=places[job.key]) for job in jobs if job.key in places]

    def meta(self, setup: Setup, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the store keeps; ``known`` is what all runs in it have in common."""
        lists = {name: values for name, values in self.axes.items() if name != "findings"}
        jobs = [dataclasses.astuple(job) for job in self.jobs]
        return {
            "spec_hash": content_hash({**known, **lists}),
            "identity": known,
            "plan": self.summary(setup),
            "planned": {"axes": self.axes, "jobs": jobs, "floors": self.floors, "standard": self.standard},
        }

    def summary(self, setup: Setup) -> dict[str, Any]:
        """Count attempts, controls and findings, in all and per setting, so that missing ones are noticed.

        ``has_floor``: the protocol has a floor of theory. ``label_chance``: the share of the most frequent label.
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
        return {
            "total": len(self.jobs) - findings,
            "findings": findings,
            "settings": settings,
            "examples": self.axes["examples"],
            "label_chance": most_frequent(setup.data.y),
            "standard": self.standard,
            "kinds": {part.identity(): message_kind(part.instance) for part in setup.spec.protocols},
            "left_out": [
                *(["controls"] if set(CONTROLS) - set(self.axes["controls"]) else []),
                *(["findings"] if set(_untrained()) - set(self.axes["findings"]) else []),
            ],
        }


def _untrained() -> list[str]:
    return [name for name in FINDINGS if not is_training(name)]


def joined(before: Sequence[Any], now: Sequence[Any]) -> list[Any]:
    return [*before, *(one for one in now if one not in before)]


def _moved(job: Job, before: Mapping[str, Any], after: Mapping[str, Any]) -> Job:
    """Return the job with its numbers pointing into longer lists."""
    numbers = {"protocols": job.protocol, "defenses": job.defense, "attacks": job.attack}
    places: dict[str, Any] = {
        name[:-1]: None if number is None else after[name].index(before[name][number])
        for name, number in numbers.items()
    }
    return dataclasses.replace(job, **places)


def _numbered(jobs: Any, axes: Mapping[str, Any]) -> tuple[Job, ...]:
    """Return the jobs in the order of ``make_plan``, with positions from 0."""

    def order(job: Job) -> tuple[int, ...]:
        kind = -1 if job.finding is None else list(FINDINGS).index(job.finding)
        control = -1 if job.control is None else list(CONTROLS).index(job.control)
        numbers = (-1 if number is None else number for number in (job.defense, job.attack))
        place = int(job.finding is not None), job.protocol, kind, control, *numbers
        return (*place, seed_place(job, axes["seeds"]), job.batch)

    ordered = sorted(jobs, key=order)
    return tuple(dataclasses.replace(job, position=number) for number, job in enumerate(ordered))


def _per_setting(job: Job) -> bool:
    return job.finding is not None and FINDINGS[job.finding].per == "setting"
