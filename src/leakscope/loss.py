"""What a client minimises: cross-entropy, or for a model with one output the logistic loss.

A softmax over one output is constant, so such a model can only mean two classes: its output is the logit of class 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn


def client_loss(logits: Tensor, targets: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """The loss of a batch; ``targets`` are class numbers, or a probability for each output and example.

    >>> import math
    >>> two, one = torch.tensor([[0.0, 3.0]]), torch.tensor([[3.0]])
    >>> label = torch.tensor([1])
    >>> math.isclose(client_loss(two, label), client_loss(one, label), rel_tol=1e-6)
    True
    """
    if logits.shape[-1] != 1:
        return nn.functional.cross_entropy(logits, targets, reduction=reduction)
    logit = logits.flatten()
    # The same as binary cross-entropy, in a form that can be differentiated twice in forward mode too.
    each = nn.functional.softplus(logit) - targets.flatten().to(logit) * logit
    return each.mean() if reduction == "mean" else each.sum()


def as_probabilities(logits: Tensor) -> Tensor:
    """What label logits mean: softmax over the classes, for one output the probability of class 1.

    >>> as_probabilities(torch.tensor([[0.0]])).tolist(), as_probabilities(torch.tensor([[0.0, 0.0]])).tolist()
    ([[0.5]], [[0.5, 0.5]])
    """
    return torch.sigmoid(logits) if logits.shape[-1] == 1 else torch.softmax(logits, -1)


def as_labels(logits: Tensor) -> Tensor:
    """The most probable class numbers.

    >>> as_labels(torch.tensor([[-1.0], [2.0]])).tolist(), as_labels(torch.tensor([[1.0, 5.0]])).tolist()
    ([0, 1], [1])
    """
    return (logits[:, 0] > 0).long() if logits.shape[-1] == 1 else logits.argmax(1)


def label_count(outputs: int) -> int:
    """How many classes a model with so many outputs tells apart.

    >>> label_count(10), label_count(1)
    (10, 2)
    """
    return 2 if outputs == 1 else outputs
