"""Models as users bring them: in-place, random, frozen, tied, attentive; and updates whose scale matters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import IDLG, InvertingGradients, LinearLayer, make_attack
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.federation import FedAvg, FedSGD
from leakscope.metrics import psnr
from leakscope.models import build_model

pytestmark = pytest.mark.slow


def batch(examples: int = 1, shape: tuple[int, ...] = (1, 8, 8)) -> tuple[Tensor, Tensor]:
    return torch.rand(examples, *shape, generator=torch.Generator().manual_seed(7)), torch.arange(examples) % 4


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x.sub_(0.5)) * (1 + 0 * self.calls)


def test_a_model_that_changes_its_input_in_place_does_not_change_the_truth() -> None:
    x, y = batch()
    before = x.clone()
    seen = FedSGD().observe(InPlace(), x, y, knowledge=Knowledge.full)
    assert torch.equal(x, before)
    assert float(seen.model.calls) == 0
    found = IDLG(iterations=300)(seen).inputs
    assert float(psnr(before, found.clamp(0, 1))) > 40


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(nn.functional.dropout(x.flatten(1), 0.5))


def test_a_model_with_randomness_of_its_own_follows_the_clients_generator() -> None:
    x, y = batch()
    net, globe = Noisy(), torch.random.get_rng_state()
    first, second, other = (
        FedSGD().observe(net, x, y, generator=torch.Generator().manual_seed(s)).message.update["layer.weight"]
        for s in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(globe, torch.random.get_rng_state())


def test_attention_can_be_attacked() -> None:
    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x[:, 0]).flatten(1))

    seen = FedSGD().observe(Attentive(), *batch())
    result = InvertingGradients(iterations=20, restarts=2)(seen)
    assert torch.isfinite(result.inputs).all()
    assert min(result.history["objective"][0]) < result.history["objective"][0][0]


def test_fine_tuning_with_a_frozen_backbone_is_attacked_or_refused_clearly() -> None:
    net = build_model("mlp", input_shape=(1, 8, 8), num_classes=4, hidden=[16])
    first = next(name for name, m in net.named_modules() if isinstance(m, nn.Linear))
    net.get_submodule(first).requires_grad_(False)
    seen = FedSGD().observe(net, *batch())
    with pytest.raises(NotApplicable, match="frozen"):
        LinearLayer()(seen)
    tuned = FedAvg(epochs=1, batch_size=1, lr=0.1).observe(net, *batch(2))
    assert torch.isfinite(InvertingGradients(iterations=5)(tuned).inputs).all()


def test_a_frozen_head_leaves_labels_to_be_optimised() -> None:
    net = build_model("mlp", input_shape=(1, 8, 8), num_classes=4, hidden=[16])
    last = [name for name, m in net.named_modules() if isinstance(m, nn.Linear)][-1]
    net.get_submodule(last).requires_grad_(False)
    result = InvertingGradients(iterations=5)(FedSGD().observe(net, *batch()))
    assert result.info["labels"] == "joint"
    assert "labels uncertain" in result.flags


@pytest.mark.parametrize("lr", [1.0, 0.01])
@pytest.mark.parametrize("name", ["dlg", "idlg", "learn-from-gradients"])
def test_the_learning_rate_of_one_step_does_not_matter_where_it_is_known(name, lr) -> None:
    net = build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=4).double()
    x, y = batch()
    seen = FedAvg(epochs=1, batch_size=1, lr=lr).observe(net, x.double(), y)
    found = make_attack(name, iterations=800)(seen).inputs
    assert float(psnr(x, found.clamp(0, 1).float())) > 40


def test_lengths_cannot_be_compared_without_the_learning_rate() -> None:
    net = build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=4)
    seen = FedAvg(epochs=1, batch_size=1, lr=0.01).observe(net, *batch(), knowledge=Knowledge.eavesdropper)
    with pytest.raises(NotApplicable, match="learning rate"):
        IDLG(iterations=5)(seen)
    assert torch.isfinite(InvertingGradients(iterations=5)(seen).inputs).all()


@pytest.mark.parametrize("steps, flagged", [(3, True), (25, True), (300, False)])
def test_too_few_steps_are_flagged(steps, flagged) -> None:
    net = build_model("convnet", input_shape=(3, 16, 16), num_classes=4)
    seen = FedSGD().observe(net, *batch(1, (3, 16, 16)))
    result = InvertingGradients(iterations=steps)(seen)
    assert ("did not converge" in result.flags) == flagged


def test_a_label_that_is_a_guess_is_flagged_for_one_example_too() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
    assert "labels uncertain" in InvertingGradients(iterations=3)(FedSGD().observe(net, *batch())).flags


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_updates_are_searched_in_single(dtype) -> None:
    net = build_model("mlp", input_shape=(1, 8, 8), num_classes=4, hidden=[16]).to(dtype)
    x, y = batch()
    seen = FedSGD().observe(net, x.to(dtype), y)
    for attack in (LinearLayer(), InvertingGradients(iterations=5, restarts=2), IDLG(iterations=5)):
        result = attack(seen)
        assert result.inputs.dtype == torch.float32
    with pytest.raises(ValueError, match="no CUDA"):
        LinearLayer()(seen, device="cuda") if not torch.cuda.is_available() else pytest.skip("has CUDA")
