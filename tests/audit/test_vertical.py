"""Audits of vertical learning: rounds on announced batches, from a spec or from objects, to verdict and report."""

from __future__ import annotations

import dataclasses
import re
from html import unescape
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
import torch
from audit_doubles import subject, timeless
from torch import Tensor, nn

import leakscope as ls
from leakscope.audit import Audit, SpecError, audit, run_spec
from leakscope.audit import findings as audit_rounds
from leakscope.audit.findings import describe_cost, describe_rounds
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.task import Regression
from leakscope.defenses import GradientNoise
from leakscope.federation import FedSGD, Vertical
from leakscope.models import build_model
from leakscope.models.split import VerticalModel
from leakscope.results import StoreMismatch

SAMPLES, FEATURES, CLASSES = 8, 10, 3
NOISE = {"gradient-noise": {"sigma": 0.5}}
PROTOCOL = Vertical(batch_size=3, rounds=14)
LEARNING = Vertical(batch_size=3, rounds=14, lr=0.1)


def net(seed: int = 0, **options: Any) -> VerticalModel:
    """Two owners of a table. Leaky units are never dead, so every worker sees every sample."""
    options = {"workers": 2, "hidden": 12, "activation": "leaky-relu", **options}
    model = build_model("vertical-mlp", input_shape=(FEATURES,), num_classes=CLASSES, seed=seed, **options)
    assert isinstance(model, VerticalModel)
    return model


