"""How well labels were guessed, as a multiset and example by example."""

from __future__ import annotations

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError


def label_accuracy(true: Tensor, guess: Tensor) -> float:
    """The share of true labels that the guess holds, whatever the order; repeated labels count each time.

    >>> label_accuracy(torch.tensor([3, 3, 1, 0]), torch.tensor([0, 3, 2, 2]))
    0.5
    """
    if true.dim() != 1 or guess.dim() != 1 or len(true) == 0:
        raise UserError(f"expected labels of shape (B,) with B > 0, got {tuple(true.shape)} and {tuple(guess.shape)}")
    classes, counts = true.cpu().unique(return_counts=True)
    guesses = (guess.cpu().unsqueeze(1) == classes).sum(dim=0)
    return float(torch.minimum(guesses, counts).sum()) / len(true)


def label_correct(true: Tensor, guess: Tensor) -> Tensor:
    """Whether each matched example has its label.

    >>> label_correct(torch.tensor([3, 1]), torch.tensor([3, 2])).tolist()
    [True, False]
    """
    if true.shape != guess.shape:
        raise UserError(f"expected one guess for each label, got {tuple(true.shape)} and {tuple(guess.shape)}")
    return true == guess.to(true.device)
