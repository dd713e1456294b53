"""Show the progress of an audit: bars on a terminal, elsewhere a line now and then."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from leakscope.audit.forecast import Forecast
from leakscope.audit.output import Unfailing
from leakscope.audit.terminal import PlainConsole
from leakscope.report.words import duration
from leakscope.results.names import short_names
from leakscope.results.reasons import Reason
from leakscope.results.records import counted, finding_words, first_line

#: Seconds between two lines where there is no terminal; a log that is silent for longer looks dead.
PAUSE = 15.0
#: Characters of an error in a line.
SHORT = 200
#: Running jobs with a bar of their own.
MAX_BARS = 4

Event = dict[str, Any]
Tell = Callable[[Event], None]
#: What lines and bars begin with once a scenario exceeds the policy.
EXCEEDED = "policy already exceeded"
#: What a first answer is asked for with, from Python.
QUICK = "leakscope.audit(..., quick=True)"
#: "lines" announce the jobs and sum them up; "rare" lines only tell that something is still running.
Display = Literal["bars", "lines", "rare", "remarks"]


@contextmanager
def listener(progress: Tell | bool | None) -> Iterator[tuple[Tell | None, bool]]:
    """Yield the function that takes events, if any, and whether an estimate of the time, which costs some, is wanted.

    ``progress``: the caller's own function, bars (True) or nobody (False); None: bars on terminals, else rare lines.
    """
    looks = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    if callable(progress) or progress is False or (sys.stderr is None and not looks):
        yield (progress, True) if callable(progress) else (None, False)
        return
    stream: Any = None if sys.stderr is None else Unfailing(sys.stderr)
    bars = bool(progress) or looks
    console = PlainConsole(file=stream, stderr=True, highlight=False, markup=False)
    with shown(console, "bars" if bars else "rare", quick=QUICK) as tell:
        yield tell, bars


@contextmanager
def shown(console: Console, display: Display, *, verbose: bool = False, quick: str | None = None) -> Iterator[Tell]:
    """Yield a callback for the audit's events, which shows them on ``console``.

    ``quick`` is the command for a first answer, which is told where the whole takes long.
    """
    tally, told = Tally(), set[str]()

    def remark(event: Event) -> None:
        kind = event["event"]
        if kind == "planned" and event["finished"]:
            _say(console, f"resuming: {event['finished']} of {event['total']} jobs are done")
        elif kind == "workers":
            _say(console, f"Using {counted(event['workers'], 'worker')}: {event['reason']}.")
        elif kind == "estimated":
            about = "at least" if event["at_least"] else "about"
            _say(console, f"Estimated time: {about} {rough(event['seconds'])} for {counted(event['jobs'], 'job')}.")
            for attack, seconds in event.get("by_attack", {}).items() if verbose else ():
                _say(console, f"  {attack}: {rough(seconds)}")
            if event.get("advice"):
                _say(console, f"Hint: {event['advice']}")
            if event.get("long") and quick is not None:
                _say(console, f"For a first answer in minutes: {quick}")
        elif kind == "exceeded":
            rest = " The rest of this scenario is not run; --no-stop-on-leak runs it."
            text = f"{EXCEEDED.capitalize()}, {event['scenario']}: {event['reason']}."
            _say(console, text + (rest if event["stops"] else ""))
        elif kind == "finished" and verbose:
            _say(console, f"[{event['completed']}/{event['total']}] {job_line(event)}")
        elif kind == "finished" and event["status"] == "failed":
            text = f"failed: {job_name(event['job'])}: {shortened(first_line(event['error']))}"
            if text not in told:  # a hundred equal failures are one line
                told.add(text)
                _say(console, text)

    if display == "bars":
        with _Bars(console, tally) as bars:
            yield _in_turn(tally.take, bars.take, remark)
    elif display == "remarks":
        yield _in_turn(tally.take, remark)
    else:
        with _Lines(console, tally, first=display == "lines", last=display == "lines" and not verbose) as lines:
            yield _in_turn(tally.take, lines.take, *([remark] if display == "lines" else []))


class Updates:
    """Tell ``tell`` how far an attack on ``count`` updates is, in the events of an audit."""

    def __init__(self, tell: Tell | None, attack: str, count: int, passes: int = 1) -> None:
        self._tell, self._count, self._passes = tell, count, passes
        facts = {"protocol": "", "attack": attack, "attack_name": attack, "control": None, "finding": None}
        self._jobs = [{**facts, "defense": f"update {n + 1}", "batch": n, "seed": 0} for n in range(count)]
        kinds = [{**job, "jobs": 1, "seconds": None} for job in self._jobs]
        self._emit({"event": "planned", "total": count, "finished": 0, "kinds": kinds})

    @contextmanager
    def update(self, number: int) -> Iterator[Callable[[int, int, float], None]]:
        """Yield the callback for the steps of one update, which the attack makes in ``passes`` (one for a control)."""
        job = {"key": str(number), "position": number, "job": self._jobs[number]}
        started, last, done_before = time.monotonic(), 0, 0

        def step(done: int, total: int, value: float) -> None:
            nonlocal last, done_before
            done_before += total if done < last else 0
            last = done
            steps = {"done": min(done_before + done, self._passes * total), "total": self._passes * total}
            self._emit({"event": "advanced", **job, **steps, "value": value})

        self._emit({"event": "started", **job})
        yield step
        ended = {"status": "done", "error": None, "psnr": None, "seconds": time.monotonic() - started}
        self._emit({"event": "finished", **job, **ended, "completed": number + 1, "total": self._count})

    def _emit(self, event: Event) -> None:
        if self._tell is not None:
            self._tell(event)


class Tally:
    """Count what the events of an audit say so far: jobs done, steps of those under way, time left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total = self.completed = self.at_start = 0
        self.fates: Counter[str] = Counter()
        self.best: float | None = None
        self.exceeded = False
        self.timing: str | None = None
        self.running: dict[str, Event] = {}
        self.forecast: Forecast | None = None
        self.budget: float | None = None
        self.since = clock()

    def take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "planned":
            self.total, self.completed = event["total"], event["finished"]
            self.at_start, self.since = self.completed, self._clock()
            if "kinds" in event:  # of work without trials
                self.forecast = Forecast(event["kinds"], clock=self._clock)
        elif kind == "timing":
            self.timing = job_kind(event["job"])
        elif kind == "estimated":
            self.forecast, self.since = Forecast(event["kinds"], event["workers"], self._clock), self._clock()
            self.budget = event["budget"]
        elif kind == "exceeded":
            self.exceeded = True
        elif kind == "left out":
            self.total = event["total"]
            if self.forecast is not None:
                self.forecast.leave_out(event["kinds"])
        elif kind == "started" or kind == "advanced":
            self.running[event["key"]], self.timing = event, None
            self._foretell(event)
        elif kind == "finished":
            self.running.pop(event["key"], None)
            self.completed, self.total = event["completed"], event["total"]
            self.fates[event["status"]] += 1
            self._foretell(event)
            if event["psnr"] is not None and not event["job"]["control"]:
                self.best = event["psnr"] if self.best is None else max(self.best, event["psnr"])

    def _foretell(self, event: Event) -> None:
        if self.forecast is None:
            return
        key, job = event["key"], event["job"]
        if event["event"] == "started":
            self.forecast.started(key, job)
        elif event["event"] == "advanced":
            self.forecast.advanced(key, job, event["done"], event["total"])
        else:
            self.forecast.finished(key, job, event["seconds"])

    @property
    def elapsed(self) -> float:
        return self._clock() - self.since

    @property
    def remaining(self) -> float | None:
        """Return the seconds that the jobs still take, whatever the budget allows; None where that is not known."""
        if self.forecast is None or self.completed >= self.total:
            return None
        return self.forecast.remaining()

    def left(self) -> str:
        """Say how much work is left, and how much of the budget: two different things."""
        told = []
        if (remaining := self.remaining) is not None:
            least = "at least" if self.forecast is not None and self.forecast.at_least else "about"
            told.append(f"work left: {least} {rough(remaining)}")
        if self.budget is not None and self.completed < self.total:
            left = self.budget - self.elapsed
            told.append(f"budget left: {rough(left)}" if left > 0 else "budget used up")
        return ", ".join(told)

    def left_in_short(self) -> str:
        """Say the same in the 24 characters that a bar has for it in 80 columns."""
        told = []
        if (remaining := self.remaining) is not None:
            least = "over " if self.forecast is not None and self.forecast.at_least else ""
            told.append(f"work {least}{rough(remaining)}")
        if self.budget is not None and self.completed < self.total:
            left = self.budget - self.elapsed
            told.append(f"budget {rough(left) if left > 0 else 'over'}")
        return ", ".join(told)

    def line(self) -> str:
        fates = ", ".join(f"{count} {fate}" for fate, count in sorted(self.fates.items()))
        running = next(iter(self.running.values()), None)
        under_way = "" if self.timing is None else f"timing {self.timing}"
        if running is not None:
            steps = f", step {running['done']} of {running['total']}" if running.get("total") else ""
            under_way = f"now {job_kind(running['job'])}{steps}"
        best = "" if self.best is None else f"best {_decibels(self.best)}"
        exceeded = EXCEEDED if self.exceeded else ""
        parts = (exceeded, fates, best, under_way, self.left() or f"after {duration(self.elapsed)}")
        return f"[{self.completed}/{self.total}] {'; '.join(part for part in parts if part)}"


