"""Learning to Invert: exact where inputs are linear in the update, nothing from nothing, and no truth within reach."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks.learning_to_invert import LearningToInvert, PlayedClient, regression
from leakscope.attacks.learning_to_invert.regression import (
    Featuriser,
    KernelRidge,
    Mean,
    Pairs,
    choose_ridge,
    fit_network,
    kernel,
    refit_ridge,
)
from leakscope.attacks.shared_work import SharedWork
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import Protocol
from leakscope.contracts.task import Regression
from leakscope.defenses import DPSGD, GradientNoise, GradientPruning
from leakscope.federation import FedAvg, FedSGD
from leakscope.metrics import psnr
from leakscope.models import build_model

pytestmark = pytest.mark.slow

SERVER = Knowledge.informed_server
QUICK = LearningToInvert(clients=300, hidden=0)


@dataclass(frozen=True, kw_only=True)
class Signs(Defense):
    """Compression to signs; it has no channel."""

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return {name: value.sign() for name, value in update.items()}


@dataclass(frozen=True, kw_only=True)
class Nothing(Defense):
    """Sends numbers that have nothing to do with the client's examples."""

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return {name: torch.randn(value.shape, generator=generator).to(value) for name, value in update.items()}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth(count: int, side: int = 6, seed: int = 1) -> Tensor:
    """Pictures of four numbers each, so that a few hundred of them tell what all look like."""
    corners = torch.rand(count, 1, 2, 2, generator=generator(seed))
    return nn.functional.interpolate(corners, size=(side, side), mode="bilinear", align_corners=True)


def net(seed: int = 0) -> nn.Module:
    return build_model("dlg-lenet", input_shape=(1, 6, 6), num_classes=4, seed=seed, init="default")


OTHERS = smooth(360, seed=2), torch.arange(360) % 4


def look(defense: Defense | None = None, protocol: Protocol | None = None, **how: Any) -> tuple[Observation, Tensor]:
    x = smooth(1)
    how = {"knowledge": SERVER, "generator": generator(5), "auxiliary": OTHERS, **how}
    return (protocol or FedSGD()).observe(net(), x, torch.tensor([1]), defense, **how), x


# --- what it finds ----------------------------------------------------------------------------------------------------


