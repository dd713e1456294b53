"""What ``leakscope.audit(...)`` shows while it runs, on standard error: a bar where somebody looks, else few lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from leakscope.audit.output import Unfailing
from leakscope.results.records import counted

Event = dict[str, Any]
Progress = Callable[[Event], None]
#: Seconds between two lines where nobody looks; what is over sooner says nothing.
PAUSE = 15.0


@dataclass(frozen=True)
class Listener:
    """Who is told of events, if anybody, and whether an estimate of the time, which costs some, is wanted."""

    tell: Progress | None = None
    estimates: bool = False


@contextlib.contextmanager
def listener(progress: Progress | bool | None) -> Iterator[Listener]:
    """The caller's own function, a bar (True), nobody (False); None is a bar on terminals, a line now and then else."""
    if callable(progress):
        yield Listener(progress, True)
    elif progress or (progress is None and _somebody_looks()):
        with _bar() as tell:
            yield Listener(tell, True)
    elif progress is None and sys.stderr is not None:
        yield Listener(Lines().take)
    else:
        yield Listener()


def _somebody_looks() -> bool:
    """Whether standard error is a terminal, or this is a notebook."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


class Lines:
    """A line every quarter of a minute, for logs of scripts; without a thread, as jobs tell of their steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._spoke = clock()
        self._total = self._completed = 0

    def take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "planned":
            self._total, self._completed = event["total"], event["finished"]
        elif kind == "finished":
            self._completed = event["completed"]
        now = self._clock()
        if now - self._spoke >= PAUSE:
            self._spoke = now
            print(self._words(event, now - self._began), file=Unfailing(sys.stderr), flush=True)

    def _words(self, event: Event, seconds: float) -> str:
        if event["event"] == "trained":
            what = f"training, round {event['done']} of {event['total']}, loss {event['loss']:.3g}"
        else:
            what = f"{self._completed} of {counted(self._total, 'job')} done"
            name = (event.get("job") or {}).get("attack_name")
            what += f", now {name}" if name and event["event"] != "finished" else ""
        return f"leakscope: {what}, {seconds:.0f} s"


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    stream: Any = None if sys.stderr is None else Unfailing(sys.stderr)
    console = Console(file=stream, stderr=True)
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(), *times)
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("audit", total=None)
        steps: dict[str, float] = {}  # jobs under way, as parts of a job

        def tell(event: Event) -> None:
            kind, key = event["event"], event.get("key", "")
            if kind == "trained":
                bar.update(task, total=event["total"], completed=event["done"], description="training")
            elif kind == "planned":
                bar.reset(task, total=event["total"], completed=event["finished"], description="audit")
            elif kind == "estimated":
                minutes = f"at most {max(1, round(event['seconds'] / 60))} min for {event['jobs']} jobs"
                bar.console.print(f"Estimated time: {minutes}. {event['advice'] or ''}", markup=False, highlight=False)
            elif kind == "advanced" and event["total"]:
                share = min(event["done"] / event["total"], 1.0)
                bar.advance(task, share - steps.get(key, 0.0))
                steps[key] = share
            elif kind == "finished":
                steps.pop(key, None)
                done = event["completed"] + sum(steps.values())
                bar.update(task, completed=done, description=event["job"]["attack_name"])

        yield tell
