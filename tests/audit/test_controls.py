"""Controls: what each of them shows an attack, and how often they are run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import audit_doubles as doubles
import pytest
import torch
from torch import Tensor

from leakscope.audit.attempts import Bench
from leakscope.audit.plan import Job, make_plan
from leakscope.audit.setup import Setup, build_setup
from leakscope.audit.spec import AuditSpec
from leakscope.contracts.attack import Attack
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.matching.unexplained import unexplained

SEEN: list[Observation] = []


@dataclass(frozen=True, kw_only=True)
class Witness(Attack):
    """Keeps what it is shown, guesses black, and says that it guessed the labels, wrong unless it is told them."""

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        SEEN.append(observation)
        count = observation.num_examples or 1
        told = observation.labels
        labels = torch.full((count,), 2) if told is None else told
        flags = ("labels uncertain",) if told is None else ()
        return Reconstruction(torch.zeros(count, *observation.input_shape), labels, torch.zeros(count), flags=flags)


def prepared(**changes: Any) -> Setup:
    base = {"model": doubles.net(), "data": doubles.examples(6), "attacks": [Witness()], "findings": False}
    return build_setup(AuditSpec.parse({**base, **changes}))


def planned(setup: Setup, control: str | None) -> list[Job]:
    return [job for job in make_plan(setup) if job.control == control and job.finding is None]


def shown(setup: Setup, control: str | None) -> Observation:
    SEEN.clear()
    outcome = Bench(setup).run(planned(setup, control)[0])
    assert outcome.status == "done", outcome.error
    return SEEN[0]


def gradient(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model = doubles.net()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def same(update: Any, other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(update[name], value, atol=1e-6) for name, value in other.items())


def test_how_often_each_is_run() -> None:
    setup = prepared(attacks=[Witness(), doubles.Guess()], seeds=3, examples=4, defenses=["none"])
    counts = Counter(job.control for job in make_plan(setup))
    # attacks x seeds x batches; one seed for those that cost a search; no attack for guesses; two clients must do
    expected = {None: 24, "noise": 24, "other-examples": 8, "prior-mean": 4, "nearest-neighbour": 4, "planted": 4}
    assert counts == expected
    defended = prepared(examples=4, defenses=[{"gradient-noise": {"sigma": 1.0}}])
    assert Counter(job.control for job in make_plan(defended))["undefended"] == 2


def test_other_examples_have_the_same_labels_and_are_not_the_clients() -> None:
    setup = prepared(batch=2, knowledge="full")  # labels 0 1 2 0 1 2, so examples 3 and 4 stand for 0 and 1
    observation = shown(setup, "other-examples")
    assert observation.labels is not None
    assert observation.labels.tolist() == [0, 1]
    x, _ = doubles.examples(6)
    assert same(observation.message.update, gradient(x[[3, 4]], torch.tensor([0, 1])))


def test_other_examples_of_a_class_that_has_none_are_given_its_label() -> None:
    x, _ = doubles.examples(3)
    setup = prepared(data=(x, torch.tensor([0, 1, 2])), batch=1, knowledge="full")
    observation = shown(setup, "other-examples")
    assert observation.labels is not None
    assert observation.labels.tolist() == [0]
    assert any(same(observation.message.update, gradient(x[[n]], torch.tensor([0]))) for n in (1, 2))


def test_without_other_examples_these_controls_are_refused() -> None:
    x, y = doubles.examples(1)
    setup = prepared(data=(x, y))
    for name in ("other-examples", "prior-mean", "nearest-neighbour"):
        outcome = Bench(setup).run(planned(setup, name)[0])
        assert outcome.status == "refused"
        assert "no other examples" in str(outcome.error)


def test_guesses_from_held_out_examples() -> None:
    x, y = doubles.examples(4)
    x[2] = x[0]  # a copy of the private one is no other record
    setup = prepared(data=(x, y))
    mean = Bench(setup).run(planned(setup, "prior-mean")[0]).result
    nearest = Bench(setup).run(planned(setup, "nearest-neighbour")[0]).result
    assert mean is not None
    assert nearest is not None
    assert mean["examples"][0]["mse"] == pytest.approx(float((x[1:].mean(0) - x[0]).square().mean()), rel=1e-4)
    errors = [float((x[n] - x[0]).square().mean()) for n in (1, 3)]
    assert nearest["examples"][0]["mse"] == pytest.approx(min(errors), rel=1e-4)


def test_the_planted_gradient_is_that_of_one_example_with_its_label() -> None:
    setup = prepared(batch=2, defenses=[{"gradient-noise": {"sigma": 1.0}}])
    observation = shown(setup, "planted")
    x, y = doubles.examples(6)
    assert observation.labels is not None
    assert observation.labels.tolist() == y[:1].tolist()
    assert same(observation.message.update, gradient(x[:1], y[:1])), "one plain gradient, no noise"


@pytest.mark.parametrize(
    ("name", "cohort"), [("fedavg", {}), ("secure-aggregation", {"clients": 2}), ("secure-aggregation", {"clients": 3})]
)
def test_the_planted_weight_update_takes_the_steps_that_are_audited(name: str, cohort: dict[str, Any]) -> None:
    """A cohort's planted client is one of its clients."""
    recipe = {"epochs": 3, "batch_size": 1, "lr": 0.1, "momentum": 0.5}
    protocol = {name: {**cohort, "protocol": {"fedavg": recipe}} if cohort else recipe}
    setup = prepared(batch=6, protocols=[protocol], defenses=[{"gradient-noise": {"sigma": 1.0}}])
    observation = shown(setup, "planted")
    examples = 6 // cohort.get("clients", 1)
    x, y = doubles.examples(6)
    order = observation.training.batch_order
    assert order is not None
    assert len(order) == 3 * examples
    assert observation.labels is not None
    assert observation.labels.tolist() == y[:examples].tolist()
    assert unexplained(observation, x[:examples], y[:examples]) < 1e-4, "no noise, and the order is the right one"


