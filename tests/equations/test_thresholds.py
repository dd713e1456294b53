"""Named thresholds of the head's equations, of mixtures and of candidates, each tried on both sides."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leakscope.attacks.candidates import REPLAYED, ROUGHER, Candidate
from leakscope.contracts.errors import NotApplicable
from leakscope.equations.dense_signals import MOST_ROUNDING, NEAR, SETTLED, SPARE, TIE, Separated
from leakscope.equations.gated_equations import MOST_FREE, TRIM, LayerEquations, decode_masks
from leakscope.equations.head_system import EXACT, LEAST_RANK, LEAST_SIGNAL, HeadProblem
from leakscope.equations.mixtures import MOST_GROWTH, NO_SHARE, OUTSIDE, Shares, possible_shares, take_apart
from leakscope.equations.stein_moments import VANISHING, ActivationClass
from leakscope.matching.held import SMALLEST_ROW, _row_scale

BOTH_SIDES = pytest.mark.parametrize(("factor", "above"), [(0.8, False), (1.25, True)])


def head(sizes: list[float], noise: float = 0.0) -> HeadProblem:
    """A head of six classes and eight features whose gradient has these singular values, and noise in one entry."""
    draws = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn((side, 6), generator=draws).double())[0] for side in (6, 8))
    gradient = (left[:, : len(sizes)] * torch.tensor(sizes).double()) @ right[:, : len(sizes)].T
    gradient = gradient + noise * torch.outer(left[:, 4], right[:, 4])
    facts = {"examples": len(sizes), "nonnegative": False, "unit": 1.0, "scale": 1.0}
    return HeadProblem(torch.ones((6, 8)), None, gradient, None, **facts)


def refuses(problem: HeadProblem) -> bool:
    try:
        problem.check_solvable()
    except NotApplicable:
        return True
    return False


@BOTH_SIDES
def test_an_example_below_the_rounding_of_a_gradient_is_not_shown(factor: float, above: bool) -> None:
    assert refuses(head([1.0, factor * LEAST_RANK])) != above


@BOTH_SIDES
def test_an_example_must_stand_out_of_the_noise(factor: float, above: bool) -> None:
    problem = head([1.0, 0.1], noise=1e-3)
    level = problem.noise * math.sqrt(8)
    assert refuses(head([1.0, factor * LEAST_SIGNAL * level], noise=1e-3)) != above


def separated(**facts: object) -> Separated:
    usual = {"obeyed": torch.ones(2), "residual": 0.0, "outside": 0.0, "spare": SPARE, "rounds": 1}
    return Separated(*[torch.zeros(2, 3)] * 3, **(usual | facts))


@BOTH_SIDES
def test_dense_signals_certify_by_their_residual(factor: float, above: bool) -> None:
    assert separated(residual=factor * EXACT).certified != above


@pytest.mark.parametrize(("spare", "least"), [(SPARE, NEAR), (SPARE - 1, SETTLED)])
def test_fewer_spare_equations_must_be_obeyed_by_more_units(spare: int, least: float) -> None:
    found = [separated(spare=spare, obeyed=torch.tensor([1.0, least + off])).certified for off in (1e-3, -1e-3)]
    assert found == [True, False]


@BOTH_SIDES
def test_what_lies_outside_of_the_rows_is_rounding_or_noise(factor: float, above: bool) -> None:
    outside = factor * MOST_ROUNDING
    assert separated(outside=outside).rounding == (EXACT if above else 5 * outside)


@BOTH_SIDES
def test_shares_of_obeyed_equations_count_where_they_are_no_tie(factor: float, above: bool) -> None:
    more = separated(obeyed=torch.full((2,), 0.5 + factor * TIE), residual=0.2)
    assert more.better_than(separated(obeyed=torch.full((2,), 0.5), residual=0.1)) == above


@BOTH_SIDES
def test_a_share_that_is_none_belongs_to_no_example(factor: float, above: bool) -> None:
    share = factor * NO_SHARE
    soft = torch.tensor([[0.6, 0.4, 0.0], [0.3, 0.7 - share, share]]).double()
    if above:
        with pytest.raises(NotApplicable, match="3 classes"):
            possible_shares(soft, 2)
    else:
        assert possible_shares(soft, 2)[0].labels.tolist() == [0, 1]


@BOTH_SIDES
def test_mixtures_that_are_nearly_alike_are_not_taken_apart(factor: float, above: bool) -> None:
    shares = Shares(torch.diag(torch.tensor([1.0, 1 / (factor * MOST_GROWTH)]).double()), torch.tensor([0, 1]))
    pictures = torch.zeros((2, 1, 2, 2)).double()
    if above:
        with pytest.raises(NotApplicable, match="singular"):
            take_apart(pictures, [shares], error=0.0)
    else:
        assert take_apart(pictures, [shares], error=0.0).forced


@BOTH_SIDES
def test_parts_outside_of_their_box_refute_a_way(factor: float, above: bool) -> None:
    one = Shares(torch.ones((1, 1)).double(), torch.tensor([0]))
    pictures = torch.full((1, 1, 2, 2), -factor * OUTSIDE).double()
    if above:
        with pytest.raises(NotApplicable, match="bounds"):
            take_apart(pictures, [one], error=0.0)
    else:
        assert take_apart(pictures, [one], error=0.0).forced


def candidate(**facts: object) -> Candidate:
    usual = {"inputs": torch.rand((1, 1, 4, 4), generator=torch.Generator().manual_seed(0)), "method": "a search"}
    return Candidate(**(usual | {"distance": 0.5} | facts))


@BOTH_SIDES
def test_a_residual_outranks_the_whole_update_where_it_is_small(factor: float, above: bool) -> None:
    assert candidate(residual=factor * REPLAYED, distance=0.9).better_than(candidate()) != above


@BOTH_SIDES
def test_least_squares_that_are_far_rougher_must_leave_less(factor: float, above: bool) -> None:
    smooth = candidate()
    rough = candidate(inputs=factor * ROUGHER * smooth.inputs, distance=0.49, fair=0.999)
    assert rough.better_than(smooth) != above


@BOTH_SIDES
def test_a_moment_vanishes_below_a_share_of_the_largest(factor: float, above: bool) -> None:
    assert ActivationClass(1.0, factor * VANISHING, 0.0).orders == ((2, 3) if above else (2,))


@BOTH_SIDES
def test_rows_of_a_gradient_that_are_rounding_do_not_count(factor: float, above: bool) -> None:
    assert bool(_row_scale(torch.tensor([[1.0], [factor * SMALLEST_ROW]]), level=False)[1] > 0) == above


def layer(units: int, places: int) -> tuple[LayerEquations, Tensor]:
    """A layer whose units were all active, and what its masks are taken for at first: all of the first unit wrong."""
    draws = torch.Generator().manual_seed(0)
    signal = torch.randn((1, units, places), generator=draws).double()
    patches = torch.randn((1, 2 * places, places), generator=draws).double()
    gradient = torch.einsum("ncl,npl->cp", signal, patches)
    masks = torch.ones((1, units, places), dtype=torch.bool)
    masks[0, 0, 0] = False
    return LayerEquations(signal, patches, gradient, None), masks


@pytest.mark.parametrize(("most", "decoded"), [(5, True), (4, False)])
def test_a_unit_with_too_many_free_masks_keeps_its_own(most: float, decoded: bool) -> None:
    equations, masks = layer(3, 5)
    free, doubt = torch.ones_like(masks), torch.ones(masks.shape).double()
    assert most < MOST_FREE
    assert bool(decode_masks(equations, masks, free, doubt, most).active.all()) == decoded


@BOTH_SIDES
def test_units_that_are_explained_far_worse_than_the_median_are_left_out(factor: float, above: bool) -> None:
    equations, masks = layer(5, 6)
    size = equations.signal.norm(dim=2)[0, :, None]
    off = torch.full((5, 1), 1e-2).double()
    off[0] = factor * TRIM * 1e-2
    aside = torch.nn.functional.normalize(torch.ones_like(equations.gradient), dim=1)
    altered = LayerEquations(equations.signal, equations.patches, equations.gradient + off * size * aside, None)
    masks = torch.ones_like(masks)
    found = decode_masks(altered, masks, torch.zeros_like(masks), torch.ones(masks.shape).double())
    assert found.kept.tolist() == [not above, True, True, True, True]
