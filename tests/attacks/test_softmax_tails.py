"""Models that end in log_softmax or softmax: the head is read through it, on PyTorch's own MNIST example, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.attacks import HeadFirst
from leakscope.capture.sign import check_sign, logit_layer
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.task import Classification, Regression
from leakscope.equations.embedding import recover_embedding
from leakscope.federation import FedAvg, FedSGD
from leakscope.labels import recover_labels
from leakscope.models.resnet import resnet18
from leakscope.network.layers import find_head

SHAPE = (1, 28, 28)


class MnistExample(nn.Module):
    """Conv, ReLU, conv, ReLU, max pooling, dropout, dense, ReLU, dropout, dense, log_softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = self.dropout2(F.relu(self.fc1(torch.flatten(self.dropout1(x), 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def seeded(make: type[nn.Module] | object, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net: nn.Module = make()  # type: ignore[operator]
    return net.eval()


def digits(count: int) -> Tensor:
    """Return smooth strokes on black, in whole bytes."""
    draws = torch.Generator().manual_seed(0)
    small = (torch.rand((count, 1, 7, 7), generator=draws) - 0.5).clamp_min(0)
    return (255 * F.interpolate(2 * small, SHAPE[1:], mode="bilinear")).round() / 255


def small_net(*tail: nn.Module) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2704, 10), *tail))


def test_logits_behind_a_softmax_count_for_cross_entropy_alone() -> None:
    head = find_head(small_net(nn.LogSoftmax(1)), SHAPE, 10)
    assert head.gives_logits(Classification())
    assert not head.gives_logits(Regression())
    seen = FedSGD().observe(small_net(nn.LogSoftmax(1)), digits(1), torch.zeros(1, 10), task=Regression())
    with pytest.raises(NotApplicable, match="something follows"):
        recover_embedding(seen)


def test_the_digit_behind_pytorchs_mnist_example_is_exact_and_certified() -> None:
    x, y = digits(1), torch.tensor([7])
    found = HeadFirst(iterations=300)(FedSGD().observe(seeded(MnistExample), x, y), seed=0)
    assert float((found.inputs - x).abs().max()) < 1e-3
    assert [one.holds for one in found.certificates] == [True]
    assert found.labels is not None
    assert found.labels.tolist() == [7]


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=1, batch_size=4, lr=0.1)])
def test_a_batch_behind_log_softmax_leaks_labels_and_features(protocol: FedSGD | FedAvg) -> None:
    x, y = digits(4), torch.tensor([3, 1, 3, 7])
    seen = protocol.observe(seeded(MnistExample), x, y)
    assert recover_labels(seen).labels.tolist() == [1, 3, 3, 7]
    found = recover_embedding(seen)
    assert found.residual < 1e-3
    assert found.labels is not None
    assert found.labels.tolist() == [1, 3, 3, 7]


def test_the_sign_of_an_update_is_checked_behind_log_softmax() -> None:
    net = seeded(MnistExample)
    layer, update = logit_layer(net, SHAPE, 10), FedSGD().observe(net, digits(2), torch.tensor([3, 1])).message.update
    assert layer is not None
    assert layer.weight_name == "fc2.weight"
    assert check_sign(update, layer, 2, {}).answer == "right"
    assert check_sign({name: -value for name, value in update.items()}, layer, 2, {}).answer == "wrong"


@pytest.mark.parametrize("tail", [nn.LogSoftmax(1), nn.Softmax(1)], ids=["log_softmax", "softmax"])
def test_convolutions_are_peeled_through_the_tail(tail: nn.Module) -> None:
    draws, shape = torch.Generator().manual_seed(1), (3, 16, 16)
    x = F.interpolate(torch.rand((1, 3, 6, 6), generator=draws), shape[1:], mode="bicubic").clamp(0, 1)
    x, y = (255 * x).round() / 255, torch.tensor([4])
    net = seeded(lambda: nn.Sequential(resnet18(input_shape=shape, num_classes=10, width=16), tail))
    found = HeadFirst(rival=False)(FedSGD(batchnorm="eval").observe(net, x, y), seed=0)
    assert float((found.inputs - x).abs().max()) < 1e-3
    assert [one.holds for one in found.certificates] == [True]


def softmax_net(confidence: float) -> nn.Module:
    net = small_net(nn.Softmax(1))
    head = net[3]  # type: ignore[index]
    with torch.no_grad():
        head.weight.mul_(confidence)
    return net


@pytest.mark.parametrize("confidence", [1.0, 30.0])
def test_one_example_behind_a_softmax_is_solved_and_its_label_replayed(confidence: float) -> None:
    """With a confident net, the sign of the bias gradient names another class than the label's."""
    net, x = softmax_net(confidence), digits(1)
    for label in range(10):
        seen = FedSGD().observe(net, x, torch.tensor([label]))
        read = recover_labels(seen)
        assert read.labels.tolist() == [label]
        assert read.exact
        found = recover_embedding(seen)
        assert found.labels is not None
        assert found.labels.tolist() == [label]
        assert (found.features - net[:3](x).double()).norm() < 1e-3 * found.features.norm()  # type: ignore[index]


def test_a_batch_behind_a_softmax_is_refused_and_its_labels_are_a_guess() -> None:
    seen = FedSGD().observe(small_net(nn.Softmax(1)), digits(2), torch.tensor([3, 1]))
    with pytest.raises(NotApplicable, match="one example"):
        recover_embedding(seen)
    assert not recover_labels(seen).exact
    assert any("guess" in note for note in recover_labels(seen).notes)


def test_what_is_read_before_another_activation_is_never_called_exact() -> None:
    seen: Observation = FedSGD().observe(small_net(nn.ReLU()), digits(1), torch.tensor([3]))
    assert not recover_labels(seen).exact
    with pytest.raises(NotApplicable, match="something follows"):
        recover_embedding(seen)
