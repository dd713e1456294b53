"""The commands that print or write what is there: ``reproduce``, ``report``, ``compare``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Scale(StrEnum):
    smoke = "smoke"
    small = "small"
    paper = "paper"


def reproduce(
    table: Annotated[str, typer.Argument(help="PAPER/TABLE (leakscope list papers).")],
    scale: Annotated[Scale, typer.Option(help="How much to run.")] = Scale.smoke,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the page; default leakscope-reproduce/PAPER-TABLE if it has pictures or curves."),
    ] = None,
    pictures: Annotated[
        bool | None, typer.Option("--pictures/--no-pictures", help="Show private pictures in the page.")
    ] = None,
) -> None:
    """Run a published table and put published and measured numbers side by side."""
    from leakscope.cli.console import print_reproduction, step_progress
    from leakscope.papers import reproduce as run
    from leakscope.report import write_reproduction

    with step_progress() as progress:
        result = run(table, scale=scale.value, progress=progress)
    page = None
    if out is not None or result.pictures or result.curves:
        folder = out or Path("leakscope-reproduce") / table.replace("/", "-")
        page = write_reproduction(result, folder / "report.html", pictures)
    print_reproduction(f"{table} ({scale.value})", result, page, pictures)


def report(
    directory: Annotated[Path, typer.Argument(help="Folder of an audit.")],
    to: Annotated[Path | None, typer.Option(help="Where to write; default DIR/report.html.")] = None,
    pictures: Annotated[
        bool | None, typer.Option("--pictures/--no-pictures", help="Show the pictures the audit kept.")
    ] = None,
) -> None:
    """Write the report of an audit again, finished or not."""
    from leakscope.report import write_report

    print(write_report(directory, to, pictures=pictures))


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of an audit.")],
    second: Annotated[Path, typer.Argument(help="Folder of another audit.")],
    to: Annotated[Path | None, typer.Option(help="Also write an HTML page here.")] = None,
) -> None:
    """Compare two audits setting by setting."""
    from leakscope.cli.console import print_comparison
    from leakscope.report import compare_tables, write_comparison

    print_comparison(f"{first} against {second}", compare_tables(first, second))
    if to is not None:
        print(write_comparison(first, second, to))
