"""Assess updates of real systems, recorded or at once, with doubts of what was told of them.

Without the truth nothing is claimed about pictures. With it, PSNR stands beside what zero information gives: the same
attack on noise of the update's norm, the grey picture, and the mean of other examples where there are some.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.attacks import make_attack
from leakscope.attacks.head_first import HeadFirst
from leakscope.audit.assess import Assessment, Ruler, assess
from leakscope.audit.progress import Tell, Updates, listener
from leakscope.audit.quick import SEARCH
from leakscope.capture.recordings import Origin, Recording, Truth, recordings
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.errors import NotApplicable, UserError
from leakscope.contracts.observation import Observation
from leakscope.contracts.registry import kebab
from leakscope.matching.unexplained import explain
from leakscope.report.recorded import recorded_words, write_recorded
from leakscope.results.setting_verdict import Outcome

#: What the client's own examples may leave of its update: batches in another order do, other steps leave more.
EXPLAINED_BY_TRUTH = 0.3
#: How much longer or shorter the update may be than the recipe makes it.
SCALE_TOLERANCE = 0.1
#: The attack on recorded updates: exact methods, then a short search. A long one takes minutes for each update, and
#: recordings support no pass that it could earn.
QUICK = HeadFirst(iterations=SEARCH)
UNTOLD = "the attack was told of no defence; if one acts on this update, this is no test of it"


def audit_recordings(
    folder: str | Path | Iterable[Recording],
    *,
    model: nn.Module,
    attack: str | Attack = QUICK,
    every: int = 1,
    at_most: int | None = None,
    others: Tensor | None = None,
    controls: bool = True,
    seed: int = 0,
    progress: Tell | bool | None = None,
) -> "RecordedAudit":
    """Attack what was recorded: every nth recording, ``at_most`` so many. ``model`` gives the structure.

    ``others`` are further examples of the same kind, for identification and for a guess without the update.
    ``controls`` runs each attack once more on noise, which doubles the time. ``progress`` is as in ``leakscope.audit``.
    """
    if every < 1 or (at_most is not None and at_most < 1):
        raise UserError(f"every, at_most: expected whole numbers of at least 1, got {every} and {at_most}")
    found = recordings(folder) if isinstance(folder, str | Path) else list(folder)
    if not found:
        raise UserError(f"{folder}: no recordings. Did the run reach the place that records?")
    chosen = found[::every][:at_most]
    updates = ((one.observation(model), one.origin, one.truth()) for one in chosen)
    facts: dict[str, Any] = {"others": others, "controls": controls, "seed": seed}
    return RecordedAudit(measure_all(updates, len(chosen), attack, progress, **facts))


class RecordedAudit(Sequence[Assessment]):
    """Hold the assessments of recorded updates, with a verdict in the words of an audit.

    It never says "within policy": recordings come without the positive controls that an audit asks of a pass.
    """

    def __init__(self, leakage: Iterable[Assessment]) -> None:
        self.leakage = tuple(leakage)

    def __getitem__(self, place: Any) -> Any:
        return self.leakage[place]

    def __len__(self) -> int:
        return len(self.leakage)

    @property
    def outcome(self) -> Outcome:
        if any(one.outcome == "looks recovered" for one in self):
            return "leaks"
        return "inconclusive" if any(one.reconstruction is not None for one in self) else "nothing audited"

    def describe(self) -> str:
        """Say the verdict, why, and what to do; then one line for each update."""
        return "\n".join([*recorded_words(self), *(one.describe() for one in self)])

    def report(self, path: str | Path, pictures: bool = False) -> Path:
        """Write a page; ``pictures`` also shows what was recovered, which is private data."""
        return write_recorded(self, path, pictures)


def measure_all(
    updates: Iterable[tuple[Observation, Origin, Truth | None]],
    count: int,
    attack: str | Attack,
    progress: Tell | bool | None = None,
    *,
    controls: bool = True,
    **facts: Any,
) -> list[Assessment]:
    """Assess ``count`` updates, one after the other, and show how far that is and how long it will take."""
    name = attack if isinstance(attack, str) else kebab(type(attack).__name__)
    assessments = []
    with listener(progress) as (tell, _):
        shown = Updates(tell, name, count, passes=2 if controls else 1)
        for number, (observation, origin, truth) in enumerate(updates):
            with shown.update(number) as step:
                facts |= {"truth": truth, "controls": controls, "progress": step}
                assessments.append(measure(observation, origin, attack, **facts))
    return assessments


def measure(
    observation: Observation,
    origin: Origin,
    attack: str | Attack,
    *,
    truth: Truth | None = None,
    others: Tensor | None = None,
    controls: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> Assessment:
    """Assess one update of a real system; compare with the truth where it is given, which the attack never is."""
    recover = make_attack(attack) if isinstance(attack, str) else attack
    space, update = observation.inputs, observation.message.update
    broken = [name for name, value in update.items() if not bool(torch.isfinite(value).all())]
    if broken:
        why = f"NaN or infinite values in {', '.join(broken)}; did the client's training diverge?"
        return unassessed(observation, origin, recover, why)
    if truth is not None and not space.bounded:
        raise UserError("value_range: expected the bounds of the inputs, without which PSNR means nothing; got None")
    notes = [UNTOLD] if observation.channel is None and origin.place != "raw" else []
    if truth is not None and origin.place == "raw":
        notes += doubts_of_recipe(observation, truth)
    ruler = Ruler(space, observation.task, None if others is None else space.to_unit(others.to(torch.float32)))
    facts: dict[str, Any] = {"seed": seed, "ruler": ruler, "origin": origin, "notes": notes, "progress": progress}
    return assess(observation, recover, truth, ("grey", "others", "noise") if controls else ("grey", "others"), **facts)


def unassessed(observation: Observation, origin: Origin, attack: str | Attack, why: str) -> Assessment:
    """Make the assessment of an update that no attack was run on."""
    recover = make_attack(attack) if isinstance(attack, str) else attack
    facts: dict[str, Any] = {"ruler": Ruler(observation.inputs, observation.task), "refusal": NotApplicable(why)}
    return Assessment(observation=observation, attack=recover, origin=origin, notes=origin.notes, **facts)


def doubts_of_recipe(observation: Observation, truth: Truth) -> list[str]:
    """Doubt facts that cannot be those of a client with these examples, if no defence altered its update."""
    x, y = truth
    if observation.num_examples not in (None, len(x)):
        return [f"{len(x)} examples were held, {observation.num_examples} were told: is the truth that of this update?"]
    found = explain(observation, x.to(observation.device, observation.dtype), y.to(observation.device))
    rest, stretch = found.left_at_best_length, found.stretch
    if rest > EXPLAINED_BY_TRUTH:
        return [
            f"the examples held and the recipe told leave {rest:.0%} of the client's own update unexplained: other "
            "steps or another order of them, another optimiser, other examples. Attacks that believe them fail, and "
            "that is no sign of safety"
        ]
    if stretch is not None and abs(stretch - 1) > SCALE_TOLERANCE:
        return [f"the update is {stretch:.3g} times as long as the recipe told makes it: is the learning rate right?"]
    return []
