"""Label counts from the head's gradient (Geng et al., 2021; for local training Dimitrov et al., 2022).

Mean cross-entropy over K examples gives db_k = pbar_k - n_k / K with pbar the mean softmax of the private batch:

    n_k = K (pbar_k - db_k)

which is exact when pbar is; a head of zero weights has pbar = 1/C for any data. The adversary estimates pbar
on dummy inputs. Without a bias the row sums serve: sum_j dW_kj = mean_n (p_nk - y_nk) O_n with O_n = sum_j
h_nj, so, with the mean feature sum Obar of dummy inputs, n_k = K (pbar_k - sum_j dW_kj / Obar).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import InputSpace
from leakscope.labels.rules import bias_entries, positive_count, weight_rows
from leakscope.network.layers import Head
from leakscope.network.recorder import probe


def certain_counts_from_bias(bias_gradient: Tensor, num_examples: int) -> Tensor:
    """Bound how many examples each class has at least, whatever the model predicts: n_k = K (pbar_k - db_k) > -K db_k.

    >>> certain_counts_from_bias(torch.tensor([0.25, -0.55, 0.4, -0.1]), 4).tolist()
    [0, 3, 0, 1]
    """
    entries = bias_entries(bias_gradient)
    # Rounding error must not lift a bound that is an integer (a confident network) to the next one.
    bounds = (-positive_count(num_examples) * entries - 1e-4).floor() + 1
    return torch.where(entries < 0, bounds, 0.0).clamp(min=0).long()


def label_counts_from_bias(bias_gradient: Tensor, num_examples: int, mean_probabilities: Tensor) -> Tensor:
    """Count the examples of each class from the bias gradient of the *mean* loss; non-negative, sums to K.

    No class gets fewer than :func:`certain_counts_from_bias` proves, unless these exceed K in an altered update.

    >>> label_counts_from_bias(torch.tensor([0.25, -0.5, 0.25, 0.0]), 4, torch.full((4,), 0.25)).tolist()
    [0, 3, 0, 1]
    """
    certain = certain_counts_from_bias(bias_gradient, num_examples)
    return _counts(bias_entries(bias_gradient), num_examples, mean_probabilities, certain)


def label_counts_from_weight(
    weight_gradient: Tensor, num_examples: int, mean_probabilities: Tensor, mean_feature_sum: float
) -> Tensor:
    """Count for a head without a bias; ``mean_feature_sum`` must be well away from zero.

    >>> rows = torch.tensor([[0.5, 0.5], [-0.75, -0.25]])
    >>> label_counts_from_weight(rows, 4, torch.tensor([0.5, 0.5]), mean_feature_sum=2.0).tolist()
    [0, 4]
    """
    if not mean_feature_sum:
        raise UserError(
            "mean_feature_sum: expected a number other than 0. Features that cancel carry no count; use llg_labels."
        )
    sums = weight_rows(weight_gradient).sum(dim=1) / mean_feature_sum
    # With features of one sign a negative row sum proves presence, though not how often.
    return _counts(sums, num_examples, mean_probabilities, (sums < 0).long())


def scale_from_absent_classes(bias_update: Tensor, mean_probabilities: Tensor) -> float | None:
    """Return what to divide a bias update of unknown length by to get a mean gradient; None if it does not show.

    A class without examples has db_k = pbar_k exactly, so the ratio db_k / pbar_k of absent classes is the length.
    Entries of present classes are negative or smaller, so the median over positive entries is right where most classes
    are absent; then the ratios lie close together: two thirds of at least three within a tenth of the median.

    >>> scale_from_absent_classes(torch.tensor([0.5, 0.5, -1.5, 0.5]), torch.full((4,), 0.25))
    2.0
    """
    entries = bias_entries(bias_update)
    ratios = (entries / mean_probabilities.to(entries))[entries > 0]
    if len(ratios) < 3:
        return None
    middle = float(ratios.median())
    return middle if float(((ratios / middle - 1).abs() < 0.1).double().mean()) >= 2 / 3 else None


def round_to_total(estimates: Tensor, total: int) -> Tensor:
    """Round to non-negative integers near ``estimates`` that sum to ``total``.

    Missing ones go to the largest remainders; surplus ones leave the positive counts with the smallest remainders first
    and, once each of these gave one, the largest counts.

    >>> round_to_total(torch.tensor([1.6, 0.7, -0.4, 2.1]), 4).tolist()
    [1, 1, 0, 2]
    >>> round_to_total(torch.tensor([2.9, 1.2, -1.0]), 2).tolist()
    [2, 0, 0]
    """
    if total < 0:
        raise UserError(f"total: expected a non-negative integer, got {total}")
    values = bias_entries(estimates)
    # An estimate that is an integer up to rounding error must not lose one in the floor: 2.9999999 is 3.
    nearest = values.round()
    values = torch.where((values - nearest).abs() < 1e-4, nearest, values).clamp(max=2.0**31)  # whole numbers end
    counts = values.floor().clamp(min=0).long()
    remainders = values - counts
    missing = total - int(counts.sum())
    if missing > 0:
        order = remainders.argsort(descending=True, stable=True)
        counts[order] += missing // len(order)
        counts[order[: missing % len(order)]] += 1
    elif missing < 0:
        positive = [int(k) for k in remainders.argsort(stable=True) if counts[k] > 0][:-missing]
        counts[positive] -= 1
        counts = _levelled(counts, total)
    return counts


def _levelled(counts: Tensor, total: int) -> Tensor:
    """Take one at a time off the largest counts down to ``total``; by bisection, for noise can make them millions.

    >>> _levelled(torch.tensor([5, 1, 7]), 8).tolist(), _levelled(torch.tensor([10**9, 3]), 1).tolist()
    ([3, 1, 4], [0, 1])
    """
    low, high = 0, int(counts.max())
    while low < high:
        level = (low + high) // 2
        if int(counts.clamp(max=level).sum()) < total:
            low = level + 1
        else:
            high = level
    levelled = counts.clamp(max=low)
    surplus = int(levelled.sum()) - total
    levelled[(levelled == low).nonzero().flatten()[:surplus]] -= 1
    return levelled


def counts_to_labels(counts: Tensor) -> Tensor:
    """List the sorted labels that have these counts.

    >>> counts_to_labels(torch.tensor([0, 2, 0, 1])).tolist()
    [1, 1, 3]
    """
    if counts.dim() != 1 or counts.is_floating_point() or bool((counts < 0).any()):
        raise UserError(f"counts: expected one non-negative integer a class, got {counts.tolist()} ({counts.dtype})")
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)


def _counts(gradient: Tensor, num_examples: int, mean_probabilities: Tensor, certain: Tensor) -> Tensor:
    if mean_probabilities.shape != gradient.shape:
        raise UserError(
            f"mean_probabilities: expected one entry for each of {len(gradient)} classes, got shape "
            f"{tuple(mean_probabilities.shape)}"
        )
    total = positive_count(num_examples)
    estimates = total * (mean_probabilities.to(gradient) - gradient)
    left = total - int(certain.sum())
    if left < 0:
        return round_to_total(estimates, total)
    return certain + round_to_total(estimates - certain, left)


DUMMIES = 256


@dataclass(frozen=True, eq=False)
class DummyStatistics:
    """Hold the estimated mean softmax (C,), and mean and spread of the sum of the head's inputs."""

    probabilities: Tensor
    feature_sum: float
    feature_sum_deviation: float


