"""Hand out the jobs of an audit: in which order, which are not needed any more, and for how long.

Attempts come first, those of closed forms before searches. Controls are run as soon as they decide whether an attempt
is a leak, the others after all attempts, findings last. With ``stop_on_leak`` nothing more is run for a scenario that
exceeds the policy beyond doubt. A time budget limits how long jobs may be begun, and passes over attempts on examples
that another attack has recovered exactly, as measured against the truth. A row is the same whatever was not run.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.attacks import ATTACKS
from leakscope.audit.controls import CONTROLS
from leakscope.audit.exceeded import Exceeded
from leakscope.audit.plan import Job, Plan, client_of, is_attempt, seed_place
from leakscope.audit.setup import Setup
from leakscope.results.reasons import Reason
from leakscope.results.records import POSITIVE, AttemptRecord, Row

#: Errors this small vanish when grey values are rounded to one of 256 (dB).
EXACT_PSNR = 60.0


def in_turn(setup: Setup, jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the jobs in the order in which they are begun, grouped by client, so that its update is made once.

    Guesses without an attack, which take no time; attempts, every scenario's first example before any scenario's
    second, on each example the attacks in the order of their table; controls in the same order; findings.
    """
    spec, table = setup.spec, list(ATTACKS)
    ranks = [table.index(part.name) if part.name in table else len(table) for part in spec.attacks]

    def group_of(job: Job) -> tuple[Any, ...]:
        guess = job.attack is None and job.control is not None
        stage = 3 if job.finding is not None else 0 if guess else 1 if is_attempt(job) else 2
        defense = -1 if job.defense is None else job.defense
        return stage, seed_place(job, spec.seeds), job.batch, job.protocol, defense

    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in sorted(jobs, key=lambda job: (-1 if job.attack is None else ranks[job.attack], job.position)):
        groups.setdefault((group_of(job), client_of(setup, job)), []).append(job)
    return [groups[place] for place in sorted(groups, key=lambda place: place[0])]


