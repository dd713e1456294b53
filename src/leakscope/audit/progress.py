"""What ``leakscope.audit(...)`` shows while it runs: one bar, where somebody is looking."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from leakscope.audit.output import Unfailing

Event = dict[str, Any]
Progress = Callable[[Event], None]


@contextlib.contextmanager
def listener(progress: Progress | bool | None) -> Iterator[Progress | None]:
    """Who is told of events: the caller's own function, a bar (True), nobody (False); None is a bar on terminals."""
    if callable(progress):
        yield progress
    elif progress or (progress is None and _somebody_looks()):
        with _bar() as tell:
            yield tell
    else:
        yield None


def _somebody_looks() -> bool:
    """Whether standard error is a terminal, or this is a notebook."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


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
