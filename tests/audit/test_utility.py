"""What a defence costs: the training behind a defence study, and how a folder holds it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leakscope.audit import audit
from leakscope.audit.sections import DataSpec, UtilitySpec
from leakscope.audit.utility import Course, describe_utility, make_course
from leakscope.audit.yaml_text import SpecError
from leakscope.contracts.task import Classification
from leakscope.data import from_tensors
from leakscope.defenses import DPSGD, GradientNoise
from leakscope.federation import FedSGD
from leakscope.results.store import StoreMismatch

RATES = [0.1, 1.0]
NOISE = repr(GradientNoise(sigma=0.5))


def _examples(count: int = 120, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes that a line tells apart, up to a little noise."""
    draws = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 2
    x = 0.1 * torch.rand(count, 1, 2, 3, generator=draws)
    x[:, 0, 0] += 0.6 * y[:, None]
    return x, y


def _model() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    return net


def _course(**changes: Any) -> Course:
    spec = UtilitySpec(**{"rounds": 40, "batch_size": 8, "learning_rates": RATES, "seeds": [0], **changes})
    return make_course(spec, DataSpec(name="mine"), from_tensors(*_examples()), _model(), "model", "")


def _tell(course: Course, defense: Any = None, seed: int = 0) -> dict[str, Any]:
    return describe_utility(course, FedSGD(), defense, Classification(), seed)


def test_a_defence_that_drowns_the_update_costs_accuracy() -> None:
    course = _course()
    bare, drowned = _tell(course), _tell(course, GradientNoise(sigma=100.0))
    assert bare["accuracy"] == 1.0
    assert drowned["accuracy"] < 0.9
    assert drowned["loss"] > bare["loss"]
    assert bare["chance"] == pytest.approx(0.5, abs=0.1)


def test_the_step_size_is_the_one_that_learns_the_training_examples_best() -> None:
    told = _tell(_course())
    assert [rate for rate, _ in told["tried"]] == RATES
    assert told["learning_rate"] == min(told["tried"], key=lambda pair: pair[1])[0]
    assert told["loss"] == min(loss for _, loss in told["tried"])


def test_training_that_breaks_down_is_a_result() -> None:
    course = _course(learning_rates=[1e38])
    told = _tell(course, GradientNoise(sigma=10.0))
    assert told["diverged"]
    assert math.isinf(told["loss"])
    assert told["accuracy"] == course.chance
    assert "round" in told["note"]


def test_one_step_size_that_breaks_down_does_not_cost_the_others() -> None:
    told = _tell(_course(learning_rates=[1e38, 0.5]), GradientNoise(sigma=10.0))
    assert told["learning_rate"] == 0.5
    assert math.isinf(told["tried"][0][1])
    assert not told["diverged"]


