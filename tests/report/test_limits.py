"""Floor and best attack side by side, and what they say together."""

from __future__ import annotations

from typing import Any

import pytest

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
    assert section(row()) == {"lines": [], "ranked": False}


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
