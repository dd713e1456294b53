from __future__ import annotations

import math
from typing import Any

import pytest

from leakscope.results import FindingRow, Policy, Row, Verdict, judge
from verdict_rows import NOISE, SGD, control, held_out, make, planted

TABLE: list[tuple[str, list[Row], dict[str, Any], str]] = [
    ("above limit and lifted", [make(0, 25), control(1)], {}, "leaks"),
    ("exactly at both limits", [make(0, 20), control(1, 17)], {}, "leaks"),
    ("just below the limit", [make(0, 19.99), control(1), planted(2)], {}, "within policy"),
    ("a prior paints it, not the update", [make(0, 25), control(1, 24), planted(2)], {}, "within policy"),
    ("no control to compare with", [make(0, 25)], {}, "inconclusive"),
    ("no control needed", [make(0, 25)], {"min_lift": 0}, "leaks"),
    ("no control, far below", [make(0, 10), planted(1)], {}, "inconclusive"),
    ("no control, far below, none needed", [make(0, 10), planted(1)], {"min_lift": 0}, "within policy"),
    ("no positive control", [make(0, 9), control(1)], {}, "inconclusive"),
    ("the positive control fails", [make(0, 9), control(1), planted(2, 19)], {}, "inconclusive"),
    ("it succeeds by its prior only", [make(0, 9), control(1, 38), planted(2)], {}, "inconclusive"),
    ("it was refused", [make(0, 9), control(1), planted(2, status="refused")], {}, "inconclusive"),
    ("it is that of another attack", [make(0, 9), control(1), planted(2, attack="B()")], {}, "inconclusive"),
    (
        "nearer than noise, not than held-out images",
        [make(0, 25), control(1), held_out(2, 24), planted(3)],
        {},
        "inconclusive",
    ),
    ("nearer than both", [make(0, 28), control(1), held_out(2, 24), planted(3)], {}, "leaks"),
    ("control not a number", [make(0, 25), control(1, None)], {}, "inconclusive"),
    ("not a number", [make(0, None), control(1)], {}, "inconclusive"),
    ("one of two not a number", [make(0, None), make(1, 9, seed=1), control(2)], {}, "inconclusive"),
    ("not a number elsewhere", [make(0, None, attack="B()"), make(1, 30), control(2)], {}, "leaks"),
    ("raised flag", [make(0, 9, flags=("did not converge",)), control(1)], {}, "inconclusive"),
    ("rounds that disagree", [make(0, 9, flags=("rounds disagree",)), control(1)], {}, "inconclusive"),
    ("samples left open", [make(0, 9, flags=("not identifiable",)), control(1)], {}, "inconclusive"),
    ("rounds that disagree and leak", [make(0, 30, flags=("rounds disagree",)), control(1)], {}, "leaks"),
    ("flag on a leak", [make(0, 30, flags=("did not converge",)), control(1)], {}, "leaks"),
    ("flag on a control only", [make(0, 9), control(1, flags=("mixture",)), planted(2)], {}, "within policy"),
    ("failed job", [make(0, 9), make(1, status="failed", seed=1), control(2)], {}, "inconclusive"),
    ("failed control", [make(0, 9), control(1), control(2, status="failed"), planted(3)], {}, "inconclusive"),
    (
        "refused attack beside another",
        [make(0, 9), make(1, status="refused", attack="B()"), control(2), planted(3)],
        {},
        "within policy",
    ),
    ("a gap in the plan", [make(0, 9), control(2)], {}, "inconclusive"),
    ("all refused", [make(0, status="refused")], {}, "nothing audited"),
    ("all failed", [make(0, status="failed")], {}, "nothing audited"),
    ("controls only", [control(0)], {}, "nothing audited"),
    ("nothing", [], {}, "nothing audited"),
    ("SSIM limit reached", [make(0, 9, ssim=0.9), control(1)], {"max_ssim": 0.9}, "leaks"),
    ("SSIM below", [make(0, 9, ssim=0.89), control(1), planted(2)], {"max_ssim": 0.9}, "within policy"),
    ("SSIM unknown", [make(0, 9, ssim=None), control(1)], {"max_ssim": 0.9}, "inconclusive"),
    ("identified", [make(0, 9, identified=True)], {"max_identification": 0.5}, "leaks"),
    ("nobody identified", [make(0, 9), control(1), planted(2)], {"max_identification": 0}, "within policy"),
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
        [make(0, 9), make(1, attack="B()", status="refused", error="NotApplicable: x"), control(2), planted(3)],
        {},
        "within policy",
    ),
    ("recognised", [make(0, 9, identified=True), make(1, 5, control="noise")], {}, "inconclusive"),
    (
        "recognised by luck",
        [make(0, 9, identified=True), control(1, 5, identified=True), planted(2)],
        {},
        "within policy",
    ),
    ("unlimited", [make(0, 9, identified=None, ssim=None), control(1), planted(2)], {}, "within policy"),
]


