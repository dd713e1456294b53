"""R-GAP: exact where every layer has full rank, honest where not, and the closed form at the logit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks.rgap import RGAP
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.data import load_data
from leakscope.equations.last_layer import LEAST_PRODUCT, logistic_margins
from leakscope.federation import FedAvg
from leakscope.models import build_model


def seen(
    net: nn.Module, x: Tensor, y: Tensor, *, dtype: torch.dtype = torch.float64, labels: bool = False, **facts: Any
) -> Observation:
    """The gradient of the cross-entropy, or with one output of the logistic loss, made by hand."""
    net, x = net.to(dtype), x.to(dtype)
    logits = net(x)
    if logits.shape[1] > 1:
        loss = nn.functional.cross_entropy(logits, y, reduction=facts.get("reduction", "mean"))
    else:
        loss = (nn.functional.softplus(logits[:, 0]) - y * logits[:, 0]).mean()
    names = [name for name, value in net.named_parameters() if value.requires_grad]
    found = torch.autograd.grad(loss, [value for value in net.parameters() if value.requires_grad])
    facts = {"value_range": ValueRange(), "knowledge": Knowledge.full if labels else Knowledge.honest_server, **facts}
    return Observation.from_update(
        net,
        dict(zip(names, found, strict=True)),
        input_shape=tuple(x.shape[1:]),
        num_classes=logits.shape[1],
        num_examples=len(x),
        labels=y if labels else None,
        **facts,
    )


def picture(shape: tuple[int, ...], seed: int = 1, examples: int = 1) -> Tensor:
    return torch.rand((examples, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(result: Any, x: Tensor) -> float:
    return float((result.inputs.double() - x.double()).abs().max())


class Deep(nn.Sequential):
    """Biases, pooling that loses nothing, two linear layers, and every kind of activation that can be inverted."""

    def __init__(self, classes: int = 4, bias: bool = True) -> None:
        super().__init__(
            nn.Conv2d(2, 9, 3, padding=1, bias=bias),
            nn.Softplus(),
            nn.AvgPool2d(1),
            nn.Conv2d(9, 20, 3, stride=2, padding=1, bias=bias),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(20 * 16, 30, bias=bias),
            nn.Tanh(),
            nn.Dropout(0.3),
            nn.Linear(30, 20, bias=bias),
            nn.LeakyReLU(0.1),
            nn.Linear(20, classes, bias=bias),
        )


NETS = {
    "cnn2-c1": ("cnn2-c1", {}),
    "cnn3-c3": ("cnn3-c3", {}),
    "cnn3-c3 without a last bias": ("cnn3-c3", {"head_bias": False}),
    "cnn3-c3 with sigmoid": ("cnn3-c3", {"activation": "sigmoid"}),
    "cnn3-c3 with softplus": ("cnn3-c3", {"activation": "softplus"}),
    "two classes without a last bias": ("cnn3-c3", {"head_bias": False, "num_classes": 2}),
    "fcn3": ("fcn3", {}),
    "fcn3 without last activation": ("fcn3", {"head_activation": False}),
    "one output": ("cnn3-c3", {"num_classes": 1}),
    "one output without a bias": ("cnn3-c3", {"num_classes": 1, "head_bias": False}),
    "fcn3 with one output": ("fcn3", {"num_classes": 1}),
    "logistic regression": ("logistic", {}),
}


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("name", NETS)
def test_one_example_is_exact_in_double_precision(name: str, label: int) -> None:
    model, options = NETS[name]
    shape = (3, 8, 8)
    x, y = picture(shape), torch.tensor([label])
    net = build_model(model, **{"input_shape": shape, "num_classes": 5, **options})
    result = RGAP()(seen(net, x, y))
    assert error(result, x) < 1e-8
    assert result.labels.tolist() == [label]
    assert float(result.scores) < 1e-9
    assert result.flags == ()
    assert all(row["rank"] == row["unknowns"] for row in result.info["layers"])


@pytest.mark.slow
def test_six_layers_are_exact_too() -> None:
    x = picture((3, 8, 8))
    result = RGAP()(seen(build_model("cnn6", input_shape=(3, 8, 8)), x, torch.tensor([7])))
    assert error(result, x) < 1e-10
    assert len(result.info["layers"]) == 7


@torch.random.fork_rng(devices=[])
def test_biases_pooling_and_several_linear_layers() -> None:
    torch.manual_seed(4)
    x, y = picture((2, 8, 8)), torch.tensor([2])
    result = RGAP()(seen(Deep().eval(), x, y))
    assert error(result, x) < 1e-7
    assert [row["layer"] for row in result.info["layers"]] == ["0", "2 + 3", "6", "9", "11"]
    assert result.info["steps"] == 5
    assert set(result.info["layers"][0]) == {"layer", "rows", "rank", "condition", "unknowns", "residual"}


def test_signals_are_solved_too() -> None:
    x = picture((2, 40))
    net = build_model("signal-cnn", input_shape=(2, 40), num_classes=4, activation="tanh")
    assert error(RGAP()(seen(net, x, torch.tensor([3]))), x) < 1e-8


def test_a_frozen_bias_is_as_good_as_none() -> None:
    x, y = picture((3, 8, 8)), torch.tensor([1])
    net = build_model("cnn2-c1", input_shape=(3, 8, 8), num_classes=4)
    net.get_parameter("fc.bias").requires_grad_(False)
    result = RGAP()(seen(net, x, y))
    assert error(result, x) < 1e-8
    assert result.labels.tolist() == [1]


def test_one_step_of_training_is_one_gradient() -> None:
    x, y = picture((3, 8, 8)).float(), torch.tensor([1])
    for options in ({}, {"head_bias": False}):
        net = build_model("cnn2-c1", input_shape=(3, 8, 8), num_classes=4, **options)
        result = RGAP()(FedAvg(epochs=1, batch_size=1, lr=0.05).observe(net, x, y))
        assert error(result, x) < 1e-3  # a difference of weights in single precision
        assert result.flags == ()


def test_a_sum_of_several_losses_is_scaled() -> None:
    x, y = picture((3, 8, 8), examples=2), torch.tensor([1, 2])
    net = build_model("cnn2-c1", input_shape=(3, 8, 8), num_classes=4, head_bias=False)
    mean, total = (RGAP()(seen(net, x, y, reduction=reduction)) for reduction in ("mean", "sum"))
    assert torch.allclose(mean.inputs, total.inputs, atol=1e-8)


def test_several_steps_are_flagged_and_an_unknown_length_matters_only_without_a_bias() -> None:
    x, y = picture((3, 8, 8)).float(), torch.tensor([1])
    protocol = FedAvg(epochs=3, batch_size=1, lr=0.001)
    for options in ({}, {"head_bias": False}):
        net = build_model("cnn2-c1", input_shape=(3, 8, 8), num_classes=4, **options)
        assert RGAP()(protocol.observe(net, x, y)).flags == ("steps not simulated",)
        blind = protocol.observe(net, x, y, knowledge=Knowledge.eavesdropper)
        if options:
            with pytest.raises(NotApplicable, match="no bias"):
                RGAP()(blind)
        else:
            assert error(RGAP()(blind), x) < 0.1  # small differences of weights in single precision


def test_several_examples_give_one_mixture() -> None:
    x, y = picture((3, 8, 8), examples=3), torch.tensor([0, 1, 2])
    net = build_model("cnn2-c1", input_shape=(3, 8, 8), num_classes=4)
    result = RGAP()(seen(net, x, y))
    assert result.inputs.shape == x.shape
    assert torch.equal(result.inputs[0], result.inputs[2])
    assert result.flags == ("mixture",)
    assert result.scores.shape == (3,)
    assert float(result.scores[0]) > 1e-3
    assert result.labels is None


def test_deficient_layers_are_said_and_satisfy_what_is_known() -> None:
    """The picture is not the truth, but the equations hold; at cnn2-c2 they leave 1470 of 3072 directions open."""
    x = picture((3, 32, 32))
    net = build_model("cnn2-c2")
    result = RGAP()(seen(net, x, torch.tensor([3])))
    assert any("'conv1' leaves 1470 of 3072" in note for note in result.notes)
    assert float(result.scores) < 1e-10
    assert 0.05 < error(result, x) < 2
    # A solution of least length is never longer than the truth.
    assert float(result.inputs.norm()) <= float(x.norm())


@pytest.mark.slow
def test_homogeneous_nets_have_two_answers_and_the_box_decides() -> None:
    """Without biases s x makes s mu of the margin, and mu l'(mu) takes most values twice."""
    net = build_model("cnn6", input_shape=(3, 8, 8), num_classes=1, head_bias=False).double()
    x = picture((3, 8, 8))
    y = (net(x)[0] > 0).long()  # classified well: two margins
    observation = seen(net, x, y, labels=True)
    result = RGAP()(observation)
    assert error(result, x) < 1e-8
    assert "2 inputs" in result.notes[0]
    # The other answer makes the very same gradient: nothing but the box can tell.
    margin = float(net(x).detach().abs())
    other = next(mu for mu in logistic_margins(-margin / (1 + math.exp(margin))) if abs(mu - margin) > 1e-6)
    again = seen(net, x * (other / margin), y, labels=True)
    for name, value in observation.message.update.items():
        assert torch.allclose(value, again.message.update[name], rtol=1e-9, atol=1e-15)


