"""Each task is the loss that torch knows by that name, and its targets can be searched and read back."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.task import (
    TASKS,
    Binary,
    Classification,
    CustomLoss,
    MultiLabel,
    PerPosition,
    Regression,
    Task,
    outputs_of,
)

F = nn.functional
DRAWS = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=DRAWS, dtype=torch.float64)


def sum_of_cubes(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().pow(3).sum(1).mean()


def per_example(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(1)


SOFT = torch.softmax(normal(5, 4), 1)
#: name -> (task, outputs, targets, torch's own loss of each example).
CASES: dict[str, tuple[Task, Tensor, Tensor, Any]] = {
    "classification": (
        Classification(),
        normal(5, 4),
        torch.tensor([0, 3, 1, 1, 2]),
        lambda z, t: F.cross_entropy(z, t, reduction="none"),
    ),
    "soft labels": (Classification(), normal(5, 4), SOFT, lambda z, t: -(t * torch.log_softmax(z, 1)).sum(1)),
    "one logit": (
        Classification(),
        normal(5, 1),
        torch.tensor([0, 1, 1, 0, 1]),
        lambda z, t: F.binary_cross_entropy_with_logits(z[:, 0], t.double(), reduction="none"),
    ),
    "binary": (
        Binary(),
        normal(5, 1),
        torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]),
        lambda z, t: F.binary_cross_entropy_with_logits(z[:, 0], t.double(), reduction="none"),
    ),
    "multi-label": (
        MultiLabel(),
        normal(5, 3),
        (normal(5, 3) > 0).double(),
        lambda z, t: per_example(F.binary_cross_entropy_with_logits(z, t, reduction="none")),
    ),
    "squared": (Regression(), normal(5, 3), normal(5, 3), lambda z, t: per_example(F.mse_loss(z, t, reduction="none"))),
    "one number": (Regression(), normal(5, 1), normal(5), lambda z, t: F.mse_loss(z[:, 0], t, reduction="none")),
    "absolute": (
        Regression(distance="absolute"),
        normal(5, 3),
        normal(5, 3),
        lambda z, t: per_example(F.l1_loss(z, t, reduction="none")),
    ),
    "huber": (
        Regression(distance="huber"),
        3 * normal(5, 3),
        normal(5, 3),
        lambda z, t: per_example(F.huber_loss(z, t, reduction="none")),
    ),
    "per position": (
        PerPosition(),
        normal(5, 6, 4),
        torch.randint(4, (5, 6), generator=DRAWS),
        lambda z, t: per_example(F.cross_entropy(z.transpose(1, 2), t, reduction="none")),
    ),
    "segmentation": (
        PerPosition(),
        normal(5, 2, 3, 4),
        torch.randint(4, (5, 2, 3), generator=DRAWS),
        lambda z, t: per_example(F.cross_entropy(z.permute(0, 3, 1, 2), t, reduction="none")),
    ),
    "soft positions": (
        PerPosition(),
        normal(5, 6, 4),
        torch.softmax(normal(5, 6, 4), -1),
        lambda z, t: per_example(-(t * torch.log_softmax(z, -1)).sum(-1)),
    ),
    "own loss": (
        CustomLoss(name="cubes", function=sum_of_cubes),
        normal(5, 3),
        normal(5, 3),
        lambda z, t: (z - t).abs().pow(3).sum(1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_torch(name: str) -> None:
    task, outputs, targets, reference = CASES[name]
    wanted = reference(outputs, targets)
    assert torch.allclose(task.each(outputs, targets), wanted, rtol=1e-12)
    assert float(task.loss(outputs, targets)) == pytest.approx(float(wanted.mean()), rel=1e-12)
    assert float(task.loss(outputs, targets, "sum")) == pytest.approx(float(wanted.sum()), rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_can_be_differentiated_twice(name: str) -> None:
    """As gradient matching does: by the weights, and then by inputs and, where they are searched, by targets."""
    task, outputs, targets, _ = CASES[name]
    if name in ("absolute", "huber"):
        return  # piecewise: its second derivative is zero in parts
    draws = torch.Generator().manual_seed(1)
    x = torch.rand(5, 2, generator=draws, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, outputs[0].numel(), generator=draws, dtype=torch.float64, requires_grad=True)

    def gradient(x: Tensor, targets: Tensor) -> Tensor:
        loss = task.loss((x @ weight).tanh().reshape(outputs.shape), targets)
        return torch.autograd.grad(loss, weight, create_graph=True)[0]

    assert torch.autograd.gradcheck(lambda x: gradient(x, targets), (x,))
    if task.searchable:
        free = torch.randn(outputs.shape, generator=draws, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda free: gradient(x.detach(), task.from_search(free)), (free,))


@pytest.mark.parametrize("name", CASES)
def test_right_targets_have_no_problems_and_wrong_ones_are_named(name: str) -> None:
    task, outputs, targets, _ = CASES[name]
    shape = tuple(outputs.shape[1:])
    if name != "soft positions":  # only a search has those
        assert task.problems_of(targets, 5, shape) == []
    assert task.problems_of(targets[:4], 5, shape)[0].startswith("y: expected")


@pytest.mark.parametrize(
    "task, targets, outputs, words",
    [
        (Classification(), torch.tensor([0, 4]), (4,), r"labels must lie in 0\.\.3 for this model, got 0\.\.4"),
        (Classification(), torch.tensor([0, 2]), (1,), r"labels must lie in 0\.\.1"),
        (Classification(), torch.tensor([-1, 2]), (4,), "labels must lie"),
        (Classification(), torch.tensor([0, 1], dtype=torch.int32), (4,), "int64"),
        (Classification(), torch.tensor([[0.5, 0.6], [1.0, 0.0]]), (2,), "add up to 1"),
        (Classification(), torch.tensor([[1.5, -0.5], [1.0, 0.0]]), (2,), "add up to 1"),
        (Classification(), torch.tensor([0, 1]), (3, 4), r"model: expected logits .* got \(examples, 3, 4\)"),
        (MultiLabel(), torch.tensor([[0.0, 2.0], [1.0, 0.0]]), (2,), "from 0 to 1, got 0 to 2"),
        (Regression(), torch.tensor([[0.0, float("nan")], [1.0, 0.0]]), (2,), "NaN"),
        (Regression(), torch.zeros(2, 3), (2,), r"expected numbers of shape \(2, 2\)"),
        (PerPosition(), torch.zeros(2, 3).long(), (4,), r"model: expected outputs of shape"),
        (PerPosition(), torch.zeros(2, 3), (3, 4), "int64"),
        (PerPosition(), torch.full((2, 3), 4), (3, 4), "labels must lie"),
        (
            CustomLoss(name="a", function=sum_of_cubes, targets="given"),
            torch.zeros(3),
            (4,),
            "one target for each of 2",
        ),
    ],
)
def test_wrong_targets_are_named(task: Task, targets: Tensor, outputs: tuple[int, ...], words: str) -> None:
    (problem,) = task.problems_of(targets, 2, outputs)
    with pytest.raises(ValueError, match=words):
        raise ValueError(problem)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0].searchable])
def test_what_a_search_ends_with_is_read_as_a_client_holds_it(name: str) -> None:
    """Numbers that stand for the targets without doubt are decoded to them, and are nearly the same to the loss."""
    task, outputs, targets, _ = CASES[name]
    shape = tuple(outputs.shape[1:])
    if name.startswith("soft"):
        return  # probabilities in between are decoded to the most probable class
    if isinstance(task, Classification | PerPosition) and shape[-1] > 1:
        free = 50 * F.one_hot(targets, shape[-1]).double()
    elif task.discrete:
        free = (100 * targets.double() - 50).reshape(5, *shape)
    else:
        free = targets.reshape(5, *shape)
    decoded = task.decode(free)
    assert torch.equal(decoded.reshape(targets.shape).to(targets), targets)
    assert task.problems_of(decoded, 5, shape) == []
    assert torch.allclose(task.loss(outputs, task.from_search(free)), task.loss(outputs, decoded), atol=1e-9)
    assert task.problems_of(task.examples(5, shape), 5, shape) == []
    wrong = task.right(targets, decoded.reshape(targets.shape).to(targets))
    assert torch.equal(wrong, torch.ones(5).double() if task.discrete else torch.zeros(5).double())


def test_the_share_of_right_targets_and_the_distance_of_numbers() -> None:
    assert Classification().right(torch.tensor([0, 1]), torch.tensor([0, 2])).tolist() == [1.0, 0.0]
    assert Classification().right(torch.tensor([[0.2, 0.8]]), torch.tensor([1])).tolist() == [1.0]
    assert PerPosition().right(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 0, 0]])).tolist() == [0.5]
    assert Regression().right(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]])).tolist() == [12.5**0.5]
    assert Regression().right(torch.tensor([3.0]), torch.tensor([[1.0]])).tolist() == [2.0]


def test_counts_are_of_classes_alone() -> None:
    counts = Classification().counts(torch.tensor([0, 2, 2]), (4,))
    assert counts is not None
    assert counts.tolist() == [1, 0, 2, 0]
    assert Classification().counts(torch.tensor([[0.5, 0.5]]), (2,)) is None
    assert Regression().counts(torch.zeros(2, 3), (3,)) is None
    assert [name for name, entry in TASKS.items() if entry.target.has_classes] == ["classification"]


def test_tasks_are_found_by_name_and_hold_their_settings() -> None:
    assert TASKS.target("per_position") is PerPosition
    assert TASKS.find("MultiLabel").name == "multi-label"
    assert Regression.build({"distance": "huber"}) == Regression(distance="huber")
    with pytest.raises(ValueError, match="distance: expected 'squared', 'absolute' or 'huber', got 'far'"):
        Regression(distance="far")  # type: ignore[arg-type]


# --- a loss of one's own ---------------------------------------------------------------------------------------------


@pytest.fixture
def own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = f"own_loss_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(
        "def quartic(outputs, targets):\n    return (outputs - targets).pow(4).mean()\n"
        "def each(outputs, targets):\n    return (outputs - targets).pow(4)\n"
        "text = 'quartic'\n"
    )
    monkeypatch.chdir(tmp_path)
    return module


def test_a_loss_of_ones_own_is_loaded_and_travels_by_its_name(own_loss: str) -> None:
    task = CustomLoss.load(f"{own_loss}:quartic", targets="given")
    z, t = normal(4, 3), normal(4, 3)
    assert torch.equal(task.loss(z, t), (z - t).pow(4).mean())
    assert torch.allclose(task.loss(z, t, "sum"), 4 * (z - t).pow(4).mean())
    assert not task.searchable
    assert CustomLoss.load(f"{own_loss}:quartic").searchable
    for again in (pickle.loads(pickle.dumps(task)), copy.deepcopy(task)):
        assert again == task
        assert again.targets == "given"
        assert torch.equal(again.loss(z, t), task.loss(z, t))
    assert b"quartic" in pickle.dumps(task)
    assert repr(task) == f"CustomLoss(name='{own_loss}:quartic', targets='given')"


def test_wrong_losses_of_ones_own_are_named(own_loss: str) -> None:
    for name, words in (
        (f"{own_loss}:absent", "has no 'absent'"),
        (f"{own_loss}:text", "expected a function"),
        ("no_such_loss:f", "no module named"),
        ("quartic", "expected package.module:Name"),
    ):
        with pytest.raises(ValueError, match=words):
            CustomLoss.load(name)
    with pytest.raises(ValueError, match=r"name: expected package\.module:function, got 'x'"):
        CustomLoss(name="x")
    with pytest.raises(ValueError, match=r"expected one number, the mean over the batch, got \(4, 3\)"):
        CustomLoss.load(f"{own_loss}:each").loss(normal(4, 3), normal(4, 3))


def test_a_loss_without_a_module_is_copied_with_its_function() -> None:
    task = CustomLoss(name="cubes", function=sum_of_cubes)
    assert copy.deepcopy(task).function is sum_of_cubes
    assert pickle.loads(pickle.dumps(task)).function is sum_of_cubes


# --- what models return ----------------------------------------------------------------------------------------------


def test_the_outputs_are_found_in_what_a_model_returns() -> None:
    wanted, other = torch.zeros(2, 3), torch.ones(2, 7)
    for answer in (
        wanted,
        (wanted, other),
        [None, wanted],
        {"hidden": other, "logits": wanted},
        {"out": wanted, "aux": other},
        SimpleNamespace(loss=None, hidden=other, logits=wanted),
    ):
        assert outputs_of(answer) is wanted


@pytest.mark.parametrize(
    "answer", [None, 3, (), {}, {"logits": "no"}, (None, 4), SimpleNamespace(hidden=torch.zeros(1))]
)
def test_answers_without_a_tensor_are_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match=f"model: expected a tensor, .* got {type(answer).__name__}"):
        outputs_of(answer)