@pytest.mark.parametrize(("rows", "policy", "outcome"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE])
def test_rule(rows: list[Row], policy: dict[str, Any], outcome: str) -> None:
    verdict = judge(rows, policy)
    assert verdict.outcome == outcome
    assert verdict.exit_code == {"leaks": 1, "within policy": 0}.get(outcome, 5)
    assert judge(rows, Policy(**policy)).outcome == outcome
    assert bool(verdict.reasons) == (outcome != "within policy")
    if outcome in ("inconclusive", "nothing audited"):
        assert all(reason.remedy for reason in verdict.reasons), "every doubt has its remedy"
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


def test_baseline_of_an_attack_that_refused_noise_is_a_guess_or_the_lowest_of_the_others() -> None:
    rows = [
        *(make(0, 90), control(1, status="refused")),
        *(make(2, 9, attack="B()"), control(3, 8, attack="B()"), make(4, 9, attack="C()")),
        control(5, 12, attack="C()"),
    ]
    verdict = judge(rows)
    assert verdict.outcome == "leaks"
    assert verdict.worst is not None
    assert verdict.worst.lift == 82, "other attacks' priors cannot make less of this leak"
    guessed = judge([*rows, held_out(6, 10)]).worst
    assert guessed is not None
    assert guessed.lift == 80


def test_settings_are_judged_apart_and_the_worst_counts() -> None:
    rows = [make(0, 25), make(1, 9, defense=NOISE, adaptive=True), control(2)]  # the leak is the positive control
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
    ("knows", "code", "remedy"),
    [(False, "defence-unknown", "know-defence"), (True, "defence-unread", "other-attacks")],
)
def test_a_defence_that_no_attack_knew_was_not_tested(knows: bool, code: str, remedy: str) -> None:
    rows = [make(0, 9, knows=knows), make(1, 9, defense=NOISE, knows=knows), control(2), planted(3)]
    verdict = judge(rows)
    bare, defended = verdict.settings
    assert (bare.outcome, bare.reasons) == ("within policy", [])
    assert defended.outcome == verdict.outcome == "inconclusive"
    (reason,) = defended.reasons
    assert reason.remedy is not None
    assert (reason.code, reason.remedy.kind, reason.scenario) == (code, remedy, (SGD, NOISE))
    assert verdict.reasons == [reason]
    assert verdict.exit_code == 5


def test_one_attack_that_knows_the_defence_is_enough() -> None:
    rows = [make(0, 9, defense=NOISE), make(1, 9, defense=NOISE, attack="B()", adaptive=True), control(2), planted(3)]
    rows.append(planted(4, attack="B()"))
    assert judge(rows).outcome == "within policy"


def test_an_attack_that_knows_the_defence_and_finds_nothing_without_it_proves_nothing() -> None:
    """The strong one does not know the defence, the one that knows it is weak: neither tested it."""
    rows = [make(0, 9, defense=NOISE), make(1, 9, defense=NOISE, attack="B()", adaptive=True), control(2), planted(3)]
    for weak in (planted(4, psnr=9, attack="B()"), control(4, attack="B()")):
        (reason,) = judge([*rows, weak]).settings[0].reasons
        assert reason.knowing


def test_a_server_that_may_choose_the_model_was_not_tested_by_attacks_that_take_it_as_it_is() -> None:
    rows = [make(0, 9, chooses=True), control(1, chooses=True), planted(2, chooses=True)]
    verdict = judge(rows)
    assert verdict.outcome == "inconclusive"
    assert verdict.reasons[0].code == "model-not-chosen"
    assert judge([*rows, make(3, 9, chooses=True, attack="B()", chose_model=True)]).outcome != "leaks"
    reasons = judge([*rows, make(3, 9, chooses=True, attack="B()", chose_model=True)]).reasons
    assert "model-not-chosen" not in {reason.code for reason in reasons}


def test_only_a_result_counts_as_an_attack_that_knows_the_defence() -> None:
    refused = make(1, defense=NOISE, attack="B()", status="refused", error="NotApplicable: x", adaptive=True)
    verdict = judge([make(0, 9, defense=NOISE), refused, control(2, adaptive=True), planted(3)])
    assert verdict.outcome == "inconclusive"
    assert verdict.reasons[0].code == "defence-unknown"


def test_a_leak_needs_no_attack_that_knows_the_defence() -> None:
    assert judge([make(0, 25, defense=NOISE), control(1)]).outcome == "leaks"


