"""Results for machines: documents of plain JSON values with a versioned schema, and flat tables for CSV.

Labels of private examples stay out (whether a guess is right does not), and so do tracebacks, which name folders.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from leakscope import __version__
from leakscope.contracts.certificate import Certificate
from leakscope.contracts.printable import printable
from leakscope.contracts.tables import shipped_text
from leakscope.metrics import MEASURES
from leakscope.report.audited import audited_lines
from leakscope.report.sentences import advice_text, reason_text, shared_reasons
from leakscope.results.defense_study import Study, StudyRow, study_store
from leakscope.results.reasons import Scenario
from leakscope.results.records import ExampleRecord, FindingRow, Row, mapping, mean, plain, without_folders
from leakscope.results.setting_verdict import SettingVerdict, StrongestExample
from leakscope.results.store import Store
from leakscope.results.verdict import Verdict

#: Version of the schema of each document; it grows when a key is renamed, removed or means something else.
VERSIONS = {"audit": 1, "baseline": 1, "compare": 1, "reproduce": 1, "list": 1, "plan": 1}
_MODEL = ("name", "parameters", "fingerprint", "training")
_DATA = ("name", "private", "shape", "num_classes", "task", "count", "fingerprint")
_JOB = ("protocol", "defense", "attack", "attack_name", "control", "seed", "batch")
_FATE = ("key", "status", "reason", "seconds", "flags")


def document(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` under the name and version of its schema; NaN and infinity are null.

    >>> document("list", {"entries": []})["schema"]
    'leakscope/list/1'
    """
    return {"schema": f"leakscope/{kind}/{VERSIONS[kind]}", "leakscope": __version__, **plain(content)}


