"""Models as people bring them: head-first gives a result or a clear refusal, and no certificate for a wrong picture."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.attacks import IDLG, HeadFirst
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.settings import setting
from leakscope.federation import FedAvg, FedSGD

pytestmark = pytest.mark.slow

SMALL = (1, 8, 8)


class User(nn.Module):
    """Two convolutions and a head; what is in between differs."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.relu, **layers: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(96, 5)
        self.act = act
        for name, layer in layers.items():
            setattr(self, name, layer)

    def features(self, x: Tensor) -> Tensor:
        return self.act(self.conv2(self.act(self.conv1(x)))).flatten(1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


class Dropout(User):
    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(F.dropout(self.features(x), 0.4, self.training))
        return answer


class Answers(User):
    def forward(self, x: Tensor) -> Any:
        return {"logits": self.head(self.features(x))}


class Narrow(User):
    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = super().forward(x.float())
        return answer


class Checked(User):
    def forward(self, x: Tensor) -> Tensor:
        assert float(x.detach().abs().max()) < 99
        answer: Tensor = super().forward(x)
        return answer


class TwoHeads(User):
    """The second head is run first, and not asked."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        self.side(features)
        answer: Tensor = self.head(features)
        return answer


class Ensemble(TwoHeads):
    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        answer: Tensor = self.head(features) + self.side(features)
        return answer


class Scaled(User):
    """A matrix of its own, behind the head."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = super().forward(x) * self.scale
        return answer


class DenseFirst(User):
    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = super().forward(F.relu(self.first(x.flatten(1))).view(-1, 1, 8, 8))
        return answer


class Twice(User):
    def features(self, x: Tensor) -> Tensor:
        x = F.pad(F.relu(self.conv1(x)), (1, 1, 1, 1))
        return F.relu(self.conv2(F.pad(F.relu(self.conv2(x)), (0, 0, 0, 0)))).flatten(1)


class Recurrent(nn.Module):
    def __init__(self, cells: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.head = cells(8, 12, batch_first=True), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.cells(x[:, 0])[0][:, -1])
        return answer


def frozen(*prefixes: str) -> nn.Module:
    net = User()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return net


def normed(*norms: nn.Module) -> nn.Module:
    first, second = norms
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, bias=False), first, nn.ReLU(), nn.Conv2d(6, 6, 3, bias=False), second, nn.ReLU()),
        *(nn.Flatten(), nn.Linear(96, 5)),
    )


def tied_head() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 5))
    net[5].weight = net[1].weight
    return net


USERS: dict[str, Callable[[], nn.Module]] = {
    "plain": User,
    "dropout": Dropout,
    "outputs in a dict": Answers,
    "float32 only": Narrow,
    "smooth and float32 only": lambda: Narrow(torch.tanh),
    "checks its input": Checked,
    "two heads": lambda: TwoHeads(side=nn.Linear(96, 5)),
    "sum of two heads": lambda: Ensemble(side=nn.Linear(96, 5)),
    "scaled behind the head": Scaled,
    "dense first": lambda: DenseFirst(first=nn.Linear(64, 64)),
    "shared convolution": Twice,
    "tied head": tied_head,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "frozen first": lambda: frozen("conv1"),
    "frozen middle": lambda: frozen("conv2"),
    "frozen body": lambda: frozen("conv"),
    "frozen head": lambda: frozen("head"),
    "layer norm": lambda: normed(nn.LayerNorm([6, 6, 6]), nn.GroupNorm(2, 6)),
    "batch norm": lambda: normed(nn.BatchNorm2d(6), nn.BatchNorm2d(6)),
    "batch norm without statistics": lambda: normed(nn.BatchNorm2d(6, track_running_stats=False), nn.Identity()),
    "PReLU": lambda: nn.Sequential(nn.Conv2d(1, 6, 3), nn.PReLU(), nn.Flatten(), nn.Linear(216, 5)),
    "one convolution": lambda: nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5)),
    "one output": lambda: nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 1)),
    "head without weights before it": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5)),
}
PROTOCOLS = {
    "FedSGD": FedSGD(),
    "FedSGD, BatchNorm in train mode": FedSGD(batchnorm="train"),
    "FedAvg, one step": FedAvg(epochs=1, batch_size=3, lr=0.05),
    "FedAvg": FedAvg(epochs=2, batch_size=3, lr=0.05),  # several steps; orders of batches have tests of their own
}


@dataclass(frozen=True, kw_only=True)
class BriefLeastSquares(IDLG):
    """The rival of smooth nets with as few steps as the other searches here: that it is run is what counts."""

    iterations: int = setting(4, "Steps of the search.", ge=1)


@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize("name", USERS)
def test_models_as_people_bring_them_give_a_result_or_a_clear_refusal(
    name: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leakscope.attacks.head_first.stages.IDLG", BriefLeastSquares)
    torch.manual_seed(1)
    net = USERS[name]()
    x = torch.rand((examples, *SMALL), generator=torch.Generator().manual_seed(2))
    x = (x + x.roll(1, 2) + x.roll(1, 3)) / 3
    y = torch.arange(examples) % (2 if name == "one output" else 5)
    state = copy.deepcopy(net.state_dict())
    for protocol_name, protocol in PROTOCOLS.items():
        if protocol_name.endswith("train mode") and not name.startswith("batch norm"):
            continue
        if protocol_name == "FedAvg, one step" and examples > 1:
            continue  # as FedSGD
        seen = protocol.observe(net, x, y)
        if name == "LSTM" and protocol_name == "FedAvg":
            continue  # the steps of PyTorch's LSTM on the CPU cannot be unrolled; inverting-gradients fails too
        try:
            result = HeadFirst(iterations=4, tries=1)(seen)
        except NotApplicable:
            continue
        assert result.inputs.shape == x.shape
        assert bool(torch.isfinite(result.inputs).all())
        assert math.isfinite(result.info["distance"])
        if result.certified:
            assert result.info["distance"] < 1e-4, "a certificate means that the update is explained"
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
