"""The cocktail party attack: whole batches of dense nets exactly, embeddings of convolutional ones, and refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import CocktailParty
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.data import load_data
from leakscope.federation import FedAvg, FedSGD
from leakscope.metrics import assign, psnr
from leakscope.models import build_model

COUNT = 12


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(count: int = COUNT) -> tuple[Tensor, Tensor]:
    """Tiles of all photos, and labels that repeat: as many examples as classes and more."""
    data = load_data("tiles")
    places = torch.arange(count) * (len(data) // count)
    return data.x[places], data.y[places]


def dense(hidden: tuple[int, ...] = (256,), **options) -> nn.Module:
    return build_model("mlp", input_shape=(3, 32, 32), num_classes=9, hidden=hidden, seed=0, **options)


def aligned(x: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """PSNR of each example, and the order in which they came back."""
    found = found.clamp(0, 1)
    order = assign(x, found)
    return psnr(x[order >= 0], found[order[order >= 0]]), order


@pytest.fixture(scope="module")
def seen() -> Observation:
    return FedSGD().observe(dense(), *batch())


def test_a_batch_larger_than_the_number_of_classes_is_exact_with_a_certificate(seen) -> None:
    x, y = batch()
    result = CocktailParty()(seen)
    score, order = aligned(x, result.inputs)
    assert score.min() > 80
    assert torch.equal(result.labels[order], y)
    assert result.certified == len(result.inputs)
    assert result.flags == ()


def test_unmixing_alone_is_near_and_says_that_it_may_be_mixtures(seen) -> None:
    x, _ = batch()
    result = CocktailParty(solve=False)(seen)
    score, _ = aligned(x, result.inputs)
    assert score.mean() > 18
    assert result.flags == ("mixture",)
    assert result.labels is None
    assert not result.certified


def test_differences_beat_values_and_the_published_settings_run(seen) -> None:
    x, _ = batch()
    by_differences = aligned(x, CocktailParty(solve=False)(seen).inputs)[0].mean()
    paper = CocktailParty.preset("fc2-tiny-imagenet", steps=100)(seen)
    assert aligned(x, paper.inputs)[0].mean() < by_differences - 3
    assert paper.info["steps"] == 100


def test_the_number_of_examples_is_read_off_the_gradient_where_it_is_not_known() -> None:
    x, _ = batch()
    hidden = FedSGD().observe(dense(), *batch(), knowledge=Knowledge(num_examples=False))
    assert hidden.num_examples is None
    result = CocktailParty()(hidden)
    assert len(result.inputs) == COUNT
    assert aligned(x, result.inputs)[0].min() > 80
    assert any("mixture of 12 inputs" in note for note in result.notes)


def test_examples_that_are_alike_count_once() -> None:
    x, y = batch(6)
    twice = torch.cat([x, x[:2]]), torch.cat([y, y[:2]])
    result = CocktailParty()(FedSGD().observe(dense(), *twice))
    assert len(result.inputs) == 6
    assert aligned(x, result.inputs)[0].min() > 80
    assert any("6 different mixtures of 8 examples" in note for note in result.notes)


def test_several_layers_behind_and_inputs_that_are_normalised() -> None:
    x, y = batch(6)
    centred = (x - 0.5) / 0.25
    model = dense((256, 128))
    seen = FedSGD().observe(model, centred, y)
    result = CocktailParty()(seen)
    score, order = aligned(x, result.inputs * 0.25 + 0.5)
    assert score.min() > 80
    assert torch.equal(result.labels[order], y)


def test_a_weight_update_of_one_step_is_a_gradient_and_of_several_still_a_mixture() -> None:
    x, y = batch(6)
    one = CocktailParty()(FedAvg(epochs=1, batch_size=6, lr=0.1).observe(dense(), x, y))
    assert aligned(x, one.inputs)[0].min() > 60
    several = CocktailParty()(FedAvg(epochs=2, batch_size=3, lr=0.01).observe(dense(), x, y))
    assert "steps not simulated" in several.flags
    assert aligned(x, several.inputs)[0].mean() > 20


def test_without_a_bias_sign_and_scale_are_a_guess_and_nothing_is_certified() -> None:
    x, y = batch(4)
    result = CocktailParty()(FedSGD().observe(dense(bias=False), x, y))
    assert aligned(x, result.inputs)[0].mean() > 15
    assert not result.certified
    assert result.labels is None
    assert any("no bias gradient" in note for note in result.notes)


def test_embeddings_of_a_convolutional_net_are_exact_and_inverted() -> None:
    x, y = batch(4)
    model = build_model("femnist-cnn", input_shape=(3, 32, 32), num_classes=9, seed=0)
    result = CocktailParty(iterations=100)(FedSGD().observe(model, x, y))
    score, order = aligned(x, result.inputs)
    assert score.mean() > 22
    assert torch.equal(result.labels[order], y)
    assert result.info["embedding_residual"] < 1e-5
    assert not result.certified  # of the pictures themselves there is none


def test_noise_is_never_certified(seen) -> None:
    update = {name: torch.randn(value.shape, generator=draws(4)) for name, value in seen.message.update.items()}
    noise = dataclasses.replace(seen, messages=(dataclasses.replace(seen.message, update=update),))
    result = CocktailParty()(noise)
    assert not result.certified
    assert "mixture" in result.flags
    x, _ = batch()
    assert aligned(x, result.inputs)[0].mean() < 15


def test_the_wrong_model_is_never_certified(seen) -> None:
    other = build_model("mlp", input_shape=(3, 32, 32), num_classes=9, hidden=(256,), seed=5)
    result = CocktailParty()(dataclasses.replace(seen, model=other))
    assert not result.certified
    assert "mixture" in result.flags


def test_a_black_example_spoils_the_scale_and_therefore_the_certificate() -> None:
    x, y = batch(6)
    x[2] = 0
    result = CocktailParty()(FedSGD().observe(dense(), x, y))
    assert not result.certified
    assert "mixture" in result.flags


def test_examples_that_are_nearly_alike_are_certified_only_where_they_are_exact() -> None:
    x, y = batch(6)
    x[1] = (x[0] + 0.02 * torch.rand(x[0].shape, generator=draws())).clamp(0, 1)
    x[3] = x[2].flip(-1)
    x[5] = 0.5
    result = CocktailParty()(FedSGD().observe(dense(), x, y))
    assert not result.certified or aligned(x, result.inputs)[0].min() > 60


def test_one_dense_layer_alone_is_unmixed_and_not_certified() -> None:
    x, y = batch(6)
    model = build_model("logistic", input_shape=(3, 32, 32), num_classes=9, seed=0)
    result = CocktailParty()(FedSGD().observe(model, x, y))
    assert aligned(x, result.inputs)[0].mean() > 15
    assert not result.certified
    assert "mixture" in result.flags


def test_refusals_say_what_is_missing() -> None:
    x, y = batch()
    narrow = FedSGD().observe(dense((8,)), x, y)
    with pytest.raises(NotApplicable, match=r"12 examples.*8 units"):
        CocktailParty()(narrow)
    convolution = nn.Sequential(nn.Conv2d(3, 9, 32), nn.Flatten())
    with pytest.raises(NotApplicable, match="no dense layer"):
        CocktailParty()(FedSGD().observe(convolution, x, y))
    headed = nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 28 * 28, 9))
    with pytest.raises(NotApplicable, match="head-first"):
        CocktailParty()(FedSGD().observe(headed, x[:4], y[:4]))
    frozen = dense()
    frozen.fc1.requires_grad_(False)
    with pytest.raises(NotApplicable, match="frozen"):
        CocktailParty()(FedSGD().observe(frozen, x, y))
    full = FedSGD().observe(dense((12,)), x, y, knowledge=Knowledge(num_examples=False))
    with pytest.raises(NotApplicable, match="examples"):
        CocktailParty()(full)
