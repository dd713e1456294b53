"""LPIPS with its real weights: the axioms, the orderings people see, and one stage worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from leakscope.metrics import Lpips, find_lpips, load_lpips
from leakscope.metrics.perceptual import FILE_NAME


@pytest.fixture(scope="module")
def lpips(real_data: Path) -> Lpips:
    if not (real_data / FILE_NAME).is_file():
        pytest.skip(f"no {FILE_NAME} in the data folder")
    return load_lpips(real_data / FILE_NAME)


@pytest.fixture(scope="module")
def photos(real_data: Path) -> Tensor:
    with np.load(real_data / "photos224_open.npz", allow_pickle=False) as arrays:
        pixels = torch.from_numpy(arrays["x"][:3]).float() / 255
    return torch.nn.functional.avg_pool2d(pixels.permute(0, 3, 1, 2), 2)


def noisy(x: Tensor, sigma: float, seed: int = 0) -> Tensor:
    return (x + sigma * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))).clamp(0, 1)


def test_identical_is_zero_and_the_order_does_not_matter(lpips: Lpips, photos: Tensor) -> None:
    other = noisy(photos, 0.1)
    assert lpips(photos, photos).abs().max().item() == 0
    assert torch.allclose(lpips(photos, other), lpips(other, photos))


def test_it_grows_with_noise_and_each_example_stands_alone(lpips: Lpips, photos: Tensor) -> None:
    values = torch.stack([lpips(photos, noisy(photos, sigma)) for sigma in (0.01, 0.03, 0.1, 0.3)])
    assert bool((values.diff(dim=0) > 0).all())
    other = noisy(photos, 0.1)
    alone = torch.cat([lpips(photos[i : i + 1], other[i : i + 1]) for i in range(3)])
    assert torch.allclose(lpips(photos, other), alone, atol=1e-6)


def test_a_blur_that_mse_forgives_looks_worse_than_slight_noise(lpips: Lpips, photos: Tensor) -> None:
    blurred = torch.nn.functional.avg_pool2d(photos, 9, stride=1, padding=4, count_include_pad=False)
    error = (blurred - photos).square().mean().sqrt().item()
    slight = noisy(photos, error / 4)
    assert bool((lpips(photos, blurred) > lpips(photos, slight)).all())
    different = photos.roll(1, dims=0)
    assert bool((lpips(photos, different) > lpips(photos, slight)).all())


def test_one_channel_is_repeated_to_three(lpips: Lpips, photos: Tensor) -> None:
    grey, other = photos.mean(1, keepdim=True), noisy(photos.mean(1, keepdim=True), 0.1)
    assert torch.allclose(lpips(grey, other), lpips(grey.repeat(1, 3, 1, 1), other.repeat(1, 3, 1, 1)), atol=1e-6)


def test_the_first_stage_by_hand(real_data: Path, lpips: Lpips, photos: Tensor) -> None:
    a, b = photos[:1, :, :32, :32], noisy(photos[:1, :, :32, :32], 0.2)
    with np.load(real_data / FILE_NAME, allow_pickle=False) as arrays:
        weight, bias, head = (arrays[name].astype(float) for name in ("conv0_w", "conv0_b", "lin0"))

    def stage(picture: Tensor) -> np.ndarray:
        shift, scale = np.array([-0.030, -0.088, -0.188]), np.array([0.458, 0.448, 0.450])
        x = (picture[0].double().numpy() * 2 - 1 - shift[:, None, None]) / scale[:, None, None]
        x = np.pad(x, ((0, 0), (2, 2), (2, 2)))
        out = np.zeros((64, 7, 7))
        for i, j in np.ndindex(7, 7):
            patch = x[:, 4 * i : 4 * i + 11, 4 * j : 4 * j + 11]
            out[:, i, j] = np.maximum(np.einsum("kcij,cij->k", weight, patch) + bias, 0)
        return out / (np.sqrt((out**2).sum(0)) + 1e-10)

    expected = np.einsum("kij,k->ij", (stage(a) - stage(b)) ** 2, head).mean()
    silent = {
        name: value * 0 if name[:3] == "lin" and name != "lin0" else value for name, value in lpips.weights.items()
    }
    assert Lpips(silent)(a, b).item() == pytest.approx(expected, rel=1e-4)
    assert [tuple(f.shape[1:]) for f in lpips.stages(a)] == [
        (64, 7, 7), (192, 3, 3), (384, 1, 1), (256, 1, 1), (256, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shape, reason",
    [((2, 40, 40), "channels"), ((3, 31, 40), "at least 32"), ((1, 64), "pictures"), ((9,), "pictures")],
)
def test_what_cannot_be_measured_is_nan_with_a_reason(shape: tuple[int, ...], reason: str) -> None:
    blank = Lpips({})
    assert reason in str(blank.reason(shape))
    assert bool(blank(torch.zeros(2, *shape), torch.zeros(2, *shape)).isnan().all())


def test_missing_or_broken_weights_are_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEAKSCOPE_DATA", raising=False)
    assert find_lpips() is None
    with pytest.raises(ValueError, match="LEAKSCOPE_DATA"):
        load_lpips()
    broken = tmp_path / FILE_NAME
    broken.write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match="not a file of LPIPS weights"):
        load_lpips(broken)
    np.savez(broken, conv0_w=np.zeros(3))
    with pytest.raises(ValueError, match="not a file of LPIPS weights"):
        load_lpips(broken)
    monkeypatch.setenv("LEAKSCOPE_DATA", str(tmp_path))
    assert find_lpips() == broken
