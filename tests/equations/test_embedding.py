"""The features in front of the last layers, from an observation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leakscope as ls
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.protocol import client_copy
from leakscope.defenses import GradientNoise, GradientPruning
from leakscope.equations.embedding import Embedding, recover_embedding
from leakscope.metrics.assignment import assign
from leakscope.network.recorder import inputs_of

KNOWS_LABELS = dataclasses.replace(ls.Knowledge.honest_server, labels="yes")


def pictures(count: int, seed: int = 0) -> Tensor:
    return torch.rand((count, 3, 32, 32), generator=torch.Generator().manual_seed(seed))


def model_of(name: str, **options: Any) -> nn.Module:
    return ls.build_model(name, input_shape=(3, 32, 32), num_classes=10, **options)


def embedding_of(observation: ls.Observation, **options: Any) -> Embedding:
    return recover_embedding(observation, torch.Generator().manual_seed(0), **options)


def largest_error(found: Embedding, model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        truth = inputs_of(model.get_submodule(found.layer), model.eval(), x).flatten(1).double()
    return float(((found.features[assign(truth, found.features)] - truth).norm(dim=1) / truth.norm(dim=1)).max())


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_every_batch_below_the_number_of_classes_leaks_its_features(count: int) -> None:
    model, x, y = model_of("convnet", filters=8), pictures(count), torch.arange(count)
    found = ls.recover_embedding(ls.FedSGD().observe(model, x, y), torch.Generator().manual_seed(0))
    assert isinstance(found, ls.Embedding)
    assert found.exact
    assert found.layer == "fc"
    assert found.residual < 1e-6
    assert found.labels is not None
    assert found.labels.tolist() == list(range(count)), "though nobody told them"
    assert largest_error(found, model, x) < 1e-5


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("count", [1, 4])
def test_an_mlp_is_solved_to_its_inputs(count: int, activation: str) -> None:
    model, x = model_of("mlp", hidden=(96, 64), activation=activation), pictures(count)
    found = embedding_of(ls.FedSGD().observe(model, x, torch.arange(count)))
    assert found.reaches_input
    assert found.peeled == ("fc2", "fc1")
    assert "the input is reached" in found.notes[-1]
    solved = found.features.reshape(x.shape)
    assert -10 * math.log10(float((solved - x).square().mean())) > 100
    head_only = embedding_of(ls.FedSGD().observe(model, x, torch.arange(count)), peel=False)
    assert (head_only.layer, head_only.peeled, head_only.reaches_input) == ("fc3", (), False)


@pytest.mark.parametrize("name", ["femnist-cnn", "convnet", "mlp"])
def test_adjoints_give_the_gradients_below_the_cut(name: str) -> None:
    model, x, y = model_of(name), pictures(3), torch.tensor([2, 5, 7])
    observation = ls.FedSGD().observe(model, x, y)
    found = embedding_of(observation, peel=name != "mlp")
    twin = client_copy(model, "eval")
    features = inputs_of(twin.get_submodule(found.layer), twin, x).flatten(1)
    below = [
        (key, value)
        for key, value in twin.named_parameters()
        if not key.startswith((found.layer, *found.peeled, "fc2" if name != "mlp" else "fc3"))
    ]
    gradients = torch.autograd.grad((features * found.adjoints.float()).sum(), [value for _, value in below])
    for (key, _), gradient in zip(below, gradients, strict=True):
        seen = observation.message.update[key]
        assert float((gradient - seen).norm() / seen.norm()) < 1e-4


def test_clipping_only_scales() -> None:
    model, x, y = model_of("convnet", filters=8), pictures(3), torch.tensor([1, 4, 4])
    whole = ls.FedSGD().observe(model, x, y, knowledge=KNOWS_LABELS)
    norm = math.sqrt(sum(float(value.square().sum()) for value in whole.message.update.values()))
    channel = ls.Channel(clip=norm / 8)
    clipped = whole.with_update(channel.clip_update(whole.message.update))
    knowing = dataclasses.replace(clipped, channel=channel, knowledge=dataclasses.replace(KNOWS_LABELS, defense=True))
    for observation in (clipped, knowing):
        found = embedding_of(observation)
        assert found.scale == pytest.approx(1 / 8, rel=1e-3)
        assert largest_error(found, model, x) < 1e-3


def test_one_plain_step_of_fedavg_is_a_gradient() -> None:
    model, x, y = model_of("convnet", filters=8), pictures(2), torch.tensor([1, 4])
    found = embedding_of(ls.FedAvg(epochs=1, batch_size=2, lr=0.05).observe(model, x, y))
    assert found.scale == pytest.approx(0.05, rel=1e-3)
    assert largest_error(found, model, x) < 1e-3


@pytest.mark.parametrize("count", [1, 4])
def test_several_steps_are_refused(count: int) -> None:
    model, x, y = model_of("convnet", filters=8), pictures(count), torch.arange(count)
    protocol = ls.FedAvg(epochs=5, batch_size=count, lr=0.1)
    for knowledge in (KNOWS_LABELS, dataclasses.replace(KNOWS_LABELS, learning_rate=False)):
        with pytest.raises(NotApplicable):
            embedding_of(protocol.observe(model, x, y, knowledge=knowledge))


def test_noise_leaves_an_approximation_and_pruning_nothing() -> None:
    model, x, y = model_of("convnet", filters=8), pictures(3), torch.tensor([1, 4, 7])
    draws = torch.Generator().manual_seed(0)
    noisy = ls.FedSGD().observe(model, x, y, GradientNoise(sigma=1e-6), generator=draws)
    found = embedding_of(noisy)
    assert not found.exact
    assert largest_error(found, model, x) < 3 * found.error < 0.1
    with pytest.raises(NotApplicable):
        embedding_of(ls.FedSGD().observe(model, x, y, GradientPruning(fraction=0.9)))


def test_refusals_name_what_was_seen() -> None:
    model, x = model_of("convnet", filters=8), pictures(10)
    with pytest.raises(NotApplicable, match="at most 9 examples"):
        embedding_of(ls.FedSGD().observe(model, x, torch.arange(10)))
    with pytest.raises(NotApplicable, match="does not show 2 examples"):
        embedding_of(ls.FedSGD().observe(model, x[[0, 0]], torch.tensor([1, 1])))
    with pytest.raises(NotApplicable, match="a softmax follows the last linear layer"):
        embedding_of(ls.FedSGD().observe(model_of("lenet-tanh"), x[:2], torch.tensor([1, 2])))
    for parameter in model.get_submodule("fc").parameters():
        parameter.requires_grad_(False)
    with pytest.raises(NotApplicable, match="frozen"):
        embedding_of(ls.FedSGD().observe(model, x[:1], torch.tensor([1])))
