"""Opacus: audit what leaves a DP-SGD step, beside the epsilon and delta that were paid for it.

    audit = StepAudit(model, optimizer, input_shape=(3, 32, 32), num_classes=10, value_range=ValueRange())
    for x, y in loader:
        audit.batch(x, y)                        # stays here, to measure with
        ...; optimizer.step()
    print(audit.report(accountant=privacy_engine.accountant, delta=1e-5).describe())

What is observed is the gradient that the step follows: each example's clipped to C, Gaussian noise of standard
deviation sigma C on their sum, divided by the number of examples. The adversary knows sigma, C and the number of
examples, which Poisson sampling would hide. The hook that was there, the accountant's, runs first; nothing is drawn
from any generator and no gradient is touched, so weights and accountant are the same to the last bit with and without.
"""

import copy
import math
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.audit.assess import Assessment
from leakscope.audit.progress import Tell
from leakscope.capture import CaptureFacts, observe_captured
from leakscope.capture.recordings import Origin, Truth, save_recording
from leakscope.contracts.attack import Attack
from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import refuse, whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import BATCHNORM
from leakscope.contracts.task import Classification, Task
from leakscope.integrations import load_library
from leakscope.integrations.leakage import QUICK, RecordedAudit, measure_all
from leakscope.report.recorded import recorded_words

_opacus = load_library("opacus", "opacus")
_optimizers = load_library("opacus.optimizers", "opacus")
_validators = load_library("opacus.validators", "opacus")

#: Optimisers that clip each example's whole gradient to one norm, and add one noise: what a channel can say.
_FLAT = (_optimizers.DPOptimizer, _optimizers.DPOptimizerFastGradientClipping)
#: An epsilon above this is told as a bound.
NO_PROMISE = 100.0
EMPTY = "an empty batch, as Poisson sampling draws them: only noise left, nothing to recover"
UNCOUNTED = "a batch in parts, and batch(x, y) was not called: its number of examples is not known"
OTHER_BATCH = "batch(x, y) told {} examples, the step was of {}; call it once for each batch that goes backward"
REPLACED = (
    "the optimiser's step hook is no longer the audit's: another was attached after it, and no step is seen. Make the "
    "StepAudit after the PrivacyEngine has made the optimiser private."
)
_HOOKS = ("hooks", "hooks_with_kwargs", "hooks_always_called")


@dataclass(frozen=True, eq=False)
class DPReport:
    """Report leakage beside the promise.

    ``epsilon`` at ``delta`` is the accountant's word on all steps so far. ``problems`` say in Opacus' own words why the
    model cannot be private; then epsilon does not hold. ``skipped`` are steps that were not recorded, with the reason.
    """

    leakage: tuple[Assessment, ...]
    steps: int
    epsilon: float | None
    delta: float | None
    noise_multiplier: float
    clip: float
    problems: tuple[str, ...]
    skipped: Mapping[int, str]

    @property
    def worst(self) -> Assessment | None:
        """Return the step of which an example was recovered furthest above zero information."""
        measured = [one for one in self.leakage if one.lift]
        return max(measured, key=lambda one: max(one.lift or (-math.inf,)), default=None)

    @property
    def identified(self) -> tuple[int, int]:
        """Count examples whose reconstruction points at them among all others, and of how many."""
        known = [one for leakage in self.leakage for one in leakage.identified or () if one is not None]
        return sum(map(bool, known)), len(known)

    @property
    def certified(self) -> int:
        return sum(one.certified for one in self.leakage)

    @property
    def audit(self) -> RecordedAudit:
        """Return the assessments with their verdict; ``audit.report("report.html")`` writes a page."""
        return RecordedAudit(self.leakage)

    def describe(self) -> str:
        """Tell the verdict, the promise, what was recovered in spite of it, and what was left out; one line each."""
        promise = "no accountant" if self.epsilon is None else f"epsilon {self.epsilon:.3g} at delta {self.delta:g}"
        lines = recorded_words(self.audit)
        lines += [f"{self.steps} steps, noise multiplier {self.noise_multiplier:g}, clip {self.clip:g}: {promise}"]
        lines += [f"The promise does not hold. {problem}" for problem in self.problems]
        lines += [one.describe() for one in self.leakage]
        right, known = self.identified
        lines += [f"{right} of {known} examples identified among the others"] if known else []
        lines += [f"{self.certified} examples certified"] if self.certified else []
        return "\n".join([*lines, *(f"step {n} not recorded: {why}" for n, why in self.skipped.items())])


