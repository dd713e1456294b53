"""Leaks that somebody knows of and accepts for now, in a file of the repository: what is new or worse is not accepted.

Doubts cannot be accepted, as what is not known has no size, nor leaks of another audit, which may only look harmless.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from leakscope.contracts.checks import BYTES
from leakscope.contracts.disk import atomic_write, read_json, read_whole
from leakscope.contracts.errors import UserError
from leakscope.report.export import VERSIONS, document, json_text
from leakscope.results.reasons import InScenario
from leakscope.results.records import mapping, number, plain
from leakscope.results.setting_verdict import SettingVerdict
from leakscope.results.store import Store, differences
from leakscope.results.verdict import Verdict

#: Decibels above which a reconstruction is a copy, and more of them mean nothing.
EXACT = 60.0
#: Decibels by which the same audit may differ between machines.
TOLERANCE = 1.0
#: A number that is null where it was not measured.
Number = Annotated[float, BeforeValidator(number)]
_SHARES = {"identification": "of the examples are identified", "labels": "of the labels are recovered"}
#: What must be the same for two results to be compared.
_ASKED = ("attacks", "knowledge", "seeds", "batch", "task", "training", "dtype")


@dataclass(frozen=True, kw_only=True)
class SettingLeaks(InScenario):
    """What leaks in one setting: PSNR of each leaking example (NaN where another measure says so), and shares."""

    protocol: str
    defense: str
    examples: Mapping[int, Number] = field(default_factory=dict)
    shares: Mapping[str, Number] = field(default_factory=dict)

    @classmethod
    def of(cls, setting: SettingVerdict) -> Self:
        kinds = {reason.kind for reason in setting.reasons}
        known = {"identification": setting.identification, "labels": setting.label_accuracy}
        return cls(
            protocol=setting.protocol,
            defense=setting.defense,
            examples={e.index: min(round(e.psnr, 1), EXACT) for e in setting.examples if e.leaks},
            shares={kind: round(share, 4) for kind, share in known.items() if kind in kinds},
        )


@dataclass(frozen=True, kw_only=True)
class AcceptedLeaks:
    """The leaks of one audit that are accepted; ``audited`` says what audit that was."""

    audited: Mapping[str, Any]
    settings: tuple[SettingLeaks, ...] = ()

    @classmethod
    def of(cls, store: Store, verdict: Verdict) -> Self:
        leaking = tuple(SettingLeaks.of(setting) for setting in verdict.settings if setting.outcome == "leaks")
        return cls(audited=audited(store), settings=leaking)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict beside what is accepted: ``problems`` fail, ``remarks`` are told."""

    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def audited(store: Store) -> dict[str, Any]:
    """What an audit was: two results are compared only if this is the same. Weights may differ, and settings grow."""
    spec, data, plan = (mapping(store.meta(key)) for key in ("spec", "data", "plan"))
    asked = {key: spec.get(key) for key in _ASKED}
    model = mapping(store.meta("model")).get("name")
    told: dict[str, Any] = plain({**asked, "examples": plan.get("examples"), "model": model, "data": data.get("name")})
    return told


def judge_against(
    now: AcceptedLeaks, verdict: Verdict, accepted: AcceptedLeaks | None, *, accept_doubts: bool = False
) -> Judgement:
    """What of ``verdict`` is not accepted, and what people ought to know beside it.

    ``accept_doubts``: what is inconclusive is told and does not fail; where nothing was audited it always does.
    """
    problems, remarks = _leaks(now, verdict, accepted)
    doubts = _doubts(verdict)
    if verdict.outcome == "nothing audited":
        problems += doubts or ["nothing was audited"]
    elif accept_doubts:
        remarks += [f"inconclusive, accepted: {doubt}" for doubt in doubts]
    else:
        problems += [f"inconclusive: {doubt}" for doubt in doubts]
    if verdict.outcome != "within policy" and not (problems or remarks):  # whatever it is, it is no silent pass
        problems.append(f"the verdict is {verdict.outcome}")
    return Judgement(problems=problems, remarks=remarks)


