"""What is told of a weight update, against autograd by hand; and that the finding is of the right update."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
import torch
from audit_doubles import run, subject, timeless
from torch import Tensor, nn

from leakscope.audit import trajectory as module
from leakscope.audit.trajectory import describe_update
from leakscope.contracts.defense import Defense
from leakscope.contracts.observation import LocalTraining
from leakscope.contracts.protocol import ClientSide, Protocol
from leakscope.defenses import GradientNoise, GradientPruning
from leakscope.federation import FedAvg, FedSGD
from leakscope.federation.client import OneMessage
from leakscope.limits import drift_bound
from leakscope.results import FindingRow

KEYS = {
    *("steps", "chosen", "shares", "share_min", "betas", "cosines", "best_beta", "max_cosine", "start_cosine"),
    *("message_cosine", "loss_before", "loss_after", "bound", "bound_reason"),
    *("gradient_norm", "lipschitz", "smoothness"),
}


def scene(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 3)
    ).to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=dtype) / 2)
        net[1].running_mean.fill_(0.3)
    x = torch.rand(6, 1, 4, 4, generator=generator, dtype=dtype)
    return net, x, torch.tensor([0, 1, 2, 1, 0, 2])


def told(protocol: Protocol, defense: Defense | None = None, *, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    net, x, y = scene(dtype)
    found = describe_update(subject(protocol, net, x, y, defense, seed=5))
    json.dumps(found, allow_nan=False)
    return found


def by_hand(net: nn.Module, mode: str, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Loss and gradient of the whole data with dropout off."""
    net.eval()
    net[1].train(mode == "train")
    loss = nn.functional.cross_entropy(net(x), y)
    gradient = torch.autograd.grad(loss, list(net.parameters()))
    return float(loss.detach()), torch.cat([g.flatten() for g in gradient])


def test_one_step_on_all_data_is_a_gradient_in_disguise() -> None:
    found = told(FedAvg(epochs=1, batch_size=6, lr=0.1))
    assert set(found) == KEYS
    assert (found["steps"], found["chosen"], found["shares"]) == (1, [0], [1.0])
    assert found["start_cosine"] == pytest.approx(1, abs=1e-12)
    assert (found["best_beta"], found["max_cosine"]) == (0.0, found["start_cosine"])
    assert found["message_cosine"] == pytest.approx(1, abs=1e-12)
    assert found["loss_after"] < found["loss_before"]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_numbers_are_those_of_autograd(mode: Any) -> None:
    """Plain training in a fixed order, followed by hand."""
    lr = 0.2
    found = told(FedAvg(epochs=2, batch_size=4, lr=lr, shuffle=False, batchnorm=mode))
    net, x, y = scene()
    start = torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    weights, norms = [start], []
    for rows in (slice(0, 4), slice(4, 6)) * 2:
        _, gradient = by_hand(net, mode, x[rows], y[rows])
        norms.append(float(gradient.norm()))
        weights.append(weights[-1] - lr * gradient)
        torch.nn.utils.vector_to_parameters(weights[-1], net.parameters())
    losses, gradients = [], []
    for place in weights:
        torch.nn.utils.vector_to_parameters(place, net.parameters())
        loss, gradient = by_hand(net, mode, x, y)
        losses.append(loss)
        gradients.append(gradient)
    assert found["steps"] == 4
    assert (found["loss_before"], found["loss_after"]) == pytest.approx((losses[0], losses[-1]))
    rows = torch.stack(gradients[:-1])
    leading = torch.linalg.svd(rows, full_matrices=False).Vh[:2]
    shares = (rows @ leading.T).norm(dim=1) / rows.norm(dim=1)
    assert found["shares"] == pytest.approx(shares.tolist(), abs=1e-9)
    assert found["share_min"] == min(found["shares"]) < 1
    update = start - weights[-1]
    for beta, value in zip(found["betas"], found["cosines"], strict=True):
        torch.nn.utils.vector_to_parameters(start - beta * update, net.parameters())
        _, gradient = by_hand(net, mode, x, y)
        assert value == pytest.approx(float(update @ gradient / update.norm() / gradient.norm()), abs=1e-9)
    assert found["max_cosine"] >= max(found["cosines"])
    assert found["start_cosine"] == found["cosines"][0]
    secants = [float((gradients[n + 1] - gradients[n]).norm() / (weights[n + 1] - weights[n]).norm()) for n in range(4)]
    constants = {
        "lipschitz": max(float(g.norm()) for g in gradients),
        "gradient_norm": max(*norms, *(float(g.norm()) for g in gradients)),
        "smoothness": max(secants),
    }
    assert {name: found[name] for name in constants} == pytest.approx(constants)
    losses_told = {"loss_before": losses[0], "loss_after": losses[-1]}
    assert found["bound"] == pytest.approx(drift_bound(**constants, learning_rate=lr, steps=4, **losses_told))


def test_many_small_steps_are_nearly_one_gradient_and_large_ones_are_not() -> None:
    small = told(FedAvg(epochs=3, batch_size=6, lr=1e-4))
    large = told(FedAvg(epochs=30, batch_size=2, lr=2.0))
    assert small["max_cosine"] > 0.9999
    assert small["share_min"] > 0.9999
    assert large["max_cosine"] < 0.99


