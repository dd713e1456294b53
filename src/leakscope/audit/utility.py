"""The finding "utility": how well the model learns when every update is protected by a defence.

The same training for every defence: same initial weights, same batches in the same order, same number of rounds, same
step sizes to choose from. The step size is chosen by the training loss, so that the test examples are looked at once.
A training that breaks down is a result: its loss is infinite, its accuracy that of a constant guess.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.audit.loading import load_examples, tensor_bytes
from leakscope.audit.sections import DataSpec, UtilitySpec
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.protocol import Protocol, client_copy
from leakscope.contracts.task import Task, outputs_of
from leakscope.data import Examples, split_iid
from leakscope.federation import DefendedTraining, Diverged
from leakscope.federation.training import LOSS_CHUNK, mean_loss

Advance = Callable[[int, int, float], None]
#: Where the held-out examples come from, the same for every defence and seed.
_SPLIT_SEED = 0


@dataclass(frozen=True, eq=False)
class Course:
    """What all trainings of an audit have in common: the initial model, and examples to train and to test on.

    ``left_out`` counts test examples that were left out because the training examples hold them too.
    """

    spec: UtilitySpec
    model: nn.Module
    train: Examples
    test: Examples
    left_out: int
    fingerprint: str

    @property
    def chance(self) -> float:
        """The accuracy of always guessing the most frequent label; NaN where targets are no class numbers."""
        y = self.test.y
        if y.is_floating_point() or y.dim() != 1:
            return math.nan
        return float(torch.unique(y, return_counts=True)[1].max()) / len(y)


def make_course(
    spec: UtilitySpec, asked: DataSpec, data: Examples, model: nn.Module, fingerprint: str, salt: str
) -> Course:
    """What is trained and tested on; ``fingerprint`` is that of the initial ``model``, ``asked`` the audit's data.

    Examples of other sections are normalised as the audit's are, unless they say how themselves.
    """
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
    digest = hashlib.sha256(f"{salt}{fingerprint}".encode())
    for part in (train.x, train.y, test.x[fresh], test.y[fresh]):
        digest.update(tensor_bytes(part))
    return Course(spec, model, train, test.subset(fresh), len(test) - len(fresh), digest.hexdigest())


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
    """Loss and accuracy after training under ``defense``, with the step size that learnt the training examples best.

    ``tried`` lists every step size with its training loss. ``epsilon`` is what the defence promises for as many
    gradients as each example entered, where it promises anything.
    """
    spec = course.spec
    dtype = next((p.dtype for p in course.model.parameters() if p.is_floating_point()), torch.float32)
    space, y = course.train.inputs, course.train.y
    x = space.cast(course.train.x, dtype)
    shares = split_iid(len(x), spec.clients, torch.Generator().manual_seed(_SPLIT_SEED))
    clients = [(x[rows], y[rows]) for rows in shares]
    rates = spec.rates(protocol.kind)
    trained: dict[float, tuple[float, nn.Module | None, str]] = {}
    for place, rate in enumerate(rates):
        training = DefendedTraining(
            rounds=spec.rounds,
            batch_size=spec.batch_size,
            lr=rate,
            protocol=protocol,
            task=task,
            inputs=space,
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
    """The loss on all training examples and the model; infinity, None and why where the training broke down."""
    try:
        last = training.run(model, clients, seed=seed, defense=defense, progress=progress).last
    except Diverged as error:
        return math.inf, None, str(error)
    loss = mean_loss(client_copy(last, training.protocol.batchnorm), clients, training.task)
    return (loss, last, "") if math.isfinite(loss) else (math.inf, None, f"the loss at the end is {loss}")


def _tested(model: nn.Module, x: Tensor, y: Tensor, task: Task) -> tuple[float, float]:
    """Mean loss and accuracy on the test examples; NaN for the accuracy where guesses are near or far."""
    loss = mean_loss(model, [(x, y)], task)
    if not task.discrete:
        return loss, math.nan
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        right = [
            task.right(targets, task.decode(outputs_of(model(inputs.clone()))))
            for inputs, targets in zip(x.split(LOSS_CHUNK), y.split(LOSS_CHUNK), strict=True)
        ]
    return loss, float(torch.cat(right).mean())


def _part_of(progress: Advance | None, place: int, parts: int) -> Advance | None:
    """Progress of one training out of several, told as that of all of them."""
    if progress is None:
        return None
    tell = progress
    return lambda done, total, loss: tell(place * total + done, parts * total, loss)