def dummy_inputs(inputs: InputSpace, generator: torch.Generator, count: int = DUMMIES) -> Tensor:
    """Draw standard normal inputs, moved into the valid ones where these are known.

    >>> from leakscope.contracts.inputs import Box, ValueRange
    >>> x = dummy_inputs(Box((1, 2, 2), ValueRange()), torch.Generator().manual_seed(0))
    >>> tuple(x.shape), x.min().item(), x.max().item()
    ((256, 1, 2, 2), 0.0, 1.0)
    """
    return inputs.project(torch.randn((count, *inputs.shape), generator=generator, device=generator.device))


def cautious_mean(probabilities: Tensor) -> Tensor:
    """Average softmax rows, drawn towards 1/C by as much as they disagree (mean total variation).

    A network that says the same of every dummy, as an untrained one does, will say it of the private batch too.

    >>> cautious_mean(torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])).tolist()
    [0.5, 0.25, 0.25]
    >>> cautious_mean(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])).tolist()
    [0.375, 0.375, 0.125, 0.125]
    """
    mean = probabilities.mean(dim=0)
    disagreement = (probabilities - mean).abs().sum(dim=1).mean() / 2
    return (1 - disagreement) * mean + disagreement / len(mean)


def dummy_statistics(model: nn.Module, head: Head, dummies: Tensor) -> DummyStatistics:
    """Measure the model on ``dummies`` in evaluation mode; the model itself is left alone.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False))
    >>> _ = nn.init.zeros_(net[0].weight)
    >>> dummy_statistics(net, Head("0.weight", None, "0"), torch.ones(3, 2)).feature_sum
    2.0
    """
    like = next(model.parameters())
    record = probe(model, dummies.to(device=like.device, dtype=like.dtype), lambda name, _: name == head.module_name)
    sums = record.of(head.module_name)[-1].inputs.double().flatten(1).sum(dim=1)
    probabilities = cautious_mean(record.outputs.double().softmax(dim=1))
    if not bool(torch.isfinite(probabilities).all()):
        raise UserError("the model gives non-finite outputs for dummy inputs, so labels cannot be counted")
    return DummyStatistics(probabilities, float(sums.mean()), float(sums.std(correction=0)))