@cache
def schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of document, which the package ships."""
    found: dict[str, Any] = json.loads(shipped_text("leakscope.results", f"schemas/{kind}-{VERSIONS[kind]}.json"))
    return found


def audit_document(
    store: Store, verdict: Verdict, files: Mapping[str, str], command: str | None = None
) -> dict[str, Any]:
    """An audit: verdict, settings, every job and finding. ``files`` says where folder and report are.

    ``command`` is what to type next.
    """
    settings = verdict.settings
    names = {setting.scenario: setting.name for setting in settings}
    rows = store.rows()
    content = {
        "outcome": verdict.outcome,
        "exit_code": verdict.exit_code,
        "summary": str(verdict),
        "reasons": [dataclasses.asdict(reason) for reason in shared_reasons(verdict)],
        "advice": _advice(verdict, command),
        "audited": audited_lines(store, rows, verdict),
        "model": _some(store.meta("model"), _MODEL),
        "data": _some(store.meta("data"), _DATA),
        "threat_model": store.meta("threat_model") or [],
        "policy": mapping(store.meta("policy")),
        "versions": mapping(store.meta("versions")),
        "created": store.meta("created"),
        "worst": None if verdict.worst is None else _strongest(verdict.worst, names),
        "settings": [_setting(setting, names) for setting in settings],
        "jobs": [
            {**_row(row, names), "diagnosis": _diagnosis(row), "examples": [_example(e) for e in row.examples]}
            for row in rows
        ],
        "findings": [_finding(finding, names) for finding in store.findings()],
        "study": _study(study_store(store, verdict), names),
        "files": dict(files),
    }
    return document("audit", content)


def audit_table(store: Store, verdict: Verdict) -> list[dict[str, Any]]:
    """A line for every example of every job, and one for each job without a result."""
    names = verdict.names
    measures = dict.fromkeys(measure.key for measure in MEASURES.values())
    blank = {"index": None, "score": None, **_flat_proof(None), **measures}
    lines = []
    for row in store.rows():
        facts = {**_row(row, names), "flags": "; ".join(row.flags)}
        examples = [
            {"index": e.index, "score": e.score, **_flat_proof(e.certificate), **e.values} for e in row.examples
        ] or [{}]
        lines += [plain({**facts, **blank, **{k: v for k, v in e.items() if k in blank}}) for e in examples]
    return lines


def study_table(study: Study, verdict: Verdict) -> list[dict[str, Any]]:
    """A line for every setting of a defence study: what it leaks and what it costs."""
    names = verdict.names
    return [plain(_flat_study_row(row, names)) for row in study.rows]


def json_text(content: Mapping[str, Any]) -> str:
    """A document as it is printed."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    r"""Lines with the same keys as CSV with a head; nothing where a value is missing.

    >>> csv_text([{"name": "a, b", "psnr": None}, {"name": "c", "psnr": 2.5}])
    'name,psnr\n"a, b",\nc,2.5\n'
    """
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return printable(stream.getvalue())


def _advice(verdict: Verdict, command: str | None) -> dict[str, Any] | None:
    """What to do next, in words, as changes of the spec and as a command."""
    advice = verdict.advice
    if advice is None:
        return None
    return {"kind": advice.kind, "text": advice_text(verdict), "changes": advice.changes, "command": command}


def _some(facts: Any, keys: Iterable[str]) -> dict[str, Any]:
    return {key: mapping(facts).get(key) for key in keys}


def _setting(setting: SettingVerdict, names: Mapping[Scenario, str]) -> dict[str, Any]:
    place = ("protocol", "defense", "outcome")
    numbers = ("mean_psnr", "interval", "baseline_psnr", "allowed_psnr", "identification", "label_accuracy")
    counts = ("label_baseline", "flags", "done", "failed", "refused", "missing")
    return {
        "name": setting.name,
        "title": setting.short,
        **{name: getattr(setting, name) for name in (*place, *numbers, *counts)},
        "scale": None if setting.scale is None else dataclasses.asdict(setting.scale),
        "remarks": [reason_text(remark) for remark in setting.remarks],
        "certified": sum(example.certified for example in setting.examples),
        "reasons": [reason.as_dict() for reason in setting.reasons],
        "examples": [_strongest(example, names) for example in setting.examples],
    }


def _strongest(example: StrongestExample, names: Mapping[Scenario, str]) -> dict[str, Any]:
    same = ("index", "attack", "attack_name", "seed", "key", "leaks", "baseline_psnr", "lift", "values")
    return {"setting": names[example.scenario], **{n: getattr(example, n) for n in same}, **_proof(example)}


def _row(row: Row, names: Mapping[Scenario, str]) -> dict[str, Any]:
    return {
        "setting": names.get(row.job.scenario) if row.counts else None,  # a control serves every defence
        **{name: getattr(row.job, name) for name in _JOB},
        **{name: getattr(row, name) for name in _FATE},
    }


def _example(example: ExampleRecord) -> dict[str, Any]:
    return {"index": example.index, "score": example.score, **_proof(example), "values": dict(example.values)}


def _proof(example: ExampleRecord) -> dict[str, Any]:
    proof = example.certificate
    return {"certified": example.certified, "certificate": None if proof is None else dataclasses.asdict(proof)}


def _flat_proof(proof: Certificate | None) -> dict[str, Any]:
    facts = {} if proof is None else dataclasses.asdict(proof)
    flat = {f"certificate_{field.name}": facts.get(field.name) for field in dataclasses.fields(Certificate)}
    return {"certified": None if proof is None else proof.holds, **flat}


def _diagnosis(row: Row) -> dict[str, Any] | None:
    found = None if row.result is None else row.result.diagnosis
    return None if found is None else {"outcome": found.outcome, "reason": without_folders(found.reason)}


def _study(study: Study | None, names: Mapping[Scenario, str]) -> dict[str, Any] | None:
    if study is None:
        return None
    rows = [
        {**_study_row(row, names), "training": row.training and dataclasses.asdict(row.training)} for row in study.rows
    ]
    choices = [
        {
            "protocol": choice.protocol,
            "limits": list(choice.limits),
            "setting": None if choice.row is None else names.get(choice.row.scenario),
            "alike": [names.get(row.scenario) for row in choice.alike],
        }
        for choice in study.choices
    ]
    worths = [{"setting": names.get(worth.scenario), **dataclasses.asdict(worth)} for worth in study.worths]
    facts = {"tolerance": study.tolerance, "utility": "accuracy" if study.accuracy else "negative test loss"}
    return {**facts, "rows": rows, "choices": choices, "worth_of_knowing": worths}


def _study_row(row: StudyRow, names: Mapping[Scenario, str]) -> dict[str, Any]:
    same = [field.name for field in dataclasses.fields(row) if field.name != "training"]
    facts = {name: getattr(row, name) for name in same} | {"doubts": [reason_text(doubt) for doubt in row.doubts]}
    better = names.get(Scenario(row.protocol, row.beaten_by or ""))
    return {"setting": names.get(row.scenario), **facts, "beaten_by": better}


def _flat_study_row(row: StudyRow, names: Mapping[Scenario, str]) -> dict[str, Any]:
    """A row with the ends of its intervals side by side, and of its trainings the means."""
    flat: dict[str, Any] = {}
    for name, value in _study_row(row, names).items():
        if name.endswith("_interval"):
            stem = name.removesuffix("_interval")
            flat |= {f"{stem}_low": value[0], f"{stem}_high": value[1]}
        else:
            flat[name] = "; ".join(value) if name == "doubts" else value
    training = row.training
    if training is None:
        return {**flat, **dict.fromkeys(("seeds", "loss", "test_loss", "diverged", "chance", "epsilon"))}
    losses = {"loss": mean(training.losses), "test_loss": mean(training.test_losses)}
    rest = {name: getattr(training, name) for name in ("diverged", "chance", "epsilon")}
    return {**flat, "seeds": len(training.seeds), **losses, **rest}


def _finding(finding: FindingRow, names: Mapping[Scenario, str]) -> dict[str, Any]:
    same = ("kind", "protocol", "defense", "seed", "batch", "key", "status", "reason", "seconds", "content")
    return {"setting": names.get(finding.scenario), **{name: getattr(finding, name) for name in same}}
