"""Do one job: make the client's update, attack it, and only then compare with the truth."""

import copy
import dataclasses
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leakscope.attacks.shared_work import SharedWork
from leakscope.audit.assess import Ruler, Truth, assess
from leakscope.audit.controls import CONTROLS, Case, Control
from leakscope.audit.findings import FINDINGS, Subject
from leakscope.audit.keys import derived_seed, is_training
from leakscope.audit.memory import Updates
from leakscope.audit.parts import part_at
from leakscope.audit.plan import Job, client_of, describe
from leakscope.audit.setup import Setup, observe
from leakscope.audit.utility import describe_utility
from leakscope.contracts.attack import Attack
from leakscope.contracts.certificate import Certificate
from leakscope.contracts.errors import NotApplicable, Refusal
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import Protocol
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.matching.orders import Order
from leakscope.metrics import Evaluation
from leakscope.results.records import AttemptRecord, FindingRow, Row, Status, first_line, plain

TRACEBACK_LINES = 12

Advance = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a job, in plain values that pass between processes; seconds include shared work."""

    status: Status
    result: dict[str, Any] | None = None
    error: str | None = None
    seconds: float = 0.0
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)
    history: dict[str, Any] | None = field(default=None, repr=False)

    def row(self, setup: Setup, job: Job) -> Row:
        record = None if self.result is None else AttemptRecord.read(self.result)
        facts = describe(setup, job)
        return Row(job.key, job.position, self.status, facts, record, self.error, self.seconds, _now(), raw=self.result)

    def finding(self, setup: Setup, job: Job) -> FindingRow:
        facts = describe(setup, job)
        return FindingRow(
            *(job.key, job.position, job.finding or "", self.status),
            *(facts.protocol, facts.defense, job.batch, job.seed),
            *(self.result or {}, self.error, self.seconds, _now()),
        )


class Bench:
    """Do the jobs of one process, which share updates of clients and work that attacks have in common."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._shared = SharedWork()
        self._updates = Updates()

    def run(self, job: Job, progress: Advance | None = None) -> Outcome:
        """Do one job; turn whatever goes wrong, except an interrupt, into an outcome."""
        started, recalled = time.perf_counter(), self._shared.recalled_seconds
        try:
            outcome = self._do(job, progress)
        except Refusal as error:
            outcome = Outcome("refused", error=f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - one broken job must not cost the others; the row tells all
            outcome = Outcome("failed", error=failure_text(error))
        recalled = self._shared.recalled_seconds - recalled
        return dataclasses.replace(outcome, seconds=time.perf_counter() - started + recalled)

    def _do(self, job: Job, progress: Advance | None) -> Outcome:
        if job.finding is not None:
            return self._training(job, progress) if is_training(job.finding) else self._finding(job)
        control = None if job.control is None else CONTROLS[job.control]
        if control is not None and control.guess is not None:
            return self._guess(job, control.guess)
        return self._attempt(job, progress)

    def observe(self, job: Job) -> Observation:
        """Return what the client of this job sends, made once for all jobs on it."""
        return self._updates.get(client_of(self._setup, job), lambda: self._make_update(job))

    def _make_update(
        self,
        job: Job,
        examples: tuple[Tensor, Tensor] | None = None,
        *,
        protocol: Protocol | None = None,
        knowledge: Knowledge | None = None,
    ) -> Observation:
        """Make the update of the job's client; the other arguments override what the job says."""
        setup, part = self._setup, self._setup.spec.protocols[job.protocol]
        x, y = setup.batch(job.batch) if examples is None else examples
        sent = setup if job.attack is None else _prepared(setup, setup.spec.attacks[job.attack].instance)
        if knowledge is not None:
            sent = dataclasses.replace(sent, knowledge=knowledge)
        if protocol is not None:
            part = part.model_copy(update={"instance": protocol})
        made: Observation = observe(sent, part, part_at(setup.spec.defenses, job.defense), x, y, client_draws(job))
        return made

    def _knowing(self, job: Job, what: str, **granted: Any) -> Observation:
        """Return the update as an adversary sees it who also knows what is ``granted``."""
        knowledge, whose = dataclasses.replace(self._setup.knowledge, **granted), client_of(self._setup, job)
        return self._updates.get((*whose, what), lambda: self._make_update(job, knowledge=knowledge))

    def _attempt(self, job: Job, progress: Advance | None) -> Outcome:
        setup = self._setup
        assert job.attack is not None
        attack: Attack = setup.spec.attacks[job.attack].instance
        if attack.reads_rounds and not setup.spec.protocols[job.protocol].instance.sends_rounds:
            # That is for the protocol to give, so its lack is no want of knowledge.
            raise NotApplicable(f"{type(attack).__name__} reads rounds on announced batches; this protocol has none")
        real = job.control is None
        observation = self.observe(job) if job.control is None else self._control(job, CONTROLS[job.control])
        found = assess(
            *(observation, attack, self._truth(job, observation), ()),
            run=lambda seen: self._attack(job, attack, seen, progress),
            ruler=self._ruler,
            explain=real,
        )
        if found.refusal is not None:
            raise found.refusal
        assert found.reconstruction is not None
        assert found.evaluation is not None
        result = {
            **_result(setup, job, found.reconstruction, found.evaluation),
            "adaptive": attack.knows_defense(observation),
            "chose_model": attack.chooses_model,
            "peak_memory_mb": found.peak_memory_mb,
            "unexplained": plain(found.unexplained),
            "unexplained_by_truth": plain(found.unexplained_by_truth),
        }
        if real and found.reconstruction.diagnosis is not None:
            result["diagnosis"] = plain(dataclasses.asdict(found.reconstruction.diagnosis))
        # An attack that names no labels has no wrong ones.
        right = all(row.get("label_correct") in (True, None) for row in found.evaluation.rows)
        if real and "labels uncertain" in found.reconstruction.flags and not right:
            result |= self._with_labels(job, attack, progress, found.reconstruction.notes)
        pictures = self._pictures(job, found.evaluation)
        return Outcome("done", result, tensors=pictures, history=plain(dict(found.reconstruction.history)))

    @property
    def _ruler(self) -> Ruler:
        setup = self._setup
        return Ruler(setup.data.inputs, setup.spec.task.instance, setup.candidates, setup.lpips)

    def _truth(self, job: Job, observation: Observation) -> Truth:
        """Return the client's examples, of which a control may hold the first only, and its own visiting order."""
        x, y = self._setup.batch(job.batch)
        count = len(x) if job.control is None else observation.num_examples or len(x)
        recipe = dict.fromkeys(("local_epochs", "batch_size", "learning_rate", "batch_order"), True)

        def order() -> Order | None:
            weights = observation.message.kind == "weight_delta"
            return self._knowing(job, "with order", **recipe).training.batch_order if weights else None

        return Truth(x[:count], y[:count], order)

    def _with_labels(
        self, job: Job, attack: Attack, progress: Advance | None, notes: tuple[str, ...]
    ) -> dict[str, Any]:
        """Attack once more with the labels given: an adversary may guess them, so a wrong guess is no protection."""
        try:
            observation = self._knowing(job, "with labels", labels="yes")
            found = self._attack(job, attack, observation, progress)
            measured = self._ruler.compare(self._truth(job, observation), found.inputs, found.labels)
        except Exception as error:  # noqa: BLE001 - what was found without the labels must not be lost
            why = f"{type(error).__name__}: {first_line(str(error))}"
            return {"notes": [*notes, f"run once more with the right labels, the attack failed: {why}"]}
        return {"given_labels": _result(self._setup, job, found, measured)["examples"]}

    def _guess(self, job: Job, guess: Callable[[Case], Tensor]) -> Outcome:
        case = self._case(job)
        measured = self._ruler.measure(Truth(case.x, case.y), guess(case), None)
        examples = _examples(self._setup, job, measured, [])
        return Outcome("done", {"examples": examples, "reasons": plain(measured.reasons)})

    def _control(self, job: Job, control: Control) -> Observation:
        make = control.observe
        assert make is not None
        return self._updates.get((*client_of(self._setup, job), control.name), lambda: make(self._case(job)))

    def _case(self, job: Job) -> Case:
        setup = self._setup
        x, y = setup.batch(job.batch)
        return Case(
            *(setup.spec.protocols[job.protocol].instance, setup.knowledge, x, y),
            originals=self._ruler.originals(x),
            held_out=setup.held_out(job.batch),
            observation=lambda: self.observe(job),
            observe=partial(self._make_update, job),
            others=lambda labels: setup.others(job.batch, labels, derived_seed(job.seed, job.batch, "others")),
            generator=torch.Generator().manual_seed(derived_seed(job.seed, job.batch, "control")),
        )

    def _attack(self, job: Job, attack: Attack, observation: Observation, progress: Advance | None) -> Reconstruction:
        spec = self._setup.spec
        dtype = None if spec.dtype is None else getattr(torch, spec.dtype)
        recalled = self._shared.recalled_seconds
        # Whoever sends out a model of its own may have changed its code, which no comparison of models sees.
        shared = None if attack.chooses_model else self._shared
        found = attack(
            # A model of its own, so that an attack that changes it spoils nothing that is computed afterwards.
            dataclasses.replace(observation, shared=shared),
            seed=derived_seed(job.seed, job.batch, "attack"),
            # What is there already is not copied there: hundreds of rounds are large.
            device=None if torch.device(spec.device) == observation.device else spec.device,
            dtype=None if dtype == observation.dtype else dtype,
            progress=progress,
        )
        seconds = found.info["seconds"] + self._shared.recalled_seconds - recalled
        return dataclasses.replace(found, info={**found.info, "seconds": seconds})

    def _pictures(self, job: Job, measured: Evaluation) -> dict[str, Tensor]:
        if not self._setup.pictures:
            return {}
        # Where nothing was reconstructed there is still a place in the file, and it is black.
        shown = measured.matched.detach().float().nan_to_num(nan=0.0).clamp(0, 1)
        x, _ = self._setup.batch(job.batch)
        return {"originals": self._ruler.originals(x)[: len(shown)], "reconstructions": shown}

    def _finding(self, job: Job) -> Outcome:
        setup = self._setup
        x, y = setup.batch(job.batch)
        observation = self.observe(job)
        subject = Subject(
            protocol=setup.spec.protocols[job.protocol].instance,
            defense=part_at(setup.spec.defenses, job.defense).instance,
            task=setup.spec.task.instance,
            observation=observation.relaxed(),
            x=observation.relax(x),
            y=y,
            draws=lambda: client_draws(job),
        )
        tell = FINDINGS[job.finding or ""].tell
        assert tell is not None
        return Outcome("done", plain(tell(subject)))

    def _training(self, job: Job, progress: Advance | None) -> Outcome:
        setup, spec = self._setup, self._setup.spec
        assert setup.course is not None
        protocol, defense = spec.protocols[job.protocol].instance, part_at(spec.defenses, job.defense).instance
        found = describe_utility(setup.course, protocol, defense, spec.task.instance, job.seed, progress)
        return Outcome("done", plain(found))


def client_draws(job: Job) -> torch.Generator:
    return torch.Generator().manual_seed(derived_seed(job.seed, job.batch, "client"))


def failure_text(error: BaseException) -> str:
    trace = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join([f"{type(error).__name__}: {error}", *trace[-TRACEBACK_LINES:]])


def _prepared(setup: Setup, attack: Attack) -> Setup:
    """Let a server that may choose the model send out the one its attack asks for."""
    knowledge = setup.knowledge
    if not attack.chooses_model or not (knowledge.choose_weights or knowledge.choose_structure):
        return setup
    if not all(knowledge.grants(name) for name in attack.requires):
        return setup  # the attack itself will say what it lacks
    model = attack.prepare(copy.deepcopy(setup.model), tuple(setup.data.x.shape[1:]))
    return dataclasses.replace(setup, model=model)


def _result(setup: Setup, job: Job, reconstruction: Reconstruction, measured: Evaluation) -> dict[str, Any]:
    scores = reconstruction.scores.detach().cpu().flatten().tolist()
    return {
        "examples": _examples(setup, job, measured, scores, reconstruction.certificates),
        "reasons": plain(dict(measured.reasons)),
        "flags": list(reconstruction.flags),
        "notes": list(reconstruction.notes),
        "info": plain({"device": setup.spec.device, "threads": torch.get_num_threads(), **reconstruction.info}),
    }


def _examples(
    setup: Setup, job: Job, measured: Evaluation, scores: list[float], certificates: Sequence[Certificate | None] = ()
) -> list[dict[str, Any]]:
    examples = []
    rows = measured.told(labels=not setup.hides_names)
    for place, (index, numbers) in enumerate(zip(setup.batches[job.batch], rows, strict=False)):
        source = int(measured.order[place])
        score = scores[source] if 0 <= source < len(scores) else None
        certificate = certificates[source] if 0 <= source < len(certificates) else None
        proof = None if certificate is None else plain(dataclasses.asdict(certificate))
        examples.append({"index": index, **plain(numbers), "score": plain(score), "certificate": proof})
    return examples


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
