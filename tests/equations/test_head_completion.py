"""The head of one example whose gradient lost entries: what is left of a matrix of rank one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import leakscope as ls
from leakscope.attacks import HeadFirst
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.defenses import GradientDropout, GradientPruning
from leakscope.equations.embedding import recover_embedding
from leakscope.equations.head import complete_head
from leakscope.equations.head_system import HeadProblem, HeadSolution


def head(classes: int = 10, width: int = 200, seed: int = 0, examples: int = 1) -> tuple[Tensor, ...]:
    """Weight, bias, sparse features, output gradients and labels; float64."""
    draws = torch.Generator().manual_seed(seed)
    weight = 0.2 * torch.randn((classes, width), generator=draws, dtype=torch.float64)
    bias = 0.1 * torch.randn(classes, generator=draws, dtype=torch.float64)
    features = torch.randn((examples, width), generator=draws, dtype=torch.float64).clamp_min(0)
    labels = torch.randint(classes, (examples,), generator=draws)
    delta = torch.softmax(features @ weight.T + bias, 1) - torch.nn.functional.one_hot(labels, classes)
    return weight, bias, features, delta, labels


def pruned(value: Tensor, fraction: float) -> Tensor:
    return GradientPruning(fraction=fraction).protect_message({"w": value}, torch.Generator())["w"]


def complete(*gradients: Tensor | None, label: int | None = None) -> tuple[HeadSolution, Tensor]:
    facts = {"examples": 1, "nonnegative": True, "unit": 1.0, "scale": 1.0}
    return complete_head(HeadProblem(*gradients, **facts), label)


@pytest.mark.parametrize("fraction", [0.3, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_what_pruning_left_is_exact(fraction: float, seed: int) -> None:
    weight, bias, features, delta, labels = head(seed=seed)
    solution, seen = complete(weight, bias, pruned(delta.T @ features, fraction), pruned(delta[0], fraction))
    assert int(solution.labels[0]) == int(labels[0])
    assert solution.residual < 1e-9
    assert float((solution.features[0] - features[0])[seen].abs().max()) < 1e-9
    # What was not seen is small, and the error that is told covers it.
    missing = float(features[0][~seen].norm() / features[0].norm())
    assert missing <= 2 * solution.error + 1e-12
    assert float((solution.output_gradients - delta).norm() / delta.norm()) < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_random_zeros_are_filled_from_other_rows(seed: int) -> None:
    weight, bias, features, delta, labels = head(seed=seed)
    gradient = {"w": delta.T @ features, "b": delta[0]}
    sent = GradientDropout(probability=0.5).protect_message(gradient, torch.Generator().manual_seed(seed))
    own = delta[0, labels[0]]
    sums = sent["b"].clone()
    sums[labels[0]] = own
    found, seen = complete(weight, bias, sent["w"], sums, label=int(labels[0]))
    assert float((found.features[0] - features[0]).norm() / features.norm()) < 0.05
    assert float((found.features[0] - features[0])[seen].abs().max()) < 1e-6


def test_without_a_bias_the_features_tell_their_own_scale() -> None:
    weight, _, features, _, labels = head(seed=5)
    delta = torch.softmax(features @ weight.T, 1) - torch.nn.functional.one_hot(labels, 10)
    found, _ = complete(weight, None, pruned(delta.T @ features, 0.5), None)
    assert float((found.features[0] - features[0]).norm() / features.norm()) < 0.05


def test_two_examples_are_refused() -> None:
    weight, bias, features, delta, _ = head(examples=2, seed=1)
    with pytest.raises(NotApplicable, match="not of one example"):
        complete(weight, bias, pruned(delta.T @ features, 0.5), pruned(delta.sum(0), 0.5))


def test_nothing_left_is_refused() -> None:
    weight, bias, features, delta, _ = head()
    with pytest.raises(NotApplicable, match="nothing is left"):
        complete(weight, bias, torch.zeros_like(delta.T @ features), delta[0])


def test_an_adversary_who_does_not_know_of_the_zeros_does_not_fill_them() -> None:
    net = ls.build_model("convnet", input_shape=(3, 16, 16), num_classes=4)
    x, y = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([2])
    seen = ls.FedSGD().observe(net, x, y, GradientPruning(fraction=0.9), Knowledge.adaptive_server)
    assert recover_embedding(seen).seen is not None
    with pytest.raises(NotApplicable):
        recover_embedding(seen.without_channel())


@pytest.mark.slow
def test_knowing_of_pruning_is_worth_more_than_6_db() -> None:
    net = ls.build_model("convnet", input_shape=(3, 16, 16), num_classes=4)
    x = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    for axis in (2, 3):
        x = (x + x.roll(1, axis) + x.roll(-1, axis)) / 3
    seen = ls.FedSGD().observe(net, x, torch.tensor([1]), GradientPruning(fraction=0.9), Knowledge.adaptive_server)
    knowing, ignoring = (HeadFirst(ignore_defense=ignores)(seen, seed=0) for ignores in (False, True))
    gain = ls.metrics.psnr(x, knowing.inputs.clamp(0, 1)) - ls.metrics.psnr(x, ignoring.inputs.clamp(0, 1))
    assert float(gain) > 6
