"""Updates and searches are made once for all jobs on them, and no row shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
from audit_doubles import run, timeless

from leakscope.audit import attempts
from leakscope.audit.memory import Updates
from leakscope.contracts.observation import Observation
from leakscope.federation import FedSGD
from leakscope.matching import Matcher

#: Two attacks that end in the same search wherever the head is refused, and a third of its own.
SEARCHES: dict[str, Any] = {
    "attacks": [
        {"head-first": {"iterations": 6}},
        {"inverting-gradients": {"iterations": 6}},
        {"inverting-gradients": {"iterations": 5}},
    ],
    "defenses": ["none", {"gradient-pruning": {"fraction": 0.9}}],
    "examples": 2,
    "findings": False,
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The updates that were really made, by protocol, defence and draws."""
    calls: list[tuple[Any, ...]] = []
    original = attempts.observe

    def observe(setup: Any, protocol: Any, defense: Any, x: Any, y: Any, generator: Any) -> Any:
        calls.append((repr(protocol.instance), repr(defense.instance), generator.initial_seed(), float(x.sum())))
        return original(setup, protocol, defense, x, y, generator)

    monkeypatch.setattr(attempts, "observe", observe)
    return calls


def test_a_clients_update_is_made_once(made: list[tuple[Any, ...]]) -> None:
    attacks = [doubles.Guess(), doubles.Guess(flags=("odd",))]
    done = run(seeds=[0, 1], attacks=attacks, controls=["noise"])
    assert len(done.rows) == 3 * 2 * 2 * 3, "two settings and a control, two attacks, two seeds, three clients"
    assert len(made) == len(set(made)) == 2 * 2 * 3


def test_a_control_is_made_once_for_all_attacks(made: list[tuple[Any, ...]]) -> None:
    run(defenses=["none"], controls=["other-examples", "planted"], findings=False)
    assert len(made) == 3 + 3 + 2, "of each client its own update and another's, and two planted examples"


def seen(seed: int) -> Observation:
    return FedSGD().observe(doubles.net(seed), *doubles.examples(1))


def test_old_updates_make_room_for_new_ones() -> None:
    size = 2 * (16 * 3 + 3) * 4  # model and message
    updates, asked = Updates(most=2 * size), []

    def get(number: int) -> Observation:
        return updates.get(number, lambda: asked.append(number) or seen(number))  # type: ignore[func-returns-value]

    first = get(0)
    assert get(0) is first
    get(1)
    assert get(0) is first
    get(2)  # room for two: the one that was not used for longest goes
    assert get(0) is first
    get(1)
    assert asked == [0, 1, 2, 1]


def test_what_is_larger_than_all_room_is_kept_alone_and_gone_before_the_next_is_made() -> None:
    updates = Updates(most=1)
    one = updates.get("one", lambda: seen(0))
    assert updates.get("one", lambda: seen(1)) is one

    def make() -> Observation:
        assert not updates._made
        return seen(1)

    updates.get("two", make)


@pytest.mark.slow
def test_rows_are_the_same_with_and_without_shared_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    original = Matcher.run

    def counted(self: Matcher, *args: Any, **rest: Any) -> Any:
        searches.append(self)
        return original(self, *args, **rest)

    monkeypatch.setattr(Matcher, "run", counted)
    shared = run(tmp_path / "shared", **SEARCHES)
    once = len(searches)
    searches.clear()
    monkeypatch.setattr(attempts.SharedWork, "recall", lambda self, key, generator, numbers, work: work())
    alone = run(tmp_path / "alone", **SEARCHES)
    assert timeless(shared.rows) == timeless(alone.rows)
    assert once < len(searches)
    assert {row.job.attack_name for row in shared.rows} >= {"head-first", "inverting-gradients"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_rows_are_the_same_for_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    serial = run(tmp_path / "serial", **SEARCHES)
    spread = run(tmp_path / "spread", **SEARCHES, executor="processes", workers=workers)
    assert timeless(spread.rows) == timeless(serial.rows)


def test_seconds_are_those_of_the_attack_by_itself(tmp_path: Path) -> None:
    done = run(tmp_path, **{**SEARCHES, "controls": False, "defenses": [{"gradient-pruning": {"fraction": 0.9}}]})
    ours, theirs = (
        next(row for row in done.rows if row.job.attack_name == name) for name in ("head-first", "inverting-gradients")
    )
    assert ours.result is not None
    assert theirs.result is not None
    # The second was handed what the first had found, and still tells what that took.
    assert theirs.result.info["seconds"] > 0.2 * ours.result.info["seconds"]
    assert theirs.seconds is not None
    assert theirs.seconds >= theirs.result.info["seconds"]
