"""What a pass needs: a result that can be trusted on every client, an explained update, and the standard attacks."""

from __future__ import annotations

from typing import Any

import pytest

from leakscope.results import Row, judge
from leakscope.results.coverage import NOISE_MARGIN, ROUNDING, explained
from verdict_rows import NOISE, SGD, control, held_out, make, planted

HOLDS = {"residual": 0.3, "tolerance": 1.0, "free_directions": 0, "method": "masks decoded"}
OPEN = {**HOLDS, "free_directions": 12}


def tried(position: int, attack: str, *, index: int = 0, defense: str = NOISE, **facts: Any) -> list[Row]:
    """An attempt that knows the defence, its control on noise, and a positive control that succeeds."""
    return [
        make(
            position, facts.pop("psnr", 9), attack=attack, index=index, defense=defense, **{"adaptive": True, **facts}
        ),
        control(position + 1, attack=attack, index=index),
        planted(position + 2, attack=attack, index=index),
    ]


def plan_of(rows: list[Row], *standard: str, defense: str = NOISE) -> dict[str, Any]:
    attempts = sum(row.counts for row in rows)
    settings = [{"protocol": SGD, "defense": defense, "jobs": attempts}]
    return {"total": len(rows), "settings": settings, "standard": {SGD: list(standard)}}


def test_a_second_attack_with_a_flag_costs_no_pass_and_the_first_alone_buys_none() -> None:
    """The MNIST example of PyTorch under FedAvg and noise: sme passed, and with cocktail-party beside it did not."""
    sme, cocktail = tried(0, "SME()"), tried(3, "Cocktail()", flags=("ill-conditioned",))
    standard = ("sme", "cocktail", "head")
    both = [*sme, *cocktail]
    for rows, lacking in ((sme, ("cocktail", "head")), (both, ("head",))):
        (reason,) = judge(rows, None, plan_of(rows, *standard)).settings[0].reasons
        assert (reason.code, reason.names) == ("standard-not-run", lacking)
        assert reason.remedy is not None
        standard_attacks, waive = reason.remedy.alternatives
        assert (standard_attacks.kind, waive.kind, waive.arguments) == (
            "standard-attacks",
            "waive",
            {"attacks": lacking},
        )
    every = [*both, *tried(6, "Head()", status="refused", error="NotApplicable: no head")]
    assert judge(every, None, plan_of(every, *standard)).outcome == "within policy"
    assert judge(both, {"waive": ["head"]}, plan_of(both, *standard)).outcome == "within policy"
    assert judge(cocktail, {"waive": ["head", "sme"]}, plan_of(cocktail, *standard)).outcome == "inconclusive"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"status": "failed"}, "job-failed"),
        ({"status": "refused", "error": "MissingKnowledge: lr"}, "job-starved"),
    ],
)
def test_a_standard_attack_must_give_a_result_or_not_apply(change: dict[str, Any], code: str) -> None:
    rows = [*tried(0, "A()"), *tried(3, "B()", **change)]
    (reason,) = judge(rows, None, plan_of(rows, "a", "b")).settings[0].reasons
    assert (reason.code, reason.count) == (code, 1)
    assert judge(rows, None, plan_of(rows, "a")).outcome == "within policy", "not a standard one, and another covers"
    assert judge(rows, {"waive": ["b"]}, plan_of(rows, "a", "b")).outcome == "within policy"
    twin = make(6, 9, attack="B(steps=9)", defense=NOISE, adaptive=True, flags=("did not converge",))
    twin = Row(twin.key, twin.position, "done", type(twin.job)(**{**vars(twin.job), "attack_name": "b"}), twin.result)
    assert judge([*rows, twin], None, plan_of([*rows, twin], "a", "b")).outcome == "within policy", "by its name"


def test_every_client_must_be_covered_and_not_by_the_same_attack() -> None:
    flag = {"flags": ("did not converge",)}
    first = [*tried(0, "A()"), make(3, 9, attack="A()", index=1, defense=NOISE, adaptive=True, **flag)]
    assert judge(first, None, plan_of(first)).settings[0].reasons[0].names == ("did not converge",)
    second = [*tried(4, "B()", index=1), make(7, 9, attack="B()", defense=NOISE, adaptive=True, **flag)]
    assert judge([*first, *second], None, plan_of([*first, *second])).outcome == "within policy"


@pytest.mark.parametrize("fate", ["refused", "failed"])
def test_a_client_without_any_result_does_not_pass(fate: str) -> None:
    rows = [*tried(0, "A()"), make(3, attack="A()", index=1, defense=NOISE, status=fate, error="NotApplicable: no")]
    (reason,) = judge(rows, None, plan_of(rows)).settings[0].reasons
    assert (reason.code, reason.count) == ({"refused": "no-support", "failed": "job-failed"}[fate], 1)


def test_a_failed_control_costs_only_its_own_attack_its_word() -> None:
    rows = [*tried(0, "A()"), *tried(3, "B()"), control(6, attack="B()", status="failed")]
    assert judge(rows, None, plan_of(rows, "a", "b")).outcome == "within policy"
    alone = [*tried(0, "B()"), control(3, attack="B()", status="failed")]
    assert "control-failed" in {reason.code for reason in judge(alone, None, plan_of(alone)).reasons}
    guess = held_out(6, 7, status="failed")
    told = judge([*rows[:6], guess], None, plan_of([*rows[:6], guess])).reasons
    assert [(reason.code, reason.count, reason.scenario) for reason in told] == [("control-failed", 1, None)]


