"""Cut the embedded data set from openly licensed photos that ship inside scikit-image and scikit-learn.

    python tools/make_tiles.py [OUTPUT.npz]

Each photo gives one class: its centre square, then tiles of a half and of a quarter of its shorter side,
those with the most contrast first, all resized to 32x32. Classes take turns, so the first tiles are of
different classes. Nothing is random and nothing is downloaded: with the same versions of the packages the
file is the same to the byte.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

TILE = 32
PER_CLASS = 16
COARSE_TILES = 4
LEAST_CONTRAST = 10.0  # standard deviation of grey values below which a tile is sky or black border
OUTPUT = Path(__file__).parents[1] / "src" / "leakscope" / "data" / "tiles.npz"

SKIMAGE_PHOTOS = (
    "astronaut",
    "chelsea",
    "coffee",
    "rocket",
    "retina",
    "hubble_deep_field",
    "immunohistochemistry",
)
SKLEARN_PHOTOS = ("china", "flower")
# Into how many parts the shorter side is cut, coarse and fine; small galaxies need a closer look.
PARTS = {"hubble_deep_field": (6, 12)}
USUAL_PARTS = (2, 4)


def photos() -> dict[str, Image.Image]:
    """Class name -> photo. Every file is part of a wheel, so this works without a network."""
    from skimage import data
    from sklearn.datasets import load_sample_image

    found = {name: getattr(data, name)() for name in SKIMAGE_PHOTOS}
    found |= {name: load_sample_image(f"{name}.jpg") for name in SKLEARN_PHOTOS}
    return {name: Image.fromarray(pixels).convert("RGB") for name, pixels in found.items()}


def square(photo: Image.Image, left: int, top: int, side: int) -> NDArray[np.uint8]:
    box = (left, top, left + side, top + side)
    return np.asarray(photo.resize((TILE, TILE), Image.Resampling.BOX, box=box), dtype=np.uint8)


def contrast(tile: NDArray[np.uint8]) -> float:
    """Standard deviation of the grey values, 0 to 127.5."""
    return float(tile.mean(axis=2).std())


def grid(photo: Image.Image, parts: int) -> list[NDArray[np.uint8]]:
    """Tiles that do not overlap, of 1/parts of the shorter side, highest contrast first."""
    side = min(photo.size) // parts
    columns, rows = photo.size[0] // side, photo.size[1] // side
    # Centred, so that a photo wider than a multiple of the tile loses both its edges alike.
    left, top = (photo.size[0] - columns * side) // 2, (photo.size[1] - rows * side) // 2
    tiles = [square(photo, left + c * side, top + r * side, side) for r in range(rows) for c in range(columns)]
    return sorted((t for t in tiles if contrast(t) >= LEAST_CONTRAST), key=contrast, reverse=True)


def tiles_of(name: str, photo: Image.Image) -> list[NDArray[np.uint8]]:
    coarse, fine = PARTS.get(name, USUAL_PARTS)
    side = min(photo.size)
    centre = square(photo, (photo.size[0] - side) // 2, (photo.size[1] - side) // 2, side)
    tiles = [centre, *grid(photo, coarse)[:COARSE_TILES]]
    tiles += grid(photo, fine)[: PER_CLASS - len(tiles)]
    if len(tiles) < PER_CLASS:
        raise ValueError(f"{name}: only {len(tiles)} tiles with content, expected {PER_CLASS}")
    return tiles


def write_npz(path: Path, arrays: dict[str, NDArray]) -> None:  # type: ignore[type-arg]
    """An .npz without time stamps, so that the same arrays give the same bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content.getvalue())


def main(output: Path) -> None:
    classes = {name: tiles_of(name, photo) for name, photo in photos().items()}
    names = list(classes)
    x = np.stack([classes[name][turn] for turn in range(PER_CLASS) for name in names])
    y = np.array([label for _ in range(PER_CLASS) for label in range(len(names))], dtype=np.int64)
    write_npz(output, {"x": x, "y": y, "class_names": np.array(names)})
    print(f"{output}: {len(x)} tiles of {len(names)} classes, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
