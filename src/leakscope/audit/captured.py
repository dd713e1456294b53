"""A captured update attacked: what was recovered, how sure the attack is, and what it would say of nothing.

Nobody has the truth of a captured update at hand, so an attack is judged by what the update itself can tell: how much
of it the recovered inputs leave unexplained, beside what inputs leave that know nothing of the client, and beside what
the same attack makes of an update that is noise. With the truth, all of them are measured against it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leakscope.attacks.gradient_matching import hides_steps
from leakscope.audit.controls import noise_of_equal_norm
from leakscope.audit.explained import labels_of, left_by, with_flag
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.limits import diagnose
from leakscope.metrics import Evaluation, evaluate
from leakscope.report.certificate import CERTIFIED, RECOVERED_PSNR

#: Inputs that know nothing: grey ones, and so many draws of random values.
BLIND_DRAWS = 3
#: A result that leaves more than this share of what its baseline leaves is none the better for the update.
NO_BETTER = 0.9
#: ... and one that leaves less than this share of it stands out.
STANDS_OUT = 0.5
_STANDS_OUT = "Stands out from its zero-information baseline"
_ONE_GRADIENT = (
    "That is judged by one gradient at the weights the client received; if it took several local steps, even the true "
    "inputs would leave something."
)


@dataclass(frozen=True, eq=False)
class Baseline:
    """Inputs that hold nothing of the client: how they came about, and what they leave unexplained."""

    name: str
    inputs: Tensor
    left: float | None
    labels: Tensor | None = None
    evaluation: Evaluation | None = None


@dataclass(frozen=True, eq=False)
class CapturedResult:
    """What an attack made of a captured update; ``evaluation`` and ``truth`` (in unit space) only where it is known.

    ``left`` is what the recovered inputs leave of the update, each tensor relative to its own size: 0 nothing, 1 as
    much as an update of zeros. None where it cannot be computed.
    """

    observation: Observation
    attack: Attack
    reconstruction: Reconstruction
    left: float | None
    baselines: tuple[Baseline, ...]
    evaluation: Evaluation | None = None
    truth: Tensor | None = None

    @property
    def unit_inputs(self) -> Tensor:
        return self.observation.inputs.to_unit(self.reconstruction.inputs.cpu())

    @property
    def one_gradient(self) -> bool:
        """Whether what is left is that of one gradient although there may have been several local steps."""
        return hides_steps(self.observation)

    @property
    def psnrs(self) -> list[float]:
        """Return the PSNR of each input to the original it is matched with; NaN without one."""
        measured = {}
        if self.evaluation is not None:
            places = self.evaluation.order.tolist()
            measured = {place: row["psnr"] for place, row in zip(places, self.evaluation.rows, strict=True)}
        return [measured.get(number, math.nan) for number in range(len(self.reconstruction.inputs))]

    def confidence(self) -> str:
        """Say what the result may be taken for: by its certificates, else by what it leaves unexplained."""
        wrong = any(psnr < RECOVERED_PSNR for psnr in self.psnrs)
        if 0 < self.reconstruction.certified == len(self.reconstruction.inputs) and not wrong:
            return CERTIFIED
        words = confidence_words(self.left, [one.left for one in self.baselines])
        return f"{words} {_ONE_GRADIENT}" if self.one_gradient and not words.startswith(_STANDS_OUT) else words


def confidence_words(left: float | None, baselines: list[float | None]) -> str:
    """A sentence on a result by what it leaves of the update, and what results that know nothing leave.

    >>> [confidence_words(left, [1.0, 0.9]).split(":")[0] for left in (0.01, None)]
    ['Stands out from its zero-information baseline', 'Unknown']
    >>> confidence_words(0.85, [1.0, 0.9]).split(":")[0]
    'No better than its zero-information baseline'
    """
    others = [value for value in baselines if value is not None and math.isfinite(value)]
    if left is None or not math.isfinite(left) or not others:
        return "Unknown: what the recovered inputs leave of the update, or what a baseline leaves, cannot be computed."
    least = min(others)
    if left > NO_BETTER * least:
        return (
            f"No better than its zero-information baseline: it leaves {left:.2g} of the update unexplained, inputs "
            f"that know nothing leave {least:.2g}. Nothing here says that what was recovered is the client's."
        )
    facts = f"it leaves {left:.2g} of the update unexplained where inputs that know nothing leave {least:.2g}"
    if left < STANDS_OUT * least:
        return f"{_STANDS_OUT}: {facts}. Other inputs may explain it as well; see the diagnosis."
    return f"Somewhat better than its zero-information baseline: {facts}. Part of it may be the client's."


def attack_captured(
    observation: Observation,
    attack: Attack,
    *,
    seed: int = 0,
    device: Any = None,
    truth: tuple[Tensor, Tensor | None] | None = None,
    control: bool = True,
    thorough: bool = False,
    progress: Progress | None = None,
) -> CapturedResult:
    """Attack the observation; with ``control`` also noise of the update's norm, with ``truth`` measure.

    ``truth`` are inputs and labels, None where only the inputs are known.
    """
    result = attack(observation, seed=seed, device=device, progress=progress)
    result = dataclasses.replace(result, diagnosis=diagnose(observation, result, thorough=thorough))
    labels = labels_of(observation, result)
    baselines = _blind_inputs(observation, result, labels, seed)
    if control:
        blind = noise_of_equal_norm(observation, torch.Generator().manual_seed(seed))
        try:
            drawn = attack(blind, seed=seed, device=device)
        except (NotApplicable, MissingKnowledge) as error:  # which is an answer too: it takes noise for no update
            note = f"on noise of the update's norm the attack refuses: {error}"
            result = dataclasses.replace(result, notes=(*result.notes, note))
        else:
            left = left_by(blind, drawn.inputs, labels_of(blind, drawn), drawn.info.get("batch_order"))
            name = "the same attack on noise of the update's norm"
            baselines.append(Baseline(name, drawn.inputs, left, drawn.labels))
    left = left_by(observation, result.inputs, labels, result.info.get("batch_order"))
    result = with_flag(result, observation, left)
    if truth is None:
        return CapturedResult(observation, attack, result, left, tuple(baselines))
    truth = observation.inputs.to_unit(truth[0]).clamp(0, 1), truth[1]
    baselines = [
        dataclasses.replace(one, evaluation=_measured(observation, one.inputs, one.labels, truth)) for one in baselines
    ]
    measured = _measured(observation, result.inputs, result.labels, truth)
    return CapturedResult(observation, attack, result, left, tuple(baselines), measured, truth[0])


def _blind_inputs(observation: Observation, result: Reconstruction, labels: Tensor | None, seed: int) -> list[Baseline]:
    """Grey inputs, and the best of a few random ones, with the labels that the attack has."""
    draws, count = torch.Generator().manual_seed(seed), len(result.inputs)
    like = result.inputs.cpu()
    grey = observation.inputs.from_unit(torch.full_like(like, 0.5))
    units = [torch.rand(like.shape, generator=draws).to(like) for _ in range(BLIND_DRAWS)]
    random = [observation.inputs.from_unit(unit) for unit in units]
    lefts = [left_by(observation, inputs, labels) for inputs in random]
    best = min(range(BLIND_DRAWS), key=lambda place: math.inf if (left := lefts[place]) is None else left)
    name = f"the best of {BLIND_DRAWS} random inputs with the same labels"
    return [
        Baseline(
            f"grey input{'s' if count > 1 else ''} with the same labels", grey, left_by(observation, grey, labels)
        ),
        Baseline(name, random[best], lefts[best]),
    ]


def _measured(
    observation: Observation, inputs: Tensor, guessed: Tensor | None, truth: tuple[Tensor, Tensor | None]
) -> Evaluation:
    x, y = truth
    labels = torch.full((len(x),), -1) if y is None else y
    unit = observation.inputs.to_unit(inputs.detach().cpu())
    guess = None if y is None or guessed is None else guessed.cpu()
    return evaluate(x, labels, unit, guess, inputs=observation.inputs, task=observation.task)