class StepAudit:
    """Record every nth step of a DP optimiser, in memory or in a ``folder``; attack them when asked for a report.

    ``model`` is what the optimiser trains, wrapped by Opacus or not. ``task`` is what it minimises.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        value_range: ValueRange | None = None,
        every: int = 1,
        folder: str | Path | None = None,
        task: Task | None = None,
    ) -> None:
        refuse("not a valid audit of DP-SGD", [*whole(every=every, num_classes=num_classes), *_problems_of(optimizer)])
        self.optimizer, self.every = optimizer, every
        self.folder = None if folder is None else Path(folder)
        self._shape, self._classes, self._range = tuple(input_shape), num_classes, value_range
        self._task = Classification() if task is None else task
        self._inner: nn.Module = getattr(model, "_module", model)
        self._skeleton = plain_copy(self._inner)
        self._names = self._trained_names()
        self.problems: tuple[str, ...] = ()
        self._warn(why_not_private(self._inner))
        self.steps = 0
        self.skipped: dict[int, str] = {}
        self._recorded: list[tuple[Observation, Origin, Truth | None]] = []
        self._pending: list[Truth] = []
        self._previous = optimizer.step_hook
        self._hook = self._after_noise
        optimizer.attach_step_hook(self._hook)

    def batch(self, x: Tensor, y: Tensor) -> None:
        """Tell the examples of the batch that goes through the model next; of a batch in parts, each part."""
        if self.optimizer.step_hook is not self._hook:
            raise RuntimeError(REPLACED)
        self._pending.append((x.detach(), y.detach()))

    def detach(self) -> None:
        if self.optimizer.step_hook is self._hook:
            self.optimizer.step_hook = self._previous

    def report(
        self,
        attack: str | Attack = QUICK,
        *,
        accountant: Any = None,
        delta: float | None = None,
        others: Tensor | None = None,
        controls: bool = True,
        seed: int = 0,
        progress: Tell | bool | None = None,
    ) -> DPReport:
        """Attack what was recorded; ``others`` are further examples of the same kind, for identification.

        ``progress`` is as in ``leakscope.audit``.
        """
        if not self._recorded:
            reasons = "; ".join(sorted(set(self.skipped.values()))) or REPLACED
            raise UserError(f"no step was recorded of {self.steps}: {reasons}")
        if (accountant is None) != (delta is None):
            raise UserError("accountant, delta: expected both or none, for an epsilon is one at a delta")
        facts: dict[str, Any] = {"others": others, "controls": controls, "seed": seed}
        found = measure_all(self._recorded, len(self._recorded), attack, progress, **facts)
        return DPReport(
            leakage=tuple(found),
            steps=self.steps,
            epsilon=None if accountant is None or delta is None else epsilon_of(accountant, delta),
            delta=delta,
            noise_multiplier=float(self.optimizer.noise_multiplier),
            clip=float(self.optimizer.max_grad_norm),
            problems=self.problems,
            skipped=dict(self.skipped),
        )

    @property
    def observations(self) -> list[Observation]:
        return [seen for seen, _, _ in self._recorded]

    def _warn(self, problems: Sequence[str]) -> None:
        for problem in problems:
            if problem not in self.problems:
                self.problems = (*self.problems, problem)
                warnings.warn(f"this model cannot be private: {problem}", stacklevel=3)

    def _trained_names(self) -> dict[int, str]:
        managed = {id(parameter) for parameter in self.optimizer.params}
        names = {id(parameter): name for name, parameter in self._inner.named_parameters() if id(parameter) in managed}
        if len(names) != len(managed):
            raise UserError(
                f"model: expected the one that the optimiser trains; {len(managed) - len(names)} of its "
                f"{len(managed)} parameters are not in it"
            )
        for name, parameter in self._skeleton.named_parameters():
            parameter.requires_grad_(name in names.values())
        return names

    def _after_noise(self, optimizer: Any) -> None:
        """Observe in the step hook: the gradient is clipped and noised, the weights have not moved yet."""
        if self._previous is not None:
            self._previous(optimizer)
        self.steps += 1
        parts, self._pending = self._pending, []
        if (self.steps - 1) % self.every:
            return
        truth = (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) if parts else None
        examples, why = self._count(parts)
        if examples is None:
            self.skipped[self.steps] = why
            return
        self._warn(passed_over(self._inner))
        observation = self._observe(examples)
        origin = Origin(place="dp_step", client="self", number=self.steps, library=f"opacus {_opacus.__version__}")
        if truth is not None:
            truth = truth[0].cpu().clone(), truth[1].cpu().clone()
        self._recorded.append((observation, origin, truth))
        if self.folder is not None:
            save_recording(self.folder, observation, origin, truth)

    def _count(self, parts: Sequence[Truth]) -> tuple[int | None, str]:
        told = sum(len(x) for x, _ in parts) if parts else None
        in_parts = bool(getattr(self.optimizer, "_is_last_step_skipped", False))
        samples = [p.grad_sample for p in self.optimizer.params if isinstance(getattr(p, "grad_sample", None), Tensor)]
        seen = len(samples[0]) if samples else None
        if told is None and (in_parts or seen is None):
            return None, UNCOUNTED
        if told is not None and seen is not None and not (seen <= told if in_parts else seen == told):
            return None, OTHER_BATCH.format(told, seen)
        count = seen if told is None else told
        return (count, "") if count else (None, EMPTY)

    def _observe(self, examples: int) -> Observation:
        optimizer = self.optimizer
        # In units of the mean over the batch: the optimiser divides by the expected number of examples instead.
        scale = 1 / examples
        if optimizer.loss_reduction == "mean":
            scale = optimizer.expected_batch_size * optimizer.accumulated_iterations / examples
        update = {self._names[id(p)]: p.grad.detach().cpu() * scale for p in optimizer.params}
        model = copy.deepcopy(self._skeleton)
        model.load_state_dict({name: value.detach().cpu() for name, value in self._inner.state_dict().items()})
        random = any(isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0 for one in model.modules())
        clip = float(optimizer.max_grad_norm)
        noise = float(optimizer.noise_multiplier) * clip / examples
        facts = CaptureFacts(
            input_shape=self._shape,
            num_classes=self._classes,
            num_examples=examples,
            knowledge=Knowledge.adaptive_server,
            value_range=self._range,
            channel=Channel(clip=clip, clip_per="example", noise=noise, inexact=random),
            task=self._task,
            batchnorm="train" if any(_uses_batch(one) for one in self._inner.modules()) else "eval",
            running=True,
            made_by="leakscope.integrations.opacus",
        )
        return observe_captured(update, "gradient", None, model, facts)


def _uses_batch(module: nn.Module) -> bool:
    """Check for a BatchNorm layer that takes the statistics of the batch; a frozen one in eval mode does not.

    >>> [_uses_batch(layer) for layer in (nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval(), nn.Linear(2, 2))]
    [True, False, False]
    """
    return isinstance(module, BATCHNORM) and (module.training or module.running_mean is None)


def why_not_private(model: nn.Module) -> list[str]:
    """Return why Opacus' validator says that a model cannot be trained with differential privacy, in its words.

    >>> [words.split(".")[0] for words in why_not_private(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))]
    ['BatchNorm cannot support training with differential privacy']
    >>> why_not_private(nn.Linear(2, 2))
    []
    """
    # It refuses models in eval mode, which is no reason of privacy; the model itself keeps its mode.
    problems = _validators.ModuleValidator.validate(plain_copy(model).train(), strict=False)
    return list(dict.fromkeys([*(str(problem) for problem in problems), *passed_over(model)]))


def passed_over(model: nn.Module) -> list[str]:
    """Return BatchNorm layers that mix the examples of a batch and have no trainable parameters, which Opacus passes
    over.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    >>> [words.split(": ")[0] for words in passed_over(net)], passed_over(net.eval())
    (["1 has no trainable parameters, so Opacus' validator passes it over"], [])
    """
    lines = []
    for name, module in model.named_modules():
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if _uses_batch(module) and not trained:
            validator = _validators.ModuleValidator.VALIDATORS.get(type(module))
            words = [] if validator is None else [str(problem) for problem in validator(module)]
            reason = " ".join(words) or f"{type(module).__name__} mixes the examples of a batch"
            lines.append(f"{name} has no trainable parameters, so Opacus' validator passes it over: {reason}")
    return lines


def epsilon_of(accountant: Any, delta: float) -> float:
    """Return what the accountant says was spent; infinite where a step had no noise.

    Opacus' default accountant keeps a grid that grows with epsilon, of tens of gigabytes where there is next to no
    noise. Above :data:`NO_PROMISE` the Renyi accountant's bound stands for it.
    """
    history = list(accountant.history)
    if any(noise <= 0 for noise, *_ in history):
        return math.inf
    if not history:
        return 0.0
    bound = load_library("opacus.accountants", "opacus").RDPAccountant()
    bound.history = history
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other orders might give a smaller bound
        most = float(bound.get_epsilon(delta))
    return most if most > NO_PROMISE else float(accountant.get_epsilon(delta))


def plain_copy(model: nn.Module) -> nn.Module:
    """Copy the model to the CPU without the hooks and records of others, which would copy whatever they hold."""
    left_out: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith(_HOOKS) and isinstance(value, dict):
                left_out[id(value)] = OrderedDict()
            elif name in ("autograd_grad_sample_hooks", "activations"):
                left_out[id(value)] = []
    modes = [module.training for module in model.modules()]
    clone = copy.deepcopy(model, left_out).cpu()
    for module, mode in zip(clone.modules(), modes, strict=True):
        module.training = mode
        vars(module).pop("autograd_grad_sample_hooks", None)
        vars(module).pop("activations", None)
    return clone


def _problems_of(optimizer: Any) -> list[str]:
    if type(optimizer) in _FLAT:
        return []
    if isinstance(optimizer, _optimizers.DPOptimizer):
        return [
            f"optimizer: {type(optimizer).__name__} clips or adds noise otherwise than by one norm and one level, "
            "which an attack cannot be told; expected DPOptimizer or DPOptimizerFastGradientClipping"
        ]
    return [f"optimizer: expected Opacus' DPOptimizer, got {type(optimizer).__name__}; call make_private first"]
