"""Named thresholds of attacks and their equations, each tried on both sides."""

from __future__ import annotations

import pytest
import torch

from imprint_cases import SHAPE, look, pictures
from leakscope.attacks import RobbingTheFed
from leakscope.attacks.learning_to_invert import LEAST_PER_EXAMPLE, UNLIKE, Inversion, LearningToInvert
from leakscope.attacks.learning_to_invert.regression import Featuriser, Mean
from leakscope.attacks.robbing_the_fed.imprint import GRID_VALUES, NEAR, ON_GRID, _beyond, _on_grid, empty_size
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.equations.feature_separation import LEAST_OCCURRENCES, frequent_differences
from leakscope.equations.feature_span import visible_zeros
from leakscope.equations.features import PRUNED
from leakscope.equations.stein_moments import MOST, head_loadings
from leakscope.equations.unmixing import LEAST_GAP, ROUNDING, count_sources, independent_rows
from leakscope.federation import FedSGD
from leakscope.models import build_model

SEEN = look(RobbingTheFed(bins=64), pictures([0.3, 0.6]))


@pytest.mark.parametrize(("off", "on_grid"), [(0.9 * ON_GRID, True), (1.1 * ON_GRID, False)])
def test_a_picture_lies_on_the_grid_of_eight_bits_up_to_a_tenth_of_its_step(off: float, on_grid: bool) -> None:
    levels = torch.arange(SHAPE[0] * SHAPE[1] * SHAPE[2], dtype=torch.float64) % 200 + 20
    signs = torch.where(torch.arange(len(levels)) % 2 == 0, 1.0, -1.0)
    assert bool(_on_grid((levels + off * signs)[None] / 255, SEEN)) == on_grid


@pytest.mark.parametrize(("values", "on_grid"), [(GRID_VALUES, True), (GRID_VALUES - 1, False)])
def test_few_different_values_do_not_make_a_grid(values: int, on_grid: bool) -> None:
    levels = torch.arange(SHAPE[0] * SHAPE[1] * SHAPE[2], dtype=torch.float64) % values + 20
    assert bool(_on_grid(levels[None] / 255, SEEN)) == on_grid


def test_how_far_beyond_the_range_is_told_around_what_is_near() -> None:
    size = SHAPE[0] * SHAPE[1] * SHAPE[2]
    rows = torch.stack([torch.full((size,), 1 + share * NEAR, dtype=torch.float64) for share in (-1, 0.9, 1.1)])
    assert (_beyond(rows, SEEN) <= NEAR).tolist() == [True, True, False]


def test_one_bin_to_spare_tells_the_size_of_an_empty_one() -> None:
    sizes = torch.tensor([5.0, 0.25, 7.0])
    assert [empty_size(sizes, examples) for examples in (3, 2, None)] == [0.0, 0.25, 0.0]


@pytest.mark.parametrize("examples", [1, 5])
def test_an_adversary_needs_some_examples_for_each_in_a_batch(examples: int) -> None:
    least = LEAST_PER_EXAMPLE * max(4, examples)
    net = build_model("mlp", input_shape=(1, 4, 4), num_classes=2, hidden=8)
    x, y = torch.rand(least, 1, 4, 4), torch.arange(least) % 2
    attack = LearningToInvert(clients=8, hidden=0)
    for given in (least - 1, least):
        own = (x[:given], y[:given])
        seen = FedSGD().observe(net, x[:examples], y[:examples], knowledge=Knowledge.informed_server, auxiliary=own)
        if given < least:
            with pytest.raises(NotApplicable, match=f"{least} examples.*got {given}"):
                attack(seen)
        else:
            assert attack(seen).info["steps"] > 0


@pytest.mark.parametrize(("factor", "alike"), [(0.9 * UNLIKE, True), (1.1 * UNLIKE, False)])
def test_an_update_far_larger_or_smaller_than_played_ones_is_unlike_them(factor: float, alike: bool) -> None:
    update = {"w": torch.ones(3)}
    featuriser = Featuriser.of(update, 8, torch.Generator().manual_seed(0))
    one = torch.ones(1)
    inversion = Inversion(featuriser, Mean(torch.zeros(2)), False, 0.0, 0.0, 1, (one, one))
    for size in (factor, 1 / factor):
        assert inversion({"w": size * update["w"]})[1] == alike


def test_singular_values_that_fall_by_less_than_a_gap_tell_no_number_of_sources() -> None:
    for ratio in (1.1, 0.9):
        values = torch.diag(torch.tensor([1.0, 1.0, 1 / (ratio * LEAST_GAP)]))
        if ratio > 1:
            assert count_sources(values) == 2
        else:
            with pytest.raises(NotApplicable):
                count_sources(values)


def test_rows_below_the_rounding_of_float32_do_not_count() -> None:
    ranks = [independent_rows(torch.diag(torch.tensor([1.0, share * ROUNDING]).double())) for share in (2, 0.5)]
    assert ranks == [2, 1]


@pytest.mark.parametrize("classes", [MOST, MOST + 4])
def test_the_strongest_directions_of_a_head_are_read(classes: int) -> None:
    head = torch.randn((classes, 40), generator=torch.Generator().manual_seed(0)).double()
    assert len(head_loadings(head)) == min(classes - 1, MOST)  # what all rows have in common carries nothing


def test_a_difference_is_a_feature_where_it_occurs_often_enough() -> None:
    draws = torch.Generator().manual_seed(0)
    features = torch.eye(3).double() + 0.1
    gates = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 3)
    for kept in (LEAST_OCCURRENCES - 1, LEAST_OCCURRENCES):
        # All pairs of patterns that differ in the first example alone, so many of them.
        rows = gates[[0, 1, 2, 3, *(4 + place for place in range(kept))]] @ features
        found = frequent_differences(rows, draws)
        assert (found is not None) == (kept >= LEAST_OCCURRENCES)


def test_zeros_count_as_pruned_from_a_hundredth_on() -> None:
    gradient = torch.ones(20, 20)
    shares = []
    for zeros in (3, 5):
        pruned = gradient.clone()
        pruned.flatten()[:zeros] = 0
        shares.append(visible_zeros(pruned)[1] > PRUNED)
    assert shares == [False, True]
