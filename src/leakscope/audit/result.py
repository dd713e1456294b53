"""The result of an audit: rows, findings, verdict, and what can be made of them."""

from __future__ import annotations

import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

from leakscope.contracts.tables import data_frame
from leakscope.report.export import audit_document, audit_table, json_text
from leakscope.results.defense_study import Study, study_store
from leakscope.results.records import FindingRow, Row, counted, mapping
from leakscope.results.store import Store
from leakscope.results.strongest import StrongestExample
from leakscope.results.verdict import Verdict, judge, verdict_html


class Audit:
    """A finished audit: rows, findings and verdict, read from its folder."""

    def __init__(self, directory: Path, temporary: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.directory = directory
        self._temporary = temporary  # a folder nobody asked for goes when the audit is no longer in use
        with Store.open(directory) as store:
            self.rows: list[Row] = store.rows()
            self.findings: list[FindingRow] = store.findings()
            self.verdict: Verdict = judge(self.rows, store.meta("policy"), store.meta("plan"), self.findings)

    @cached_property
    def study(self) -> Study | None:
        """Return what each defence leaks and costs, where the spec has a section ``utility``."""
        return study_store(self.store, self.verdict)

    @property
    def worst(self) -> StrongestExample | None:
        """Return the strongest reconstruction of all."""
        return self.verdict.worst

    @cached_property
    def store(self) -> Store:
        """Open the folder for reading: meta data, pictures, curves."""
        return Store.open(self.directory)

    def report(self, path: str | os.PathLike[str] | None = None, *, pictures: bool | None = None) -> Path:
        """Write the HTML report to ``path``, or into the audit's folder, and return where it is."""
        from leakscope.report.page import write_report

        return Path(write_report(self.directory, path, pictures=pictures, verdict=self.verdict))

    def to_frame(self, library: str | None = None) -> Any:
        """Return a data frame of pandas or polars, whichever is installed: a line for every example of every job."""
        return data_frame(audit_table(self.store, self.verdict), library)

    def to_json(self) -> str:
        """Return the document of the command line's ``--json``, whose schema has a version."""
        files = {} if self._temporary is not None else {"folder": Path(os.path.relpath(self.directory)).as_posix()}
        return json_text(audit_document(self.store, self.verdict, files))

    def to_latex(self) -> str:
        """Return the table of settings as a LaTeX ``tabular``."""
        return self.verdict.to_latex()

    def to_sarif(self) -> str:
        """Return the findings as SARIF 2.1.0, which code scanning reads."""
        from leakscope.report.sarif import sarif_log

        return json_text(sarif_log(self.store, self.verdict))

    def _repr_html_(self) -> str:
        audited = [mapping(one) for one in self.store.meta("audited") or ()]
        warned = [str(one.get("text")) for one in audited if one.get("warning")]
        jobs = f"{counted(len(self.rows), 'job')}. Pictures and curves: .report('page.html')."
        return verdict_html(self.verdict, *(f"Warning: {text}" for text in warned), jobs)

    def __str__(self) -> str:
        kept = "a temporary folder" if self._temporary is not None else self.directory
        return f"{self.verdict} {counted(len(self.rows), 'job')} in {kept}."

    def __repr__(self) -> str:
        worst = "nothing recovered" if self.worst is None else f"worst {self.worst.psnr:.1f} dB"
        return f"<Audit: {self.verdict.outcome}, {worst}, {len(self.rows)} jobs, {self.directory}>"
