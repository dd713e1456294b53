"""The head's gradient alone: features and output gradients of every example, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.head import solve_head
from leakscope.equations.head_system import HeadProblem, HeadSolution
from leakscope.metrics.assignment import assign

CLASSES = 10


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def solve(
    *gradients: Tensor | None, examples: int, reduction: str = "mean", nonnegative: bool = False, **options: Any
) -> HeadSolution:
    """Weight, bias and their gradients solved for."""
    weight, bias, *observed = gradients
    assert weight is not None
    facts = {"unit": 1 / examples if reduction == "mean" else 1.0, "scale": options.pop("scale", 1.0)}
    problem = HeadProblem(weight, bias, *observed, examples=examples, nonnegative=nonnegative, **facts)
    return solve_head(problem, **options)


def relu_net(trained: bool, seed: int = 0) -> nn.Sequential:
    """A small max-pool net on 16x16 pictures whose classes are places of a bright patch."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(
            *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, CLASSES)),
        )
    optimizer, draws = torch.optim.Adam(net.parameters(), 3e-3), generator(seed)
    for _ in range(40 if trained else 0):
        y = torch.randint(CLASSES, (32,), generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(pictures(y, draws)), y).backward()
        optimizer.step()
    return net


def pictures(labels: Tensor, draws: torch.Generator) -> Tensor:
    x = torch.rand((len(labels), 1, 16, 16), generator=draws)
    for picture, label in zip(x, labels.tolist(), strict=True):
        row, column = divmod(label, 4)
        picture[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 0.5
    return x.clamp(0, 1)


class Case:
    """A batch of pictures with these labels, what the head received, and its gradients."""

    def __init__(self, labels: list[int], trained: bool = False, reduction: str = "mean", seed: int = 0) -> None:
        self.net, self.labels = relu_net(trained), torch.tensor(labels)
        self.x = pictures(self.labels, generator(seed + 100))
        head = self.net[-1]
        assert isinstance(head, nn.Linear)
        self.head = head
        self.features = self.net[:-1](self.x).detach().double()
        loss = nn.functional.cross_entropy(self.net(self.x), self.labels, reduction=reduction)
        self.gradients = torch.autograd.grad(loss, [head.weight, head.bias])

    def solve(self, gradients: tuple[Tensor, ...] | None = None, **options: Any) -> HeadSolution:
        weight, bias = gradients or self.gradients
        facts = {"examples": len(self.labels), "labels": self.labels, "nonnegative": True, "generator": generator()}
        return solve(self.head.weight, self.head.bias, weight, bias, **{**facts, **options})

    def error(self, found: HeadSolution) -> float:
        assert found.features is not None
        gap = found.features[assign(self.features, found.features)] - self.features
        return float((gap.norm(dim=1) / self.features.norm(dim=1)).max())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_distinct_labels_give_features_to_rounding(count: int, trained: bool) -> None:
    case = Case(list(range(count)), trained)
    found = case.solve()
    assert found.exact
    assert found.residual < 1e-6
    assert case.error(found) < 1e-5
    assert found.labels is not None
    assert found.labels.tolist() == list(range(count))
    expected = nn.functional.cross_entropy(case.net(case.x), case.labels, reduction="none")
    assert found.losses is not None
    assert torch.allclose(found.losses.float(), expected, atol=1e-4)
    assert torch.allclose(found.output_gradients.sum(0).float(), case.gradients[1], atol=1e-7)


@pytest.mark.parametrize("labels", [[3, 8, 8, 0], [6, 6, 6, 1], [6, 6, 6, 6], [1, 1, 2, 2, 3, 3, 9, 9, 5], [2] * 9])
@pytest.mark.parametrize("trained", [False, True])
def test_equal_labels_are_told_apart_as_far_as_rounding_allows(labels: list[int], trained: bool) -> None:
    """Features follow to 1e-5 where single precision allows it; the expected error says how far it does."""
    case = Case(labels, trained)
    found = case.solve()
    assert found.residual < 1e-5
    assert case.error(found) < max(1e-5, 3 * found.error)
    assert found.error < 5e-3


def test_labels_need_not_be_known() -> None:
    for trained, labels in ((False, [0, 3, 3, 7]), (True, [1, 1, 5, 8, 9])):
        case = Case(labels, trained)
        found = case.solve(labels=None)
        assert found.labels is not None
        assert found.labels.tolist() == labels
        assert case.error(found) < 1e-3


def test_the_label_of_one_example_follows_from_it() -> None:
    case = Case([7], trained=True)
    found = case.solve(labels=None)
    assert found.labels is not None
    assert found.labels.tolist() == [7]
    assert case.error(found) < 1e-6


def test_a_sum_in_place_of_a_mean() -> None:
    case = Case([4, 1, 7], trained=True, reduction="sum")
    assert case.error(case.solve(reduction="sum")) < 1e-5
    with pytest.raises(NotApplicable):
        case.solve(reduction="mean")


@pytest.mark.parametrize("labels", [[3], [2, 5, 8], [4, 4, 6]])
def test_an_unknown_scale_is_inferred(labels: list[int]) -> None:
    case = Case(labels, trained=True)
    scaled = tuple(0.037 * gradient for gradient in case.gradients)
    found = case.solve(scaled, scale=None)
    assert found.scale == pytest.approx(0.037, rel=1e-4)
    assert case.error(found) < 1e-4
    if len(labels) > 1:
        with pytest.raises(NotApplicable):
            case.solve(scaled)


def test_without_a_bias() -> None:
    """One example by its direction, more by the same equations; one class fewer may be present."""
    draws = generator(3)
    weight = torch.randn((6, 40), generator=draws).double() / 6
    for count in (1, 3, 4):
        features = torch.rand((count, 40), generator=draws).double()
        labels = torch.arange(count)
        signal = (torch.softmax(features @ weight.T, 1) - torch.eye(6).double()[labels]) / count
        found = solve(weight, None, signal.T @ features, None, examples=count, labels=labels, nonnegative=True)
        assert found.features is not None
        assert float((found.features - features).norm() / features.norm()) < 1e-6
    with pytest.raises(NotApplicable, match="at most 4 examples without a bias"):
        solve(weight, None, torch.ones(6, 40), None, examples=5, labels=torch.arange(5))


def test_soft_labels() -> None:
    draws = generator(4)
    weight, features = torch.randn((5, 30), generator=draws).double() / 5, torch.rand((3, 30), generator=draws).double()
    soft = torch.softmax(2 * torch.randn((3, 5), generator=draws), 1).double()
    signal = (torch.softmax(features @ weight.T, 1) - soft) / 3
    gradients = (signal.T @ features, signal.sum(0))
    found = solve(weight, torch.zeros(5), *gradients, examples=3, labels=soft, nonnegative=True)
    assert found.features is not None
    assert float((found.features - features).norm() / features.norm()) < 1e-6
    one = 3 * signal[:1]
    found = solve(weight, torch.zeros(5), one.T @ features[:1], one[0], examples=1, labels=soft[:1])
    assert found.exact
    assert found.notes == ()
    found = solve(weight, torch.zeros(5), one.T @ features[:1], one[0], examples=1)
    assert found.features is not None
    assert float((found.features - features[:1]).norm()) < 1e-12
    assert found.labels is None
    assert "rank one" in found.notes[0]


def test_one_example_needs_no_loss() -> None:
    draws = generator(5)
    signal, features = torch.randn(1, generator=draws), torch.randn((1, 20), generator=draws)
    found = solve(
        torch.randn((1, 20)), torch.zeros(1), signal[:, None] * features, signal, examples=1, cross_entropy=False
    )
    assert found.features is not None
    assert torch.allclose(found.features.float(), features, rtol=1e-5)
    with pytest.raises(NotApplicable, match="not cross-entropy"):
        solve(torch.ones(1, 20), torch.zeros(1), features, signal, examples=2, cross_entropy=False)


def test_refused_with_what_was_seen() -> None:
    with pytest.raises(NotApplicable, match=r"10 examples and 10 classes: .* at most 9 examples"):
        Case(list(range(10))).solve()
    case = Case([1, 2, 3])
    twins = Case([1, 2])
    with pytest.raises(NotApplicable, match="does not show 3 examples"):
        twins.solve(examples=3, labels=torch.tensor([1, 1, 2]))
    with pytest.raises(NotApplicable, match="zero throughout"):
        case.solve(tuple(torch.zeros_like(gradient) for gradient in case.gradients))
    with pytest.raises(NotApplicable, match="NaN"):
        case.solve(tuple(gradient * torch.nan for gradient in case.gradients))


def test_a_pruned_gradient_is_refused() -> None:
    for labels in ([3], [1, 2, 3, 4]):
        case = Case(labels, trained=True)
        pruned = []
        for gradient in case.gradients:
            kept = gradient.abs() >= gradient.abs().flatten().kthvalue(int(0.9 * gradient.numel())).values
            pruned.append(gradient * kept)
        with pytest.raises(NotApplicable):
            case.solve(tuple(pruned))


@pytest.mark.parametrize("labels", [[3], [1, 2, 3, 4]])
def test_noise_leaves_an_approximation_that_knows_its_error(labels: list[int]) -> None:
    case, draws = Case(labels, trained=True), generator(6)
    noisy = tuple(g + 1e-3 * g.square().mean().sqrt() * torch.randn(g.shape, generator=draws) for g in case.gradients)
    found = case.solve(noisy)
    assert not found.exact
    assert 1e-5 < found.residual < 1e-2
    assert case.error(found) < 3 * found.error < 0.03


@pytest.mark.parametrize("count", [1, 3, 9])
def test_noise_in_place_of_a_gradient_is_refused(count: int) -> None:
    for seed in range(3):
        case, draws = Case(list(range(count)), trained=True), generator(seed)
        with pytest.raises(NotApplicable):
            case.solve(tuple(torch.randn(g.shape, generator=draws) * g.abs().mean() for g in case.gradients))


@pytest.mark.parametrize("seed", range(4))
def test_wrong_features_never_have_the_certificate(seed: int) -> None:
    """A gradient of the right rank that no examples have: features and output gradients that do not belong together."""
    draws = generator(seed)
    weight = torch.randn((8, 30), generator=draws).double() / 5
    features = torch.rand((4, 30), generator=draws).double()
    labels = torch.randint(8, (4,), generator=draws)
    other = torch.softmax(features @ weight.T + 0.3 * torch.randn((4, 8), generator=draws).double(), 1)
    signal = (other - torch.eye(8).double()[labels]) / 4
    try:
        found = solve(weight, torch.zeros(8), signal.T @ features, signal.sum(0), examples=4, labels=labels)
    except NotApplicable:
        return
    assert found.residual > 1e-8
    assert not found.exact
