"""Findings of an audit as SARIF 2.1.0, which code scanning reads: a pure function of the store and its verdict.

Each setting gives one result for each kind of leak, one for its doubts and one for remarks; within policy it gives
none. Fingerprints are made of what a finding is about, not of its numbers: the same leak is the same alert tomorrow.
Findings point to a place in somebody's files; no folder of a machine is told.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

from pydantic import Field, TypeAdapter, ValidationError

from leakscope import __version__
from leakscope.contracts.printable import printable
from leakscope.report.sentences import over_examples, strongest_words
from leakscope.report.words import TEXTS
from leakscope.results.reasons import Reason
from leakscope.results.records import mapping, plain
from leakscope.results.setting_verdict import SettingVerdict
from leakscope.results.store import Store
from leakscope.results.verdict import Verdict

_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Point to a line of a file, relative to the repository, or to the installed packages where it is ``installed``."""

    file: Annotated[str, Field(min_length=1)]
    line: Annotated[int, Field(ge=1)] = 1
    installed: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """Point to the spec, or else the model; ``model`` is where that is made, if elsewhere. Tables are by repr."""

    whole: Place
    protocols: Mapping[str, Place] = field(default_factory=dict)
    defenses: Mapping[str, Place] = field(default_factory=dict)
    #: Where the model is made, if that is another place.
    model: Place | None = None

    def of_setting(self, protocol: str, defense: str) -> Place:
        """Return the line that asks for a setting: its defence's, its protocol's, or that of the whole."""
        return self.defenses.get(defense) or self.protocols.get(protocol) or self.whole

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, raw: Any) -> Self | None:
        """Read what a store says; None where it says nothing that can be used."""
        with suppress(ValidationError):
            return TypeAdapter(cls).validate_python(raw)
        return None


def place_of(path: str | os.PathLike[str], line: int = 1, root: Path | None = None) -> Place:
    """Return a line of ``path`` relative to ``root``, else its repository, else the current folder, else by name only.

    >>> place_of("/x/lib/python3.11/site-packages/torch/nn/modules/linear.py", 3)
    Place(file='torch/nn/modules/linear.py', line=3, installed=True)
    >>> place_of("/home/ann/project/leakscope.yaml", root=Path("/home/ann/project")).file
    'leakscope.yaml'
    """
    file = Path(os.path.abspath(path))
    for folder in _INSTALLED:
        if folder in file.parts:
            inside = file.parts[len(file.parts) - file.parts[::-1].index(folder) :]
            return Place(file="/".join(inside), line=line, installed=True)
    repository = next((folder for folder in file.parents if (folder / ".git").exists()), None)
    for candidate in (root, repository, Path.cwd()):
        # What is relative to the root of the disk tells every folder.
        if candidate is not None and candidate != Path(candidate.anchor) and file.is_relative_to(candidate):
            return Place(file=file.relative_to(candidate).as_posix(), line=line)
    return Place(file=file.name, line=line)


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
    log: dict[str, Any] = _shown(plain({"$schema": SCHEMA_URI, "version": "2.1.0", "runs": [run]}))
    return log


def _shown(value: Any) -> Any:
    """Escape every text within, for viewers show them as they are."""
    if isinstance(value, dict):
        return {printable(key): _shown(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return printable(value) if isinstance(value, str) else value


_BASES = {REPOSITORY: "The root of the audited repository.", PACKAGES: "The folder of installed Python packages."}


@dataclass(frozen=True)
class _Finding:
    """Reasons on a setting, or on the whole audit, that fall under one rule."""

    rule: Rule
    reasons: list[Reason]
    setting: SettingVerdict | None = None


def _findings(verdict: Verdict) -> Iterator[_Finding]:
    if verdict.outcome == "nothing audited":
        yield _Finding(RULES["nothing"], verdict.reasons)
        return
    for setting in verdict.settings:
        reasons = setting.reasons
        for kind in dict.fromkeys(reason.kind for reason in reasons):
            yield _Finding(RULES[kind], [r for r in reasons if r.kind == kind], setting)
        if setting.remarks:
            yield _Finding(RULES["remark"], setting.remarks, setting)
    if verdict.doubts_of_all:
        yield _Finding(RULES["doubt"], verdict.doubts_of_all)


def _result(finding: _Finding, source: Source, model: str) -> dict[str, Any]:
    setting = finding.setting
    where = source.whole if setting is None else source.of_setting(*setting.scenario)
    subject = ("whole", "audit") if setting is None else setting.scenario
    title = "The audit" if setting is None else setting.short
    told = [f"{text}. {remedy}." if remedy else f"{text}." for text, remedy, _ in over_examples(finding.reasons)]
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
