"""What commands show while something runs: bars on a terminal, elsewhere a line now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import Progress

from leakscope.audit.progress import PAUSE, Tell, shown
from leakscope.cli.console import make_console, say


@contextmanager
def audit_progress(
    *, show: bool = True, verbose: bool = False, quiet: bool = False, quick: str | None = None
) -> Iterator[Tell]:
    """Yield a callback for the audit's events; ``show`` False leaves only what is worth a line by itself.

    ``quick`` is the command for a first answer.
    """
    console = make_console(stderr=True)
    if quiet:
        yield lambda event: None
        return
    bars = show and console.is_interactive
    with shown(console, "bars" if bars else "lines" if show else "remarks", verbose=verbose, quick=quick) as tell:
        yield tell


@contextmanager
def step_progress(what: str = "attack", *, show: bool = True) -> Iterator[Callable[[int, int, float], None]]:
    """Yield a callback for the steps of one piece of work, with a value that is shown beside them."""
    with named_progress(show=show, transient=False) as progress:
        yield lambda done, total, value: progress(f"{what}, {value:.3g}", done, total)


@contextmanager
def named_progress(*, show: bool = True, transient: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback for long work in parts: a bar on a terminal, elsewhere a line every quarter of a minute."""
    console = make_console(stderr=True)
    bar = show and console.is_interactive
    with Progress(console=console, disable=not bar, transient=transient) as view:
        task = view.add_task("", total=None)
        spoken = time.monotonic()

        def tell(name: str, done: int, total: int) -> None:
            nonlocal spoken
            view.update(task, completed=done, total=total, description=escape(name))
            if show and not bar and time.monotonic() - spoken > PAUSE:
                say(console, f"[{done}/{total}] {name}")
                spoken = time.monotonic()

        yield tell
