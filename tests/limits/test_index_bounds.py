"""CAFE's theorems and bounds against all batches there are, and a thousand random estimates."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from leakscope.limits import index_spectrum, recovery_bounds, theorem1, theorem2

TRIALS = 1000
SIZES = [(n, k) for n in range(1, 7) for k in range(1, n + 1)]


def every_batch(samples: int, batch: int) -> Tensor:
    rows = torch.zeros(math.comb(samples, batch), samples, dtype=torch.float64)
    for row, chosen in zip(rows, itertools.combinations(range(samples), batch), strict=True):
        row[list(chosen)] = 1
    return rows


def second_moment(samples: int, batch: int) -> Tensor:
    """E[ss'] from the chances that one, or two, samples are in the batch."""
    one = batch / samples
    two = one * (batch - 1) / (samples - 1)
    return torch.full((samples, samples), two, dtype=torch.float64).fill_diagonal_(one)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("samples", "batch"), SIZES)
def test_the_spectrum_is_that_of_all_batches(samples: int, batch: int) -> None:
    rows = every_batch(samples, batch)
    values = torch.linalg.eigvalsh(rows.T @ rows / len(rows))
    told = sorted(value for value, times in index_spectrum(samples, batch) for _ in range(times))
    assert values.tolist() == pytest.approx(told, abs=1e-12)
    found = theorem1(samples, batch)
    assert found.modulus == pytest.approx(2 * float(values[0]), abs=1e-12)
    assert found.printed == found.corrected == (batch < samples or samples == 1)


@pytest.mark.parametrize(("samples", "batch"), [size for size in SIZES if size[0] > 1])
@pytest.mark.parametrize("units", [1, 3, 8])
def test_theorem_2_corrected_is_exactly_when_the_hessian_is_definite(samples: int, batch: int, units: int) -> None:
    generator = torch.Generator().manual_seed(samples + 10 * batch)
    rows = every_batch(samples, batch)
    for zero in (None, 0):
        signals = normal(generator, samples, units)
        if zero is not None:
            signals[zero] = 0
        least = float(torch.linalg.eigvalsh(2 * (rows.T @ rows / len(rows)) * (signals @ signals.T))[0])
        found = theorem2(samples, batch, units, signals)
        assert found.corrected == (least > 1e-12)
        assert found.modulus is not None
        assert (found.modulus > 0) == found.corrected
        assert found.modulus <= least + 1e-12
        assert found.corrected or not found.printed, "what is printed suffices"
        if zero is None and batch < samples:
            assert found.corrected, "whatever the number of units"
            assert found.printed == (samples < units)


def test_theorem_2_without_signals_says_only_what_the_sizes_say() -> None:
    few, many, all_of_them = theorem2(5, 2, 8), theorem2(9, 2, 8), theorem2(9, 9, 8)
    assert (few.printed, few.corrected, few.modulus) == (None, None, None)
    assert (many.printed, many.corrected) == (False, None)
    assert (all_of_them.printed, all_of_them.corrected, all_of_them.modulus) == (False, False, 0.0)


def test_a_row_that_is_rounding_beside_the_others_counts_as_zero() -> None:
    signals = torch.eye(3, 4)
    signals[2] *= 1e-9
    assert theorem2(3, 2, 4, signals).corrected is False
    assert theorem2(3, 2, 4, signals.double()).corrected is True


def losses(batch: int, v: Tensor, h: Tensor, true_v: Tensor, true_h: Tensor) -> tuple[float, float]:
    """phi1 and phi2 at an estimate, in closed form."""
    moment = second_moment(len(v), batch)
    error = v - true_v
    each = (h[:, :, None] * v[:, None] - true_h[:, :, None] * true_v[:, None]).flatten(1)
    return float((error * (moment @ error)).sum()), float((each * (moment @ each)).sum())


