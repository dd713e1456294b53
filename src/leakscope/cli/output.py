"""How much a command says, and where: people read stderr as soon as a document has stdout to itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from leakscope.contracts.errors import UserError

if TYPE_CHECKING:
    from leakscope.results.store import Store
    from leakscope.results.verdict import Verdict

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say only the outcome and where the files are.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="A line for every job, and every reason.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No bar, and no lines while it runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document; text for people goes to stderr.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print a table as CSV; text for people goes to stderr.")]

SarifFile = Annotated[
    Path | None, typer.Option("--sarif", help="Also write the findings here as SARIF 2.1.0, for code scanning.")
]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What the options of a command say about its output."""

    quiet: bool = False
    verbose: bool = False
    progress: bool = True
    form: Literal["text", "json", "csv"] = "text"

    @classmethod
    def of(
        cls,
        *,
        quiet: bool = False,
        verbose: bool = False,
        no_progress: bool = False,
        as_json: bool = False,
        as_csv: bool = False,
    ) -> Output:
        if quiet and verbose:
            raise UserError("--quiet and --verbose: expected one of them, got both")
        if as_json and as_csv:
            raise UserError("--json and --csv: expected one of them, got both")
        form: Literal["text", "json", "csv"] = "json" if as_json else "csv" if as_csv else "text"
        return cls(quiet=quiet, verbose=verbose, progress=not (no_progress or quiet), form=form)

    @property
    def for_machines(self) -> bool:
        return self.form != "text"

    def write(
        self, document: Callable[[], Mapping[str, Any]], table: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        """Print the document or the table where one is asked for, and nothing else."""
        from leakscope.report.export import csv_text, json_text

        if self.for_machines:
            sys.stdout.write(json_text(document()) if self.form == "json" else csv_text(table()))
            sys.stdout.flush()


def write_sarif(store: Store, verdict: Verdict, path: Path | None) -> None:
    """The findings of an audit as a SARIF file, where one is asked for."""
    if path is None:
        return
    from leakscope.report.export import json_text
    from leakscope.report.sarif import sarif_log

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text(sarif_log(store, verdict)), encoding="utf-8")


def relative(path: Path) -> str:
    """A path as seen from here, so that no document names somebody's home.

    >>> relative(Path("run") / "report.html")
    'run/report.html'
    """
    return Path(os.path.relpath(path)).as_posix()
