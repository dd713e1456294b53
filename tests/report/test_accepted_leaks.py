"""What a baseline accepts: the leaks it was taken of and none that is new, worse, doubtful or of another audit."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jsonschema
import pytest

from leakscope.report.accepted_leaks import (
    EXACT,
    AcceptedLeaks,
    SettingLeaks,
    judge_against,
    read_accepted,
    write_accepted,
)
from leakscope.report.export import schema
from leakscope.results.reasons import Reason, Scenario, because
from leakscope.results.setting_verdict import SettingVerdict, StrongestExample
from leakscope.results.verdict import Verdict

SGD, NOISE = "FedSGD()", "GradientNoise(sigma=1.0)"
AUDITED = {"attacks": ["linear-layer"], "batch": 1}


def example(index: int, psnr: float, leaks: bool = True) -> StrongestExample:
    facts = {"attack": "A()", "attack_name": "a", "seed": 0, "key": "k", "protocol": SGD, "defense": "none"}
    return StrongestExample(index=index, values={"psnr": psnr}, leaks=leaks, **facts)


def leaking(defense: str = "none", **psnrs: float) -> SettingVerdict:
    scenario = Scenario(SGD, defense)
    examples = [example(int(index[1:]), psnr) for index, psnr in psnrs.items()]
    reasons = [because("reconstruction", scenario=scenario, example=e.index, attack="a") for e in examples]
    return SettingVerdict(protocol=SGD, defense=defense, outcome="leaks", reasons=reasons, examples=examples)


def verdict(*settings: SettingVerdict, more: tuple[Reason, ...] = ()) -> Verdict:
    outcomes = {setting.outcome for setting in settings}
    outcome = "leaks" if "leaks" in outcomes else "inconclusive" if outcomes != {"within policy"} else "within policy"
    reasons = [reason for setting in settings for reason in setting.reasons]
    return Verdict(outcome=outcome, reasons=[*reasons, *more], settings=list(settings))


def leaks_of(told: Verdict, audited: dict[str, object] | None = None) -> AcceptedLeaks:
    settings = tuple(SettingLeaks.of(setting) for setting in told.settings if setting.outcome == "leaks")
    return AcceptedLeaks(audited=audited or AUDITED, settings=settings)


def problems(now: Verdict, before: Verdict | None, **options: bool) -> list[str]:
    accepted = None if before is None else leaks_of(before)
    return judge_against(leaks_of(now), now, accepted, **options).problems


def test_the_same_leak_is_accepted_and_told() -> None:
    now = verdict(leaking(e0=24.0))
    judgement = judge_against(leaks_of(now), now, leaks_of(now))
    assert judgement.problems == []
    assert judgement.remarks == ["FedSGD · no defence: leaks, as the baseline accepts"]


def test_without_a_baseline_every_leak_fails() -> None:
    assert problems(verdict(leaking(e0=24.0)), None) == [
        "FedSGD · no defence: example 0 leaks at 24.0 dB, which is not in the baseline"
    ]


@pytest.mark.parametrize(
    "now, before",
    [
        ({"e0": 24.0, "e1": 21.0}, {"e0": 24.0}),  # another example
        ({"e1": 21.0}, {"e0": 24.0}),  # another example instead, and not a worse one
        ({"e0": 26.0}, {"e0": 24.0}),  # a better picture of the same
        ({"e0": 20.0, "e1": 30.0}, {"e0": 30.0, "e1": 20.0}),  # the mean is the same, one of them is worse
        ({"e0": 24.0}, {"e0": math.nan}),  # leaked by another measure before
    ],
)
def test_a_new_or_worse_leak_is_not_hidden(now: dict[str, float], before: dict[str, float]) -> None:
    assert problems(verdict(leaking(**now)), verdict(leaking(**before)))


def test_a_leak_of_another_setting_is_not_hidden() -> None:
    assert problems(verdict(leaking(NOISE, e0=24.0)), verdict(leaking(e0=24.0)))


def test_copies_are_copies_and_machines_differ_a_little() -> None:
    assert not problems(verdict(leaking(e0=150.0)), verdict(leaking(e0=EXACT + 5)))
    assert not problems(verdict(leaking(e0=24.9)), verdict(leaking(e0=24.0)))


def test_what_is_better_passes_and_is_told() -> None:
    now, before = verdict(leaking(e0=21.0)), verdict(leaking(e0=30.0, e1=22.0), leaking(NOISE, e0=25.0))
    judgement = judge_against(leaks_of(now), now, leaks_of(before))
    assert judgement.problems == []
    text = "\n".join(judgement.remarks)
    assert "example 0 leaks at 21.0 dB, better than the baseline's 30.0 dB" in text
    assert "examples 1 of the baseline no longer leak" in text
    assert f"defence {NOISE}: is in the baseline and was not audited" in text


@pytest.mark.parametrize("kind, name", [("identification", "identification"), ("labels", "label_accuracy")])
def test_shares_may_not_grow_nor_appear(kind: str, name: str) -> None:
    def told(share: float) -> Verdict:
        reasons = [because(kind, value=share, scenario=Scenario(SGD, "none"))]
        facts = {name: share}
        return verdict(SettingVerdict(protocol=SGD, defense="none", outcome="leaks", reasons=reasons, **facts))  # type: ignore[arg-type]

    assert not problems(told(0.5), told(0.5))
    assert "75%" in problems(told(0.75), told(0.5))[0]
    assert "not in the baseline" in problems(told(0.5), verdict(leaking(e0=24.0)))[0]


def test_a_baseline_of_another_audit_accepts_nothing() -> None:
    """Fewer attacks find less: a lower PSNR would look like progress."""
    before = leaks_of(verdict(leaking(e0=60.0)), {"attacks": ["linear-layer", "head-first"], "batch": 1})
    now = verdict(leaking(e0=24.0))
    (line,) = judge_against(leaks_of(now), now, before).problems
    assert line.startswith("the baseline was taken of another audit: attacks: the baseline has")


def test_doubts_are_never_accepted_by_a_baseline() -> None:
    weak = because("weak-without-theory", "more-steps", scenario=Scenario(SGD, NOISE))
    doubt = SettingVerdict(protocol=SGD, defense=NOISE, outcome="inconclusive", reasons=[weak])
    now = verdict(leaking(e0=24.0), doubt)
    assert now.outcome == "leaks"
    (line,) = problems(now, now)
    assert line.startswith("inconclusive: FedSGD · GradientNoise(sigma=1.0): ")
    judgement = judge_against(leaks_of(now), now, leaks_of(now), accept_doubts=True)
    assert judgement.problems == []
    assert any("inconclusive, accepted: " in remark for remark in judgement.remarks)


def test_missing_jobs_of_a_leaking_setting_are_not_accepted() -> None:
    cut = leaking(e0=24.0)
    cut = dataclasses.replace(
        cut, reasons=[*cut.reasons, because("attempts-missing", "again", count=3, scenario=Scenario(SGD, "none"))]
    )
    (line,) = problems(verdict(cut), verdict(leaking(e0=24.0)))
    assert line.startswith("inconclusive: FedSGD · no defence: 3 jobs ")


def test_doubts_of_the_whole_audit_fail() -> None:
    now = verdict(leaking(e0=24.0), more=(because("control-failed", count=2),))
    assert problems(now, now) == ["inconclusive: 2 control jobs failed"]


def test_nothing_audited_fails_whatever_is_accepted() -> None:
    nothing = Verdict(outcome="nothing audited", reasons=[because("no-result")])
    assert problems(nothing, None, accept_doubts=True) == ["no attack gave a result"]
    assert problems(Verdict(outcome="nothing audited"), None, accept_doubts=True) == ["nothing was audited"]


def test_an_outcome_without_reasons_is_no_pass() -> None:
    assert problems(Verdict(outcome="inconclusive"), None) == ["the verdict is inconclusive"]
    assert problems(Verdict(outcome="leaks"), None, accept_doubts=True) == ["the verdict is leaks"]
    assert problems(Verdict(outcome="within policy"), None) == []


def test_files_come_back_as_they_were_and_keep_their_schema(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    assert read_accepted(file) == {}
    audits = {"b": leaks_of(verdict(leaking(e0=24.0, e3=math.nan))), "a": leaks_of(verdict(leaking(NOISE, e0=99.0)))}
    write_accepted(file, audits)
    jsonschema.validate(json.loads(file.read_text()), schema("baseline"))
    again = read_accepted(file)
    assert again["a"] == audits["a"]
    assert list(again) == ["a", "b"]
    assert math.isnan(again["b"].settings[0].examples[3])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "leakscope/baseline/2", "audits": {}}',
        '{"schema": "leakscope/baseline/1", "audits": []}',
        '{"schema": "leakscope/baseline/1", "audits": {"a": {}}}',
        '{"schema": "leakscope/baseline/1", "audits": {"a": {"audited": {}, "settings": [{}]}}}',
    ],
)
def test_a_broken_file_is_an_error_and_never_an_empty_baseline(text: str, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is no baseline that can be read"):
        read_accepted(file)
