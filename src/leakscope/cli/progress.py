"""What is shown while something runs: bars on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from leakscope.cli.console import decibels, make_console, say
from leakscope.report.words import duration
from leakscope.results.names import short_names
from leakscope.results.records import counted, finding_words, first_line

#: Seconds between two lines where there is no terminal; a log that is silent for longer looks dead.
PAUSE = 15.0
#: Characters of an error in a line.
SHORT = 200
#: Running jobs with a bar of their own.
MAX_BARS = 4
#: The share of the work from which on the pace alone tells the time left.
SURE_FROM = 0.25

Event = dict[str, Any]


class Tally:
    """What the events of an audit say so far: jobs done, steps of those under way, time left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total = self.completed = self.at_start = 0
        self.fates: Counter[str] = Counter()
        self.best: float | None = None
        self.running: dict[str, Event] = {}
        self.estimate: float | None = None
        self.budget: float | None = None
        self.since = clock()

    def take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "planned":
            self.total, self.completed = event["total"], event["finished"]
            self.at_start, self.since = self.completed, self._clock()
        elif kind == "estimated":
            self.estimate, self.since = event["seconds"], self._clock()
            self.budget = event.get("budget")
        elif kind == "started" or kind == "advanced":
            self.running[event["key"]] = event
        elif kind == "finished":
            self.running.pop(event["key"], None)
            self.completed = event["completed"]
            self.fates[event["status"]] += 1
            if event["psnr"] is not None and not event["job"]["control"]:
                self.best = event["psnr"] if self.best is None else max(self.best, event["psnr"])

    @property
    def elapsed(self) -> float:
        return self._clock() - self.since

    @property
    def share(self) -> float:
        """How much of what was left at the start is done; steps of running jobs count as parts of a job."""
        left = self.total - self.at_start
        steps = sum(event["done"] / event["total"] for event in self.running.values() if event.get("total"))
        return min(1.0, (self.completed - self.at_start + steps) / left) if left > 0 else 1.0

    @property
    def remaining(self) -> float | None:
        """Seconds left: the estimate at first, and the more is done the more by the pace so far; within the budget."""
        left = self._without_budget()
        return left if left is None or self.budget is None else min(left, max(self.budget - self.elapsed, 0.0))

    def _without_budget(self) -> float | None:
        share, elapsed = self.share, self.elapsed
        if share >= 1:
            return None
        by_pace = elapsed / share - elapsed if share > 0 else None
        if self.estimate is None:
            return by_pace if share >= 0.05 else None
        by_estimate = max(self.estimate - elapsed, 0.0)
        if by_pace is None or by_estimate == 0.0:  # an estimate that has passed says nothing any more
            return by_estimate if by_pace is None else by_pace
        # The estimate takes every search for one that uses all of its steps, so that it soon gives way.
        trust = min(1.0, share / SURE_FROM)
        return trust * by_pace + (1 - trust) * by_estimate

    def left(self) -> str:
        remaining = self.remaining
        return "" if remaining is None else f"about {rough(remaining)} left"

    def line(self) -> str:
        """All of it in one line."""
        fates = ", ".join(f"{count} {fate}" for fate, count in sorted(self.fates.items()))
        running = next(iter(self.running.values()), None)
        under_way = ""
        if running is not None:
            steps = f", step {running['done']} of {running['total']}" if running.get("total") else ""
            under_way = f"now {job_kind(running['job'])}{steps}"
        best = "" if self.best is None else f"best {decibels(self.best)} dB"
        parts = (fates, best, under_way, self.left() or f"after {duration(self.elapsed)}")
        return f"[{self.completed}/{self.total}] {'; '.join(part for part in parts if part)}"


def rough(seconds: float) -> str:
    """A time that is only guessed.

    >>> rough(9), rough(100), rough(400), rough(9000), rough(200000)
    ('10 s', '2 min', '7 min', '2.5 h', '2.3 days')
    """
    if seconds < 55:
        return f"{max(5, round(seconds / 5) * 5)} s"
    if seconds < 5400:
        return f"{max(1, round(seconds / 60))} min"
    return f"{seconds / 3600:.1f} h" if seconds < 36 * 3600 else f"{seconds / 86400:.1f} days"


def job_kind(job: Event) -> str:
    """The attack of a job, its part of the theory, or a training."""
    return finding_words(job["finding"]) if job["finding"] else str(job["attack_name"])


def job_name(job: Event) -> str:
    """A job in few words: its kind, and the defence."""
    place = f"control ({job['control']})" if job["control"] else short_names([job["defense"]])[job["defense"]]
    return f"{job_kind(job)}, {place}"


def job_line(event: Event) -> str:
    """A finished job: what it was, on whom, and what came out."""
    job = event["job"]
    took = f"{event['seconds']:.1f} s"
    result = took if job["finding"] else f"{decibels(event['psnr'])} dB, {took}"
    if event["error"]:
        result = f"{event['status']}: {shortened(first_line(event['error']))}"
    return f"{job_name(job)}, batch {job['batch']}, seed {job['seed']}: {result}"


def shortened(text: str) -> str:
    """A text of any length within a line or two."""
    return text if len(text) <= SHORT else f"{text[: SHORT - 3]}..."


