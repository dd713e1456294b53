"""MNIST and EMNIST readers on the real files and on damaged ones."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from leakscope.data import load_data
from leakscope.data import standard as idx_module


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_pair(folder: Path, prefix: str, x: np.ndarray, y: np.ndarray, *, zipped: bool = False) -> None:
    for name, array in (("images-idx3", x), ("labels-idx1", y)):
        content = idx_bytes(array)
        end = ".gz" if zipped else ""
        (folder / f"{prefix}-{name}-ubyte{end}").write_bytes(gzip.compress(content) if zipped else content)


def test_mnist_real(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    train = load_data("mnist")
    assert train.x.shape == (10_000, 1, 28, 28)
    assert train.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]  # the famous first ten
    assert not train.private
    test = load_data("mnist", split="test")
    assert len(test) == 2000
    assert test.y[:5].tolist() == [7, 2, 1, 0, 4]
    part = load_data("mnist", real_data / "MNIST" / "raw", limit=7)
    assert torch.equal(part.x, train.x[:7])
    # The same content unpacked.
    for file in (real_data / "MNIST" / "raw").glob("t10k*"):
        (tmp_path / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    assert load_data("mnist", tmp_path, split="test").fingerprint() == test.fingerprint()
    assert len(load_data("mnist", tmp_path / "t10k-images-idx3-ubyte")) == 2000


def test_emnist_is_turned_and_letters_start_at_zero(tmp_path: Path) -> None:
    x = np.arange(2 * 28 * 28).reshape(2, 28, 28) % 251
    write_pair(tmp_path, "emnist-letters-train", x, np.array([1, 26]), zipped=True)
    letters = load_data("emnist", tmp_path, variant="letters")
    assert letters.y.tolist() == [0, 25]
    assert letters.num_classes == 26
    assert torch.equal((letters.x[0, 0] * 255).round().int(), torch.from_numpy(x[0].T.astype(np.int32)))
    straight = load_data("emnist", tmp_path, variant="letters", transposed=False)
    assert torch.equal(straight.x, letters.x.transpose(2, 3))
    write_pair(tmp_path, "emnist-byclass-test", x, np.array([0, 61]))
    by_class = load_data("emnist", tmp_path, variant="byclass", split="test")
    assert by_class.num_classes == 62
    assert by_class.class_names is not None
    assert by_class.class_names[61] == "z"
    with pytest.raises(ValueError, match="variant: expected one of balanced"):
        load_data("emnist", tmp_path, variant="cursive")


EMNIST_CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}


@pytest.mark.parametrize("variant", list(idx_module.EMNIST_NAMES))
def test_emnist_variants_name_their_classes(variant: str) -> None:
    assert len(idx_module.EMNIST_NAMES[variant]) == EMNIST_CLASSES[variant]


GOOD = idx_bytes(np.zeros((3, 4, 4)))
LABELS = idx_bytes(np.array([0, 1, 2]))
DAMAGED = {
    "empty": (b"", LABELS, "starts with 00000803"),
    "wrong magic": (b"\x89PNG" + GOOD[4:], LABELS, "got 89504e47"),
    "labels as images": (LABELS, LABELS, "got 00000801"),
    "floats": (b"\x00\x00\x0d\x03" + GOOD[4:], LABELS, "got 00000d03"),
    "header cut": (GOOD[:9], LABELS, "truncated within its header"),
    "data cut": (GOOD[:-1], LABELS, "claims 48 bytes"),
    "data added": (GOOD + b"x", LABELS, "claims 48 bytes|more data"),
    "no images": (idx_bytes(np.zeros((0, 4, 4))), LABELS, "claims shape"),
    "huge": (bytes((0, 0, 8, 3)) + b"\xff" * 12, LABELS, "its header claims"),
    "large claim": (bytes((0, 0, 8, 3)) + struct.pack(">3I", 1000, 1000, 1000), LABELS, "claims|truncated"),
    "labels short": (GOOD, idx_bytes(np.array([0, 1])), "3 images, but 2 labels"),
    "label out of range": (GOOD, idx_bytes(np.array([0, 1, 10])), "0 to 9, got 0 to 10"),
}


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("what", list(DAMAGED))
def test_damaged_files(tmp_path: Path, what: str, zipped: bool) -> None:
    images, labels, words = DAMAGED[what]
    if zipped and what in ("data cut", "data added"):
        words = "truncated|more data"
    end = ".gz" if zipped else ""
    for name, content in (("images-idx3", images), ("labels-idx1", labels)):
        file = tmp_path / f"train-{name}-ubyte{end}"
        file.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(ValueError, match=words) as caught:
        load_data("mnist", tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "checksum", "not gzip", "flipped"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    rng = np.random.default_rng(0)
    write_pair(tmp_path, "train", rng.integers(0, 256, (5, 28, 28)), np.arange(5), zipped=True)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "checksum":
        content[-8] ^= 0xFF
    elif damage == "flipped":
        content[40:60] = b"\xff" * 20
    else:
        content = bytearray(b"plain text, no gzip")
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz: "):
        load_data("mnist", tmp_path)


def test_gzip_bomb_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header within the cap whose stream never ends: only what the header claims is decompressed."""
    bomb = GOOD + bytes(50_000_000)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bomb, 1))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(LABELS)
    with pytest.raises(ValueError, match="more data than its header claims"):
        load_data("mnist", tmp_path)
    monkeypatch.setenv("LEAKSCOPE_MAX_BYTES", "47")
    with pytest.raises(ValueError, match="expected at most 47 bytes, got 192"):
        load_data("mnist", tmp_path)


def test_labels_missing(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(GOOD)
    with pytest.raises(ValueError, match="expected its labels in train-labels-idx1-ubyte"):
        load_data("mnist", tmp_path)
    other = tmp_path / "something"
    other.write_bytes(GOOD)
    with pytest.raises(ValueError, match="expected its labels"):
        load_data("mnist", other)
