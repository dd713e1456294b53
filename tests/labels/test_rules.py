"""The rules against truth: exact cases E2, E3, E11, and what each rule must and must not do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from leakscope.labels import (
    bias_label,
    bias_present,
    certain_counts_from_bias,
    counts_to_labels,
    gradinversion_labels,
    idlg_label,
    label_counts_from_bias,
    label_counts_from_weight,
    llg_bias_labels,
    llg_labels,
    round_to_total,
)


def head_gradients(features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """dW, db of the mean cross-entropy of a linear head, from autograd."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    loss = nn.functional.cross_entropy(nn.functional.linear(features, weight, bias), labels)
    weight_gradient, bias_gradient = torch.autograd.grad(loss, (weight, bias))
    return weight_gradient, bias_gradient


def random_head(seed: int, batch: int, classes: int = 7, width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    return features, weight, torch.randn(classes, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(20))
def test_one_example_has_exactly_one_negative_bias_entry_whatever_the_features(seed: int) -> None:
    features, weight, bias = random_head(seed, batch=1)
    label = seed % 7
    _, gradient = head_gradients(features, weight, bias, torch.tensor([label]))
    assert bias_label(gradient) == label
    assert bias_present(gradient).tolist() == [label]


def test_row_sums_are_right_for_positive_and_wrong_for_negative_features() -> None:
    features, weight, bias = random_head(0, batch=1)
    label = torch.tensor([4])
    positive, _ = head_gradients(features.abs(), weight, bias, label)
    negative, bias_gradient = head_gradients(-features.abs(), weight, bias, label)
    assert idlg_label(positive) == 4
    assert idlg_label(negative) != 4
    assert bias_label(bias_gradient) == 4


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 12))
def test_negative_bias_entries_are_always_present_and_bounds_hold(seed: int, batch: int) -> None:
    features, weight, bias = random_head(seed, batch)
    labels = torch.randint(0, 7, (batch,), generator=torch.Generator().manual_seed(seed))
    _, gradient = head_gradients(features, weight, bias, labels)
    counts = torch.bincount(labels, minlength=7)
    assert set(bias_present(gradient).tolist()) <= set(labels.tolist())
    assert bool((certain_counts_from_bias(gradient, batch) <= counts).all())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_present_set_is_complete_exactly_where_the_probability_mass_is_below_one(seed: int) -> None:
    features, weight, bias = random_head(seed, batch=4)
    labels = torch.randperm(7, generator=torch.Generator().manual_seed(seed))[:4]
    _, gradient = head_gradients(features, weight, bias, labels)
    mass = (features @ weight.T + bias).softmax(1).sum(0)[labels]
    complete = set(bias_present(gradient).tolist()) == set(labels.tolist())
    assert complete == bool((mass < 1).all())


@pytest.mark.parametrize("batch", [1, 3, 64, 257])
def test_zero_head_gives_exact_integer_counts(batch: int) -> None:
    features, weight, bias = random_head(3, batch)
    labels = torch.randint(0, 7, (batch,), generator=torch.Generator().manual_seed(batch))
    _, gradient = head_gradients(features, weight * 0, bias * 0, labels)
    raw = batch * (1 / 7 - gradient)
    assert torch.allclose(raw, raw.round(), atol=1e-9)
    counts = label_counts_from_bias(gradient.float(), batch, torch.full((7,), 1 / 7))
    assert torch.equal(counts, torch.bincount(labels, minlength=7))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 40))
def test_counts_are_exact_when_the_mean_softmax_is(seed: int, batch: int) -> None:
    features, weight, bias = random_head(seed, batch)
    labels = torch.randint(0, 7, (batch,), generator=torch.Generator().manual_seed(seed))
    _, gradient = head_gradients(features, weight, bias, labels)
    mean = (features @ weight.T + bias).softmax(1).mean(0)
    assert torch.equal(label_counts_from_bias(gradient, batch, mean), torch.bincount(labels, minlength=7))


def test_counts_from_weight_are_exact_when_every_feature_sum_is_the_same() -> None:
    features, weight, bias = random_head(5, batch=30)
    features = features.softmax(1)
    labels = torch.randint(0, 7, (30,), generator=torch.Generator().manual_seed(1))
    gradient, _ = head_gradients(features, weight, bias * 0, labels)
    mean = (features @ weight.T).softmax(1).mean(0)
    counts = label_counts_from_weight(gradient, 30, mean, mean_feature_sum=1.0)
    assert torch.equal(counts, torch.bincount(labels, minlength=7))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-20, 20), min_size=1, max_size=12), st.integers(0, 60))
