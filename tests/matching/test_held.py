"""Matching below a cut with features and adjoints held."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.inputs import Box, ValueRange
from leakscope.matching import held
from leakscope.matching.held import WEIGHTINGS, WHOLE, HeldMatching, Weighting
from leakscope.matching.search import Evaluate, SearchResult
from leakscope.network.recorder import inputs_of

SHAPE = (2, 8, 8)


class Case:
    """A net with smooth activations, so that derivatives can be checked by differences, and what is known of x."""

    def __init__(self, activation: type[nn.Module] = nn.Tanh, examples: int = 2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Conv2d(2, 4, 3), activation(), nn.Conv2d(4, 6, 3), activation(), nn.Conv2d(6, 6, 3), activation()),
            *(nn.Flatten(), nn.Linear(24, 5)),
        ).double()
        draws = torch.Generator().manual_seed(1)
        self.x = torch.rand((examples, *SHAPE), generator=draws, dtype=torch.float64)
        self.other = torch.rand((examples, *SHAPE), generator=draws, dtype=torch.float64)
        self.adjoints = torch.randn((examples, 24), generator=draws, dtype=torch.float64)
        features = inputs_of(self.model[7], self.model, self.x).flatten(1)
        below = dict(list(self.model.named_parameters())[:6])
        gradients = torch.autograd.grad((features * self.adjoints).sum(), list(below.values()))
        self.features, self.gradients = features.detach(), dict(zip(below, gradients, strict=True))

    def matching(self, **changes: object) -> HeldMatching:
        known = {
            "model": self.model,
            "layer": self.model[7],
            "features": self.features,
            "adjoints": self.adjoints,
            "gradients": {name: value for name, value in self.gradients.items() if value.dim() > 1},
            "inputs": Box(SHAPE, ValueRange()),
            "first": frozenset({"0.weight"}),
            "tv": 0.0,
        }
        return HeldMatching(**{**known, **changes})


def objective_of(matching: HeldMatching, weighting: Weighting, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """What ``run`` gives to the search; the weights ask for derivatives as they do there."""
    kept: list[Evaluate] = []

    def only_keep(evaluate: Evaluate, start: Tensor, *_: object, **__: object) -> SearchResult:
        kept.append(evaluate)
        return SearchResult(start, start, start, start, [])

    monkeypatch.setattr(held, "search", only_keep)
    matching.run(matching.start(torch.Generator().manual_seed(0)), weighting, 1)
    for name in matching.gradients:
        matching.model.get_parameter(name).requires_grad_(True)
    return kept[0]


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: w.name)
def test_the_objective_is_zero_at_the_truth_and_not_elsewhere(weighting: Weighting, monkeypatch) -> None:
    case = Case()
    evaluate = objective_of(case.matching(), weighting, monkeypatch)
    assert float(evaluate(case.x.flatten()[None], 0)[0]) < 1e-12
    assert float(evaluate(case.other.flatten()[None], 0)[0]) > 0.1


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: w.name)
@pytest.mark.parametrize("tv", [0.0, 0.03])
def test_its_derivative_is_that_of_differences(weighting: Weighting, tv: float, monkeypatch) -> None:
    case = Case()
    evaluate = objective_of(case.matching(tv=tv), weighting, monkeypatch)
    point = case.other.flatten()[None]
    gradient = evaluate(point, 0)[2]
    draws = torch.Generator().manual_seed(2)
    for _ in range(5):
        way = torch.randn(point.shape, generator=draws, dtype=torch.float64)
        ahead, behind = (float(evaluate(point + step * way, 0)[0]) for step in (1e-7, -1e-7))
        assert (ahead - behind) / 2e-7 == pytest.approx(float((gradient * way).sum()), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: w.name)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_weights_add_up_to_one_and_fall_from_the_cut(weighting: Weighting, count: int) -> None:
    weights = weighting.layers(count)
    assert weighting.features + sum(weights) == pytest.approx(1)
    assert weights == sorted(weights, reverse=True)
    assert all(a == pytest.approx(weighting.ratio * b) for a, b in itertools.pairwise(weights))


def test_relative_terms_do_not_change_with_the_size_of_the_gradient(monkeypatch) -> None:
    case = Case()
    small = case.matching(
        gradients={name: value / 1000 for name, value in case.matching().gradients.items()},
        adjoints=case.adjoints / 1000,
    )
    values = [
        float(objective_of(matching, WEIGHTINGS[0], monkeypatch)(case.other.flatten()[None], 0)[0])
        for matching in (case.matching(), small)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_layers_that_read_the_input_are_left_out_unless_asked_for() -> None:
    matching = Case().matching()
    names = {id(value): name for name, value in matching.model.named_parameters()}
    for weighting in WEIGHTINGS:
        terms = [names[id(weight)] for weight, _, _ in matching._terms(weighting)]
        assert terms == ["4.weight", "2.weight", *(["0.weight"] if weighting.first else [])]
    assert WHOLE.first


def test_rows_of_rounding_are_left_out() -> None:
    case = Case()
    gradients = dict(case.matching().gradients)
    gradients["4.weight"] = gradients["4.weight"].clone()
    gradients["4.weight"][2] *= 1e-7
    gradients["2.weight"] = torch.zeros_like(gradients["2.weight"])
    for weighting in WEIGHTINGS:
        (_, target, scale), *others = case.matching(gradients=gradients)._terms(weighting)
        assert scale.flatten()[2] == 0
        assert bool((scale.flatten()[[0, 1, 3, 4, 5]] > 0).all())
        assert len(others) == weighting.first, "a gradient of zeros is no term"
        assert float((target.abs() * scale).sum()) == pytest.approx(weighting.layers(2 + weighting.first)[0])


def test_levelled_rows_count_by_the_root_of_their_size() -> None:
    gradient = torch.ones(2, 3, 1, 1)
    gradient[1] /= 100
    levelled, plain = (held._row_scale(gradient, level).flatten().tolist() for level in (True, False))
    assert levelled == pytest.approx([1, 10])
    assert plain == [1, 1]


def test_a_search_comes_nearer_and_stays_in_the_box() -> None:
    case = Case(nn.ReLU, examples=1)
    matching = case.matching()
    start = matching.start(torch.Generator().manual_seed(0))
    result = matching.run(start, WEIGHTINGS[0], 150)
    errors = [float((matching.pictures(row) - case.x).square().mean()) for row in (start[0], result.points[0])]
    assert errors[1] < errors[0] / 2
    assert 0 <= float(result.points.min()) <= float(result.points.max()) <= 1
    assert len(result.curves) == 150


def test_a_weight_that_acts_behind_the_cut_only_is_no_obstacle() -> None:
    case = Case()
    gradients = {**case.matching().gradients, "7.weight": torch.ones(5, 24, dtype=torch.float64)}
    result = case.matching(gradients=gradients).run(case.other.flatten()[None], WEIGHTINGS[0], 3)
    assert bool(torch.isfinite(result.points).all())


def test_weights_ask_for_no_derivatives_afterwards_even_after_an_error() -> None:
    matching = Case().matching()
    start = matching.start(torch.Generator().manual_seed(0))
    matching.run(start, WEIGHTINGS[0], 2)
    assert not any(value.requires_grad for value in matching.model.parameters())

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        matching.run(start, WEIGHTINGS[0], 2, fail)
    assert not any(value.requires_grad for value in matching.model.parameters())
    assert not any(module._forward_pre_hooks for module in matching.model.modules())


def test_starts_follow_the_generator() -> None:
    matching = Case().matching()
    first, again, other = (matching.start(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (1, 2 * 128)
    assert dataclasses.replace(matching, tv=0.1).shape == (2, *SHAPE)


@pytest.mark.parametrize("values", [ValueRange(), ValueRange((-1.0, -2.0), (2.0, 1.0))])
def test_a_start_near_known_inputs_is_these_inputs_and_short_steps_keep_it(values: ValueRange) -> None:
    case = Case()
    matching = case.matching(inputs=Box(SHAPE, values))
    near = matching.start_near(case.other)
    assert torch.allclose(matching.to_model(matching.pictures(near)), case.other)
    moved = [
        float((which.run(near, WEIGHTINGS[0], 1).points - near).abs().max()) for which in (matching, matching.near())
    ]
    assert 0 < moved[1] < 0.3 * moved[0]
