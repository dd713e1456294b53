"""Follow which scenarios exceed the policy beyond doubt, and which jobs the verdict needs then.

The verdict itself judges the rows so far, so that a leak that is found here ends in ``leaks``. It is beyond doubt where
no further row can take it back: the example is certified, the limit asks for no control, or every control with which
the attempt is compared has ended. Results do not depend on any of this, only which jobs are run.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from leakscope.audit.controls import CONTROLS, POSITIVE_CLIENTS
from leakscope.audit.keys import is_training
from leakscope.audit.parts import part_at
from leakscope.audit.plan import Job, Plan, is_attempt
from leakscope.audit.setup import Setup
from leakscope.results.coverage import BEYOND_DOUBT
from leakscope.results.reasons import Reason
from leakscope.results.records import POSITIVE, Row
from leakscope.results.setting_verdict import SettingVerdict, above_policy
from leakscope.results.verdict import judge

#: Rows that a protocol must gain, as a share of those it has, before its scenarios are judged again: judging reads all
#: of them, which in audits of thousands of jobs takes longer than a job. Below a hundred rows each one is judged.
GROWTH = 0.01

#: Numbers of a protocol and a defence in the spec.
Cell = tuple[int, int]


class Exceeded:
    """Judge scenarios by the rows of ``jobs``, which are those of this run: what others found before stops nothing."""

    def __init__(self, setup: Setup, jobs: Iterable[Job]) -> None:
        self._setup, self._policy = setup, setup.spec.policy
        self._jobs = {job.key: job for job in jobs}
        self._rows: dict[int, dict[str, Row]] = defaultdict(dict)
        #: The first reason of each scenario that exceeds the policy.
        self.reasons: dict[Cell, Reason] = {}
        #: How often it changed which jobs are needed.
        self.changes = 0
        #: Controls that decide whether an attempt is a leak, with the scenarios that wait for them.
        self._wanted: dict[str, set[Cell]] = defaultdict(set)
        #: Scenarios with something new to judge, and the rows that there were when they were judged last.
        self._to_judge: set[Cell] = set()
        self._judged: dict[Cell, int] = {}
        self._proven: set[tuple[int, int | None]] = set()
        self._tried: dict[tuple[int, int | None], set[int]] = defaultdict(set)
        self._compared: dict[tuple[int, int | None, int], list[Job]] = defaultdict(list)
        self._cells: dict[int, set[Cell]] = defaultdict(set)
        for job in self._jobs.values():
            if is_attempt(job):
                self._cells[job.protocol].add(_cell(job))
            elif job.control is not None and CONTROLS[job.control].kind != POSITIVE:
                self._compared[job.protocol, job.attack, job.batch].append(job)
        summary = Plan.of(setup, list(self._jobs.values())).summary(setup)
        self._plans: dict[Cell, dict[str, Any]] = {
            cell: {**summary, "total": 0, "findings": 0, "settings": [entry]}
            for entry in summary["settings"]
            for cell in self._cell_of(entry)
        }

    @property
    def wanted(self) -> set[str]:
        """Return the keys of controls that decide about an attempt that looks like a leak."""
        return {key for key, cells in self._wanted.items() if any(cell not in self.reasons for cell in cells)}

    def learn(self, job: Job, row: Row) -> list[Reason]:
        """Take a row; return why scenarios exceed the policy of which that shows for the first time."""
        if job.finding is not None:
            return []
        self._rows[job.protocol][job.key] = row
        if is_attempt(job):
            self._note_strength(job, row)
            self._to_judge |= {_cell(job)} if self._may_leak(row) else set()
        self._to_judge |= self._wanted.pop(job.key, set())
        reasons = [self._judge(cell) for cell in sorted(self._to_judge) if cell[0] == job.protocol]
        return [reason for reason in reasons if reason is not None]

    def needs(self, job: Job) -> bool:
        """Check whether the verdict needs a job, by the rows so far; once it does not, it never does again."""
        if is_training(job.finding):
            return True
        if job.control is not None:
            return any(cell not in self.reasons for cell in self._cells[job.protocol])
        cell = _cell(job)
        if cell not in self.reasons:
            return True
        # Attacks on the bare update, and its floor, say whether what fails behind a defence proves anything.
        if self._defended(job) or all(other in self.reasons for other in self._cells[job.protocol]):
            return False
        if job.finding is not None:
            return job.finding == "floor"
        attack = job.protocol, job.attack
        return attack not in self._proven and len(self._tried[attack] - {job.batch}) < POSITIVE_CLIENTS

    def _defended(self, job: Job) -> bool:
        return part_at(self._setup.spec.defenses, job.defense).instance is not None

    def _cell_of(self, entry: Mapping[str, Any]) -> list[Cell]:
        protocols = [part.identity() for part in self._setup.spec.protocols]
        defenses = [part.identity() for part in self._setup.spec.defenses]
        return [(protocols.index(entry["protocol"]), defenses.index(entry["defense"]))]

    def _note_strength(self, job: Job, row: Row) -> None:
        if self._defended(job):
            return
        self.changes += _cell(job) in self.reasons
        self._tried[job.protocol, job.attack].add(job.batch)
        bar = min(self._policy.max_psnr, BEYOND_DOUBT)
        if any(example.value("psnr") >= bar for example in row.examples):
            self._proven.add((job.protocol, job.attack))

    def _may_leak(self, row: Row) -> bool:
        single = [limit for limit in self._policy.limits if limit.measure.per == "example"]
        if len(single) < len(self._policy.limits):  # shares of all examples
            return True
        return any(limit.reached(example.value(limit.measure.key)) for example in row.examples for limit in single)

    def _judge(self, cell: Cell) -> Reason | None:
        rows = self._rows[cell[0]]
        if cell not in self.reasons and len(rows) < self._judged.get(cell, 0) * (1 + GROWTH):
            return None
        self._to_judge.discard(cell)
        if cell in self.reasons:
            return None
        self._judged[cell] = len(rows)
        jobs = {key: self._jobs[key] for key in rows}
        own = [row for key, row in rows.items() if jobs[key].control is not None or _cell(jobs[key]) == cell]
        for setting in judge(own, self._policy, self._plans[cell]).settings:
            reason = self._beyond_doubt(cell, setting)
            if reason is not None:
                self.reasons[cell] = reason
                self.changes += 1
                return reason
        return None

    def _beyond_doubt(self, cell: Cell, setting: SettingVerdict) -> Reason | None:
        """Return the first leak that no further row can take back; want the controls that decide about others."""
        final = [reason for reason in setting.reasons if reason.kind != "doubt" and reason.measure != "psnr"]
        for example in setting.examples:
            if not example.psnr >= self._policy.max_psnr:
                continue
            job = self._jobs[example.key]
            waiting = [] if example.certified or self._policy.min_lift <= 0 else self._waiting(job)
            for control in waiting:
                self._wanted[control.key].add(cell)
            if above_policy(example, self._policy) and not waiting:
                own = [r for r in setting.reasons if r.example == example.index and r.measure == "psnr"]
                final = [*own, *final]
        return next(iter(final), None)

    def _waiting(self, job: Job) -> list[Job]:
        ended = self._rows[job.protocol]
        guesses, own = (self._compared[job.protocol, attack, job.batch] for attack in (None, job.attack))
        return [control for control in (*guesses, *own) if control.key not in ended]


def _cell(job: Job) -> Cell:
    assert job.defense is not None
    return job.protocol, job.defense