@contextmanager
def audit_progress(
    *, show: bool = True, verbose: bool = False, quiet: bool = False
) -> Iterator[Callable[[Event], None]]:
    """Yields a callback for the audit's events; ``show`` False leaves only what is worth a line by itself."""
    console = make_console(stderr=True)
    if quiet:
        yield lambda event: None
        return
    tally, told = Tally(), set[str]()

    def remark(event: Event) -> None:
        """What is said at once, on a terminal or not."""
        if event["event"] == "planned" and event["finished"]:
            say(console, f"resuming: {event['finished']} of {event['total']} jobs are done")
        elif event["event"] == "workers":
            say(console, f"Workers: {event['workers']}, for {event['reason']}.")
        elif event["event"] == "estimated":
            _tell_estimate(console, event, verbose)
        elif event["event"] == "finished" and verbose:
            say(console, f"[{event['completed']}/{event['total']}] {job_line(event)}")
        elif event["event"] == "finished" and event["status"] == "failed":
            text = f"failed: {job_name(event['job'])}: {shortened(first_line(event['error']))}"
            if text not in told:  # a hundred equal failures are one line
                told.add(text)
                say(console, text)

    if show and console.is_interactive:
        with _Bars(console, tally) as bars:
            yield _in_turn(tally.take, bars.take, remark)
    elif show:
        with _Lines(console, tally, verbose) as lines:
            yield _in_turn(tally.take, lines.take, remark)
    else:
        yield _in_turn(tally.take, remark)


def _in_turn(*listeners: Callable[[Event], None]) -> Callable[[Event], None]:
    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell


def _tell_estimate(console: Console, event: Event, verbose: bool) -> None:
    say(console, f"Estimated time: at most {rough(event['seconds'])} for {counted(event['jobs'], 'job')}.")
    if verbose:
        for attack, seconds in (event.get("by_attack") or {}).items():
            say(console, f"  {attack}: {rough(seconds)}")
    if event.get("advice"):
        say(console, f"Hint: {event['advice']}")


class _Count(MofNCompleteColumn):
    """Steps done and in all; nothing where nobody knows how many there are."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


class _Bars:
    """A bar for the audit, and one for each of the first running jobs."""

    def __init__(self, console: Console, tally: Tally) -> None:
        self._tally = tally
        self._view = Progress(
            TextColumn("{task.description}", table_column=Column(ratio=3, no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=12),
            _Count(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", table_column=Column(ratio=2, no_wrap=True, overflow="ellipsis")),
            console=console,
            expand=True,
        )
        self._jobs: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._view.start()
        self._audit = self._view.add_task("preparing", total=None, note="")
        return self

    def __exit__(self, *failure: object) -> None:
        for task in self._jobs.values():
            self._view.remove_task(task)
        self._view.stop()

    def take(self, event: Event) -> None:
        kind, view = event["event"], self._view
        if kind == "trained":
            note = f"loss {event['loss']:.3g}"
            view.update(self._audit, total=event["total"], completed=event["done"], description="training", note=note)
            return
        if kind == "started" and len(self._jobs) < MAX_BARS:
            self._jobs[event["key"]] = view.add_task(job_name(event["job"]), total=None, note="")
        elif kind == "advanced" and event["key"] in self._jobs:
            note = "" if event["value"] is None else f"objective {event['value']:.3g}"
            view.update(self._jobs[event["key"]], completed=event["done"], total=event["total"], note=note)
        elif kind == "finished" and event["key"] in self._jobs:
            view.remove_task(self._jobs.pop(event["key"]))
        tally = self._tally
        view.update(self._audit, total=tally.total, completed=tally.completed, description="jobs", note=tally.left())


class _Lines:
    """A line every quarter of a minute, by a thread of its own, for a job may be silent for longer; and a last one."""

    def __init__(self, console: Console, tally: Tally, verbose: bool) -> None:
        self._console, self._tally, self._verbose = console, tally, verbose
        self._over = threading.Event()
        self._training: str | None = None

    def __enter__(self) -> _Lines:
        threading.Thread(target=self._speak, daemon=True).start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._over.set()
        if failure[0] is None and self._tally.completed > self._tally.at_start and not self._verbose:
            say(self._console, self._tally.line())

    def take(self, event: Event) -> None:
        if event["event"] == "trained":
            self._training = f"[round {event['done']}/{event['total']}] training, loss {event['loss']:.3g}"
            if event["done"] == event["total"]:
                say(self._console, self._training)
                self._training = None
        elif event["event"] == "planned" and event["finished"] < event["total"]:
            say(self._console, f"{counted(event['total'] - event['finished'], 'job')} to run")

    def _speak(self) -> None:
        while not self._over.wait(PAUSE):
            if self._training is not None:
                say(self._console, self._training)
            elif self._tally.completed < self._tally.total:
                say(self._console, self._tally.line())


@contextmanager
def step_progress(what: str = "attack", *, show: bool = True) -> Iterator[Callable[[int, int, float], None]]:
    """Yields a callback for the steps of one piece of work, with a value that is shown beside them."""
    with named_progress(show=show, transient=False) as progress:
        yield lambda done, total, value: progress(f"{what}, {value:.3g}", done, total)


@contextmanager
def named_progress(*, show: bool = True, transient: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a callback for long work in parts: a bar on a terminal, elsewhere a line every quarter of a minute."""
    console = make_console(stderr=True)
    bar = show and console.is_interactive
    with Progress(console=console, disable=not bar, transient=transient) as view:
        task = view.add_task("", total=None)
        spoken = time.monotonic()

        def tell(name: str, done: int, total: int) -> None:
            nonlocal spoken
            view.update(task, completed=done, total=total, description=name)
            if show and not bar and time.monotonic() - spoken > PAUSE:
                say(console, f"[{done}/{total}] {name}")
                spoken = time.monotonic()

        yield tell
