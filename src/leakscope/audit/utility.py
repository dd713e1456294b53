"""The finding "utility": how well the model learns when every update is protected by a defence.

Every defence gets the same initial weights, batches, rounds and step sizes to choose from. The step size is chosen by
the training loss, so that the test examples are looked at once. A training that breaks down is a result: its loss is
infinite, its accuracy that of a constant guess.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.audit.sections import DataSpec, UtilitySpec
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.protocol import Protocol, client_copy, own_randomness
from leakscope.contracts.spool import tensor_bytes
from leakscope.contracts.task import Task, outputs_of
from leakscope.data import DATA, Examples, load_data, split_iid
from leakscope.federation import DefendedTraining, Diverged
from leakscope.federation.training import LOSS_CHUNK, mean_loss

Advance = Callable[[int, int, float], None]
#: Where the held-out examples come from, the same for every defence and seed.
_SPLIT_SEED = 0


@dataclass(frozen=True, eq=False)
class Course:
    """What all trainings of an audit have in common: the initial model, and examples to train and to test on."""

    spec: UtilitySpec
    model: nn.Module
    train: Examples
    test: Examples
    left_out: int  # test examples that are training examples too
    fingerprint: str

    @property
    def chance(self) -> float:
        """Return the accuracy of always guessing the most frequent label; NaN where targets are no class numbers."""
        share = most_frequent(self.test.y)
        return math.nan if share is None else share


def most_frequent(labels: Tensor) -> float | None:
    """Return the share of the most frequent label; None where there are no classes."""
    if labels.is_floating_point() or labels.dim() != 1:
        return None
    return float(torch.unique(labels, return_counts=True)[1].max()) / len(labels)


def make_course(
    spec: UtilitySpec, asked: DataSpec, data: Examples, model: nn.Module, fingerprint: str, salt: str
) -> Course:
    """Load what is trained and tested on, normalised as the audit's ``data`` is unless a section says how."""
    train = data if spec.train is None else load_examples(_normalised_as(spec.train, asked))
    if spec.test is None:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        held_out = max(1, round(spec.test_share * len(train)))
        if held_out >= len(train):
            raise UserError(f"expected at least two examples, to train and to test on, got {len(train)}")
        test, train = train.subset(order[:held_out]), train.subset(order[held_out:])
    else:
        test = load_examples(_normalised_as(spec.test, asked))
    if spec.limit is not None:
        train = train.subset(torch.arange(min(spec.limit, len(train))))
    for name, examples in (("train", train), ("test", test)):
        if examples.shape != data.shape:
            raise UserError(f"{name}: expected examples of shape {data.shape}, as the audit's, got {examples.shape}")
    if spec.clients > len(train):
        raise UserError(f"clients: expected at most {len(train)}, one example each, got {spec.clients}")
    known = {_digest(x) for x in train.x}
    fresh = [row for row, x in enumerate(test.x) if _digest(x) not in known]
    if not fresh:
        raise UserError("test: expected examples that are not trained on, but the training examples hold all of them")
    digest = tensors_hash(f"{salt}{fingerprint}", train.x, train.y, test.x[fresh], test.y[fresh])
    return Course(spec, model, train, test.subset(fresh), len(test) - len(fresh), digest)


def _normalised_as(section: DataSpec, other: DataSpec) -> DataSpec:
    return section if section.mean is not None else section.model_copy(update={"mean": other.mean, "std": other.std})


def _digest(x: Tensor) -> bytes:
    return hashlib.blake2b(tensor_bytes(x), digest_size=16).digest()


