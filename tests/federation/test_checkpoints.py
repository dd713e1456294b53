"""Checkpoints: the same bits as training in one go, nothing trained twice, nothing believed that is damaged."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.defense import Defense
from leakscope.federation import FedAvg, FederatedTraining, TrainingRun, cached_training
from leakscope.federation.checkpoints import cache_folder, training_key

TRAINING = FederatedTraining(rounds=6, clients_per_round=2, protocol=FedAvg(epochs=1, batch_size=2, lr=0.1))
Pairs = list[tuple[Tensor, Tensor]]


def net(seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
        model[2].running_mean.copy_(torch.randn(5, generator=generator))
    return model


def clients(seed: int = 1) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(n, 1, 2, 2, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (5, 3, 4)
    ]


def same(a: TrainingRun, b: TrainingRun) -> bool:
    return a.losses == b.losses and all(
        torch.equal(value, b.models[number].state_dict()[name])
        for number, model in a.models.items()
        for name, value in model.state_dict().items()
    )


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the rounds that are really trained."""
    numbers: list[int] = []
    real = FederatedTraining.play_round

    def record(self: FederatedTraining, model: nn.Module, data: Pairs, number: int, **rest: Any) -> Any:
        numbers.append(number)
        return real(self, model, data, number, **rest)

    monkeypatch.setattr(FederatedTraining, "play_round", record)
    return numbers


def rounds(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("round-")) for path in folder.rglob("*.safetensors"))


def test_the_same_as_a_run_and_a_hit_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TRAINING.run(net(), clients(), seed=7, at=[1, 3, 7])
    told: list[tuple[int, int, float]] = []
    first = cached_training(
        TRAINING, net(), clients(), seed=7, at=[1, 3, 7], folder=tmp_path, progress=lambda *event: told.append(event)
    )
    assert same(plain, first)
    assert told == [(n, 6, loss) for n, loss in enumerate(plain.losses, start=1)]
    assert rounds(tmp_path) == [3, 7]
    monkeypatch.setattr(FedAvg, "_train", lambda *_: pytest.fail("trained although it is in the cache"))
    second = cached_training(TRAINING, net(), clients(), seed=7, at=[7, 3, 1], folder=tmp_path)
    assert same(plain, second)
    assert list(second.models) == [1, 3, 7]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_later_round_goes_on_from_the_latest_before_it(tmp_path: Path, played: list[int]) -> None:
    whole = TRAINING.run(net(), clients(), at=range(1, 8))
    for at, fresh in (([3], [1, 2]), ([5], [3, 4]), ([4], [3]), ([2, 7], [1, 5, 6]), ([6], [5]), (None, [])):
        played.clear()
        run = cached_training(TRAINING, net(), clients(), at=at, folder=tmp_path)
        assert played == fresh
        assert run.losses == whole.losses[: max(run.models) - 1]
        assert all(same(TrainingRun({r: m}, ()), TrainingRun({r: whole.models[r]}, ())) for r, m in run.models.items())


def test_the_number_of_rounds_does_not_separate_trainings(tmp_path: Path, played: list[int]) -> None:
    cached_training(dataclasses.replace(TRAINING, rounds=2), net(), clients(), folder=tmp_path)
    run = cached_training(dataclasses.replace(TRAINING, rounds=4), net(), clients(), folder=tmp_path)
    assert played == [1, 2, 3, 4]
    assert same(run, dataclasses.replace(TRAINING, rounds=4).run(net(), clients()))


def test_an_interrupted_training_goes_on(tmp_path: Path, played: list[int]) -> None:
    def stop(done: int, total: int, loss: float) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_training(TRAINING, net(), clients(), folder=tmp_path, progress=stop)
    played.clear()
    run = cached_training(TRAINING, net(), clients(), folder=tmp_path)
    assert played == [5, 6]
    assert same(run, TRAINING.run(net(), clients()))


def test_round_one_is_the_model_itself_and_leaves_no_trace(tmp_path: Path, played: list[int]) -> None:
    model = net()
    run = cached_training(TRAINING, model, clients(), at=[1], folder=tmp_path / "none")
    assert run.last is not model
    assert same(run, TrainingRun({1: model}, ()))
    assert played == []
    assert not (tmp_path / "none").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def change_loss(path: Path) -> None:
    content = path.read_bytes()
    place = content.index(b".", content.index(b"losses")) + 1
    path.write_bytes(content[:place] + (b"7" if content[place : place + 1] != b"7" else b"8") + content[place + 1 :])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def words(path: Path) -> None:
    path.write_text("something else")


def other_weights(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"parameter/1.weight": torch.zeros(5, 4)}, path)


