"""The data set inside the package: 32x32 tiles of nine openly licensed photos; see CREDITS.md beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from leakscope.contracts.errors import UserError
from leakscope.data.examples import Examples
from leakscope.data.files import AnyPath
from leakscope.data.npz import load_npz

CREDITS = (
    "Tiles of photos by NASA (public domain), Stefan van der Walt (CC0), Rachel Michetti (CC0), SpaceX "
    "(public domain), Mikael Häggström (CC0), CMMI (no known copyright restrictions), danielbuechele "
    "(CC BY 2.0) and vultilion (CC BY 2.0), as shipped with scikit-image and scikit-learn; cut and resized."
)


def load_tiles(path: AnyPath | None = None, *, limit: int | None = None) -> Examples:
    """The embedded tiles; classes take turns, so the first nine are of different classes.

    >>> tiles = load_tiles(limit=9)
    >>> tiles.shape, tiles.y.tolist()
    ((3, 32, 32), [0, 1, 2, 3, 4, 5, 6, 7, 8])
    """
    if path is not None:
        raise UserError(f"data 'tiles' is inside the package and takes no path, got {path}. Did you mean 'npz'?")
    tiles = load_npz(Path(__file__).with_name("tiles.npz"), limit=limit, private=False, name="tiles")
    return dataclasses.replace(tiles, credits=CREDITS)
