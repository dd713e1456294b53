"""Labels from the signs of the head's bias gradient.

With mean cross-entropy over K examples db_k = mean_n p_nk - n_k / K. A class that is absent has db_k > 0 whatever the
network, so every negative entry names a class that is present; with one example exactly one entry is negative.
"""

from __future__ import annotations

from torch import Tensor

from leakscope.labels._checks import bias_entries


def bias_label(bias_gradient: Tensor) -> int:
    """The label of a single example; exact for any network whose logits come from a layer with a bias.

    >>> import torch
    >>> bias_label(torch.tensor([0.2, -0.5, 0.3]))
    1
    """
    return int(bias_entries(bias_gradient).argmin())


def bias_present(bias_gradient: Tensor) -> Tensor:
    """Classes that are certainly present, ascending; all of them where sum_n p_nk < n_k for every present class k.

    >>> import torch
    >>> bias_present(torch.tensor([0.2, -0.3, 0.3, -0.2])).tolist()
    [1, 3]
    """
    return (bias_entries(bias_gradient) < 0).nonzero().flatten()
