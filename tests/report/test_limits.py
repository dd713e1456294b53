"""Floor and best attack side by side, and what they say together."""

from __future__ import annotations

from typing import Any

import pytest
from fabricate import finding, floor, rounds, setting

from leakscope.limits import Channel, limits
from leakscope.models import build_model
from leakscope.report import limits_tables
from leakscope.report.limits import limits_section
from leakscope.results import FindingRow, Row

CELL = ("FedSGD()", "none")


def row(position: int = 0, *, mse: float = 1e-2, batch: int = 0, **result: Any) -> Row:
    job = {"protocol": CELL[0], "defense": CELL[1], "batch": batch, "attack": "a"}
    return Row.read(str(position), position, "done", job, {"examples": [{"index": 0, "mse": mse}], **result})


def theory(content: Any, **changes: Any) -> FindingRow:
    """A floor, or what rounds give away."""
    kind = "rounds" if isinstance(content, dict) and content.get("kind") == "vertical" else "floor"
    return finding(changes.pop("kind", kind), content, CELL, **changes)


def section(*parts: Row | FindingRow) -> dict[str, Any]:
    rows = [part for part in parts if isinstance(part, Row)]
    return limits_section(rows, [part for part in parts if isinstance(part, FindingRow)], [setting("S1", *CELL)])


def test_nothing_to_tell_is_no_section() -> None:
    assert section(row()) == {"lines": [], "ranked": False, "rounds": [], "meanings": [], "sentences": []}


@pytest.mark.parametrize(
    "best, allowed, more, words",
    [
        (1e-6, 80.0, {}, "recovered"),
        (
            *(1e-2, 60.0, {}),
            "no eye tells from the original, and the best attack reached a recognisable picture (40 dB less)",
        ),
        (1e-2, 60.0, {"converged": 0.5, "note": "stopped early"}, "does not exclude"),
        (1e-2, 5.0, {}, "better than theory allows to one without prior knowledge"),
        (1e-2, 22.0, {}, "near what theory allows"),
    ],
)
def test_what_they_say_together(best, allowed, more, words) -> None:
    (line,) = section(row(mse=best), theory(floor(allowed, **more)))["lines"]
    assert words in " ".join(line["sentences"])
    assert line["floor"]["small"].startswith(f"{allowed:.1f} dB, RMSE ")


def test_the_floor_is_compared_with_attacks_on_its_client() -> None:
    (line,) = section(theory(floor(60.0, rank=60)), row(1, mse=1e-2), row(2, mse=1e-9, batch=1))["lines"]
    assert line["best"]["small"] == "20.0 dB, RMSE 0.1"
    assert line["floor"]["rank"] == "60 of 64"
    (line,) = section(theory(floor(60.0), batch=1), row(1, mse=1e-2), row(2, mse=1e-3, batch=1))["lines"]
    assert line["best"]["small"] == "30.0 dB, RMSE 0.032"
    (line,) = section(theory(floor(60.0)))["lines"]
    assert line["best"]["words"] == "–", "every attack was refused"
    assert line["floor"]["words"] == "a copy that no eye tells from the original"


@pytest.mark.parametrize(
    "psnr, words",
    [
        (-35.0, "nothing better than a blank picture"),
        (147.0, "an essentially exact copy"),
        (24.0, "a recognisable picture"),
    ],
)
def test_a_newcomer_reads_words_and_the_number_is_in_small_print(psnr: float, words: str) -> None:
    (line,) = section(row(), theory(floor(psnr)))["lines"]
    assert line["floor"]["words"] == words
    assert f"{psnr:.1f} dB".replace("-", "−") in line["floor"]["small"]


@pytest.mark.parametrize("kind", ["floor", "rounds"])
def test_why_a_floor_is_missing(kind: str) -> None:
    told = {"kind": kind, "status": "failed", "error": "MemoryError: 3 GB\nTraceback"}
    section_ = section(row(diagnosis={"outcome": "undecided", "reason": ""}), theory(None, **told))
    line = (section_["lines"] or section_["rounds"])[0]
    said = line["floor"]["words"] if kind == "floor" else " ".join(line["sentences"])
    assert said.rstrip(".") == "Not computed: MemoryError: 3 GB", "and nothing is claimed of the batches"
    assert line["outcomes"] == [{"name": "undecided", "jobs": 1}]


