"""Every way of evaluating a step gives the same numbers; the form by ``torch.func`` is the oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.func import grad_and_value
from torch.nn.attention import SDPBackend, sdpa_kernel

from leakscope.matching import DISTANCES, Cosine
from leakscope.matching import problem as problem_module
from matching_problems import BATCH, CLASSES, SHAPE, SITUATIONS, conv_net, problem, rows_of


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_plain_step_is_the_one_by_torch_func(situation, dtype, tolerance) -> None:
    task = problem(dtype=dtype, **SITUATIONS[situation])
    rows, iteration = rows_of(task), torch.tensor(2.0, dtype=dtype)
    plain = task.evaluator_by("plain")(rows, 2)
    objective = task._objective(task._measure())
    place = rows.shape[1] - len(task.unknowns)
    for number, row in enumerate(rows):
        derivative = grad_and_value(objective, argnums=(0, 1), has_aux=True)
        with sdpa_kernel(SDPBackend.MATH):
            found, (value, judged) = derivative(row[:place], row[place:], iteration, task._facts())
        for own, oracle in zip((each[number] for each in plain), (value, judged, torch.cat(found)), strict=True):
            assert own.shape == oracle.shape
            assert not own.requires_grad
            assert float((own - oracle).abs().max()) <= tolerance * float(oracle.abs().max())
    assert float(plain[2].abs().max()) > 0


@pytest.mark.parametrize("situation", SITUATIONS)
def test_batched_restarts_are_those_one_after_another(situation) -> None:
    task = problem(**SITUATIONS[situation])
    rows = rows_of(task, 3)
    for own, oracle in zip(task.evaluator_by("batched")(rows, 1), task.evaluator_by("plain")(rows, 1), strict=True):
        assert own.shape == oracle.shape
        assert float((own - oracle).abs().max()) <= 1e-10 * float(oracle.abs().max())


def test_an_update_compared_as_one_tensor_or_tensor_by_tensor_is_as_far(monkeypatch) -> None:
    together = {name: problem(distance=distance) for name, distance in DISTANCES.items()}
    answers = {name: task.evaluator_by("plain")(rows_of(task), 0) for name, task in together.items()}
    monkeypatch.setattr(problem_module, "JOINED_ENTRIES", 0)
    for name, task in together.items():
        for own, oracle in zip(task.evaluator_by("plain")(rows_of(task), 0), answers[name], strict=True):
            assert torch.allclose(own, oracle, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", DISTANCES)
def test_a_distance_that_joins_does_not_see_borders(name, generator) -> None:
    distance = DISTANCES[name]
    observed = {key: torch.randn(5, generator=generator).double() for key in "ab"}
    candidate = {key: torch.randn(5, generator=generator).double() for key in "ab"}
    whole = distance({"": torch.cat(list(observed.values()))}, {"": torch.cat(list(candidate.values()))})
    assert (abs(float(whole - distance(observed, candidate))) < 1e-12) == distance.joins
    assert torch.equal(distance.against(observed)(candidate), distance(observed, candidate))


def test_the_judge_is_not_evaluated_where_it_is_the_distance() -> None:
    calls: list[str] = []

    @dataclasses.dataclass(frozen=True)
    class Counted(Cosine):
        def against(self, observed):
            calls.append("prepared")
            return super().against(observed)

    problem(distance=Counted(), judge=Counted()).evaluator_by("plain")
    assert calls == ["prepared"]


def test_the_gradient_of_a_victim_records_nothing_unless_somebody_differentiates_it() -> None:
    task = problem()
    victim, x = task.victim, torch.rand(BATCH, *SHAPE, dtype=torch.float64)
    gradient, _ = victim.gradient(victim.tensors, x, task.targets)
    assert not any(value.requires_grad for value in gradient.values())
    with torch.no_grad():
        quiet, _ = victim.gradient(victim.tensors, x.clone().requires_grad_(), task.targets)
    assert all(torch.equal(quiet[name], value) for name, value in gradient.items())
    assert not any(value.requires_grad for value in quiet.values())
    followed, _ = victim.gradient(victim.tensors, x.clone().requires_grad_(), task.targets)
    assert all(value.requires_grad for name, value in followed.items())
    assert not any(value.requires_grad for value in victim.tensors.weights.values())


def test_the_way_is_chosen_by_counts() -> None:
    small = problem()
    assert [small.evaluator(restarts, False).way for restarts in (1, 2, 8)] == ["plain", "plain", "batched"]
    large = problem(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6000), nn.Tanh(), nn.Linear(6000, CLASSES)))
    assert large.evaluator(8, False).way == "plain"
    busy = problem(lambda: conv_net())
    busy = dataclasses.replace(busy, count=10_000)
    assert busy._way(8) == "plain"


def test_a_way_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"^way.*'fast'"):
        problem().evaluator_by("fast")  # type: ignore[arg-type]
