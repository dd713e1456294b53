"""The command ``plan``: what an audit will take, before anything runs. Nothing heavy is imported before it runs."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.cli.output import Output, takes
from leakscope.cli.parsing import ALLOW_CODE

if TYPE_CHECKING:
    from leakscope.audit.estimate import Sizing


@takes(Output, "as_json", "as_csv")
def plan(
    spec: Annotated[Path | None, typer.Argument(help="YAML spec of an audit; without it the default audit.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers of a cluster, each with processors of its own: for the hours.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="As if there were so many clients like the first; default: the spec's.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds for trials, about.")] = 60.0,
    allow_code: Annotated[bool, typer.Option("--allow-code", help=ALLOW_CODE)] = False,
    *,
    output: Output,
) -> None:
    """Tell what an audit will take: jobs, core-hours, memory, disk.

    Some steps of each attack are timed on the first client; nothing is written.
    """
    from leakscope.audit.estimate import size_audit
    from leakscope.audit.spec import DEFAULT_SPEC, load_spec

    checked = load_spec(DEFAULT_SPEC if spec is None else spec, allow_code=allow_code)
    sizing = size_audit(checked, workers=workers, clients=clients, seconds=seconds)
    if output.for_machines:
        from leakscope.report.export import document

        content = document("plan", _document(sizing))
        output.write(lambda: content, lambda: content["cells"])
    else:
        _print(sizing)


def _document(sizing: Sizing) -> dict[str, Any]:
    names = ("clients", "jobs", "core_hours", "threads", "memory_mb", "disk_mb", "workers", "notes")
    return {
        **{name: getattr(sizing, name) for name in names},
        "hours": None if sizing.workers is None else sizing.hours(sizing.workers),
        "processor_share": sizing.share,
        "confidence": _confidence(sizing),
        "cells": [{**dataclasses.asdict(cell), "core_hours": cell.core_hours} for cell in sizing.cells],
    }


def _print(sizing: Sizing) -> None:
    from leakscope.cli.console import make_console, print_table, say
    from leakscope.results.records import counted

    heads = ("setting", "attack or finding", "jobs", "s a job", "core-hours", "timed")
    rows = [
        (
            *(cell.setting, cell.attack, f"{cell.jobs:,}"),
            "-" if cell.seconds is None else f"{'≥ ' if cell.timed == 'at least' else ''}{cell.seconds:.2g}",
            f"{cell.core_hours:.3g}",
            cell.timed,
        )
        for cell in sizing.cells
    ]
    print_table(None, heads, rows)
    console = make_console()
    say(console, f"Jobs: {sizing.jobs:,} on {counted(sizing.clients, 'client')}.")
    say(console, f"Core-hours: {sizing.core_hours:.3g} on processors like this one. {_confidence(sizing)}")
    say(console, f"Memory of a worker: at least {sizing.memory_mb:,.0f} MB. Disk: about {sizing.disk_mb:,.1f} MB.")
    for count in dict.fromkeys((1, sizing.workers or 1)):
        say(console, f"With {counted(count, 'worker')}: about {_span(sizing.hours(count))}.")
    for note in sizing.notes:
        say(console, f"Note: {note}")


def _confidence(sizing: Sizing) -> str:
    by: defaultdict[str, float] = defaultdict(float)
    for cell in sizing.cells:
        by[cell.timed if cell.timed in ("whole", "steps", "at least", "not timed") else "alike"] += cell.core_hours
    total = sum(by.values())
    if not total:
        return "Nothing could be timed."
    words = {
        "whole": "from whole jobs",
        "steps": "from some steps of a job, without what follows the last one and without compilation",
        "alike": "taken over from a job of the same attack in another setting",
        "at least": "a lower bound, as no step ended in time",
    }
    told = [f"{by[name] / total:.0%} {text}" for name, text in words.items() if by[name] >= 0.005 * total]
    return f"Of the core-hours {', '.join(told)}."


def _span(hours: float) -> str:
    """Hours as people say them.

    >>> _span(0.001), _span(0.5), _span(30), _span(1000)
    ('4 s', '30 min', '30 h', '42 days')
    """
    for limit, factor, unit in ((1 / 60, 3600, "s"), (2, 60, "min"), (72, 1, "h")):
        if hours < limit:
            return f"{hours * factor:.{0 if hours * factor >= 10 or unit == 's' else 1}f} {unit}"
    return f"{hours / 24:.0f} days"
