"""Build what an audit needs from a checked spec, in the parent and again in worker processes: model, data, batches."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.audit.controls import SAME_RECORD
from leakscope.audit.parts import Part, lines, without_addresses
from leakscope.audit.sections import TrainingSpec
from leakscope.audit.spec import AuditSpec
from leakscope.audit.utility import Course, load_examples, make_course, precision, tensors_hash
from leakscope.audit.yaml_text import SpecError
from leakscope.contracts.attack import check_device
from leakscope.contracts.checks import JOBS, brief
from leakscope.contracts.disk import read_whole
from leakscope.contracts.errors import NotApplicable, UserError
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import check_batch
from leakscope.contracts.spool import tensor_bytes
from leakscope.data import Examples, split_by_group, split_dirichlet, split_iid
from leakscope.federation import FedAvg, FederatedTraining, cached_training
from leakscope.federation.checkpoints import answer_to
from leakscope.metrics import MAX_CANDIDATES, Lpips, find_lpips, load_lpips
from leakscope.models import build_model
from leakscope.models.weights import load_weights
from leakscope.results.reasons import Scenario
from leakscope.results.scale import Scale

Rounds = Callable[[int, int, float], None]

DEFAULT_EXAMPLES = 8
#: Examples of the data that an adversary with data of the same kind has at most.
MAX_AUXILIARY = 10_000


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything the jobs of one audit share."""

    spec: AuditSpec
    model: nn.Module
    data: Examples
    knowledge: Knowledge
    batches: tuple[tuple[int, ...], ...]
    candidates: Tensor
    lpips: Lpips | None
    model_fingerprint: str
    data_fingerprint: str
    candidates_fingerprint: str
    lpips_fingerprint: str | None
    training_losses: tuple[float, ...] = ()
    #: Examples that an adversary with data of the same kind has, none of them in an attacked batch.
    auxiliary: tuple[Tensor, Tensor] | None = None
    #: What hashes of private examples begin with; empty for public ones, whose hashes are the same anywhere.
    salt: str = ""
    course: Course | None = None

    @property
    def hides_names(self) -> bool:
        """Tell whether names and labels stay out of results; those of private data are told only if asked for."""
        return self.data.private and not self.spec.show_names

    @property
    def data_name(self) -> str:
        """Name the data in results: private data by its reader, for its file may name people."""
        return self.spec.data.name if self.hides_names and self.spec.data.instance is None else self.data.name

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return None if self.hides_names else self.data.class_names

    @property
    def pictures(self) -> bool:
        """Tell whether images may be written; those of private data only if asked for."""
        return not self.data.private if self.spec.pictures is None else self.spec.pictures

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        return self.inputs(torch.tensor(self.batches[number]))

    def held_out(self, number: int) -> Tensor:
        """Return the candidates for identification that this batch does not hold, in unit space."""
        private = torch.tensor([index for index in self.batches[number] if index < len(self.candidates)])
        rest = torch.ones(len(self.candidates), dtype=torch.bool)
        rest[private.long()] = False
        return self.candidates[rest].float()

    def others(self, number: int, labels: Tensor, seed: int) -> Tensor:
        """Return inputs of examples outside this batch, of the same classes as far as there are such."""
        rest = torch.ones(len(self.data), dtype=torch.bool)
        rest[torch.tensor(self.batches[number])] = False
        if not bool(rest.any()):
            raise NotApplicable("the data has no other examples")
        rows, draws = [], torch.Generator().manual_seed(seed)
        for label in labels:
            same = (self.data.y == label).reshape(len(rest), -1).all(1) & rest
            pool = torch.nonzero(same if bool(same.any()) else rest).flatten()
            row = int(pool[int(torch.randint(len(pool), (), generator=draws))])
            rows.append(row)
            if int(rest.sum()) > 1:
                rest[row] = False  # not the same one twice while there are others
        return self.inputs(torch.tensor(rows))[0]

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return these examples in the model's precision, and their labels."""
        examples = self.data.subset(rows)
        return self.data.inputs.cast(examples.x, precision(self.model)), examples.y


