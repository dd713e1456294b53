"""CIFAR readers on real files, on Python-version files made from them, and on damaged and hostile ones."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leakscope.data import load_data
from leakscope.data.array_pickle import read_array_pickle


def rows(file: Path, label_bytes: int, count: int) -> np.ndarray:
    width = label_bytes + 3072
    return np.fromfile(file, dtype=np.uint8, count=count * width).reshape(count, width)


def test_cifar10_real(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = real_data / "cifar-10-batches-bin" / "data_batch_1.bin"
    examples = load_data("cifar10", real_data, limit=20)
    raw = rows(file, 1, 20)
    assert examples.x.shape == (20, 3, 32, 32)
    assert examples.y.tolist() == raw[:, 0].tolist()
    assert torch.equal((examples.x * 255).round().byte().flatten(1), torch.from_numpy(raw[:, 1:].copy()))
    assert examples.class_names is not None
    assert examples.class_names[6] == "frog"
    assert not examples.private
    assert load_data("cifar10", file.parent, limit=20).fingerprint() == examples.fingerprint()
    assert load_data("cifar10", file, limit=20).fingerprint() == examples.fingerprint()
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    assert load_data("cifar10", limit=20).fingerprint() == examples.fingerprint()
    assert len(load_data("cifar10", split="test")) == 2000


def test_cifar100_real(real_data: Path) -> None:
    raw = rows(real_data / "cifar-100-binary" / "test.bin", 2, 30)
    fine = load_data("cifar100", real_data, split="test", limit=30)
    coarse = load_data("cifar100", real_data, split="test", limit=30, labels="coarse")
    assert (fine.num_classes, coarse.num_classes) == (100, 20)
    assert fine.y.tolist() == raw[:, 1].tolist()
    assert coarse.y.tolist() == raw[:, 0].tolist()
    assert torch.equal(fine.x, coarse.x)
    assert torch.equal((fine.x * 255).round().byte().flatten(1), torch.from_numpy(raw[:, 2:].copy()))
    assert fine.class_names is not None
    assert coarse.class_names is not None
    assert (fine.class_names[0], coarse.class_names[0]) == ("apple", "aquatic_mammals")
    assert len(load_data("cifar100", real_data)) == 8000


def python2_pickle(labels: list[int], data: np.ndarray) -> bytes:
    """What Python 2 wrote for the published files: protocol 2, text as byte strings, numpy.core's names."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes((len(value),)) + value

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01" + b"M" + struct.pack("<H", len(data)) + b"M" + struct.pack("<H", 3072) + b"\x86"
        b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", data.size) + data.tobytes() + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes((n,)) for n in labels) + b"e"
    return b"\x80\x02}(" + text(b"labels") + numbers + text(b"data") + array + b"u."


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5, "python2"])
def test_python_version_of_cifar10(real_data: Path, tmp_path: Path, protocol: int | str) -> None:
    raw = rows(real_data / "cifar-10-batches-bin" / "data_batch_1.bin", 1, 12)
    data = np.ascontiguousarray(raw[:, 1:])
    labels = raw[:, 0].tolist()
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    if isinstance(protocol, str):
        content = python2_pickle(labels, data)
        assert pickle.loads(content, encoding="bytes")[b"labels"] == labels  # the helper itself is right
    else:
        content = pickle.dumps({b"data": data, "labels": labels, b"filenames": [b"a.png"] * 12}, protocol)
    (folder / "data_batch_1").write_bytes(content)
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {i}" for i in range(10)]}, 2))
    examples = load_data("cifar10", tmp_path)
    binary = load_data("cifar10", real_data, limit=12)
    assert torch.equal(examples.x, binary.x)
    assert torch.equal(examples.y, binary.y)
    assert examples.class_names is not None
    assert examples.class_names[3] == "class 3"


def test_python_version_of_cifar100(real_data: Path, tmp_path: Path) -> None:
    raw = rows(real_data / "cifar-100-binary" / "train.bin", 2, 9)
    content = {
        b"data": np.asfortranarray(raw[:, 2:]),
        b"coarse_labels": raw[:, 0].tolist(),
        b"fine_labels": raw[:, 1].astype(">i4"),
    }
    (tmp_path / "train").write_bytes(pickle.dumps(content, 2))
    for labels in ("fine", "coarse"):
        made = load_data("cifar100", tmp_path, labels=labels)
        real = load_data("cifar100", real_data, labels=labels, limit=9)
        assert torch.equal(made.x, real.x)
        assert torch.equal(made.y, real.y)