def earlier_round(path: Path) -> None:
    shutil.copy(path.with_name("round-00003.safetensors"), path)


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [cut, flip, change_loss, empty, words, other_weights, earlier_round, gone])
def test_damage_is_passed_over_and_mended(damage: Callable[[Path], None], tmp_path: Path, played: list[int]) -> None:
    whole = cached_training(TRAINING, net(), clients(), at=[3, 5], folder=tmp_path)
    (path,) = tmp_path.rglob("round-00005.safetensors")
    intact = path.read_bytes()
    damage(path)
    played.clear()
    run = cached_training(TRAINING, net(), clients(), at=[5], folder=tmp_path)
    assert played == [3, 4]
    assert same(run, TrainingRun({5: whole.models[5]}, whole.losses))
    assert path.read_bytes() == intact


def test_a_file_of_another_training_is_foreign(tmp_path: Path, played: list[int]) -> None:
    cached_training(TRAINING, net(), clients(), seed=1, at=[4], folder=tmp_path / "a")
    cached_training(TRAINING, net(), clients(), seed=2, at=[4], folder=tmp_path / "b")
    (ours,), (theirs,) = (list((tmp_path / name).rglob("*.safetensors")) for name in "ab")
    shutil.copy(theirs, ours)
    played.clear()
    run = cached_training(TRAINING, net(), clients(), seed=1, at=[4], folder=tmp_path / "a")
    assert played == [1, 2, 3]
    assert same(run, TRAINING.run(net(), clients(), seed=1, at=[4]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Half(Defense):
    factor: float = 0.5

    def protect_message(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        return {name: self.factor * value for name, value in update.items()}


class Bent(nn.Sequential):
    """The same structure and weights as its base, but another function."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x * x)
        return out


def bent() -> nn.Module:
    model = Bent(*net())
    model.__class__.__qualname__ = "Sequential"
    model._get_name = lambda: "Sequential"  # type: ignore[method-assign]
    return model


def frozen() -> nn.Module:
    model = net()
    model[1].bias.requires_grad_(False)
    return model


def other_buffer() -> nn.Module:
    model = net()
    model[2].running_var.mul_(2)
    return model


CHANGES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "weights": {"model": net(1)},
    "structure": {"model": nn.Sequential(*net()[:3], nn.ReLU(), net()[4])},
    "code": {"model": bent()},
    "frozen": {"model": frozen()},
    "buffer": {"model": other_buffer()},
    "precision": {"model": net().double(), "clients": [(x.double(), y) for x, y in clients()]},
    "inputs": {"clients": clients(2)},
    "labels": {"clients": [(x, (y + 1) % 3) for x, y in clients()]},
    "order": {"clients": clients()[::-1]},
    "fewer": {"clients": clients()[:2]},
    "merged": {"clients": [tuple(map(torch.cat, zip(*clients()[:2], strict=True))), clients()[2]]},
    "defence": {"defense": Half()},
    "defence setting": {"defense": Half(factor=0.25)},
    "clients a round": {"training": dataclasses.replace(TRAINING, clients_per_round=3)},
    "recipe": {"training": dataclasses.replace(TRAINING, protocol=FedAvg(epochs=1, batch_size=2, lr=0.2))},
}


def key(**changes: Any) -> str:
    given = {"training": TRAINING, "model": net(), "clients": clients(), "seed": 0, "defense": None, **changes}
    return training_key(given.pop("training"), given.pop("model"), given.pop("clients"), **given)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_another_key(what: str) -> None:
    assert key(**CHANGES[what]) != key()


def test_all_keys_differ_and_are_stable() -> None:
    keys = [key(**change) for change in CHANGES.values()]
    assert len(set(keys)) == len(keys)
    assert key() == key() == key(model=net().train(), training=dataclasses.replace(TRAINING, rounds=99))


def test_versions_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert key() != before


def test_the_defence_is_in_the_training(tmp_path: Path) -> None:
    defended = cached_training(TRAINING, net(), clients(), at=[3], folder=tmp_path, defense=Half())
    assert same(defended, TRAINING.run(net(), clients(), at=[3], defense=Half()))
    assert not same(defended, cached_training(TRAINING, net(), clients(), at=[3], folder=tmp_path))


def test_a_defence_must_tell_its_settings(tmp_path: Path) -> None:
    class Vague(Half):
        __repr__ = object.__repr__

    with pytest.raises(ValueError, match="expected a defence whose repr tells all"):
        cached_training(TRAINING, net(), clients(), folder=tmp_path, defense=Vague())


def test_the_callers_model_and_the_global_generator_stay(tmp_path: Path) -> None:
    model, twin = net(), net()
    globe = torch.random.get_rng_state()
    for _ in range(2):
        cached_training(TRAINING, model, clients(), at=[3], folder=tmp_path)
    assert same(TrainingRun({1: model}, ()), TrainingRun({1: twin}, ()))
    assert torch.equal(globe, torch.random.get_rng_state())


def test_where_checkpoints_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "training"
    assert cache_folder(tmp_path) == tmp_path
    monkeypatch.setenv("LEAKSCOPE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "leakscope" / "training"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "leakscope" / "training"


def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path, played: list[int]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Set LEAKSCOPE_CACHE to a folder that can be written"):
        cached_training(TRAINING, net(), clients(), folder=tmp_path / "file")
    assert played == []