def test_rounding_keeps_its_promises(estimates: list[float], total: int) -> None:
    counts = round_to_total(torch.tensor(estimates, dtype=torch.float64), total)
    assert counts.dtype == torch.int64
    assert int(counts.sum()) == total
    assert int(counts.min()) >= 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 1000))
def test_rounding_returns_integers_through_rounding_error(counts: list[int], seed: int) -> None:
    noise = np.random.default_rng(seed).uniform(-1e-6, 1e-6, len(counts))
    estimates = torch.tensor(np.array(counts) + noise)
    assert round_to_total(estimates, sum(counts)).tolist() == counts


@pytest.mark.parametrize(
    "estimates, total, expected",
    [
        ([0.5, 0.4, 0.3], 1, [1, 0, 0]),
        ([1.1, 1.2, -0.9], 2, [1, 1, 0]),
        ([3.9, 2.1, 1.5], 5, [3, 1, 1]),  # over by one: the positive count with the smallest remainder gives
        ([5.5, 1.0, 0.0], 2, [2, 0, 0]),  # over by four: each positive gives one, then the largest
        ([-1.0, -2.0], 3, [2, 1]),
    ],
)
def test_rounding_rule_by_hand(estimates: list[float], total: int, expected: list[int]) -> None:
    assert round_to_total(torch.tensor(estimates), total).tolist() == expected


def test_llg_second_stage_takes_the_impact_off_the_label_it_emits() -> None:
    # Two classes share six examples three to three; decrementing any other entry would emit only one class.
    signal = torch.tensor([-0.25, 0.5, -0.25])
    assert llg_bias_labels(signal, 6).tolist() == [0, 0, 0, 2, 2, 2]
    assert llg_labels(signal[:, None], 6).tolist() == [0, 0, 0, 2, 2, 2]


def test_llg_handles_more_examples_than_classes_and_more_negatives_than_examples() -> None:
    assert len(llg_labels(torch.tensor([[-1.0], [0.5]]), 50)) == 50
    assert llg_bias_labels(torch.tensor([-0.1, -0.9, -0.5, 1.5]), 2).tolist() == [1, 2]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_scale_free_rules_do_not_see_the_scale(scale: float) -> None:
    features, weight, bias = random_head(2, batch=6)
    labels = torch.tensor([0, 1, 1, 5, 5, 5])
    weight_gradient, bias_gradient = head_gradients(features.abs(), weight, bias, labels)
    assert torch.equal(llg_labels(weight_gradient * scale, 6), llg_labels(weight_gradient, 6))
    assert torch.equal(llg_bias_labels(bias_gradient * scale, 6), llg_bias_labels(bias_gradient, 6))
    assert torch.equal(gradinversion_labels(weight_gradient * scale, 3), gradinversion_labels(weight_gradient, 3))


def test_gradinversion_finds_unique_labels_and_refuses_more_than_classes() -> None:
    features, weight, bias = random_head(1, batch=4)
    labels = torch.tensor([0, 2, 3, 6])
    gradient, _ = head_gradients(features.abs(), weight * 0.01, bias * 0, labels)
    assert torch.equal(gradinversion_labels(gradient, 4), labels)
    with pytest.raises(ValueError, match="at most 7"):
        gradinversion_labels(gradient, 8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_are_refused(bad: float) -> None:
    weight, bias = torch.ones(3, 2), torch.ones(3)
    weight[1, 1] = bias[1] = bad
    for call in (
        lambda: idlg_label(weight),
        lambda: bias_label(bias),
        lambda: bias_present(bias),
        lambda: gradinversion_labels(weight, 1),
        lambda: llg_labels(weight, 2),
        lambda: llg_bias_labels(bias, 2),
        lambda: label_counts_from_bias(bias, 2, torch.ones(3) / 3),
    ):
        with pytest.raises(ValueError, match="NaN or infinite"):
            call()


def test_wrong_shapes_and_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(classes, features\)"):
        idlg_label(torch.ones(3))
    with pytest.raises(ValueError, match=r"\(classes,\)"):
        bias_label(torch.ones(3, 1))
    with pytest.raises(ValueError, match="num_examples"):
        llg_labels(torch.ones(3, 1), 0)
    with pytest.raises(ValueError, match="mean_probabilities"):
        label_counts_from_bias(torch.ones(3), 2, torch.ones(4) / 4)
    with pytest.raises(ValueError, match="mean_feature_sum"):
        label_counts_from_weight(torch.ones(3, 2), 2, torch.ones(3) / 3, 0.0)
    with pytest.raises(ValueError, match="counts"):
        counts_to_labels(torch.tensor([1, -1]))
