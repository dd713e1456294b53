from __future__ import annotations

import math
from typing import Any

import pytest

from leakscope.results import Policy, Row, Verdict, judge

SGD, NOISE = "FedSGD()", "GradientNoise(sigma=0.1)"


def make(
    position: int,
    psnr: float | None = 10.0,
    *,
    index: int = 0,
    attack: str = "A()",
    defense: str = "none",
    control: str | None = None,
    status: str = "done",
    seed: int = 0,
    flags: tuple[str, ...] = (),
    error: str = "RuntimeError: no",
    adaptive: bool = False,
    knows: bool = False,
    **numbers: Any,
) -> Row:
    job = {
        "protocol": SGD,
        "defense": defense,
        "control": control,
        "attack": attack,
        "attack_name": attack.lower().strip("()"),
        "seed": seed,
        "batch": index,
        "indices": [index],
        "knowledge": {"labels": "no", "defense": knows},
    }
    example = {"index": index, "label": 1, "psnr": psnr, "ssim": 0.5, "identified": False, **numbers}
    result = {"examples": [example], "flags": list(flags), "adaptive": adaptive} if status == "done" else None
    told = None if status == "done" else error
    return Row.read(f"key{position}", position, status, job, result, told, 1.0, "now")  # type: ignore[arg-type]


def control(position: int, psnr: float | None = 8.0, **changes: Any) -> Row:
    return make(position, psnr, control="noise", **changes)


TABLE: list[tuple[str, list[Row], dict[str, Any], str]] = [
    ("above limit and lifted", [make(0, 25), control(1)], {}, "leaks"),
    ("exactly at both limits", [make(0, 20), control(1, 17)], {}, "leaks"),
    ("just below the limit", [make(0, 19.99), control(1)], {}, "within policy"),
    ("a prior paints it, not the update", [make(0, 25), control(1, 24)], {}, "within policy"),
    ("no control to compare with", [make(0, 25)], {}, "inconclusive"),
    ("no control needed", [make(0, 25)], {"min_lift": 0}, "leaks"),
    ("no control, far below", [make(0, 10)], {}, "within policy"),
    ("control not a number", [make(0, 25), control(1, None)], {}, "inconclusive"),
    ("not a number", [make(0, None), control(1)], {}, "inconclusive"),
    ("one of two not a number", [make(0, None), make(1, 9, seed=1), control(2)], {}, "inconclusive"),
    ("not a number elsewhere", [make(0, None, attack="B()"), make(1, 30), control(2)], {}, "leaks"),
    ("raised flag", [make(0, 9, flags=("did not converge",)), control(1)], {}, "inconclusive"),
    ("rounds that disagree", [make(0, 9, flags=("rounds disagree",)), control(1)], {}, "inconclusive"),
    ("samples left open", [make(0, 9, flags=("not identifiable",)), control(1)], {}, "inconclusive"),
    ("rounds that disagree and leak", [make(0, 30, flags=("rounds disagree",)), control(1)], {}, "leaks"),
    ("flag on a leak", [make(0, 30, flags=("did not converge",)), control(1)], {}, "leaks"),
    ("flag on a control only", [make(0, 9), control(1, flags=("mixture",))], {}, "within policy"),
    ("failed job", [make(0, 9), make(1, status="failed", seed=1), control(2)], {}, "inconclusive"),
    ("failed control", [make(0, 9), control(1, status="failed")], {}, "inconclusive"),
    (
        "refused attack beside another",
        [make(0, 9), make(1, status="refused", attack="B()")],
        {},
        "within policy",
    ),
    ("a gap in the plan", [make(0, 9), control(2)], {}, "inconclusive"),
    ("all refused", [make(0, status="refused")], {}, "nothing audited"),
    ("all failed", [make(0, status="failed")], {}, "nothing audited"),
    ("controls only", [control(0)], {}, "nothing audited"),
    ("nothing", [], {}, "nothing audited"),
    ("SSIM limit reached", [make(0, 9, ssim=0.9), control(1)], {"max_ssim": 0.9}, "leaks"),
    ("SSIM below", [make(0, 9, ssim=0.89), control(1)], {"max_ssim": 0.9}, "within policy"),
    ("SSIM unknown", [make(0, 9, ssim=None), control(1)], {"max_ssim": 0.9}, "inconclusive"),
    ("identified", [make(0, 9, identified=True)], {"max_identification": 0.5}, "leaks"),
    ("nobody identified", [make(0, 9)], {"max_identification": 0}, "within policy"),
    ("unknown", [make(0, 9, identified=None)], {"max_identification": 0.5}, "inconclusive"),
    (
        "recognised by the weaker attack",
        [make(0, 12), make(1, 11.9, attack="B()", identified=True)],
        {"max_identification": 0},
        "leaks",
    ),
    (
        "starved",
        [make(0, 9), make(1, attack="B()", status="refused", error="MissingKnowledge: lr")],
        {},
        "inconclusive",
    ),
    (
        "does not apply",
        [make(0, 9), make(1, attack="B()", status="refused", error="NotApplicable: x")],
        {},
        "within policy",
    ),
    ("recognised", [make(0, 9, identified=True), make(1, 5, control="noise")], {}, "inconclusive"),
    (
        "recognised by luck",
        [make(0, 9, identified=True), make(1, 5, control="noise", identified=True)],
        {},
        "within policy",
    ),
    ("unlimited", [make(0, 9, identified=None, ssim=None)], {}, "within policy"),
]


