"""Say how long jobs will still take: the one estimate that ``plan``, an audit's announcement and its progress share.

Jobs of a kind (a protocol, a defence, an attack, a control or a finding) take equally long: as long as those that have
ended, else as a trial told, else as a job of the same attack elsewhere. A search that stops early takes less.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Seconds in which a worker starts, and in which the audit's own process writes a row; by the runs of docs/scaling.md.
START_SECONDS, ROW_SECONDS = 6.0, 0.005
#: A job that takes longer than was foretold takes this share of its time once more: within a factor of two as long as
#: it does not take three times the time it has taken.
OVERDUE = 0.5

Kind = tuple[str, ...]
#: What tells one kind of job from another, among the facts of a job.
KIND = ("protocol", "defense", "attack", "control", "finding")


def kind_of(job: Mapping[str, Any]) -> Kind:
    return tuple(str(job.get(name)) for name in KIND)


@dataclass
class _Known:
    """What is known of a kind: jobs that wait, the seconds of a trial, and of those that have ended."""

    name: str
    left: int = 0
    foretold: float | None = None
    by_steps: bool = False  # foretold by the steps of a running job
    ended: list[float] = field(default_factory=list)


@dataclass
class _Running:
    kind: Kind
    since: float
    done: int = 0
    total: int = 0


class Forecast:
    """Foretell the time of jobs of known ``kinds``, each a mapping with :data:`KIND`, "jobs" and "seconds" (or None).

    >>> job = {"protocol": "FedSGD()", "defense": "none", "attack": "DLG()", "attack_name": "dlg"}
    >>> forecast = Forecast([{**job, "jobs": 4, "seconds": 10.0}], workers=2, clock=lambda: 0.0)
    >>> forecast.remaining(), forecast.finished("a", job, 30.0), forecast.remaining()
    (20.0, None, 45.0)
    """

    def __init__(
        self, kinds: Iterable[Mapping[str, Any]], workers: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._known: dict[Kind, _Known] = {}
        self._alike: dict[tuple[str, ...], list[Kind]] = {}
        self._workers, self._clock = workers, clock
        self._running: dict[str, _Running] = {}
        for one in kinds:
            known = self._of(one)
            known.left, known.foretold = known.left + int(one["jobs"]), one["seconds"]

    def started(self, key: str, job: Mapping[str, Any]) -> None:
        if key not in self._running:
            self._of(job).left -= 1
            self._running[key] = _Running(kind_of(job), self._clock())

    def advanced(self, key: str, job: Mapping[str, Any], done: int, total: int) -> None:
        self.started(key, job)
        running, known = self._running[key], self._of(job)
        running.done, running.total = done, total
        if done > 0 and (known.foretold is None or known.by_steps):
            known.foretold, known.by_steps = (self._clock() - running.since) * total / done, True

    def finished(self, key: str, job: Mapping[str, Any], seconds: float) -> None:
        self.started(key, job)
        del self._running[key]
        self._of(job).ended.append(seconds)

    def leave_out(self, kinds: Iterable[Mapping[str, Any]]) -> None:
        """Count jobs no more that will not be run."""
        for one in kinds:
            self._of(one).left -= int(one["jobs"])

    def seconds_of(self, kind: Kind) -> float | None:
        """Return what a job of this kind takes; None where nothing like it was timed."""
        known = self._known[kind]
        if (own := _usual(known)) is not None:
            return own
        others = ((other, _usual(self._known[other])) for other in self._alike[_work_of(kind)])
        alike = [(other, took) for other, took in others if took is not None]
        # What refused one kind need not refuse another.
        alike.sort(key=lambda one: (not one[1], one[0][0] != kind[0], one[0][3] != kind[3]))
        return alike[0][1] if alike else None

    @property
    def at_least(self) -> bool:
        """Check for jobs of which nobody knows how long they take."""
        return any(known.left > 0 and self.seconds_of(kind) is None for kind, known in self._known.items())

    def by_attack(self) -> dict[str, float]:
        """Return the seconds of all workers together that each attack or finding still takes."""
        found: dict[str, float] = {}
        for kind, known in self._known.items():
            if seconds := known.left * (self.seconds_of(kind) or 0.0):
                found[known.name] = found.get(known.name, 0.0) + seconds
        return found

    def remaining(self) -> float | None:
        """Return the seconds until all jobs have ended; None where nothing is known of any of them."""
        waiting = [(known.left, self.seconds_of(kind)) for kind, known in self._known.items() if known.left > 0]
        under_way = [self._left_of(job) for job in self._running.values()]
        if not under_way and waiting and all(seconds is None for _, seconds in waiting):
            return None
        work = sum(left * (seconds or 0.0) for left, seconds in waiting) + sum(under_way)
        longest = max([*under_way, *(seconds or 0.0 for _, seconds in waiting)], default=0.0)
        return wall_seconds(work, sum(left for left, _ in waiting), self._workers, longest, start=0.0)

    def _left_of(self, running: _Running) -> float:
        elapsed = self._clock() - running.since
        if 0 < running.done < running.total:
            return elapsed * (running.total - running.done) / running.done
        usual = self.seconds_of(running.kind)
        return max((usual or 0.0) - elapsed, OVERDUE * elapsed)

    def _of(self, job: Mapping[str, Any]) -> _Known:
        kind = kind_of(job)
        if kind not in self._known:
            self._known[kind] = _Known(str(job.get("attack_name")))
            self._alike.setdefault(_work_of(kind), []).append(kind)
        return self._known[kind]


def _work_of(kind: Kind) -> tuple[str, ...]:
    """Return the attack and the finding of a kind; of a guess, which has neither, the control."""
    _, _, attack, control, finding = kind
    return attack, finding, control if attack == "none" and finding == "None" else ""


def _usual(known: _Known) -> float | None:
    return sum(known.ended) / len(known.ended) if known.ended else known.foretold


def wall_seconds(work: float, jobs: int, workers: int, longest: float = 0.0, *, start: float = START_SECONDS) -> float:
    """Return the wall-clock seconds: the most of work by workers, writing all rows in one process, the longest job.

    >>> wall_seconds(3600.0, jobs=100, workers=1), wall_seconds(3600.0, jobs=100, workers=10)
    (3606.0, 366.0)
    >>> wall_seconds(3600.0, jobs=36000, workers=1000)  # rows are written one after another
    186.0
    """
    return max(work / workers, jobs * ROW_SECONDS, longest) + start
