"""Text as a user's own code, in one file: a space of tokens, a measure for it, and an audit of a toy text model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import leakscope as ls
from leakscope.attacks import DLG
from leakscope.contracts.inputs import SPACES, InputSpace, Start
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.data.examples import Examples
from leakscope.federation import DefendedTraining, FederatedTraining, FedSGD
from leakscope.limits import diagnose
from leakscope.metrics import MEASURES, Measure, evaluate

WORDS = ("the", "patient", "has", "no", "fever", "cough", "and", "pain", "today", "again")
LENGTH = 4


class SoftEmbedding(nn.Module):
    """An embedding that reads a weight for each word instead of a word; the same parameter under the same name."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, shares: Tensor) -> Tensor:
        return shares @ self.weight


@dataclass(frozen=True)
class Tokens(InputSpace):
    """Rows of word numbers. In unit space each is a row of shares over the vocabulary: 1 for the word, else 0."""

    kind: ClassVar[str] = "tokens"
    measures: ClassVar[tuple[str, ...]] = ("token_accuracy", "mse", "psnr", "identification")
    discrete: ClassVar[bool] = True

    vocabulary: tuple[str, ...] = WORDS

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return (*self.shape, len(self.vocabulary))

    @property
    def bounded(self) -> bool:
        return True

    def unknown(self) -> Tokens:
        return self  # the table of embeddings is as long as the vocabulary, which no adversary can be denied

    def problems(self, x: Tensor) -> list[str]:
        valid = x.dtype == torch.int64 and bool(((x >= 0) & (x < len(self.vocabulary))).all())
        return [] if valid else [f"x: expected int64 below {len(self.vocabulary)}, got {x.dtype}"]

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x

    def relaxed(self, model: nn.Module) -> nn.Module:
        twin = nn.Sequential(*model)  # type: ignore[arg-type]
        twin[0] = SoftEmbedding(model[0])  # type: ignore[index, arg-type]
        return twin

    def to_unit(self, x: Tensor) -> Tensor:
        return functional.one_hot(x, len(self.vocabulary)).float()

    def from_unit(self, x: Tensor) -> Tensor:
        return x.argmax(-1)

    def start(self, kind: Start, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
        return torch.randint(len(self.vocabulary), (count, *self.shape), generator=generator).to(like.device)

    def project(self, x: Tensor) -> Tensor:
        return x.clamp(0, len(self.vocabulary) - 1)

    def text(self, unit: Tensor) -> str:
        return " ".join(self.vocabulary[number] for number in self.from_unit(unit).tolist())

    def facts(self) -> dict[str, Any]:
        return {"kind": self.kind, "shape": list(self.shape), "vocabulary": list(self.vocabulary)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Tokens:
        return cls(tuple(facts["shape"]), tuple(facts["vocabulary"]))


def token_accuracy(originals: Tensor, guesses: Tensor) -> Tensor:
    return (originals.argmax(-1) == guesses.argmax(-1)).double().mean(-1)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    meaning = "Share of the words that were recovered in their place."
    measure = Measure("token_accuracy", "Words", "higher", "0 to 1", meaning, compute=token_accuracy)
    monkeypatch.setitem(MEASURES, measure.name, measure)
    monkeypatch.setitem(SPACES, Tokens.kind, Tokens)


def text_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(len(WORDS), 6), nn.Flatten(), nn.Linear(LENGTH * 6, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def texts(count: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    x = torch.randint(len(WORDS), (count, LENGTH), generator=draws)
    return x, torch.arange(count) % 3


SPACE = Tokens((LENGTH,))
ATTACK = DLG(iterations=100, restarts=3)


def test_an_attack_recovers_words_and_measures_count_them() -> None:
    model, (x, y) = text_model(), texts(1)
    seen = FedSGD().observe(model, x, y, inputs=SPACE)
    found = ATTACK(seen, seed=0)
    assert torch.equal(found.inputs, x)
    rows = evaluate(SPACE.to_unit(x), y, SPACE.to_unit(found.inputs), found.labels, inputs=SPACE)
    assert rows.rows[0]["token_accuracy"] == 1
    assert rows.rows[0]["psnr"] == 200
    assert "ssim" in rows.reasons
    assert "lpips" in rows.reasons
    assert diagnose(seen, found).unknowns == LENGTH * len(WORDS)


def test_the_relaxed_model_gives_the_same_update() -> None:
    model, (x, y) = text_model(), texts(2)
    seen = FedSGD().observe(model, x, y, inputs=SPACE)
    soft = seen.relaxed()
    assert soft.input_shape == (LENGTH, len(WORDS))
    again = FedSGD().observe(soft.model, seen.relax(x), y)
    for name, value in seen.message.update.items():
        assert torch.allclose(value, again.message.update[name], atol=1e-6)


def test_an_eavesdropper_knows_the_vocabulary_too(tmp_path: Path) -> None:
    model, (x, y) = text_model(), texts(1)
    seen = FedSGD().observe(model, x, y, knowledge=Knowledge.eavesdropper, inputs=SPACE)
    assert seen.inputs == SPACE
    assert not seen.relaxed().inputs.bounded
    seen.save(tmp_path / "update")
    assert Observation.load(tmp_path / "update", model).inputs == SPACE


def test_words_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="int64 below 10"):
        FedSGD().observe(text_model(), torch.full((1, LENGTH), 99), torch.tensor([0]), inputs=SPACE)
    with pytest.raises(ValueError, match="floating point"):
        FedSGD().observe(text_model(), *texts(1))  # without a space, inputs are floats


def test_training_reads_texts() -> None:
    model, clients = text_model(), [texts(4), texts(6)]
    for training in (FederatedTraining(rounds=1, inputs=SPACE), DefendedTraining(rounds=2, batch_size=2, inputs=SPACE)):
        run = training.run(model, clients)
        assert len(run.losses) == training.rounds
        assert not torch.equal(run.last[0].weight, model[0].weight)  # type: ignore[index]


@pytest.mark.slow
def test_an_audit_of_texts_has_rows_a_verdict_and_a_page(tmp_path: Path) -> None:
    x, y = texts(6)
    data = Examples(x, y, 3, name="notes", space=SPACE, private=False)
    audit = ls.audit(
        model=text_model(),
        data=data,
        protocol="fedsgd",
        attacks=[ATTACK],
        examples=2,
        out=tmp_path / "run",
        workers=1,
        stop_on_leak=False,
    )
    rows = [row for row in audit.rows if row.counts]
    assert [row.status for row in rows] == ["done", "done"]
    assert [example.value("token_accuracy") for row in rows for example in row.examples] == [1, 1]
    assert audit.verdict.outcome == "leaks"
    assert all(finding.status == "done" for finding in audit.findings)
    page = audit.report(tmp_path / "report.html").read_text()
    assert SPACE.text(SPACE.to_unit(x[0])) in page
