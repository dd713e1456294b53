"""What several examples, settings or jobs share is told once, and nothing is lost by it."""

from __future__ import annotations

import dataclasses

import pytest

from leakscope.results import Reason, Row, SettingVerdict, StrongestExample, Verdict
from leakscope.results.wording import by_remedy, paragraph, shared_fates, shared_reasons, shared_remarks

SGD, PRUNING = "FedSGD(batchnorm='eval')", "GradientPruning(fraction=0.9, scope='tensor')"


def verdict(reasons: dict[str, list[Reason]], whole: list[Reason] | None = None) -> Verdict:
    settings = [
        SettingVerdict(protocol=SGD, defense=defense, outcome="inconclusive", reasons=told)
        for defense, told in reasons.items()
    ]
    every = [reason for setting in settings for reason in setting.named_reasons]
    return Verdict(outcome="inconclusive", reasons=[*every, *(whole or [])], settings=settings)


def leak(index: int, psnr: float) -> Reason:
    return Reason(f"example {index} leaks by dlg: PSNR {psnr} dB, 9.0 dB above its control", "Add a defence")


def test_examples_that_differ_in_numbers_are_one_reason_with_their_range() -> None:
    (told,) = shared_reasons(verdict({"none": [leak(0, 30.5), leak(2, 21.4)]}))
    assert str(told) == "S1: examples 0, 2 leak by dlg: PSNR 21.4 to 30.5 dB, 9.0 dB above its control"
    assert told.remedy == "Add a defence"
    (told,) = shared_reasons(verdict({"none": [leak(index, 20 + index) for index in range(8)]}))
    assert told.text.startswith("8 examples leak by dlg: PSNR 20 to 27 dB")


def test_equal_reasons_of_several_settings_are_one_and_others_stay_apart() -> None:
    both = Reason("raised flags: did not converge", "Take more steps")
    only = Reason("no attack that knows this defence was run", "Use adaptive_server")
    told = shared_reasons(verdict({"none": [both], PRUNING: [both, only]}, [Reason("2 control jobs failed")]))
    assert [str(reason) for reason in told] == [
        "S1, S2: raised flags: did not converge",
        "S2: no attack that knows this defence was run",
        "2 control jobs failed",
    ]
    assert [reason.remedy for reason in told] == ["Take more steps", "Use adaptive_server", ""]


@pytest.mark.parametrize(
    "first, second",
    [
        ("example 0 leaks by dlg: PSNR 30 dB", "example 1 leaks by idlg: PSNR 30 dB"),
        ("example 0: the first layer 'conv1' is odd", "example 1: the first layer 'conv2' is odd"),
        ("2 jobs failed", "3 jobs failed"),
    ],
)
def test_reasons_that_differ_in_words_are_not_merged(first: str, second: str) -> None:
    assert len(shared_reasons(verdict({"none": [Reason(first), Reason(second)]}))) == 2


def test_a_remedy_is_never_given_to_another_reason() -> None:
    told = shared_reasons(verdict({"none": [Reason("example 0: odd", "Do this"), Reason("example 1: odd", "Do that")]}))
    assert [(reason.text, reason.remedy) for reason in told] == [
        ("example 0: odd", "Do this"),
        ("example 1: odd", "Do that"),
    ]


def test_reasons_with_the_same_remedy_stand_together_and_remarks_are_told_once() -> None:
    told = verdict({"none": [Reason("a", "More steps"), Reason("b")], PRUNING: [Reason("c", "More steps.")]})
    assert [(group.remedy, [str(reason) for reason in group.reasons]) for group in by_remedy(told)] == [
        ("More steps", ["S1: a", "S2: c"]),
        ("", ["S1: b"]),
    ]
    settings = [dataclasses.replace(setting, remarks=["labels are recovered"]) for setting in told.settings]
    assert [str(remark) for remark in shared_remarks(dataclasses.replace(told, settings=settings))] == [
        "S1, S2: labels are recovered"
    ]


def test_refusals_are_one_line_for_each_attack_and_reason() -> None:
    def row(number: int, name: str, status: str, error: str | None) -> Row:
        job = {"protocol": SGD, "defense": "none", "attack": name, "attack_name": name, "seed": 0, "batch": number}
        return Row.read(str(number), number, status, job, None, error)  # type: ignore[arg-type]

    odd = "NotApplicable: the first layer is no Linear\nTraceback"
    rows = [row(n, "linear-layer", "refused", odd) for n in range(1200)]
    rows += [row(2000, "dlg", "failed", "RuntimeError: broke"), row(2001, "dlg", "done", None)]
    assert [str(fate) for fate in shared_fates(rows)] == [
        "refused: linear-layer, 1,200 jobs: the first layer is no Linear",
        "failed: dlg, 1 job: RuntimeError: broke",
    ]


def test_a_verdict_prints_as_one_paragraph_with_its_remedies() -> None:
    example = StrongestExample(
        index=3, attack="A()", attack_name="dlg", seed=0, key="k", protocol=SGD, defense="none", values={"psnr": 21.44}
    )
    whole = verdict({"none": [leak(0, 21.4)], PRUNING: [Reason(f"doubt {letter}") for letter in "abcd"]})
    told = str(Verdict(outcome="leaks", reasons=whole.reasons, settings=whole.settings, worst=example))
    assert "\n" not in told
    assert told.startswith("LEAKS. Strongest reconstruction: example 3 at 21.4 dB by dlg, S1 (FedSGD · no defence).")
    assert "Add a defence." in told
    assert told.endswith("There are 2 more reasons.")
    assert ".." not in told
    assert paragraph(Verdict(outcome="within policy")) == "WITHIN POLICY."