@pytest.mark.slow
def test_single_precision_stays_near() -> None:
    x = picture((3, 8, 8)).float()
    result = RGAP()(seen(build_model("cnn6", input_shape=(3, 8, 8)), x, torch.tensor([3]), dtype=torch.float32))
    assert result.inputs.dtype == torch.float32
    assert error(result, x) < 1e-3


def test_clip_limits_what_is_inverted() -> None:
    net = build_model("cnn2-c1", input_shape=(3, 8, 8), num_classes=4).double()
    with torch.no_grad():
        net.get_parameter("conv1.weight").mul_(30)
    observation = seen(net, picture((3, 8, 8)), torch.tensor([0]))
    assert error(RGAP()(observation), picture((3, 8, 8))) < error(RGAP(clip=0.9)(observation), picture((3, 8, 8)))
    for wrong in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match=r"clip: "):
            RGAP(clip=wrong)


@pytest.mark.parametrize("model", ["cnn3-c3", "fcn3", "logistic"])
@pytest.mark.parametrize("classes", [1, 4])
@pytest.mark.parametrize("control", ["zero", "noise", "head only"])
def test_nonsense_is_survived_and_seen(model: str, classes: int, control: str) -> None:
    shape = (3, 8, 8)
    x = picture(shape)
    bias = {} if model == "logistic" else {"head_bias": False}
    observation = seen(build_model(model, input_shape=shape, num_classes=classes, **bias), x, torch.tensor([0]))
    generator = torch.Generator().manual_seed(5)

    def changed(name: str, value: Tensor) -> Tensor:
        if control == "zero" or (control == "head only" and not name.startswith("fc")):
            return torch.zeros_like(value)
        return value if control == "head only" else torch.randn(value.shape, generator=generator).to(value)

    update = {name: changed(name, value) for name, value in observation.message.update.items()}
    result = RGAP()(observation.with_update(update))
    assert torch.isfinite(result.inputs).all()
    if control == "noise" and not (model == "logistic" and classes == 1):  # one row of anything is k x'
        assert float(result.scores) > 0.1
        assert any("no single input" in note for note in result.notes)