def build_setup(spec: AuditSpec, progress: Rounds | None = None, salt: str = "") -> Setup:
    """Load, build and train what ``spec`` names; ``salt`` goes into hashes of private data. Raise SpecError."""
    problems: list[str] = []
    data = _attempt("data", problems, lambda: load_examples(spec.data))
    model = None if data is None else _attempt("model", problems, lambda: _model(spec, data))
    batches = None if data is None else _attempt("examples", problems, lambda: _batches(spec, data))
    if batches is not None:
        _attempt("attacks, defenses, protocols, seeds and examples", problems, lambda: _check_jobs(spec, len(batches)))
    lpips_file = spec.lpips if spec.lpips is not None else find_lpips()
    lpips = None if lpips_file is None else _attempt("lpips", problems, lambda: load_lpips(lpips_file))
    _attempt("device", problems, lambda: check_device(spec.device))
    clients, asked = None, spec.training
    if data is not None and asked is not None:
        clients = _attempt("training", problems, lambda: _clients(asked, data))
    if problems or data is None or model is None or batches is None:
        raise SpecError(problems)
    candidates = data.inputs.to_unit(data.x[:MAX_CANDIDATES]).clamp(0, 1)
    salt = salt if data.private else ""
    fingerprint = model_fingerprint(model, _probe(data))
    setup = Setup(
        spec=spec,
        model=model,
        data=data,
        knowledge=Knowledge(**spec.knowledge),
        batches=batches,
        candidates=candidates,
        lpips=lpips,
        model_fingerprint=fingerprint,
        data_fingerprint=data.fingerprint(salt),
        candidates_fingerprint=tensors_hash(salt, candidates),
        lpips_fingerprint=None if lpips_file is None else hashlib.sha256(read_whole(lpips_file)).hexdigest(),
        salt=salt,
        course=_course(spec, data, model, fingerprint, salt),
    )
    if setup.knowledge.auxiliary_data and len(rows := auxiliary_rows(data, batches)):
        setup = dataclasses.replace(setup, auxiliary=setup.inputs(rows))
    return setup if asked is None or clients is None else _trained(setup, asked, clients, progress)