def rough(seconds: float) -> str:
    """Round a time that is only guessed.

    >>> rough(9), rough(100), rough(400), rough(9000), rough(200000)
    ('10 s', '2 min', '7 min', '2.5 h', '2.3 days')
    """
    if seconds < 55:
        return f"{max(5, round(seconds / 5) * 5)} s"
    if seconds < 5400:
        return f"{max(1, round(seconds / 60))} min"
    return f"{seconds / 3600:.1f} h" if seconds < 36 * 3600 else f"{seconds / 86400:.1f} days"


def scenario_name(reason: Reason) -> str:
    """Name the scenario of a reason in few words."""
    if reason.scenario is None:
        return "all scenarios"
    protocol, defense = (short_names([part])[part] for part in reason.scenario)
    return f"{protocol} with {defense}"


def job_kind(job: Event) -> str:
    return finding_words(job["finding"]) if job["finding"] else str(job["attack_name"])


def job_name(job: Event) -> str:
    place = f"control ({job['control']})" if job["control"] else short_names([job["defense"]])[job["defense"]]
    return f"{job_kind(job)}, {place}"


def job_line(event: Event) -> str:
    """Say of a finished job what it was, on whom, and what came out."""
    job, took = event["job"], f"{event['seconds']:.1f} s"
    result = took if job["finding"] else f"{_decibels(event['psnr'])}, {took}"
    if event["error"]:
        result = f"{event['status']}: {shortened(first_line(event['error']))}"
    return f"{job_name(job)}, batch {job['batch']}, seed {job['seed']}: {result}"


