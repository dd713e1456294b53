"""Measures without a threshold: is the original the nearest of many candidates, and which labels were guessed?"""

from __future__ import annotations

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError

#: Identification asks for the nearest among at most so many examples, which keeps its cost in bounds.
MAX_CANDIDATES = 1000


def identified(original_index: Tensor, reconstructions: Tensor, candidates: Tensor) -> Tensor:
    """Whether each reconstruction is nearer (MSE) to its own original than to every other candidate.

    ``original_index[i]`` is the place of reconstruction i's original in ``candidates``. A candidate equal to the
    original is the original; a tie with any other, or a reconstruction that is not finite, is no identification.

    >>> candidates = torch.tensor([[0.0], [0.5], [1.0]])
    >>> identified(torch.tensor([0, 1]), torch.tensor([[0.1], [0.9]]), candidates).tolist()
    [True, False]
    """
    if len(original_index) != len(reconstructions) or candidates.shape[1:] != reconstructions.shape[1:]:
        wanted = f"one index for each of {len(reconstructions)} reconstructions and candidates of the same shape"
        shapes = f"{tuple(reconstructions.shape)} and {tuple(candidates.shape)}"
        raise UserError(f"expected {wanted}, got {len(original_index)} indices, shapes {shapes}")
    if bool(((original_index < 0) | (original_index >= len(candidates))).any()):
        raise UserError(f"original_index: expected places among {len(candidates)} candidates")
    pool = candidates.detach().double().flatten(1)
    result = torch.zeros(len(reconstructions), dtype=torch.bool, device=reconstructions.device)
    for i, reconstruction in enumerate(reconstructions.detach().double().flatten(1)):
        own = pool[original_index[i]]
        others = pool[(pool != own).any(dim=1)]
        distance = (reconstruction - own).square().mean()
        nearest = (others - reconstruction).square().mean(dim=1).min() if len(others) else torch.inf
        result[i] = bool(torch.isfinite(distance)) and bool(distance < nearest)
    return result


def chance(num_candidates: int) -> float:
    """How often a blind guess identifies the original.

    >>> chance(20)
    0.05
    """
    if num_candidates < 1:
        raise UserError(f"num_candidates: expected at least 1, got {num_candidates}")
    return 1 / num_candidates


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