def describe_utility(
    course: Course,
    protocol: Protocol,
    defense: Defense | None,
    task: Task,
    seed: int,
    progress: Advance | None = None,
) -> dict[str, Any]:
    """Return loss and accuracy after training under ``defense``, with the step size that learnt the examples best.

    ``tried`` lists every step size with its training loss; ``epsilon`` is the defence's promise for ``passes``, the
    number of gradients that an example entered.
    """
    spec = course.spec
    dtype, space, y = precision(course.model), course.train.inputs, course.train.y
    x = space.cast(course.train.x, dtype)
    shares = split_iid(len(x), spec.clients, torch.Generator().manual_seed(_SPLIT_SEED))
    clients, rates = [(x[rows], y[rows]) for rows in shares], spec.rates(protocol.kind)
    trained: dict[float, tuple[float, nn.Module | None, str]] = {}
    for place, rate in enumerate(rates):
        training = DefendedTraining(
            rounds=spec.rounds, batch_size=spec.batch_size, lr=rate, protocol=protocol, task=task, inputs=space
        )
        trained[rate] = _train(training, course.model, clients, defense, seed, _part_of(progress, place, len(rates)))
    rate = min(rates, key=lambda one: trained[one][0])
    loss, model, why = trained[rate]
    passes = max(training.passes(len(rows)) for rows in shares)
    facts = {
        "loss": loss,
        "diverged": model is None,
        "note": why,
        "learning_rate": rate,
        "tried": [[one, trained[one][0]] for one in rates],
        "rounds": spec.rounds,
        "clients": spec.clients,
        "batch_size": spec.batch_size,
        "examples": len(x),
        "test_examples": len(course.test),
        "left_out": course.left_out,
        "chance": course.chance,
        "passes": passes,
        "epsilon": None if defense is None else defense.epsilon_for(passes),
    }
    if model is None:
        return {**facts, "test_loss": math.inf, "accuracy": course.chance}
    test_loss, accuracy = _tested(client_copy(model, "eval"), space.cast(course.test.x, dtype), course.test.y, task)
    return {**facts, "test_loss": test_loss, "accuracy": accuracy}


def _train(
    training: DefendedTraining,
    model: nn.Module,
    clients: list[tuple[Tensor, Tensor]],
    defense: Defense | None,
    seed: int,
    progress: Advance | None,
) -> tuple[float, nn.Module | None, str]:
    """Return the loss on all training examples and the model; infinity, None and why where it broke down."""
    try:
        last = training.run(model, clients, seed=seed, defense=defense, progress=progress).last
    except Diverged as error:
        return math.inf, None, str(error)
    loss = mean_loss(client_copy(last, training.protocol.batchnorm), clients, training.task)
    return (loss, last, "") if math.isfinite(loss) else (math.inf, None, f"the loss at the end is {loss}")


def _tested(model: nn.Module, x: Tensor, y: Tensor, task: Task) -> tuple[float, float]:
    """Return mean loss and accuracy; NaN for the accuracy where guesses are near or far."""
    loss = mean_loss(model, [(x, y)], task)
    if not task.discrete:
        return loss, math.nan
    with torch.no_grad(), own_randomness(0):
        right = [
            task.right(targets, task.decode(outputs_of(model(inputs.clone()))))
            for inputs, targets in zip(x.split(LOSS_CHUNK), y.split(LOSS_CHUNK), strict=True)
        ]
    return loss, float(torch.cat(right).mean())


def _part_of(progress: Advance | None, place: int, parts: int) -> Advance | None:
    """Report the progress of one training out of several as that of all of them."""
    if progress is None:
        return None
    return lambda done, total, loss: progress(place * total + done, parts * total, loss)


def load_examples(asked: DataSpec) -> Examples:
    """Load the examples that ``asked`` names, cut and normalised as it says."""
    last = None if asked.limit is None else asked.skip + asked.limit
    if asked.instance is not None:
        data: Examples = asked.instance
    else:
        options = dict(asked.options)
        # A reader that knows how to stop early need not read the rest.
        early = last if asked.name in DATA and "limit" in DATA[asked.name].options() else None
        options |= {k: v for k, v in (("split", asked.split), ("limit", early)) if v is not None}
        data = load_data(asked.name, asked.path, **options)
    if len(data) <= asked.skip:
        raise UserError(f"expected more than skip = {asked.skip} examples, got {len(data)}")
    if asked.skip or last is not None:
        data = data.subset(torch.arange(asked.skip, len(data) if last is None else min(last, len(data))))
    if asked.mean is not None and asked.std is not None:
        data = data.normalised(asked.mean, asked.std)
    return data


def tensors_hash(prefix: str, *tensors: Tensor) -> str:
    digest = hashlib.sha256(prefix.encode())
    for value in tensors:
        digest.update(tensor_bytes(value))
    return digest.hexdigest()


def precision(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