@pytest.mark.parametrize("options", [{"optimizer": "adam"}, {"momentum": 0.9}], ids=str)
def test_other_optimisers_have_all_but_the_bound(options: dict[str, Any]) -> None:
    found = told(FedAvg(epochs=2, batch_size=2, lr=0.01, **options))
    assert found["bound"] is None
    assert "plain SGD" in found["bound_reason"]
    assert found["message_cosine"] == pytest.approx(1, abs=1e-12)
    assert len(found["shares"]) == 6


def test_a_bound_that_says_nothing_tells_why() -> None:
    high = told(FedAvg(epochs=10, batch_size=2, lr=50.0))
    assert high["bound"] is None
    assert "learning rate" in high["bound_reason"] or "did not fall" in high["bound_reason"]


def test_the_segment_is_that_of_the_message() -> None:
    protocol = FedAvg(epochs=2, batch_size=3, lr=0.1)
    bare, pruned, noisy = (told(protocol, d) for d in (None, GradientPruning(fraction=0.8), GradientNoise(sigma=1.0)))
    assert pruned["shares"] == bare["shares"] == noisy["shares"]
    assert pruned["loss_after"] == bare["loss_after"]
    assert bare["message_cosine"] > pruned["message_cosine"] > noisy["message_cosine"]
    assert pruned["max_cosine"] < bare["max_cosine"]
    assert abs(noisy["max_cosine"]) < 0.7


def test_long_training_and_large_models_keep_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = FedAvg(epochs=20, batch_size=1, lr=0.01)
    whole = told(protocol, dtype=torch.float32)
    assert (whole["steps"], len(whole["chosen"]), whole["chosen"][-1]) == (120, 50, 119)
    monkeypatch.setattr(module, "MAX_ENTRIES", 1)
    few = told(protocol, dtype=torch.float32)
    assert few["chosen"] == [0, 60, 119]
    assert few["loss_after"] == whole["loss_after"]
    assert few["cosines"] == whole["cosines"]


@dataclass(frozen=True, kw_only=True)
class OwnProtocol(OneMessage):
    kind = "weight_delta"

    def _train(self, client: ClientSide) -> Any:
        return {name: torch.ones_like(p) for name, p in client.trained.items()}, LocalTraining()


def test_what_cannot_be_told_has_a_reason() -> None:
    assert told(FedSGD()) == {"reason": "the message is a gradient, not a weight update"}
    assert "OwnProtocol does not tell" in told(OwnProtocol())["reason"]


def test_nothing_of_the_caller_changes() -> None:
    protocol, (net, x, y) = FedAvg(epochs=2, batch_size=2, lr=0.1, batchnorm="train"), scene()
    asked = subject(protocol, net, x, y)
    before, data, globe = {k: v.clone() for k, v in net.state_dict().items()}, x.clone(), torch.random.get_rng_state()
    describe_update(asked)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert torch.equal(data, x)
    assert torch.equal(globe, torch.random.get_rng_state())


AVG = FedAvg(epochs=3, batch_size=1, lr=0.5)
JOBS: dict[str, Any] = {"protocols": [FedSGD(), AVG], "examples": 4, "batch": 2, "attacks": [doubles.Guess()]}


def trajectories(findings: list[FindingRow]) -> dict[tuple[str, int, int], FindingRow]:
    return {(row.defense, row.seed, row.batch): row for row in findings if row.kind == "trajectory"}


@pytest.mark.slow
def test_a_finding_tells_of_its_own_client_and_each_client_has_one(tmp_path: Path) -> None:
    done = run(tmp_path, **JOBS, seeds=[0, 1])
    rows = [row for row in done.findings if row.kind == "trajectory"]
    assert {row.protocol for row in rows} == {repr(AVG)}
    found = trajectories(done.findings)
    assert len(rows) == len(found) == 2 * 2 * 2
    for (defense, _, _), row in found.items():
        assert row.status == "done"
        assert set(row.content) == KEYS
        assert row.content["steps"] == 6
        # Another order of the same examples would end elsewhere.
        assert math.isclose(row.content["message_cosine"], 1, abs_tol=1e-10) == (defense == "none")
    first, second = found["none", 0, 0].content, found["none", 1, 0].content
    assert first["loss_before"] == second["loss_before"]
    assert first["loss_after"] != second["loss_after"], "the seed decides the order"
    again = run(tmp_path / "again", **JOBS, seeds=[0, 1])
    assert timeless(done.rows) == timeless(again.rows)
    assert timeless(done.findings) == timeless(again.findings)


def test_a_failure_in_it_costs_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(FedAvg, "trajectory", broken)
    done = run(tmp_path, **{**JOBS, "protocols": [AVG]})
    assert all(row.status == "done" for row in done.rows)
    assert {row.status for row in done.findings if row.kind == "trajectory"} == {"failed"}
    assert {row.reason for row in done.findings if row.kind == "trajectory"} == {"MemoryError: too large"}


def test_it_is_told_of_the_model_under_audit_whatever_attacks_send_out(tmp_path: Path) -> None:
    changes = {**JOBS, "protocols": [AVG], "knowledge": "malicious_server"}
    malicious = run(tmp_path / "a", **{**changes, "attacks": [doubles.Malicious()]})
    assert {row.status for row in malicious.rows} == {"done"}, "each client of this attack got zero weights"
    plain = run(tmp_path / "b", **changes)
    assert timeless(malicious.findings) == timeless(plain.findings)
    first = trajectories(malicious.findings)["none", 0, 0].content
    assert first["loss_before"] != pytest.approx(math.log(3)), "zero weights guess evenly"
    assert first["message_cosine"] == pytest.approx(1)