@pytest.mark.parametrize(("rows", "policy", "outcome"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE])
def test_rule(rows: list[Row], policy: dict[str, Any], outcome: str) -> None:
    verdict = judge(rows, policy)
    assert verdict.outcome == outcome
    assert verdict.exit_code == {"leaks": 1, "within policy": 0}.get(outcome, 5)
    assert judge(rows, Policy(**policy)).outcome == outcome
    assert bool(verdict.reasons) == (outcome != "within policy")
    assert any(e.leaks for s in verdict.settings for e in s.examples) == (outcome == "leaks")


def test_strongest_attack_per_example_over_attacks_and_seeds() -> None:
    rows = [
        make(0, 12, index=0),
        make(1, 18, index=0, seed=1),
        make(2, 15, index=0, attack="B()"),
        make(3, 11, index=1),
        make(4, 10, index=1, seed=1),
        make(5, 16, index=1, attack="B()"),
        control(6, 6, index=0),
        control(7, 8, index=0, seed=1),
    ]
    setting = judge(rows).settings[0]
    assert [(e.index, e.attack, e.seed, e.psnr) for e in setting.examples] == [
        (0, "A()", 1, 18),
        (1, "B()", 0, 16),
    ]
    first, second = setting.examples
    assert (first.baseline_psnr, first.lift, first.key) == (7, 11, "key1")
    assert math.isnan(second.baseline_psnr)
    assert setting.mean_psnr == 17
    low, high = setting.interval
    assert 16 <= low <= high <= 18


def test_a_strong_prior_does_not_hide_a_leak() -> None:
    rows = [make(0, 26), control(1, 25), make(2, 24, attack="B()"), control(3, 9, attack="B()")]
    verdict = judge(rows)
    assert verdict.outcome == "leaks"
    assert verdict.worst is not None
    assert (verdict.worst.attack, verdict.worst.lift) == ("B()", 15)


def test_baseline_of_an_attack_that_refused_noise_is_the_best_of_the_others() -> None:
    rows = [
        *(make(0, 90), control(1, status="refused")),
        *(make(2, 9, attack="B()"), control(3, 8, attack="B()"), make(4, 9, attack="C()")),
        control(5, 12, attack="C()"),
    ]
    verdict = judge(rows)
    assert verdict.outcome == "leaks"
    assert verdict.worst is not None
    assert verdict.worst.lift == 78