def test_is_exact_where_the_input_is_linear_in_the_update() -> None:
    """One output and a squared loss whose residual is always 1: the gradient of the weights is twice the input."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 1)).double()
    x = torch.rand(65, 1, 4, 4, generator=generator(), dtype=torch.float64)
    y = model(x).detach() - 1
    seen = FedSGD().observe(model, x[:1], y[:1], None, SERVER, generator(), task=Regression(), auxiliary=(x[1:], y[1:]))
    result = LearningToInvert(kernel=False, hidden=0)(seen)
    assert result.info["regression"] == "linear ridge"
    assert float((result.inputs - x[:1]).abs().max()) < 1e-6
    assert result.flags == ()


@pytest.mark.parametrize("defense", [Signs(), GradientPruning(fraction=0.9), GradientNoise(sigma=1e-5)], ids=repr)
def test_sees_through_defences_whose_code_it_runs(defense: Defense) -> None:
    seen, x = look(defense)
    mean = float(psnr(x, OTHERS[0].mean(0, keepdim=True)))
    assert float(psnr(x, QUICK(seen).inputs)) > mean + 5
    assert QUICK.knows_defense(seen)
    assert isinstance(defense, Signs) == (seen.channel is None)


def test_no_defence_and_one_that_does_nothing_are_the_same() -> None:
    plain, _ = look(None)
    idle, _ = look(GradientPruning(fraction=0.0))
    assert torch.equal(QUICK(plain).inputs, QUICK(idle).inputs)


def test_knows_only_the_mean_of_its_own_examples_where_the_update_says_nothing() -> None:
    seen, x = look(Nothing())
    result = LearningToInvert(clients=300)(seen)
    mean = OTHERS[0].mean(0, keepdim=True)
    assert float((result.inputs - mean).square().mean()) < 0.1 * float((x - mean).square().mean())
    assert result.info["held_out_mse"] > 0.9 * result.info["prior_mse"]


def test_several_examples_come_back_by_class() -> None:
    x, y = smooth(2, seed=8), torch.tensor([3, 0])
    seen = FedSGD().observe(net(), x, y, None, SERVER, generator(), auxiliary=OTHERS)
    result = LearningToInvert(clients=600, hidden=0)(seen)
    assert float((result.inputs - x.flip(0)).square().mean()) < 0.5 * float((result.inputs - x).square().mean())
    known = FedSGD().observe(
        net(), x, y, None, dataclasses.replace(SERVER, labels="yes"), generator(), auxiliary=OTHERS
    )
    labels = QUICK(known).labels
    assert labels is not None
    assert labels.tolist() == [0, 3]


def test_a_weight_update_is_replayed() -> None:
    seen, x = look(Signs(), FedAvg(epochs=3, batch_size=1, lr=0.05))
    assert float(psnr(x, QUICK(seen).inputs)) > float(psnr(x, OTHERS[0].mean(0, keepdim=True))) + 3


# --- played clients are real ones -------------------------------------------------------------------------------------

PROTOCOLS = [
    FedSGD(),
    FedSGD(reduction="sum"),
    FedAvg(epochs=2, batch_size=2, lr=0.1, momentum=0.5),
    FedAvg(epochs=2, batch_size=3, lr=0.1, optimizer="adam"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=repr)
@pytest.mark.parametrize("defense", [None, Signs(), GradientNoise(sigma=0.1), DPSGD(clip=0.5)], ids=repr)
def test_a_played_client_sends_what_a_real_one_does(protocol: Protocol, defense: Defense | None) -> None:
    x, y = smooth(5, seed=3), torch.tensor([0, 1, 1, 2, 3])
    seen = protocol.observe(net(), x, y, defense, SERVER, generator(7))
    played = PlayedClient.of(seen)
    played.update(x.flip(0), y.flip(0), generator(1))  # one client must not leave traces in the next
    update = played.update(x, y, generator(7))
    assert all(torch.equal(update[name], value) for name, value in seen.message.update.items())


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_needs_the_defence_and_examples_of_its_own() -> None:
    for knowledge, lacking in (
        (Knowledge.honest_server, "defense, auxiliary_data"),
        (Knowledge.adaptive_server, "auxiliary_data"),
    ):
        seen, _ = look(knowledge=knowledge)
        assert seen.auxiliary is None
        with pytest.raises(MissingKnowledge, match=f"needs to know {lacking},"):
            QUICK(seen)


@pytest.mark.parametrize("count, examples, least", [(31, 1, 32), (39, 5, 40)])
def test_too_few_examples_are_refused(count: int, examples: int, least: int) -> None:
    x, y = smooth(examples), torch.arange(examples) % 4
    few = OTHERS[0][:count], OTHERS[1][:count]
    seen = FedSGD().observe(net(), x, y, None, SERVER, auxiliary=few)
    with pytest.raises(NotApplicable, match=f"expected at least {least} examples .* got {count}"):
        QUICK(seen)
    with pytest.raises(NotApplicable, match="got 0"):
        QUICK(dataclasses.replace(seen, auxiliary=None))


def test_a_recipe_that_is_not_known_is_refused() -> None:
    seen, _ = look(None, FedAvg(), knowledge=dataclasses.replace(SERVER, learning_rate=False))
    with pytest.raises(NotApplicable, match="learning_rate, optimizer"):
        QUICK(seen)


def test_an_observation_from_a_file_is_given_the_code_and_the_examples_again(tmp_path: Path) -> None:
    defense = GradientPruning(fraction=0.5)
    seen, _ = look(defense)
    seen.save(tmp_path / "update")
    loaded = Observation.load(tmp_path / "update", net())
    assert (loaded.defense, loaded.auxiliary, loaded.channel) == (None, None, seen.channel)
    with pytest.raises(NotApplicable, match="examples"):
        QUICK(loaded)
    with pytest.raises(NotApplicable, match="defense="):
        QUICK(dataclasses.replace(loaded, auxiliary=OTHERS))
    whole = dataclasses.replace(loaded, auxiliary=OTHERS, defense=defense)
    assert torch.equal(QUICK(whole).inputs, QUICK(seen).inputs)


def test_an_update_of_another_size_is_flagged() -> None:
    seen, _ = look()
    larger = seen.with_update({name: 100 * value for name, value in seen.message.update.items()})
    assert QUICK(larger).flags == ("unlike the simulations",)


# --- one regression a setting -----------------------------------------------------------------------------------------


def test_images_of_a_setting_share_one_regression() -> None:
    steps: list[int] = []

    def progress(done: int, total: int, objective: float) -> None:
        steps.append(done)

    first, _ = look()
    second = FedSGD().observe(net(), smooth(1, seed=9), torch.tensor([2]), None, SERVER, auxiliary=OTHERS)
    alone = QUICK(second, seed=4).inputs
    shared = SharedWork()
    QUICK(first.with_facts(shared=shared), seed=3, progress=progress)
    learned = len(steps)
    assert learned == 300 + 30
    assert torch.equal(QUICK(second.with_facts(shared=shared), seed=4, progress=progress).inputs, alone)
    assert len(steps) == learned
    assert shared.recalled_seconds > 0
    QUICK(look(Signs())[0].with_facts(shared=shared), progress=progress)
    assert len(steps) == 2 * learned


# --- the regressions --------------------------------------------------------------------------------------------------


def pairs(shuffled: bool = False) -> Pairs:
    rows = torch.rand(600, 5, generator=generator(1))
    targets = torch.sin(2 * rows) @ torch.rand(5, 3, generator=generator(2))
    if shuffled:
        targets = targets[torch.randperm(600, generator=generator(3))]
    return Pairs(rows[:300], targets[:300], rows[300:], targets[300:])


def prior(data: Pairs) -> float:
    return data.error(Mean(data.targets.mean(0)))


def chosen(data: Pairs, *widths: float | None) -> tuple[KernelRidge, float]:
    fit = choose_ridge(data, widths)
    assert fit is not None
    return fit


def test_shuffled_pairs_teach_nothing_but_the_mean() -> None:
    right, wrong = pairs(), pairs(shuffled=True)
    assert chosen(right, 0.25, 1.0, 4.0)[1] < 0.01 * prior(right)
    ridge, error = chosen(wrong, None, 0.25, 1.0, 4.0)
    assert 0.9 * prior(wrong) < error
    answers = ridge(wrong.held_rows)
    assert float((answers - wrong.targets.mean(0)).square().mean()) < 0.1 * prior(wrong)


def test_equal_rows_teach_nothing() -> None:
    data = pairs()
    same = Pairs(torch.ones_like(data.rows), data.targets, torch.ones_like(data.held_rows), data.held_targets)
    assert choose_ridge(same, [None]) is None
    fit = choose_ridge(same, [1.0])
    assert fit is None or fit[1] > 0.99 * prior(data)


def test_a_gaussian_kernel_bends_where_a_line_cannot() -> None:
    assert chosen(pairs(), 1.0)[1] < 0.1 * chosen(pairs(), None)[1]


def test_more_rows_are_used_where_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression, "PATH_ROWS", 40)
    data = pairs()
    few, error = chosen(data, 1.0)
    ridge, less = refit_ridge(few, error, data)
    assert (len(few.rows), len(ridge.rows)) == (40, 300)
    assert less < error
    assert data.error(ridge) == pytest.approx(less, rel=1e-3)


def test_leaving_one_out_is_fitting_without_it() -> None:
    whole = pairs()
    data = dataclasses.replace(whole, rows=whole.rows[:30], targets=whole.targets[:30])
    ridge, _ = chosen(data, 1.0)
    answers = ridge.leave_one_out(data.targets)
    others = [place for place in range(30) if place != 4]
    matrix = kernel(ridge.rows, ridge.rows, ridge.width).double()
    penalised = matrix[others][:, others] + ridge.penalty * matrix.diagonal().mean() * torch.eye(29)
    wanted = matrix[4, others] @ torch.linalg.solve(penalised, (data.targets[others] - ridge.mean).double())
    assert torch.allclose(answers[4], (wanted + ridge.mean).float(), atol=1e-4)


def test_a_network_corrects_and_never_harms() -> None:
    data = pairs()
    ridge, before = chosen(data, None)
    heard: list[float] = []
    better, after = fit_network(ridge, data, generator(), hidden=32, epochs=30, lr=3e-3, tell=heard.append)
    assert after <= before * 1.0001
    assert after == pytest.approx(min([before, *heard]), rel=1e-4)
    assert data.error(better) == pytest.approx(after, rel=1e-5)


def test_hashed_updates_keep_their_products() -> None:
    draws = generator(4)
    first = {"a": torch.randn(40, 100, generator=draws), "b": torch.randn(7, generator=draws)}
    second = {name: value + torch.randn(value.shape, generator=draws) for name, value in first.items()}
    whole = Featuriser.of(first, 10_000, draws)
    exact = whole(first)[0] @ whole(second)[0]
    hashes = [Featuriser.of(first, 500, draws) for _ in range(40)]
    products = torch.stack([one(first)[0] @ one(second)[0] for one in hashes])
    assert len(hashes[0](first)[0]) <= 500
    assert float((products.mean() - exact).abs() / exact) < 0.05
    features, scales = whole(first)
    assert torch.allclose(whole.unscaled(features[None], scales[None])[0][:4000], first["a"].flatten(), atol=1e-5)