def shortened(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[: SHORT - 3]}..."


def _decibels(value: float | None) -> str:
    return "- dB" if value is None or value != value else f"{value:.1f} dB"


def _say(console: Console, text: str) -> None:
    console.print(Text(text))


def _in_turn(*listeners: Tell) -> Tell:
    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell


class _Count(MofNCompleteColumn):
    """Steps done and in all, where it is known how many there are."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


class _Bars:
    """A bar for the audit, and one for each of the first running jobs."""

    def __init__(self, console: Console, tally: Tally) -> None:
        self._tally = tally
        self._view = Progress(
            TextColumn(
                "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            BarColumn(bar_width=12),
            _Count(),
            TimeElapsedColumn(),
            TextColumn(
                "{task.fields[note]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            console=console,
            expand=True,
        )
        self._jobs: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
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
        what = EXCEEDED if tally.exceeded else "jobs" if tally.timing is None else f"timing {tally.timing}"
        view.update(
            self._audit, total=tally.total, completed=tally.completed, description=what, note=tally.left_in_short()
        )


class _Lines:
    """Print a line every quarter of a minute, from a thread: a job may be silent for longer. Also at start and end."""

    def __init__(self, console: Console, tally: Tally, *, first: bool, last: bool) -> None:
        self._console, self._tally, self._first, self._last = console, tally, first, last
        self._over = threading.Event()
        self._training: str | None = None

    def __enter__(self) -> Self:
        threading.Thread(target=self._speak, daemon=True).start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._over.set()
        if failure[0] is None and self._tally.completed > self._tally.at_start and self._last:
            _say(self._console, self._tally.line())

    def take(self, event: Event) -> None:
        if event["event"] == "trained":
            self._training = f"[round {event['done']}/{event['total']}] training, loss {event['loss']:.3g}"
            if event["done"] == event["total"]:
                if self._first:
                    _say(self._console, self._training)
                self._training = None
        elif event["event"] == "planned" and event["finished"] < event["total"] and self._first:
            _say(self._console, f"{counted(event['total'] - event['finished'], 'job')} to run")

    def _speak(self) -> None:
        while not self._over.wait(PAUSE):
            if self._training is not None:
                _say(self._console, self._training)
            elif self._tally.completed < self._tally.total:
                _say(self._console, self._tally.line())
