"""Packs: the real ones, every layout, and damaged and hostile archives."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leakscope.contracts.inputs import ValueRange
from leakscope.data import DATA, load_data


@pytest.mark.parametrize(
    "name, count, classes",
    [
        ("femnist", 18796, 62),
        ("yale", 165, 15),
        ("orl", 400, 40),
        ("ecg", 4776, 5),
        ("bloodcells", 1080, 3),
        ("brain", 114, 3),
        ("photos", 10, 10),
    ],
)
def test_real_packs(real_data: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int, classes: int) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    examples = load_data(name)
    assert (len(examples), examples.num_classes, examples.shape) == (count, classes, DATA[name].shape)
    unit = examples.value_range.to_unit(examples.x)
    assert unit.min() >= 0
    assert unit.max() <= 1
    assert examples.credits
    assert not examples.private
    assert load_data("npz", real_data / "femnist.npz", limit=3).private


def test_femnist_splits_and_writers(real_data: Path) -> None:
    pack = np.load(real_data / "femnist.npz")
    train, test = (load_data("femnist", real_data, split=split) for split in ("train", "test"))
    assert len(train) == int((pack["split"] == 0).sum())
    assert len(train) + len(test) == 18796
    assert test.group is not None
    assert test.group.tolist() == pack["writer"][pack["split"] == 1].tolist()
    assert torch.equal((train.x[0, 0] * 255).round().byte(), torch.from_numpy(pack["x"][pack["split"] == 0][0]))


def test_ecg_is_in_millivolts(real_data: Path) -> None:
    pack = np.load(real_data / "ecg_mitbih.npz")
    signals = load_data("ecg", real_data, limit=50)
    assert signals.shape == (1, 256)
    assert np.allclose(signals.x[:, 0].numpy(), pack["x"][:50] * 0.005, atol=1e-6)
    # The range is that of the whole pack, so it does not depend on how many are read.
    assert signals.value_range == load_data("ecg", real_data, limit=3).value_range
    assert signals.group is not None
    assert signals.group.tolist() == pack["record"][:50].tolist()


def save(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


Y = np.array([0, 1, 2])


def test_layouts(tmp_path: Path) -> None:
    def shape(x: np.ndarray, **options: Any) -> tuple[int, ...]:
        arrays = {"x": x, "y": Y} | options.pop("extra", {})
        return load_data("npz", save(tmp_path / "a.npz", **arrays), **options).shape

    scale = {"extra": {"scale": np.float32(0.5)}}
    assert shape(np.zeros((3, 5, 6, 3), np.uint8)) == (3, 5, 6)
    assert shape(np.zeros((3, 4, 8, 9), np.uint8)) == (4, 8, 9)
    assert shape(np.zeros((3, 5, 6), np.uint8)) == (1, 5, 6)
    assert shape(np.zeros((3, 5), np.float32)) == (5,)
    assert shape(np.zeros((3, 5), np.int16), **scale) == (1, 5)
    assert shape(np.zeros((3, 2, 7), np.float32), layout="signal") == (2, 7)
    assert shape(np.zeros((3, 2, 3, 3), np.float32), layout="chw") == (2, 3, 3)
    assert shape(np.asfortranarray(np.zeros((3, 5, 6, 3), np.uint8))) == (3, 5, 6)
    for wrong in (np.zeros((3, 9, 9, 9)), np.zeros((3, 1, 1, 1, 1)), np.zeros(3), np.zeros((0, 2))):
        with pytest.raises(ValueError, match=r"a\.npz"):
            shape(wrong)
    with pytest.raises(ValueError, match="layout"):
        shape(np.zeros((3, 5)), layout="hwc")
    with pytest.raises(ValueError, match="layout: expected one of auto"):
        shape(np.zeros((3, 5)), layout="whc")


def test_pixels_land_in_the_right_place(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (3, 5, 6, 2), dtype=np.uint8)
    for stored in (x, np.asfortranarray(x)):
        read = load_data("npz", save(tmp_path / "a.npz", x=stored, y=Y)).x
        assert np.array_equal((read * 255).round().byte().numpy(), x.transpose(0, 3, 1, 2))


def test_ranges_and_classes(tmp_path: Path) -> None:
    file = save(tmp_path / "a.npz", x=np.array([[0.0, 0.5], [1.0, 0.2], [0.1, 0.1]]), y=Y)
    assert load_data("npz", file).value_range == ValueRange()
    assert load_data("npz", file).num_classes == 3
    assert load_data("npz", file, num_classes=5).num_classes == 5
    assert load_data("npz", file).name == "a"
    with pytest.raises(ValueError, match="0 to 1, got 0 to 2"):
        load_data("npz", file, num_classes=2)
    for bad in (0, "3", True):
        with pytest.raises(ValueError, match="num_classes"):
            load_data("npz", file, num_classes=bad)
    other = save(tmp_path / "b.npz", data=np.array([[-4.0, 2.0]]), label=np.array([0]))
    read = load_data("npz", other, x_key="data", y_key="label")
    assert read.value_range == ValueRange((-4.0,), (2.0,))
    assert load_data("npz", other, x_key="data", y_key=None).y.tolist() == [0]
    with pytest.raises(ValueError, match="no array 'x'; it has data, label"):
        load_data("npz", other)


@pytest.mark.parametrize(
    "arrays, words",
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(2, int)}, "'y': expected 3 targets"),
        ({"x": np.zeros((3, 2)), "y": np.array(["a", "b", "c"])}, "'y': expected numbers"),
        ({"x": np.zeros((3, 2)), "y": np.full(3, np.nan)}, "y: expected finite values"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, -1, 2])}, "labels from 0"),
        ({"x": np.full((3, 2), np.nan), "y": Y}, "NaN"),
        ({"x": np.full((3, 2), 1e300), "y": Y}, "NaN or infinity"),
        ({"x": np.array([["a"]] * 3), "y": Y}, "'x': expected numbers"),
        ({"x": np.zeros((3, 2), complex), "y": Y}, "complex"),
        ({"x": np.zeros((3, 2), "i4,f4"), "y": Y}, "'x'"),
        ({"x": np.zeros((3, 2), np.int16), "y": Y, "scale": np.zeros(2)}, "scale"),
        ({"x": np.zeros((3, 2), np.int16), "y": Y, "scale": np.float32(-1)}, "scale"),
        ({"x": np.zeros((3, 2)), "y": Y, "writer": np.zeros(5, int)}, "'writer'"),
        ({"x": np.zeros((3, 2)), "y": Y, "class_names": np.zeros(3)}, "'class_names'"),
        ({"x": np.zeros((3, 2)), "y": Y, "class_names": np.array(["a", "b"])}, "0 to 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_wrong_content(tmp_path: Path, arrays: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_data("npz", save(tmp_path / "a.npz", **arrays))


def test_split_without_the_array(tmp_path: Path) -> None:
    file = save(tmp_path / "a.npz", x=np.zeros((3, 2)), y=Y)
    with pytest.raises(ValueError, match="no array 'split'"):
        load_data("npz", file, split="train")
    file = save(tmp_path / "a.npz", x=np.zeros((3, 2)), y=Y, split=np.zeros(3, int))
    assert len(load_data("npz", file, split="train")) == 3
    with pytest.raises(ValueError, match="no examples in split 'test'"):
        load_data("npz", file, split="test")


def test_object_arrays_are_refused_without_running(tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (trace,)

    file = save(tmp_path / "a.npz", x=np.array([[Hostile()]], dtype=object), y=np.array([0]))
    with pytest.raises(ValueError, match=r"'x': expected numbers or text, got dtype object"):
        load_data("npz", file)
    assert not trace.exists()


def npy(shape: tuple[int, ...], body: bytes = b"", descr: str = "|u1") -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": descr, "fortran_order": False, "shape": shape})
    return content.getvalue() + body


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in members.items():
            out.writestr(f"{name}.npy", content)
    return path


def test_false_and_huge_headers(tmp_path: Path) -> None:
    labels = npy((3,), bytes(3))
    for member in (
        npy((3, 1 << 20), bytes(9)),  # claims more than there is
        npy((1 << 40, 1 << 20)),  # exabytes
        npy((-3, 2), bytes(6)),
        npy((3, 2), bytes(6), descr="|O"),
        npy((3, 2), bytes(6), descr="nonsense"),
        b"\x93NUMPY\x09\x00" + bytes(20),  # unknown version
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31),  # header of two gigabytes
        b"not an array",
        b"",
    ):
        with pytest.raises(ValueError, match=r"a\.npz: array 'x'"):
            load_data("npz", archive(tmp_path / "a.npz", x=member, y=labels))


def test_bombs_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = archive(tmp_path / "a.npz", x=npy((3, 1 << 20), bytes(3 << 20)), y=npy((3,), bytes(3)))
    assert file.stat().st_size < 10_000
    load_data("npz", file)
    read: list[int] = []
    original = zipfile.ZipExtFile.read
    monkeypatch.setattr(
        zipfile.ZipExtFile,
        "read",
        lambda self, n=-1: read.append(n) or original(self, n),  # type: ignore
    )
    monkeypatch.setenv("LEAKSCOPE_MAX_BYTES", str(1 << 22))
    with pytest.raises(ValueError, match=r"at most 4,194,304 bytes, got 12,582,912.*limit=.*MAX_BYTES=12582912"):
        load_data("npz", file)
    assert max(read) < 1000
    assert len(load_data("npz", file, limit=1)) == 1, "one row is within the cap, and only it is read"
    # A small array in a member that is large for no reason: the rest of it is not read.
    padded = archive(tmp_path / "b.npz", x=npy((3, 2), bytes(3 << 20)), y=npy((3,), bytes(3)))
    read.clear()
    assert load_data("npz", padded).shape == (2,)
    assert max(read) < 1000


def test_a_header_as_long_as_it_likes_is_not_read(tmp_path: Path) -> None:
    text = b"{'descr': '|u1', 'fortran_order': False, 'shape': (3, 2)}".ljust(30_000_000) + b"\n"
    member = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + bytes(6)
    file = archive(tmp_path / "a.npz", x=member, y=npy((3,), bytes(3)))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"a\.npz: array 'x'"):
        load_data("npz", file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_endless_rows_of_nothing_are_refused(tmp_path: Path) -> None:
    file = archive(tmp_path / "a.npz", x=npy((10**15, 0), b""), y=npy((3,), bytes(3)))
    with pytest.raises(ValueError, match="expected at most 1,073,741,824 bytes"):
        load_data("npz", file)


@pytest.mark.parametrize("scale", [None, np.float32(0.5)])
def test_a_limit_changes_neither_range_nor_values(tmp_path: Path, scale: np.float32 | None) -> None:
    x = np.random.default_rng(0).integers(-900, 900, (40, 12)).astype(np.int16)
    arrays = {} if scale is None else {"scale": scale}
    file = save(tmp_path / "a.npz", x=x, y=np.arange(40), split=np.arange(40) % 2, **arrays)
    whole, few = load_data("npz", file, split="test"), load_data("npz", file, split="test", limit=3)
    assert few.value_range == whole.value_range
    assert few.num_classes == whole.num_classes
    assert torch.equal(few.x, whole.x[:3])


def test_damaged_archives(tmp_path: Path) -> None:
    good = save(tmp_path / "good.npz", x=np.random.default_rng(0).random((3, 500)), y=Y).read_bytes()
    file = tmp_path / "a.npz"
    flipped = bytearray(good)
    flipped[200:260] = b"\x00" * 60
    for content in (b"", b"PK\x03\x04", good[: len(good) // 2], good[:-10], b"x" * 1000, bytes(flipped)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.npz"):
            load_data("npz", file)
