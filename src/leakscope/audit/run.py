"""Run an audit in one call: check everything, then run what is not done yet, then judge; the result of an audit."""

import os
import secrets
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from leakscope.audit.attempts import Outcome
from leakscope.audit.executors import EXECUTORS, Executor
from leakscope.audit.folder import open_store
from leakscope.audit.plan import Budget, Job, Plan, Spared, describe, grouped, in_turn, make_plan
from leakscope.audit.progress import Tell, listener
from leakscope.audit.sections import span
from leakscope.audit.setup import Setup, build_setup, rehearse
from leakscope.audit.spec import AuditSpec, load_spec
from leakscope.audit.yaml_text import SpecError
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.tables import data_frame
from leakscope.report.export import audit_document, audit_table, json_text
from leakscope.results.defense_study import Study, study_store
from leakscope.results.records import FindingRow, Row, counted, job_facts, mapping
from leakscope.results.setting_verdict import StrongestExample
from leakscope.results.store import Store, stored_salt
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


def audit(
    *,
    model: Any,
    data: Any,
    protocol: Any = None,
    protocols: Any = None,
    defenses: Any = None,
    attacks: Any = "standard",
    knowledge: Any = None,
    seeds: Any = (0,),
    value_range: ValueRange | None = None,
    num_classes: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Tell | bool | None = None,
    **settings: Any,
) -> Audit:
    """Audit ``model`` on ``data``: names as in a spec, or objects.

    ``model`` may be a torch module, ``data`` a pair (x, y) of tensors or numpy arrays or a torch Dataset or DataLoader
    with ``num_classes`` classes and inputs within ``value_range``. The remaining ``settings`` are those of a spec:
    training, examples, batch, policy, executor, budget, ... Rows are kept in ``out``, which is resumed if it exists, or
    else in a temporary folder that lives as long as the result. ``progress``: False shows nothing, True a bar; None a
    bar on terminals and in notebooks and elsewhere a line now and then, always on standard error; or a function of
    events, see :func:`run_spec`.
    """
    if protocol is not None and protocols is not None:
        raise SpecError(["protocol: expected protocol or protocols, got both"], "audit")
    chosen = protocols if protocols is not None else protocol
    wanted: dict[str, Any] = {
        "model": model,
        "data": _examples(data, value_range, num_classes, settings),
        "protocols": "fedsgd" if chosen is None else chosen,
        "defenses": "none" if defenses is None else defenses,
        "attacks": attacks,
        "knowledge": knowledge,
        "seeds": seeds if isinstance(seeds, int) else list(seeds),
        **settings,
    }
    return run_spec(AuditSpec.parse(wanted, "audit"), out, progress)


def run_spec(
    spec: AuditSpec | Mapping[str, Any] | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    progress: Tell | bool | None = None,
    *,
    allow_code: bool = False,
) -> Audit:
    """Run a spec (checked, a mapping, or a YAML file's path) in the folder ``out``, resuming what is there.

    ``allow_code``: code named in a file may come from any installed package, see :func:`load_spec`. ``progress`` is as
    in :func:`audit`; a function gets these events:

    - where the spec asks for training, {"event": "trained", "done", "total", "loss"} after each round;
    - {"event": "planned", "total", "finished"};
    - where nobody said how many workers, {"event": "workers", "workers", "reason"};
    - after a trial of a few steps of each attack {"event": "estimated", "seconds", "jobs", "by_attack", "advice",
      "budget"}; the advice is None unless it will take long;
    - for each job {"event": "started"}, {"event": "advanced", "done", "total", "value"} and {"event": "finished",
      "status", "seconds", "error", "psnr", "completed", "total"}, each with "key", "position" and "job" as in the
      store, whose "finding" is the kind of finding where it is no attempt.
    """
    checked = load_spec(spec, allow_code=allow_code)
    with listener(progress) as (tell, estimates):
        return _audit(checked, out, tell, estimates)