def test_missing_jobs_are_noticed() -> None:
    rows = [make(0, 9), make(1, 9, seed=1), make(2, 9, defense=NOISE, adaptive=True), control(3), planted(4)]
    ragged = judge(rows)
    assert [s.missing for s in ragged.settings] == [0, 1]
    assert ragged.outcome == "inconclusive"
    full = [make(0, 9), control(1), planted(2)]
    assert judge(full, None, 3).outcome == "within policy"
    assert judge(full, None, 4).outcome == "inconclusive"
    settings = [{"protocol": SGD, "defense": d, "jobs": 1} for d in ("none", NOISE)]
    verdict = judge(full, None, {"total": 4, "settings": settings})
    assert [(s.defense, s.outcome) for s in verdict.settings] == [
        ("none", "within policy"),
        (NOISE, "inconclusive"),
    ]
    assert verdict.outcome == "inconclusive"


def floor(defense: str = "none", **content: Any) -> FindingRow:
    subject = {"protocol": SGD, "defense": defense, "batch": 0, "seed": 0}
    return FindingRow.read(f"floor{defense}", 9, "floor", "done", subject, content)


def plan_of(*defenses: str, has_floor: bool = True) -> dict[str, Any]:
    settings = [{"protocol": SGD, "defense": d, "jobs": 1, "has_floor": has_floor} for d in defenses]
    return {"total": 0, "settings": settings}


FLOORS: list[tuple[str, list[FindingRow], str, str]] = [
    ("theory was not asked", [], "inconclusive", "weak-without-theory"),
    ("theory has nothing to say", [floor(reason="too large")], "inconclusive", "weak-without-theory"),
    ("theory allows everything", [floor(psnr=147.0)], "inconclusive", "weak-undefended"),
    ("theory excludes it", [floor(psnr=11.0)], "within policy", ""),
    ("half of the directions are hidden", [floor(infinite=True, rank=50, unknowns=100)], "within policy", ""),
    ("one in a thousand is", [floor(infinite=True, rank=999, unknowns=1000)], "inconclusive", "weak-undefended"),
]


@pytest.mark.parametrize(("findings", "outcome", "code"), [t[1:] for t in FLOORS], ids=[t[0] for t in FLOORS])
def test_an_undefended_update_passes_only_if_theory_says_why(
    findings: list[FindingRow], outcome: str, code: str
) -> None:
    rows = [make(0, 9), control(1), planted(2)]
    verdict = judge(rows, None, plan_of("none"), findings)
    assert verdict.outcome == outcome
    assert not code or (verdict.reasons[0].code, verdict.reasons[0].remedy is None) == (code, False)
    weight_update = judge(rows, None, plan_of("none", has_floor=False), findings)
    assert weight_update.outcome == ("inconclusive" if code == "weak-undefended" else "within policy")


def test_an_attack_that_fails_without_the_defence_does_not_test_it() -> None:
    defended = make(1, 9, defense=NOISE, adaptive=True)
    floors = [floor(psnr=150.0), floor(NOISE, psnr=5.0)]
    weak = judge([make(0, 9), defended, control(2), planted(3)], None, plan_of("none", NOISE), floors)
    assert [s.outcome for s in weak.settings] == ["inconclusive", "inconclusive"]
    assert weak.settings[1].reasons[0].code == "weak-undefended"
    strong = judge([make(0, 35), defended, control(2), planted(3)], None, plan_of("none", NOISE), floors)
    assert [s.outcome for s in strong.settings] == ["leaks", "within policy"]
    only = [defended, control(2), make(0, 35, control="undefended")]
    assert judge(only, None, plan_of(NOISE), floors[1:]).outcome == "within policy"


def test_a_wide_gap_to_theory_is_a_doubt() -> None:
    rows = [make(0, 35), make(1, 15, defense=NOISE, adaptive=True), control(2)]
    for allowed, outcome in ((60.0, "inconclusive"), (20.5, "inconclusive"), (19.9, "within policy")):
        verdict = judge(rows, None, plan_of("none", NOISE), [floor(NOISE, psnr=allowed)])
        assert verdict.settings[1].outcome == outcome, allowed
    near = [make(0, 35), make(1, 19.5, defense=NOISE, adaptive=True), control(2)]
    assert judge(near, None, None, [floor(NOISE, psnr=21.0)]).settings[1].outcome == "within policy"


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        (["optimiser failed"], "inconclusive"),
        (["optimiser failed", "undecided"], "inconclusive"),
        (["optimiser failed", "recovered"], "within policy"),
        (["not identifiable"], "within policy"),
        (["undecided"], "within policy"),
    ],
)
def test_a_search_that_failed_is_a_doubt(told: list[str], outcome: str) -> None:
    rows = [make(n, 9, attack=f"{n}()", diagnosis=what) for n, what in enumerate(told)]
    rows += [control(7, attack="0()"), planted(8, attack="0()")]
    if "recovered" in told:
        assert judge(rows, None, 4).outcome == "inconclusive", "an attack without a positive control supports nothing"
        rows.append(planted(9, attack="1()"))
    assert judge(rows, None, 4).settings[0].outcome == outcome


