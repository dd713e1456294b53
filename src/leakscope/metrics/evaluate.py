"""Truth meets reconstruction: match them, measure every pair, and say why a measure is missing."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import Box, InputSpace
from leakscope.contracts.task import Classification, Task
from leakscope.metrics import image
from leakscope.metrics.assignment import Cost, Method, assign
from leakscope.metrics.measures import MEASURES, Measure
from leakscope.metrics.perceptual import NO_WEIGHTS, Lpips

NON_FINITE = "non-finite reconstruction"
NOTHING = "nothing reconstructed"
#: What a row tells of labels beside whether a guess is right.
_LABELS = ("label", "label_guess")
NO_OTHERS = "no other candidates to tell the original from"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One row an original, in the originals' order.

    ``rows`` hold each measure of inputs (NaN where not measured), identified, label, label_guess and label_correct
    (None where they mean nothing). ``reasons`` says for each measure why it is NaN. ``order[i]`` is the reconstruction
    compared with original i, or -1; ``matched`` holds them, clamped to [0, 1], NaN where there is none.
    """

    rows: tuple[dict[str, Any], ...]
    reasons: dict[str, str]
    order: Tensor = field(repr=False)
    matched: Tensor = field(repr=False)

    def told(self, labels: bool) -> list[dict[str, Any]]:
        """Return the rows with ``labels`` or without; whether a guess at one is right is a measure, and stays."""
        return [{key: value for key, value in row.items() if labels or key not in _LABELS} for row in self.rows]


def evaluate(
    originals_unit: Tensor,
    labels: Tensor,
    reconstructions_unit: Tensor,
    guessed_labels: Tensor | None,
    candidates_unit: Tensor | None = None,
    lpips: Lpips | None = None,
    match: Method = "hungarian",
    cost: Cost = "mse",
    inputs: InputSpace | None = None,
    task: Task | None = None,
) -> Evaluation:
    """Compare reconstructions with originals, both in unit space.

    Values outside [0, 1] are clamped first, as a picture would be when shown. A reconstruction with NaN or infinite
    values is matched last and measured NaN; so is an original that gets none. PSNR of equal pictures is 200 dB, to fit
    into files. ``candidates_unit`` are other examples of the same data, for identification. ``inputs`` and ``task`` say
    which measures apply, those of a box and of classification unless told.

    >>> x = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    >>> guess = torch.tensor([[0.9, 0.9], [0.0, -0.5]])
    >>> result = evaluate(x, torch.tensor([3, 5]), guess, torch.tensor([5, 4]))
    >>> result.order.tolist(), [round(row["psnr"], 3) for row in result.rows]
    ([1, 0], [200.0, 20.0])
    >>> [row["label_correct"] for row in result.rows], [row["identified"] for row in result.rows]
    ([False, True], [True, True])
    """
    originals, guesses = _checked(originals_unit, labels, reconstructions_unit, guessed_labels)
    space = Box(tuple(originals.shape[1:])) if inputs is None else inputs
    task = Classification() if task is None else task
    # Infinity becomes NaN: a clamp alone would turn a diverged run into white.
    originals, guesses = originals.clamp(0, 1), guesses.clamp(0, 1).where(torch.isfinite(guesses), torch.nan)
    order = assign(originals, guesses, cost, match)
    matched = torch.full_like(originals, torch.nan)
    matched[order >= 0] = guesses[order[order >= 0]]
    usable = torch.isfinite(matched).flatten(1).all(dim=1)

    problems = [
        NOTHING if number < 0 else "" if fine else NON_FINITE
        for number, fine in zip(order.tolist(), usable.tolist(), strict=True)
    ]
    reasons: dict[str, str] = {}
    measures = [measure for measure in MEASURES.values() if measure.of == "inputs"]
    distances = [measure.key for measure in measures if measure.key != "identified"]
    if any(problems):
        words = "; ".join(sorted(set(problems) - {""}))
        reasons = dict.fromkeys(distances, f"{words} ({sum(map(bool, problems))} of {len(problems)})")
    values = {key: torch.full((len(originals),), torch.nan, dtype=torch.float64) for key in distances}
    identities = _identified(originals, matched, candidates_unit)
    if identities is None:
        reasons["identified"] = NO_OTHERS
    for measure in measures:
        if not measure.applies(space, task):
            identities = None if measure.key == "identified" else identities
            reasons[measure.key] = f"{measure.label} does not apply to a {type(space).__name__.lower()}"
        elif measure.key in values:
            value = _value(measure, originals[usable], matched[usable], lpips, reasons)
            values[measure.key][usable.cpu()] = value.to(values[measure.key])
    rows = []
    for i in range(len(originals)):
        row: dict[str, Any] = {name: float(value[i]) for name, value in values.items()}
        row["identified"] = None if identities is None else bool(identities[i])
        guess = None if guessed_labels is None or order[i] < 0 else guessed_labels[order[i]]
        rows.append({**row, **compare_targets(labels[i], guess, task)})
    return Evaluation(rows=tuple(rows), reasons=reasons, order=order, matched=matched)