def _audit(spec: AuditSpec, out: str | os.PathLike[str] | None, progress: Tell | None, estimates: bool) -> Audit:
    def trained(done: int, total: int, loss: float) -> None:
        if progress is not None:
            progress({"event": "trained", "done": done, "total": total, "loss": loss})

    # Keys of jobs hold fingerprints, so that the salt of a store that is there is needed before its jobs are planned.
    salt = None if out is None else stored_salt(out)
    setup = build_setup(spec, trained, secrets.token_hex(16) if salt is None else salt)
    rehearse(setup)
    jobs = make_plan(setup)
    spared = Spared(setup, jobs)
    limits = spec.workers, spec.timeout, estimates, Budget(spec.budget, spared)
    executor: Executor = EXECUTORS.target(spec.executor.name)(*limits, **spec.executor.options)
    executor.check(setup)
    temporary = tempfile.TemporaryDirectory(prefix="leakscope-") if out is None else None
    directory = Path(temporary.name if temporary is not None else str(out))
    try:
        store, plan = open_store(setup, Plan.of(setup, jobs), directory)
        with store:
            _run(setup, plan.numbered(jobs), store, executor, spared, progress)
        return Audit(directory, temporary)
    except BaseException:
        if temporary is not None:
            temporary.cleanup()
        raise


def _examples(data: Any, value_range: ValueRange | None, num_classes: int | None, settings: Mapping[str, Any]) -> Any:
    if isinstance(data, str | Mapping) and value_range is None and num_classes is None:
        return data
    from leakscope.data import READ_AT_MOST, from_object

    asked = settings.get("examples")
    # Training is on all of a dataset; an audit alone needs what it attacks and what it compares with.
    trains = settings.get("training") is not None or settings.get("utility") is not None
    limit = None if trains else max(READ_AT_MOST, asked if isinstance(asked, int) else 0)
    try:
        return from_object(data, limit=limit, num_classes=num_classes, value_range=value_range)
    except (TypeError, ValueError) as error:
        raise SpecError([f"data: {error}"], "audit") from error


def _run(
    setup: Setup, jobs: list[Job], store: Store, executor: Executor, spared: Spared, progress: Tell | None
) -> None:
    status = store.finished()
    # What failed may have failed for a passing reason, such as memory, and is tried again.
    todo = [job for job in jobs if status.get(job.key) not in ("done", "refused")]
    completed = len(jobs) - len(todo)
    budget = setup.spec.budget
    if budget is not None:
        spared.learn_rows(jobs, store.rows())
    recorded: set[str] = set()

    def emit(event: dict[str, Any]) -> None:
        if progress is not None and "job" in event:
            job: Job = event["job"]
            facts = {**job_facts(describe(setup, job)), "finding": job.finding}
            progress({**event, "job": facts, "key": job.key, "position": job.position})
        elif progress is not None:
            progress(event)

    def record(job: Job, outcome: Outcome) -> None:
        nonlocal completed
        recorded.add(job.key)
        if job.finding is None:
            row = outcome.row(setup, job)
            store.record(row, outcome.tensors, outcome.history)
            spared.learn(job, row.result)
        else:
            store.record_finding(outcome.finding(setup, job))
        completed += 1
        examples = (outcome.result or {}).get("examples", []) if job.finding is None else []
        facts = {"status": outcome.status, "seconds": outcome.seconds, "error": outcome.error}
        psnr = max((e["psnr"] for e in examples if e["psnr"] is not None), default=None)
        emit({"event": "finished", "job": job, **facts, "psnr": psnr, "completed": completed, "total": len(jobs)})

    if progress is not None:
        progress({"event": "planned", "total": len(jobs), "finished": completed})
    groups = grouped(setup, todo) if budget is None else in_turn(setup, todo)
    executor.run(setup, groups, emit=emit, record=record)
    if budget is None:
        return
    passed_over = [job for job in todo if job.key not in recorded and spared.spares(job)]
    told: dict[str, Any] = {"spared": spared.meta(passed_over)} if passed_over else {}
    if completed + len(passed_over) < len(jobs):
        told["budget"] = span(budget)
    if told:
        store.set_meta("plan", {**store.meta("plan"), **told})
