"""Which scenarios the headline of a verdict is about, and what came back under them."""

from __future__ import annotations

import pytest

from leakscope.results.headline import Headline
from leakscope.results.reasons import because
from leakscope.results.setting_verdict import SettingVerdict, StrongestExample
from leakscope.results.verdict import Verdict

SGD, AVG, NOISE, PRUNING = "FedSGD()", "FedAvg()", "GradientNoise(sigma=0.1)", "GradientPruning(fraction=0.9)"
WITHIN, LEAKS, OPEN = "within policy", "leaks", "inconclusive"


def scenario(protocol: str, defense: str, outcome: str, *psnrs: float) -> SettingVerdict:
    place = {"protocol": protocol, "defense": defense}
    attack = {"attack": "A()", "attack_name": "a", "seed": 0, "key": "k", **place}
    examples = [
        StrongestExample(index=index, values={"psnr": psnr}, leaks=psnr >= 20, **attack)
        for index, psnr in enumerate(psnrs)
    ]
    return SettingVerdict(outcome=outcome, examples=examples, **place)  # type: ignore[arg-type]


def headline(*settings: SettingVerdict, outcome: str = LEAKS, doubts: bool = False) -> Headline:
    reasons = [because("jobs-missing", "again", count=1, total=2)] if doubts else []
    return Headline.of(Verdict(outcome=outcome, settings=list(settings), reasons=reasons))  # type: ignore[arg-type]


def names(settings: tuple[SettingVerdict, ...]) -> list[tuple[str, str]]:
    return [tuple(one.scenario) for one in settings]  # type: ignore[misc]


def test_the_headline_is_of_the_defended_scenario_and_not_of_its_reference() -> None:
    told = headline(scenario(SGD, "none", LEAKS, 30.0, 40.0), scenario(SGD, NOISE, WITHIN, 9.0, 11.0))
    assert told.outcome == WITHIN
    assert (names(told.decisive), names(told.references)) == ([(SGD, NOISE)], [(SGD, "none")])
    assert (told.most_exposed.index, told.most_exposed.psnr) == (1, 11.0)  # type: ignore[union-attr]
    shown, bare = told.compared
    assert (shown.psnr, bare.psnr, bare.index) == (11.0, 40.0, 1)  # type: ignore[union-attr]


def test_the_example_shown_is_one_that_the_reference_has_unless_another_leaks() -> None:
    stopped = scenario(SGD, "none", LEAKS, 30.0)
    shown, bare = headline(stopped, scenario(SGD, NOISE, WITHIN, 9.0, 11.0)).compared
    assert (shown.index, bare.index) == (0, 0)  # type: ignore[union-attr]
    shown, bare = headline(stopped, scenario(SGD, NOISE, LEAKS, 9.0, 25.0)).compared
    assert (shown.index, bare) == (1, None)  # type: ignore[union-attr]


def test_without_a_defence_the_undefended_scenario_is_what_is_shipped() -> None:
    told = headline(scenario(SGD, "none", LEAKS, 30.0))
    assert (told.outcome, names(told.decisive), told.references) == (LEAKS, [(SGD, "none")], ())


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [((LEAKS, WITHIN), WITHIN), ((OPEN, WITHIN), WITHIN), ((LEAKS, OPEN), LEAKS), ((OPEN, OPEN), OPEN)],
)
def test_of_alternative_defences_the_best_counts_and_a_leak_before_a_doubt(
    outcomes: tuple[str, str], expected: str
) -> None:
    settings = [scenario(SGD, one, told, 15.0) for one, told in zip((PRUNING, NOISE), outcomes, strict=True)]
    told = headline(*settings)
    assert told.outcome == expected
    assert {one.outcome for one in told.decisive} == {expected}
    assert len(told.decisive) + len(told.others) == 2


@pytest.mark.parametrize(("second", "expected"), [(LEAKS, LEAKS), (OPEN, OPEN), (WITHIN, WITHIN)])
def test_of_several_protocols_the_worst_counts(second: str, expected: str) -> None:
    told = headline(scenario(SGD, NOISE, WITHIN, 9.0), scenario(AVG, NOISE, second, 15.0))
    assert told.outcome == expected
    assert names(told.decisive)[-1] == (AVG, NOISE)


def test_a_doubt_about_the_whole_audit_stands_in_the_way_of_a_pass() -> None:
    settings = scenario(SGD, "none", LEAKS, 30.0), scenario(SGD, NOISE, WITHIN, 9.0)
    assert headline(*settings, doubts=True).outcome == OPEN


def test_nothing_audited_has_no_decisive_scenario() -> None:
    told = headline(scenario(SGD, "none", OPEN), outcome="nothing audited")
    assert (told.outcome, told.decisive, told.most_exposed, told.compared) == (
        "nothing audited",
        (),
        None,
        (None, None),
    )
