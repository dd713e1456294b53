"""Clients that train with dropout: units are dropped, attacks are told that they see a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope import capture
from leakscope.attacks import HeadFirst, LinearLayer
from leakscope.audit.folder import describe_audited
from leakscope.audit.setup import build_setup
from leakscope.audit.spec import AuditSpec
from leakscope.capture.observe import DROPOUT
from leakscope.contracts.errors import UserError
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import client_copy, draws_units
from leakscope.federation import FedAvg, FedSGD, SecureAggregation

X, Y = torch.rand((2, 1, 6, 6), generator=torch.Generator().manual_seed(0)), torch.tensor([1, 3])


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(36, 20), nn.BatchNorm1d(20), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.dropout(F.relu(self.norm(self.first(x.flatten(1)))), 0.5, self.training))
        return out


def layered(share: float = 0.5) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Dropout(share), nn.Linear(20, 4))


def seeded(protocol: FedSGD | FedAvg | SecureAggregation, net: nn.Module, seed: int = 0) -> Observation:
    return protocol.observe(net, X, Y, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "make",
    [
        lambda mode: FedSGD(dropout=mode),
        lambda mode: FedAvg(epochs=2, batch_size=1, dropout=mode),
        lambda mode: SecureAggregation(dropout=mode, protocol=FedSGD(dropout=mode)),
    ],
)
def test_units_are_dropped_only_where_the_protocol_says_so(make) -> None:
    net = layered()
    on, again, other, off = (
        seeded(make(mode), net, seed) for mode, seed in (("train", 0), ("train", 0), ("train", 1), ("eval", 0))
    )
    updates = [torch.cat([value.flatten() for value in one.message.update.values()]) for one in (on, again, other, off)]
    assert torch.equal(updates[0], updates[1]), "drawn from the client's generator"
    assert not torch.equal(updates[0], updates[2])
    assert not torch.equal(updates[0], updates[3])
    assert (on.dropout, off.dropout) == ("train", "eval")


def test_a_model_without_dropout_has_nothing_to_drop() -> None:
    assert seeded(FedSGD(dropout="train"), layered(0.0)).dropout == "eval"


@pytest.mark.parametrize("batchnorm", ["eval", "train"])
@pytest.mark.parametrize("dropout", ["eval", "train"])
def test_dropout_within_functions_follows_and_batchnorm_does_not(batchnorm: str, dropout: str) -> None:
    net = Functional()
    twin = client_copy(net, batchnorm, dropout)  # type: ignore[arg-type]
    assert twin.get_submodule("norm").training == (batchnorm == "train")
    assert twin.training == (dropout == "train")
    assert draws_units(net, X)


class OneByOne(nn.Linear):
    """A layer of the user's that wants more than one example in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) < 2:
            raise ValueError("Expected more than 1 value per channel")
        return super().forward(x)


def test_a_model_that_does_not_train_on_one_example_is_no_defect() -> None:
    assert not draws_units(nn.Sequential(nn.Flatten(), OneByOne(36, 4)), X)


def test_an_attack_that_simulates_the_whole_network_says_so() -> None:
    net = layered()
    flags = [LinearLayer()(seeded(FedSGD(dropout=mode), net), seed=0).flags for mode in ("eval", "train")]
    assert ["defence approximated" in one for one in flags] == [False, True]


def test_no_certificate_for_what_dropout_hides() -> None:
    """Only the head's features and labels follow; below them the network is another one."""
    found = HeadFirst(iterations=20, rival=False)(seeded(FedSGD(dropout="train"), layered()), seed=0)
    right = [float((one - X).flatten(1).norm(dim=1).min()) < 1e-3 for one in found.inputs]
    proved = [proof is not None and proof.holds for proof in found.certificates] or [False] * len(right)
    assert all(good or not claimed for good, claimed in zip(right, proved, strict=True))
    assert "defence approximated" in found.flags


def test_positive_controls_are_run_without_dropout() -> None:
    assert FedAvg(dropout="train").easiest().dropout == "eval"
    joint = SecureAggregation(dropout="train", protocol=FedSGD(dropout="train")).easiest()
    assert (joint.dropout, joint.protocol.dropout) == ("eval", "eval")
    with pytest.raises(UserError, match="dropout: expected that of the protocol"):
        SecureAggregation(dropout="train")
    assert SecureAggregation.build({"dropout": "train", "protocol": "fedsgd"}).protocol.dropout == "train"


def test_an_observation_keeps_the_mode_in_its_file(tmp_path: Path) -> None:
    net = layered()
    seen = seeded(FedSGD(dropout="train"), net)
    seen.save(tmp_path / "seen.safetensors")
    assert Observation.load(tmp_path / "seen.safetensors", net).dropout == "train"


@pytest.mark.parametrize(("mode", "warning"), [("eval", True), ("train", False)])
def test_an_audit_says_what_the_clients_dropout_does(mode: str, warning: bool) -> None:
    spec = {"model": Functional(), "data": (X, Y), "protocols": [{"fedsgd": {"dropout": mode}}], "attacks": ["dlg"]}
    setup = build_setup(AuditSpec.parse({**spec, "defenses": ["none"]}))
    lines = [line for line in describe_audited(setup) if "Dropout" in line["text"]]
    assert [line["warning"] for line in lines] == [warning]


@pytest.mark.parametrize(("share", "warned"), [(0.5, True), (0.0, False)])
def test_a_captured_update_of_a_model_with_dropout_comes_with_a_warning(share: float, warned: bool) -> None:
    net = layered(share)
    update = FedSGD().observe(net, X, Y).message.update
    facts = {"input_shape": (1, 6, 6), "num_classes": 4, "num_examples": 2}
    seen = capture.from_arrays(dict(update), model=net, kind="gradient", **facts)
    assert seen.made is not None
    assert (DROPOUT in seen.made.notes) == warned