class Hostile:
    """Would make a file when loaded the usual way."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_hostile_pickle_is_refused_without_running(tmp_path: Path, protocol: int) -> None:
    import os

    trace = tmp_path / "it-ran"
    content = pickle.dumps({"data": Hostile(os.system, f"touch {trace}")}, protocol)
    file = tmp_path / "data_batch_1"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_1: .*system, which is refused"):
        load_data("cifar10", tmp_path)
    assert not trace.exists()
    pickle.loads(content)  # the weapon was loaded: the ordinary reader does run it
    assert trace.exists()


#: A list of two references to a list of two references ...: a few bytes, and endless to print.
ENDLESS = b"]q\x00" + b"]h\x00ah\x00aq\x00" * 60

HOSTILE = {
    "eval": pickle.dumps(Hostile(eval, "1"), 2),
    "getattr chain": pickle.dumps(Hostile(getattr, "x", "y"), 4),
    "numpy load": b"\x80\x02cnumpy\nload\nU\x01x\x85R.",
    "numpy file reader": b"\x80\x02cnumpy\nfromfile\nU\x01x\x85R.",
    "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0ddtype.__new__\x93.",
    "ndarray called": b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.",
    "new object": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "instance": b"(inumpy\nndarray\n.",
    "persistent": b"Pabc\n.",
    "extension": b"\x80\x02\x82\x01.",
    "huge memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "huge string": b"\x80\x02T\xff\xff\xff\x7fabc.",
    "huge bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    "other encoding": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
    "object array": pickle.dumps({"data": np.array([{}], dtype=object)}, 2),
    "structured array": pickle.dumps({"data": np.zeros(2, dtype="i4,f4")}, 2),
    "text array": pickle.dumps({"data": np.array(["a"])}, 2),
    "shape and bytes disagree": python2_pickle([1], np.zeros((1, 3072), np.uint8)).replace(b"M\x00\x0c", b"M\x00\xff"),
    "state on a list": b"\x80\x02]}U\x01aK\x01sb.",
    "call a number": b"\x80\x02K\x01)R.",
    "empty": b"",
    "text": b"hello",
    "truncated": pickle.dumps({"data": np.zeros(50, np.uint8)}, 4)[:-30],
    "stack underflow": b"\x80\x02\x86.",
    "no dictionary": pickle.dumps([1, 2], 2),
    "no data": pickle.dumps({"labels": [1]}, 2),
    "wrong width": pickle.dumps({"data": np.zeros((2, 5), np.uint8), "labels": [1, 2]}, 2),
    "float data": pickle.dumps({"data": np.zeros((2, 3072)), "labels": [1, 2]}, 2),
    "too few labels": pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, 2),
    "text labels": pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["a"]}, 2),
    "giant label": pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [1 << 80]}, 2),
    "label out of range": pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, 2),
    "negative label": pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [-1]}, 2),
    "unhashable key": b"\x80\x02}]K\x01s.",
    "endless key": b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
    "endless type": b"\x80\x02cnumpy\ndtype\nq\x01" + ENDLESS + b"h\x01h\x00\x85R.",
    "endless encoding": b"\x80\x02c_codecs\nencode\nq\x01" + ENDLESS + b"h\x01U\x01ah\x00\x86R.",
    "a function changed": b"\x80\x02c_codecs\nencode\n}U\x0c__defaults__K\x01sb.",
    "a class changed": b"\x80\x02cnumpy\nndarray\nN}U\x08__init__K\x01s\x86b.",
}


@pytest.mark.parametrize("what", list(HOSTILE))
def test_damaged_and_hostile_pickles(tmp_path: Path, what: str) -> None:
    file = tmp_path / "data_batch_1"
    file.write_bytes(HOSTILE[what])
    with pytest.raises(ValueError, match="data_batch_1: "):
        load_data("cifar10", file)


def test_names_are_text(tmp_path: Path) -> None:
    batch = {"data": np.zeros((1, 3072), np.uint8), "labels": [0]}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, 2))
    (tmp_path / "batches.meta").write_bytes(b"\x80\x02" + ENDLESS + b"}U\x0blabel_namesh\x00s.")
    assert load_data("cifar10", tmp_path / "data_batch_1").class_names is None


def test_a_limit_reads_no_more_than_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data_batch_1.bin"
    file.write_bytes(bytes(3073 * 50))
    monkeypatch.setenv("LEAKSCOPE_MAX_BYTES", str(3072 * 4 * 10))
    with pytest.raises(ValueError, match=r"at most 122,880 bytes, got 614,400.*limit"):
        load_data("cifar10", tmp_path)
    assert len(load_data("cifar10", tmp_path, limit=10)) == 10


def test_byte_order_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    for dtype in ("<i4", ">i4", "<f8", ">u2", "i1"):
        values = np.arange(6).astype(dtype).reshape(2, 3)
        for protocol in (2, 5):
            file.write_bytes(pickle.dumps(values, protocol))
            read = read_array_pickle(file)
            assert np.array_equal(read, values)
            assert read.dtype == values.dtype


@pytest.mark.parametrize(
    "name, file, content, words",
    [
        ("cifar10", "data_batch_1.bin", b"", "rows of 3073 bytes"),
        ("cifar10", "data_batch_1.bin", bytes(3072), "3072 bytes"),
        ("cifar10", "data_batch_1.bin", bytes(3073 + 5), "truncated"),
        ("cifar10", "data_batch_1.bin", b"\x0a" + bytes(3072), "0 to 9, got 10"),
        ("cifar100", "train.bin", bytes(3073), "rows of 3074 bytes"),
        ("cifar100", "train.bin", b"\x00\x64" + bytes(3072), "0 to 99, got 100"),
    ],
)
def test_damaged_binary_files(tmp_path: Path, name: str, file: str, content: bytes, words: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        load_data(name, tmp_path)
    assert str(tmp_path / file) in str(caught.value)


def test_options(real_data: Path) -> None:
    with pytest.raises(ValueError, match="split: expected one of train, test, got 'valid'"):
        load_data("cifar10", real_data, split="valid")
    with pytest.raises(ValueError, match="labels: expected one of fine, coarse"):
        load_data("cifar100", real_data, labels="both")


def test_limit_over_several_files(tmp_path: Path) -> None:
    for number in (1, 2):
        content = b"".join(bytes((number,)) + bytes(3072) for _ in range(3))
        (tmp_path / f"data_batch_{number}.bin").write_bytes(content)
    assert load_data("cifar10", tmp_path).y.tolist() == [1, 1, 1, 2, 2, 2]
    assert load_data("cifar10", tmp_path, limit=3).y.tolist() == [1, 1, 1]
    assert load_data("cifar10", tmp_path, limit=4).y.tolist() == [1, 1, 1, 2]
    assert len(load_data("cifar10", tmp_path, limit=99)) == 6
