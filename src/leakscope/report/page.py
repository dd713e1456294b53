"""The page of an audit: one self-contained HTML file. The same store gives the same bytes, whenever and wherever."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from leakscope.contracts.disk import atomic_write
from leakscope.metrics import MEASURES
from leakscope.report import settings, words
from leakscope.report.audited import audited_lines
from leakscope.report.defense_study import study_section
from leakscope.report.export import csv_text, study_table
from leakscope.report.findings import costs_section, embedding_section, updates_section
from leakscope.report.headline import headline_section
from leakscope.report.limits import limits_section
from leakscope.report.pictures import Gallery
from leakscope.report.sentences import REMEDIES, SharedReason, by_remedy, shared_remarks
from leakscope.report.settings import matrix_section
from leakscope.report.template import FileName, fill, write_page
from leakscope.results.defense_study import study_store
from leakscope.results.policy import Policy
from leakscope.results.records import FindingRow, Row, counted, highest, mapping, number, texts
from leakscope.results.store import Store
from leakscope.results.verdict import Verdict, judge_store, left_out, summarise

MAX_DAMAGE = 5
#: The table of a defence study, beside the store.
STUDY_TABLE = "defense-study.csv"
#: What jobs ran with, by the key of it in their results.
_USED = {"Device": "device", "Precision": "dtype", "Threads": "threads"}


def render(directory: FileName, pictures: bool | None = None, verdict: Verdict | None = None) -> str:
    """Return the HTML page of the audit in ``directory``, with ``verdict``, which is made here where none is given.

    ``pictures`` None shows those that are not private or that the audit was told to keep, True all, False none.
    """
    with Store.open(Path(directory)) as store:
        context = build_context(store, pictures, judge_store(store) if verdict is None else verdict)
    return fill("report.html.j2", context)


def write_report(
    directory: FileName, path: FileName | None = None, pictures: bool | None = None, verdict: Verdict | None = None
) -> Path:
    """Write the page of the audit in ``directory`` to ``path``.

    The default is report.html beside the store, and there the table of a defence study too.
    """
    if path is not None:
        return write_page(path, render(directory, pictures, verdict))
    with Store.open(Path(directory)) as store:
        verdict = judge_store(store) if verdict is None else verdict
        study = study_store(store, verdict)
    if study is not None:
        atomic_write(Path(directory) / STUDY_TABLE, csv_text(study_table(study, verdict)).encode("utf-8"))
    return write_page(Path(directory) / "report.html", render(directory, pictures, verdict))


def build_context(store: Store, pictures: bool | None, verdict: Verdict) -> dict[str, Any]:
    meta = {key: mapping(store.meta(key)) for key in ("spec", "versions", "plan", "model", "data", "policy")}
    rows, findings, policy = store.rows(), store.findings(), Policy(**meta["policy"])
    named = verdict.settings
    gallery = Gallery(store, rows, meta["data"], bool(store.meta("pictures")), pictures)
    provenance, audited = _provenance(store, rows, findings), audited_lines(store, rows, verdict)
    return {
        "headline": headline_section(store, verdict, gallery, provenance["finished"]),
        "outcome": verdict.outcome,
        "warnings": [line for line in audited if line["warning"]],
        "audited": [line for line in audited if not line["warning"]],
        "reasons": by_remedy(verdict, _damage(store)),
        "remarks": shared_remarks(verdict),
        "policy": policy_lines(policy),
        "progress": progress(rows, meta["plan"]),
        "threat_model": texts(store.meta("threat_model")),
        "model": meta["model"],
        "data": meta["data"],
        "attempts": [row for row in rows if row.counts],
        "settings": named,
        "summary": settings.settings_section(named, summarise(rows, verdict), meta["data"]),
        "matrix": matrix_section(rows, named),
        "charts": settings.charts(named, policy.max_psnr),
        "gallery": gallery.section(verdict),
        "embedding": embedding_section(findings, named),
        "updates": updates_section(findings, named),
        "limits": limits_section(rows, findings, named),
        "costs": costs_section(findings, named),
        "study": study_section(study_store(store, verdict), named, gallery),
        "curves": settings.curves_section(store, rows),
        "jobs": settings.jobs_section(rows, meta["data"], gallery.labelled),
        "findings": findings,
        "fates": settings.fates(findings, _findings_planned(meta["plan"])),
        "names": {setting.scenario: setting.name for setting in named},
        "flags": sorted(Counter(flag for row in rows for flag in set(row.flags)).items()),
        "measures": MEASURES.values(),
        "provenance": provenance,
        "versions": meta["versions"].items(),
        "spec": yaml.safe_dump(meta["spec"], sort_keys=False, allow_unicode=True, width=100),
    }


def _damage(store: Store) -> list[SharedReason]:
    found = store.damage()
    lines = [f"Job {key[:12]}: {what}" for key, what in list(found.items())[:MAX_DAMAGE]]
    if not lines:
        return []
    more = [f"{counted(len(found) - MAX_DAMAGE, 'more job')} like this"] if len(found) > MAX_DAMAGE else []
    return [SharedReason((), "; ".join(lines + more), REMEDIES["audit-again"])]


def policy_lines(policy: Policy) -> list[str]:
    """The policy in words, a line a measure that it limits.

    >>> policy_lines(Policy(max_identification=0.5))[1:]
    ['A setting also leaks when more than 50 % of examples are identified.']
    """
    lines: list[str] = []
    for limit in policy.limits:
        measure, also = limit.measure, " also" if lines else ""
        if measure.per == "setting":
            labels = measure.of == "labels"
            what = "labels are recovered and more than by chance" if labels else "examples are identified"
            lines.append(f"A setting{also} leaks when more than {words.percent(limit.value)} of {what}.")
            continue
        more = "more" if measure.better == "higher" else "less"
        bound = f"{limit.value:g}{measure.unit and ' '}{measure.unit} or {more}"
        lifted = measure is settings.PSNR and policy.min_lift > 0
        lift = f" and at least {policy.min_lift:g} dB above the zero-information baseline" if lifted else ""
        lines.append(f"An example{also} counts as leaked when its {measure.label} is {bound}{lift}.")
    if policy.waive:
        lines.append(f"The policy allows a pass without the standard attacks {', '.join(policy.waive)}.")
    return lines


def progress(rows: Sequence[Row], plan: Mapping[str, Any]) -> dict[str, Any]:
    """How many of the planned jobs have which fate."""
    count = {status: sum(row.status == status for row in rows) for status in ("done", "failed", "refused")}
    total = plan.get("total")
    planned = total if isinstance(total, int) and total >= len(rows) else len(rows)
    controls, stopped = sum(not row.counts for row in rows), left_out(plan, "stopped")[1]
    missing = max(0, planned - len(rows) - stopped)
    return {**count, "planned": planned, "missing": missing, "stopped": stopped, "controls": controls}


def _findings_planned(plan: Mapping[str, Any]) -> int | None:
    planned, stopped = plan.get("findings"), left_out(plan, "stopped")[0]
    return planned - sum(findings for _, findings in stopped.values()) if isinstance(planned, int) else None


def _provenance(store: Store, rows: Sequence[Row], findings: Sequence[FindingRow]) -> dict[str, Any]:
    done: list[Row | FindingRow] = [*rows, *findings]
    results = [row.result for row in rows if row.result is not None]

    def used(name: str) -> str:
        return ", ".join(sorted({str(one.info[name]) for one in results if one.info.get(name) is not None}))

    return {
        **{key: store.meta(key) for key in ("created", "format", "spec_hash")},
        "finished": max((str(row.finished) for row in done if row.finished), default=""),
        "seconds": math.fsum(s for s in (number(row.seconds) for row in done) if not math.isnan(s)),
        "seeds": sorted({row.job.seed for row in rows}),
        "used": {name: used(key) for name, key in _USED.items()},
        "memory": highest(result.peak_memory_mb for result in results),
    }
