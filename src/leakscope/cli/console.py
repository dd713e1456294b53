"""What the command line draws: progress bars and tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def audit_progress() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a callback for the audit's events: a bar on a terminal, a line a job elsewhere."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as view:
        task = view.add_task("audit", total=None)

        def tell(event: dict[str, Any]) -> None:
            if event["event"] == "trained":
                text = f"training, loss {event['loss']:.3g}"
                view.update(task, total=event["total"], completed=event["done"], description=text)
                if not console.is_terminal:
                    console.print(f"[round {event['done']}/{event['total']}] {text}", markup=False, highlight=False)
            elif event["event"] == "planned":
                view.update(task, total=event["total"], completed=event["finished"], description="audit")
                if event["finished"]:
                    console.print(f"resuming: {event['finished']} of {event['total']} jobs are done")
            elif event["event"] == "finished":
                line = _job_line(event)
                view.update(task, completed=event["completed"], description=event["job"]["attack_name"])
                if not console.is_terminal or event["status"] == "failed":
                    text = f"[{event['completed']}/{event['total']}] {line}"
                    console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield tell


def _job_line(event: dict[str, Any]) -> str:
    """One job in one line: what it was, where, and what came out."""
    job = event["job"]
    result = f"{decibels(event['psnr'])} dB" if job["finding"] is None else f"{event['seconds']:.1f} s"
    if event["error"]:
        result = event["error"].splitlines()[0]
    place = f"control ({job['control']})" if job["control"] else job["defense"]
    return f"{'finding ' if job['finding'] else ''}{job['attack_name']} | {place} | {result}"


@contextmanager
def step_progress() -> Iterator[Callable[[int, int, float], None]]:
    """Yields a callback for an attack's steps."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as view:
        task = view.add_task("attack", total=None)

        def tell(done: int, total: int, value: float) -> None:
            view.update(task, completed=done, total=total, description=f"objective {value:.3g}")

        yield tell


@contextmanager
def named_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a callback for long work in parts: a bar on a terminal, elsewhere a line every quarter of a minute."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as view:
        task = view.add_task("", total=None)
        spoken = time.monotonic()

        def tell(name: str, done: int, total: int) -> None:
            nonlocal spoken
            view.update(task, completed=done, total=total, description=name)
            if not console.is_terminal and time.monotonic() - spoken > 15:
                console.print(f"[{done}/{total}] {name}", markup=False, highlight=False)
                spoken = time.monotonic()

        yield tell


def print_table(title: str | None, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(highlight=False).print(table)


def print_listing(lines: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False)
    for line in lines:
        table.add_row(*line)
    Console(highlight=False).print(table)


def print_limits(title: str, limits: Any) -> None:
    """What theory says, in small tables, each with its remark below."""
    from leakscope.report import tables_of

    console = Console(highlight=False)
    console.print(title, style="bold", markup=False)
    for table in tables_of(limits):
        if table.rows:
            print_table(table.title, table.columns, table.rows)
        else:
            console.print(f"{table.title}:", markup=False, style="italic")
        if table.note:
            console.print(f"  {table.note}", markup=False)
    console.print(f"Conclusion: {limits.conclusion}", style="bold", markup=False)


def print_reproduction(title: str, result: Any, page: Path | None = None, pictures: bool | None = None) -> None:
    """Published and measured numbers side by side, then where the page is and what it leaves out."""
    print_table(
        title,
        ("setting", "measure", "published", "tolerance", "measured", "interval", "n", "verdict", "note"),
        (
            (
                row.setting,
                row.measure,
                plain(row.published),
                plain(row.tolerance),
                plain(row.measured),
                "-" if row.interval is None else f"{plain(row.interval[0])} to {plain(row.interval[1])}",
                row.count,
                row.verdict,
                row.note,
            )
            for row in result.rows
        ),
    )
    console = Console(highlight=False)
    console.print(result.caption, markup=False)
    if page is None:
        return
    if pictures is None and any(grid.private for grid in result.pictures):
        console.print("Private pictures are left out of the page; --pictures shows them.", markup=False)
    console.print(f"Page:  {page}", markup=False, soft_wrap=True)


def print_comparison(title: str, rows: Iterable[Any]) -> None:
    """Two audits, setting by setting."""
    print_table(
        title,
        ("setting", "attack", "PSNR first", "PSNR second", "difference", "intervals overlap"),
        (
            (
                row.setting,
                row.attack,
                decibels(row.psnr_a),
                decibels(row.psnr_b),
                decibels(row.difference),
                {True: "yes", False: "no", None: "-"}[row.overlap],
            )
            for row in rows
        ),
    )


def print_verdict(result: Any, page: Path) -> None:
    """The verdict of an audit with what it rests on."""
    several = len({row.protocol for row in result.verdict.settings}) > 1
    print_table(
        "Strongest attack for each example, by setting",
        ("setting", "mean PSNR (95 %)", "no information", "identified", "labels", "outcome"),
        (
            (
                f"{row.protocol}, {row.defense}" if several else row.defense,
                f"{decibels(row.mean_psnr)} dB ({decibels(row.interval[0])} to {decibels(row.interval[1])})",
                f"{decibels(row.baseline_psnr)} dB",
                percent(row.identification),
                percent(row.label_accuracy),
                row.outcome,
            )
            for row in result.verdict.settings
        ),
    )
    console = Console(highlight=False)
    for reason in result.verdict.reasons:
        console.print(f"  {reason}", markup=False)
    console.print(f"Verdict: {result.verdict.outcome.upper()}", style="bold")
    console.print(f"Report:  {page}", markup=False, soft_wrap=True)


def decibels(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.1f}"


def percent(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.0f} %"


def plain(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.4g}"