@pytest.mark.parametrize(
    "noise, words", [(1e3, "nothing better than a blank picture"), (1e-9, "an essentially exact copy")]
)
def test_the_table_of_a_model_says_it_in_words_too(noise: float, words: str) -> None:
    net = build_model("mlp", input_shape=(1, 4, 4), num_classes=3, hidden=8, activation="sigmoid")
    tables = limits_tables(limits(net, (1, 4, 4), batch=1, channel=Channel(noise=noise)))
    rows = {row[0]: row[1:] for table in tables for row in table.rows}
    assert rows["what theory allows"][0] == words
    assert "every 20 dB more make the error ten times smaller" in rows["what theory allows"][1]
    assert "highest PSNR" not in rows


def test_why_there_is_no_floor_where_none_was_asked_for() -> None:
    undecided = row(diagnosis={"outcome": "undecided", "reason": ""})
    (line,) = section(undecided)["lines"]
    assert line["floor"]["words"].startswith("Not computed: the audit was run without findings")
    (line,) = section(undecided, theory({}, kind="trajectory"))["lines"]
    assert line["floor"]["words"] == (
        "Not computed: the bound is that of one update, and this protocol sends something else"
    )


@pytest.mark.parametrize(
    "damage", [None, 3, "x", [], {"psnr": "x", "interval": [1], "rank": {}, "sigma": None}], ids=str
)
def test_damaged_floors_do_not_stop_the_page(damage: Any) -> None:
    (line,) = section(row(), theory(damage))["lines"]
    assert line["floor"]["words"] == "–"
    assert line["sentences"] == []


def test_outcomes_are_counted_and_the_undecided_are_decided_by_the_floor() -> None:
    undecided = {"outcome": "undecided", "reason": ""}
    found = section(
        theory(floor(60.0)),
        row(0, mse=1e-2, diagnosis=undecided),
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
    (line,) = section(row(0, mse=1e-2, diagnosis=undecided), theory({"infinite": True, "unknowns": 4}))["lines"]
    assert line["outcomes"] == [{"name": "not identifiable", "jobs": 1}]
    (line,) = section(row(0, diagnosis=undecided), theory({"reason": "too large"}))["lines"]
    assert line["outcomes"] == [{"name": "undecided", "jobs": 1}]
    assert "too large" in line["floor"]["words"]


def sentences(**changes: Any) -> str:
    found = section(row(), theory(rounds(**changes)))
    assert not found["lines"], "vertical learning has no floor"
    return " ".join(sentence["text"] for sentence in found["sentences"])


def test_the_rounds_of_vertical_learning_have_a_table_of_their_own() -> None:
    undecided = {"outcome": "undecided", "reason": ""}
    found = section(row(mse=1e-2, diagnosis=undecided), theory(rounds(invisible=(2, 0), determined=(10, 12))))
    (line,) = found["rounds"]
    assert line["batches"] == {"text": "15 of 3", "small": "of 12, announced"}
    assert line["independent"] == "12 of 12"
    assert line["needed"] == {"text": "12", "small": "8 to tell apart"}
    assert line["invisible"] == "2 for bank"
    assert line["follows"] == {"text": "10 of 12", "small": ""}
    assert line["best"]["small"] == "20.0 dB, RMSE 0.1"
    assert line["outcomes"] == [{"name": "undecided", "jobs": 1}]
    assert found["ranked"] is False


def test_too_few_rounds_are_no_safety_and_the_page_says_so() -> None:
    assert "no safety" in sentences(rounds=9, rank=9, determined=(0, 0))
    assert "no safety" not in sentences(rounds=15)
    # Batches of all samples are all alike: no number of rounds tells them apart.
    assert "no safety" not in sentences(rounds=9, rank=1, least=None, determined=(0, 0))
    (line,) = section(row(), theory(rounds(rounds=9, rank=9, determined=(0, 0), separable=(12, 11))))["rounds"]
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
    (line,) = section(theory(rounds(announced=False)))["rounds"]
    assert line["batches"]["small"] == "of 12, kept secret"
    assert line["best"]["words"] == "–"


def test_a_reason_or_damage_in_place_of_rounds() -> None:
    told = {"kind": "vertical", "announced": True, "reason": "too many samples"}
    found = section(row(), theory(told))
    assert found["sentences"] == [{"names": "S1", "text": "Not computed: too many samples."}]
    assert found["rounds"][0]["independent"] == "–"
    for damage in ("x", 3, {"workers": 5, "index": "x", "needed": [], "samples": None}, {"workers": ["x", {}]}):
        assert len(section(row(), theory({**told, "found": damage}))["rounds"]) == 1