def test_undefended_is_the_update_without_the_defence() -> None:
    setup = prepared(batch=2, defenses=[{"gradient-noise": {"sigma": 1.0}}])
    assert same(shown(setup, "undefended").message.update, gradient(*(t[:2] for t in doubles.examples(6))))
    assert not same(shown(setup, None).message.update, gradient(*(t[:2] for t in doubles.examples(6))))


def test_wrong_labels_make_the_attack_run_once_more_with_the_right_ones() -> None:
    setup = prepared(batch=2, defenses=[{"gradient-noise": {"sigma": 1.0}}])
    SEEN.clear()
    outcome = Bench(setup).run(planned(setup, None)[0])
    assert outcome.result is not None
    assert [example["label_correct"] for example in outcome.result["examples"]] == [False, False]
    assert [example["label_correct"] for example in outcome.result["given_labels"]] == [True, True]
    blind, told = SEEN
    assert (blind.labels, told.knowledge.labels) == (None, "yes")
    assert same(blind.message.update, dict(told.message.update)), "the same update, noise and all"


@dataclass(frozen=True, kw_only=True)
class Hesitant(Witness):
    """Cannot do with labels."""

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        if observation.labels is not None:
            raise RuntimeError("no use for labels")
        return super().run(observation, generator, progress)


def test_a_second_search_that_fails_does_not_cost_the_first() -> None:
    setup = prepared(attacks=[Hesitant()], batch=2)
    outcome = Bench(setup).run(planned(setup, None)[0])
    assert outcome.status == "done"
    assert outcome.result is not None
    assert "given_labels" not in outcome.result, "so that the labels stay a doubt"
    assert "RuntimeError: no use for labels" in outcome.result["notes"][-1]


def test_right_labels_and_controls_are_run_once() -> None:
    setup = prepared(data=(doubles.examples(4)[0], torch.tensor([2, 2, 0, 1])), batch=2)
    for control in (None, "noise"):
        SEEN.clear()
        Bench(setup).run(planned(setup, control)[0])
        assert len(SEEN) == 1
