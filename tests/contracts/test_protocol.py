"""Clients of every task against plain autograd, what a defence does to a message, and a protocol of one's own."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import InvertingGradients, make_attack
from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.errors import UserError
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import LocalTraining, UpdateKind
from leakscope.contracts.protocol import ClientSide, Protocol, default_knowledge
from leakscope.contracts.registry import Entry
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Classification, CustomLoss, MultiLabel, PerPosition, Regression, Task
from leakscope.defenses import DPSGD, FakeGradients, GradientNoise, GradientPruning
from leakscope.federation import PROTOCOLS, FedAvg, FedSGD, Vertical
from leakscope.federation.client import OneMessage, batch_gradient

F = nn.functional
DRAWS = torch.Generator().manual_seed(0)
X = torch.rand(5, 6, generator=DRAWS)


class Answers(nn.Module):
    """A small net whose outputs have some shape and come wrapped in some way."""

    def __init__(self, shape: tuple[int, ...], wrap: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, math.prod(shape))
        self.shape, self.wrap = shape, wrap

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        outputs = self.head(hidden).reshape(len(x), *self.shape)
        wrapped = {
            "tensor": outputs,
            "tuple": (outputs, hidden),
            "dict": {"hidden": hidden, "logits": outputs},
            "object": SimpleNamespace(logits=outputs, hidden=hidden),
        }
        return wrapped[self.wrap]


def cubes(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().pow(3).mean()


NUMBERS = torch.randn(5, 3, generator=DRAWS)
LABELS = torch.tensor([0, 2, 1, 2, 0])
POSITIONS = torch.randint(3, (5, 4), generator=DRAWS)
SOFT = torch.softmax(NUMBERS, 1)
#: name -> (model, task, targets, the mean loss by torch's own functions of raw outputs).
CASES: dict[str, tuple[Answers, Task, Tensor, Any]] = {
    "labels": (Answers((3,)), Classification(), LABELS, F.cross_entropy),
    "soft labels": (Answers((3,)), Classification(), SOFT, F.cross_entropy),
    "regression": (Answers((3,)), Regression(), NUMBERS, F.mse_loss),
    "one number": (Answers((1,)), Regression(), NUMBERS[:, 0], lambda z, t: F.mse_loss(z[:, 0], t)),
    "multi-label": (
        Answers((3,)),
        MultiLabel(),
        (NUMBERS > 0).float(),
        F.binary_cross_entropy_with_logits,
    ),
    "per position": (
        Answers((4, 3)),
        PerPosition(),
        POSITIONS,
        lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()),
    ),
    "own loss": (Answers((3,)), CustomLoss(name="cubes", function=cubes), NUMBERS, cubes),
    "dict": (Answers((3,), "dict"), Classification(), LABELS, F.cross_entropy),
    "tuple": (Answers((3,), "tuple"), Classification(), LABELS, F.cross_entropy),
    "object": (Answers((3,), "object"), Regression(), NUMBERS, F.mse_loss),
}


def plain(net: Answers) -> Answers:
    """A copy that returns its outputs alone."""
    twin = copy.deepcopy(net)
    twin.wrap = "tensor"
    return twin


@pytest.mark.parametrize("name", CASES)
def test_fedsgd_sends_the_gradient_that_autograd_gives(name: str) -> None:
    net, task, y, reference = CASES[name]
    twin = plain(net)
    wanted = torch.autograd.grad(reference(twin(X), y), list(twin.parameters()))
    for reduction, factor in (("mean", 1), ("sum", 5)):
        seen = FedSGD(reduction=reduction).observe(net, X, y, task=task)  # type: ignore[arg-type]
        assert seen.task == task
        assert seen.output_shape == net.shape
        for found, gradient in zip(seen.message.update.values(), wanted, strict=True):
            assert torch.allclose(found, factor * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_fedavg_sends_what_a_loop_of_ones_own_does(name: str) -> None:
    net, task, y, reference = CASES[name]
    seen = FedAvg(epochs=2, batch_size=2, lr=0.1, shuffle=False).observe(net, X, y, task=task)
    twin = plain(net)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        for rows in ([0, 1], [2, 3], [4]):
            optimizer.zero_grad()
            reference(twin(X[rows]), y[rows]).backward()
            optimizer.step()
    for (name_, before), after in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(seen.message.update[name_], before - after, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_each_example_make_up_that_of_the_batch(name: str) -> None:
    """What a defence of single examples works on, with a bound that nothing reaches and no noise."""
    net, task, y, _ = CASES[name]
    harmless = DPSGD(clip=1e6, noise_multiplier=0.0)
    one, two = (FedSGD().observe(net, X, y, defense, task=task).message.update for defense in (None, harmless))
    assert all(torch.allclose(one[key], two[key], atol=1e-6) for key in one)


def test_targets_of_the_wrong_kind_are_refused_before_anything_is_computed() -> None:
    net = Answers((3,))
    for task, y, words in (
        (Regression(), torch.zeros(5, 2), r"expected numbers of shape \(5, 3\)"),
        (MultiLabel(), 2 * torch.ones(5, 3), "from 0 to 1"),
        (PerPosition(), LABELS, r"model: expected outputs of shape \(examples, positions, classes\)"),
        (Classification(), NUMBERS, "add up to 1"),
    ):
        with pytest.raises(ValueError, match=words):
            FedSGD().observe(net, X, y, task=task)
    with pytest.raises(ValueError, match="num_classes is 4 but the model has 3 outputs"):
        FedSGD().observe(net, X, LABELS, num_classes=4)
    with pytest.raises(ValueError, match=r"model: expected logits .* got \(examples, 4, 3\)"):
        FedSGD().observe(Answers((4, 3)), X, LABELS)


def test_knowledge_of_labels_is_knowledge_of_targets() -> None:
    net, task, y, _ = CASES["regression"]
    assert FedSGD().observe(net, X, y, task=task).labels is None
    full = FedSGD().observe(net, X, y, task=task, knowledge=Knowledge.full)
    assert torch.equal(full.labels, y)
    assert full.label_counts is None


def test_what_the_adversary_knows_unless_somebody_says_otherwise() -> None:
    assert default_knowledge([Vertical()]) == Knowledge.vertical_server
    assert default_knowledge([FedSGD(), FedAvg()]) == Knowledge.honest_server
    assert default_knowledge([FedSGD(), Vertical()]) == Knowledge.honest_server


# --- what becomes of a message under a defence -----------------------------------------------------------------------


def spread(protocol: Protocol, defense: Defense, draws: int = 400) -> float:
    """The measured standard deviation of an entry of the update."""
    net, task, y, _ = CASES["labels"]
    generator = torch.Generator().manual_seed(1)
    seen = [protocol.observe(net, X, y, defense, generator=generator, task=task).message.update for _ in range(draws)]
    return float(torch.stack([torch.cat([v.flatten() for v in one.values()]) for one in seen]).std(0).mean())


@pytest.mark.parametrize("examples", [1, 5, 32])
def test_the_channel_of_dp_sgd_has_the_noise_of_the_mean_or_the_sum(examples: int) -> None:
    rule = DPSGD(clip=0.5, noise_multiplier=2.0)
    assert rule.channel(examples=examples) == Channel(clip=0.5, clip_per="example", noise=1.0 / examples)
    assert rule.channel(examples=examples, reduction="sum") == Channel(clip=0.5, clip_per="example", noise=1.0)
    assert FedSGD().channel(rule, examples) == rule.channel(examples=examples)
    assert FedSGD(reduction="sum").channel(rule, examples) == rule.channel(examples=examples, reduction="sum")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_noise_of_dp_sgd_is_measured_as_the_channel_says(reduction: Any) -> None:
    rule, protocol = DPSGD(clip=0.5, noise_multiplier=0.4), FedSGD(reduction=reduction)
    channel = protocol.channel(rule, len(X))
    assert channel is not None
    assert spread(protocol, rule) == pytest.approx(channel.level("any"), rel=0.02)


def test_noise_of_every_local_step_adds_up() -> None:
    rule = DPSGD(clip=0.5, noise_multiplier=0.4)
    protocol = FedAvg(epochs=2, batch_size=5, lr=0.01)
    channel = protocol.channel(rule, 5)
    assert channel == Channel(noise=0.01 * math.sqrt(2) * 0.2 / 5)
    assert spread(protocol, rule) == pytest.approx(channel.level("any"), rel=0.02)
    assert FedAvg(epochs=3, batch_size=2, lr=0.1).channel(rule, 5) == Channel(noise=0.1 * 3 * 0.2 / 2)


def test_a_defence_of_the_message_is_the_same_whatever_made_it() -> None:
    for protocol in (FedSGD(), FedAvg(optimizer="adam"), Vertical(batch_size=2)):
        assert protocol.channel(GradientNoise(sigma=0.3), 5) == Channel(noise=0.3)
        assert protocol.channel(GradientPruning(fraction=0.4, scope="global"), 5) == Channel(
            prune=0.4, prune_scope="global"
        )
        assert protocol.channel(Defense(), 5) == Channel()
    assert Vertical(batch_size=2).channel(DPSGD(clip=1.0, noise_multiplier=1.0), 5) == Channel(
        clip=1.0, clip_per="example", noise=0.5
    )


@pytest.mark.parametrize("protocol", [FedAvg(optimizer="adam"), FedAvg(momentum=0.9)], ids=repr)
def test_where_nobody_has_worked_it_out_there_is_no_channel(protocol: FedAvg) -> None:
    assert protocol.channel(DPSGD(), 5) is None

    class Unknown(Defense):
        def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
            return {name: value.sign() for name, value in update.items()}

    assert FedSGD().channel(Unknown(), 5) is None


def test_the_observation_carries_the_channel_for_those_who_know_the_defence() -> None:
    net, _, y, _ = CASES["labels"]
    rule = DPSGD(clip=0.5, noise_multiplier=0.4)
    assert FedSGD().observe(net, X, y, rule).channel is None
    knowing = FedSGD().observe(net, X, y, rule, Knowledge.adaptive_server)
    assert knowing.channel == rule.channel(examples=5)
    assert FedSGD().observe(net, X, y, None, Knowledge.adaptive_server).channel == Channel()
    for defense in (GradientNoise(), GradientPruning(), DPSGD(), FakeGradients()):
        seen = FedSGD().observe(net, X, y, defense, Knowledge.adaptive_server)
        assert seen.channel == defense.channel(examples=5)


# --- a worked example: adding a protocol -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FedProx(OneMessage):
    """Steps on the whole batch with a pull back to the received weights (Li et al. 2020)."""

    kind: ClassVar[UpdateKind] = "weight_delta"

    lr: float = setting(0.1, "The client's learning rate.", gt=0)
    pull: float = setting(0.5, "Weight of the squared distance from the received weights.", ge=0)
    steps: int = setting(1, "Local steps.", ge=1)

    def _train(self, client: ClientSide) -> tuple[Gradient, LocalTraining]:
        trained, before = client.trained, client.weights()
        for _ in range(self.steps):
            gradient = batch_gradient(client)
            with torch.no_grad():
                for name, p in trained.items():
                    p -= self.lr * (gradient[name] + self.pull * (p - before[name]))
        recipe = LocalTraining(
            epochs=self.steps, batch_size=len(client.x), learning_rate=self.lr, optimizer="sgd", momentum=0.0
        )
        return {name: before[name] - p.detach() for name, p in trained.items()}, recipe


def test_a_protocol_of_ones_own_is_observed() -> None:
    net, _, y, _ = CASES["labels"]
    seen = FedProx(steps=3).observe(net, X, y)
    assert seen.message.kind == "weight_delta"
    assert (seen.training.epochs, seen.training.batch_size, seen.training.learning_rate) == (3, 5, 0.1)
    same = FedAvg(epochs=3, batch_size=5, lr=0.1).observe(net, X, y).message.update
    free = FedProx(steps=3, pull=0.0).observe(net, X, y).message.update
    assert all(torch.allclose(free[name], same[name], atol=1e-6) for name in same), "without a pull it is FedAvg"
    assert not all(torch.allclose(seen.message.update[name], same[name], atol=1e-6) for name in same)
    blind = FedProx().observe(net, X, y, knowledge=Knowledge.eavesdropper)
    assert blind.training == LocalTraining(), "what is not known is withheld for every protocol, in one place"


def test_a_protocol_of_ones_own_takes_defences_and_is_checked() -> None:
    net, _, y, _ = CASES["labels"]
    bare = FedProx().observe(net, X, y).message.update
    noisy = FedProx().observe(net, X, y, GradientNoise(sigma=0.1)).message.update
    assert not torch.allclose(bare["head.weight"], noisy["head.weight"])
    clipped = FedProx().observe(net, X, y, DPSGD(clip=0.01, noise_multiplier=0.0)).message.update
    assert math.sqrt(sum(float(v.square().sum()) for v in clipped.values())) <= 0.1 * 0.01 * (1 + 1e-5)
    with pytest.raises(ValueError, match=r"(?s)FedProx:.*lr: expected a number above 0.*steps: "):
        FedProx(lr=0.0, steps=0)
    with pytest.raises(ValueError, match="NaN"):
        FedProx().observe(net, X * math.nan, y)


def test_a_protocol_of_ones_own_is_attacked() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3))
    x, y = X[:1], LABELS[:1]
    seen = FedProx(steps=1).observe(net, x, y)
    found = InvertingGradients(iterations=300, tv=0.0)(seen, seed=0)
    assert found.labels is not None
    assert found.labels.tolist() == y.tolist()
    assert float((found.inputs - x).square().mean().sqrt()) < 0.05


def test_a_protocol_of_ones_own_is_registered_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROTOCOLS, "_entries", dict(PROTOCOLS._entries))
    PROTOCOLS.register(Entry("fedprox", FedProx, "local steps with a pull back"))
    assert PROTOCOLS.target("FedProx").build({"pull": 1}) == FedProx(pull=1.0)


class OnePixel(nn.Sequential):
    """A network whose last map is 1x1, as a narrow ResNet's on small images."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    "protocol, examples",
    [(FedSGD(batchnorm="train"), 1), (FedAvg(batchnorm="train", epochs=1, batch_size=3, lr=0.1), 4)],
    ids=["batch of one", "last batch of one"],
)
def test_a_batch_that_batchnorm_cannot_train_on(protocol: Protocol, examples: int) -> None:
    x, y = torch.rand(examples, 1, 4, 4), torch.zeros(examples, dtype=torch.long)
    with pytest.raises(UserError, match="two values a channel"):
        protocol.observe(OnePixel(), x, y)
    with pytest.raises(UserError, match="two values a channel"):
        protocol.send(protocol.client_side(OnePixel(), x, y)[0])


def test_an_attack_that_is_told_of_a_batch_of_one_says_what_is_wrong() -> None:
    seen = FedSGD(batchnorm="train").observe(OnePixel(), torch.rand(4, 1, 4, 4), torch.arange(4) % 3)
    assert make_attack("idlg", iterations=2)(seen).inputs.shape == (4, 1, 4, 4)
    told = seen.with_facts(num_examples=1)
    with pytest.raises(UserError, match="two values a channel"):
        make_attack("idlg", iterations=2)(told)
