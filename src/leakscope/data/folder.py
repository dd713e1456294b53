"""A folder of pictures: each subfolder is a class, its files are the examples."""

import math
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from leakscope.contracts.checks import PIXELS, brief, is_whole
from leakscope.contracts.disk import check_file
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import ValueRange
from leakscope.data.examples import Examples
from leakscope.data.files import AnyPath, check_room, checked_choice, checked_limit

# Only formats whose decoders are part of Pillow itself; some others start foreign programs.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
MODES = ("RGB", "L")
#: Pillow's modes of pictures without colours.
GREY = frozenset(("1", "L", "LA", "I", "I;16", "F"))


def load_folder(
    path: AnyPath | None = None,
    *,
    resize: int | tuple[int, int] | None = None,
    mode: str | None = None,
    limit: int | None = None,
    private: bool = True,
) -> Examples:
    """Read PATH/<class>/<picture>; classes in alphabetical order, files in a random order that is always the same.

    ``resize`` (a side, or height and width) scales the shorter side and crops the centre. ``mode`` is "RGB", or "L",
    which is grey; by default "L" where no picture has colours.
    """
    if path is None:
        raise UserError("data 'folder': expected path=... to a folder with one subfolder a class, got none")
    if mode is not None:
        checked_choice(mode, MODES, "folder: mode")
    limit, size, root = checked_limit(limit, "folder"), _size(resize), Path(path)
    if not root.is_dir():
        raise UserError(f"data 'folder': {root}: no such folder")
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = ([f for f in (root / name).iterdir() if f.is_file() and f.suffix.lower() in SUFFIXES] for name in names)
    files = list(map(sorted, found))
    # An empty subfolder is a mistake more often than a class without examples.
    empty = [name for name, members in zip(names, files, strict=True) if not members]
    if not names or empty:
        got = f"no pictures in {', '.join(empty)}" if empty else "no subfolders"
        kinds = ", ".join(sorted(SUFFIXES))
        raise UserError(f"data 'folder': {root}: expected one subfolder a class with pictures ({kinds}), got {got}")
    labelled = [(file, label) for label, members in enumerate(files) for file in members]
    # Classes that take turns would make the first batch the easiest one: of labels that never repeat.
    order = torch.randperm(len(labelled), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [labelled[place] for place in order][:limit]
    mode = mode or ("L" if all(_is_grey(file) for file, _ in chosen) else "RGB")
    if size is not None:
        check_room(root, len(chosen) * math.prod(size) * len(mode))
    pixels: list[Tensor] = []
    for file, _ in chosen:
        picture = read_picture(file, mode, size)
        if pixels and picture.shape != pixels[0].shape:
            wanted = f"a size of {tuple(pixels[0].shape[1:])} as of {chosen[0][0].name}"
            got = f"{tuple(picture.shape[1:])}. Pass resize=... to bring all pictures to one size."
            raise UserError(f"{file}: expected {wanted}, got {got}")
        if not pixels:
            check_room(root, len(chosen) * picture.numel())
        pixels.append(picture)
    x, y = torch.stack(pixels).float().div_(255.0), torch.tensor([label for _, label in chosen])
    title = root.resolve().name or "folder"
    return Examples(x, y, len(names), ValueRange(), title, tuple(names), private=private)


def _size(resize: object) -> tuple[int, int] | None:
    if resize is None:
        return None
    sizes = tuple(resize) if isinstance(resize, tuple | list) else (resize, resize)
    if len(sizes) != 2 or not all(map(is_whole, sizes)):
        raise UserError(f"folder: resize: expected a side or (height, width) in pixels, got {brief(resize)}")
    return int(sizes[0]), int(sizes[1])


def _is_grey(file: Path) -> bool:
    try:
        with Image.open(file, formats=FORMATS) as opened:
            return opened.mode in GREY
    except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError):
        return False  # reading it will say what is wrong


def read_picture(file: Path, mode: str, size: tuple[int, int] | None = None) -> Tensor:
    """The bytes (channels, height, width) of a picture in Pillow's ``mode``, brought to ``size``; or a ValueError."""
    check_file(file)
    try:
        with warnings.catch_warnings():
            # Pillow warns of huge pictures, refused below, and of damaged metadata, which is harmless.
            warnings.simplefilter("ignore")
            with Image.open(file, formats=FORMATS) as opened:
                PIXELS.check("picture", opened.size[0] * opened.size[1])
                picture = ImageOps.exif_transpose(opened).convert(mode)
    except (
        OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, IndexError, KeyError, TypeError,
        OverflowError, MemoryError, UnidentifiedImageError, Image.DecompressionBombError,
    ) as error:  # fmt: skip
        raise UserError(f"{file}: not a readable picture: {error}. Repair it or take it out of the folder.") from error
    if size is not None:
        picture = ImageOps.fit(picture, (size[1], size[0]), Image.Resampling.BICUBIC)
    array = np.array(picture, dtype=np.uint8)
    array = array[None] if mode == "L" else array.transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(array))
