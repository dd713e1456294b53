"""The page of an audit: one self-contained HTML file. The same store gives the same bytes, whenever and wherever."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from leakscope.contracts.disk import atomic_write
from leakscope.metrics import MEASURES
from leakscope.report import jobs, settings, words
from leakscope.report.defense_study import study_section
from leakscope.report.export import csv_text, study_table
from leakscope.report.findings import costs_section, embedding_section, updates_section
from leakscope.report.limits import limits_section
from leakscope.report.pictures import Gallery
from leakscope.report.sentences import REMEDIES, SharedReason, by_remedy, shared_remarks
from leakscope.report.settings import matrix_section
from leakscope.report.template import FileName, fill, write_page
from leakscope.results.defense_study import study_store
from leakscope.results.policy import Policy
from leakscope.results.records import FindingRow, Row, counted, highest, mapping, number, texts
from leakscope.results.setting_verdict import SettingVerdict
from leakscope.results.store import Store
from leakscope.results.summary import summarise
from leakscope.results.verdict import Verdict, judge_store

MAX_DAMAGE = 5
#: The table of a defence study, beside the store.
STUDY_TABLE = "defense-study.csv"
HEADLINES: dict[str, list[str]] = words.TEXTS["headlines"]


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
    summaries = summarise(rows, verdict)
    gallery = Gallery(store, rows, meta["data"], bool(store.meta("pictures")), pictures)
    matrix = matrix_section(rows, named)
    title, subtitle = HEADLINES.get(verdict.outcome, (verdict.outcome, ""))
    if verdict.worst is not None and verdict.worst.leaks:
        subtitle = "At least one private example was recovered beyond what the policy allows."
    return {
        "title": title,
        "subtitle": subtitle,
        "outcome": verdict.outcome,
        "audited": _audited(store.meta("audited")),
        "reasons": by_remedy(verdict, _damage(store)),
        "remarks": shared_remarks(verdict),
        "policy": policy_lines(policy),
        "progress": progress(rows, meta["plan"]),
        "worst": _worst(verdict, named, gallery),
        "threat_model": texts(store.meta("threat_model")),
        "facts": _facts(meta["model"], meta["data"]),
        "protocol": _protocol(rows),
        "model_repr": str(meta["model"].get("repr") or ""),
        "settings": named,
        "summary": settings.settings_table(named, summaries, meta["data"]),
        "all_measures": settings.all_measures(named, summaries),
        "matrix": matrix,
        "charts": settings.charts(named, policy.max_psnr),
        "gallery": gallery.section(verdict),
        "embedding": embedding_section(findings, named),
        "updates": updates_section(findings, named),
        "limits": limits_section(rows, findings, named),
        "costs": costs_section(findings, named),
        "study": study_section(study_store(store, verdict), named, matrix, gallery),
        "curves": jobs.curves_section(store, rows),
        "jobs": jobs.JobTable(rows, named, meta["data"]).section(),
        "findings": findings,
        "fates": jobs.fates(findings, meta["plan"].get("findings")),
        "names": {setting.scenario: setting.name for setting in named},
        "flags": sorted(Counter(flag for row in rows for flag in set(row.flags)).items()),
        "explain_flag": words.explain_flag,
        "measures": MEASURES.values(),
        "provenance": _provenance(store, meta, rows, findings),
        "versions": [(str(name), str(value)) for name, value in meta["versions"].items()],
        "spec": yaml.safe_dump(meta["spec"], sort_keys=False, allow_unicode=True, width=100),
        "credits": str(meta["data"].get("credits") or ""),
        "data_name": str(meta["data"].get("name") or "unnamed data"),
        "model_name": str(meta["model"].get("name") or "unnamed model"),
    }


def _damage(store: Store) -> list[SharedReason]:
    found = store.damage()
    lines = [f"Job {key[:12]}: {what}" for key, what in list(found.items())[:MAX_DAMAGE]]
    if not lines:
        return []
    more = [f"{counted(len(found) - MAX_DAMAGE, 'more job')} like this"] if len(found) > MAX_DAMAGE else []
    return [SharedReason((), "; ".join(lines + more), REMEDIES["audit-again"])]


def _audited(meta: Any) -> list[tuple[str, bool]]:
    """Each line with whether it is a warning; nothing in stores that do not say."""
    lines = meta if isinstance(meta, list) else []
    return [(str(line["text"]), line.get("warning") is True) for line in lines if mapping(line).get("text")]


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
    controls = sum(not row.counts for row in rows)
    return {**count, "planned": planned, "missing": planned - len(rows), "controls": controls}


def _worst(verdict: Verdict, named: Sequence[SettingVerdict], gallery: Gallery) -> dict[str, Any] | None:
    worst = verdict.worst
    if worst is None:
        return None
    original, guess = gallery.pair(worst, "worst")
    setting = next((s for s in named if s.scenario == worst.scenario), None)
    pair = {"label": gallery.label_of(worst), "original": original, "guess": guess}
    return {"example": worst, "setting": setting, **pair}


def _facts(model: Mapping[str, Any], data: Mapping[str, Any]) -> list[tuple[str, str]]:
    parameters = number(model.get("parameters"))
    privacy = "private" if data.get("private", True) else "public"
    names = texts(data.get("class_names"))
    return [
        ("Model", str(model.get("name") or "unnamed")),
        ("Parameters", words.DASH if math.isnan(parameters) else f"{parameters:,.0f}"),
        ("Data", f"{data.get('name') or 'unnamed'} ({privacy})"),
        ("Examples in the data", str(data.get("count", words.DASH))),
        ("Shape of an example", " × ".join(texts(data.get("shape")))),
        ("Task", str(data.get("task") or "")),
        ("Classes", str(data.get("num_classes") or words.DASH)),
        ("Class names", ", ".join((*names[:20], *(("…",) if len(names) > 20 else ())))),
        ("Training", str(model.get("training") or "")),
    ]


def _protocol(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    # The record of a control names no attack where it is a guess.
    rows = [row for row in rows if row.counts]
    return [
        ("How updates are made", list(dict.fromkeys(row.job.protocol for row in rows))),
        ("Examples behind one observation", [str(size) for size in sorted({len(row.job.indices) for row in rows})]),
        ("Defences", list(dict.fromkeys(row.job.defense for row in rows))),
        ("Attacks", list(dict.fromkeys(row.job.attack for row in rows))),
    ]


def _provenance(
    store: Store, meta: Mapping[str, Mapping[str, Any]], rows: Sequence[Row], findings: Sequence[FindingRow]
) -> list[tuple[str, str]]:
    done: list[Row | FindingRow] = [*rows, *findings]
    seconds = math.fsum(s for s in (number(row.seconds) for row in done) if not math.isnan(s))
    results = [row.result for row in rows if row.result is not None]
    memory = highest(result.peak_memory_mb for result in results)

    def used(name: str) -> str:
        values = {str(result.info[name]) for result in results if result.info.get(name) is not None}
        return ", ".join(sorted(values)) or words.DASH

    return [
        ("Created", str(store.meta("created") or words.DASH)),
        ("Last job finished", max((str(row.finished) for row in done if row.finished), default=words.DASH)),
        ("Time of all jobs", words.duration(seconds)),
        ("Seeds", ", ".join(str(seed) for seed in sorted({row.job.seed for row in rows})) or words.DASH),
        ("Device", used("device")),
        ("Precision", used("dtype")),
        ("Threads", used("threads")),
        ("Peak memory", words.DASH if math.isnan(memory) else f"{memory:.0f} MB"),
        ("Store format", str(store.meta("format"))),
        ("Spec hash", str(store.meta("spec_hash") or words.DASH)),
        ("Model fingerprint", str(meta["model"].get("fingerprint") or "")),
        ("Data fingerprint", str(meta["data"].get("fingerprint") or words.DASH)),
    ]