def test_epsilon_is_for_as_many_gradients_as_each_example_entered() -> None:
    defense = DPSGD(clip=1.0, noise_multiplier=2.0)
    told = _tell(_course(), defense)
    assert told["passes"] == math.ceil(40 / (told["examples"] // 8)) == 4
    assert told["epsilon"] == defense.epsilon_for(4) > defense.epsilon_for(1)
    assert _tell(_course(rounds=2))["epsilon"] is None


def test_no_test_example_is_trained_on() -> None:
    course = _course()
    known = {tuple(x.flatten().tolist()) for x in course.train.x}
    assert not any(tuple(x.flatten().tolist()) in known for x in course.test.x)
    assert len(course.train) + len(course.test) == 120


def test_test_examples_that_are_trained_on_are_left_out() -> None:
    x, y = _examples(20)
    fresh = _examples(5, seed=1)
    test = from_tensors(torch.cat([x[:3], fresh[0]]), torch.cat([y[:3], fresh[1]]))
    spec = UtilitySpec(test=DataSpec(name="test", instance=test))
    course = make_course(spec, DataSpec(name="mine"), from_tensors(x, y), _model(), "model", "")
    assert (course.left_out, len(course.test)) == (3, 5)
    spec = UtilitySpec(test=DataSpec(name="test", instance=from_tensors(x, y)))
    with pytest.raises(ValueError, match="training examples hold all of them"):
        make_course(spec, DataSpec(name="mine"), from_tensors(x, y), _model(), "model", "")


def _audit(out: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "model": _model(),
        "data": _examples(),
        "examples": 2,
        "defenses": ["none", {"gradient-noise": {"sigma": 0.5}}],
        "attacks": ["linear-layer", {"idlg": {"iterations": 3}}],
        "knowledge": "adaptive_server",
        "findings": False,
        "progress": False,
        "utility": {"rounds": 10, "batch_size": 8, "learning_rates": [0.5], "seeds": 2},
        **changes,
    }
    return audit(out=out, **settings)


def test_an_audit_trains_once_for_each_defence_and_seed_and_grows(tmp_path: Path) -> None:
    first = _audit(tmp_path / "run")
    trainings = [f for f in first.findings if f.kind == "utility"]
    assert [(f.defense, f.seed, f.status) for f in trainings] == [
        ("none", 0, "done"),
        ("none", 1, "done"),
        (NOISE, 0, "done"),
        (NOISE, 1, "done"),
    ]
    # A third defence, another seed of training and another example: nothing that is there is done again.
    more = [*["none"], {"gradient-noise": {"sigma": 0.5}}, {"gradient-pruning": {"fraction": 0.5}}]
    grown = _audit(
        tmp_path / "run",
        defenses=more,
        examples=3,
        utility={"rounds": 10, "batch_size": 8, "learning_rates": [0.5], "seeds": 3},
    )
    again = {f.key: f for f in grown.findings if f.kind == "utility"}
    assert len(again) == 9
    assert all(again[f.key].finished == f.finished and again[f.key].content == f.content for f in trainings)
    assert len(grown.study.rows) == 3
    assert len(grown.study.rows[0].training.seeds) == 3
    # A run that trains nothing keeps what was trained.
    rest = _audit(tmp_path / "run", utility=None)
    assert len([f for f in rest.findings if f.kind == "utility"]) == 9
    assert rest.study is not None


def test_other_trainings_are_refused_in_the_same_folder_and_new_ones_are_not(tmp_path: Path) -> None:
    assert _audit(tmp_path / "run", utility=None).study is None
    assert _audit(tmp_path / "run").study is not None
    with pytest.raises(StoreMismatch, match=r"utility\.rounds: the store has 10, now 11"):
        _audit(tmp_path / "run", utility={"rounds": 11, "batch_size": 8, "learning_rates": [0.5], "seeds": 2})


def test_trainings_say_nothing_of_what_leaks(tmp_path: Path) -> None:
    with_it, without = _audit(tmp_path / "a"), _audit(tmp_path / "b", utility=None)
    assert str(with_it.verdict) == str(without.verdict)
    assert with_it.verdict.reasons == without.verdict.reasons


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"round": 3}, "utility.round: unknown key: expected it spelt rounds|did you mean rounds"),
        ({"learning_rates": [0.0]}, "utility.learning_rates: expected at least one, each above 0"),
        ({"clients": 1000}, "clients: expected at most 96"),
        ({"train": {"name": "mnist", "splt": "x"}}, "utility.train.splt: unknown key"),
        ({"test_share": 1.5}, "utility.test_share"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _audit(tmp_path / "run", utility=section)
    assert not (tmp_path / "run").exists()


def test_the_same_attack_without_its_knowledge_is_run_only_where_it_differs(tmp_path: Path) -> None:
    idlg = {"idlg": {"iterations": 3}}
    blind = {"idlg": {"iterations": 3, "ignore_defense": True}}
    run = _audit(tmp_path / "run", attacks=[idlg, blind], utility=None)
    ignoring = [row for row in run.rows if "ignore_defense=True" in row.job.attack]
    assert {(row.job.defense, row.job.control) for row in ignoring} == {(NOISE, None)}
    assert all(row.result is not None and not row.result.adaptive for row in ignoring)
    told = [line["text"] for line in run.store.meta("audited")]
    assert any("also run without it" in line for line in told)
    # Alone it is no repetition of anything, and is run everywhere.
    alone = _audit(tmp_path / "alone", attacks=[blind], utility=None)
    assert {row.job.defense for row in alone.rows if row.counts} == {"none", NOISE}
