"""What an adversary knows: every fact by its name, in words, and the presets."""

from __future__ import annotations

import dataclasses

import pytest

from leakscope.contracts.knowledge import KNOWLEDGE_PRESETS, Knowledge
from leakscope.contracts.settings import settings_of

FACTS = [one.name for one in settings_of(Knowledge)]


@pytest.mark.parametrize("name", [name for name in FACTS if name != "labels"])
def test_each_fact_is_granted_by_its_own_field(name: str) -> None:
    nothing = Knowledge(num_examples=False)
    assert not any(nothing.grants(fact) for fact in FACTS)
    one = dataclasses.replace(nothing, **{name: True})
    assert [fact for fact in FACTS if one.grants(fact)] == [name]


@pytest.mark.parametrize(
    "labels, all_known, counts", [("no", False, False), ("counts", False, True), ("yes", True, True)]
)
def test_counts_of_labels_are_less_than_labels(labels: str, all_known: bool, counts: bool) -> None:
    knowledge = Knowledge(labels=labels)  # type: ignore[arg-type]
    assert (knowledge.grants("labels"), knowledge.grants("label_counts")) == (all_known, counts)


def test_unknown_facts_and_values_are_refused() -> None:
    with pytest.raises(AttributeError):
        Knowledge().grants("inputs")
    with pytest.raises(
        ValueError, match=r"(?s)labels: expected 'no', 'counts' or 'yes'.*batch_size: expected true or false"
    ):
        Knowledge(labels="some", batch_size=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown knowledge preset 'god': expected one of eavesdropper, honest_server"):
        Knowledge.preset("god")


def test_presets_grow_from_nothing_to_everything() -> None:
    granted = {name: {fact for fact in FACTS if one.grants(fact)} for name, one in KNOWLEDGE_PRESETS.items()}
    assert granted["eavesdropper"] == {"num_examples"}
    server = {"num_examples", "local_epochs", "batch_size", "learning_rate", "normalisation"}
    assert granted["honest_server"] == server
    assert granted["adaptive_server"] == server | {"defense"}
    assert granted["informed_server"] == server | {"defense", "auxiliary_data"}
    assert granted["vertical_server"] == server | {"batch_indices"}
    assert granted["malicious_server"] == server | {"choose_weights", "choose_structure"}
    assert granted["full"] == set(FACTS)
    assert Knowledge.preset("adaptive_server") is Knowledge.adaptive_server


@pytest.mark.parametrize("preset", KNOWLEDGE_PRESETS)
def test_the_words_name_every_fact_once(preset: str) -> None:
    knowledge = Knowledge.preset(preset)
    lines = knowledge.describe()
    text = " ".join(lines)
    for one in settings_of(Knowledge):
        if one.type is bool and not one.name.startswith("choose"):
            assert text.count(one.help) == 1
            line = next(line for line in lines if one.help in line)
            assert line.startswith("It knows" if knowledge.grants(one.name) else "It does not know")
    assert ("may choose" in text) == knowledge.choose_weights
    assert all(line.endswith(".") for line in lines)
