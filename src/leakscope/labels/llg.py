"""User-Level Label Leakage from Gradients in Federated Learning (Wainakh et al., 2022): LLG.

Every example of class c pulls the row sum g_c = sum_j dW_cj down by about the same impact m < 0:

    m = (1 + 1/C) / K * sum_{g_c < 0} g_c

Stage 1 emits every class with g_c < 0 once and takes m off it; stage 2 repeatedly emits the class with the
smallest g and takes m off *that* class, until K labels are out. (Published code decrements a stale index in
stage 2, which makes it emit one class for ever.) Both rules are free of the update's scale, so a weight delta
serves as well. On the bias gradient the impact needs no correction for features: m = sum_{db_c < 0} db_c / K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leakscope.labels._checks import bias_entries, positive_count, weight_rows


def llg_labels(weight_gradient: Tensor, num_examples: int) -> Tensor:
    """The labels of a batch, repeated ones included, ascending; needs features of positive sum.

    >>> llg_labels(torch.tensor([[0.1], [-0.5], [0.2], [-0.1]]), 4).tolist()
    [1, 1, 1, 3]
    """
    sums = weight_rows(weight_gradient).sum(dim=1)
    impact = (1 + 1 / len(sums)) * sums.clamp(max=0).sum().item() / positive_count(num_examples)
    return _emit(sums, impact, num_examples)


def llg_bias_labels(bias_gradient: Tensor, num_examples: int) -> Tensor:
    """The same from the bias gradient, which holds for features of any sign.

    >>> llg_bias_labels(torch.tensor([0.3, -0.5, 0.3, -0.1]), 4).tolist()
    [1, 1, 1, 3]
    """
    entries = bias_entries(bias_gradient)
    impact = entries.clamp(max=0).sum().item() / positive_count(num_examples)
    return _emit(entries, impact, num_examples)


def _emit(signal: Tensor, impact: float, num_examples: int) -> Tensor:
    remaining = signal.clone()
    # Most negative first: should noise make more classes negative than there are examples, the surest ones stay.
    order = remaining.argsort(stable=True)
    labels = [int(c) for c in order if remaining[c] < 0][:num_examples]
    remaining[labels] -= impact
    while len(labels) < num_examples:
        smallest = int(remaining.argmin())
        labels.append(smallest)
        remaining[smallest] -= impact
    return torch.tensor(labels, dtype=torch.long, device=signal.device).sort().values
