"""Label rules that read nothing but the gradient of the head.

Bias sign. With mean cross-entropy over K examples db_k = mean_n p_nk - n_k / K. A class that is absent has db_k > 0
whatever the network, so every negative entry names a class that is present; one example makes exactly one.

iDLG: Improved Deep Leakage from Gradients (Zhao, Mopuri, Bilen, 2020). For one example with logits z = W h + b,
dW_k = (p_k - y_k) h. Only the true class has a negative factor, so with features h of positive sum

    label = argmin_k sum_j dW_kj

The rule fails where the features have a negative sum (tanh, LeakyReLU); read the bias gradient then.

GradInversion: See through Gradients (Yin et al., 2021), for batches without repeated labels. With non-negative features
the rows of present classes hold the most negative entries: take the K classes with the smallest row minima.

LLG: User-Level Label Leakage from Gradients in Federated Learning (Wainakh et al., 2022). Every example of class c
pulls the row sum g_c = sum_j dW_cj down by about the same impact m < 0:

    m = (1 + 1/C) / K * sum_{g_c < 0} g_c

Stage 1 emits every class with g_c < 0 once and takes m off it; stage 2 repeatedly emits the class with the smallest g
and takes m off *that* class, until K labels are out. (Published code decrements a stale index in stage 2, which makes
it emit one class for ever.) Both stages are free of the update's scale, so a weight delta serves as well. On the bias
gradient the impact needs no correction for features: m = sum_{db_c < 0} db_c / K.
"""

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError


def weight_rows(weight_gradient: Tensor) -> Tensor:
    if weight_gradient.dim() != 2 or weight_gradient.numel() == 0:
        raise UserError(
            "weight_gradient: expected a matrix of shape (classes, features), got shape "
            f"{tuple(weight_gradient.shape)}. Pass the gradient of the layer that produces the logits."
        )
    return _finite(weight_gradient, "weight_gradient")


def bias_entries(bias_gradient: Tensor) -> Tensor:
    if bias_gradient.dim() != 1 or bias_gradient.numel() == 0:
        raise UserError(
            f"bias_gradient: expected shape (classes,), got {tuple(bias_gradient.shape)}. "
            "Pass the bias gradient of the layer that produces the logits."
        )
    return _finite(bias_gradient, "bias_gradient")


def positive_count(num_examples: int) -> int:
    if num_examples < 1:
        raise UserError(f"num_examples: expected at least 1, got {num_examples}")
    return int(num_examples)


def _finite(value: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise UserError(f"{name}: holds NaN or infinite entries, so no label can be read from it")
    return value.detach().to(torch.float64)


def bias_label(bias_gradient: Tensor) -> int:
    """Read the label of a single example; exact for any network whose logits come from a layer with a bias.

    >>> import torch
    >>> bias_label(torch.tensor([0.2, -0.5, 0.3]))
    1
    """
    return int(bias_entries(bias_gradient).argmin())


def bias_present(bias_gradient: Tensor) -> Tensor:
    """List classes that are certainly present; all of them where sum_n p_nk < n_k for every present class k.

    >>> import torch
    >>> bias_present(torch.tensor([0.2, -0.3, 0.3, -0.2])).tolist()
    [1, 3]
    """
    return (bias_entries(bias_gradient) < 0).nonzero().flatten()


def idlg_label(weight_gradient: Tensor) -> int:
    """Read the label of a single example from the head's weight gradient, for features of positive sum.

    >>> import torch
    >>> probabilities, features = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([1.0, 2.0])
    >>> idlg_label(torch.outer(probabilities - torch.tensor([0.0, 0.0, 1.0]), features))
    2
    """
    return int(weight_rows(weight_gradient).sum(dim=1).argmin())


def gradinversion_labels(weight_gradient: Tensor, num_examples: int) -> Tensor:
    """List the labels of a batch in which no label repeats, ascending; needs non-negative features.

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


def llg_labels(weight_gradient: Tensor, num_examples: int) -> Tensor:
    """List the labels of a batch, repeated ones included, ascending; needs features of positive sum.

    >>> llg_labels(torch.tensor([[0.1], [-0.5], [0.2], [-0.1]]), 4).tolist()
    [1, 1, 1, 3]
    """
    sums = weight_rows(weight_gradient).sum(dim=1)
    impact = (1 + 1 / len(sums)) * sums.clamp(max=0).sum().item() / positive_count(num_examples)
    return _emit(sums, impact, num_examples)


def llg_bias_labels(bias_gradient: Tensor, num_examples: int) -> Tensor:
    """List the same from the bias gradient, which holds for features of any sign.

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
