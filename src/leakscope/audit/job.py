"""One job from start to row: make the client's update, attack it, and only then compare with the truth."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from leakscope.attacks import MissingKnowledge, NotApplicable, Reconstruction
from leakscope.attacks.base import with_diagnosis
from leakscope.audit.parts import Part, is_vertical
from leakscope.audit.plan import Job, derived_seed, describe
from leakscope.audit.rounds import describe_cost, describe_rounds
from leakscope.audit.setup import Setup, observe
from leakscope.audit.store import Row
from leakscope.audit.theory import describe_limits
from leakscope.audit.trajectory import describe_update
from leakscope.federation import Vertical
from leakscope.metrics import evaluate
from leakscope.observation import Observation

TRACEBACK_LINES = 12

Advance = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a job; plain values only, so that it passes between processes."""

    status: Literal["done", "failed", "refused"]
    result: dict[str, Any] | None = None
    error: str | None = None
    seconds: float = 0.0
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)
    history: dict[str, Any] | None = field(default=None, repr=False)

    def row(self, setup: Setup, job: Job) -> Row:
        """The row of the store."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        told = describe(setup, job)
        return Row(job.key, job.position, self.status, told, self.result, self.error, self.seconds, now)


def run_job(setup: Setup, job: Job, progress: Advance | None = None) -> Outcome:
    """Run one job. Whatever goes wrong becomes an outcome; only an interrupt passes through."""
    started = time.perf_counter()
    memory = PeakMemory()
    observation = None
    try:
        observation = _observe(setup, job)
        found, result, tensors, history = _measure(setup, job, observation, progress)
    except (MissingKnowledge, NotApplicable) as error:
        seconds = time.perf_counter() - started
        told = _told_once(setup, job, observation)
        return Outcome("refused", told or None, f"{type(error).__name__}: {error}", seconds)
    except Exception as error:  # noqa: BLE001 - one broken job must not cost the others; the row tells all
        seconds = time.perf_counter() - started
        return Outcome("failed", error=failure_text(error), seconds=seconds)
    result["peak_memory_mb"] = memory.megabytes()
    seconds = time.perf_counter() - started
    # After time and memory are read, for it is no part of the attack.
    if not job.control and all(message.kind == "weight_delta" for message in observation.messages):
        result["update"] = _describe_update(setup, job, observation)
    if not job.control:
        why = with_diagnosis(observation, found).diagnosis
        result["diagnosis"] = None if why is None else plain(dataclasses.asdict(why))
    result.update(_told_once(setup, job, observation))
    return Outcome("done", result, None, seconds, tensors, history)


def failure_text(error: BaseException) -> str:
    """Type, message, and the last lines of the traceback."""
    trace = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join([f"{type(error).__name__}: {error}", *trace[-TRACEBACK_LINES:]])


def null_update(observation: Observation, generator: torch.Generator) -> Observation:
    """The observation with Gaussian noise of the same norm, tensor by tensor, in place of the update.

    All else the adversary knows stays, so what an attack still recovers did not come from the update.
    """
    messages = []
    for message in observation.messages:
        update = {}
        for name, value in message.update.items():
            # Drawn on the CPU in double, so that the noise is the same for every device and precision.
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            length = float(torch.linalg.vector_norm(noise))
            scale = float(torch.linalg.vector_norm(value.double())) / length if length else 0.0
            update[name] = (noise * scale).to(value)
        messages.append(dataclasses.replace(message, update=update))
    return dataclasses.replace(observation, messages=tuple(messages))


def _observe(setup: Setup, job: Job) -> Observation:
    """What the adversary of this job sees: noise in place of the update if it is a control."""
    spec = setup.spec
    x, y = setup.batch(job.batch)
    sent = _prepared(setup, spec.attacks[job.attack].instance)
    observation: Observation = observe(sent, spec.protocols[job.protocol], _defense(setup, job), x, y, _client(job))
    if job.control:
        noise = torch.Generator().manual_seed(derived_seed(job.seed, job.batch, "control"))
        observation = null_update(observation, noise)
    return observation


def _defense(setup: Setup, job: Job) -> Part:
    return Part(name="none") if job.defense is None else setup.spec.defenses[job.defense]


def _client(job: Job) -> torch.Generator:
    """The client's draws, from the beginning."""
    return torch.Generator().manual_seed(derived_seed(job.seed, job.batch, "client"))


def _describe_update(setup: Setup, job: Job, observation: Observation) -> dict[str, Any]:
    protocol, defense = setup.spec.protocols[job.protocol].instance, _defense(setup, job).instance
    x, y = setup.batch(job.batch)
    # The observation's model is the one the client was sent.
    return describe_update(protocol, observation.model, x, y, defense, _client(job), observation)


