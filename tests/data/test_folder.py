"""Folders of pictures, whole and damaged."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from leakscope.data import load_data


def picture(file: Path, size: tuple[int, int] = (6, 4), seed: int = 0, mode: str = "RGB") -> np.ndarray:
    """Write a picture of random pixels, size as (width, height)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    channels = {"RGB": (3,), "L": (), "RGBA": (4,)}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], *channels), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return pixels


def test_the_first_examples_are_a_random_draw(tmp_path: Path) -> None:
    """Eight classes of four files: classes that take turns would give eight labels to the first batch of eight."""
    pixels = {}
    for number in range(32):
        name = f"{'abcdefgh'[number // 4]}/{number % 4}.png"
        pixels[number // 4, number % 4] = picture(tmp_path / name, seed=number)
    (tmp_path / "a" / "notes.txt").write_text("not a picture")
    (tmp_path / ".hidden").mkdir()
    examples, again = load_data("folder", tmp_path), load_data("folder", tmp_path, limit=8)
    assert examples.class_names == tuple("abcdefgh")
    assert examples.shape == (3, 4, 6)
    assert examples.private
    assert not load_data("folder", tmp_path, private=False).private
    assert torch.bincount(examples.y).tolist() == [4] * 8
    assert torch.equal(again.x, examples.x[:8])
    assert again.num_classes == 8
    assert 1 < len(set(again.y.tolist())) < 8, "labels repeat, as in most draws"
    for x, label in zip(again.x, again.y.tolist(), strict=True):
        read = (255 * x).round().byte().numpy().transpose(1, 2, 0)
        assert any((read == pixels[label, file]).all() for file in range(4))


@pytest.mark.parametrize(("modes", "channels"), [("LL", 1), (("L", "RGB"), 3), (("RGB", "RGB"), 3)])
def test_pictures_without_colours_are_read_as_grey(modes: tuple[str, str], channels: int, tmp_path: Path) -> None:
    for number, mode in enumerate(modes):
        picture(tmp_path / "a" / f"{number}.png", mode=mode)
    assert load_data("folder", tmp_path).shape == (channels, 4, 6)
    assert load_data("folder", tmp_path, mode="RGB").shape == (3, 4, 6)


def test_modes_and_sizes(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png", (6, 4))
    picture(tmp_path / "a" / "2.jpg", (9, 12))
    picture(tmp_path / "b" / "3.png", (5, 5), mode="L")
    picture(tmp_path / "b" / "4.png", (8, 3), mode="RGBA")
    with pytest.raises(ValueError, match=r"\.(png|jpg): expected a size of \(\d+, \d+\) as of .*resize"):
        load_data("folder", tmp_path)
    assert load_data("folder", tmp_path, resize=8).shape == (3, 8, 8)
    assert load_data("folder", tmp_path, resize=(4, 7)).shape == (3, 4, 7)
    assert load_data("folder", tmp_path, resize=[4, 7], mode="L").shape == (1, 4, 7)
    for resize in (0, "8", (1, 2, 3), 2.5, True, (4, -1)):
        with pytest.raises(ValueError, match="resize"):
            load_data("folder", tmp_path, resize=resize)
    with pytest.raises(ValueError, match="mode: expected one of RGB, L"):
        load_data("folder", tmp_path, mode="CMYK")


def test_resize_keeps_proportions(tmp_path: Path) -> None:
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 255  # the middle third is what a centre crop keeps
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    assert load_data("folder", tmp_path, resize=10).x.min() == 1.0


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("what", ["empty", "text", "cut", "bomb", "large", "script", "cut jpeg"])
def test_one_damaged_file_is_named(tmp_path: Path, what: str) -> None:
    picture(tmp_path / "a" / "good.png", (40, 40))
    picture(tmp_path / "a" / "good.jpg", (40, 40))
    content = {
        "empty": b"",
        "text": b"hello",
        "cut": (tmp_path / "a" / "good.png").read_bytes()[:300],
        "cut jpeg": (tmp_path / "a" / "good.jpg").read_bytes()[:500],
        "bomb": png(100_000, 100_000),
        "large": png(9_000, 9_000),
        "script": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }[what]
    (tmp_path / "a" / "wrong.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"wrong\.png: not a readable picture") as caught:
        load_data("folder", tmp_path, resize=8)
    assert "good" not in str(caught.value)


def test_a_size_that_no_memory_holds_is_refused_at_once(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png")
    for resize in (1_000_000, (10**9, 1), 10**30):
        with pytest.raises(ValueError, match="expected at most 1,073,741,824 bytes"):
            load_data("folder", tmp_path, resize=resize)


def test_structure_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no subfolders"):
        load_data("folder", tmp_path)
    picture(tmp_path / "loose.png")
    with pytest.raises(ValueError, match="no subfolders"):
        load_data("folder", tmp_path)
    (tmp_path / "empty").mkdir()
    picture(tmp_path / "full" / "1.png")
    with pytest.raises(ValueError, match="no pictures in empty"):
        load_data("folder", tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        load_data("folder", tmp_path / "loose.png")
