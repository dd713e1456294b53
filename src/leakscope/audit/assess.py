"""Run one attack on one update and judge its result.

Without the truth, a result is judged by how much of the update it leaves unexplained, beside what baselines leave that
know nothing of the client. With the truth, all of them are measured against it. No attack is given the truth.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from leakscope.attacks.gradient_matching import hides_steps
from leakscope.audit.controls import noise_of_equal_norm
from leakscope.audit.keys import derived_seed
from leakscope.audit.memory import PeakMemory
from leakscope.capture.recordings import Origin
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.errors import Refusal
from leakscope.contracts.inputs import InputSpace
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Diagnosis, Reconstruction
from leakscope.contracts.task import Task
from leakscope.labels import recover_labels
from leakscope.limits import diagnose
from leakscope.matching.orders import Order
from leakscope.matching.unexplained import is_unexplained, noise_share, unexplained
from leakscope.metrics import Evaluation, Lpips, evaluate
from leakscope.metrics.image import grain
from leakscope.report.captured import assessment_line
from leakscope.report.sentences import RECOVERED_PSNR
from leakscope.results.policy import Policy
from leakscope.results.records import first_line

FLAG = "update not explained"
#: Random inputs that know nothing: so many draws, of which the best counts.
BLIND_DRAWS = 3
#: Above the first share of what its baseline leaves a result is no better; below the second it stands out.
NO_BETTER, STANDS_OUT = 0.9, 0.5

#: What is left of the update by inputs that are taken for the client's without a certificate: 29 to 37 dB were seen.
LOOKS_RIGHT = 0.1
#: Grain from which on pictures look like noise: 95 % of those of seven data sets have 0.42 or less, white noise has 1.
NOISE_LIKE = 0.5

ControlName = Literal["grey", "random", "others", "noise"]
Standing = Literal["certified", "stands out", "somewhat better", "no better", "unknown"]
Outcome = Literal["looks recovered", "probably not recovered", "cannot say"]


class Truth(NamedTuple):
    """The examples behind an update as the model reads them; targets and visiting order where they are known."""

    x: Tensor
    y: Tensor | None
    order: Callable[[], Order | None] = lambda: None


@dataclass(frozen=True, eq=False)
class Ruler:
    """How results are compared with the truth; ``candidates`` are other examples of the same kind, in unit space."""

    inputs: InputSpace
    task: Task
    candidates: Tensor | None = None
    lpips: Lpips | None = None

    def originals(self, x: Tensor) -> Tensor:
        return self.inputs.to_unit(x.detach().cpu()).float().clamp(0, 1)

    def measure(self, truth: Truth, guesses: Tensor, labels: Tensor | None) -> Evaluation:
        """Compare guesses in unit space with the truth."""
        targets = torch.full((len(truth.x),), -1) if truth.y is None else truth.y.cpu()
        guessed = None if truth.y is None or labels is None else labels.detach().cpu()
        return evaluate(
            *(self.originals(truth.x), targets, guesses, guessed, self.candidates, self.lpips),
            inputs=self.inputs,
            task=self.task,
        )

    def compare(self, truth: Truth, inputs: Tensor, labels: Tensor | None) -> Evaluation:
        """Compare inputs as the model reads them with the truth."""
        cast = self.inputs.cast(inputs.detach().cpu(), truth.x.dtype)
        return self.measure(truth, self.inputs.to_unit(cast).float(), labels)


@dataclass(frozen=True, eq=False)
class Baseline:
    """Inputs that hold nothing of the client, and what they leave unexplained."""

    name: ControlName
    inputs: Tensor
    unexplained: float | None
    labels: Tensor | None = None
    evaluation: Evaluation | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Assessment:
    """What one attack made of one update; ``reconstruction`` is None where it refused.

    ``unexplained`` is what the recovered inputs leave of the update, each tensor relative to its own size (1: as much
    as an update of zeros); ``unexplained_by_truth`` the same of the client's own examples. None where not computable.
    """

    observation: Observation = field(repr=False)
    attack: Attack
    ruler: Ruler = field(repr=False)
    reconstruction: Reconstruction | None = field(default=None, repr=False)
    refusal: Refusal | None = None
    unexplained: float | None = None
    unexplained_by_truth: float | None = None
    baselines: tuple[Baseline, ...] = field(default=(), repr=False)
    evaluation: Evaluation | None = field(default=None, repr=False)
    truth: Truth | None = field(default=None, repr=False)
    origin: Origin | None = None
    notes: tuple[str, ...] = ()
    peak_memory_mb: float = math.nan

    @property
    def certified(self) -> int:
        """Count the examples recovered with a proof that needs no truth."""
        return 0 if self.reconstruction is None else self.reconstruction.certified

    @property
    def unexplained_of_noise(self) -> float | None:
        return next((one.unexplained for one in self.baselines if one.name == "noise"), None)

    @property
    def psnr(self) -> tuple[float, ...] | None:
        """One entry an original; None without the truth."""
        return _column(self.evaluation, "psnr")

    @property
    def identified(self) -> tuple[bool | None, ...] | None:
        return _column(self.evaluation, "identified")

    @property
    def label_correct(self) -> tuple[bool | None, ...] | None:
        return _column(self.evaluation, "label_correct")

    @property
    def baseline_psnr(self) -> tuple[float, ...] | None:
        """The best that zero information gives of each original; None without the truth."""
        columns = [column for one in self.baselines if (column := _column(one.evaluation, "psnr")) is not None]
        return tuple(max(values, key=_or_least) for values in zip(*columns, strict=True)) if columns else None

    @property
    def lift(self) -> tuple[float, ...] | None:
        """Decibels above zero information, an original each."""
        if self.psnr is None or self.baseline_psnr is None:
            return None
        return tuple(a - b for a, b in zip(self.psnr, self.baseline_psnr, strict=True))

    @property
    def worst_off(self) -> tuple[float, float]:
        """Return the PSNR of the example recovered best, and what zero information gives of it; NaN without truth."""
        if self.psnr is None or self.baseline_psnr is None:
            return math.nan, math.nan
        return max(zip(self.psnr, self.baseline_psnr, strict=True), key=lambda pair: _or_least(pair[0]))

    @property
    def psnr_of_inputs(self) -> list[float]:
        """Return the PSNR of each recovered input to the original that it is matched with; NaN without one."""
        order = [] if self.evaluation is None else self.evaluation.order.tolist()
        measured = dict(zip(order, self.psnr or (), strict=True))
        count = 0 if self.reconstruction is None else len(self.reconstruction.inputs)
        return [measured.get(number, math.nan) for number in range(count)]

    @property
    def one_gradient(self) -> bool:
        return hides_steps(self.observation)

    @property
    def standing(self) -> Standing:
        """Judge the result by its certificates, else by what it leaves beside its baselines."""
        found = self.reconstruction
        wrong = any(psnr < RECOVERED_PSNR for psnr in self.psnr_of_inputs)
        if found is not None and 0 < found.certified == len(found.inputs) and not wrong:
            return "certified"
        return standing_of(self.unexplained, [one.unexplained for one in self.baselines])

    @property
    def noise_like(self) -> bool:
        """Tell whether half of the recovered pictures or more look like noise."""
        found, space = self.reconstruction, self.observation.inputs
        if found is None or not space.smooth or found.inputs.dim() != 4:
            return False
        return float(grain(space.to_unit(found.inputs.detach().cpu()).clamp(0, 1)).median()) > NOISE_LIKE

    @property
    def outcome(self) -> Outcome:
        """Say in three answers what a result may be taken for; with the truth, by the limits of the default policy.

        Without the truth and without certificates, pictures must explain the update and not look like noise.
        """
        found, standing, policy = self.reconstruction, self.standing, Policy()
        if found is None:
            return "cannot say"
        if standing == "certified":
            return "looks recovered"
        if self.lift is not None and self.psnr is not None:
            pairs = zip(self.psnr, self.lift, strict=True)
            near = any(psnr >= policy.max_psnr and lift >= policy.min_lift for psnr, lift in pairs)
            return "looks recovered" if near else "probably not recovered"
        if found.certified:
            return "looks recovered"
        explains = standing == "stands out" and self.unexplained is not None and self.unexplained <= LOOKS_RIGHT
        if explains:
            open_ends = found.diagnosis is not None and found.diagnosis.outcome == "not identifiable"
            return "cannot say" if self.noise_like or open_ends else "looks recovered"
        return "probably not recovered" if standing == "no better" or self.noise_like else "cannot say"

    def metrics(self) -> dict[str, float]:
        """Return numbers that hold no inputs and no labels, of the example worst off; NaN where not measured."""
        guess, place = self.reconstruction, "captured" if self.origin is None else self.origin.place
        numbers = {
            "audited": 0.0 if guess is None else 1.0,
            "certified": math.nan if guess is None else float(self.certified),
            "unexplained": _number(self.unexplained),
            "unexplained_of_noise": _number(self.unexplained_of_noise),
        }
        if place == "server":
            certain = None if guess is None or "labels uncertain" in guess.flags else guess.labels
            numbers["labels_read"] = 0.0 if certain is None else float(len(certain))
        else:
            right = [bool(one) for one in self.label_correct or () if one is not None]
            numbers |= {
                "psnr": self.worst_off[0],
                "psnr_of_nothing": self.worst_off[1],
                "lift": max(self.lift, key=_or_least) if self.lift else math.nan,
                "labels_correct": sum(right) / len(right) if right else math.nan,
            }
        return {f"leakscope.{place}.{name}": value for name, value in numbers.items()}

    def describe(self) -> str:
        """Say in one line where it was taken, what was recovered, and what that stands beside."""
        return assessment_line(self)


def standing_of(left: float | None, baselines: Sequence[float | None]) -> Standing:
    """Compare what a result leaves of the update with what baselines leave.

    >>> [standing_of(left, [1.0, 0.9, None]) for left in (0.01, 0.7, 0.85, None)]
    ['stands out', 'somewhat better', 'no better', 'unknown']
    """
    least = min((value for value in baselines if value is not None), default=math.inf)
    if left is None or not math.isfinite(left) or not math.isfinite(least):
        return "unknown"
    if left > NO_BETTER * least:
        return "no better"
    return "stands out" if left < STANDS_OUT * least else "somewhat better"


def assess(
    observation: Observation,
    attack: Attack,
    truth: Truth | tuple[Tensor, Tensor | None] | None = None,
    controls: Collection[ControlName] = ("grey", "random", "noise"),
    *,
    seed: int = 0,
    device: Any = None,
    progress: Progress | None = None,
    run: Callable[[Observation], Reconstruction] | None = None,
    ruler: Ruler | None = None,
    explain: bool = True,
    thorough: bool = False,
    origin: Origin | None = None,
    notes: Sequence[str] = (),
) -> Assessment:
    """Attack the observation, then its ``controls``; measure them where the ``truth`` is given.

    ``run`` replaces the call of the attack. ``explain``: also compute what the result leaves of the update, the flag
    that follows, and the diagnosis (``thorough``: even where it takes minutes).
    """
    known = None if truth is None else Truth(*truth)
    ruler = Ruler(observation.inputs, observation.task) if ruler is None else ruler
    facts: dict[str, Any] = {"observation": observation, "attack": attack, "ruler": ruler, "origin": origin}
    attacked = run or (lambda seen: attack(seen, seed=seed, device=device, progress=progress))
    told = [*(() if origin is None else origin.notes), *notes]
    if (made := observation.made) is not None and made.sign == "wrong":
        told.append(f"the update points the wrong way: {made.sign_reason}")
    memory = PeakMemory()
    try:
        found = attacked(observation)
    except Refusal as error:
        return Assessment(**facts, refusal=error, truth=known, notes=tuple(told))
    finally:
        peak = memory.megabytes()  # its watch ends, also where the attack did not
    evaluation = None if known is None else ruler.compare(known, found.inputs, found.labels)
    told += found.notes
    left = by_truth = None
    if explain:
        left = left_by(observation, found.inputs, labels_of(observation, found), found.info.get("batch_order"))
        if left is not None and known is not None and known.y is not None:
            by_truth = left_by(observation, known.x, known.y, known.order())
        found = _flagged(found, observation, left, by_truth, known is not None and known.y is not None)
        found = dataclasses.replace(found, diagnosis=_diagnosed(observation, found, thorough))

    def again(seen: Observation) -> Reconstruction:
        return attack(seen, seed=seed, device=device, progress=progress)

    baselines = []
    for name in controls:
        draws = torch.Generator().manual_seed(derived_seed(seed, 0, "control"))  # none of them the attack's
        try:
            one = _baseline(name, observation, found, ruler, again, draws)
        except Refusal as error:  # which is an answer too: it takes noise for no update
            told.append(f"no control on {name}: {error}")
            continue
        if one is not None and known is not None:
            one = dataclasses.replace(one, evaluation=ruler.compare(known, one.inputs, one.labels))
        baselines += [] if one is None else [one]
    return Assessment(
        **facts,
        reconstruction=found,
        unexplained=left,
        unexplained_by_truth=by_truth,
        baselines=tuple(baselines),
        evaluation=evaluation,
        truth=known,
        notes=tuple(told),
        peak_memory_mb=peak,
    )


def left_by(observation: Observation, inputs: Tensor, labels: Tensor | None, order: Any = None) -> float | None:
    """Return what inputs, visited in ``order``, leave of the update; None where it cannot be computed."""
    if observation.has_rounds or labels is None or len(labels) != len(inputs) or not bool(torch.isfinite(inputs).all()):
        return None
    try:
        moved = observation.relax(inputs.detach().to(observation.device)).to(observation.dtype)
        left = unexplained(observation.relaxed(), moved, labels.to(observation.device), order=order)
    except Exception:  # noqa: BLE001 - any model and any task may come, and the result stands without it
        return None
    return left if math.isfinite(left) else None


def labels_of(observation: Observation, result: Reconstruction) -> Tensor | None:
    """Return the labels that an attack has, or those that the update tells; None where nothing tells them."""
    if result.labels is not None or observation.has_rounds:
        return result.labels
    try:
        return recover_labels(observation).labels
    except ValueError:  # no head to read, or a number of examples that is not known
        return None


def _flagged(
    result: Reconstruction, observation: Observation, left: float | None, by_truth: float | None, judged: bool
) -> Reconstruction:
    """Flag a result that leaves more of the update than the truth, or than known noise without it."""
    # Where the truth is there and its side cannot be computed, nothing tells a defence from a failed search.
    if left is None or (judged and by_truth is None) or FLAG in result.flags:
        return result
    least = noise_share(observation) if by_truth is None else by_truth
    entries = sum(value.numel() for value in observation.message.update.values())
    found = (FLAG,) if is_unexplained(left, least, entries) else ()
    return dataclasses.replace(result, flags=(*result.flags, *found))


def _diagnosed(observation: Observation, result: Reconstruction, thorough: bool) -> Diagnosis:
    try:
        return diagnose(observation, result, thorough=thorough)
    except Exception as error:  # noqa: BLE001 - any model may come, and the attack's result stands without it
        reason = f"the diagnosis failed with {type(error).__name__}: {first_line(str(error))}"
        return Diagnosis(outcome="undecided", reason=reason, unknowns=result.inputs.numel())


def _baseline(
    name: ControlName,
    observation: Observation,
    found: Reconstruction,
    ruler: Ruler,
    attacked: Callable[[Observation], Reconstruction],
    draws: torch.Generator,
) -> Baseline | None:
    """Return inputs that know nothing of the client, with the attack's labels; None without other examples."""
    if name == "noise":
        blind = noise_of_equal_norm(observation, draws)
        drawn = attacked(blind)
        left = left_by(blind, drawn.inputs, labels_of(blind, drawn), drawn.info.get("batch_order"))
        return Baseline(name, drawn.inputs, left, drawn.labels)
    like, labels, others = found.inputs.cpu(), labels_of(observation, found), ruler.candidates
    units = {
        "grey": lambda: [torch.full_like(like, 0.5)],
        "random": lambda: [torch.rand(like.shape, generator=draws).to(like) for _ in range(BLIND_DRAWS)],
        "others": lambda: [] if others is None else [others.mean(0, keepdim=True).expand_as(like)],
    }[name]()
    inputs = [observation.inputs.from_unit(unit) for unit in units]
    tried = [Baseline(name, one, left_by(observation, one, labels)) for one in inputs]
    return min(tried, key=lambda one: math.inf if one.unexplained is None else one.unexplained, default=None)


def _column(evaluation: Evaluation | None, name: str) -> tuple[Any, ...] | None:
    return None if evaluation is None else tuple(row[name] for row in evaluation.rows)


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else value
