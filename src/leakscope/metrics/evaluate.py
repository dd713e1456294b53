"""Truth meets reconstruction: match them, measure every pair, and say why a measure is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leakscope.metrics import image
from leakscope.metrics.assignment import Cost, Method, assign
from leakscope.metrics.identification import identified
from leakscope.metrics.perceptual import NO_WEIGHTS, Lpips

MEASURES = ("mse", "rmse", "rmse_maxnorm", "psnr", "ssim", "lpips")
NON_FINITE = "non-finite reconstruction"
NOTHING = "nothing reconstructed"
NO_OTHERS = "no other candidates to tell the original from"
PSNR_CAP = 200.0


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One row an original, in the originals' order.

    ``rows`` hold mse, rmse, rmse_maxnorm, psnr, ssim and lpips (NaN where not measured), identified (None
    where it means nothing), label, label_guess and label_correct (None without a guess). ``reasons`` says for
    each measure why it is NaN. ``order[i]`` is the reconstruction compared with original i, or -1;
    ``matched`` holds them, clamped to [0, 1], NaN where there is none.
    """

    rows: tuple[dict[str, Any], ...]
    reasons: dict[str, str]
    order: Tensor = field(repr=False)
    matched: Tensor = field(repr=False)


def evaluate(
    originals_unit: Tensor,
    labels: Tensor,
    reconstructions_unit: Tensor,
    guessed_labels: Tensor | None,
    candidates_unit: Tensor | None = None,
    lpips: Lpips | None = None,
    match: Method = "hungarian",
    cost: Cost = "mse",
) -> Evaluation:
    """Compare reconstructions with originals, both in unit space.

    Values outside [0, 1] are clamped before anything is compared, as a picture would be when shown. A
    reconstruction with NaN or infinite values is matched last and measured NaN ("non-finite reconstruction"),
    never as good; an original that gets none is NaN ("nothing reconstructed"). PSNR of equal pictures is 200
    dB, to fit into files. ``candidates_unit`` are other examples of the same data, for identification.

    >>> x = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    >>> guess = torch.tensor([[0.9, 0.9], [0.0, -0.5]])
    >>> result = evaluate(x, torch.tensor([3, 5]), guess, torch.tensor([5, 4]))
    >>> result.order.tolist(), [round(row["psnr"], 3) for row in result.rows]
    ([1, 0], [200.0, 20.0])
    >>> [row["label_correct"] for row in result.rows], [row["identified"] for row in result.rows]
    ([False, True], [True, True])
    """
    originals, guesses = _checked(originals_unit, labels, reconstructions_unit, guessed_labels)
    originals, guesses = originals.clamp(0, 1), _clamped(guesses)
    order = assign(originals, guesses, cost, match)
    matched = torch.full_like(originals, torch.nan)
    matched[order >= 0] = guesses[order[order >= 0]]
    usable = torch.isfinite(matched).flatten(1).all(dim=1)

    problems = [
        NOTHING if number < 0 else "" if fine else NON_FINITE
        for number, fine in zip(order.tolist(), usable.tolist(), strict=True)
    ]
    reasons: dict[str, str] = {}
    if any(problems):
        words = "; ".join(sorted({problem for problem in problems if problem}))
        reasons = {name: f"{words} ({sum(map(bool, problems))} of {len(problems)})" for name in MEASURES}
    values = {name: torch.full((len(originals),), torch.nan, dtype=torch.float64) for name in MEASURES}
    for name, value in _measures(originals[usable], matched[usable], lpips, reasons).items():
        values[name][usable.cpu()] = value.cpu()

    found = _identified(originals, matched, candidates_unit)
    if found is None:
        reasons["identified"] = NO_OTHERS
    rows = []
    for i in range(len(originals)):
        guess = None if guessed_labels is None or order[i] < 0 else int(guessed_labels[order[i]])
        row: dict[str, Any] = {name: float(values[name][i]) for name in MEASURES}
        row["identified"] = None if found is None else bool(found[i])
        row["label"] = int(labels[i])
        row["label_guess"] = guess
        row["label_correct"] = None if guess is None else guess == int(labels[i])
        rows.append(row)
    return Evaluation(rows=tuple(rows), reasons=reasons, order=order, matched=matched)


def _checked(
    originals: Tensor, labels: Tensor, guesses: Tensor, guessed_labels: Tensor | None
) -> tuple[Tensor, Tensor]:
    problems = []
    if originals.dim() < 2 or originals.shape[1:] != guesses.shape[1:]:
        problems.append(
            f"originals (N, *shape) and reconstructions (M, *shape) have shapes {tuple(originals.shape)} and "
            f"{tuple(guesses.shape)}"
        )
    if not bool(torch.isfinite(originals).all()):
        problems.append("originals hold NaN or infinite values")
    if len(labels) != len(originals):
        problems.append(f"{len(labels)} labels for {len(originals)} originals")
    if guessed_labels is not None and len(guessed_labels) != len(guesses):
        problems.append(f"{len(guessed_labels)} guessed labels for {len(guesses)} reconstructions")
    if problems:
        raise ValueError("cannot evaluate: " + "; ".join(problems))
    return originals.detach().float(), guesses.detach().to(device=originals.device, dtype=torch.float32)


def _clamped(guesses: Tensor) -> Tensor:
    """Clamped to [0, 1], but infinity becomes NaN: a clamp alone would turn a diverged run into white."""
    return torch.where(torch.isfinite(guesses), guesses.clamp(0, 1), torch.nan)


def _measures(a: Tensor, b: Tensor, lpips: Lpips | None, reasons: dict[str, str]) -> dict[str, Tensor]:
    values = {
        "mse": image.mse(a, b),
        "rmse": image.rmse(a, b),
        "rmse_maxnorm": image.rmse_maxnorm(a, b),
        "psnr": image.psnr(a, b, cap=PSNR_CAP),
        "ssim": image.ssim(a, b),
    }
    if a.dim() < 3:
        reasons["ssim"] = image.SSIM_NEEDS_SPACE
    why_not = NO_WEIGHTS if lpips is None else lpips.reason(tuple(a.shape[1:]))
    if why_not is not None:
        reasons["lpips"] = why_not
    elif lpips is not None:
        values["lpips"] = lpips(a, b)
    return values


def _identified(originals: Tensor, matched: Tensor, pool: Tensor | None) -> Tensor | None:
    candidates = originals if pool is None else torch.cat([originals, pool.to(originals).clamp(0, 1)])
    different = (candidates.flatten(1) != originals[:1].flatten(1)).any() if len(originals) else False
    if not bool(different):
        return None
    return identified(torch.arange(len(originals), device=originals.device), matched, candidates)
