"""Findings of an audit as SARIF 2.1.0, which code scanning reads: a pure function of the store and its verdict.

Each setting gives one result for each kind of leak, one for its doubts and one for remarks; within policy it gives
none. Fingerprints are made of what a finding is about, not of its numbers: the same leak is the same alert tomorrow.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from leakscope import __version__
from leakscope.report.sentences import over_examples, strongest_words
from leakscope.report.words import TEXTS
from leakscope.results.reasons import Reason
from leakscope.results.records import mapping, plain
from leakscope.results.setting_verdict import SettingVerdict
from leakscope.results.source import Place, Source
from leakscope.results.store import Store
from leakscope.results.verdict import Verdict

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
#: Name of the folders that addresses are relative to; where they are is the reader's business.
REPOSITORY, PACKAGES = "%SRCROOT%", "SITE_PACKAGES"
Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Rule:
    """A kind of finding. ``severity`` as code scanning grades security findings, 0 to 10; None: no finding of it."""

    id: str
    name: str
    level: Level
    summary: str
    help: str
    severity: float | None = None

    def as_dict(self) -> dict[str, Any]:
        tags = ["privacy", *(["security"] if self.severity is not None else [])]
        graded = {} if self.severity is None else {"security-severity": f"{self.severity:.1f}"}
        return {
            "id": self.id,
            "name": self.name,
            "shortDescription": {"text": self.summary},
            "fullDescription": {"text": f"{self.summary}. {self.help}"},
            "help": {"text": self.help, "markdown": f"**{self.summary}.** {self.help}"},
            "defaultConfiguration": {"level": self.level},
            "properties": {"tags": tags, "precision": "high", **graded},
        }


#: Every kind of finding, by the kind of its reasons.
RULES: Mapping[str, Rule] = {kind: Rule(**facts) for kind, facts in TEXTS["rules"].items()}


def sarif_log(store: Store, verdict: Verdict, source: Source | None = None) -> dict[str, Any]:
    """The log of an audit. ``source`` says where findings point to, instead of what the store says."""
    place = source or Source.read(store.meta("source")) or Source(whole=Place(file="leakscope.yaml"))
    model = mapping(store.meta("model"))
    results = [_result(finding, place, str(model.get("name") or "model")) for finding in _findings(verdict)]
    rules = [rule.as_dict() for rule in RULES.values()]
    positions = {rule["id"]: position for position, rule in enumerate(rules)}
    worst = None if verdict.worst is None else verdict.worst.psnr
    run = {
        "tool": {"driver": {"name": "leakscope", "version": __version__, "rules": rules}},
        "automationDetails": {"id": f"leakscope/{place.whole.file}/"},
        "invocations": [{"executionSuccessful": True, "exitCode": verdict.exit_code}],
        "originalUriBaseIds": {base: {"description": {"text": words}} for base, words in _BASES.items()},
        "results": [{**result, "ruleIndex": positions[result["ruleId"]]} for result in results],
        "properties": {"outcome": verdict.outcome, "worstPsnr": worst, "summary": str(verdict)},
    }
    log: dict[str, Any] = plain({"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]})
    return log


_BASES = {REPOSITORY: "The root of the audited repository.", PACKAGES: "The folder of installed Python packages."}


@dataclass(frozen=True)
class _Finding:
    """Sentences on a setting, or on the whole audit, that fall under one rule; each with its remedy."""

    rule: Rule
    sentences: list[tuple[str, str]]
    reasons: list[Reason]
    setting: SettingVerdict | None = None


def _findings(verdict: Verdict) -> Iterator[_Finding]:
    if verdict.outcome == "nothing audited":
        yield _Finding(RULES["nothing"], *_told(verdict.reasons))
        return
    for setting in verdict.settings:
        reasons = setting.reasons
        for kind in dict.fromkeys(reason.kind for reason in reasons):
            yield _Finding(RULES[kind], *_told([r for r in reasons if r.kind == kind]), setting)
        if setting.remarks:
            yield _Finding(RULES["remark"], *_told(setting.remarks), setting)
    if verdict.doubts_of_all:
        yield _Finding(RULES["doubt"], *_told(verdict.doubts_of_all))


def _told(reasons: list[Reason]) -> tuple[list[tuple[str, str]], list[Reason]]:
    return [(text, remedy) for text, remedy, _ in over_examples(reasons)], reasons


def _result(finding: _Finding, source: Source, model: str) -> dict[str, Any]:
    setting = finding.setting
    where = source.whole if setting is None else source.of_setting(*setting.scenario)
    subject = ("whole", "audit") if setting is None else setting.scenario
    title = "The audit" if setting is None else setting.short
    told = [f"{text}. {remedy}." if remedy else f"{text}." for text, remedy in finding.sentences]
    if setting is not None and finding.rule is RULES["reconstruction"]:
        told += [f"{line}." for line in strongest_words([e for e in setting.examples if e.leaks])]
    prints = "|".join([finding.rule.id, source.whole.file, model, *subject])
    fingerprint = hashlib.sha256(prints.encode()).hexdigest()[:32]
    related = {} if source.model is None else {"relatedLocations": [_location(source.model, "The model is made here.")]}
    facts = {} if setting is None else _facts(setting)
    return {
        "ruleId": finding.rule.id,
        "level": finding.rule.level,
        "message": {"text": f"{title}: {' '.join(told)}"},
        "locations": [_location(where)],
        # Code scanning knows the first; the second says what it is made of, should that ever change.
        "partialFingerprints": {"primaryLocationLineHash": f"{fingerprint}:1", "leakscopeFinding/v1": fingerprint},
        **related,
        "properties": {**facts, "reasons": [reason.as_dict() for reason in finding.reasons]},
    }


def _location(place: Place, message: str | None = None) -> dict[str, Any]:
    artifact = {"uri": quote(place.file), "uriBaseId": PACKAGES if place.installed else REPOSITORY}
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": place.line}}}
    return location if message is None else {"id": 1, **location, "message": {"text": message}}


def _facts(setting: SettingVerdict) -> dict[str, Any]:
    names = ("protocol", "defense", "outcome", "mean_psnr", "baseline_psnr", "identification", "label_accuracy")
    return {
        **{name: getattr(setting, name) for name in names},
        "leaking_examples": [example.index for example in setting.examples if example.leaks],
        "certified_examples": [example.index for example in setting.examples if example.certified],
        "certificates": [
            {"example": example.index, "certified": example.certified, **dataclasses.asdict(example.certificate)}
            for example in setting.examples
            if example.certificate is not None
        ],
    }
