"""Floor and best attack side by side, and what they say together."""

from __future__ import annotations

from typing import Any

import pytest
from fabricate import rounds

from leakscope.audit.store import Row
from leakscope.report.limits import limits_section

SETTING = {"name": "S1", "protocol": "FedSGD()", "defense": "none", "short": "FedSGD"}


def row(position: int = 0, *, status: str = "done", mse: float = 1e-2, batch: int = 0, **result: Any) -> Row:
    job = {"protocol": "FedSGD()", "defense": "none", "control": False, "batch": batch, "attack": "a"}
    told = {"examples": [{"index": 0, "mse": mse}], **result} if status == "done" else dict(result)
    return Row(str(position), position, status, job, told or None, None, 1.0, "now")


def floor(psnr: float, **more: Any) -> dict[str, Any]:
    return {"psnr": psnr, "rmse": 10 ** (-psnr / 20), "unknowns": 64, "sigma": 0.1, "method": "exact", **more}


def section(*rows: Row) -> dict[str, Any]:
    return limits_section(rows, [SETTING])


def test_nothing_to_tell_is_no_section() -> None:
    assert section(row()) == {"lines": [], "ranked": False, "rounds": [], "sentences": []}


@pytest.mark.parametrize(
    "best, allowed, more, words",
    [
        (1e-6, 80.0, {}, "recovered"),
        (1e-2, 60.0, {}, "40 dB more"),
        (1e-2, 60.0, {"converged": 0.5, "note": "stopped early"}, "does not exclude"),
        (1e-2, 5.0, {}, "above the floor"),
        (1e-2, 22.0, {}, "near what theory allows"),
    ],
)
def test_what_they_say_together(best, allowed, more, words) -> None:
    (line,) = section(row(mse=best, limits=floor(allowed, **more)))["lines"]
    assert words in line["sentence"]
    assert line["floor"]["psnr"] == f"{allowed:.1f} dB"


def test_the_floor_may_stand_in_a_refused_row_and_is_compared_on_its_client() -> None:
    (line,) = section(
        row(0, status="refused", limits=floor(60.0, rank=60)), row(1, mse=1e-2), row(2, mse=1e-9, batch=1)
    )["lines"]
    assert line["best"]["psnr"] == "20.0 dB"
    assert line["floor"]["seen"] == "60 of 64"


def test_outcomes_are_counted_and_the_undecided_are_decided_by_the_floor() -> None:
    undecided = {"outcome": "undecided", "reason": ""}
    found = section(
        row(0, mse=1e-2, diagnosis=undecided, limits=floor(60.0)),
        row(1, mse=1e-6, diagnosis=undecided),
        row(2, mse=1e-6, diagnosis={"outcome": "recovered", "reason": ""}),
        row(4, mse=1e-2, diagnosis={"outcome": "recovered", "reason": ""}),  # the truth knows better
        row(5, mse=1e-2, batch=1, diagnosis=undecided),  # another client has another floor
        row(3, mse=1e-1, diagnosis={"outcome": "not identifiable", "reason": ""}),
    )
    assert found["lines"][0]["outcomes"] == [
        {"name": "recovered", "jobs": 2},
        {"name": "optimiser failed", "jobs": 2},
        {"name": "not identifiable", "jobs": 1},
        {"name": "undecided", "jobs": 1},
    ]
    (line,) = section(row(0, mse=1e-2, diagnosis=undecided, limits={"infinite": True, "unknowns": 4}))["lines"]
    assert line["outcomes"] == [{"name": "not identifiable", "jobs": 1}]
    (line,) = section(row(0, diagnosis=undecided, limits={"reason": "too large"}))["lines"]
    assert line["outcomes"] == [{"name": "undecided", "jobs": 1}]
    assert "too large" in line["sentence"]


def sentences(**changes: Any) -> str:
    found = section(row(limits=rounds(**changes)))
    assert not found["lines"], "vertical learning has no floor"
    return " ".join(sentence["text"] for sentence in found["sentences"])


def test_the_rounds_of_vertical_learning_have_a_table_of_their_own() -> None:
    undecided = {"outcome": "undecided", "reason": ""}
    found = section(row(mse=1e-2, limits=rounds(invisible=(2, 0), determined=(10, 12)), diagnosis=undecided))
    (line,) = found["rounds"]
    assert line["batches"] == {"text": "15 of 3", "small": "of 12, announced"}
    assert line["independent"] == "12 of 12"
    assert line["needed"] == {"text": "12", "small": "8 to tell apart"}
    assert line["invisible"] == "2 for bank"
    assert line["follows"] == {"text": "10 of 12", "small": ""}
    assert line["best"]["psnr"] == "20.0 dB"
    assert line["outcomes"] == [{"name": "undecided", "jobs": 1}]
    assert found["ranked"] is False


def test_too_few_rounds_are_no_safety_and_the_page_says_so() -> None:
    assert "no safety" in sentences(rounds=9, rank=9, determined=(0, 0))
    assert "no safety" not in sentences(rounds=15)
    # Batches of all samples are all alike: no number of rounds tells them apart.
    assert "no safety" not in sentences(rounds=9, rank=1, least=None, determined=(0, 0))
    (line,) = section(row(limits=rounds(rounds=9, rank=9, determined=(0, 0), separable=(12, 11))))["rounds"]
    assert line["follows"] == {"text": "0 of 12", "small": "11 of 12 in principle"}


def test_what_the_equations_leave_out_is_said() -> None:
    plain = sentences()
    assert plain == "Fabricated conclusion."
    assert "It learns between these rounds" in sentences(moves=True)
    assert "BatchNorm in train mode mixes" in sentences(mixes=True)
    assert "step I magnifies what it adds by up to 4.86" in sentences(alters=True)
    assert "For shop the first dense layer reads fewer numbers" in sentences(enough=(True, False))


def test_secure_shuffling_is_named_as_what_protects() -> None:
    said = sentences(announced=False)
    assert "The protection rests on the shuffling alone. Of as many batches that are known theory says: Fabri" in said
    (line,) = section(row(0, status="refused", limits=rounds(announced=False)))["rounds"]
    assert line["batches"]["small"] == "of 12, kept secret"
    assert line["best"]["psnr"] == "–"


def test_a_reason_or_damage_in_place_of_rounds() -> None:
    told = {"kind": "vertical", "announced": True, "reason": "too many samples"}
    found = section(row(limits=told))
    assert found["sentences"] == [{"names": "S1", "text": "Not computed: too many samples."}]
    assert found["rounds"][0]["independent"] == "–"
    for damage in ("x", 3, {"workers": 5, "index": "x", "needed": [], "samples": None}, {"workers": ["x", {}]}):
        assert len(section(row(limits={**told, "found": damage}))["rounds"]) == 1
