"""A failed search and inputs that cannot be seen are told apart, without the truth."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import DLG, GaussNewton
from leakscope.contracts.certificate import Certificate
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.reconstruction import Diagnosis, Reconstruction
from leakscope.defenses import GradientNoise, GradientPruning
from leakscope.federation import FedAvg, FedSGD
from leakscope.limits.diagnosis import diagnose
from leakscope.models import build_model
from leakscope.network.kinks import kinks

SHAPE = (1, 8, 8)


@pytest.fixture
def example(generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(1, *SHAPE, generator=generator), torch.tensor([3])


def result(inputs: torch.Tensor, labels: torch.Tensor) -> Reconstruction:
    """As an attack would return it."""
    return Reconstruction(inputs=inputs, labels=labels, scores=torch.zeros(len(inputs)))


def lenet() -> nn.Module:
    return build_model("dlg-lenet", input_shape=SHAPE, num_classes=6)


def test_the_truth_is_recovered_and_noise_is_a_failed_search(example, generator) -> None:
    x, y = example
    seen = FedSGD().observe(lenet(), x, y)
    assert diagnose(seen, result(x, y)).outcome == "recovered"
    wrong = diagnose(seen, result(torch.rand(x.shape, generator=generator), y))
    assert wrong.outcome == "optimiser failed"
    assert wrong.expected_rmse is not None
    assert wrong.expected_rmse > 0.05


@pytest.mark.parametrize("error", [1e-4, 1e-3, 1e-2])
def test_the_expected_error_is_the_real_one(example, generator, error) -> None:
    x, y = example
    seen = FedSGD().observe(lenet(), x, y)
    near = x + error * torch.randn(x.shape, generator=generator)
    found = diagnose(seen, result(near, y))
    assert found.expected_rmse == pytest.approx(error, rel=0.15)
    assert found.outcome == "recovered"


@pytest.mark.parametrize("sigma, known", [(3.0, "not identifiable"), (1e-5, "optimiser failed")])
def test_known_noise_is_not_the_fault_of_a_search(example, generator, sigma, known) -> None:
    """Under strong noise even the truth is far from the nearest explanation; under weak noise a wrong picture is."""
    x, y = example
    seen = FedSGD().observe(lenet(), x, y, GradientNoise(sigma=sigma), Knowledge.adaptive_server, generator)
    wrong = torch.rand(x.shape, generator=generator)
    assert diagnose(seen, result(wrong, y)).outcome == known
    assert diagnose(seen, result(x, y)).outcome == ("not identifiable" if sigma > 1 else "recovered")
    # Who does not know the level cannot tell its work from that of a false minimum.
    assert diagnose(seen.without_channel(), result(wrong, y)).outcome != "not identifiable"


def test_too_few_weights_are_not_identifiable(example) -> None:
    x, y = example
    few = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 4))
    assert diagnose(FedSGD().observe(few, x, y), result(x, y)).outcome == "not identifiable"


def test_directions_without_a_trace_are_counted(example) -> None:
    x, y = example
    blind = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    found = diagnose(FedSGD().observe(blind, x, y), result(x, y))
    assert found.outcome == "not identifiable"
    assert found.hidden == 64 - 16


def test_noise_hides_what_was_identifiable(example) -> None:
    x, y = example
    seen = FedSGD().observe(lenet(), x, y, GradientNoise(sigma=1.0), Knowledge.full)
    found = GaussNewton(noise=1.0, steps=40, restarts=1)(seen, seed=0)
    assert diagnose(seen, found).outcome != "recovered"


def test_a_false_minimum_is_not_called_recovered(generator) -> None:
    """At rest with a wrong label nothing nearby is better, yet nothing is explained."""
    model = build_model("mlp", input_shape=(3, 6, 6), num_classes=9, hidden=(512,), activation="tanh")
    x, y = torch.rand(1, 3, 6, 6, generator=generator), torch.tensor([3])
    seen = FedSGD().observe(model, x, y, knowledge=Knowledge.full)
    misled = dataclasses.replace(seen, labels=torch.tensor([5]))
    found = GaussNewton(hold_output_gradient=False, restarts=1)(misled, seed=0)
    assert float((found.inputs - x).square().mean().sqrt()) > 0.1
    assert diagnose(misled, found).outcome in ("undecided", "optimiser failed")


def test_a_result_far_off_says_nothing_of_identifiability(example) -> None:
    x, y = example
    found = diagnose(FedSGD().observe(lenet(), x, y), result(1e3 * (x - 0.5), y))
    assert found.outcome in ("undecided", "optimiser failed")


def test_without_a_range_that_of_the_inputs_counts(generator) -> None:
    x, y = 0.01 * torch.randn(1, *SHAPE, generator=generator), torch.tensor([3])
    seen = FedSGD().observe(lenet(), x, y)
    assert seen.value_range is None
    assert diagnose(seen, result(x, y)).outcome == "recovered"
    far = result(x + 0.01 * torch.randn(x.shape, generator=generator), y)
    assert diagnose(seen, far).outcome == "optimiser failed"


def test_a_result_of_any_attack_can_be_diagnosed(example) -> None:
    x, y = example
    seen = FedSGD().observe(lenet(), x, y)
    assert diagnose(seen, DLG(iterations=3)(seen, seed=0)).outcome == "optimiser failed"
    many = FedAvg(epochs=2, batch_size=1, lr=0.1).observe(lenet(), x, y)
    later = diagnose(many, DLG(iterations=2)(many, seed=0))
    assert later.outcome == "undecided"
    assert "weight update" in later.reason


def test_an_attack_that_certifies_its_result_has_the_last_word(example) -> None:
    x, y = example
    seen = FedSGD().observe(lenet(), x, y)
    own = Diagnosis(outcome="undecided", reason="the attack knows better", unknowns=64)
    assert diagnose(seen, dataclasses.replace(result(x, y), diagnosis=own)) is own


def proof(free: int | None = 0, residual: float = 0.4) -> Certificate:
    return Certificate(residual=residual, tolerance=1.0, free_directions=free, method="masks decoded")


@pytest.mark.parametrize(
    "proofs, outcome, hidden",
    [
        ((proof(), proof()), "recovered", 0),
        ((proof(), proof(7)), "not identifiable", 7),
        ((proof(5), proof(7)), "not identifiable", 12),
        ((proof(5), None), "not identifiable", 5),
        # Nothing follows from these: the search went on being judged by the Jacobian, which is too large here.
        ((proof(), None), "undecided", None),
        ((proof(), proof(None)), "undecided", None),
        ((proof(), proof(7, residual=3.0)), "undecided", None),
        ((proof(), proof(residual=float("nan"))), "undecided", None),
        ((), "undecided", None),
    ],
)
def test_certificates_decide_at_any_size_of_the_model(generator, proofs, outcome, hidden) -> None:
    x, y = torch.rand(2, 3, 40, 40, generator=generator), torch.tensor([1, 0])
    model = build_model("mlp", input_shape=(3, 40, 40), num_classes=4, hidden=(5,), activation="tanh")
    seen = FedSGD().observe(model, x, y)
    found = diagnose(seen, dataclasses.replace(result(x, y), certificates=proofs))
    assert (found.outcome, found.hidden) == (outcome, hidden)
    assert ("masks decoded" in found.reason) == (outcome == "recovered")


def test_a_certificate_overrules_the_attacks_word_where_they_differ(example) -> None:
    x, y = example
    seen = FedSGD().observe(lenet(), x, y)
    own = Diagnosis(outcome="recovered", reason="the attack's own", unknowns=64)
    told = dataclasses.replace(result(x, y), diagnosis=own)
    assert diagnose(seen, dataclasses.replace(told, certificates=(proof(),))) is own
    assert diagnose(seen, dataclasses.replace(told, certificates=(None,))) is own
    assert diagnose(seen, dataclasses.replace(told, certificates=(proof(3),))).outcome == "not identifiable"


def test_mixtures_and_missing_labels_are_undecided(example) -> None:
    x, y = example
    seen = FedSGD().observe(lenet(), x, y)
    mixed = diagnose(seen, dataclasses.replace(result(x, y), flags=("mixture",)))
    assert (mixed.outcome, "mixture" in mixed.reason) == ("undecided", True)
    unlabelled = diagnose(seen, dataclasses.replace(result(x, y), labels=None))
    assert (unlabelled.outcome, "no labels" in unlabelled.reason) == ("undecided", True)


def test_large_inputs_wait_to_be_asked(generator) -> None:
    x, y = torch.rand(1, 3, 20, 20, generator=generator), torch.tensor([1])
    model = build_model("mlp", input_shape=(3, 20, 20), num_classes=4, hidden=(5,), activation="tanh")
    seen = FedSGD().observe(model, x, y)
    assert "thorough=True" in diagnose(seen, result(x, y)).reason
    assert diagnose(seen, result(x, y), thorough=True).outcome == "recovered"


def test_pruning_changes_what_is_left(example) -> None:
    x, y = example
    seen = FedSGD().observe(lenet(), x, y, GradientPruning(fraction=0.99))
    found = diagnose(seen, result(x, y))
    assert found.outcome != "recovered"


def test_kinks_are_seen_in_functions_too() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.fc(x)) + x[:, :3].abs()

    assert kinks(Functional(), (4,)) == ("Abs", "Relu")
    assert kinks(build_model("dlg-lenet", input_shape=SHAPE), SHAPE) == ()
    assert kinks(build_model("cnn6", input_shape=(3, 16, 16)), (3, 16, 16)) == ("LeakyRelu",)
    pooled = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2), nn.ELU(), nn.Hardtanh())
    assert kinks(pooled, SHAPE) == ("Hardtanh", "MaxPool2D")


def test_recurrent_nets_are_diagnosed_too() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    torch.manual_seed(0)
    x, y = torch.rand(1, 3, 4), torch.tensor([1])
    observation = FedSGD().observe(Rows(), x, y)
    found = diagnose(observation, Reconstruction(x, y, torch.zeros(1)))
    assert (found.outcome, found.hidden) == ("recovered", 0)
