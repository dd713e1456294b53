"""What an attack makes of a recorded update: its own opinion always, measures only where the truth is at hand.

Without the truth nothing is claimed about pictures. What can be said is how much of the update the result leaves
unexplained, beside what the same attack leaves of noise of the same length: an attack that explains noise as well has
found nothing. With the truth, PSNR stands beside what zero information gives: the same attack on that noise, the grey
picture, and the mean of other examples where there are some.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.attacks import make_attack
from leakscope.attacks.gradient_matching import as_gradient, find_targets, replay_recipe, several_steps
from leakscope.audit.controls import noise_of_equal_norm
from leakscope.capture.recordings import Origin, Recording, Truth, recordings
from leakscope.contracts.attack import Attack
from leakscope.contracts.errors import MissingKnowledge, NotApplicable, UserError
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.matching import SingleGradient, UnrolledSteps, Victim, steps_in_order
from leakscope.matching.recipe import client_steps
from leakscope.metrics import evaluate
from leakscope.report.certificate import shared_words

#: Kept apart from the attack's own draws.
_NOISE_SEED = 0x0E15E
#: What the client's own examples may leave of its update: batches in another order do, other steps leave more.
EXPLAINED_BY_TRUTH = 0.3
SCALE_TOLERANCE = 0.1
UNTOLD = "the attack was told of no defence; if one acts on this update, this is no test of it"


@dataclass(frozen=True, eq=False)
class Leakage:
    """What one attack got from one update.

    ``psnr``, ``baseline_psnr`` (zero information), ``identified`` and ``label_correct`` have one entry an example, and
    are None without the truth. ``unexplained`` is the share of the update's length that the result leaves open, and
    ``unexplained_of_noise`` the same for noise in the update's place; None where they could not be computed.
    """

    origin: Origin
    attack: str
    reconstruction: Reconstruction | None = field(repr=False)
    unexplained: float | None = None
    unexplained_of_noise: float | None = None
    psnr: tuple[float, ...] | None = None
    baseline_psnr: tuple[float, ...] | None = None
    identified: tuple[bool | None, ...] | None = None
    label_correct: tuple[bool | None, ...] | None = None
    notes: tuple[str, ...] = ()

    @property
    def lift(self) -> tuple[float, ...] | None:
        """Decibels above zero information, an example each."""
        if self.psnr is None or self.baseline_psnr is None:
            return None
        return tuple(a - b for a, b in zip(self.psnr, self.baseline_psnr, strict=True))

    @property
    def worst_off(self) -> tuple[float, float]:
        """PSNR of the example that was recovered best, and what zero information gives of it; NaN without truth."""
        if self.psnr is None or self.baseline_psnr is None:
            return math.nan, math.nan
        return max(zip(self.psnr, self.baseline_psnr, strict=True), key=lambda pair: _or_least(pair[0]))

    @property
    def certified(self) -> int:
        """Return how many examples are certified: recovered, with a proof that needs no truth."""
        return 0 if self.reconstruction is None else self.reconstruction.certified

    def metrics(self) -> dict[str, float]:
        """Numbers that may travel: no inputs and no labels; NaN where something was not measured.

        Of the examples the worst off counts. At the server there is no truth, and no PSNR.
        """
        guess = self.reconstruction
        numbers = {
            "audited": 0.0 if guess is None else 1.0,
            "certified": math.nan if guess is None else float(self.certified),
            "unexplained": _number(self.unexplained),
            "unexplained_of_noise": _number(self.unexplained_of_noise),
        }
        if self.origin.place == "server":
            certain = None if guess is None or "labels uncertain" in guess.flags else guess.labels
            numbers["labels_read"] = 0.0 if certain is None else float(len(certain))
        else:
            right = [bool(one) for one in self.label_correct or () if one is not None]
            numbers |= {
                "psnr": self.worst_off[0],
                "psnr_of_nothing": self.worst_off[1],
                "lift": _largest(self.lift),
                "labels_correct": sum(right) / len(right) if right else math.nan,
            }
        return {f"leakscope.{self.origin.place}.{name}": value for name, value in numbers.items()}

    def describe(self) -> str:
        """One line: where it was taken, what was recovered, and what that stands beside."""
        origin = self.origin
        whose = (
            f"step {origin.number}" if origin.place == "dp_step" else f"round {origin.number}, client {origin.client}"
        )
        words = [f"{origin.place}, {whose}: {self.attack.split('(')[0]}"]
        if self.reconstruction is None:
            return "; ".join([*words, *self.notes])
        if self.psnr is not None:
            best, nothing = self.worst_off
            words.append(f"best {best:.1f} dB, zero information {nothing:.1f} dB")
        if self.unexplained is not None:
            noise = "" if self.unexplained_of_noise is None else f" (of noise {self.unexplained_of_noise:.0%})"
            words.append(f"{self.unexplained:.0%} of the update unexplained{noise}")
        words += shared_words(self.reconstruction.certificates)
        return "; ".join([*words, *self.reconstruction.flags, *self.notes])


def audit_recordings(
    folder: str | Path | Iterable[Recording],
    *,
    model: nn.Module,
    attack: str | Attack = "head-first",
    every: int = 1,
    at_most: int | None = None,
    others: Tensor | None = None,
    controls: bool = True,
    seed: int = 0,
) -> list[Leakage]:
    """Attack what was recorded: every nth recording, ``at_most`` so many.

    ``model`` gives the structure. ``others`` are further examples of the same kind, for identification and for the
    guess of somebody who saw nothing. ``controls`` runs each attack once more on noise, which doubles the time.
    """
    if every < 1 or (at_most is not None and at_most < 1):
        raise UserError(f"every, at_most: expected whole numbers of at least 1, got {every} and {at_most}")
    found = recordings(folder) if isinstance(folder, str | Path) else list(folder)
    if not found:
        raise UserError(f"{folder}: no recordings. Did the run reach the place that records?")
    chosen = found[::every][:at_most]
    return [
        measure(
            one.observation(model), one.origin, attack, truth=one.truth(), others=others, controls=controls, seed=seed
        )
        for one in chosen
    ]


def measure(
    observation: Observation,
    origin: Origin,
    attack: str | Attack,
    *,
    truth: Truth | None = None,
    others: Tensor | None = None,
    controls: bool = True,
    seed: int = 0,
) -> Leakage:
    """Run one attack on one update; compare with the truth where it is given, which the attack never is."""
    recover = make_attack(attack) if isinstance(attack, str) else attack
    notes = list(origin.notes)
    if observation.channel is None and origin.place != "raw":
        notes.append(UNTOLD)
    broken = [name for name, value in observation.message.update.items() if not bool(torch.isfinite(value).all())]
    if broken:
        words = f"not attacked: NaN or infinite values in {', '.join(broken)}; did the client's training diverge?"
        return Leakage(origin, repr(recover), None, notes=(*notes, words))
    if truth is not None and origin.place == "raw":
        notes += doubts_of_recipe(observation, truth)
    try:
        guess = recover(observation, seed=seed)
    except (NotApplicable, MissingKnowledge) as error:
        return Leakage(origin, repr(recover), None, notes=(*notes, f"not attacked: {error}"))
    blind_guess = None
    facts: dict[str, Any] = {"unexplained": unexplained(observation, guess)}
    if controls:
        draws = torch.Generator().manual_seed(_NOISE_SEED + seed)
        blind = noise_of_equal_norm(observation, draws)
        try:
            blind_guess = recover(blind, seed=seed)
            facts["unexplained_of_noise"] = unexplained(blind, blind_guess)
        except (NotApplicable, MissingKnowledge) as error:
            notes.append(f"no control on noise: {error}")
    if truth is not None:
        facts |= _compared(observation, guess, blind_guess, truth, others)
    return Leakage(origin, repr(recover), guess, notes=(*notes, *guess.notes), **facts)


def unexplained(observation: Observation, guess: Reconstruction, seed: int = 0) -> float | None:
    """The share of the update's length that the guess leaves unexplained, whatever the scale of both; None if unclear.

    0 is a perfect explanation; 1 is none at all, or one that points the other way.
    """
    if "mixture" in guess.flags or len(guess.inputs) != observation.num_examples or observation.has_rounds:
        return None
    labels = guess.labels
    if labels is None:
        labels = find_targets(observation, torch.Generator().manual_seed(seed))[0]
    if labels is None or not bool(torch.isfinite(guess.inputs).all()):
        return None
    return misfit(_observed(observation)[0], _simulated(observation, guess.inputs, labels))


def doubts_of_recipe(observation: Observation, truth: Truth) -> list[str]:
    """Why the facts told cannot be those of a client with these examples: then attacks that believe them fail in vain.

    Only of an update that no defence altered.
    """
    x, y = truth
    if observation.num_examples not in (None, len(x)):
        return [f"{len(x)} examples were held, {observation.num_examples} were told: is the truth that of this update?"]
    observed, scaled = _observed(observation)
    simulated = _simulated(observation, x, y)
    rest = misfit(observed, simulated)
    if rest > EXPLAINED_BY_TRUTH:
        return [
            f"the examples held and the recipe told leave {rest:.0%} of the client's own update unexplained: other "
            "steps or another order of them, another optimiser, other examples. Attacks that believe them fail, and "
            "that is no sign of safety"
        ]
    ratio = float(observed @ simulated) / float(simulated @ simulated)
    if scaled and abs(ratio - 1) > SCALE_TOLERANCE:
        return [f"the update is {ratio:.3g} times as long as the recipe told makes it: is the learning rate right?"]
    return []


def _observed(observation: Observation) -> tuple[Tensor, bool]:
    """The update in the units of what is simulated as one row, and whether its length means something."""
    update = observation.message.update
    if observation.message.kind == "gradient" or _recipe(observation) is not None:
        return _joined(update.values()), True
    try:
        return _joined(as_gradient(observation).values()), not several_steps(observation)
    except NotApplicable:
        return _joined(update.values()), False


def _recipe(observation: Observation) -> tuple[int, int, int, float] | None:
    """The local steps where there are several, and they can be replayed."""
    return replay_recipe(observation) if several_steps(observation) else None


def _simulated(observation: Observation, inputs: Tensor, labels: Tensor) -> Tensor:
    """The update that a client with these examples would have sent, as one row."""
    victim, recipe = Victim.of(observation), _recipe(observation)
    simulation: SingleGradient | UnrolledSteps = SingleGradient()
    if recipe is not None:
        examples, epochs, size, rate = recipe
        order = observation.training.batch_order or steps_in_order(examples, size, epochs)
        simulation = client_steps(observation, order, rate)
    update = observation.message.update
    like = next(iter(update.values()))
    simulated, _ = simulation(victim, victim.tensors, inputs.to(like), labels.to(like.device), {})
    return _joined(simulated[name] for name in update)


def misfit(observed: Tensor, simulated: Tensor) -> float:
    """The sine of the angle between two vectors: what of the first no multiple of the second explains.

    >>> round(misfit(torch.tensor([3.0, 4.0]), torch.tensor([6.0, 0.0])), 6)
    0.8
    >>> misfit(torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -1.0])), misfit(torch.ones(2), torch.zeros(2))
    (1.0, 1.0)
    """
    lengths = float(observed.norm()) * float(simulated.norm())
    cosine = float(observed @ simulated) / lengths if lengths else 0.0
    return math.sqrt(max(0.0, 1 - min(1.0, cosine) ** 2)) if cosine > 0 else 1.0


def _compared(
    observation: Observation, guess: Reconstruction, blind: Reconstruction | None, truth: Truth, others: Tensor | None
) -> dict[str, Any]:
    """Measures of each example, and the best that zero information gives."""
    if not observation.inputs.bounded:
        raise UserError("value_range: expected the bounds of the inputs, without which PSNR means nothing; got None")
    x, y = truth
    space, task = observation.inputs, observation.task
    originals = space.to_unit(x.to(torch.float32))
    pool = None if others is None else space.to_unit(others.to(torch.float32))

    def psnr_of(unit: Tensor) -> list[float]:
        return [row["psnr"] for row in evaluate(originals, y, unit, None, inputs=space, task=task).rows]

    result = evaluate(originals, y, space.to_unit(guess.inputs.cpu()), guess.labels, pool, inputs=space, task=task)
    nothing = [psnr_of(torch.full_like(originals, 0.5))]
    if pool is not None:
        nothing.append(psnr_of(pool.mean(0, keepdim=True).expand_as(originals)))
    if blind is not None:
        nothing.append(psnr_of(space.to_unit(blind.inputs.cpu())))
    return {
        "psnr": tuple(row["psnr"] for row in result.rows),
        "baseline_psnr": tuple(max(column, key=_or_least) for column in zip(*nothing, strict=True)),
        "identified": tuple(row["identified"] for row in result.rows),
        "label_correct": tuple(row["label_correct"] for row in result.rows),
    }


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in tensors])


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _largest(values: Sequence[float] | None) -> float:
    return max(values, key=_or_least) if values else math.nan
