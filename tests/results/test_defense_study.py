"""The defence study: the front, ties, what is compared and what is not, and what to choose."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakscope.results.defense_study import Study, StudyRow, cheapest, dominates, make_study, worth_of_knowing
from leakscope.results.records import FindingRow, Row
from leakscope.results.verdict import judge

SGD = "FedSGD()"
POINTS = st.lists(st.tuples(st.integers(0, 12).map(float), st.integers(0, 12).map(float)), min_size=1, max_size=12)


def _attempt(defense: str, psnrs: Sequence[float], attack: str = "A()", **facts: Any) -> Row:
    job = {"protocol": SGD, "defense": defense, "attack": attack, "attack_name": "a", "seed": 0, "batch": 0}
    examples = [
        {"index": index, "psnr": psnr, "rmse": 10 ** (-psnr / 20), "identified": facts.get("identified", True)}
        for index, psnr in enumerate(psnrs)
    ]
    kind = "positive" if facts.get("control") == "planted" else "held-out"
    control = {"control": facts["control"], "control_kind": kind} if "control" in facts else {}
    result = {"examples": examples, "adaptive": facts.get("adaptive", True)}
    key = f"{defense}{attack}{facts.get('control', '')}"
    return Row.read(key, 0, "done", {**job, **control}, result)


def _training(defense: str, accuracies: Sequence[float], **content: Any) -> list[FindingRow]:
    return [
        FindingRow(
            *(f"{defense}{seed}", 0, "utility", "done", SGD, defense, 0, seed),
            {"accuracy": accuracy, "loss": 1 - accuracy, "test_loss": 1.0, "chance": 0.1, **content},
        )
        for seed, accuracy in enumerate(accuracies)
    ]


def _study(rows: list[Row], findings: list[FindingRow], tolerance: float = 0.02, planted: float = 90.0) -> Study:
    """The study of rows whose attack finds what lies open: a planted example at so many dB."""
    rows = [*rows, _attempt("none", [planted], control="planted")]
    study = make_study(judge(rows, {"min_lift": 0.0}), rows, findings, tolerance)
    assert study is not None
    return study


def _of(study: Study) -> dict[str, StudyRow]:
    return {row.defense: row for row in study.rows}


# -- the front --


def pareto_front(points: list[tuple[float, float]], leakage: float = 0.0, utility: float = 0.0) -> list[bool]:
    """Which of the points no other dominates; one that is not finite cannot be told."""
    measured = [all(map(math.isfinite, point)) for point in points]
    beaten = [any(dominates(other, point, leakage, utility) for other in points) for point in points]
    return [known and not worse for known, worse in zip(measured, beaten, strict=True)]


@given(POINTS)
def test_without_tolerance_the_front_is_what_a_definition_says(points: list[tuple[float, float]]) -> None:
    for point, on_front in zip(points, pareto_front(points), strict=True):
        beaten = any(o[0] <= point[0] and o[1] >= point[1] and o != point for o in points)
        assert on_front == (not beaten)


@given(POINTS, st.floats(0, 4), st.floats(0, 4))
def test_a_front_is_never_empty_whatever_the_tolerance(
    points: list[tuple[float, float]], leakage: float, utility: float
) -> None:
    assert any(pareto_front(points, leakage, utility))


@given(POINTS, st.floats(0, 4), st.floats(0, 4))
def test_nothing_dominates_both_ways(points: list[tuple[float, float]], leakage: float, utility: float) -> None:
    for one in points:
        for other in points:
            both = dominates(one, other, leakage, utility) and dominates(other, one, leakage, utility)
            assert not both


def test_what_was_not_measured_is_never_on_the_front() -> None:
    assert pareto_front([(math.nan, 1.0), (5.0, math.nan), (5.0, -math.inf), (9.0, 0.5)]) == [False, False, False, True]


# -- rows --


def test_the_strongest_attack_counts_for_each_example() -> None:
    rows = [_attempt("none", [10.0, 30.0], "A()"), _attempt("none", [20.0, 12.0], "B()")]
    row = _of(_study(rows, _training("none", [0.9])))["none"]
    assert row.leakage == 25.0
    assert row.highest == 30.0
    assert row.error == pytest.approx((10**-1.0 + 10**-1.5) / 2)


def test_exact_copies_leak_no_more_than_those_that_look_alike_and_guesses_are_a_floor() -> None:
    rows = [
        _attempt("none", [200.0, 80.0]),
        _attempt("N()", [4.0, 5.0]),
        _attempt("none", [11.0, 13.0], "none", control="mean"),
    ]
    found = _of(_study(rows, [*_training("none", [0.9]), *_training("N()", [0.8])]))
    assert found["none"].leakage == 60.0
    assert found["N()"].leakage == 12.0
    assert found["N()"].guess == 12.0


def test_cost_is_taken_seed_by_seed() -> None:
    rows = [_attempt("none", [30.0]), _attempt("N()", [10.0])]
    found = _of(_study(rows, [*_training("none", [0.9, 0.5]), *_training("N()", [0.8, 0.5])]))
    assert found["N()"].cost == pytest.approx(0.05)
    assert found["N()"].cost_interval == pytest.approx((0.0, 0.1))
    assert found["none"].cost == 0.0


def test_a_defence_that_nobody_knew_beats_nothing_and_is_not_chosen() -> None:
    rows = [_attempt("none", [40.0]), _attempt("N()", [18.0]), _attempt("Secret()", [8.0], adaptive=False)]
    study = _study(rows, [*_training("none", [0.9]), *_training("N()", [0.7]), *_training("Secret()", [0.9])])
    found = _of(study)
    assert not found["Secret()"].comparable
    assert not found["Secret()"].on_front
    assert found["Secret()"].doubts[0].code == "defence-unused"
    assert found["N()"].on_front
    assert {choice.row.defense for choice in study.choices if choice.row is not None} <= {"none", "N()"}


def test_attacks_that_miss_what_lies_open_recommend_nothing() -> None:
    rows = [_attempt("none", [9.0]), _attempt("N()", [8.0])]
    trainings = [*_training("none", [0.9]), *_training("N()", [0.9])]
    study = _study(rows, trainings, planted=10.0)
    assert not any(row.comparable or row.on_front for row in study.rows)
    assert all(row.doubts[0].code.startswith("weak-") for row in study.rows)
    assert not any(choice.row for choice in study.choices)
    assert any(row.comparable for row in _study(rows, trainings).rows)


def test_a_training_that_learns_nothing_without_a_defence_compares_nothing() -> None:
    rows = [_attempt("none", [30.0]), _attempt("N()", [10.0])]
    study = _study(rows, [*_training("none", [0.15]), *_training("N()", [0.14])])
    assert not any(row.comparable for row in study.rows)
    assert "nothing-learnt" in {doubt.code for doubt in study.rows[1].doubts}


def test_ties_are_settled_by_the_tolerance() -> None:
    rows = [_attempt("A()", [20.0]), _attempt("B()", [19.0])]
    trainings = [*_training("A()", [0.90]), *_training("B()", [0.89])]
    within = _of(_study(rows, trainings, tolerance=0.02))
    assert within["A()"].on_front
    assert within["B()"].on_front
    rows = [_attempt("A()", [20.0]), _attempt("B()", [15.0])]
    beaten = _of(_study(rows, trainings, tolerance=0.02))["A()"]
    assert beaten.beaten_by == "B()"
    assert not beaten.on_front
    assert _of(_study(rows, trainings, tolerance=0.001))["A()"].on_front


def test_one_from_which_more_are_identified_beats_nothing() -> None:
    rows = [_attempt("A()", [15.0], identified=False), _attempt("B()", [12.0], identified=True)]
    found = _of(_study(rows, [*_training("A()", [0.8]), *_training("B()", [0.9])]))
    assert found["A()"].on_front
    assert found["B()"].on_front


def test_training_that_broke_down_is_told_and_counts_as_it_is() -> None:
    rows = [_attempt("none", [40.0]), _attempt("N()", [9.0])]
    broken = _training("N()", [0.1], diverged=True, loss=None, test_loss=None)
    row = _of(_study(rows, [*_training("none", [0.9]), *broken]))["N()"]
    assert row.training is not None
    assert row.training.losses == (math.inf,)
    assert row.cost == pytest.approx(0.8)
    assert (row.doubts[0].code, row.doubts[0].count, row.doubts[0].total) == ("training-diverged", 1, 1)


def test_without_trainings_there_is_no_study_and_without_attacks_no_comparison() -> None:
    rows = [_attempt("none", [40.0])]
    assert make_study(judge(rows), rows, []) is None
    failed = FindingRow("k", 0, "utility", "failed", SGD, "none", 0, 0, {}, "ValueError: no")
    row = _of(_study(rows, [failed]))["none"]
    assert row.training is None
    assert not row.comparable
    assert [doubt.code for doubt in row.doubts] == ["no-training"]


# -- choices --


def test_the_cheapest_that_keeps_every_example_below_the_limit() -> None:
    rows = [
        _attempt("none", [50.0, 50.0]),
        _attempt("Weak()", [26.0, 10.0]),
        _attempt("Medium()", [19.0, 18.0]),
        _attempt("Strong()", [11.0, 11.0], identified=False),
    ]
    accuracies = {"none": 0.9, "Weak()": 0.89, "Medium()": 0.8, "Strong()": 0.4}
    study = _study(rows, [f for name, value in accuracies.items() for f in _training(name, [value])])
    chosen = {choice.limits: choice.row.defense if choice.row else None for choice in study.choices}
    assert chosen == {(30.0,): "Weak()", (25.0, 20.0): "Medium()", (15.0, 12.0): "Strong()", (): "Strong()"}


def test_limits_that_a_guess_exceeds_are_left_out() -> None:
    rows = [_attempt("none", [16.0]), _attempt("none", [14.0], "none", control="mean")]
    study = _study(rows, _training("none", [0.9]))
    assert {limit for choice in study.choices for limit in choice.limits} == {30.0, 25.0, 20.0, 15.0}


@given(st.lists(st.tuples(st.floats(5, 40), st.floats(0, 1)), min_size=1, max_size=8), st.floats(0, 0.2))
def test_the_cheapest_is_within_the_tolerance_of_the_best_and_leaks_least_of_those(
    points: list[tuple[float, float]], tolerance: float
) -> None:
    bare = StudyRow(protocol=SGD, defense="D()", outcome="")
    rows = [dataclasses.replace(bare, leakage=leakage, utility=utility) for leakage, utility in points]
    best, most = cheapest(rows, tolerance), max(utility for _, utility in points)
    assert best is not None
    assert most - best.utility <= tolerance
    assert all(row.leakage >= best.leakage for row in rows if most - row.utility <= tolerance)


# -- what knowing is worth --


def test_worth_compares_the_same_attack_on_the_same_examples() -> None:
    knows, ignores = "A(ignore_defense=False, steps=3)", "A(ignore_defense=True, steps=3)"
    other = "A(ignore_defense=True, steps=4)"
    rows = [
        _attempt("N()", [20.0, 10.0], knows),
        _attempt("N()", [12.0, 12.0, 9.0], ignores),
        _attempt("N()", [1.0], other),
    ]
    [worth] = worth_of_knowing(rows)
    assert (worth.gain, worth.examples, worth.interval) == (3.0, 2, (-2.0, 8.0))
