"""A folder that grows: what is asked for now joins what was asked for before, and what is done is not done again.

The union of two grids is no grid, so the store keeps the list of all jobs that were ever planned in it: only then are
those of an earlier run that never finished still missed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.attacks import standard_attacks
from leakscope.audit.audited import EFFORT, WAIVED
from leakscope.audit.controls import CONTROLS
from leakscope.audit.findings import FINDINGS
from leakscope.audit.plan import Job, content_hash, is_training, label_chance, seed_place
from leakscope.audit.setup import Setup
from leakscope.results.records import UTILITY
from leakscope.results.store import Store, StoreError

#: Keys of a spec that are lists and may grow; the number of examples grows too.
AXES = ("protocols", "defenses", "attacks", "seeds", "controls", "findings")


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


def grown_identity(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What the runs of a folder have in common: trainings, once asked for, stay the same."""
    before = {} if UTILITY in now or UTILITY not in stored else {UTILITY: stored[UTILITY]}
    return {**now, **before}


def grown_spec(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The newest spec, its lists joined with those of the runs before."""
    before = {name: stored[name] if isinstance(stored.get(name), list) else [] for name in AXES}
    lists = {name: [*before[name], *(x for x in now[name] if x not in before[name])] for name in AXES}
    counts = [spec["examples"] for spec in (stored, now) if isinstance(spec.get("examples"), int)]
    return {**now, **lists, "examples": max(counts, default=None), UTILITY: _grown_utility(stored, now)}


def _grown_utility(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section of the newest run that has one, with the seeds of all."""
    sections = [spec[UTILITY] for spec in (stored, now) if isinstance(spec.get(UTILITY), dict)]
    seeds = dict.fromkeys(seed for section in sections for seed in section.get("seeds", []))
    return {**sections[-1], "seeds": list(seeds)} if sections else None


def grown_statements(stored: Any, now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was audited: the newest statements, and those on protocols and defences that only earlier runs had."""
    before = [old for old in stored if isinstance(old, dict)] if isinstance(stored, list) else []
    return [*now, *(old for old in before if old not in now and not str(old.get("text")).startswith((EFFORT, WAIVED)))]


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