def test_settings_are_judged_apart_and_the_worst_counts() -> None:
    rows = [make(0, 25), make(1, 9, defense=NOISE, adaptive=True), control(2)]
    verdict = judge(rows)
    assert [(s.defense, s.outcome) for s in verdict.settings] == [("none", "leaks"), (NOISE, "within policy")]
    assert verdict.outcome == "leaks"
    flagged = [make(0, 9), make(1, 9, defense=NOISE, flags=("mixture",)), control(2)]
    assert judge(flagged).outcome == "inconclusive"
    assert judge(flagged).settings[1].flags == ["mixture"]


def test_control_does_not_make_a_setting() -> None:
    verdict = judge([make(0, 9, defense=NOISE), control(1)])
    assert [s.defense for s in verdict.settings] == [NOISE]


@pytest.mark.parametrize(
    ("knows", "remedy"),
    [
        (False, "let attacks know it with knowledge adaptive_server"),
        (True, "the defence has no channel, or no attack here reads it"),
    ],
)
def test_a_defence_that_no_attack_knew_was_not_tested(knows: bool, remedy: str) -> None:
    rows = [make(0, 9, knows=knows), make(1, 9, defense=NOISE, knows=knows), control(2)]
    verdict = judge(rows)
    bare, defended = verdict.settings
    assert (bare.outcome, bare.reasons) == ("within policy", [])
    assert defended.outcome == verdict.outcome == "inconclusive"
    assert defended.reasons == [f"no attack that knows this defence was run: {remedy}"]
    assert verdict.reasons == [f"{SGD}, defence {NOISE}: {defended.reasons[0]}"]
    assert verdict.exit_code == 5


def test_one_attack_that_knows_the_defence_is_enough() -> None:
    rows = [make(0, 9, defense=NOISE), make(1, 9, defense=NOISE, attack="B()", adaptive=True), control(2)]
    assert judge(rows).outcome == "within policy"


def test_only_a_result_counts_as_an_attack_that_knows_the_defence() -> None:
    refused = make(1, defense=NOISE, attack="B()", status="refused", error="NotApplicable: x", adaptive=True)
    verdict = judge([make(0, 9, defense=NOISE), refused, control(2, adaptive=True)])
    assert verdict.outcome == "inconclusive"
    assert "knows this defence" in verdict.reasons[0]


def test_a_leak_needs_no_attack_that_knows_the_defence() -> None:
    assert judge([make(0, 25, defense=NOISE), control(1)]).outcome == "leaks"


def test_missing_jobs_are_noticed() -> None:
    rows = [make(0, 9), make(1, 9, seed=1), make(2, 9, defense=NOISE, adaptive=True), control(3)]
    ragged = judge(rows)
    assert [s.missing for s in ragged.settings] == [0, 1]
    assert ragged.outcome == "inconclusive"
    full = [make(0, 9), control(1)]
    assert judge(full, None, 2).outcome == "within policy"
    assert judge(full, None, 3).outcome == "inconclusive"
    settings = [{"protocol": SGD, "defense": d, "jobs": 1} for d in ("none", NOISE)]
    verdict = judge(full, None, {"total": 3, "settings": settings})
    assert [(s.defense, s.outcome) for s in verdict.settings] == [
        ("none", "within policy"),
        (NOISE, "inconclusive"),
    ]
    assert verdict.outcome == "inconclusive"


def test_rates() -> None:
    rows = [
        make(0, 9, index=0, identified=True, label_correct=True),
        make(1, 9, index=1, identified=False, label_correct=None),
        make(2, 9, index=2, identified=None, label_correct=False),
    ]
    setting = judge(rows).settings[0]
    assert (setting.identification, setting.label_accuracy) == (0.5, 0.5)
    nothing: Verdict = judge([make(0, status="refused")])
    assert math.isnan(nothing.settings[0].mean_psnr)
    assert nothing.settings[0].refused == 1
    assert nothing.worst is None
