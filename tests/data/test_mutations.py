"""Every reader against hundreds of small mutations of a good file: it reads, or it raises one ValueError."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from leakscope.data import load_data

MUTATIONS = 150


def _npz() -> bytes:
    content = io.BytesIO()
    np.savez(
        content,
        x=np.zeros((2, 3, 3), np.uint8),
        y=np.array([0, 1]),
        class_names=np.array(["a", "b"]),
        scale=np.float32(1),
    )
    return content.getvalue()


def _picture(kind: str) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


IDX = bytes((0, 0, 8, 3)) + struct.pack(">3I", 3, 4, 4) + bytes(48)
CIFAR = {b"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}
FILES = {
    "cifar10 protocol 0": ("cifar10", "batch", pickle.dumps(CIFAR, 0)),
    "cifar10 protocol 2": ("cifar10", "batch", pickle.dumps(CIFAR, 2)),
    "cifar10 protocol 5": ("cifar10", "batch", pickle.dumps(CIFAR, 5)),
    "idx": ("mnist", "some-images-idx3-ubyte", IDX),
    "idx gz": ("mnist", "some-images-idx3-ubyte.gz", gzip.compress(IDX, mtime=0)),
    "npz": ("npz", "pack.npz", _npz()),
    **{f"folder {kind}": ("folder", f"a/x.{kind.lower()}", _picture(kind)) for kind in ("PNG", "JPEG", "GIF", "TIFF")},
}


def mutated(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        if not changed:
            break
        # Headers are short and all that steers a reader, so most changes fall there.
        place = chance.randrange(min(len(changed), chance.choice((64, 400, len(changed)))))
        match chance.randrange(8):
            case 0:
                del changed[place:]
            case 1:
                changed[place:place] = chance.randbytes(chance.randrange(1, 6))
            case 2:
                del changed[place : place + chance.randrange(1, 9)]
            case _:
                changed[place] = chance.randrange(256)
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", list(FILES))
def test_mutations(tmp_path: Path, what: str) -> None:
    reader, name, content = FILES[what]
    labels = bytes((0, 0, 8, 1)) + struct.pack(">I", 3) + bytes((0, 1, 2))
    (tmp_path / "some-labels-idx1-ubyte").write_bytes(labels)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    path, options = (tmp_path, {"resize": 8}) if reader == "folder" else (file, {})
    file.write_bytes(content)
    load_data(reader, path, **options)
    chance = random.Random(what)
    complaints = []
    for _ in range(MUTATIONS):
        file.write_bytes(mutated(content, chance))
        try:
            load_data(reader, path, **options)
        except ValueError as error:
            complaints.append(str(error))
    assert complaints
    assert all(str(file) in words or "not valid examples" in words for words in complaints)
