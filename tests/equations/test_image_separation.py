"""Images told apart that are known up to a mixture, with and without a constant a channel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.image_separation import separate_images, separate_shifted_images


def mixture(count: int, alike: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return images behind a ReLU (images, channels, places), and a matrix that mixes them."""
    draws = torch.Generator().manual_seed(count)
    values = torch.randn((count, 60, 4, 4), generator=draws, dtype=torch.float64)
    values = (1 - alike) * values + alike * values[:1]
    return values.relu(), torch.randn((count, count), generator=draws, dtype=torch.float64)


def distances(found: Tensor, truth: Tensor) -> Tensor:
    rows, wanted = (F.normalize(one.flatten(1), dim=1) for one in (found, truth))
    return torch.cdist(rows, wanted).amin(0)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_images_are_unmixed(count: int) -> None:
    x, mixing = mixture(count)
    mixed = torch.einsum("kb,bcij->kcij", mixing, x)
    found, matrix = separate_images(mixed, noisy=False)
    assert float(distances(found, x).max()) < 1e-9
    assert torch.allclose(torch.einsum("kb,bcij->kcij", matrix, mixed), found)


@pytest.mark.parametrize("count", [6, 16])
def test_images_without_a_unit_of_their_own_are_unmixed(count: int) -> None:
    """Wherever one image is positive another one is, too: nothing shows it alone."""
    x, mixing = mixture(count)
    alone = (x > 0).sum(0) == 1
    x[1] = torch.where(alone & (x[0] > 0), 0.5 * x[0], x[1])
    assert not bool((((x > 0).sum(0) == 1) & (x[0] > 0)).any())
    found, _ = separate_images(torch.einsum("kb,bcij->kcij", mixing, x), noisy=False)
    assert float(distances(found, x).max()) < 1e-9


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_constants_of_channels_are_undone_with_the_mixture(count: int) -> None:
    x, mixing = mixture(count)
    constants = torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mixed = torch.einsum("kb,bcij->kcij", mixing, x + constants[:, None, None])
    found, matrix = separate_shifted_images(mixed, mixing.sum(1), noisy=False)
    assert float(distances(found, x).max()) < 1e-9
    assert torch.linalg.matrix_rank(matrix) == count
    # The constant is the same in all images, so that they have one scale.
    assert torch.allclose(found.flatten(1).norm(dim=1).sort().values, x.flatten(1).norm(dim=1).sort().values)


def test_images_that_are_equal_are_refused() -> None:
    x, mixing = mixture(3, alike=1.0)
    with pytest.raises(NotApplicable, match="alike"):
        separate_shifted_images(torch.einsum("kb,bcij->kcij", mixing, x), mixing.sum(1), noisy=False)
