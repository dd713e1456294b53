"""recover_labels against truth on real CIFAR-10: gradients, sums, one local step and many, both signs of
trouble.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import LocalTraining, Observation
from leakscope.labels import recover_labels

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@pytest.fixture(scope="module")
def cifar(real_data: Path) -> tuple[Tensor, Tensor]:
    path = real_data / "cifar-10-batches-bin" / "data_batch_1.bin"
    rows = np.fromfile(path, dtype=np.uint8, count=3073 * 600).reshape(-1, 3073)
    pixels = torch.tensor(rows[:, 1:].reshape(-1, 3, 32, 32) / 255.0, dtype=torch.float32)
    x = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return x, torch.tensor(rows[:, 0].astype(np.int64))


def small_net(bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(512, 10, bias=bias),
        )  # fmt: skip


def gradient_of(net: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy(net(x), y, reduction=reduction)
    names = [name for name, _ in net.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(net.parameters())), strict=True))


def local_delta(
    net: nn.Module, x: Tensor, y: Tensor, steps: int, lr: float, batch: int | None = None
) -> dict[str, Tensor]:
    """Weights before minus weights after, with torch's own SGD; ``steps`` passes over consecutive batches."""
    client = copy.deepcopy(net)
    optimizer = torch.optim.SGD(client.parameters(), lr=lr)
    for _ in range(steps):
        for chosen in torch.arange(len(x)).split(batch or len(x)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(client(x[chosen]), y[chosen]).backward()
            optimizer.step()
    after = dict(client.named_parameters())
    return {name: (value - after[name]).detach() for name, value in net.named_parameters()}


def observe(net: nn.Module, update: dict[str, Tensor], count: int | None, **facts: Any) -> Observation:
    bounds = ValueRange.normalised(MEAN, STD) if facts.get("knowledge", Knowledge.full).normalisation else None
    return Observation.from_update(
        net, update, input_shape=(3, 32, 32), num_classes=10, num_examples=count, value_range=bounds, **facts
    )


def draw(cifar: tuple[Tensor, Tensor], count: int, seed: int) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(0, 600, (count,), generator=torch.Generator().manual_seed(seed))
    return cifar[0][chosen], cifar[1][chosen]


def overlap(truth: Tensor, guess: Tensor) -> float:
    both = torch.minimum(torch.bincount(truth, minlength=10), torch.bincount(guess, minlength=10))
    return float(both.sum()) / len(truth)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_auto_finds_every_label_of_an_untrained_network(
    cifar: tuple[Tensor, Tensor], count: int, reduction: str
) -> None:
    net = small_net()
    for seed in range(5):
        x, y = draw(cifar, count, seed)
        seen = observe(net, gradient_of(net, x, y, reduction), count, reduction=reduction)
        found = recover_labels(seen)
        assert torch.equal(found.labels, y.sort().values)
        assert found.exact == (count == 1)


@pytest.mark.parametrize("count, floor", [(1, 1.0), (4, 0.95), (16, 0.88), (64, 0.88)])
def test_auto_without_a_bias_beats_llg(cifar: tuple[Tensor, Tensor], count: int, floor: float) -> None:
    net = small_net(bias=False)
    scores: dict[str, list[float]] = {"auto": [], "llg": []}
    for seed in range(6):
        x, y = draw(cifar, count, seed)
        seen = observe(net, gradient_of(net, x, y), count)
        for method, values in scores.items():
            values.append(overlap(y, recover_labels(seen, method).labels))
    assert np.mean(scores["auto"]) >= floor
    assert np.mean(scores["auto"]) >= np.mean(scores["llg"]) - 1e-9


@pytest.mark.parametrize("count, steps, batch", [(1, 1, 1), (1, 5, 1), (8, 1, 8), (8, 5, 8), (16, 5, 4)])
def test_weight_deltas_give_the_labels_and_not_their_complement(
    cifar: tuple[Tensor, Tensor], count: int, steps: int, batch: int
) -> None:
    net = small_net()
    facts = LocalTraining(epochs=steps, batch_size=batch, learning_rate=0.01, optimizer="sgd", momentum=0.0)
    for seed in range(3):
        x, y = draw(cifar, count, seed)
        delta = local_delta(net, x, y, steps, lr=0.01, batch=batch)
        known = recover_labels(observe(net, delta, count, kind="weight_delta", training=facts))
        assert torch.equal(known.labels, y.sort().values)
        blind = observe(net, delta, count, kind="weight_delta", knowledge=Knowledge.eavesdropper)
        found = recover_labels(blind)
        if found.method == "bias_counts":  # enough classes are absent to show the scale
            assert torch.equal(found.labels, y.sort().values)
            assert "absent" in " ".join(found.notes)
        else:
            assert found.method == ("bias" if count == 1 else "llg_bias")
            # Without the scale no rule is exact for repeated labels, but every class named is present.
            assert set(found.labels.tolist()) <= set(y.tolist())


@pytest.mark.parametrize("moment", ["average", "start", "end"])
def test_counts_of_many_steps_are_exact_for_a_head_of_zeros_that_hardly_moves(moment: str) -> None:
    """E11: a zero head says 1/C of anything, so counts are K (1/C - db); repeated labels, known scale."""
    net = small_net()
    nn.init.zeros_(net[-1].weight)
    nn.init.zeros_(net[-1].bias)
    x = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([3] * 7 + [0] * 4 + [9])
    delta = local_delta(net.double(), x.double(), y, 6, lr=1e-6, batch=12)
    facts = LocalTraining(epochs=6, batch_size=12, learning_rate=1e-6, optimizer="sgd")
    seen = observe(net, delta, 12, kind="weight_delta", training=facts)
    estimate = 12 * (0.1 - delta[next(n for n in delta if n.endswith("bias") and len(delta[n]) == 10)] / 6e-6)
    assert torch.allclose(estimate, torch.bincount(y, minlength=10).double(), atol=1e-3)
    assert recover_labels(seen, "bias_counts", moment=moment).labels.tolist() == sorted(y.tolist())


def test_known_counts_are_used_as_they_are_and_never_in_the_true_order() -> None:
    seen = dataclasses.replace(
        toy_observation(4),
        knowledge=dataclasses.replace(Knowledge.honest_server, labels="counts"),
        label_counts=torch.tensor([0, 3, 0, 1]),
    )
    found = recover_labels(seen)
    assert (found.labels.tolist(), found.method, found.exact) == ([1, 1, 1, 3], "known counts", True)
    with pytest.raises(ValueError, match="moment"):
        recover_labels(seen, moment="middle")


def test_one_local_step_equals_the_gradient(cifar: tuple[Tensor, Tensor]) -> None:
    net = small_net()
    x, y = draw(cifar, 16, 9)
    gradient = observe(net, gradient_of(net, x, y), 16)
    facts = LocalTraining(epochs=1, batch_size=16, learning_rate=0.1)
    delta = observe(net, local_delta(net, x, y, 1, lr=0.1), 16, kind="weight_delta", training=facts)
    for method in ("auto", "llg", "llg_bias", "bias_counts", "weight_counts"):
        assert torch.equal(recover_labels(gradient, method).labels, recover_labels(delta, method).labels)


def test_optimizers_without_a_scale_fall_back_to_a_scale_free_rule(cifar: tuple[Tensor, Tensor]) -> None:
    net = small_net()
    x, y = draw(cifar, 4, 0)
    facts = LocalTraining(epochs=1, batch_size=4, learning_rate=0.1, optimizer="adam")
    seen = observe(net, local_delta(net, x, y, 1, lr=0.1), 4, kind="weight_delta", training=facts)
    found = recover_labels(seen)
    assert found.method == "llg_bias"
    assert "plain SGD" in found.notes[0]
    with pytest.raises(ValueError, match="scale"):
        recover_labels(seen, "bias_counts")


def toy_observation(count: int | None = 2, **facts: Any) -> Observation:
    net = nn.Sequential(nn.Linear(3, 4))
    update = {"0.weight": torch.ones(4, 3), "0.bias": torch.tensor([0.5, -0.7, 0.4, -0.2])}
    return Observation.from_update(net, update, input_shape=(3,), num_classes=4, num_examples=count, **facts)


def test_known_labels_keep_their_order_and_known_counts_are_listed() -> None:
    labels = torch.tensor([3, 0])
    found = recover_labels(toy_observation(knowledge=Knowledge.full, labels=labels))
    assert (found.labels.tolist(), found.method, found.exact) == ([3, 0], "known", True)
    counting = dataclasses.replace(Knowledge.honest_server, labels="counts")
    found = recover_labels(toy_observation(knowledge=counting, label_counts=torch.tensor([0, 1, 0, 1])))
    assert found.labels.tolist() == [1, 3]


def test_unknown_batch_size_is_named() -> None:
    with pytest.raises(ValueError, match="num_examples"):
        recover_labels(toy_observation(None))


def test_an_altered_update_of_one_example_is_not_called_exact() -> None:
    found = recover_labels(toy_observation(1))
    assert found.labels.tolist() == [1]
    assert not found.exact
    assert "2 bias entries are negative" in found.notes[0]


def test_an_update_of_zeros_is_called_a_guess() -> None:
    seen = toy_observation(1)
    found = recover_labels(seen.with_update({k: torch.zeros_like(v) for k, v in seen.message.update.items()}))
    assert not found.exact
    assert "guess" in found.notes[-1]


def test_non_finite_updates_are_refused() -> None:
    seen = toy_observation(2)
    broken = {k: torch.full_like(v, float("nan")) for k, v in seen.message.update.items()}
    with pytest.raises(ValueError, match="NaN or infinite"):
        recover_labels(seen.with_update(broken))


@pytest.mark.parametrize("method, reason", [("nonsense", "expected one of"), ("bias", "one example")])
def test_wrong_methods_are_refused(method: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        recover_labels(toy_observation(2), method)


def test_the_global_random_state_is_left_alone_and_the_generator_decides() -> None:
    seen = toy_observation(4)
    before = torch.random.get_rng_state()
    first = recover_labels(seen, "bias_counts", torch.Generator().manual_seed(3)).labels
    second = recover_labels(seen, "bias_counts", torch.Generator().manual_seed(3)).labels
    assert torch.equal(first, second)
    assert torch.equal(before, torch.random.get_rng_state())