def table(count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, FEATURES, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(count) % CLASSES


def run(out: Path | None = None, **changes: Any) -> Audit:
    base = {"model": net(), "data": table(), "batch": SAMPLES, "protocol": PROTOCOL, "out": out, "controls": "noise"}
    return audit(**{**base, **changes})


def told(page: Path) -> str:
    """The words of the page."""
    text = re.sub(r"<(style|script)>.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_every_sample_is_found_without_a_defence_and_noise_is_no_pass() -> None:
    done = run(defenses=["none", NOISE], controls=True)
    told = [(row.job.control, row.status) for row in done.rows]
    assert told[:3] == [(None, "done"), (None, "done"), ("noise", "done")]
    assert dict(told[3:]) == {
        **dict.fromkeys(("other-examples", "prior-mean", "nearest-neighbour"), "refused"),  # there are no other samples
        "planted": "done",
    }
    assert {row.job.attack_name for row in done.rows if row.counts} == {"cafe"}
    assert done.rows[0].job.knowledge["batch_indices"] is True
    assert done.rows[0].job.indices == tuple(range(SAMPLES))
    bare, noisy = done.verdict.settings
    assert bare.outcome == "leaks"
    assert min(example.psnr for example in bare.examples) > 60
    assert min(example.lift for example in bare.examples) > 40
    assert bare.flags == []
    assert noisy.outcome == "inconclusive"
    assert "rounds disagree" in noisy.flags
    assert done.verdict.exit_code == 1
    assert noisy.mean_psnr < 20


@pytest.mark.slow
def test_a_spec_in_yaml_with_pictures(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        """
        model: {name: cafe-cnn, options: {slices: quadrants, filters: [16, 64], hidden: 32}}
        data: tiles
        batch: 6
        examples: 6
        protocols: [{vertical: {batch_size: 2, sampling: epochs, lr: 1e-2, rounds: 20}}]
        defenses: [none, {gradient-noise: {sigma: 1e-1}}]
        attacks: [{cafe: {iterations: 8}}]
        controls: [noise]
        """
    )
    done = run_spec(path, tmp_path / "out")
    assert [row.status for row in done.rows] == ["done"] * 3
    pictures = done.store.artifact(done.rows[0].key)
    assert pictures is not None
    assert pictures["reconstructions"].shape == (6, 3, 32, 32)
    assert [row.kind for row in done.findings] == ["rounds", "rounds", "cost", "cost"]
    bare, noisy = (row.content for row in done.findings[:2])
    assert bare["found"]["rounds"] == 20
    assert bare["found"]["sampling"] == "epochs"
    assert (bare["moves"], bare["alters"], noisy["alters"]) == (True, False, True)
    assert bare["found"]["index"]["rank"] == 6
    page = told(done.report())
    for words in (
        "What each defence costs",
        "20 rounds of Vertical(batch_size=2, rounds=20, lr=0.01)",
        "Final loss",
        "What theory allows",
        "Identifiable: 20 rounds have 6 independent batches",
        "The equations take the model to stand still.",
        "The defence alters them",
        "6 of 6",
    ):
        assert words in page, words
    assert "Cramér" not in page


def test_resume_runs_nothing_again(tmp_path: Path) -> None:
    first = run(tmp_path)
    events: list[dict[str, Any]] = []
    again = run(tmp_path, progress=events.append)
    assert again.rows == first.rows
    assert again.findings == first.findings
    assert events == [{"event": "planned", "total": 3, "finished": 3}]
    grown = run(tmp_path, protocol=Vertical(batch_size=3, rounds=15))
    assert len(grown.rows) == 2 * len(first.rows), "another protocol joins the first"
    with pytest.raises(StoreMismatch, match=r"knowledge\.batch_indices: the store has True, now False"):
        run(tmp_path, knowledge="honest_server")


@pytest.mark.slow
def test_processes_give_the_rows_of_serial(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"protocol": LEARNING, "defenses": ["none", NOISE]}
    spread = run(tmp_path / "a", executor="processes", workers=1, **changes)
    serial = run(tmp_path / "b", **changes)
    assert timeless(spread.rows) == timeless(serial.rows)
    assert {row.status for row in spread.rows} == {"done"}
    assert timeless(spread.findings) == timeless(serial.findings)
    assert [(row.kind, row.status) for row in spread.findings] == [("rounds", "done")] * 2 + [("cost", "done")] * 2


@pytest.mark.parametrize("knowledge", ["honest_server", {"batch_indices": False, "labels": "yes"}])
def test_secure_shuffling_starves_the_attack_and_audits_nothing(tmp_path: Path, knowledge: Any) -> None:
    done = run(tmp_path, knowledge=knowledge, protocol=LEARNING)
    assert [row.status for row in done.rows] == ["refused"] * 2
    assert all("MissingKnowledge: CAFE needs to know batch_indices" in str(row.error) for row in done.rows)
    assert done.verdict.outcome == "nothing audited"
    assert done.verdict.exit_code == 5
    limits = done.findings[0].content
    assert limits["announced"] is False
    assert limits["found"]["given"] is False
    assert limits["found"]["rounds"] == 14
    page = told(done.report())
    assert "The protection rests on the shuffling alone." in page
    assert "kept secret" in page
    assert "What each defence costs" in page


def test_what_does_not_fit_is_told_before_anything_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SpecError) as caught:
        run(out, batch=1, examples=1, protocol=Vertical(batch_size=2))
    assert caught.value.problems == [
        "protocols[0] with defenses[0]: batch_size: expected at most the 1 samples there are, got 2; lower it or give "
        "more samples"
    ]
    with pytest.raises(SpecError) as caught:
        run(out, model=nn.Linear(FEATURES, CLASSES), protocol=[Vertical(batch_size=2), FedSGD()])
    (wrong,) = caught.value.problems
    assert "protocols[0] with defenses[0]: Vertical: expected a VerticalModel" in wrong
    assert "vertical-mlp" in wrong
    with pytest.raises(SpecError) as caught:
        run(out, protocol=[PROTOCOL, Vertical(batch_size=9)])
    (large,) = caught.value.problems
    assert large.startswith("protocols[1] with defenses[0]: batch_size: expected at most the 8 samples")
    with pytest.raises(SpecError, match="slices"):
        run(out, model={"name": "vertical-mlp", "options": {"slices": {"a": ["0-3"], "b": ["3-9"]}}})
    assert not out.exists()


def test_only_the_first_round_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    played = []
    observe = Vertical.observe

    def counting(self: Vertical, *arguments: Any, **options: Any) -> Any:
        played.append((self.rounds, self.whole_rounds))
        return observe(self, *arguments, **options)

    monkeypatch.setattr(Vertical, "observe", counting)
    done = run(protocol=Vertical(batch_size=2, rounds=40, whole_rounds=3), defenses=["none", NOISE])
    # The control is on the undefended client, whose rounds were played already; noise hides the labels, so that the
    # attack on the noisy one is run once more with the right ones.
    assert played == [(1, None)] * 2 + [(40, 3)] * 3
    assert {row.status for row in done.rows} == {"done"}


def test_attacks_on_one_update_are_refused_and_the_audit_goes_on() -> None:
    done = run(attacks=["linear-layer", "cafe"])
    first, second = done.rows[:2]
    assert (first.status, second.status) == ("refused", "done")
    assert first.error is not None
    assert first.error.startswith("NotApplicable: LinearLayer reads one update of all examples")
    assert done.findings[0].content["found"]["identifiable"], "refused attacks or not"
    assert done.verdict.settings[0].outcome == "leaks"


def test_a_mixture_of_protocols(tmp_path: Path) -> None:
    """What the other protocol cannot give is no want of knowledge, so it does not make that setting inconclusive."""
    quick = ["cafe", doubles.Guess()]
    mixed: dict[str, Any] = {"protocol": [FedSGD(), PROTOCOL], "attacks": quick}
    done = run(tmp_path, knowledge="vertical_server", **mixed)
    cells = {(row.job.protocol[:4], row.job.attack_name): row for row in done.rows if not row.job.control}
    assert {place: row.status for place, row in cells.items()} == {
        ("FedS", "cafe"): "refused",
        ("FedS", "guess"): "done",
        ("Vert", "cafe"): "done",
        ("Vert", "guess"): "refused",
    }
    assert cells["FedS", "cafe"].error == (
        "NotApplicable: CAFE reads rounds on announced batches; this protocol has none"
    )
    whole, vertical = done.verdict.settings
    assert not [reason for reason in whole.reasons if reason.code == "job-starved"]
    assert vertical.outcome == "leaks"
    page = told(done.report())
    assert "Cramér" in page
    assert "Independent" in page


def test_an_attack_that_ruins_its_model_spoils_nothing() -> None:
    ruined = run(protocol=LEARNING, attacks=[doubles.Vandal(), "cafe"], controls=False)
    clean = run(protocol=LEARNING, attacks=["cafe"], controls=False)
    assert [row.content for row in ruined.findings] == [row.content for row in clean.findings]
    assert len(clean.findings) == 2
    assert ruined.rows[1].examples == clean.rows[0].examples, "the next attack has the client's own model again"


def test_what_theory_says_is_said_of_the_rounds_played() -> None:
    model, (x, y) = net(), table()
    with torch.no_grad():  # the second owner's layer is below zero for every sample: it sees none of them
        model.workers[1].fc1.bias.fill_(-1e3)
        model.workers[1].dense_activation1.negative_slope = 0.0
    protocol = Vertical(batch_size=2, rounds=6)
    seen = protocol.observe(model, x, y)
    matrix = torch.zeros(6, SAMPLES)
    for row, message in zip(matrix, seen.messages, strict=True):
        row[list(message.indices or ())] = 1
    told_ = describe_rounds(subject(protocol, model, x, y, seen=seen))
    found = told_["found"]
    assert found["index"]["rank"] == int(torch.linalg.matrix_rank(matrix))
    assert found["given"] is True
    assert [worker["invisible"] for worker in found["workers"]] == [[], list(range(SAMPLES))]
    assert found["needed"]["least"] == SAMPLES
    assert found["identifiable"] is False
    assert not any(told_[name] for name in ("moves", "alters", "mixes"))


def test_theory_that_cannot_be_told_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = table()
    protocol = Vertical(batch_size=2, rounds=2)
    asked = subject(protocol, net(), x, y)
    regression = dataclasses.replace(asked, task=Regression())
    assert "for classification, not for Regression" in describe_rounds(regression)["reason"]
    monkeypatch.setattr(audit_rounds, "MAX_SAMPLES", 7)
    assert "at most 7 samples" in describe_rounds(asked)["reason"]


@pytest.mark.parametrize("defense", [None, GradientNoise(sigma=0.05)])
def test_the_cost_is_that_of_the_rounds_that_were_attacked(defense: GradientNoise | None) -> None:
    """Replayed by hand from what the server saw: its batches, its gradients, plain descent."""
    model, (x, y) = net(), table()
    protocol = Vertical(batch_size=2, lr=0.3, rounds=9)
    cost = describe_cost(subject(protocol, model, x, y, defense, seed=5))
    seen = protocol.observe(model, x, y, defense, Knowledge.vertical_server, torch.Generator().manual_seed(5))
    twin, losses = net(), []

    def loss(rows: list[int]) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(twin(x[rows]), y[rows]))

    assert cost["before"] == pytest.approx(loss(list(range(SAMPLES))))
    for message in seen.messages:
        losses.append(loss(list(message.indices or ())))
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter -= 0.3 * message.update[name]
    assert [place for place, _ in cost["points"]] == list(range(1, 10))
    assert [value for _, value in cost["points"]] == pytest.approx(losses, rel=1e-4)
    assert cost["first"] == cost["points"][0][1]
    assert cost["last_tenth"] == cost["points"][-1][1]
    assert cost["after"] == pytest.approx(loss(list(range(SAMPLES))), rel=1e-4)


