"""Labels from signs and sizes in the head's gradient: one published rule a function.

With logits z = W h + b and mean cross-entropy over K examples, dW_k = mean_n (p_nk - y_nk) h_n and
db_k = mean_n p_nk - n_k / K. A class that is absent has db_k > 0 whatever the network, so every negative entry names a
class that is present; with one example exactly one entry is negative. Where features have a positive sum, the same
holds of the row sums sum_j dW_kj; it fails where they do not (tanh, LeakyReLU): read the bias gradient then.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weight_rows(weight_gradient: Tensor) -> Tensor:
    """The head's weight gradient in double precision, one row a class, or a clear error."""
    if weight_gradient.dim() != 2 or weight_gradient.numel() == 0:
        raise ValueError(
            "weight_gradient: expected a matrix of shape (classes, features), got shape "
            f"{tuple(weight_gradient.shape)}. Pass the gradient of the layer that produces the logits."
        )
    return _finite(weight_gradient, "weight_gradient")


def bias_entries(bias_gradient: Tensor) -> Tensor:
    """The head's bias gradient in double precision, one entry a class, or a clear error."""
    if bias_gradient.dim() != 1 or bias_gradient.numel() == 0:
        raise ValueError(
            f"bias_gradient: expected shape (classes,), got {tuple(bias_gradient.shape)}. "
            "Pass the bias gradient of the layer that produces the logits."
        )
    return _finite(bias_gradient, "bias_gradient")


def _finite(value: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name}: holds NaN or infinite entries, so no label can be read from it")
    return value.detach().to(torch.float64)


def positive_count(num_examples: int) -> int:
    if num_examples < 1:
        raise ValueError(f"num_examples: expected at least 1, got {num_examples}")
    return int(num_examples)


def bias_label(bias_gradient: Tensor) -> int:
    """The label of a single example; exact for any network whose logits come from a layer with a bias.

    >>> bias_label(torch.tensor([0.2, -0.5, 0.3]))
    1
    """
    return int(bias_entries(bias_gradient).argmin())


def bias_present(bias_gradient: Tensor) -> Tensor:
    """Classes that are certainly present, ascending; all of them where sum_n p_nk < n_k for every present class k.

    >>> bias_present(torch.tensor([0.2, -0.3, 0.3, -0.2])).tolist()
    [1, 3]
    """
    return (bias_entries(bias_gradient) < 0).nonzero().flatten()


def idlg_label(weight_gradient: Tensor) -> int:
    """The label of a single example from the head's weight gradient, for features of positive sum.

    iDLG: Improved Deep Leakage from Gradients (Zhao, Mopuri, Bilen, 2020): argmin_k sum_j dW_kj.

    >>> probabilities, features = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([1.0, 2.0])
    >>> idlg_label(torch.outer(probabilities - torch.tensor([0.0, 0.0, 1.0]), features))
    2
    """
    return int(weight_rows(weight_gradient).sum(dim=1).argmin())


def gradinversion_labels(weight_gradient: Tensor, num_examples: int) -> Tensor:
    """The labels of a batch in which no label repeats, ascending; needs non-negative features.

    See through Gradients (Yin et al., 2021). The rows of present classes hold the most negative entries: the K classes
    with the smallest minima.

    >>> gradinversion_labels(torch.tensor([[0.1, 0.2], [-0.4, 0.1], [0.3, 0.0], [-0.1, -0.2]]), 2).tolist()
    [1, 3]
    """
    minima = weight_rows(weight_gradient).amin(dim=1)
    if positive_count(num_examples) > len(minima):
        raise ValueError(
            f"num_examples: expected at most {len(minima)}, the number of classes, got {num_examples}. "
            "This rule never repeats a label; use llg_labels or label_counts_from_bias."
        )
    return minima.argsort(stable=True)[:num_examples].sort().values


def llg_labels(weight_gradient: Tensor, num_examples: int) -> Tensor:
    """The labels of a batch, repeated ones included, ascending; needs features of positive sum.

    User-Level Label Leakage from Gradients in Federated Learning (Wainakh et al., 2022). Every example of class c pulls
    the row sum g_c down by about the same impact m = (1 + 1/C) / K * sum_{g_c < 0} g_c. It is free of the update's
    scale, so a weight delta serves as well.

    >>> llg_labels(torch.tensor([[0.1], [-0.5], [0.2], [-0.1]]), 4).tolist()
    [1, 1, 1, 3]
    """
    sums = weight_rows(weight_gradient).sum(dim=1)
    impact = (1 + 1 / len(sums)) * sums.clamp(max=0).sum().item() / positive_count(num_examples)
    return _emit(sums, impact, num_examples)


def llg_bias_labels(bias_gradient: Tensor, num_examples: int) -> Tensor:
    """The same from the bias gradient, for features of any sign; the impact needs no correction for them.

    >>> llg_bias_labels(torch.tensor([0.3, -0.5, 0.3, -0.1]), 4).tolist()
    [1, 1, 1, 3]
    """
    entries = bias_entries(bias_gradient)
    impact = entries.clamp(max=0).sum().item() / positive_count(num_examples)
    return _emit(entries, impact, num_examples)


def _emit(signal: Tensor, impact: float, num_examples: int) -> Tensor:
    """Every negative class once, its impact taken off; then again and again the smallest, until K labels are out.

    Published code takes the impact off a stale index in the second stage, which makes it emit one class for ever.
    """
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
