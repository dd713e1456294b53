"""The first screen of the page: what may be shipped, what came back, by whom and when; no label, no decibel above."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fabricate import AVG, HOSTILE, NOISE, PRUNING, SGD, Fabricated, fabricate
from test_page import Page, convincing

from leakscope.report import render

BOTH = ((SGD, "none"), (SGD, NOISE))


def first_screen(built: Fabricated, directory: Path) -> tuple[str, str]:
    """The HTML of the first section, and its text."""
    html = render(built.write(directory))
    start = html.index('<section class="verdict')
    section = html[start : html.index("</section>", start) + len("</section>")]
    return section, Page(section).text


def knowing(built: Fabricated) -> Fabricated:
    """The same store, every attack knowing the defence, without theory to doubt it by."""
    for row in built.jobs:
        if row["result"] is not None:
            row["result"] |= {"adaptive": True, "flags": []}
    built.findings.clear()
    built.meta["plan"]["findings"] = 0
    return built


def test_a_defence_that_holds_is_the_headline_and_the_reference_is_told_beside_it(tmp_path: Path) -> None:
    built = knowing(fabricate(settings=BOTH, level=(0.02, 0.4), failures=False))
    html, text = first_screen(built, tmp_path / "audit")
    assert 'class="verdict o-within-policy"' in html
    assert "Within policy with GradientNoise(sigma=0.01)" in text
    assert "With GradientNoise(sigma=0.01) none of 4 images came back." in text
    assert "Without a defence all 4 images came back nearly identical." in text
    assert "Recommendation: Send these updates only with GradientNoise(sigma=0.01)." in text
    assert "counts every scenario: leaks (exit code 1)" in text
    assert [a.get("alt") for a in Page(html).all("img")] == [
        "original of example 0",
        "example 0, recovered",
        "attempt at example 0",
    ]


def test_counts_stand_in_place_of_at_least_one(tmp_path: Path) -> None:
    built = fabricate(settings=((SGD, "none"),), level=(0.01,), examples=8, failures=False)
    _, text = first_screen(built, tmp_path / "audit")
    assert "All 8 images came back nearly identical." in text
    assert "Images that came back 8 of 8" in text
    assert "Recommendation: Do not send these updates as they are." in text
    assert "at least one" not in text.lower()


def test_decibels_stand_in_small_print_only(tmp_path: Path) -> None:
    html, _ = first_screen(fabricate(), tmp_path / "audit")
    assert " dB" not in html[: html.index('class="rests"')]
    assert re.search(r"Nearest: example 0 under S2, PSNR [\d.]+ dB", html)


@pytest.mark.parametrize("show_names", [False, True])
def test_no_label_stands_on_the_first_screen(show_names: bool, tmp_path: Path) -> None:
    built = fabricate(private=True)
    built.meta["spec"]["show_names"] = show_names
    html, text = first_screen(built, tmp_path / "audit")
    assert "digit 0" not in html
    assert not re.search(r"\blabel", text)


def test_labels_that_an_older_store_holds_are_hidden_like_names(tmp_path: Path) -> None:
    built = fabricate(private=True)
    hidden = render(built.write(tmp_path / "hidden"))
    assert "digit 0" not in hidden.partition("Class names")[0]
    assert "<th>Label</th>" not in hidden
    built.meta["spec"]["show_names"] = True
    shown = render(built.write(tmp_path / "shown"))
    assert "<th>Label</th>" in shown
    assert "example 0 · digit 0" in shown
    assert "<th>Label</th>" in render(fabricate(private=False).write(tmp_path / "public"))


def test_model_data_and_person_are_named_as_the_user_says_and_nobody_else(tmp_path: Path) -> None:
    _, bare = first_screen(fabricate(), tmp_path / "bare")
    assert "lenet on digits · 2025-03-01 Leaks" in bare
    built = fabricate()
    built.meta["spec"]["about"] = {"model": "Chest net", "data": f"Ward 3 {HOSTILE}", "by": "Ann Lee"}
    html, text = first_screen(built, tmp_path / "named")
    assert f"Chest net on Ward 3 {HOSTILE} · 2025-03-01 · by Ann Lee" in text
    assert "<script" not in html


def test_an_inconclusive_scenario_says_so_and_what_to_run_next(tmp_path: Path) -> None:
    html, text = first_screen(fabricate(settings=BOTH, level=(0.3, 0.4)), tmp_path / "audit")
    assert 'class="verdict o-inconclusive"' in html
    assert "With GradientNoise(sigma=0.01) none of 4 images came back, but doubts remain." in text
    assert "The nearest attempt is" in text
    assert "Recommendation: Do not take this for a pass." in text
    assert "Next: Run the same audit with --attack" in text


def test_what_the_reference_needs_is_not_what_to_do_next(tmp_path: Path) -> None:
    built = fabricate(settings=BOTH, level=(0.02, 0.4), failures=False)
    _, text = first_screen(built, tmp_path / "audit")
    assert "Inconclusive with GradientNoise(sigma=0.01)" in text
    assert "--defense" not in text[text.index("Next:") :]


def test_many_scenarios_are_counted(tmp_path: Path) -> None:
    defenses = ("none", PRUNING, NOISE, "GradientNoise(sigma=0.1)")
    settings: Any = tuple((protocol, one) for protocol in (SGD, AVG) for one in defenses)
    built = fabricate(settings=settings, level=(0.03, 0.1, 0.3, 0.4) * 2, seeds=1, examples=2)
    html, text = first_screen(built, tmp_path / "audit")
    assert re.search(r"Of 6 defended scenarios 1 leaks, \d are inconclusive and \d stays? within the policy\.", text)
    assert re.search(r"Scenarios within policy \d of 8", text)
    assert html.count("<li>") == 7, "six scenarios and a link to the others"


def test_an_audit_that_stopped_at_a_leak_says_how_many_were_attacked(tmp_path: Path) -> None:
    built = fabricate(settings=((SGD, "none"),), level=(0.01,), examples=1, failures=False)
    built.meta["plan"]["examples"] = 6
    _, text = first_screen(built, tmp_path / "audit")
    assert "The one image attacked came back nearly identical." in text


def test_what_is_no_image_is_called_an_example(tmp_path: Path) -> None:
    built = convincing(fabricate(shape=(12,), settings=((SGD, "none"),), level=(0.3,), failures=False))
    _, text = first_screen(built, tmp_path / "audit")
    assert "None of 4 examples came back." in text
    assert "Recommendation: These updates may be sent." in text


def test_a_store_without_any_result_has_nothing_to_send(tmp_path: Path) -> None:
    built = fabricate(examples=1)
    built.jobs.clear()
    html, text = first_screen(built, tmp_path / "audit")
    assert 'class="verdict o-nothing-audited"' in html
    assert "There is nothing to judge." in text