class Budget:
    """Limit the seconds, from the first job on, in which jobs are begun; None: no limit.

    The first job is always begun, so that every run gets on.

    >>> ticks = iter([0.0, 5.0, 10.0])
    >>> budget = Budget(10.0, clock=lambda: next(ticks))
    >>> budget.allows(), budget.allows(), budget.allows(), budget.ended
    (True, True, False, True)
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.ended, self._clock = seconds, False, clock
        self._since: float | None = None

    def allows(self) -> bool:
        if self.seconds is None or self.ended:
            return not self.ended
        now = self._clock()
        self._since = now if self._since is None else self._since
        self.ended = now - self._since >= self.seconds
        return not self.ended


@dataclass(frozen=True, eq=False)
class Agenda:
    """Say which jobs are begun; by default all of them.

    ``exceeded`` follows the verdict, and with ``stop`` ends the work on scenarios that exceed the policy.
    """

    budget: Budget
    spared: "Spared | None" = None
    exceeded: Exceeded | None = None
    stop: bool = False

    @property
    def wanted(self) -> set[str]:
        """Return the keys of controls that decide about a leak; they go first, and are begun in spite of a budget."""
        return set() if self.exceeded is None else self.exceeded.wanted

    def learn(self, job: Job, row: Row) -> list[Reason]:
        """Take a row; return why scenarios exceed the policy of which that shows for the first time."""
        if self.spared is not None:
            self.spared.learn(job, row.result if row.status == "done" else None)
        return [] if self.exceeded is None else self.exceeded.learn(job, row)

    @property
    def changes(self) -> int:
        """Return how often it changed which jobs are needed."""
        return 0 if self.exceeded is None else self.exceeded.changes

    def stops(self, job: Job) -> bool:
        """Check whether a job is not needed any more because its scenario exceeds the policy."""
        return self.stop and self.exceeded is not None and not self.exceeded.needs(job)

    def passes_over(self, job: Job) -> bool:
        return self.stops(job) or (self.spared is not None and self.spared.spares(job))


class Queue:
    """Hold the jobs that wait, grouped by client; who takes one gets the rest of its group, too."""

    def __init__(self, groups: Iterable[Sequence[Job]], agenda: Agenda) -> None:
        self._agenda = agenda
        self._waiting = deque(deque(group) for group in groups if group)
        self._held: dict[Hashable, deque[Job]] = {}

    def __len__(self) -> int:
        """Count the jobs that may still be taken."""
        if self._agenda.budget.ended:
            wanted = self._agenda.wanted
            return sum(job.key in wanted for group in self._groups() for job in group) if wanted else 0
        return sum(len(group) for group in self._groups())

    def take(self, holder: Hashable = None) -> Job | None:
        """Return a wanted control; else the next job of the holder's client, or of another one; None if there is none.

        What is left of another holder's client comes last.
        """
        if (job := self._take_wanted()) is not None:
            return job
        if not self._agenda.budget.allows():
            return None
        while (job := self._next(holder)) is not None and self._agenda.passes_over(job):
            pass
        return job

    def put_back(self, holder: Hashable, job: Job) -> None:
        """Take back a job that was begun in vain, as the first of its holder."""
        self._held.setdefault(holder, deque()).appendleft(job)

    def release(self, holder: Hashable) -> None:
        """Let others have what a holder that is gone has left."""
        if group := self._held.pop(holder, None):
            self._waiting.appendleft(group)

    def _groups(self) -> Iterator[deque[Job]]:
        yield from self._waiting
        yield from self._held.values()

    def _take_wanted(self) -> Job | None:
        if wanted := self._agenda.wanted:
            for group in self._groups():
                for job in group:
                    if job.key in wanted:
                        group.remove(job)
                        return job
        return None

    def _next(self, holder: Hashable) -> Job | None:
        if self._held.get(holder):
            return self._held[holder].popleft()
        while self._waiting:
            self._held[holder] = self._waiting.popleft()
            if self._held[holder]:
                return self._held[holder].popleft()
        fullest = max(self._held.values(), key=len, default=None)
        return fullest.pop() if fullest else None


class Spared:
    """Tell which of ``jobs`` a budget is not spent on, by what was recovered exactly so far."""

    def __init__(self, setup: Setup, jobs: Iterable[Job]) -> None:
        # Nothing is spared of a policy that tells good reconstructions from better ones.
        self._enough = max(EXACT_PSNR, setup.spec.policy.max_psnr)
        self._recovered: set[tuple[Any, ...]] = set()
        self._made: set[str] = set()
        self._attempts = [job for job in jobs if is_attempt(job)]

    def learn(self, job: Job, result: AttemptRecord | None) -> None:
        if result is None or not is_attempt(job):
            return
        self._made.add(job.key)
        if result.examples and all(example.value("psnr") >= self._enough for example in result.examples):
            self._recovered.add(_client(job))

    def spares(self, job: Job) -> bool:
        """Tell whether it is an attempt on recovered examples, or a control of nothing but such, none of them made."""
        if is_attempt(job):
            return _client(job) in self._recovered
        if job.control is None or job.attack is None:
            return False
        same = [one for one in self._attempts if (one.protocol, one.attack) == (job.protocol, job.attack)]
        # A positive control speaks of the attack on all examples, others of what they were taken of.
        everywhere = CONTROLS[job.control].kind == POSITIVE
        compared = [one for one in same if everywhere or one.batch == job.batch]
        return all(one.key not in self._made and self.spares(one) for one in compared)


def count_left_out(plan: Plan, keys: Collection[str]) -> dict[str, Any]:
    """Count jobs that were not run: attempts and findings of each scenario, and controls."""
    left = [job for job in plan.jobs if job.key in keys]
    cells: dict[tuple[str, str], Counter[str]] = {}
    for job in left:
        if job.control is None and job.defense is not None:
            cell = plan.axes["protocols"][job.protocol], plan.axes["defenses"][job.defense]
            cells.setdefault(cell, Counter())["jobs" if job.finding is None else "findings"] += 1
    attempts = [
        {"protocol": protocol, "defense": defense, "jobs": count["jobs"], "findings": count["findings"]}
        for (protocol, defense), count in cells.items()
    ]
    return {"attempts": attempts, "controls": sum(job.control is not None for job in left)}


def _client(job: Job) -> tuple[Any, ...]:
    return job.protocol, job.defense, job.batch  # whatever the seed, the examples are the same