class Block(nn.Module):
    def __init__(self, *body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.body(x)


TANH, LEAKY = nn.Tanh(), nn.LeakyReLU(0.2)


def conv(inputs: int, outputs: int, stride: int = 1, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, **options)


@torch.random.fork_rng(devices=[])
def residual_nets() -> dict[str, nn.Sequential]:
    torch.manual_seed(2)
    plain = Block(conv(10, 8), TANH, conv(8, 10))
    wider = Block(conv(10, 6), TANH, conv(6, 12), shortcut=nn.Conv2d(10, 12, 1))
    strided = Block(conv(10, 12, 2), TANH, conv(12, 16), shortcut=nn.Conv2d(10, 16, 1, 2))
    normed = Block(conv(10, 8), nn.BatchNorm2d(8), TANH, conv(8, 10), nn.BatchNorm2d(10))
    dense = Block(nn.Linear(30, 20), TANH, nn.Linear(20, 30))
    shrinking = Block(nn.Linear(30, 40), TANH, nn.Linear(40, 10), shortcut=nn.Linear(30, 10))
    blind = Block(nn.Linear(30, 20, bias=False), TANH, nn.Linear(20, 30, bias=False))
    nets = {
        "identity": [conv(3, 10), TANH, plain, TANH],
        "no activation behind": [conv(3, 10), TANH, plain],
        "no activation before": [conv(3, 10), plain, LEAKY],
        "at the input": [Block(conv(3, 8), LEAKY, conv(8, 12), shortcut=conv(3, 12))],
        "layer as shortcut": [conv(3, 10), TANH, wider, TANH],
        "strided shortcut": [conv(3, 10), TANH, strided, TANH],
        "two in a row": [conv(3, 10), TANH, plain, TANH, wider],
        "batch norm": [conv(3, 10, bias=False), nn.BatchNorm2d(10), TANH, normed, TANH],
        "dense": [nn.Flatten(), nn.Linear(192, 30), TANH, dense, nn.Sigmoid(), shrinking],
        "dense without biases": [nn.Flatten(), nn.Linear(192, 30), TANH, blind, nn.Sigmoid()],
    }
    nn.Sequential(*nets["batch norm"])(picture((3, 8, 8), examples=4).float())  # statistics that are not 0 and 1
    return {name: nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(5)).eval() for name, layers in nets.items()}


