"""iDLG: Improved Deep Leakage from Gradients (Zhao, Mopuri, Bilen, 2020), the label rule.

For one example with logits z = W h + b and cross-entropy, dW_k = (p_k - y_k) h. Only the true class has a negative
factor, so with features h of positive sum the row sums are negative at the label and positive elsewhere:

    label = argmin_k sum_j dW_kj

The rule fails where the features have a negative sum (tanh, LeakyReLU); read the bias gradient then.
"""

from __future__ import annotations

from torch import Tensor

from leakscope.labels._checks import weight_rows


def idlg_label(weight_gradient: Tensor) -> int:
    """The label of a single example from the head's weight gradient, for features of positive sum.

    >>> import torch
    >>> probabilities, features = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([1.0, 2.0])
    >>> idlg_label(torch.outer(probabilities - torch.tensor([0.0, 0.0, 1.0]), features))
    2
    """
    return int(weight_rows(weight_gradient).sum(dim=1).argmin())
