"""What several examples, scenarios or jobs share is told once, and nothing is lost by it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import leakscope.results
from leakscope.contracts.reconstruction import FLAG_REMEDIES, FLAGS
from leakscope.report.sentences import REASONS, REMEDIES, by_remedy, shared_fates, shared_reasons, shared_remarks
from leakscope.results import Reason, Row, SettingVerdict, StrongestExample, Verdict
from leakscope.results.reasons import Remedy, Scenario, because

SGD, PRUNING = "FedSGD(batchnorm='eval')", "GradientPruning(fraction=0.9, scope='tensor')"


def verdict(reasons: dict[str, list[Reason]], whole: list[Reason] | None = None) -> Verdict:
    settings = [
        SettingVerdict(
            protocol=SGD,
            defense=defense,
            outcome="inconclusive",
            reasons=[dataclasses.replace(reason, scenario=Scenario(SGD, defense)) for reason in told],
        )
        for defense, told in reasons.items()
    ]
    every = [reason for setting in settings for reason in setting.reasons]
    return Verdict(outcome="inconclusive", reasons=[*every, *(whole or [])], settings=settings)


def leak(index: int, psnr: float, attack: str = "dlg") -> Reason:
    facts = {"example": index, "attack": attack, "measure": "psnr", "value": psnr, "baseline": psnr - 9}
    return because("reconstruction", "stronger-defence", **facts)


def failed(count: int) -> Reason:
    return because("job-failed", "retry", count=count)


FLAG = because("flag", "more-iterations", names=("did not converge",), count=1, total=2)


def test_every_code_and_remedy_of_the_results_has_a_sentence_and_no_other_has() -> None:
    """The room of results writes none: whatever code it names there, the report must know."""
    folder = leakscope.results.__path__[0]
    source = "\n".join(path.read_text() for path in sorted(Path(folder).glob("*.py")))
    named = set(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', source)) | {
        kind for kinds in FLAG_REMEDIES.values() for kind in kinds
    }
    assert {code.partition(",")[0] for code in REASONS} <= named
    assert set(REMEDIES) - {"audit-again"} <= named
    assert {kind for kinds in FLAG_REMEDIES.values() for kind in kinds} <= set(REMEDIES)
    assert set(FLAG_REMEDIES) == set(FLAGS)
    assert all(code in REASONS for code in re.findall(r'because\(\s*"([a-z-]+)"', source))


def test_examples_that_differ_in_numbers_are_one_reason_with_their_range() -> None:
    (told,) = shared_reasons(verdict({"none": [leak(0, 30.5), leak(2, 21.4)]}))
    assert str(told) == "S1: examples 0, 2 leak by dlg: PSNR 21.4 to 30.5 dB, 9.0 dB above its control"
    assert (told.remedy, told.code) == (REMEDIES["stronger-defence"], "reconstruction")
    (told,) = shared_reasons(verdict({"none": [leak(index, 20 + index) for index in range(8)]}))
    assert told.text.startswith("8 examples leak by dlg: PSNR 20.0 to 27.0 dB")


def test_equal_reasons_of_several_settings_are_one_and_others_stay_apart() -> None:
    only = because("defence-unknown", "know-defence")
    told = shared_reasons(verdict({"none": [FLAG], PRUNING: [FLAG, only]}, [because("control-failed", count=2)]))
    assert [(reason.settings, reason.code) for reason in told] == [
        (("S1", "S2"), "flag"),
        (("S2",), "defence-unknown"),
        ((), "control-failed"),
    ]
    assert [reason.remedy for reason in told] == [str(FLAG.remedy), str(only.remedy), ""]


@pytest.mark.parametrize(
    "first, second",
    [
        (leak(0, 30), leak(1, 30, attack="idlg")),
        (because("measure-missing", example=0, measure="ssim"), because("measure-missing", example=1, measure="lpips")),
        (failed(2), failed(3)),
        (leak(0, 30), dataclasses.replace(leak(1, 30), remedy=Remedy("again"))),
    ],
)
def test_reasons_that_differ_in_more_than_numbers_are_not_merged(first: Reason, second: Reason) -> None:
    assert len(shared_reasons(verdict({"none": [first, second]}))) == 2


def test_reasons_with_the_same_remedy_stand_together_and_remarks_are_told_once() -> None:
    told = verdict({"none": [failed(1), because("no-result")], PRUNING: [failed(2)]})
    assert [(remedy, [reason.settings for reason in lines]) for remedy, lines in by_remedy(told).items()] == [
        (REMEDIES["retry"], [("S1",), ("S2",)]),
        ("", [("S1",)]),
    ]
    remark = because("labels-unlimited", measure="label_accuracy", value=1.0)
    settings = [dataclasses.replace(setting, remarks=[remark]) for setting in told.settings]
    (shared,) = shared_remarks(dataclasses.replace(told, settings=settings))
    assert (shared.settings, shared.code) == (("S1", "S2"), "labels-unlimited")


def test_alternative_remedies_are_told_one_after_another() -> None:
    waive = Remedy("waive", {"attacks": ("dlg", "sme")})
    told = str(because("standard-not-run", "standard-attacks", waive, names=("dlg", "sme")))
    assert told.count(". Or ") == 1
    assert "--waive dlg --waive sme" in told


def test_refusals_are_one_line_for_each_attack_and_reason() -> None:
    def row(number: int, name: str, status: str, error: str | None) -> Row:
        job = {"protocol": SGD, "defense": "none", "attack": name, "attack_name": name, "seed": 0, "batch": number}
        return Row.read(str(number), number, status, job, None, error)  # type: ignore[arg-type]

    odd = "NotApplicable: the first layer is no Linear\nTraceback"
    rows = [row(n, "linear-layer", "refused", odd) for n in range(1200)]
    rows += [row(2000, "dlg", "failed", "RuntimeError: broke"), row(2001, "dlg", "done", None)]
    assert [(fate.status, fate.name, fate.reason, fate.count) for fate in shared_fates(rows)] == [
        ("refused", "linear-layer", "the first layer is no Linear", 1200),
        ("failed", "dlg", "RuntimeError: broke", 1),
    ]


def test_a_verdict_prints_as_one_paragraph_with_its_remedies() -> None:
    example = StrongestExample(
        index=3, attack="A()", attack_name="dlg", seed=0, key="k", protocol=SGD, defense="none", values={"psnr": 21.44}
    )
    whole = verdict({"none": [leak(0, 21.4)], PRUNING: [failed(count) for count in range(1, 5)]})
    told = str(Verdict(outcome="leaks", reasons=whole.reasons, settings=whole.settings, worst=example))
    assert "\n" not in told
    assert told.startswith("LEAKS. Strongest reconstruction: example 3 at 21.4 dB by dlg, S1 (FedSGD · no defence).")
    assert f"{REMEDIES['stronger-defence']}." in told
    assert told.endswith("2 more reasons.")
    assert ".." not in told
    assert str(Verdict(outcome="within policy")) == "WITHIN POLICY."
