"""Run an audit in one call: check everything, then run what is not done yet, then judge; the result of an audit."""

import os
import secrets
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from leakscope.audit.agenda import Agenda, Budget, Spared, count_left_out, in_turn
from leakscope.audit.attempts import Outcome
from leakscope.audit.estimate import kinds_of
from leakscope.audit.exceeded import Exceeded
from leakscope.audit.executors import EXECUTORS, Executor
from leakscope.audit.folder import open_store
from leakscope.audit.plan import Job, Plan, describe, make_plan
from leakscope.audit.progress import Tell, listener, scenario_name
from leakscope.audit.quick import quickened
from leakscope.audit.sections import span
from leakscope.audit.setup import Setup, build_setup, rehearse
from leakscope.audit.spec import AuditSpec, load_spec, spec_with
from leakscope.audit.yaml_text import SpecError
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.tables import data_frame
from leakscope.report.attack_table import AttackTable, attack_table
from leakscope.report.audited import audited_lines
from leakscope.report.export import audit_document, audit_table, json_text
from leakscope.report.sentences import reason_text
from leakscope.results.defense_study import Study, study_store
from leakscope.results.records import FindingRow, Row, counted, job_facts
from leakscope.results.setting_verdict import StrongestExample
from leakscope.results.store import Store, stored_salt
from leakscope.results.verdict import Verdict, judge_store, verdict_html