def _leaks(now: AcceptedLeaks, verdict: Verdict, accepted: AcceptedLeaks | None) -> tuple[list[str], list[str]]:
    titles = {setting.scenario: setting.short for setting in verdict.settings}
    known = {one.scenario: one for one in (accepted.settings if accepted else ())}
    if accepted is not None and now.settings and (lines := differences(accepted.audited, dict(now.audited))):
        told = [line.replace("the store has", "the baseline has") for line in lines]
        return [f"the baseline was taken of another audit: {line}" for line in told], []
    problems, remarks = [], []
    for setting in now.settings:
        title, before = titles[setting.scenario], known.pop(setting.scenario, None)
        worse, better = _compare(setting, before or SettingLeaks(protocol=setting.protocol, defense=setting.defense))
        problems += [f"{title}: {line}" for line in worse]
        remarks += [f"{title}: {line}" for line in better]
        if not worse:
            remarks.append(f"{title}: leaks, as the baseline accepts")
    for cell in known:
        absent = f"{cell[0]}, defence {cell[1]}: is in the baseline and was not audited"
        silent = f"{titles.get(cell)}: no longer leaks; the baseline still accepts it"
        remarks.append(silent if cell in titles else absent)
    return problems, remarks


def _compare(now: SettingLeaks, before: SettingLeaks) -> tuple[list[str], list[str]]:
    """What is worse, and what is better, than before."""
    worse, better = [], []
    for index, psnr in now.examples.items():
        known, told = before.examples.get(index), f"example {index} leaks at {_decibels(psnr)}"
        if known is None:
            worse.append(f"{told}, which is not in the baseline")
        elif not psnr <= known + TOLERANCE:  # NaN, now or then, is no bound
            worse.append(f"{told}, the baseline accepts {_decibels(known)}")
        elif psnr < known - TOLERANCE:
            better.append(f"{told}, better than the baseline's {_decibels(known)}")
    if gone := [index for index in before.examples if index not in now.examples]:
        better.append(f"examples {', '.join(map(str, gone))} of the baseline no longer leak")
    for kind, share in now.shares.items():
        allowed = before.shares.get(kind)
        if allowed is None or not share <= allowed:
            limit = "which is not in the baseline" if allowed is None else f"the baseline accepts {allowed:.0%}"
            worse.append(f"{share:.0%} {_SHARES[kind]}, {limit}")
    return worse, better


def _decibels(psnr: float) -> str:
    """A PSNR of the baseline in words.

    >>> _decibels(24.31), _decibels(EXACT), _decibels(math.nan)
    ('24.3 dB', '60 dB or more', 'no measured PSNR')
    """
    if math.isnan(psnr):
        return "no measured PSNR"
    return f"{EXACT:.0f} dB or more" if psnr >= EXACT else f"{psnr:.1f} dB"


def _doubts(verdict: Verdict) -> list[str]:
    named = {setting.scenario: f"{setting.short}: " for setting in verdict.settings}
    doubts = [reason for setting in verdict.settings for reason in setting.doubts] + verdict.doubts_of_all
    return [f"{named[d.scenario] if d.scenario else ''}{dataclasses.replace(d, scenario=None)}" for d in doubts]


def read_accepted(path: Path) -> dict[str, AcceptedLeaks]:
    """Every audit of a baseline file by name; nothing where there is no file, ValueError where it is none."""
    if not path.exists():
        return {}
    try:
        content = read_json(read_whole(path, BYTES))
        wanted = f"leakscope/baseline/{VERSIONS['baseline']}"
        if not isinstance(content, dict) or content.get("schema") != wanted:
            got = content.get("schema") if isinstance(content, dict) else type(content).__name__
            raise UserError(f"expected the schema {wanted}, got {got}")
        return TypeAdapter(dict[str, AcceptedLeaks]).validate_python(content.get("audits"))
    except ValidationError as error:
        wanted = "audits by name, each with audited and settings (protocol, defense, examples, shares)"
        raise UserError(f"{path}: is no baseline that can be read: expected {wanted}. Restore it.") from error
    except ValueError as error:
        raise UserError(f"{path}: is no baseline that can be read: {error}. Restore it, or take a new one.") from error


def write_accepted(path: Path, audits: Mapping[str, AcceptedLeaks]) -> None:
    """The file of a baseline, sorted so that a change shows as one."""
    content = {"audits": {name: dataclasses.asdict(audits[name]) for name in sorted(audits)}}
    atomic_write(path, json_text(document("baseline", content)).encode())