@pytest.mark.parametrize("name", residual_nets())
def test_residual_blocks_are_exact_in_double_precision(name: str) -> None:
    x, y = picture((3, 8, 8)), torch.tensor([2])
    result = RGAP()(seen(residual_nets()[name], x, y))
    assert error(result, x) < 1e-8
    assert (result.flags, result.notes) == ((), ())
    assert float(result.scores) < 1e-10
    assert all(row["rank"] == row["unknowns"] for row in result.info["layers"])
    if name == "identity":
        sizes = [(row["layer"], row["unknowns"]) for row in result.info["layers"]]
        assert sizes == [("0", 192), ("2.body", 640), ("2.body (inner)", 512), ("5", 640)]


@torch.random.fork_rng(devices=[])
def test_a_block_that_leaves_its_inside_open_is_said() -> None:
    """Six filters have 54 equations for the 64 pixels of each of six channels; the block itself has full rank."""
    torch.manual_seed(2)
    net = nn.Sequential(conv(3, 6), TANH, Block(conv(6, 6), TANH, conv(6, 6)), nn.Flatten(), nn.Linear(384, 5))
    x = picture((3, 8, 8))
    result = RGAP()(seen(net, x, torch.tensor([2])))
    assert any("'2.body (inner)' leaves 60 of 384" in note for note in result.notes)
    block, inner = result.info["layers"][1:3]
    assert (block["rank"], inner["rank"], inner["unknowns"]) == (384, 324, 384)
    assert inner["residual"] < 1e-10 < 0.01 < block["residual"]  # the block's equations show that it is not the truth
    assert 0.01 < error(result, x) < 10


@torch.random.fork_rng(devices=[])
def test_homogeneous_blocks_have_two_answers_too() -> None:
    torch.manual_seed(2)
    block = Block(conv(3, 8, bias=False), LEAKY, conv(8, 12, bias=False), shortcut=conv(3, 12, bias=False))
    net = nn.Sequential(block, LEAKY, nn.Flatten(), nn.Linear(768, 1, bias=False)).double()
    x = picture((3, 8, 8))
    result = RGAP()(seen(net, x, (net(x)[0] > 0).long(), labels=True))
    assert "2 inputs" in result.notes[0]
    assert float((result.inputs / x).std()) < 1e-8