class Audit:
    """A finished audit: rows, findings and verdict, read from its folder."""

    def __init__(self, directory: Path, temporary: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.directory = directory
        self._temporary = temporary  # a folder nobody asked for goes when the audit is no longer in use
        with Store.open(directory) as store:
            self.rows: list[Row] = store.rows()
            self.findings: list[FindingRow] = store.findings()
            self.verdict: Verdict = judge_store(store)

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

    def attack_table(self, measure: str = "psnr") -> AttackTable:
        """Return the table of attacks and defences, with the spread over seeds; it has ``to_latex`` and ``to_csv``."""
        return attack_table(self.rows, measure)

    def to_sarif(self) -> str:
        """Return the findings as SARIF 2.1.0, which code scanning reads."""
        from leakscope.report.sarif import sarif_log

        return json_text(sarif_log(self.store, self.verdict))

    def _repr_html_(self) -> str:
        warned = [line["text"] for line in audited_lines(self.store, self.rows, self.verdict) if line["warning"]]
        jobs = f"{counted(len(self.rows), 'job')}. Pictures and curves: .report('page.html')."
        return verdict_html(self.verdict, *(f"Warning: {text}" for text in warned), jobs)

    def __str__(self) -> str:
        kept = "a temporary folder" if self._temporary is not None else self.directory
        return f"{self.verdict} {counted(len(self.rows), 'job')} in {kept}."

    def __repr__(self) -> str:
        worst = "nothing recovered" if self.worst is None else f"worst {self.worst.psnr:.1f} dB"
        return f"<Audit: {self.verdict.outcome}, {worst}, {len(self.rows)} jobs, {self.directory}>"


#: What :func:`audit` takes where it is not told.
_DEFAULTS = {"protocols": "fedsgd", "defenses": "none", "attacks": "standard", "seeds": [0]}


def audit(
    *,
    model: Any = None,
    data: Any = None,
    spec: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    protocol: Any = None,
    protocols: Any = None,
    defenses: Any = None,
    attacks: Any = None,
    knowledge: Any = None,
    seeds: Any = None,
    value_range: ValueRange | None = None,
    num_classes: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Tell | bool | None = None,
    quick: bool = False,
    **settings: Any,
) -> Audit:
    """Audit ``model`` on ``data``: names as in a spec, or objects; or run a ``spec``, a YAML file's path or a mapping.

    What is given beside a ``spec`` stands in the place of its own keys. Without one the protocol is FedSGD, there is no
    defence, the attacks are the standard ones, and there is one seed.

    ``model`` may be a torch module, ``data`` a pair (x, y) of tensors or numpy arrays or a torch Dataset or DataLoader
    with ``num_classes`` classes and inputs within ``value_range``. The remaining ``settings`` are those of a spec:
    training, examples, batch, policy, executor, budget, ... Rows are kept in ``out``, which is resumed if it exists, or
    else in a temporary folder that lives as long as the result. ``progress``: False shows nothing, True a bar; None a
    bar on terminals and in notebooks and elsewhere a line now and then, always on standard error; or a function of
    events, see :func:`run_spec`. ``quick``: a first answer in minutes.
    """
    if protocol is not None and protocols is not None:
        raise SpecError(["protocol: expected protocol or protocols, got both"], "audit")
    given = {
        "model": model,
        "data": None if data is None else _examples(data, value_range, num_classes, settings),
        "protocols": protocols if protocols is not None else protocol,
        "defenses": defenses,
        "attacks": attacks,
        "knowledge": knowledge,
        "seeds": seeds if seeds is None or isinstance(seeds, int) else list(seeds),
    }
    wanted = {**{name: value for name, value in given.items() if value is not None}, **settings}
    if isinstance(spec, str | os.PathLike):
        parsed = spec_with(Path(spec), wanted)
    elif spec is None and (lacking := [name for name in ("model", "data") if name not in wanted]):
        raise SpecError([f"{name}: expected one, or spec=..., got none" for name in lacking], "audit")
    else:
        parsed = AuditSpec.parse({**(_DEFAULTS if spec is None else spec), **wanted}, "audit")
    return run_spec(quickened(parsed) if quick else parsed, out, progress)


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
    - for each trial of a few steps {"event": "timing", "key", "position", "job"};
    - after these {"event": "estimated", "seconds", "at_least", "jobs", "workers",
      "by_attack", "kinds", "advice", "budget", "long"}; the advice is None unless it takes ``long``;
    - where a scenario exceeds the policy beyond doubt {"event": "exceeded", "scenario", "reason", "example", "stops"}:
      why, and whether its rest is left out; then {"event": "left out", "kinds", "total"}: what, and how many jobs stay;
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
    scales = rehearse(setup)
    jobs = make_plan(setup)
    spared = None if spec.budget is None else Spared(setup, jobs)
    agenda = Agenda(Budget(spec.budget), spared, Exceeded(setup, jobs), spec.stops_on_leak)
    limits = spec.workers, spec.timeout, estimates, agenda
    executor: Executor = EXECUTORS.target(spec.executor.name)(*limits, **spec.executor.options)
    executor.check(setup)
    temporary = tempfile.TemporaryDirectory(prefix="leakscope-") if out is None else None
    directory = Path(temporary.name if temporary is not None else str(out))
    try:
        store, plan = open_store(setup, Plan.of(setup, jobs), directory, scales)
        with store:
            _run(setup, plan.numbered(jobs), store, plan, executor, agenda, progress)
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
    setup: Setup, jobs: list[Job], store: Store, plan: Plan, executor: Executor, agenda: Agenda, progress: Tell | None
) -> None:
    status = store.finished()
    # What failed may have failed for a passing reason, such as memory, and is tried again.
    todo = [job for job in jobs if status.get(job.key) not in ("done", "refused")]
    recorded: set[str] = set()
    told: set[str] = set()  # jobs that are known to be left out
    completed, total = len(jobs) - len(todo), len(jobs)

    def emit(event: dict[str, Any]) -> None:
        if progress is not None and "job" in event:
            job: Job = event["job"]
            facts = {**job_facts(describe(setup, job)), "finding": job.finding}
            progress({**event, "job": facts, "key": job.key, "position": job.position})
        elif progress is not None:
            progress(event)

    def stopped() -> list[Job]:
        return [job for job in todo if job.key not in recorded and agenda.stops(job)]

    def learn(job: Job, row: Row) -> None:
        nonlocal total
        before = agenda.changes
        reasons = agenda.learn(job, row)
        if agenda.changes == before:
            return
        now = {job.key: job for job in stopped()}
        total = len(jobs) - len(now)
        left_out = kinds_of(setup, (job for key, job in now.items() if key not in told))
        told.update(now)
        for reason in reasons if todo else ():
            facts = {"scenario": scenario_name(reason), "reason": reason_text(reason), "example": reason.example}
            emit({"event": "exceeded", **facts, "stops": agenda.stop})
        if left_out:
            emit({"event": "left out", "kinds": left_out, "total": total})

    def record(job: Job, outcome: Outcome) -> None:
        nonlocal completed, total
        recorded.add(job.key)
        completed += 1
        if job.key in told:  # it was under way when its scenario stopped
            told.remove(job.key)
            total += 1
        examples = (outcome.result or {}).get("examples", []) if job.finding is None else []
        facts = {"status": outcome.status, "seconds": outcome.seconds, "error": outcome.error}
        psnr = max((e["psnr"] for e in examples if e["psnr"] is not None), default=None)
        if job.finding is None:
            row = outcome.row(setup, job)
            store.record(row, outcome.tensors, outcome.history)
            learn(job, row)
        else:
            store.record_finding(outcome.finding(setup, job))
        emit({"event": "finished", "job": job, **facts, "psnr": psnr, "completed": completed, "total": total})

    if progress is not None:
        progress({"event": "planned", "total": total, "finished": completed})
    open_before = {job.key for job in todo}
    rows = {row.key: row for row in store.rows()}
    for job in jobs:
        if job.key in rows and job.key not in open_before:
            learn(job, rows[job.key])
    executor.run(setup, in_turn(setup, [job for job in todo if not agenda.stops(job)]), emit=emit, record=record)
    # What fails twice fails for a lasting reason, so that no remedy names a third run.
    failed = sorted(key for key, fate in store.finished().items() if fate == status.get(key) == "failed")
    if failed:
        store.set_meta("plan", {**store.meta("plan"), "failed_again": failed})
    _tell_what_was_left_out(store, plan, jobs, [job for job in todo if job.key not in recorded], agenda)


def _tell_what_was_left_out(store: Store, plan: Plan, jobs: list[Job], left: list[Job], agenda: Agenda) -> None:
    """Keep in the plan which jobs are ``left``, and why; those of earlier runs stay stopped until they are run."""
    now = {job.key for job in jobs}
    stopped = {job.key for job in left if agenda.stops(job)}
    open_jobs = [job for job in left if job.key not in stopped]
    spared = {job.key for job in open_jobs if agenda.passes_over(job)}
    stopped |= {key for key in store.meta("stopped") or () if key not in now}
    told: dict[str, Any] = {
        name: count_left_out(plan, keys) for name, keys in (("stopped", stopped), ("spared", spared)) if keys
    }
    if agenda.budget.seconds is not None and len(spared) < len(open_jobs):
        told["budget"] = span(agenda.budget.seconds)
    store.set_meta("stopped", sorted(stopped))
    if told:
        store.set_meta("plan", {**store.meta("plan"), **told})
