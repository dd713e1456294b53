"""The section on weight updates: there where clients sent some, right in its words, and safe against the store."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fabricate import AVG, HOSTILE, HOSTILE_ATTRIBUTE, NOISE, SGD, Fabricated, fabricate, weight_update

from leakscope.report import render, svg
from leakscope.report.findings import MAX_LINES, meaning

NAN = math.nan
HEADING = "Weight updates: what many local steps hide"


def built(*settings: tuple[str, str], examples: int = 1, **options: Any) -> Fabricated:
    return fabricate(
        settings=settings, level=(0.1,) * len(settings), examples=examples, seeds=1, failures=False, **options
    )


def tell(store: Fabricated, update: Any) -> Fabricated:
    for finding in store.findings:
        finding["content"] = update
    return store


def section(store: Fabricated, path: Path) -> str:
    page = render(store.write(path))
    if HEADING not in page:
        return ""
    return page[page.index('<section id="updates">') : page.index('<section id="curves">')]


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(chart) for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def words(text: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", text).replace("\xa0", " ").split())


def test_section_and_link_only_where_a_client_sent_weights(tmp_path: Path) -> None:
    mixed = render(built((SGD, "none"), (AVG, "none"), (AVG, NOISE)).write(tmp_path / "mixed"))
    assert mixed.count(f"<h2>{HEADING}</h2>") == 1
    assert mixed.count('href="#updates"') == 1
    assert mixed.count('<div class="card update">') == 2
    plain = render(built((SGD, "none")).write(tmp_path / "plain"))
    assert HEADING not in plain
    assert "#updates" not in plain
    without = built((AVG, "none"))
    without.findings.clear()
    assert section(without, tmp_path / "without") == "", "findings can be switched off"


def test_one_update_is_drawn_marked_and_numbered(tmp_path: Path) -> None:
    text = section(tell(built((AVG, "none")), weight_update(0.997, at=0.6, steps=25)), tmp_path / "audit")
    cosines, shares = drawings(text)
    (line,) = cosines.iter("polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()]
    assert len(places) == 21
    (dot,) = cosines.iter("circle")
    x, y = float(dot.get("cx", "")), float(dot.get("cy", ""))
    # The dot sits six tenths along the line, at its highest place, which is the smallest y.
    assert (x - places[0][0]) / (places[-1][0] - places[0][0]) == pytest.approx(0.6, abs=0.01)
    assert y == pytest.approx(min(place[1] for place in places), abs=0.2)
    labels = [str(node.text) for node in cosines.iter("text")]
    assert "0.997 at 0.60" in labels
    assert "cosine with the update" in labels
    assert any(label.startswith("β, from the weights before") for label in labels)
    assert {"local step", "share in two directions"} <= {str(node.text) for node in shares.iter("text")}
    assert "highest 0.997 at 0.60" in str(cosines.findtext("desc"))
    told = words(text)
    assert "explains 99.7 % of the direction of this update, so an attack that searches that point (SME)" in told
    for part in (
        "Local steps 25 1 update",
        "Smallest share 0.978",
        "Cosine at the start 0.979",
        "Highest cosine 0.997",
        "Found at β 0.60",
        "Loss 2.300 → 1.900",
        "Bound 41.5 10.4 × the largest squared gradient",
    ):
        assert part in told
    assert "no search is needed" not in told


def test_every_client_is_one_line(tmp_path: Path) -> None:
    """Three attacks and four batches: four updates."""
    text = section(built((AVG, "none"), examples=4), tmp_path / "audit")
    cosines, _ = drawings(text)
    names = [str(node.text).partition(":")[0] for node in cosines.iter("title")][1:]
    assert names == [f"batch {n}, seed 0" for n in range(4)]
    told = words(text)
    assert "4 updates" in told
    assert "Highest cosine 0.996 0.993 to 0.999" in told
    assert "99.9 % of the direction of the most exposed of these 4 updates" in told, "a mean would hide it"


def test_many_updates_are_capped_and_counted(tmp_path: Path) -> None:
    store = tell(built((AVG, "none"), examples=MAX_LINES + 3), weight_update(0.95))
    text = section(store, tmp_path / "audit")
    assert [len(list(chart.iter("polyline"))) for chart in drawings(text)] == [MAX_LINES] * 2
    assert f"The first {MAX_LINES} of {MAX_LINES + 3} updates are drawn" in text


def test_reasons_stand_where_numbers_are_missing(tmp_path: Path) -> None:
    store = tell(built((AVG, "none")), {"reason": "MemoryError: too large"})
    text = section(store, tmp_path / "reason")
    assert "Not computed: MemoryError: too large" in text
    assert not drawings(text)
    store = built((AVG, "none"), examples=2)
    store.findings[1] |= {"status": "failed", "content": None, "error": "MemoryError: too large\nTraceback"}
    text = section(store, tmp_path / "failed")
    assert "Not computed: MemoryError: too large</p>" in text
    assert len(drawings(text)) == 2, "the other client is shown"
    none = weight_update(0.95, bound=None, bound_reason="the bound assumes plain SGD, and this client uses adam")
    told = words(section(tell(built((AVG, "none")), none), tmp_path / "bound"))
    assert "Bound – the bound assumes plain SGD, and this client uses adam" in told
    few = section(tell(built((AVG, "none")), weight_update(0.95, steps=2)), tmp_path / "few")
    assert "At most two steps always lie in two directions." in few


@pytest.mark.parametrize(
    "update",
    [
        {},
        weight_update(0.95, betas="x", cosines=None),
        weight_update(0.95, cosines=[None] * 21, max_cosine=None, best_beta=None, start_cosine=None),
        weight_update(0.95, shares=[1.0], chosen=[0, 1]),
        {**weight_update(0.95, shares=[], chosen=[], bound="x", loss_before=[]), "steps": "many"},
        weight_update(0.95, shares=[5.0, -3.0], chosen=[-7, 1e30], gradient_norm=0.0),
        weight_update(0.95, steps=1),
    ],
    ids=range(7),
)
def test_damaged_numbers_do_not_stop_the_page(update: dict[str, Any], tmp_path: Path) -> None:
    text = section(tell(built((AVG, "none")), update), tmp_path / "audit")
    for chart in drawings(text):
        for node in chart.iter("circle"):
            assert 0 <= float(node.get("cx", "")) <= 360
            assert 0 <= float(node.get("cy", "")) <= 214
    assert 'points="nan' not in text


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    store = built((AVG, "none"), (AVG, NOISE), examples=2)
    protocol = f"Fed{HOSTILE_ATTRIBUTE}(a='{HOSTILE}')"
    for row in store.jobs:
        row["job"] |= {"protocol": protocol, "batch": HOSTILE, "seed": HOSTILE_ATTRIBUTE}
    for number, finding in enumerate(store.findings):
        finding["subject"] |= {"protocol": protocol, "batch": HOSTILE, "seed": HOSTILE_ATTRIBUTE}
        reason = {"reason": HOSTILE + HOSTILE_ATTRIBUTE}
        shown = weight_update(0.9 + number / 1000, bound=None, bound_reason=HOSTILE_ATTRIBUTE, steps=3)
        finding["content"] = reason if number % 3 == 0 else shown
    text = section(store, tmp_path / "audit")
    assert "<script" not in text
    assert "<img src=x" not in text
    assert "alert(1)" in text
    assert drawings(text), "still well-formed"


def test_words_for_each_case() -> None:
    good, middle, bad = meaning(0.995), meaning(0.95), meaning(0.6)
    assert "hide little" in good
    assert "may recover a part; the local steps hide some" in middle
    assert "highest cosine is 0.60, below 0.9" in bad
    assert "simulates them may still succeed" in bad
    assert "no search is needed" in meaning(0.999, start=0.995)
    assert "99.9" in meaning(0.99999)
    turned = meaning(0.3, sent=0.4)
    assert turned.startswith("The defence turned what was sent: its cosine with the training's own update is 0.40.")
    assert "by the local steps and the defence." in turned
    assert "simulates" not in turned
    assert "vanishes" in meaning(NAN)
    # The limits themselves belong to the better case, and just below them to the worse.
    assert "hide little" in meaning(0.99)
    assert "hide some" in meaning(0.9)
    assert "0.89, below 0.9" in meaning(0.89999)


@pytest.mark.parametrize(
    ("values", "floor"), [((0.995, 1.0), "0.99"), ((0.95, 1.0), "0.9"), ((0.3, 0.4), "0"), ((-0.4, 0.1), "-1")]
)
def test_the_axis_starts_at_a_fixed_floor(values: tuple[float, float], floor: str) -> None:
    line = svg.Line(name="a", points=((0.0, values[0]), (1.0, values[1])))
    options: dict[str, Any] = {"title": "t", "identity": "i", "x_label": "x", "y_label": "y", "x_range": (0.0, 1.0)}
    chart = ElementTree.fromstring(svg.line_plot([line], floors=(0.99, 0.9, 0.5, 0.0, -1.0), **options))
    ticks = [str(node.text) for node in chart.iter("text") if node.get("text-anchor") == "end"]
    assert (ticks[0], ticks[-1]) == (floor, "1")


def test_steps_are_whole_numbers_and_a_single_one_is_visible() -> None:
    def chart(steps: int) -> ElementTree.Element:
        line = svg.Line(name="a", points=tuple((n + 1.0, 0.995) for n in range(steps)))
        options: dict[str, Any] = {"title": "t", "identity": "i", "x_label": "x", "y_label": "y", "whole": True}
        return ElementTree.fromstring(svg.line_plot([line], x_range=(1.0, float(steps)), floors=(0.9,), **options))

    for steps in (1, 2, 3, 40):
        along = [str(t.text) for t in chart(steps).iter("text") if t.get("y") == "185"]
        assert along
        assert all(text == str(int(text)) and 1 <= int(text) <= steps for text in along)
    assert len(list(chart(1).iter("circle"))) == 1
    assert not list(chart(2).iter("circle"))
