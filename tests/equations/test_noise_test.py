"""The chi-square test that stands for a certificate under known noise."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import leakscope as ls
from leakscope.attacks import HeadFirst
from leakscope.contracts.channel import Channel
from leakscope.contracts.knowledge import Knowledge
from leakscope.defenses import DPSGD, GradientClipping, GradientNoise
from leakscope.equations.noise_test import DROWNED, RARE, drowned, noise_test


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_the_truth_passes_as_often_as_it_should(law: str) -> None:
    """p-values of the truth are uniform; inputs that miss a tenth of the noise's size do not pass."""
    defense = GradientNoise(sigma=0.3, law=law)
    true = {"w": torch.randn(30, 40, generator=draws(1), dtype=torch.float64), "b": torch.ones(40).double()}
    p_values = []
    for seed in range(300):
        sent = defense.protect_message(true, draws(seed))
        test = noise_test(sent, true, defense.channel())
        assert test is not None
        p_values.append(test.p_value)
    shares = [sum(p < level for p in p_values) / len(p_values) for level in (0.1, 0.5)]
    assert shares[0] == pytest.approx(0.1, abs=0.07)
    assert shares[1] == pytest.approx(0.5, abs=0.12)
    wrong = {name: value + 0.3 * torch.randn(value.shape, generator=draws(7)).double() for name, value in true.items()}
    test = noise_test(sent, wrong, defense.channel())
    assert test is not None
    assert test.p_value < RARE


def test_fitted_unknowns_are_counted() -> None:
    """Least squares leave less than the truth, by as many degrees of freedom as they have unknowns."""
    design = torch.randn(400, 100, generator=draws(0), dtype=torch.float64)
    ratios = []
    for seed in range(40):
        noisy = 0.1 * torch.randn(400, generator=draws(seed + 1), dtype=torch.float64)
        fitted = design @ torch.linalg.lstsq(design, noisy).solution
        test = noise_test({"w": noisy}, {"w": fitted}, Channel(noise=0.1), fitted=100)
        assert test is not None
        ratios.append(test.ratio)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    "channel",
    [Channel(), Channel(noise=0.1, prune=0.5), Channel(noise={"w": 0.0}), Channel(noise=0.1, rounding="sign")],
)
def test_no_test_where_the_sum_is_something_else(channel: Channel) -> None:
    assert noise_test({"w": torch.ones(4)}, {"w": torch.ones(4)}, channel) is None


def test_more_unknowns_than_entries_explain_anything() -> None:
    assert noise_test({"w": torch.ones(4)}, {"w": torch.ones(4)}, Channel(noise=1.0), fitted=4) is None


@pytest.mark.slow
def test_head_first_tells_whether_it_came_down_to_the_noise() -> None:
    net = ls.build_model("convnet", input_shape=(3, 16, 16), num_classes=4)
    x, y = torch.rand(1, 3, 16, 16, generator=draws(0)), torch.tensor([2])
    seen = ls.FedSGD().observe(net, x, y, GradientNoise(sigma=1e-3), Knowledge.adaptive_server, draws(0))
    result = HeadFirst(iterations=40)(seen, seed=0)
    assert 0 <= result.info["noise_p_value"] <= 1
    assert any("noise" in note for note in result.notes)
    assert "noise_p_value" not in HeadFirst(iterations=40, ignore_defense=True)(seen, seed=0).info


@pytest.mark.parametrize(
    ("defense", "reduction", "examples", "hidden"),
    [
        (DPSGD(clip=3.0, epsilon=1.0), "mean", 1, True),
        (DPSGD(clip=3.0, epsilon=4.0), "mean", 1, False),
        (DPSGD(clip=3.0, noise_multiplier=1 / DROWNED + 0.01), "mean", 1, True),
        (DPSGD(clip=3.0, noise_multiplier=1 / DROWNED - 0.01), "mean", 1, False),
        # Four examples that look alike add up, and the whole update is what must drown.
        (DPSGD(clip=3.0, noise_multiplier=4 / DROWNED + 0.01), "mean", 4, True),
        (DPSGD(clip=3.0, noise_multiplier=4 / DROWNED - 0.01), "mean", 4, False),
        (DPSGD(clip=3.0, noise_multiplier=4 / DROWNED + 0.01), "sum", 4, True),
        (DPSGD(clip=3.0, noise_multiplier=4 / DROWNED - 0.01), "sum", 4, False),
        (GradientNoise(sigma=100.0), "mean", 1, False),  # nothing bounds what it hides
        (GradientClipping(norm=1e-6), "mean", 1, False),
        (None, "mean", 1, False),
    ],
)
def test_noise_drowns_only_an_update_that_is_clipped_below_it(
    defense: ls.Defense | None, reduction: str, examples: int, hidden: bool
) -> None:
    net, (x, y) = torch.nn.Linear(6, 3), (torch.rand(examples, 6), torch.arange(examples) % 3)
    protocol = ls.FedSGD(reduction=reduction)
    seen = protocol.observe(net, x, y, defense=defense, knowledge=Knowledge.adaptive_server, generator=draws(0))
    assert drowned(seen) == hidden
    unknowing = protocol.observe(net, x, y, defense=defense, generator=draws(0))
    assert not drowned(unknowing), "who does not know the defence cannot know"


def test_a_search_in_drowning_noise_ends_early_and_says_so() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3))
    x, y = torch.rand(1, 1, 6, 6, generator=draws(1)), torch.tensor([1])
    for epsilon, steps in ((1.0, 30), (8.0, 300)):
        seen = ls.FedSGD().observe(
            *(net, x, y),
            defense=DPSGD(epsilon=epsilon),
            knowledge=dataclasses.replace(Knowledge.adaptive_server, labels="yes"),
            generator=draws(0),
        )
        found = ls.attacks.InvertingGradients(iterations=300)(seen, seed=0)
        assert found.info["steps"] == steps
        assert any("drowns" in note for note in found.notes) == (steps == 30)
        assert steps == 300 or "did not converge" not in found.flags
        exact = HeadFirst()(seen, seed=0)
        assert ("surprise" in exact.info) == (steps == 300), "nor is a most probable image looked for"
