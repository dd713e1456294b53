"""Head first: exact with a certificate where it says so, as good as inverting-gradients elsewhere, never a crash."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.attacks import ATTACKS, HeadFirst, InvertingGradients
from leakscope.attacks.candidates import Candidate
from leakscope.attacks.head_first import case
from leakscope.attacks.head_first.case import NOISY_TRIES
from leakscope.attacks.head_first.stages import WHOLE_UPDATE
from leakscope.contracts.inputs import Box
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.data import load_data
from leakscope.defenses import GradientNoise, GradientPruning
from leakscope.federation import FedAvg, FedSGD
from leakscope.matching.held import HeldMatching
from leakscope.metrics import assign, psnr
from leakscope.models import build_model

pytestmark = pytest.mark.slow

SHAPE, CLASSES = (3, 12, 12), 6
KNOWS_LABELS = dataclasses.replace(Knowledge.honest_server, labels="yes")


def pictures(count: int, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Tensor:
    """Smooth random pictures in [0, 1]."""
    x = torch.rand((count, *shape), generator=torch.Generator().manual_seed(seed))
    for axis in range(2, x.dim()):
        x = (x + x.roll(1, axis)) / 2
    return x


def conv_net(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), activation(), nn.Conv2d(32, 48, 3, 2, 1), activation()),
        *(nn.Conv2d(48, 64, 3, 2, 1), activation(), nn.Flatten(), nn.Linear(64 * 9, CLASSES)),
    )


@cache
def trained_net() -> nn.Module:
    """A few dozen steps on random pictures whose class is their mean colour."""
    net, draws = conv_net(), torch.Generator().manual_seed(3)
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(60):
        y = torch.randint(CLASSES, (32,), generator=draws)
        x = torch.rand((32, *SHAPE), generator=draws) * 0.5 + y.reshape(-1, 1, 1, 1) / (2 * CLASSES)
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net.requires_grad_(True)


def look(net: nn.Module, x: Tensor, y: Tensor | list[int], protocol: Any = None, **how: Any) -> Observation:
    return (protocol or FedSGD()).observe(net, x, torch.as_tensor(y), **how)


def decibel(x: Tensor, result: Reconstruction) -> float:
    """The mean over the pictures, matched to those that they are nearest to."""
    found = result.inputs.to(x).clamp(0, 1)
    return float(psnr(x, found[assign(x, found)]).mean())


def is_certified(result: Reconstruction) -> bool:
    return result.certified == len(result.inputs)


@pytest.mark.parametrize("labels", [[2], [1, 4, 5], [3, 3]])
def test_an_mlp_is_solved_by_algebra(labels: list[int]) -> None:
    net = build_model("mlp", input_shape=SHAPE, num_classes=CLASSES, hidden=(64, 48))
    x = pictures(len(labels))
    result = HeadFirst()(look(net, x, labels))
    assert result.info["method"] == "algebra"
    assert result.info["steps"] == 0
    assert is_certified(result)
    assert decibel(x, result) > 90
    assert result.labels is not None
    assert sorted(result.labels.tolist()) == labels, "found, for nobody told them"


def test_a_head_alone_is_solved_by_algebra() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 144, CLASSES))
    x = pictures(3)
    result = HeadFirst()(look(net, x, [0, 2, 2]))
    assert result.info["method"] == "algebra"
    assert is_certified(result)
    assert decibel(x, result) > 100


@pytest.mark.parametrize("net", [conv_net, trained_net], ids=["untrained", "trained"])
@pytest.mark.parametrize("seed", [0, 1])
def test_one_picture_is_exact_and_certified(net: Callable[[], nn.Module], seed: int) -> None:
    x = pictures(1, seed=seed)
    result = HeadFirst()(look(net(), x, [seed + 1]), seed=seed)
    assert is_certified(result)
    assert decibel(x, result) > 80
    assert result.info["method"].endswith("masks decoded")
    assert result.flags == ()
    assert result.labels is not None
    assert result.labels.tolist() == [seed + 1]


def test_two_pictures_of_one_label_are_far_nearer_than_by_matching_the_update() -> None:
    x, net = pictures(2, seed=5), trained_net()
    seen = look(net, x, [3, 3])
    result = HeadFirst(tries=1)(seen)
    assert is_certified(result) == (decibel(x, result) > 80)
    assert decibel(x, result) > decibel(x, InvertingGradients()(seen)) + 10


def test_a_smooth_net_is_finished_by_gauss_newton() -> None:
    x = pictures(1, (3, 8, 8))
    net = build_model("dlg-lenet", input_shape=(3, 8, 8), num_classes=CLASSES, activation="tanh")
    result = HeadFirst(iterations=60)(look(net, x, [4]))
    assert result.info["method"].endswith("Gauss-Newton")
    assert is_certified(result)
    assert decibel(x, result) > 80


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
def test_double_precision_is_exact_to_more_digits(activation: Callable[[], nn.Module]) -> None:
    x = pictures(1).double()
    result = HeadFirst()(look(conv_net(activation).double(), x, [2]))
    assert result.inputs.dtype == torch.float64
    assert is_certified(result)
    assert decibel(x, result) > 100


def test_without_a_finish_there_is_no_certificate() -> None:
    x = pictures(1)
    result = HeadFirst(solve=False, iterations=30, rival=False)(look(conv_net(), x, [2]))
    assert not result.certificates
    assert result.info["steps"] > 0


FALLBACKS: dict[str, Callable[[], tuple[Observation, str]]] = {
    "too many examples": lambda: (look(conv_net(), pictures(6), list(range(6))), "at most 5 examples"),
    "pruned": lambda: (look(conv_net(), pictures(1), [1], None, defense=GradientPruning(fraction=0.9)), "head"),
    "several steps": lambda: (look(conv_net(), pictures(2), [1, 4], FedAvg(epochs=2, batch_size=1, lr=0.1)), "head"),
    "several small steps": lambda: (
        look(conv_net(), pictures(1), [1], FedAvg(epochs=3, batch_size=1, lr=0.01)),
        "several local steps",
    ),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_where_the_head_tells_nothing_it_is_inverting_gradients_and_says_so(name: str) -> None:
    seen, words = FALLBACKS[name]()
    result = HeadFirst(iterations=5)(seen, seed=0)
    assert result.info["method"] == WHOLE_UPDATE
    assert not result.certificates
    assert "the whole update is matched instead" in result.notes[0]
    assert words in result.notes[0]
    assert torch.equal(result.inputs, InvertingGradients(iterations=5)(seen, seed=0).inputs)


@pytest.mark.parametrize("sigma", [1e-5, 1e-3])
def test_noise_costs_the_certificate_and_not_the_result(sigma: float) -> None:
    x = pictures(1)
    draws = torch.Generator().manual_seed(0)
    seen = look(trained_net(), x, [1], None, defense=GradientNoise(sigma=sigma), generator=draws)
    result = HeadFirst(iterations=150)(seen)
    assert not is_certified(result)
    assert decibel(x, result) > decibel(x, InvertingGradients(iterations=150)(seen)) - 1


def test_masks_are_decoded_under_noise_too() -> None:
    x, draws = pictures(1), torch.Generator().manual_seed(0)
    seen = look(trained_net(), x, [1], None, defense=GradientNoise(sigma=1e-5), generator=draws)
    searched, solved = (HeadFirst(solve=solve, rival=False)(seen) for solve in (False, True))
    assert decibel(x, solved) > decibel(x, searched) + 3
    assert solved.info["restarts"] <= NOISY_TRIES
    assert not is_certified(solved)


def test_further_rounds_go_on_from_the_best_and_never_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = pictures(3, seed=5)
    seen = look(trained_net(), x, [3, 3, 1])
    starts: list[Tensor] = []
    run = HeldMatching.run
    monkeypatch.setattr(HeldMatching, "run", lambda self, start, *rest: starts.append(start) or run(self, start, *rest))
    monkeypatch.setattr(case, "SETTLED", 0.0)
    result = HeadFirst(iterations=6, tries=3, rival=False)(seen)
    assert result.info["restarts"] == 3
    assert is_certified(result)
    for start in starts[-2:]:
        assert decibel(x, dataclasses.replace(result, inputs=start.reshape(x.shape))) > 80


def test_the_rival_is_inverting_gradients_with_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = look(conv_net(), pictures(1), [1])
    monkeypatch.setattr(Candidate, "better_than", lambda self, other: True)
    result = HeadFirst(iterations=10, solve=False)(seen, seed=4)
    assert result.info["method"] == WHOLE_UPDATE
    assert torch.equal(result.inputs, InvertingGradients(iterations=10)(seen, seed=4).inputs)


def test_clipping_by_an_unknown_factor_costs_nothing() -> None:
    x = pictures(1)
    seen = look(conv_net(), x, [1], knowledge=KNOWS_LABELS)
    small = seen.with_update({name: value / 7 for name, value in seen.message.update.items()})
    result = HeadFirst()(small)
    assert is_certified(result)
    assert decibel(x, result) > 80


def test_one_step_of_fedavg_is_a_gradient() -> None:
    x = pictures(1)
    result = HeadFirst(tries=1, rival=False)(look(conv_net(), x, [1], FedAvg(epochs=1, batch_size=1, lr=0.1)))
    assert decibel(x, result) > 80
    assert "steps not simulated" not in result.flags


def test_soft_labels_of_one_example() -> None:
    x = pictures(1)
    y = torch.softmax(torch.randn((1, CLASSES), generator=torch.Generator().manual_seed(0)), 1)
    result = HeadFirst()(look(conv_net(), x, y))
    assert is_certified(result)
    assert decibel(x, result) > 80


@pytest.mark.parametrize("labels", [[1], [1, 4]])
def test_a_sum_over_the_batch_is_as_good_as_a_mean(labels: list[int]) -> None:
    x = pictures(len(labels))
    result = HeadFirst()(look(conv_net(), x, labels, FedSGD(reduction="sum")))
    assert is_certified(result)
    assert decibel(x, result) > 80


def test_bounds_that_are_not_known_are_not_needed() -> None:
    x = 4 * pictures(1) - 1
    net = conv_net()
    seen = look(net, x, [2], inputs=Box(SHAPE))
    assert not seen.inputs.bounded
    result = HeadFirst()(seen)
    assert is_certified(result)
    assert float((result.inputs - x).abs().max()) < 1e-3


def test_runs_repeat_and_seeds_differ() -> None:
    seen = look(conv_net(), pictures(2), [1, 1])
    attack = HeadFirst(iterations=10, solve=False)
    first, again, other = (attack(seen, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.inputs, again.inputs)
    assert first.certificates == again.certificates
    assert not torch.equal(first.inputs, other.inputs)


@pytest.mark.parametrize("labels", [[1], [1, 1], list(range(6))])
@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=2, batch_size=1, lr=0.05)], ids=["FedSGD", "FedAvg"])
def test_progress_never_passes_its_total(labels: list[int], protocol: Any) -> None:
    told: list[tuple[int, int]] = []
    seen = look(conv_net(), pictures(len(labels)), labels, protocol)
    HeadFirst(iterations=4, tries=2)(seen, progress=lambda done, total, _: told.append((done, total)))
    assert told
    assert all(0 < done <= total for done, total in told)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_settings_say_what_they_mean() -> None:
    assert ATTACKS["head-first"].target is HeadFirst
    with pytest.raises(ValueError, match=r"(?s)iterations:.*tries:.*tv:"):
        HeadFirst(iterations=0, tries=0, tv=-1.0)


@pytest.mark.slow
def test_a_held_out_image_of_a_trained_net_is_exact_and_certified(real_data: Path) -> None:
    folder = real_data / "cifar-10-batches-bin"
    train = load_data("cifar10", path=folder, split="train", limit=2000)
    held_out = load_data("cifar10", path=folder, split="test", limit=20).batch(5, 1)
    net = build_model("convnet", input_shape=train.shape, num_classes=10)
    optimiser, draws = torch.optim.Adam(net.parameters(), 1e-3), torch.Generator().manual_seed(0)
    for _ in range(100):
        rows = torch.randint(len(train.x), (64,), generator=draws)
        optimiser.zero_grad()
        F.cross_entropy(net(train.x[rows]), train.y[rows]).backward()
        optimiser.step()
    result = HeadFirst()(look(net, held_out.x, held_out.y))
    assert is_certified(result)
    assert decibel(held_out.x, result) > 80
    assert result.labels is not None
    assert result.labels.tolist() == held_out.y.tolist()