@pytest.mark.parametrize(("samples", "batch"), [(4, 2), (5, 4), (6, 1)])
def test_the_losses_are_means_over_all_batches(samples: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    v, true_v = normal(generator, 2, samples, 3)
    h, true_h = normal(generator, 2, samples, 2)
    first = second = 0.0
    rows = every_batch(samples, batch)
    for row in rows:
        first += float((v.T @ row - true_v.T @ row).square().sum()) / len(rows)
        difference = h.T @ torch.diag(row) @ v - true_h.T @ torch.diag(row) @ true_v
        second += float(difference.square().sum()) / len(rows)
    assert losses(batch, v, h, true_v, true_h) == pytest.approx((first, second))


def estimate(kind: str, generator: torch.Generator) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """Batch size, V, H, V*, H* of one random trial; an "aligned" one is unkind to the printed bound."""
    if kind == "aligned":  # batches of nearly all samples; errors of V that cancel in the sum, and H follows the sum
        samples, batch = 20, 19
        true_v = torch.linalg.qr(normal(generator, 28, samples)).Q.T
        profile = normal(generator, samples, 1)
        true_h = profile @ normal(generator, 1, 6)
        error = profile @ normal(generator, 1, 28)
        v = true_v + 1e-3 * (error - error.mean(0))
        return batch, v, (true_h.T @ true_v @ torch.linalg.pinv(v)).T, true_v, true_h
    samples = int(torch.randint(2, 9, (), generator=generator))
    batch = int(torch.randint(1, samples, (), generator=generator))
    units, inputs = samples + int(torch.randint(4, (), generator=generator)), 5
    true_v, true_h = normal(generator, samples, units), normal(generator, samples, inputs)
    size, other = (10 ** (-3 * torch.rand(2, generator=generator, dtype=torch.float64))).tolist()
    error = normal(generator, samples, units)
    if torch.rand((), generator=generator) < 0.5:
        error -= error.mean(0)
    return batch, true_v + size * error, true_h + other * normal(generator, samples, inputs), true_v, true_h


@pytest.mark.parametrize("kind", ["random", "aligned"])
def test_corrected_bounds_hold_in_a_thousand_trials_and_printed_ones_do_not(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    broken = {"signals": 0, "gradient": 0, "inputs": 0}
    largest = 0.0
    for _ in range(TRIALS):
        batch, v, h, true_v, true_h = estimate(kind, generator)
        first, second = losses(batch, v, h, true_v, true_h)
        printed, corrected, general = recovery_bounds(batch, v, true_h, true_v)
        signals = float((v - true_v).square().sum())
        gradient = float((h.T @ v - true_h.T @ true_v).square().sum())
        inputs = float((h - true_h).square().sum())
        above = 1 + 1e-9
        for bound in (corrected, general):
            assert signals <= above * bound.signals * first
            assert gradient <= above * bound.gradient * second + 1e-20
            assert inputs <= above * (bound.inputs_phi1 * first + bound.inputs_phi2 * second)
        # The printed factor of phi2 is right, and the bound for any number of samples the smallest true one.
        assert inputs <= above * (corrected.inputs_phi1 * first + printed.inputs_phi2 * second)
        assert general.inputs_phi1 <= above * corrected.inputs_phi1
        assert general.inputs_phi2 <= above * printed.inputs_phi2
        broken["signals"] += signals > above * printed.signals * first
        broken["gradient"] += gradient > above * printed.gradient * second + 1e-20
        broken["inputs"] += inputs > above * (printed.inputs_phi1 * first + printed.inputs_phi2 * second)
        largest = max(largest, inputs / (general.inputs_phi1 * first + general.inputs_phi2 * second))
    if kind == "random":
        assert broken["signals"] > TRIALS / 4
        assert broken["gradient"] > TRIALS / 10
    else:
        assert broken["signals"] > TRIALS * 9 / 10
        assert broken["inputs"] > TRIALS / 4
    assert largest > 0.05, "no bound that could never be reached"


def test_the_bound_on_the_signals_is_reached() -> None:
    v = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = v - v.mean(0)
    first, _ = losses(2, v + error, v, v, v)
    _, corrected, _ = recovery_bounds(2, v, v)
    assert float(error.square().sum()) == pytest.approx(corrected.signals * first)


def test_more_samples_than_units_leave_the_general_bound_only(generator: torch.Generator) -> None:
    samples, batch = 9, 4
    true_v, true_h = normal(generator, samples, 3), normal(generator, samples, 5)
    printed, corrected, general = recovery_bounds(batch, true_v, true_h)
    assert math.isinf(printed.inputs_phi1)
    assert math.isinf(corrected.inputs_phi2)
    assert math.isfinite(general.inputs_phi1)
    for size in (1e-3, 1e-1, 1.0):
        v, h = true_v + size * normal(generator, samples, 3), true_h + size * normal(generator, samples, 5)
        first, second = losses(batch, v, h, true_v, true_h)
        bound = recovery_bounds(batch, v, true_h, true_v)[2]
        assert float((h - true_h).square().sum()) <= bound.inputs_phi1 * first + bound.inputs_phi2 * second


def test_batches_of_all_samples_and_invisible_samples_have_no_bound() -> None:
    for bound in recovery_bounds(3, torch.eye(3), torch.ones(3, 2))[1:]:
        assert math.isinf(bound.signals)
        assert math.isinf(bound.inputs_phi1)
    signals = torch.eye(3)
    signals[1] = 0
    assert all(math.isinf(bound.inputs_phi2) for bound in recovery_bounds(2, signals, torch.ones(3, 2)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: index_spectrum(0, True), r"(?s)samples: .*batch: "),
        (lambda: theorem1(3, 4), "at most the 3 samples, got 4"),
        (lambda: theorem2(3, 2, 0), "units"),
        (lambda: theorem2(3, 2, 4, torch.eye(3)), r"shape \(3, 4\), got \(3, 3\)"),
        (lambda: recovery_bounds(2, torch.eye(3), torch.ones(2, 2)), "inputs"),
        (lambda: recovery_bounds(2, torch.eye(3) / 0, torch.ones(3, 2)), "signals: expected finite"),
        (lambda: recovery_bounds(2, torch.eye(3), torch.ones(3, 2), torch.ones(3, 2)), "true_signals"),
    ],
)
def test_mistakes_are_told(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
