from __future__ import annotations

from typing import Any

import audit_doubles as doubles
import pytest
import torch

from leakscope.audit import AuditSpec, SpecError
from leakscope.audit.keys import canonical, content_hash, derived_seed, identity
from leakscope.audit.plan import Plan, make_plan
from leakscope.audit.setup import Setup, build_setup, model_fingerprint, rehearse

BASE: dict[str, Any] = {
    "attacks": [doubles.Quotient(), doubles.Guess()],
    "defenses": ["none", {"gradient-noise": {"sigma": 0.1}}],
    "seeds": [0, 1],
    "examples": 4,
    "batch": 2,
}


def setup(**changes: Any) -> Setup:
    base = {**BASE, "model": doubles.net(), "data": doubles.examples()}
    return build_setup(AuditSpec.parse({**base, **changes}))


def keys(**changes: Any) -> list[str]:
    return [job.key for job in make_plan(setup(**changes)) if job.finding is None]


def test_grid_and_order() -> None:
    built = setup(protocols=["fedsgd", {"fedavg": {"batch_size": 1}}], controls=["noise"])
    plan = make_plan(built)
    assert [job.position for job in plan] == list(range(len(plan)))
    assert len({job.key for job in plan}) == len(plan)
    jobs = [job for job in plan if job.finding is None]
    assert plan[: len(jobs)] == jobs, "findings come last"
    # protocols x (defences + control) x attacks x seeds x batches
    assert len(jobs) == 2 * (2 + 1) * 2 * 2 * 2
    assert sum(job.control is not None for job in jobs) == 2 * 2 * 2 * 2
    cells = [(j.protocol, 9 if j.defense is None else j.defense, j.attack, j.seed, j.batch) for j in jobs]
    assert cells == sorted(cells)
    assert built.batches == ((0, 1), (2, 3))
    summary = Plan.of(built, plan).summary(built)
    assert summary["total"] == len(jobs)
    # floor and embedding once for each protocol and defence, the trajectory of FedAvg also for each client
    assert summary["findings"] == len(plan) - len(jobs) == 2 * 2 + 2 * 2 + 2 * 2 * 2
    assert [entry["jobs"] for entry in summary["settings"]] == [8, 8, 8, 8]


def test_no_controls() -> None:
    assert len(keys(controls=False)) == 2 * 2 * 2 * 2


def test_keys_are_stable() -> None:
    assert keys() == keys()


@pytest.mark.parametrize(
    "change",
    [
        {"model": doubles.net(seed=1)},
        {"data": (doubles.examples()[0] * 0.5, doubles.examples()[1])},
        {"data": (doubles.examples()[0], doubles.examples()[1].flip(0))},
        {"knowledge": "full"},
        {"threads": 2},
        {"dtype": "float64"},
        {"pictures": True},
    ],
    ids=str,
)
def test_keys_and_identity_change_with_what_determines_results(change: dict[str, Any]) -> None:
    assert not set(keys(**change)) & set(keys())
    assert content_hash(identity(setup(**change))) != content_hash(identity(setup()))


@pytest.mark.parametrize(
    "change",
    [
        {"protocols": ["fedavg"], "knowledge": "honest_server"},
        {"seeds": [2, 3]},
        {"attacks": [doubles.Quotient(slow=1.0), doubles.Guess(nan=True)], "controls": ["noise"]},
    ],
    ids=str,
)
def test_what_may_grow_changes_keys_only(change: dict[str, Any]) -> None:
    before = {"knowledge": "honest_server", "controls": ["noise"]}
    assert not set(keys(**{**before, **change})) & set(keys(**before))
    assert identity(setup(**{**before, **change})) == identity(setup(**before))


def test_more_examples_leave_the_keys_of_those_before() -> None:
    assert set(keys(examples=2)) < set(keys(examples=4))


@pytest.mark.parametrize(
    "change",
    [
        {"executor": "processes"},
        {"workers": 2},
        {"executor": "processes", "timeout": 5},
        {"policy": {"max_psnr": 30}},
    ],
)
def test_how_the_work_is_spread_changes_nothing(change: dict[str, Any]) -> None:
    assert keys(**change) == keys()
    assert identity(setup(**change)) == identity(setup())


def test_seeds_of_batches_differ() -> None:
    found = {derived_seed(s, b, p) for s in range(20) for b in range(20) for p in ("client", "attack")}
    assert len(found) == 800
    assert derived_seed(0, 0, "attack") == derived_seed(0, 0, "attack")


def test_canonical_tells_nan_infinity_and_nothing_apart() -> None:
    texts = [canonical({"a": value}) for value in (float("nan"), float("inf"), float("-inf"), None)]
    assert len(set(texts)) == 4
    assert canonical({"a": float("nan")}) == texts[0]


def test_fingerprint_of_models() -> None:
    model = doubles.net()
    same = doubles.net()
    assert model_fingerprint(model) == model_fingerprint(same)
    with torch.no_grad():
        same[1].weight[0, 0] += 1e-6
    assert model_fingerprint(model) != model_fingerprint(same)
    other = torch.nn.Sequential(model, torch.nn.ReLU())
    assert model_fingerprint(model) != model_fingerprint(other)


def test_everything_is_loaded_or_told() -> None:
    def told(**changes: Any) -> str:
        with pytest.raises(SpecError) as caught:
            setup(**changes)
        return str(caught.value)

    assert "examples: expected at most 4" in told(examples=6)
    assert "one batch of 9" in told(examples=None, batch=9)
    assert "device: 'nonsense' is no device" in told(device="nonsense")
    both = told(data={"name": "mnist", "path": "/nonexistent"}, device="nonsense")
    assert "data: " in both
    assert "device: " in both
    weights = {"name": "logistic", "weights": "/nonexistent.safetensors"}
    assert "model: " in told(model=weights)
    assert "options" in told(model={"name": "logistic", "options": {"nope": 1}}) or "nope" in told(
        model={"name": "logistic", "options": {"nope": 1}}
    )


def test_default_number_of_examples_gives_way() -> None:
    assert len(setup(examples=None, batch=1).batches) == 4
    assert setup(examples=None, batch=3).batches == ((0, 1, 2),)


def test_rehearsal_tells_of_every_setting_that_fails() -> None:
    rehearse(setup())
    with pytest.raises(SpecError) as caught:
        rehearse(setup(model=torch.nn.Linear(5, 2)))
    (problem,) = caught.value.problems
    assert problem.startswith("the model cannot read inputs of shape (1, 4, 4)"), "once, whatever the defence"
    with pytest.raises(SpecError) as caught:
        rehearse(setup(defenses=["none", {"soteria": {"layer": "nowhere"}}]))
    assert [line.partition(":")[0] for line in caught.value.problems] == ["protocols[0] with defenses[1]"]
