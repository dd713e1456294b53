"""Noise that protects must not be computable from what everybody knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from leakscope.audit import audit
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import system_generator
from leakscope.defenses import DEFENSES
from leakscope.federation import FedAvg, FedSGD
from leakscope.results import Store

SIGMA = 0.1
NOISE = DEFENSES.target("gradient-noise")(sigma=SIGMA)


@pytest.fixture(autouse=True)
def _real_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakscope.contracts.protocol.system_generator", system_generator)


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([2])


def recomputed_noise(draws: torch.Generator | None) -> dict[str, torch.Tensor]:
    """The noise of a client with other data, as an adversary gets it who runs the client's code."""
    x, y = torch.zeros(1, 1, 4, 4), torch.tensor([0])
    noisy, bare = FedSGD().observe(net(), x, y, NOISE, generator=draws), FedSGD().observe(net(), x, y)
    return {name: value - bare.message.update[name] for name, value in noisy.message.update.items()}


def recovery_error(observation: Observation, noise: dict[str, torch.Tensor]) -> float:
    """Root-mean-square error of x = dL/dW / dL/db once the noise was subtracted."""
    update = {name: value - noise[name] for name, value in observation.message.update.items()}
    row = int(update["1.bias"].abs().argmax())
    guess = (update["1.weight"][row] / update["1.bias"][row]).reshape(1, 1, 4, 4)
    return float((guess - batch()[0]).square().mean().sqrt())


def test_noise_that_was_seeded_can_be_subtracted_and_that_of_the_system_cannot() -> None:
    seeded = FedSGD().observe(net(), *batch(), NOISE, generator=torch.Generator().manual_seed(3))
    guessed = recomputed_noise(torch.Generator().manual_seed(3))
    assert recovery_error(seeded, guessed) < 1e-4, "the subtraction works where the draws are known"
    sent = FedSGD().observe(net(), *batch(), NOISE)
    public = [None, *(torch.Generator().manual_seed(seed) for seed in range(50)), torch.Generator()]
    assert min(recovery_error(sent, recomputed_noise(draws)) for draws in public) > SIGMA / 4


def test_every_word_of_the_state_is_drawn() -> None:
    one, two = system_generator(), system_generator()
    assert len(one.get_state()) == 5056, "the layout that is filled"
    same = (torch.rand(2000, generator=one) == torch.rand(2000, generator=two)).sum()
    assert int(same) < 10
    again = torch.Generator().manual_seed(one.initial_seed())
    assert not torch.equal(torch.rand(5, generator=again), torch.rand(5, generator=one))
    sample = torch.randn(20000, generator=system_generator())
    assert abs(float(sample.mean())) < 0.05
    assert abs(float(sample.std()) - 1) < 0.05


def test_the_order_of_batches_is_the_systems_too() -> None:
    x, y = torch.rand(12, 1, 4, 4), torch.arange(12) % 3
    client = FedAvg(batch_size=1, lr=0.5)
    deltas = [client.observe(net(), x, y).message.update["1.weight"] for _ in range(2)]
    assert not torch.equal(*deltas)
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    first, second = (client.observe(net(), x, y, generator=each).message.update["1.weight"] for each in draws)
    assert torch.equal(first, second)


def test_a_saved_update_says_where_its_draws_came_from_and_never_the_seed(tmp_path: Path) -> None:
    FedSGD().observe(net(), *batch(), NOISE).save(tmp_path / "real")
    FedSGD().observe(net(), *batch(), NOISE, generator=torch.Generator().manual_seed(7654321)).save(tmp_path / "sim")
    assert json.loads((tmp_path / "real.json").read_text())["randomness"] == "system"
    text = (tmp_path / "sim.json").read_text()
    assert json.loads(text)["randomness"] == "seeded"
    assert "7654321" not in text
    assert [Observation.load(tmp_path / name, net()).randomness for name in ("real", "sim")] == ["system", "seeded"]


def test_files_of_earlier_versions_and_wrong_words(tmp_path: Path) -> None:
    FedSGD().observe(net(), *batch()).save(tmp_path / "old")
    facts = json.loads((tmp_path / "old.json").read_text())
    del facts["randomness"]
    (tmp_path / "old.json").write_text(json.dumps(facts))
    assert Observation.load(tmp_path / "old", net()).randomness is None
    (tmp_path / "old.json").write_text(json.dumps({**facts, "randomness": "dice"}))
    with pytest.raises(ValueError, match="randomness: Input should be 'system' or 'seeded'"):
        Observation.load(tmp_path / "old", net())


def test_an_audit_says_that_its_draws_are_simulated(tmp_path: Path) -> None:
    audit(model="logistic", data="tiles", examples=1, attacks="linear-layer", findings=False, out=tmp_path)
    with Store.open(tmp_path) as store:
        assert any("simulated, reproducible by seed" in said["text"] for said in store.meta("audited"))