def auxiliary_rows(data: Examples, batches: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return the first rows outside the batches that are no copies of a row inside: a copy would be the truth."""
    attacked = torch.tensor(sorted({index for batch in batches for index in batch}))
    free = torch.ones(len(data), dtype=torch.bool)
    free[attacked] = False
    rows = torch.nonzero(free).flatten()[:MAX_AUXILIARY]
    private, others = (data.inputs.to_unit(data.x[part]).double().flatten(1) for part in (attacked, rows))
    nearest = torch.cdist(others, private).square().amin(1) / private.shape[1]
    return rows[nearest >= SAME_RECORD]


def _course(spec: AuditSpec, data: Examples, model: nn.Module, fingerprint: str, salt: str) -> Course | None:
    asked = spec.utility
    if asked is None:
        return None
    problems = []
    if not any("utility" in part.instance.findings() for part in spec.protocols):
        problems.append("utility: expected a protocol whose clients send one update, fedsgd or fedavg, got none")
    course: Course | None = _attempt(
        "utility", problems, lambda: make_course(asked, spec.data, data, model, fingerprint, salt)
    )
    if course is not None:
        problems += [f"utility: {line}" for line in _target_problems(spec, model, course)]
    if problems:
        raise SpecError(problems)
    return course


def _target_problems(spec: AuditSpec, model: nn.Module, course: Course) -> list[str]:
    found = []
    for name, examples in (("train", course.train), ("test", course.test)):
        x = examples.inputs.cast(examples.x, precision(model))
        try:
            check_batch(model, x, examples.y, None, spec.task.instance, examples.inputs)
        except ValueError as error:
            found += [f"{name}: {line}" for line in lines(str(error))]
    return found


def _clients(asked: TrainingSpec, data: Examples) -> list[Tensor]:
    if asked.clients is None:
        return split_by_group(data)
    generator = torch.Generator().manual_seed(asked.seed)
    if asked.alpha is not None:
        return split_dirichlet(data.y, asked.clients, asked.alpha, generator)
    return split_iid(len(data), asked.clients, generator)


def _trained(setup: Setup, asked: TrainingSpec, clients: list[Tensor], progress: Rounds | None) -> Setup:
    rehearse(setup)  # tells what is wrong with a protocol or a defence before the training, not after it
    training = FederatedTraining(
        rounds=asked.rounds,
        clients_per_round=asked.clients_per_round,
        protocol=FedAvg(epochs=asked.epochs, batch_size=asked.batch_size, lr=asked.lr),
        task=setup.spec.task.instance,
        inputs=setup.data.inputs,
    )
    problems: list[str] = []

    def train() -> Any:
        examples = [setup.inputs(rows) for rows in clients]
        return cached_training(training, setup.model, examples, seed=asked.seed, at=[asked.rounds], progress=progress)

    with torch_threads(setup.spec.threads):
        run = _attempt("training", problems, train)
    if problems:
        raise SpecError(problems)
    fingerprint = model_fingerprint(run.last, _probe(setup.data))
    return dataclasses.replace(setup, model=run.last, model_fingerprint=fingerprint, training_losses=run.losses)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads, in parent and worker alike: results are then the same to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rehearse(setup: Setup) -> dict[Scenario, Scale]:
    """Let each protocol and defence make the first client's update once; raise SpecError with all that fail.

    Return how large each defence's change of the update is, where it leaves the model as it is.
    """
    found: dict[str, list[str]] = {}
    scales = {}
    x, y = setup.batch(0)
    targets = setup.data.y[torch.tensor([index for batch in setup.batches for index in batch])]
    for number, protocol in enumerate(setup.spec.protocols):
        brief = protocol.model_copy(update={"instance": protocol.instance.rehearsal()})
        bare: Observation | None = None
        with suppress(Exception):  # the user's model may raise anything, and raises it again with every defence
            bare = observe(setup, brief, Part(name="none"), x, y, torch.Generator().manual_seed(0))
        for place, defense in enumerate(setup.spec.defenses):
            try:
                known = bare if defense.instance is None else None
                observation = known or observe(setup, brief, defense, x, y, torch.Generator().manual_seed(0))
                sent = observation.messages[0].update
                if bare is not None and (scale := _scale(bare.messages[0].update, sent)) is not None:
                    scales[Scenario(protocol.identity(), defense.identity())] = scale
                wrong = setup.spec.task.instance.problems_of(targets, len(targets), observation.output_shape)
                told = [f"data: {line}" for line in wrong]
            except Exception as error:  # noqa: BLE001 - the user's model may raise anything; all of it is told
                message = "; ".join(lines(str(error))) or "no message"
                told = [message if isinstance(error, ValueError) else f"{type(error).__name__}: {message}"]
            for line in told:
                found.setdefault(line, []).append(f"protocols[{number}] with defenses[{place}]")
    if found:
        # What fails everywhere is told once: it is no matter of protocol or defence.
        every = len(setup.spec.protocols) * len(setup.spec.defenses)
        raise SpecError([line if len(at) == every > 1 else _placed(line, at) for line, at in found.items()])
    return scales


def _scale(bare: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Scale | None:
    """Compare what is sent with the bare update; None where the defence has another model sent."""
    if {name: value.shape for name, value in bare.items()} != {name: value.shape for name, value in sent.items()}:
        return None
    update, message = (
        torch.cat([one[name].detach().cpu().double().flatten() for name in bare]) for one in (bare, sent)
    )
    lengths = float(update.norm()) * float(message.norm())
    return Scale(
        update=float(update.norm()),
        change=float((message - update).norm()),
        sent=float(message.norm()),
        cosine=float(update @ message) / lengths if lengths > 0 else math.nan,
        entries=len(update),
    )


def _placed(line: str, places: list[str]) -> str:
    return line if line.startswith("data: ") else f"{', '.join(places)}: {line}"


def observe(setup: Setup, protocol: Part, defense: Part, x: Tensor, y: Tensor, generator: torch.Generator) -> Any:
    """Return what the adversary sees of a client that holds (x, y)."""
    return protocol.instance.observe(
        *(setup.model, x, y, defense.instance, setup.knowledge, generator),
        # Bounds read off the data itself serve the measures; the adversary must not learn them.
        inputs=setup.data.public_inputs,
        task=setup.spec.task.instance,
        model_name=setup.spec.model.name,
        auxiliary=setup.auxiliary,
    )


def model_fingerprint(model: nn.Module, probe: Tensor | None = None) -> str:
    """Hash structure, parameters, buffers and the answer to ``probe``; not the mode, which the protocol sets."""
    digest = hashlib.sha256()
    digest.update(f"{type(model).__qualname__} {without_addresses(repr(model))}".encode())
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, value in named:
            digest.update(f"\n{kind} {name} {value.dtype} {tuple(value.shape)} {value.requires_grad} ".encode())
            digest.update(tensor_bytes(value))
    if probe is not None:
        digest.update(tensor_bytes(answer_to(model, probe)))
    return digest.hexdigest()


def is_intact(setup: Setup) -> bool:
    """Tell whether the model still has the weights and the answers of its fingerprint."""
    return model_fingerprint(setup.model, _probe(setup.data)) == setup.model_fingerprint


def _probe(data: Examples) -> Tensor:
    drawn = data.inputs.start("uniform", 2, torch.Generator().manual_seed(0), torch.zeros(()))
    return data.inputs.cast(drawn, torch.float64)


def _attempt(where: str, problems: list[str], build: Callable[[], Any]) -> Any:
    try:
        return build()
    except Exception as error:  # noqa: BLE001 - readers and models may be the user's own and raise anything
        told = isinstance(error, ValueError | TypeError | OSError | RuntimeError | ImportError) and lines(str(error))
        problems.append(f"{where}: " + "; ".join(told or [f"{type(error).__name__}: {brief(str(error))}"]))
        return None


def _model(spec: AuditSpec, data: Examples) -> nn.Module:
    asked = spec.model
    model: nn.Module = asked.instance
    if model is None:
        options = {"num_classes": data.num_classes, "seed": asked.seed, **asked.options}
        model = build_model(asked.name, input_shape=tuple(data.x.shape[1:]), **options)
    if asked.weights is not None:
        load_weights(model, asked.weights)
    return model


def _batches(spec: AuditSpec, data: Examples) -> tuple[tuple[int, ...], ...]:
    """Batch b holds the examples b * size to (b + 1) * size - 1."""
    size, wanted = spec.batch, spec.examples
    if size > len(data):
        raise UserError(f"expected at least one batch of {size}, but the data has {len(data)} examples")
    if wanted is None:
        # The default gives way to what there is; a number the user asked for does not.
        wanted = min(-(-DEFAULT_EXAMPLES // size), len(data) // size) * size
    if wanted > len(data):
        raise UserError(f"expected at most {len(data)}, which is all the data has, got {wanted}")
    return tuple(tuple(range(start, start + size)) for start in range(0, wanted, size))


def _check_jobs(spec: AuditSpec, batches: int) -> None:
    settings = len(spec.protocols) * (len(spec.defenses) + len(spec.controls)) * len(spec.attacks)
    JOBS.check("all combinations", settings * len(spec.seeds) * batches, "Ask for fewer.")
