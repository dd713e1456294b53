"""The patches of one image from the gradients of a patch embedding and of its positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.patch_embedding import (
    CERTAIN,
    COLUMN_FLUCTUATION,
    FLUCTUATION,
    SolvedPatches,
    solve_patches,
    whole_bytes,
)

TOKENS, UNITS, INPUTS = 12, 20, 9


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bytes_of(seed: int = 3) -> Tensor:
    whole = torch.randint(256, (TOKENS, INPUTS), generator=torch.Generator().manual_seed(seed))
    return whole.double() / 255


def solve(patches: Tensor, units: int = UNITS, noise: float = 0.0, bias: bool = True) -> SolvedPatches:
    signals = draw(TOKENS, units, seed=1)
    gradient = signals.T @ patches + noise * draw(units, INPUTS, seed=2)
    return solve_patches(signals, gradient, signals.sum(0) if bias else None, torch.full_like(patches, 0.5), 1.0)


BLACK, WHITE = torch.zeros(TOKENS, INPUTS).double(), torch.ones(TOKENS, INPUTS).double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("units", [UNITS, TOKENS])
def test_patches_are_solved(units: int, bias: bool) -> None:
    patches = torch.rand(TOKENS, INPUTS).double()
    found = solve(patches, units, bias=bias)
    assert torch.allclose(found.patches, patches, atol=1e-3 if units == TOKENS else 1e-9)
    assert found.residual < 1e-6


@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1e-3])
def test_the_expected_error_is_that_of_the_patches(noise: float) -> None:
    patches = torch.rand(TOKENS, INPUTS).double()
    found = solve(patches, noise=noise)
    error = float((found.patches - patches).square().mean().sqrt())
    assert 0.6 * found.error < error < 1.6 * found.error
    assert found.level == pytest.approx(noise, rel=0.3)


def test_more_tokens_than_units_leave_free_directions() -> None:
    found = solve(torch.rand(TOKENS, INPUTS).double(), units=TOKENS - 2)
    assert found.free_directions(1e-4) == 2 * INPUTS
    assert found.error > 0.1
    assert whole_bytes(found, BLACK, WHITE) is None


def test_tokens_without_a_signal_of_their_own_are_free() -> None:
    signals = draw(TOKENS, UNITS, seed=1)
    signals[1] = signals[0]
    patches = torch.rand(TOKENS, INPUTS).double()
    gradient = (signals.T @ patches).float()
    found = solve_patches(signals, gradient, None, torch.full_like(patches, 0.5), 1.0)
    assert found.residual < 1e-6
    assert found.free_directions(1e-4) == INPUTS


@pytest.mark.parametrize(("most", "free"), [(0.5, 0), (0.2, INPUTS)])
def test_free_directions_on_both_sides_of_the_limit(most: float, free: int) -> None:
    errors = torch.cat([torch.zeros(TOKENS - 1), torch.ones(1)]).double()
    facts = {"signals": BLACK, "gradient": BLACK, "directions": BLACK, "levels": BLACK[0]}
    found = SolvedPatches(patches=BLACK, residual=0.0, errors=errors, span=1.0, **facts)
    assert found.free_directions(most) == free


def test_the_bias_shows_signals_that_are_not_its_own() -> None:
    signals, patches = draw(TOKENS, TOKENS, seed=1), torch.rand(TOKENS, INPUTS).double()
    other = draw(TOKENS, TOKENS, seed=5)
    found = solve_patches(other, signals.T @ patches, signals.sum(0), torch.full_like(patches, 0.5), 1.0)
    assert found.residual > 0.1  # the square system itself fits anything
    assert found.error > 0.05


def test_zero_gradients_are_refused() -> None:
    with pytest.raises(NotApplicable, match="nothing came back"):
        solve_patches(BLACK, torch.ones(INPUTS, INPUTS), None, BLACK, 1.0)


def test_whole_bytes_come_back_to_the_last_bit() -> None:
    patches = bytes_of()
    found = whole_bytes(solve(patches, noise=1e-5), BLACK, WHITE)
    assert found is not None
    assert torch.equal(found, patches)


def test_weak_tokens_are_rounded_once_the_others_are() -> None:
    """The second token's signal is nearly a tenth of the first's: its bytes are certain only once those are known."""
    signals, patches = draw(TOKENS, UNITS, seed=1), bytes_of()
    signals[1] = 0.1 * signals[0] + 0.02 * draw(UNITS, seed=7)
    gradient = signals.T @ patches + 4e-5 * draw(UNITS, INPUTS, seed=2)
    solved = solve_patches(signals, gradient, None, torch.full_like(patches, 0.5), 1.0)
    uncertain = CERTAIN * solved.level * torch.linalg.pinv(signals.T).norm(dim=1) > 0.5 / 255
    assert uncertain.nonzero().flatten().tolist() == [1]
    found = whole_bytes(solved, BLACK, WHITE)
    assert found is not None
    assert torch.equal(found, patches)


@pytest.mark.parametrize("noise", [1e-9, 1e-6, 1e-5])
def test_images_that_are_none_of_bytes_are_not_rounded(noise: float) -> None:
    assert whole_bytes(solve(torch.rand(TOKENS, INPUTS).double(), noise=noise), BLACK, WHITE) is None
    nearly = bytes_of()
    nearly[0, 0] += 0.3 / 255
    assert whole_bytes(solve(nearly, noise=noise), BLACK, WHITE) is None


def test_too_much_noise_leaves_no_byte_certain() -> None:
    assert whole_bytes(solve(bytes_of(), noise=1e-2), BLACK, WHITE) is None


@pytest.mark.parametrize(("times", "explained"), [(0.9, True), (1.5, False)])
def test_explained_is_what_leaves_the_noise(times: float, explained: bool) -> None:
    found = solve(bytes_of(), noise=1e-4)
    left = times * FLUCTUATION * found.level * torch.ones(UNITS, INPUTS).double()
    step = torch.linalg.pinv(found.signals.T) @ left
    exact = torch.linalg.lstsq(found.signals.T, found.gradient).solution
    outside = found.gradient - found.signals.T @ exact
    total = float((outside - found.signals.T @ step).square().mean().sqrt())
    assert found.explained_by(exact + step) == (total <= FLUCTUATION * found.level)
    assert found.explained_by(exact + (30.0 if not explained else 0.0) * step) == explained


def test_one_wrong_column_is_not_explained() -> None:
    found = solve(bytes_of(), noise=1e-6)
    exact = torch.linalg.lstsq(found.signals.T, found.gradient).solution
    wrong = exact.clone()
    wrong[0, 0] += 1 / 255
    assert found.explained_by(exact)
    assert not found.explained_by(wrong)
    assert COLUMN_FLUCTUATION > FLUCTUATION
