"""Settings with a name: they mean the same for good, and what is recommended exists."""

from __future__ import annotations

import re

import pytest

from leakscope.attacks import ATTACKS, InvertingGradients, make_attack, standard_attacks
from leakscope.cli.output import parse_part
from leakscope.federation import FedSGD
from leakscope.report.sentences import flag_remedy


def test_the_house_preset_is_what_inverting_gradients_does_by_default() -> None:
    assert InvertingGradients.preset("house") == InvertingGradients()
    assert make_attack("inverting-gradients", preset="house", iterations=7) == InvertingGradients(iterations=7)
    assert InvertingGradients.preset("paper") != InvertingGradients()


def test_the_house_preset_leaves_no_setting_of_the_search_to_a_default() -> None:
    written = set(InvertingGradients.published("house"))
    assert written > set(InvertingGradients.published("paper"))


def test_closed_forms_come_first_and_then_the_strongest_search() -> None:
    order = standard_attacks([FedSGD()])
    assert order.index("linear-layer") < order.index("head-first") < order.index("inverting-gradients")
    assert order.index("head-first") < order.index("gauss-newton")  # whose steps take minutes on a transformer
    assert order == [name for name in ATTACKS if name in order]


@pytest.mark.parametrize("flag", ["did not converge", "ill-conditioned", "mixture"])
def test_the_attack_that_a_remedy_names_can_be_typed(flag: str) -> None:
    found = re.search(r"such as (?:--attack )?([\w:=-]+)", flag_remedy(flag))
    assert found is not None
    part = parse_part(found[1])
    name, options = (part, {}) if isinstance(part, str) else next(iter(part.items()))
    assert name == "head-first"
    assert make_attack(name, **options)
