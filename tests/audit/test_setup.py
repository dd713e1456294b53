"""The model of an audit after some rounds of training: the right one, in every process, and part of every key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
import torch
from torch import nn

import leakscope
from leakscope.audit import AuditSpec, SpecError
from leakscope.audit.plan import make_plan
from leakscope.audit.setup import Setup, build_setup
from leakscope.data import Examples, from_tensors, split_by_group, split_dirichlet, split_iid
from leakscope.federation import FedAvg, FederatedTraining

TRAINING: dict[str, Any] = {
    **{"rounds": 3, "clients": 3, "clients_per_round": 2, "epochs": 2, "batch_size": 2, "lr": 0.5, "seed": 4}
}
FED = FederatedTraining(rounds=3, clients_per_round=2, protocol=FedAvg(epochs=2, batch_size=2, lr=0.5))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEAKSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def data(groups: bool = False) -> Examples:
    x, y = doubles.examples(12)
    examples = from_tensors(x, y, num_classes=3)
    return dataclasses.replace(examples, group=torch.arange(12) % 5) if groups else examples


def setup(training: dict[str, Any] | None = None, **changes: Any) -> Setup:
    base = {"model": doubles.net(), "data": data(), "attacks": [doubles.Guess()], "training": training}
    return build_setup(AuditSpec.parse({**base, **changes}))


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


@pytest.mark.parametrize("split", ["iid", "dirichlet", "group"])
def test_the_model_is_that_of_the_round_asked_for(split: str) -> None:
    examples = data(groups=True)
    rows = {
        "iid": lambda: split_iid(12, 3, seeded()),
        "dirichlet": lambda: split_dirichlet(examples.y, 3, 0.5, seeded()),
        "group": lambda: split_by_group(examples),
    }[split]()
    asked = {**TRAINING, "split": split, **({"alpha": 0.5} if split == "dirichlet" else {})}
    if split == "group":
        del asked["clients"]
    built = setup(asked, data=examples)
    expected = FED.run(doubles.net(), [(examples.x[r], examples.y[r]) for r in rows], seed=4, at=[3])
    assert equal(built.model, expected.last)
    assert built.training_losses == expected.losses
    assert len(built.training_losses) == 2


def test_round_one_is_the_model_as_it_is() -> None:
    built = setup({**TRAINING, "rounds": 1})
    assert equal(built.model, doubles.net())
    assert built.training_losses == ()
    assert built.model_fingerprint == setup().model_fingerprint


def test_the_given_model_stays_and_the_precision_is_its_own() -> None:
    given = doubles.net().double()
    built = setup(TRAINING, model=given)
    assert equal(given, doubles.net().double())
    assert not equal(built.model, given)
    assert all(p.dtype == torch.float64 for p in built.model.parameters())


def test_keys_and_fingerprints_follow_the_training() -> None:
    changes: list[dict[str, Any]] = [
        *({}, {"rounds": 2}, {"clients": 4}, {"split": "dirichlet", "alpha": 0.5}, {"clients_per_round": 3}),
        *({"epochs": 1}, {"batch_size": 3}, {"lr": 0.25}, {"seed": 5}),
    ]
    built = [setup(), *(setup({**TRAINING, **change}) for change in changes)]
    assert len({one.model_fingerprint for one in built}) == len(built)
    assert len({make_plan(one)[0].key for one in built}) == len(built)
    assert setup(TRAINING).model_fingerprint == built[1].model_fingerprint


def test_a_second_set_up_reads_the_checkpoint(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = setup(TRAINING)
    assert [path.name for path in cache.rglob("*.safetensors")] == ["round-00003.safetensors"]
    monkeypatch.setattr(FederatedTraining, "play_round", lambda *_, **__: pytest.fail("trained again"))
    second = setup(TRAINING)
    assert (second.model_fingerprint, second.training_losses) == (first.model_fingerprint, first.training_losses)


def test_what_cannot_be_trained_is_told_with_the_rest(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        setup({**TRAINING, "clients": 13}, examples=99, lpips=tmp_path / "none")
    told = "\n".join(caught.value.problems)
    for expected in ("examples: expected at most 12", "training: clients: expected at most 12", "lpips:"):
        assert expected in told
    with pytest.raises(SpecError, match=r"training: .*to whom each example belongs"):
        setup({"rounds": 2, "split": "group"})
    deep = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    with pytest.raises(SpecError, match=r"training: round \d, client \d: .*diverged"):
        setup({**TRAINING, "lr": 1e20, "epochs": 20}, model=deep)


def test_a_broken_protocol_is_told_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FederatedTraining, "play_round", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SpecError, match=r"protocols\[0\] with defenses\[0\]"):
        setup(TRAINING, model=nn.Linear(5, 3))


def test_an_audit_of_a_trained_model(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    settings = {"model": doubles.net(), "data": data(), **doubles.BASE}
    done = leakscope.audit(**settings, training=TRAINING, out=tmp_path / "out", progress=events.append)
    assert [(e["event"], e["done"], e["total"]) for e in events[:2]] == [("trained", 1, 2), ("trained", 2, 2)]
    assert events[2]["event"] == "planned"
    assert done.worst is not None
    assert done.worst.psnr > 60  # the closed form holds for any weights
    meta = done.store.meta("model")
    assert meta["training"].startswith("round 3; 3 clients, split iid, 2 a round; epochs 2")
    assert meta["training_losses"] == [e["loss"] for e in events[:2]]
    assert done.store.meta("spec")["training"]["rounds"] == 3
    with pytest.raises(ValueError, match=r"model.fingerprint"):
        leakscope.audit(**settings, training={**TRAINING, "rounds": 2}, out=tmp_path / "out")
    assert (tmp_path / "cache").is_dir()


@pytest.mark.slow
def test_workers_audit_the_same_model(tmp_path: Path) -> None:
    settings = {"training": TRAINING, "attacks": [doubles.Quotient()], "data": data(), "examples": 2}
    serial = doubles.run(tmp_path / "serial", **settings)
    for leftover in (tmp_path / "cache").rglob("*.safetensors"):
        leftover.unlink()
    spread = doubles.run(tmp_path / "spread", **settings, executor="processes", workers=1)
    assert doubles.timeless(spread.rows) == doubles.timeless(serial.rows)


# --- the adversary's own examples -------------------------------------------------------------------------------------


def informed(whole: Examples, **changes: Any) -> Setup:
    return setup(None, data=whole, knowledge="informed_server", **changes)


def test_the_adversary_has_examples_that_nobody_attacked_holds() -> None:
    examples = data()
    made = informed(examples, examples=4, batch=2)
    assert made.auxiliary is not None
    x, y = made.auxiliary
    assert torch.equal(x, examples.x[4:])
    assert torch.equal(y, examples.y[4:])
    assert setup(None, examples=4).auxiliary is None  # an honest server has none


@pytest.mark.parametrize("change", [0.0, 1e-3])
def test_copies_of_attacked_examples_are_not_among_them(change: float) -> None:
    """Also copies with another label, and those that differ by less than a grey value."""
    examples = data()
    x = examples.x.clone()
    x[7], x[11] = x[0], x[3].clamp(0, 1 - change) + change
    made = informed(dataclasses.replace(examples, x=x), examples=4, batch=2)
    assert made.auxiliary is not None
    assert torch.equal(made.auxiliary[0], x[[4, 5, 6, 8, 9, 10]])
    attacked = x[:4].flatten(1)
    assert float(torch.cdist(made.auxiliary[0].flatten(1), attacked).min()) > 0.1


def test_where_every_example_is_attacked_the_adversary_has_none() -> None:
    made = informed(data(), examples=12)
    assert made.auxiliary is None
    assert len(make_plan(made)) > 0


def test_keys_of_attacks_that_learn_depend_on_what_they_learn_from() -> None:
    def keys(examples: int) -> dict[int | None, set[str]]:
        """Of the first client, by the number of the attack."""
        attacks = [leakscope.attacks.LearningToInvert(), doubles.Guess()]
        jobs = make_plan(informed(data(), attacks=attacks, examples=examples))
        return {number: {job.key for job in jobs if job.batch == 0 and job.attack == number} for number in (0, 1)}

    few, more = keys(2), keys(4)
    assert not few[0] & more[0]
    assert few[1] == more[1]
