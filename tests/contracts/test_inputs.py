"""The box of floats, and a worked example of a further space: adding one is one class and one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import InvertingGradients
from leakscope.contracts.inputs import SPACES, Box, InputSpace, Start, ValueRange, space_from_facts
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.federation import FedSGD

COLOUR = Box((2, 3, 3), ValueRange((-1.0, 0.0), (1.0, 4.0)))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_projection_moves_only_what_lies_outside() -> None:
    x = 5 * draw(4, 2, 3, 3)
    found = COLOUR.project(x)
    assert float(found[:, 0].min()) == -1
    assert float(found[:, 0].max()) == 1
    assert float(found[:, 1].min()) == 0
    assert float(found[:, 1].max()) == 4
    inside = (x == found).float().mean()
    assert 0 < float(inside) < 1
    assert torch.equal(COLOUR.project(found), found)
    assert torch.equal(Box((2, 3, 3)).project(x), x)


def test_unit_space_and_back() -> None:
    x = COLOUR.project(5 * draw(4, 2, 3, 3))
    unit = COLOUR.to_unit(x)
    assert float(unit.min()) == 0
    assert float(unit.max()) == 1
    assert torch.allclose(COLOUR.from_unit(unit), x, atol=1e-6)
    assert torch.equal(Box((2, 3, 3)).to_unit(x), x), "without bounds the model's own numbers are all there is"


@pytest.mark.parametrize("kind, mean, spread", [("grey", 0.5, 0.1), ("normal", 0.0, 1.0), ("uniform", 0.5, 12**-0.5)])
def test_a_search_starts_where_it_is_told(kind: Start, mean: float, spread: float) -> None:
    box = Box((3, 20, 20), ValueRange((-2.0,), (2.0,)))
    found = box.start(kind, 4, torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.float64))
    assert found.shape == (4, 3, 20, 20)
    assert found.dtype == torch.float64
    assert float(found.mean()) == pytest.approx(mean, abs=0.05)
    assert float(found.std()) == pytest.approx(spread, rel=0.05)
    again = box.start(kind, 4, torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.float64))
    assert torch.equal(found, again)
    unknown = Box((3, 20, 20)).start("grey", 4, torch.Generator().manual_seed(0), found)
    assert float(unknown.mean()) == pytest.approx(0, abs=0.05), "without bounds the middle is zero"


@pytest.mark.parametrize("box", [COLOUR, Box((7,)), Box((1, 4), ValueRange())])
def test_facts_make_the_same_space_again(box: Box) -> None:
    facts = json.loads(json.dumps(box.facts()))
    assert space_from_facts(facts) == box
    assert box.bounded == (box.range is not None)


def test_wrong_spaces_are_refused() -> None:
    for shape in ((), (0,), (3, -1)):
        with pytest.raises(ValueError, match="input_shape: expected positive sizes"):
            Box(shape)
    assert Box([2, 3]).shape == (2, 3)  # type: ignore[arg-type]
    assert Box((2, 3)).size == 6
    with pytest.raises(ValueError, match="inputs: expected one of box, got 'sphere'"):
        space_from_facts({"kind": "sphere"})


# --- a worked example: shares that add up to one ----------------------------------------------------------------------


@dataclass(frozen=True)
class Simplex(InputSpace):
    """Rows of shares: numbers of at least 0 that add up to 1, as in the composition of a blood sample."""

    kind: ClassVar[str] = "simplex"
    measures: ClassVar[tuple[str, ...]] = ("mse", "rmse")

    @property
    def bounded(self) -> bool:
        return True

    def to_unit(self, x: Tensor) -> Tensor:
        return x

    def from_unit(self, x: Tensor) -> Tensor:
        return x

    def start(self, kind: Start, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
        drawn = torch.rand((count, *self.shape), generator=generator).to(like)
        return torch.softmax(0.1 * drawn, -1)

    def project(self, x: Tensor) -> Tensor:
        """Duchi et al. 2008: subtract one number from all shares, and set what falls below zero to zero."""
        falling = x.sort(-1, descending=True).values
        excess = (falling.cumsum(-1) - 1) / torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
        last = (falling > excess).sum(-1, keepdim=True) - 1
        return (x - excess.gather(-1, last)).clamp(min=0)

    def facts(self) -> dict[str, Any]:
        return {"kind": self.kind, "shape": list(self.shape)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Simplex:
        return cls(tuple(facts["shape"]))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPACES, Simplex.kind, Simplex)


def scene() -> tuple[nn.Module, Tensor, Tensor, Simplex]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    x = torch.softmax(2 * draw(1, 6), -1)
    return net, x, torch.tensor([2]), Simplex((6,))


def on_simplex(x: Tensor) -> bool:
    return bool((x >= 0).all()) and torch.allclose(x.sum(-1), torch.ones(len(x)), atol=1e-5)


def test_the_projection_is_the_nearest_point_of_the_simplex() -> None:
    space, x = Simplex((6,)), draw(50, 6)
    found = space.project(x)
    assert on_simplex(found)
    assert torch.allclose(space.project(found), found, atol=1e-6)
    others = torch.softmax(3 * draw(200, 1, 6, seed=1), -1)
    assert bool(((x - found).norm(dim=-1) <= (x - others).norm(dim=-1) + 1e-6).all())


def test_a_space_of_ones_own_is_observed_and_attacked() -> None:
    net, x, y, space = scene()
    seen = FedSGD().observe(net, x, y, inputs=space)
    assert seen.inputs == space
    assert seen.input_shape == (6,)
    assert seen.value_range is None
    found = InvertingGradients(iterations=30, space="model", tv=0.0)(seen, seed=0)
    assert on_simplex(found.inputs), "the search never leaves the space"
    start = space.start("grey", 1, torch.Generator().manual_seed(0), x)
    assert float((found.inputs - x).norm()) < 0.3 * float((start - x).norm())
    assert found.labels is not None
    assert found.labels.tolist() == [2]


def test_an_adversary_who_does_not_know_the_space_is_not_told(registered: None) -> None:
    net, x, y, space = scene()
    blind = FedSGD().observe(net, x, y, knowledge=Knowledge.eavesdropper, inputs=space)
    assert blind.inputs == Box((6,))


def test_a_space_of_ones_own_is_saved_and_loaded(registered: None, tmp_path: Path) -> None:
    net, x, y, space = scene()
    seen = FedSGD().observe(net, x, y, inputs=space)
    seen.save(tmp_path / "update")
    again = Observation.load(tmp_path / "update", net)
    assert again.inputs == space
    one, two = (InvertingGradients(iterations=5, space="model", tv=0.0)(o, seed=1).inputs for o in (seen, again))
    assert torch.equal(one, two)


def test_a_space_that_nobody_registered_is_named(tmp_path: Path) -> None:
    net, x, y, space = scene()
    FedSGD().observe(net, x, y, inputs=space).save(tmp_path / "update")
    with pytest.raises(ValueError, match="inputs: expected one of box, got 'simplex'"):
        Observation.load(tmp_path / "update", net)
