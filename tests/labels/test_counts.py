"""Counts of labels from estimates."""

from __future__ import annotations

import torch

from leakscope.labels.counts import round_to_total


def test_estimates_far_beyond_the_total_are_rounded_at_once() -> None:
    # A head's gradient of noise says millions of examples; taking them away one by one would last for ever.
    huge = torch.tensor([1e9, -3e8, 2e12, 0.4, float(2**70)])
    found = round_to_total(huge, 3)
    assert found.sum() == 3
    assert found.min() >= 0
    draws = torch.Generator().manual_seed(0)
    for _ in range(200):
        estimates = 20 * torch.rand(6, generator=draws) - 4
        total = int(torch.randint(0, 12, (1,), generator=draws))
        assert round_to_total(estimates, total).tolist() == one_by_one(estimates, total)


def one_by_one(estimates: torch.Tensor, total: int) -> list[int]:
    """The rule as it is told: surplus leaves the smallest remainders once each, then the largest counts."""
    counts = [max(0, int(value // 1)) for value in estimates.tolist()]
    remainders = [value - count for value, count in zip(estimates.tolist(), counts, strict=True)]
    order = sorted(range(len(counts)), key=lambda k: remainders[k])
    missing = total - sum(counts)
    if missing >= 0:
        for place in range(missing):
            counts[order[::-1][place % len(order)]] += 1
        return counts
    for k in [k for k in order if counts[k] > 0][:-missing]:
        counts[k] -= 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts
