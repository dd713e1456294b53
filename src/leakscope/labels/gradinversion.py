"""See through Gradients (Yin et al., 2021), the label rule for batches without repeated labels.

With non-negative features the rows of the head's weight gradient that belong to present classes hold the most
negative entries: take the minimum of every row, and the K classes with the smallest minima.
"""

from __future__ import annotations

from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.labels._checks import positive_count, weight_rows


def gradinversion_labels(weight_gradient: Tensor, num_examples: int) -> Tensor:
    """The labels of a batch in which no label repeats, ascending; needs non-negative features.

    >>> import torch
    >>> gradinversion_labels(torch.tensor([[0.1, 0.2], [-0.4, 0.1], [0.3, 0.0], [-0.1, -0.2]]), 2).tolist()
    [1, 3]
    """
    minima = weight_rows(weight_gradient).amin(dim=1)
    if positive_count(num_examples) > len(minima):
        raise UserError(
            f"num_examples: expected at most {len(minima)}, the number of classes, got {num_examples}. "
            "This rule never repeats a label; use llg_labels or label_counts_from_bias."
        )
    return minima.argsort(stable=True)[:num_examples].sort().values
