"""Messages on disk are those in memory, to the last bit, and are read one tensor at a time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import CAFE
from leakscope.contracts.files import load_observation, save_observation
from leakscope.contracts.observation import Message, Observation, gathered, held_bytes
from leakscope.contracts.spool import Spool, StoredTensors
from leakscope.federation import Vertical, vertical
from leakscope.models import build_model


def values(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(3, 4, generator=draws).to(dtype),
        "none": torch.zeros(0, 2, dtype=dtype),
        "scalar": torch.tensor(2.5, dtype=dtype),
        "strided": torch.randn(4, 3, generator=draws).to(dtype).T,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_what_is_read_is_what_was_written(dtype: torch.dtype) -> None:
    spool, tensors = Spool(), values(dtype)
    first, second = spool.add(tensors), spool.add({"other": torch.arange(5)})
    assert list(first) == list(tensors)
    for name, value in tensors.items():
        assert torch.equal(first[name], value)
        assert (first[name].dtype, first[name].shape) == (value.dtype, value.shape)
    assert second["other"].tolist() == [0, 1, 2, 3, 4]
    assert "weight" in first
    assert "weight" not in second
    assert copy.deepcopy(first) is first


def test_nothing_done_to_what_was_read_reaches_the_disk() -> None:
    stored = Spool().add(values())
    stored["weight"].zero_()
    assert torch.equal(stored["weight"], values()["weight"])


def test_other_precisions_and_orders_are_made_while_reading() -> None:
    stored = Spool().add(values())
    wide = stored.to(dtype=torch.float64).in_order(["strided", "weight"])
    assert list(wide) == ["strided", "weight"]
    assert torch.equal(wide["weight"], values()["weight"].double())
    assert wide.layout()["strided"].dtype == torch.float64
    assert wide.layout()["strided"].shape == (3, 4)
    assert wide.to().layout()["weight"].dtype == torch.float64, "what is not asked for stays"


class Counting(Spool):
    """Tells how many tensors were read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def read(self, place: Any) -> Tensor:
        self.reads += 1
        return super().read(place)


def net() -> nn.Module:
    return nn.Linear(4, 3)


def test_an_observation_is_checked_sorted_and_copied_without_reading() -> None:
    spool, model = Counting(), net()
    update = {"bias": torch.zeros(3), "weight": torch.ones(3, 4)}
    message = Message(update=spool.add(update))
    seen = Observation.from_update(model, message.update, input_shape=(4,), num_classes=3)
    again = seen.to(dtype=torch.float64).without_channel()
    assert list(again.message.update) == ["weight", "bias"], "in the model's order"
    assert isinstance(again.message.update, StoredTensors)
    assert spool.reads == 0
    assert again.dtype == torch.float64
    with pytest.raises(ValueError, match="expected shape"):
        Observation.from_update(nn.Linear(5, 3), message.update, input_shape=(5,), num_classes=3)


def messages() -> Iterator[Message]:
    for number in range(6):
        yield Message(update={"weight": torch.full((8, 8), float(number)), "bias": torch.zeros(8)}, indices=(number,))
    yield Message(update={"bias": torch.ones(8)}, indices=(6,), partial=True)


def test_so_much_stays_in_memory_and_the_rest_is_on_disk() -> None:
    size = (64 + 8) * 4
    kept = gathered(messages(), in_memory=2 * size + 40)
    assert [held_bytes(message) for message in kept] == [size, size, 0, 0, 0, 0, 32]
    assert [message.indices for message in kept] == [(number,) for number in range(7)]
    for ours, theirs in zip(kept, messages(), strict=True):
        assert ours.partial == theirs.partial
        assert all(torch.equal(ours.update[name], value) for name, value in theirs.update.items())
    assert gathered(kept, in_memory=0)[-1].update["bias"].tolist() == [1.0] * 8


def observe(monkeypatch: pytest.MonkeyPatch, in_memory: int | None, **how: Any) -> Observation:
    if in_memory is not None:
        monkeypatch.setattr(vertical, "gathered", functools.partial(gathered, in_memory=in_memory))
    x = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    model = build_model("cafe-cnn", input_shape=(1, 8, 8), num_classes=3, filters=(4, 6), hidden=16, middle=8)
    draws = torch.Generator().manual_seed(2)
    return Vertical(batch_size=4, rounds=20, **how).observe(model, x, torch.arange(12) % 3, generator=draws)


@pytest.mark.parametrize("method", ["direct", "nested", "single-loop", "gradients"])
def test_cafe_finds_the_same_in_rounds_on_disk(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = CAFE(method=method, iterations=6, first_iterations=30)
    results = []
    for in_memory in (None, 0):
        seen = observe(monkeypatch, in_memory, lr=0.05 if method == "single-loop" else 0.0)
        assert any(isinstance(message.update, StoredTensors) for message in seen.messages) == (in_memory == 0)
        results.append(attack(seen, seed=0))
    ours, theirs = results
    assert torch.equal(ours.inputs, theirs.inputs)
    assert torch.equal(ours.scores, theirs.scores)
    assert ours.diagnosis == theirs.diagnosis
    assert ours.flags == theirs.flags


def test_rounds_on_disk_go_through_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    seen = observe(monkeypatch, 0, whole_rounds=5)
    save_observation(seen, tmp_path / "rounds")
    again = load_observation(tmp_path / "rounds", seen.model)
    for ours, theirs in zip(again.messages, seen.messages, strict=True):
        assert (ours.indices, ours.partial) == (theirs.indices, theirs.partial)
        assert all(torch.equal(ours.update[name], value) for name, value in theirs.update.items())


def test_nan_on_disk_is_refused_as_in_memory() -> None:
    update = Spool().add({"weight": torch.full((3, 4), torch.nan), "bias": torch.zeros(3)})
    seen = Observation.from_update(net(), update, input_shape=(4,), num_classes=3, num_examples=1)
    from leakscope.attacks import LinearLayer

    with pytest.raises(ValueError, match="NaN or infinite entries in weight"):
        LinearLayer()(seen)
