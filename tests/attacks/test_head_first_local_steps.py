"""FedAvg updates of few plain steps on the same batch: the first step's values are exact, and the whole is replayed."""

from __future__ import annotations

import copy
import dataclasses
import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks.candidates import REPLAYED, certify
from leakscope.attacks.head_first import HeadFirst
from leakscope.attacks.head_first.case import Case
from leakscope.attacks.head_first.convolutions import (
    InvertValues,
    PeelConvolutions,
    _fewer_steps,
    explained_by_rounding,
    recover_at_convolution,
)
from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.defenses import GradientNoise
from leakscope.equations.local_networks import rounding
from leakscope.federation import FedAvg, FedSGD
from leakscope.matching.unexplained import unexplained
from leakscope.models.resnet import resnet18
from leakscope.network.gates import read_gated

SHAPE = (3, 16, 16)


def picture(seed: int, count: int = 1) -> Tensor:
    """Return smooth images in whole bytes."""
    draws = torch.Generator().manual_seed(seed)
    x = nn.functional.interpolate(torch.rand((count, 3, 6, 6), generator=draws), SHAPE[1:], mode="bicubic")
    return (255 * x.clamp(0, 1)).round() / 255


@cache
def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = resnet18(input_shape=SHAPE, num_classes=10, width=32)
        net(picture(99, 64))
    return net.eval()


def observe(x: Tensor, y: Tensor, defense: Any = None, **options: Any) -> Observation:
    protocol = FedAvg(**{"epochs": 2, "batch_size": len(x), "lr": 0.5, **options})
    return protocol.observe(network(), x, y, defense, generator=torch.Generator().manual_seed(1))


def attempt(seen: Observation) -> Case:
    case = Case(HeadFirst(rival=False), seen, torch.Generator().manual_seed(0))
    for stage in (PeelConvolutions(), InvertValues()):
        case.take(stage)
    return case


def test_an_image_behind_several_steps_is_exact_and_certified() -> None:
    x, y = picture(1), torch.tensor([1])
    found = HeadFirst(rival=False)(observe(x, y), seed=0)
    assert float((found.inputs - x).abs().max()) < 1e-3
    assert found.certificates
    assert all(one.holds for one in found.certificates)
    assert found.labels is not None
    assert found.labels.tolist() == [1]
    assert "steps not simulated" not in found.flags


def test_values_are_those_of_the_weights_that_the_client_received() -> None:
    x, y = picture(5, 2), torch.tensor([3, 7])
    held, known = recover_at_convolution(observe(x, y))
    assert held.labels is not None
    assert held.labels.tolist() == [3, 7]
    truth = known.network.onwards(0, x.double()).values
    for step, value in known.known.items():
        assert float((value - truth[step]).norm() / truth[step].norm()) < 1e-4


def test_a_step_that_follows_a_vanishing_loss_is_left_out() -> None:
    """With BatchNorm in train mode one step of this size is as good as all of them."""
    x, y = picture(1), torch.tensor([1])
    seen = observe(x, y, epochs=1)
    alone, _ = recover_at_convolution(seen)
    several = dataclasses.replace(seen.training, epochs=3)
    held, _ = recover_at_convolution(seen.with_facts(training=several))
    assert torch.allclose(held.features, alone.features, atol=1e-3 * float(alone.features.max()))


@pytest.mark.parametrize("taken", [1, 3])
def test_one_step_is_tried_where_no_more_show(taken: int) -> None:
    seen = observe(picture(1), torch.tensor([1]), epochs=taken)
    network = read_gated(seen.model, SHAPE, "head.fc1")
    noise = {name: rounding(value, 3) for name, value in seen.model.named_parameters()}
    assert (1 in _fewer_steps(network, dict(seen.message.update), 1, 3, noise)) is (taken == 1)


@pytest.mark.parametrize("wrong", ["rate", "steps"])
def test_a_wrong_recipe_is_not_certified(wrong: str) -> None:
    seen = observe(picture(1), torch.tensor([1]))
    facts = {"learning_rate": 0.45} if wrong == "rate" else {"epochs": 3}
    case = attempt(seen.with_facts(training=dataclasses.replace(seen.training, **facts)))
    assert case.best is None or not case.best.certificates


def test_values_of_a_later_step_are_not_certified() -> None:
    """As if the steps had been taken for each other: the last step's values at the weights of the first."""
    x, y = picture(1), torch.tensor([1])
    seen = observe(x, y)
    case = Case(HeadFirst(rival=False), seen, torch.Generator().manual_seed(0))
    case.take(PeelConvolutions())
    assert case.known is not None
    after = copy.deepcopy(seen.model)
    with torch.no_grad():
        for name, value in after.named_parameters():
            value -= seen.message.update[name] / 2
    later = read_gated(after, SHAPE, "head.fc1").onwards(0, x.double()).values
    case.known = dataclasses.replace(case.known, known={step: later[step] for step in case.known.known})
    case.take(InvertValues())
    assert case.best is not None
    assert not case.best.certificates


