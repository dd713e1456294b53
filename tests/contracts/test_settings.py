"""Settings are checked where they are given, and everything that is wrong is told at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from leakscope.contracts.settings import Described, setting, settings_of, unknown_setting


@dataclass(frozen=True, kw_only=True)
class Search(Described):
    kind: ClassVar[str] = "not a setting"

    steps: int = setting(300, "Steps of the search.", ge=1)
    rate: float = setting(0.1, "Learning rate.", gt=0)
    share: float | None = setting(None, "A share of the entries.", ge=0, lt=1)
    form: Literal["soft", "hard"] = setting("soft", "Which form.")
    sizes: tuple[int, ...] = setting((), "Sizes of hidden layers.", ge=1)
    noise: float | Mapping[str, float] = setting(0.0, "Noise, for all tensors or by tensor.", ge=0)
    verbose: bool = setting(False, "Whether to speak.")
    distance: str = setting("cosine", "How far.", choices=("cosine", "squared"))

    def problems(self) -> list[str]:
        return ["steps: expected more than 10 where share is set"] if self.share and self.steps <= 10 else []


@dataclass(frozen=True, kw_only=True)
class Longer(Search):
    restarts: int = setting(1, "Restarts.", ge=1)

    def problems(self) -> list[str]:
        return super().problems() + (["restarts: expected fewer than steps"] if self.restarts >= self.steps else [])


@dataclass(frozen=True, kw_only=True)
class Needy(Described):
    path: str = field(metadata={})
    count: int = setting(2, "Count.")


class Opaque:
    """A type that nobody describes."""


@dataclass(frozen=True, kw_only=True)
class Own(Described):
    thing: Opaque | None = None
    calls: list[str] = field(default_factory=list)
    function: Callable[[int], int] | None = field(default=None, repr=False, compare=False)
    hidden: int = field(default=3, init=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"steps": 2.0},
        {"steps": "3"},
        {"steps": True},
        {"steps": None},
        {"rate": 0},
        {"rate": math.nan},
        {"rate": math.inf},
        {"rate": "fast"},
        {"rate": False},
        {"share": 1.0},
        {"share": -0.1},
        {"form": "firm"},
        {"form": None},
        {"sizes": (3, 0)},
        {"sizes": (3, 2.5)},
        {"sizes": 3},
        {"noise": -1.0},
        {"noise": {"w": "loud"}},
        {"verbose": 1},
        {"distance": "far"},
        {"distance": 3},
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_what_was_expected(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"Search:\n  - {name}: expected ") as caught:
        Search(**wrong)
    assert f"got {value!r}" in str(caught.value)
    with pytest.raises(ValueError, match=f"^{name}: expected "):
        Search.build(wrong)


@pytest.mark.parametrize(
    "right, held",
    [
        ({"rate": 1}, 1.0),
        ({"share": 0}, 0.0),
        ({"share": None}, None),
        ({"sizes": [3, 4]}, (3, 4)),
        ({"sizes": ()}, ()),
        ({"noise": 1}, 1.0),
        ({"noise": {"w": 0.5, "b": 1}}, {"w": 0.5, "b": 1.0}),
        ({"distance": "squared"}, "squared"),
    ],
    ids=str,
)
def test_a_right_value_is_held_in_one_form(right: dict[str, Any], held: Any) -> None:
    ((name, _),) = right.items()
    found = getattr(Search(**right), name)
    assert found == held
    assert type(found) is type(held)
    assert Search.build(right) == Search(**right)


def test_what_was_meant_alike_is_alike_and_has_one_repr() -> None:
    assert Search(rate=1, sizes=[2]) == Search(rate=1.0, sizes=(2,))
    assert repr(Search(rate=1, sizes=[2])) == repr(Search(rate=1.0, sizes=(2,)))
    assert dataclasses.replace(Search(), steps=5).steps == 5
    with pytest.raises(ValueError, match="steps"):
        dataclasses.replace(Search(), steps=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Search().steps = 4  # type: ignore[misc]


def test_everything_wrong_is_in_one_error() -> None:
    with pytest.raises(ValueError, match=r"(?s)^Search:\n  - steps: .*\n  - rate: .*\n  - form: .*got 'firm'$"):
        Search(steps=0, rate=-1.0, form="firm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"(?s)unknown setting 'step'.*did you mean steps\?.*\nrate: .*\nform: "):
        Search.build({"step": 3, "rate": -1.0, "form": "firm"})
    with pytest.raises(ValueError, match=r"(?s)unknown setting.*\npath: expected text, got nothing\ncount: expected"):
        Needy.build({"paths": "a", "count": 1.5})
    with pytest.raises(TypeError):
        Search(nonsense=1)  # type: ignore[call-arg]


def test_rules_between_settings_come_after_the_settings_themselves() -> None:
    with pytest.raises(ValueError, match="more than 10 where share is set"):
        Search(share=0.5, steps=3)
    with pytest.raises(ValueError, match="share: ") as caught:
        Search(share=2.0, steps=3)
    assert "more than 10" not in str(caught.value)


def test_settings_and_rules_are_inherited() -> None:
    assert [one.name for one in settings_of(Longer)] == [*(one.name for one in settings_of(Search)), "restarts"]
    with pytest.raises(ValueError, match=r"(?s)Longer:\n  - steps: .*\n  - restarts: "):
        Longer(steps=0, restarts=0)
    with pytest.raises(ValueError, match=r"(?s)more than 10.*restarts: expected fewer"):
        Longer(share=0.5, steps=3, restarts=4)
    assert Longer.build({"steps": 20}).restarts == 1


def test_settings_tell_type_default_help_and_expectation() -> None:
    table = {one.name: one for one in settings_of(Search)}
    assert "kind" not in table
    assert (table["steps"].default, table["steps"].help, table["steps"].type) == (300, "Steps of the search.", int)
    assert {name: one.expected for name, one in table.items()} == {
        "steps": "a whole number of at least 1",
        "rate": "a number above 0",
        "share": "a number of at least 0 and below 1 or None",
        "form": "'soft' or 'hard'",
        "sizes": "a list, each a whole number of at least 1",
        "noise": table["noise"].expected,
        "verbose": "true or false",
        "distance": "one of cosine, squared",
    }
    assert table["noise"].expected.startswith("a number of at least 0 or ")
    assert [one.required for one in settings_of(Needy)] == [True, False]


def test_a_name_spelt_otherwise_is_told_how() -> None:
    assert unknown_setting("Local_Steps", ["local-steps"]).endswith(
        "expected it spelt 'local-steps', got 'Local_Steps'"
    )
    assert "did you mean" not in unknown_setting("zzz", ["steps"])


def test_a_default_that_could_be_changed_is_refused() -> None:
    for default in ([1], {"a": 1}):
        with pytest.raises(ValueError, match="immutable default"):
            setting(default, "Wrong.")


def test_fields_without_a_description_keep_what_the_class_itself_must_check() -> None:
    thing = Opaque()
    own = Own(thing=thing, function=abs)
    assert own.thing is thing
    assert own.function is abs
    own.calls.append("a list stays one")
    assert Own().calls == []
    assert [one.name for one in settings_of(Own)] == ["thing", "calls", "function"]
    with pytest.raises(ValueError, match="thing: expected Opaque or None, got 3"):
        Own(thing=3)  # type: ignore[arg-type]
