"""Rows mixed in a gradient are told apart: planted sources, an independent oracle, pictures, and what must fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from leakscope.contracts.errors import NotApplicable
from leakscope.data import load_data
from leakscope.equations.unmixing import (
    GAUSSIAN_LOG_COSH,
    count_sources,
    difference_groups,
    fast_ica,
    row_space,
    unmix,
    whiten,
)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def laplace(count: int, length: int, generator: torch.Generator) -> Tensor:
    sizes = -torch.log(torch.rand((count, length), generator=generator, dtype=torch.float64).clamp_min(1e-12))
    return sizes * torch.sign(torch.rand((count, length), generator=generator, dtype=torch.float64) - 0.5)


def mixed(sources: Tensor, units: int, generator: torch.Generator) -> Tensor:
    return torch.randn((units, len(sources)), generator=generator, dtype=torch.float64) @ sources


def best_cosines(sources: Tensor, truth: Tensor) -> Tensor:
    """For each true row the |cosine| with the source that is nearest to it."""
    return cosine_similarity(truth[:, None].double(), sources[None], dim=2).abs().amax(1)


def tiles(count: int) -> Tensor:
    data = load_data("tiles")
    return data.x[:: len(data) // count][:count].double()


@pytest.mark.parametrize("seed", range(3))
def test_independent_sources_come_back(seed) -> None:
    truth = laplace(8, 4096, draws(seed))
    unmixed = unmix(mixed(truth, 20, draws(seed + 10)), 8, draws(seed + 20))
    assert unmixed.settled
    assert (best_cosines(unmixed.sources, truth) > 0.99).all()
    assert unmixed.residual < 1e-12


def test_the_paper_objective_finds_them_from_the_identity_too() -> None:
    truth = laplace(4, 4096, draws())
    gradient = mixed(truth, 12, draws(1))
    start = unmix(gradient, 4, draws(), start="identity")
    options = {"start": "identity", "iterations": 400, "lr": 0.02, "independence": 0.1, "temperature": 5.0}
    unmixed = unmix(gradient, 4, draws(), negentropy=100.0, **options)
    assert unmixed.curve[-1] < unmixed.curve[0]
    assert best_cosines(start.sources, truth).min() < 0.9
    assert best_cosines(unmixed.sources, truth).min() > 0.97


def test_agrees_with_an_independent_implementation() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition", reason="scikit-learn is the oracle")
    truth = laplace(5, 3000, draws(3))
    gradient = mixed(truth, 5, draws(4))
    theirs = decomposition.FastICA(fun="logcosh", whiten="unit-variance", random_state=0, tol=1e-8, max_iter=500)
    oracle = torch.from_numpy(np.ascontiguousarray(theirs.fit_transform(gradient.T.numpy()).T))
    found = unmix(gradient, 5, draws()).sources
    centred = found - found.mean(1, keepdim=True)
    assert best_cosines(centred, oracle).min() > 0.9999


def test_the_bias_gradient_gives_sign_and_scale() -> None:
    truth = 0.3 + 0.2 * laplace(6, 4096, draws(5))
    signals = torch.randn((16, 6), generator=draws(6), dtype=torch.float64)
    unmixed = unmix(signals @ truth, 6, draws())
    found = unmixed.scaled(signals.sum(1))
    gaps = torch.cdist(truth, found)
    assert sorted(gaps.argmin(1).tolist()) == list(range(6))
    assert (gaps.amin(1) < 0.1 * truth.norm(dim=1)).all()


def test_sources_are_the_unmixing_of_the_gradient_whatever_its_scale_and_order() -> None:
    truth = laplace(4, 2000, draws(7))
    gradient = mixed(truth, 9, draws(8))
    unmixed = unmix(gradient, 4, draws())
    torch.testing.assert_close(unmixed.unmixing @ gradient, unmixed.sources)
    for other in (1e-5 * gradient, gradient.flip(0), gradient.float()):
        assert best_cosines(unmix(other, 4, draws()).sources, unmixed.sources).min() > 1 - 1e-6


def test_pictures_are_told_apart_by_differences_and_not_by_values() -> None:
    pictures = tiles(8)
    gradient = mixed(pictures.flatten(1), 40, draws(9))
    by_differences = unmix(gradient, 8, draws(), picture=(3, 32, 32))
    by_values = unmix(gradient, 8, draws(), picture=(3, 32, 32), domain="values")
    assert best_cosines(by_differences.sources, pictures.flatten(1)).mean() > 0.97
    assert best_cosines(by_values.sources, pictures.flatten(1)).mean() < 0.95
    shuffled = torch.randperm(3072, generator=draws(1))  # without neighbours there is nothing to tell them by
    lost = unmix(gradient[:, shuffled], 8, draws(), picture=(3, 32, 32))
    assert best_cosines(lost.sources, pictures.flatten(1)[:, shuffled]).mean() < 0.95


def test_normal_sources_cannot_be_told_apart_and_say_so() -> None:
    truth = torch.randn((6, 4096), generator=draws(), dtype=torch.float64)
    unmixed = unmix(mixed(truth, 12, draws(1)), 6, draws())
    assert best_cosines(unmixed.sources, truth).max() < 0.999
    heavy = unmix(mixed(laplace(6, 4096, draws()), 12, draws(1)), 6, draws())
    assert unmixed.negentropy.max() < 0.1 * heavy.negentropy.min()


def test_one_row_and_nonnegative_terms() -> None:
    truth = torch.rand((1, 50), generator=draws(), dtype=torch.float64)
    assert best_cosines(unmix(mixed(truth, 4, draws(1)), 1, draws()).sources, truth).min() > 1 - 1e-9
    sparse = laplace(4, 600, draws(2)).clamp_min(0)
    terms = {"iterations": 50, "lr": 0.01, "nonnegativity": 0.13, "sparsity": 5.0, "tv": 1.0}
    unmixed = unmix(mixed(sparse, 10, draws(3)), 4, draws(), picture=(6, 10, 10), domain="values", **terms)
    assert unmixed.curve[-1] < unmixed.curve[0]
    assert torch.isfinite(unmixed.sources).all()


def test_deterministic_and_without_the_global_generator() -> None:
    gradient = mixed(laplace(3, 500, draws()), 6, draws(1))
    before = torch.random.get_rng_state()
    first, second = (unmix(gradient, 3, draws(5), iterations=3) for _ in range(2))
    assert torch.equal(first.sources, second.sources)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("units", [8, 100])
def test_the_row_space_is_that_of_a_singular_value_decomposition(units) -> None:
    gradient = mixed(laplace(5, 60, draws()), units, draws(1)) + 1e-3 * mixed(laplace(8, 60, draws(2)), units, draws(3))
    basis, to_basis, residual = row_space(gradient, 5)
    _, values, right = torch.linalg.svd(gradient, full_matrices=False)
    torch.testing.assert_close(basis.T @ basis, right[:5].T @ right[:5], atol=1e-8, rtol=0)
    torch.testing.assert_close(to_basis @ gradient, basis, atol=1e-8, rtol=0)
    assert residual == pytest.approx(float(values[5:].norm() / values.norm()), rel=1e-6)


def test_whitening_and_contrast_are_as_defined() -> None:
    parts = torch.randn((3, 4, 200), generator=draws(), dtype=torch.float64) + 2
    _, white = whiten(parts)
    covariance = torch.einsum("gnd,gmd->nm", white, white) / 600
    torch.testing.assert_close(covariance, torch.eye(4, dtype=torch.float64))
    rotation, _ = fast_ica(white, draws())
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(4, dtype=torch.float64))
    normal = torch.randn(2_000_000, generator=draws(), dtype=torch.float64)
    assert float(torch.log(torch.cosh(normal)).mean()) == pytest.approx(GAUSSIAN_LOG_COSH, abs=1e-3)


def test_differences_of_a_signal_and_of_a_constant_picture() -> None:
    assert difference_groups(torch.arange(8.0)[None], (2, 4)).flatten().tolist() == [1.0] * 6
    assert difference_groups(torch.ones(2, 27), (3, 3, 3)).abs().max() == 0
    assert difference_groups(torch.ones(2, 27), (3, 3, 3)).shape == (9, 2, 4)


@pytest.mark.parametrize("count", [1, 5, 17])
def test_counts_from_the_gap_of_singular_values(count) -> None:
    gradient = mixed(laplace(count, 300, draws(count)), 40, draws(1))
    assert count_sources(gradient) == count
    assert count_sources(gradient.float()) == count
    assert count_sources(gradient.T) == count


def test_says_where_the_number_cannot_be_told() -> None:
    for hopeless in (torch.randn((20, 50), generator=draws()), torch.ones(1, 5)):
        with pytest.raises(NotApplicable, match="fall off nowhere"):
            count_sources(hopeless)
    with pytest.raises(NotApplicable, match="zero"):
        count_sources(torch.zeros(3, 5))


def test_refusals_name_what_is_wrong() -> None:
    gradient = mixed(laplace(3, 40, draws()), 6, draws(1))
    with pytest.raises(NotApplicable, match=r"7 rows.*6 units and 40 inputs"):
        unmix(gradient, 7, draws())
    with pytest.raises(NotApplicable, match="fewer than 5"):
        unmix(gradient, 5, draws())
    with pytest.raises(ValueError, match=r"^picture.*40"):
        unmix(gradient, 3, draws(), picture=(1, 6, 6))
    with pytest.raises(ValueError, match=r"^count"):
        unmix(gradient, 0, draws())
    with pytest.raises(ValueError, match="units, inputs"):
        unmix(gradient[0], 1, draws())
    with pytest.raises(ValueError, match="finite"):
        unmix(torch.full((2, 3), torch.nan), 1, draws())