RESIDUALS: list[tuple[str, tuple[float | None, float | None], str]] = [
    ("an update without a defence, nearly all of it unexplained", (0.8, 1e-6), "inconclusive"),
    ("explained, and the image is wrong: the update does not determine it", (1e-5, 1e-6), "within policy"),
    ("strong noise, of which an attack explains nothing", (1.0, 0.9999), "within policy"),
    ("strong noise, and a result that adds to it", (1.4, 0.9999), "within policy"),
    ("noise that is explained as by the truth", (0.5, 0.5), "within policy"),
    ("noise that is fitted", (0.45, 0.5), "within policy"),
    ("weak noise, and the image not found", (1.0, 0.95), "inconclusive"),
    ("just within the margin of noise", (0.5 * (1 + NOISE_MARGIN - 1e-6) ** 0.5, 0.5), "within policy"),
    ("just beyond it", (0.5 * (1 + NOISE_MARGIN + 1e-4) ** 0.5, 0.5), "inconclusive"),
    ("just within rounding", (0.999 * ROUNDING, 0.0), "within policy"),
    ("just beyond it", (1.001 * ROUNDING, 0.0), "inconclusive"),
    ("not computed", (None, None), "within policy"),
    ("not computed of the truth", (0.8, None), "within policy"),
]


@pytest.mark.parametrize(("residuals", "outcome"), [r[1:] for r in RESIDUALS], ids=[r[0] for r in RESIDUALS])
def test_no_update_passes_that_no_attack_explains(residuals: tuple[float | None, float | None], outcome: str) -> None:
    for defense in ("none", NOISE):
        rows = tried(0, "A()", defense=defense, residuals=residuals)
        verdict = judge(rows, None, plan_of(rows, "a", defense=defense))
        assert verdict.outcome == outcome
        assert outcome == "within policy" or verdict.reasons[0].code == "unexplained"
    if None not in residuals:
        assert explained(*residuals) == (outcome == "within policy")  # type: ignore[arg-type]


def test_the_best_attack_on_each_client_must_explain_its_update() -> None:
    poor, good = {"residuals": (0.9, 0.1)}, {"residuals": (0.1, 0.1)}
    rows = [*tried(0, "A()", **poor), *tried(3, "B()", **good)]
    assert judge(rows, None, plan_of(rows)).outcome == "within policy"
    rows += [make(6, 9, attack="A()", index=1, defense=NOISE, adaptive=True, **poor)]
    (reason,) = judge(rows, None, plan_of(rows)).settings[0].reasons
    assert (reason.code, reason.count, reason.total, reason.value) == ("unexplained", 1, 2, 0.9)


def test_what_an_attack_explains_that_does_not_know_the_defence_tells_nothing_of_it() -> None:
    """Beside what it does not know of the defence, everything is small."""
    rows = [
        *tried(0, "A()", residuals=(0.6, 1e-6)),
        *tried(3, "B()", adaptive=False, residuals=(0.3, 0.4)),
    ]
    assert judge(rows, None, plan_of(rows)).reasons[0].code == "unexplained"


def test_a_certified_example_leaks_without_a_lift() -> None:
    near = [make(0, 90, certificate=HOLDS), control(1, 89)]
    assert judge(near).outcome == "leaks"
    assert judge([make(0, 90, certificate=HOLDS)]).outcome == "leaks", "nor is a control needed"
    assert judge([make(0, 90), control(1, 89), planted(2, 99)]).outcome == "within policy"
    unproved = [make(0, 90, certificate=OPEN), control(1, 89), planted(2, 99)]
    assert judge(unproved).outcome == "within policy", "that others explain it too is no proof, and no doubt"


def test_a_certified_example_goes_before_a_higher_psnr() -> None:
    rows = [make(0, 60, attack="B()"), control(1, attack="B()"), make(2, 50, certificate=HOLDS), control(3)]
    worst = judge(rows).worst
    assert worst is not None
    assert (worst.psnr, worst.certified) == (50, True)
    below = [make(0, 18, attack="B()"), make(1, 12, certificate=HOLDS)]
    assert judge(below).settings[0].examples[0].psnr == 18


@pytest.mark.parametrize(
    ("psnr", "limit", "outcome"),
    [
        (19.9, 20, "inconclusive"),
        (20, 20, "leaks"),
        (None, 20, "inconclusive"),
        (29.9, 60, "inconclusive"),
        (31, 60, "within policy"),
        (60, 60, "leaks"),
    ],
)
def test_a_certificate_that_contradicts_the_measured_psnr_is_a_doubt(
    psnr: float | None, limit: float, outcome: str
) -> None:
    rows = [make(0, psnr, certificate=HOLDS), control(1), planted(2, 90)]
    verdict = judge(rows, {"max_psnr": limit})
    assert verdict.outcome == outcome
    said = any(reason.code == "certificate-contradicted" for reason in verdict.reasons)
    assert said == (outcome == "inconclusive")


def test_a_plan_of_an_older_version_asks_for_no_standard_attacks() -> None:
    rows = tried(0, "A()")
    plan = plan_of(rows, "head-first")
    assert judge(rows, None, plan).outcome == "inconclusive"
    del plan["standard"]
    assert judge(rows, None, plan).outcome == "within policy"
    failed = [*rows, make(3, attack="B()", defense=NOISE, status="failed")]
    old = {**plan_of(failed), "standard": None}
    assert judge(failed, None, old).outcome == "inconclusive", "as before"


def test_an_unfinished_audit_says_what_is_missing_and_not_what_to_add() -> None:
    rows = tried(0, "A()")
    plan = plan_of(rows, "a", "b")
    plan |= {"total": 4, "settings": [{**plan["settings"][0], "jobs": 2}], "budget": "10 m"}
    reasons = judge(rows, None, plan).reasons
    assert "10 m" in {reason.budget for reason in reasons}
    assert not any(reason.code == "standard-not-run" for reason in reasons)