def test_curves_are_smoothed_over_an_epoch_and_long_ones_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = table()
    protocol = Vertical(batch_size=4, lr=0.1, rounds=90)

    def cost() -> dict[str, Any]:
        return describe_cost(subject(protocol, net(), x, y))

    smooth = cost()
    assert len(smooth["points"]) == 45
    assert smooth["rounds"] == 90
    monkeypatch.setattr(audit_rounds, "MAX_POINTS", 20)
    thin = cost()
    assert len(thin["points"]) == 18
    assert {**thin, "points": None} == {**smooth, "points": None}


def test_a_model_that_stands_still_costs_nothing_to_tell() -> None:
    done = run()
    assert [row.kind for row in done.findings] == ["rounds"]
    assert "What each defence costs" not in told(done.report())


def test_a_training_that_breaks_is_told() -> None:
    x, y = table()
    still = Vertical(batch_size=2, rounds=9).observe(net(), x, y)
    with pytest.raises(ValueError, match="diverged"):
        describe_cost(subject(Vertical(batch_size=2, lr=1e30, rounds=9), net(), x, y, seen=still))


def test_public_names_make_a_vertical_audit() -> None:
    done = ls.audit(
        model=net(), data=table(), protocol=ls.Vertical(batch_size=3, rounds=14), batch=SAMPLES, controls=False
    )
    assert done.worst is not None
    assert done.worst.psnr > 60
