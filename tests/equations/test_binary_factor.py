"""Masks and inputs of a 1x1 convolution in front of a ReLU and a mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.binary_factor import MOST_COLUMNS, binary_factor


def factors(columns: int, rows: int = 60, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks (rows, columns), inputs behind a ReLU (columns, channels), and the scale of each row."""
    draws = torch.Generator().manual_seed(seed)
    masks = (torch.randn((rows, columns), generator=draws) + 0.5 * torch.randn((rows, 1), generator=draws)) > 0
    inputs = torch.randn((columns, 40), generator=draws, dtype=torch.float64).relu()
    return masks.double(), inputs, torch.randn(rows, generator=draws, dtype=torch.float64)


def same_up_to_order(found: Tensor, truth: Tensor) -> bool:
    apart = torch.cdist(found, truth)
    whole = sorted(apart.argmin(1).tolist()) == list(range(len(truth)))
    return whole and float(apart.amin(1).max()) < 1e-5 * float(truth.norm())


@pytest.mark.parametrize("columns", [1, 4, 9, MOST_COLUMNS])
@pytest.mark.parametrize("seed", [0, 1])
def test_masks_and_inputs_are_exact_but_for_their_order(columns: int, seed: int) -> None:
    masks, inputs, scales = factors(columns, seed=seed)
    gradient = (scales[:, None] * (masks @ inputs)).float().double()
    found = binary_factor(gradient, scales, columns)
    assert same_up_to_order(found.inputs, inputs)
    assert same_up_to_order(found.masks.T, masks.T)
    assert found.apart < 1e-4


def test_masks_whose_differences_are_binary_are_told_by_the_zeros_of_the_inputs() -> None:
    """A mask within another one: their difference is a mask, too, and gives inputs that are not negative either."""
    masks, inputs, scales = factors(6)
    masks[:, 1] = torch.maximum(masks[:, 0], masks[:, 1])
    masks[:, 3] = masks[:, 2] * masks[:, 3]
    found = binary_factor(scales[:, None] * (masks @ inputs), scales, 6)
    assert same_up_to_order(found.inputs, inputs)


def test_faint_rows_have_masks_too() -> None:
    masks, inputs, scales = factors(4)
    scales[:5] = 1e-3
    scales[5] = 0.0
    found = binary_factor(scales[:, None] * (masks @ inputs), scales, 4)
    order = torch.cdist(found.inputs, inputs).argmin(0)
    assert torch.equal(found.masks[:5, order], masks[:5])
    assert not bool(found.masks[5].any())


def test_more_places_than_candidates_allow_are_refused() -> None:
    masks, inputs, scales = factors(MOST_COLUMNS + 1)
    with pytest.raises(NotApplicable, match="too many"):
        binary_factor(scales[:, None] * (masks @ inputs), scales, MOST_COLUMNS + 1)


@pytest.mark.parametrize("columns", [3, 5])
def test_another_number_of_places_is_refused(columns: int) -> None:
    masks, inputs, scales = factors(4)
    with pytest.raises(NotApplicable, match="rank 4"):
        binary_factor(scales[:, None] * (masks @ inputs), scales, columns)


@pytest.mark.parametrize("what", ["noise", "scales", "masks"])
def test_other_matrices_are_refused(what: str) -> None:
    masks, inputs, scales = factors(4)
    draws = torch.Generator().manual_seed(9)
    if what == "masks":
        masks = masks + 0.1 * torch.randn(masks.shape, generator=draws)
    gradient = scales[:, None] * (masks @ inputs)
    if what == "noise":
        gradient = gradient + 1e-2 * torch.randn(gradient.shape, generator=draws)
    if what == "scales":
        scales = scales[torch.randperm(len(scales), generator=draws)]
    with pytest.raises(NotApplicable):
        binary_factor(gradient, scales, 4)