def compare_targets(target: Tensor, guess: Tensor | None, task: Task) -> dict[str, Any]:
    """One example's target beside the guess: whether it is right, or how far it is, as the task has it.

    >>> compare_targets(torch.tensor(3), torch.tensor(5), Classification())
    {'label': 3, 'label_guess': 5, 'label_correct': False}
    """
    facts: dict[str, Any] = {"label": target.tolist(), "label_guess": None, "label_correct": None}
    if guess is None:
        return facts if task.discrete else {**facts, "target_error": math.nan}
    facts["label_guess"] = guess.tolist()
    value = float(task.right(target[None], guess.to(target.device)[None])[0])
    if not task.discrete:
        return {**facts, "target_error": value}
    facts["label_correct"] = bool(value) if value in (0.0, 1.0) else value
    return facts


def _checked(
    originals: Tensor, labels: Tensor, guesses: Tensor, guessed_labels: Tensor | None
) -> tuple[Tensor, Tensor]:
    problems = []
    if originals.dim() < 2 or originals.shape[1:] != guesses.shape[1:]:
        shapes = f"{tuple(originals.shape)} and {tuple(guesses.shape)}"
        problems.append(f"originals (N, *shape) and reconstructions (M, *shape) have shapes {shapes}")
    if not bool(torch.isfinite(originals).all()):
        problems.append("originals hold NaN or infinite values")
    if len(labels) != len(originals):
        problems.append(f"{len(labels)} labels for {len(originals)} originals")
    if guessed_labels is not None and len(guessed_labels) != len(guesses):
        problems.append(f"{len(guessed_labels)} guessed labels for {len(guesses)} reconstructions")
    if problems:
        raise UserError("cannot evaluate: " + "; ".join(problems))
    return originals.detach().float(), guesses.detach().to(device=originals.device, dtype=torch.float32)


def _value(measure: Measure, a: Tensor, b: Tensor, lpips: Lpips | None, reasons: dict[str, str]) -> Tensor:
    if measure.key == "ssim" and a.dim() < 3:
        reasons["ssim"] = image.SSIM_NEEDS_SPACE
    if measure.compute is not None:
        return measure.compute(a, b)
    why_not = NO_WEIGHTS if lpips is None else lpips.reason(tuple(a.shape[1:]))
    if lpips is not None and why_not is None:
        return lpips(a, b)
    reasons[measure.key] = why_not or NO_WEIGHTS
    return torch.full((len(a),), torch.nan)


def _identified(originals: Tensor, matched: Tensor, pool: Tensor | None) -> Tensor | None:
    candidates = originals if pool is None else torch.cat([originals, pool.to(originals).clamp(0, 1)])
    if not len(originals) or not bool((candidates != originals[:1]).any()):
        return None
    return identified(torch.arange(len(originals), device=originals.device), matched, candidates)


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