LABELS: list[tuple[str, dict[str, Any], list[bool | None], dict[str, Any], str]] = [
    ("no limit", {}, [True, True], {}, "within policy"),
    ("above the limit", {"max_label_accuracy": 0.5}, [True, True], {}, "leaks"),
    ("at the limit", {"max_label_accuracy": 0.5}, [True, False], {}, "within policy"),
    ("not above chance", {"max_label_accuracy": 0.4}, [True, False], {"label_chance": 0.5}, "within policy"),
    ("not named", {"max_label_accuracy": 0.5}, [None, None], {}, "inconclusive"),
]


@pytest.mark.parametrize(("policy", "named", "plan", "outcome"), [t[1:] for t in LABELS], ids=[t[0] for t in LABELS])
def test_labels_leak_against_their_limit_and_chance(
    policy: dict[str, Any], named: list[bool | None], plan: dict[str, Any], outcome: str
) -> None:
    rows = [make(index, 9, index=index, label_correct=right) for index, right in enumerate(named)]
    blind = [control(2 + index, index=index, label_correct=False) for index in range(2)]
    verdict = judge([*rows, *blind, planted(4)], policy, {"settings": [], "total": 5, **plan})
    assert verdict.outcome == outcome
    setting = verdict.settings[0]
    assert setting.label_baseline == plan.get("label_chance", 0.0)
    assert bool(setting.remarks) == (policy == {} and named == [True, True])


@pytest.mark.parametrize("measure", ["identified", "label_correct"])
@pytest.mark.parametrize(("right", "outcome"), [(1, "inconclusive"), (2, "inconclusive"), (3, "leaks")])
def test_shares_in_an_unfinished_audit_are_of_all_that_was_planned(measure: str, right: int, outcome: str) -> None:
    limit = {"identified": "max_identification", "label_correct": "max_label_accuracy"}[measure]
    rows = [make(index, 9, index=index, **{measure: True}) for index in range(right)]
    setting = {"protocol": SGD, "defense": "none", "jobs": 4}
    plan = {"settings": [setting], "total": 4, "examples": 4, "label_chance": 0.1, "budget": "10 m"}
    verdict = judge(rows, {limit: 0.5}, plan)
    assert verdict.outcome == outcome
    late = [reason for reason in verdict.reasons if reason.code == "attempts-missing"]
    assert [(r.count, r.total, r.budget, r.remedy and r.remedy.kind) for r in late] == [
        (4 - right, 4, "10 m", "more-time")
    ]


def test_a_finding_that_was_planned_and_not_made_is_no_pass() -> None:
    rows = [make(0, 9), control(1), planted(2)]
    setting = {"protocol": SGD, "defense": "none", "jobs": 1}
    assert judge(rows, None, {"settings": [setting], "total": 3}).outcome == "within policy"
    missing = judge(rows, None, {"settings": [{**setting, "findings": 1}], "total": 3})
    assert missing.outcome == "inconclusive"
    assert [(reason.code, reason.count) for reason in missing.reasons] == [("findings-missing", 1)]


def test_labels_that_the_adversary_knows_do_not_leak() -> None:
    rows = [make(0, 9, label_correct=True, labels="yes"), control(1), planted(2)]
    verdict = judge(rows, {"max_label_accuracy": 0.5})
    assert verdict.outcome == "inconclusive"
    assert verdict.reasons[0].code == "labels-known"
    assert math.isnan(verdict.settings[0].label_accuracy)


@pytest.mark.parametrize(
    ("numbers", "given", "outcome"),
    [
        ({"label_correct": True}, None, "within policy"),
        ({"label_correct": False}, None, "inconclusive"),
        ({"label_correct": None}, None, "inconclusive"),
        ({"label_correct": False}, 12.0, "within policy"),
        ({"label_correct": False}, 25.0, "inconclusive"),
    ],
    ids=["right", "wrong", "untold", "no better with the right ones", "only they hide it"],
)
def test_uncertain_labels_matter_only_where_they_decide(
    numbers: dict[str, Any], given: float | None, outcome: str
) -> None:
    attempt = make(0, 9, flags=("labels uncertain",), given_psnr=given, **numbers)
    verdict = judge([attempt, control(1), planted(2)])
    assert verdict.outcome == outcome
    assert outcome == "within policy" or verdict.reasons[0].code in ("labels-wrong", "labels-hide")


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
