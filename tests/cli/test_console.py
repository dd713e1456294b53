"""What people read: it fits 80 and 60 columns, cuts no word, and says each thing once."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from leakscope.cli.console import fitted, make_console, print_listing, print_table, print_verdict
from leakscope.results import Row, SettingVerdict, Verdict
from leakscope.results.reasons import Scenario, because

SGD, PRUNING = "FedSGD(batchnorm='eval', reduction='mean')", "GradientPruning(fraction=0.9, scope='tensor')"


def printed(draw: Any, width: int) -> str:
    stream = io.StringIO()
    draw(Console(file=stream, width=width, highlight=False, markup=False))
    return stream.getvalue()


def result(audited: Any = None) -> Any:
    leaks = [because("reconstruction", example=n, attack="dlg", measure="psnr", value=20.0 + n) for n in range(8)]
    leaks = [dataclasses.replace(leak, scenario=Scenario(SGD, "none")) for leak in leaks]
    first, second = (
        because(
            "flag", "more-iterations", names=("did not converge",), count=1, total=1, scenario=Scenario(SGD, defense)
        )
        for defense in ("none", PRUNING)
    )
    numbers: dict[str, Any] = {"mean_psnr": 18.84, "interval": (16.3, 21.4), "baseline_psnr": 8.4}
    settings = [
        SettingVerdict(protocol=SGD, defense="none", outcome="leaks", reasons=[*leaks, first], **numbers),
        SettingVerdict(protocol=SGD, defense=PRUNING, outcome="inconclusive", reasons=[second], **numbers),
    ]
    every = [reason for setting in settings for reason in setting.reasons]
    job = {"protocol": SGD, "defense": "none", "attack": "L()", "attack_name": "linear-layer", "seed": 0, "batch": 0}
    odd = "NotApplicable: the first layer 'conv1' is Conv2d, not Linear"
    return SimpleNamespace(
        verdict=Verdict(outcome="leaks", reasons=every, settings=settings),
        rows=[Row.read(str(n), n, "refused", job, None, odd) for n in range(12)],
        findings=[],
        store=SimpleNamespace(meta=lambda key: audited if key == "audited" else None),
        study=None,
    )


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_verdict_fits_and_cuts_no_word(width: int) -> None:
    audited = [{"text": "random weights, not trained ones", "warning": True}, {"text": "1 attack x 20 steps"}]
    told = printed(lambda console: print_verdict(result(audited), Path("run/report.html"), console), width)
    assert max(map(len, told.splitlines())) <= width
    words = set(told.split())
    for word in (
        "inconclusive",
        "GradientPruning(fraction=0.9)",
        "identified",
        "Conv2d,",
        "head-first:iterations=1000",
    ):
        assert word in words, told
    flat = " ".join(told.split())
    assert "Warning: random weights, not trained ones" in flat
    assert flat.count("12 jobs: the first layer 'conv1' is Conv2d, not Linear") == 1
    assert flat.count("8 examples leak by dlg: PSNR 20.0 to 27.0 dB") == 1
    assert flat.count("Why: S1, S2: 1 of 1 attempt raised the flag: did not converge What to do:") == 1
    assert "S2 FedSGD · GradientPruning(fraction=0.9)" in flat
    assert SGD not in flat  # long names stand in the report
    assert flat.index("Audited") < flat.index("S1 18.8 (16.3 to 21.4)" if width > 60 else "S1 18.8")
    assert flat.index("Verdict: LEAKS") < flat.index("Why:")


def test_quiet_says_only_the_verdict_and_where_the_report_is() -> None:
    told = printed(lambda console: print_verdict(result(), Path("run/report.html"), console, quiet=True), 80)
    assert told.splitlines() == ["Verdict: LEAKS", "Report:  run/report.html"]


def test_many_reasons_are_cut_short_unless_asked_for() -> None:
    reasons = [because("job-failed", count=count) for count in range(1, 13)]
    many = result()
    many.verdict = Verdict(outcome="inconclusive", reasons=reasons)
    brief = printed(lambda console: print_verdict(many, Path("r"), console), 80)
    assert (brief.count("Why:"), "4 more reasons in the report" in brief) == (8, True)
    assert printed(lambda console: print_verdict(many, Path("r"), console, verbose=True), 80).count("Why:") == 12


@pytest.mark.parametrize("width", [30, 45, 60, 80, 200])
def test_tables_keep_words_whole_at_any_width(width: int) -> None:
    heads = ("setting", "expected", "default", "meaning")
    rows = [("line_search", "'backtracking' or 'none'", "'backtracking'", "Halve a step until the objective falls.")]
    told = printed(lambda console: print_table("dlg", heads, rows, console), width)
    assert max(map(len, told.splitlines())) <= width
    for word in (*["line_search", "'backtracking'", "'none'", "Halve", "objective"],):
        assert word in told.replace(":", " ").split(), told


def test_widths_go_where_lines_are_saved() -> None:
    assert fitted([["ab"], ["one two three four five six"]], 20) == [2, 16]
    assert fitted([["ab"], ["one"]], 80) == [2, 3]
    assert fitted([["abc"], ["indivisible"]], 15) is None


def test_a_listing_of_long_names_falls_into_blocks() -> None:
    told = printed(lambda console: print_listing([("package.module:Name", "a text")], console), 20)
    assert [line.rstrip() for line in told.splitlines()] == ["package.module:Name", "  a text"]


@pytest.mark.parametrize("variable, codes", [("NO_COLOR", False), ("ANYTHING", True)])
def test_no_color_means_no_escape_codes_even_on_a_terminal(
    variable: str, codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv(variable, "1")
    console = make_console()
    with console.capture() as capture:
        console.print("Verdict", style="bold red")
    assert ("\x1b" in capture.get()) is codes