@pytest.mark.parametrize("rate", [0.5, 0.01])
def test_rounding_of_weights_explains_the_truth_and_nothing_near_it(rate: float) -> None:
    x, y = picture(1), torch.tensor([1])
    seen, draws = observe(x, y, lr=rate), torch.Generator().manual_seed(4)
    wide, tolerance = seen.to(dtype=torch.float64), explained_by_rounding(seen)
    assert EXPLAINED < tolerance <= REPLAYED
    # With small steps rounding leaves more than a certificate may allow, unless the replay rounds as the client did.
    assert (unexplained(wide, x.double(), y) < tolerance) is (rate == 0.5)
    assert unexplained(seen, x, y) < tolerance
    for size in (1e-3, 1e-2):
        planted = (x + size * torch.randn(x.shape, generator=draws)).clamp(0, 1)
        assert unexplained(wide, planted.double(), y) > tolerance
        assert not certify(seen, planted, y, unexplained(seen, planted, y), (0,), "planted", tolerance, replay=False)


def test_noise_is_not_certified() -> None:
    case = attempt(observe(picture(1), torch.tensor([1]), GradientNoise(sigma=1e-5)))
    assert case.best is None or not case.best.certificates


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 1e-3}, {"batch_size": 1}])
def test_other_clients_are_left_to_other_stages(options: dict[str, Any]) -> None:
    seen = observe(picture(5, 2), torch.tensor([3, 7]), **options)
    assert not PeelConvolutions().applies(Case(HeadFirst(), seen, torch.Generator()))


def test_many_steps_are_refused_at_once() -> None:
    seen = observe(picture(5, 4), torch.tensor([3, 7, 1, 2]), epochs=20, lr=0.01)
    started = time.process_time()
    with pytest.raises(NotApplicable):
        recover_at_convolution(seen)
    assert time.process_time() - started < 1


def test_what_was_not_found_leaves_nothing_held() -> None:
    """The cut of the first step is of no use to searches that compare one gradient with the sum of all steps."""
    seen = observe(picture(1), torch.tensor([1]))
    case = Case(HeadFirst(rival=False, iterations=1), seen, torch.Generator().manual_seed(0))
    case.take(PeelConvolutions())
    assert case.known is not None
    case.known = dataclasses.replace(case.known, known={step: v.flip(1) for step, v in case.known.known.items()})
    case.take(InvertValues())
    assert case.held is None
    assert case.known is None
    assert case.best is not None
    assert not case.best.certificates


def test_rounding_of_weights_does_not_certify_a_scale() -> None:
    """Of 200 shades this image has whole bytes at another scale; a loud stem leaves nothing of BatchNorm's epsilon."""
    x, y = (200 * picture(1)).round() / 200, torch.tensor([1])
    loud = copy.deepcopy(network())
    with torch.no_grad():
        loud.conv.weight.mul_(255)  # type: ignore[union-attr, operator]
    case = attempt(FedAvg(epochs=1, batch_size=1, lr=0.1, batchnorm="train").observe(loud, x, y))
    assert case.best is not None
    assert float((case.best.inputs - x).abs().max()) > 0.1
    assert not case.best.certificates


@pytest.mark.parametrize("rate", [0.5, 0.01])
def test_an_image_behind_statistics_of_the_batch_is_certified_after_one_step(rate: float) -> None:
    x, y = picture(1), torch.tensor([1])
    case = attempt(observe(x, y, epochs=1, lr=rate, batchnorm="train"))
    assert case.best is not None
    assert torch.allclose(case.best.inputs.float(), x, atol=1e-6)
    assert [one.holds for one in case.best.certificates] == [True]


@pytest.mark.parametrize("protocol", [FedSGD(batchnorm="eval"), FedAvg(epochs=2, batch_size=1, lr=0.5)])
@pytest.mark.parametrize("silent", ["stages.stage2", "stages.stage2.1.conv2"])
def test_layers_that_sent_zeros_end_the_peel(protocol: Any, silent: str) -> None:
    """As clients that freeze them do."""
    seen = protocol.observe(network(), picture(1), torch.tensor([1]))
    sent = {name: value * (not name.startswith(silent)) for name, value in seen.message.update.items()}
    case = attempt(seen.with_update(sent))
    assert case.best is None or not case.best.certificates