def _told_once(setup: Setup, job: Job, observation: Observation | None) -> dict[str, Any]:
    """What theory says of this setting, and what its defence costs; with the first job on its first client only."""
    first = (job.attack, job.batch, job.seed) == (0, 0, setup.spec.seeds[0]) and not job.control
    if not first or observation is None or any(message.kind != "gradient" for message in observation.messages):
        return {}
    protocol, defense = setup.spec.protocols[job.protocol].instance, _defense(setup, job).instance
    x, y = setup.batch(job.batch)
    if not isinstance(protocol, Vertical):
        return {"limits": describe_limits(observation, x, y, defense)}
    told = {"limits": describe_rounds(protocol, observation, x, y, defense)}
    if protocol.lr > 0:
        told["cost"] = describe_cost(protocol, observation.model, x, y, defense, _client(job))
    return told


def _measure(
    setup: Setup, job: Job, observation: Observation, progress: Advance | None
) -> tuple[Reconstruction, dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    spec = setup.spec
    attack = spec.attacks[job.attack].instance
    if getattr(attack, "reads_rounds", False) and not _has_rounds(setup, job, observation):
        # That is for the protocol to give, so its lack is no want of knowledge.
        raise NotApplicable(f"{type(attack).__name__} reads rounds on announced batches, and this protocol has none")
    x, y = setup.batch(job.batch)
    box = setup.data.value_range
    originals = box.to_unit(x).float().clamp(0, 1)
    dtype = None if spec.dtype is None else getattr(torch, spec.dtype)
    found = attack(
        # A model of its own, so that an attack that changes it spoils nothing that is computed afterwards.
        dataclasses.replace(observation),
        seed=derived_seed(job.seed, job.batch, "attack"),
        # What is there already is not copied there: hundreds of rounds are large.
        device=None if torch.device(spec.device) == observation.device else spec.device,
        dtype=None if dtype == observation.dtype else dtype,
        progress=progress,
        diagnose=False,
    )
    guesses = box.to_unit(found.inputs.detach().cpu().to(x.dtype)).float()
    labels = None if found.labels is None else found.labels.detach().cpu()
    measured = evaluate(originals, y, guesses, labels, candidates_unit=setup.candidates, lpips=setup.lpips)
    scores = found.scores.detach().cpu().flatten().tolist()
    examples = []
    for place, (index, numbers) in enumerate(zip(setup.batches[job.batch], measured.rows, strict=True)):
        source = int(measured.order[place])
        score = scores[source] if 0 <= source < len(scores) else None
        examples.append({"index": index, **plain(numbers), "score": plain(score)})
    result = {
        "examples": examples,
        "reasons": plain(dict(measured.reasons)),
        "flags": list(found.flags),
        "notes": list(found.notes),
        "info": plain({"device": spec.device, "threads": torch.get_num_threads(), **found.info}),
    }
    tensors = {}
    if setup.pictures:
        # Where nothing was reconstructed there is still a place in the file, and it is black.
        shown = measured.matched.detach().float().nan_to_num(nan=0.0).clamp(0, 1)
        tensors = {"originals": originals, "reconstructions": shown}
    return found, result, tensors, plain(dict(found.history))


def _has_rounds(setup: Setup, job: Job, observation: Observation) -> bool:
    several = len(observation.messages) > 1 or observation.messages[0].indices is not None
    return several or is_vertical(setup.spec.protocols[job.protocol])


def _prepared(setup: Setup, attack: Any) -> Setup:
    """A server that may choose the model sends out the one its attack asks for."""
    known = setup.knowledge
    if not (known.choose_weights or known.choose_structure) or not hasattr(attack, "prepare"):
        return setup
    if not all(getattr(known, name, True) for name in getattr(attack, "requires", ())):
        return setup  # the attack itself will say what it lacks
    return dataclasses.replace(setup, model=attack.prepare(copy.deepcopy(setup.model)))


def plain(value: Any) -> Any:
    """``value`` as JSON values; NaN and infinity, which JSON lacks, are null.

    >>> plain({"psnr": float("nan"), "curve": (1, torch.tensor(2.5))})
    {'psnr': None, 'curve': [1, 2.5]}
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(value.item()) if hasattr(value, "item") else str(value)


class PeakMemory:
    """How far memory rose above where it stood when this was made, in megabytes."""

    def __init__(self) -> None:
        self._exact = _reset_high_water()
        self._start = _proc_status("VmRSS") if self._exact else _maximum_resident()

    def megabytes(self) -> float | None:
        """The rise, or None if the system does not tell: an older, higher peak hides it."""
        now = _proc_status("VmHWM") if self._exact else _maximum_resident()
        if now is None or self._start is None:
            return None
        rise = now - self._start
        return round(rise, 1) if rise > 0 or self._exact else None


def _reset_high_water() -> bool:
    """Make Linux forget the peak of earlier jobs; elsewhere only the peak of the whole process is known."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return _proc_status("VmHWM") is not None


def _proc_status(name: str) -> float | None:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    return None


def _maximum_resident() -> float | None:
    try:
        import resource
    except ImportError:  # not on every system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024) if peak else None
