"""Weights come from safetensors and from torch's own files, of which nothing runs."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from leakscope.models.weights import load_weights, read_weights


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_state_dictionaries_are_loaded_as_people_save_them(suffix: str, prefix: str, tmp_path: Path) -> None:
    trained, path = net(1), tmp_path / f"net{suffix}"
    state = {prefix + name: value for name, value in trained.state_dict().items()}
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    model = net()
    load_weights(model, path)
    assert same(model, trained)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_checkpoints_are_unwrapped(key: str, tmp_path: Path) -> None:
    torch.save({"epoch": 3, key: net(1).state_dict(), "optimizer": {"lr": 0.1}}, tmp_path / "checkpoint.pt")
    model = net()
    load_weights(model, tmp_path / "checkpoint.pt")
    assert same(model, net(1))


def test_files_of_older_versions_of_torch(tmp_path: Path) -> None:
    torch.save(net(1).state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert set(read_weights(tmp_path / "old.pt")) == set(net().state_dict())


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("trapped",)


def test_nothing_of_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Trap()}, tmp_path / "trap.pt")
    (tmp_path / "trap.pth").write_bytes(pickle.dumps(Trap()))
    for name in ("trap.pt", "trap.pth"):
        with pytest.raises(ValueError, match=r"expected tensors only.*state_dict"):
            read_weights(tmp_path / name)
    assert not (tmp_path / "trapped").exists()


def test_a_whole_model_is_refused_with_what_to_save_instead(tmp_path: Path) -> None:
    torch.save(net(), tmp_path / "whole.pt")
    with pytest.raises(ValueError, match=r"torch\.save\(model\.state_dict\(\)"):
        read_weights(tmp_path / "whole.pt")


@pytest.mark.parametrize(
    ("content", "words"),
    [([1, 2], "expected a state dictionary"), ({}, "state dictionary"), ({"a": torch.ones(1), "lr": 0.1}, "lr")],
)
def test_what_is_no_state_dictionary_is_named(content: object, words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=words):
        read_weights(tmp_path / "odd.pt")


def test_broken_files_and_files_that_grow(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match="expected tensors only"):
        read_weights(tmp_path / "text.pt")
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(2**24))
    with pytest.raises(ValueError, match="say they hold"):
        read_weights(tmp_path / "bomb.pt")
    torch.save({"other": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="do not fit the model"):
        load_weights(net(), tmp_path / "other.pt")


def test_what_may_never_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    for path in (tmp_path / "pipe.pt", Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match=r"expected a file, got (a pipe or a device|a folder)"):
            read_weights(path)
    torch.save({"fc.weight": torch.zeros(1000)}, tmp_path / "w.pt")
    monkeypatch.setenv("LEAKSCOPE_MAX_BYTES", "100")
    with pytest.raises(ValueError, match=r"w\.pt: expected at most 100 bytes"):
        read_weights(tmp_path / "w.pt")