def test_residual_nets_it_cannot_solve_are_named() -> None:
    x, y = picture((3, 8, 8)), torch.tensor([0])
    with pytest.raises(NotApplicable, match=r"'relu' \(relu\)"):
        RGAP()(seen(build_model("resnet8", input_shape=(3, 8, 8), num_classes=4).eval(), x, y))
    with pytest.raises(NotApplicable, match=r"'1' \(BatchNorm2d\).*running statistics"):
        RGAP()(seen(residual_nets()["batch norm"], x, y, batchnorm="train"))
    ends = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), TANH, Block(nn.Linear(5, 8), TANH, nn.Linear(8, 5)))
    with pytest.raises(NotApplicable, match=r"'3.body' \(a residual block\)"):
        RGAP()(seen(ends, x, y))


def test_models_it_cannot_read_are_named() -> None:
    net = build_model("convnet", input_shape=(3, 8, 8))
    with pytest.raises(NotApplicable, match=r"'activation1' \(ReLU\)"):
        RGAP()(seen(net, picture((3, 8, 8)), torch.tensor([0])))
    ends = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 6), nn.Flatten())
    with pytest.raises(NotApplicable, match="linear layer"):
        RGAP()(seen(ends, picture((3, 8, 8)), torch.tensor([0])))


@pytest.mark.parametrize("margin", [-40.0, -5.0, -1.0, -0.1, -1e-6, 1e-6, 0.1, 0.7, 1.2, 1.4, 3.0, 10.0, 40.0])
def test_margin_in_closed_form(margin: float) -> None:
    found = logistic_margins(-margin / (1 + math.exp(margin)))
    assert min(abs(mu - margin) for mu in found) <= 1e-10
    assert len(found) == (1 if margin < 0 else 2)
    for mu in found:
        assert -mu / (1 + math.exp(mu)) == pytest.approx(-margin / (1 + math.exp(margin)), rel=1e-9)


def test_margin_at_and_below_the_least_product() -> None:
    assert pytest.approx(-0.2784645) == LEAST_PRODUCT
    for product in (LEAST_PRODUCT, -0.5):
        assert logistic_margins(product) == (pytest.approx(1.2784645),)
    (mu,) = {round(m, 4) for m in logistic_margins(LEAST_PRODUCT + 1e-12)}
    assert mu == 1.2785
    assert all(np.isfinite(logistic_margins(c)).all() for c in np.geomspace(1e-300, 1e300, 61))


@pytest.mark.slow
@pytest.mark.parametrize("model, options", [("cnn2-c1", {}), ("cnn3-c3", {}), ("cnn6", {"num_classes": 1})])
def test_real_pictures_are_exact(model: str, options: dict[str, Any], real_data: Path) -> None:
    data = load_data("cifar10", path=real_data / "cifar-10-batches-bin", split="test", limit=4).batch(1, 1)
    one = options.get("num_classes") == 1
    net = build_model(model, **options, **({"head_bias": False} if one else {}))
    result = RGAP()(seen(net, data.x, data.y % 2 if one else data.y))
    assert error(result, data.x) < 1e-6


@pytest.mark.slow
def test_real_pictures_from_single_precision(real_data: Path) -> None:
    data = load_data("cifar10", path=real_data / "cifar-10-batches-bin", split="test", limit=4).batch(1, 1)
    result = RGAP()(seen(build_model("cnn6"), data.x, data.y, dtype=torch.float32))
    assert -10 * math.log10(float((result.inputs - data.x).square().mean())) >= 49


def test_the_model_and_the_update_stay_as_they_were() -> None:
    net = build_model("cnn2-c1", input_shape=(3, 8, 8), num_classes=4)
    observation = seen(net, picture((3, 8, 8)), torch.tensor([1]), dtype=torch.float32)
    update = {name: value.clone() for name, value in observation.message.update.items()}
    state = {name: value.clone() for name, value in observation.model.state_dict().items()}
    RGAP()(observation)
    assert all(torch.equal(update[name], value) for name, value in observation.message.update.items())
    assert all(torch.equal(state[name], value) for name, value in observation.model.state_dict().items())
    assert RGAP(ranks=False)(observation).info["layers"][0]["rank"] is None
