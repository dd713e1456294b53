"""What ``exact_inversion.py`` measured, as the table of docs/exact-inversion.md. Reads figures only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

Row = Mapping[str, Any]

#: What makes a cell, in the order of its words.
CELL = ("model", "state", "mode", "batch", "protocol", "disturbance")
#: PSNR of an image from which on it counts as found, in dB: a certificate below is false.
CERTAIN = 80.0
NOTHING = "Nothing has been measured yet."
HEADS = (
    *("model", "BatchNorm", "update", "images", "≥ 80 dB", "certified", "mean dB [least]"),
    *("features ≤ 1e-4", "largest error", "lowest layer", "CPU s [largest]"),
)


def read_rows(file: Path) -> list[Row]:
    """Return the newest row of each batch, in the order in which they were first measured; none without a file."""
    if not file.exists():
        return []
    rows: dict[tuple[Any, ...], Row] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.strip():
            row = json.loads(line)
            rows[key_of(row)] = row
    return list(rows.values())


def key_of(row: Row) -> tuple[Any, ...]:
    """Return which batch a row is of, and whether its images were measured."""
    return tuple(row[name] for name in (*CELL, "number", "peel_only"))


def brief(row: Row) -> str:
    """Return a row in a line, as progress tells it."""
    images = (
        f"{mean(row['psnr']):.1f} dB, certified {sum(row['certified'])}/{len(row['psnr'])}, " if row["psnr"] else ""
    )
    if row["refused"] and row["refused"] != row["ended"]:
        images = f"{row['refused']}, "
    found = f"{row['lowest']} to {max(row['errors']):.0e}" if row["errors"] else f"no features ({row['ended']})"
    return f"{images}{found}, {row['seconds']:.1f} s"


def tables(rows: Iterable[Row]) -> str:
    """Return a table with a line for each cell."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in CELL), []).append(row)
    models = list(dict.fromkeys(cell[0] for cell in cells))
    # Plain gradients first, and cells of one model together, in whatever order they were measured.
    order = sorted(cells, key=lambda cell: (cell[5] != "none", cell[4] != "gradient", models.index(cell[0])))
    return markdown(HEADS, [line(cell, cells[cell]) for cell in order]) if cells else NOTHING


def line(cell: Sequence[Any], rows: Sequence[Row]) -> list[str]:
    """Return the line of one cell; features also of batches of which nothing else was measured."""
    model, state, mode, batch, protocol, disturbance = cell
    full = [row for row in rows if not row["peel_only"]]
    peeled = {row["number"]: row for row in sorted(rows, key=lambda row: not row["peel_only"])}.values()
    levels = [level for row in full for level in row["psnr"]]
    certified, false = (sum(f(row) for row in full) for f in (lambda row: sum(row["certified"]), lambda r: r["false"]))
    images = sum(len(row["images"]) for row in full)
    # Those that an attack refused, or did not end in time.
    lost = f", {images - len(levels)} without" if images > len(levels) else ""
    times = [row["seconds"] for row in full or rows]
    return [
        f"{model}, {weights(state)}",
        "none" if model.startswith("vit") else mode,
        update(batch, protocol, disturbance),
        str(images or sum(len(row["images"]) for row in rows)),
        share(sum(level >= CERTAIN for level in levels), images),
        share(certified, images) + (f", {false} false" if false else ""),
        (f"{mean(levels):.1f} [{min(levels):.1f}]" if levels else "none" if full else "not tried") + lost,
        *features(list(peeled)),
        f"{median(times):.1f} [{max(times):.1f}]",
    ]


def features(rows: Sequence[Row]) -> tuple[str, str, str]:
    """Return the share of images whose features are right, the largest error and the layer where most peels end."""
    # A patch embedding is solved without a peel.
    images = sum(len(row["images"]) for row in rows if row["ended"] or row["errors"])
    found = [row for row in rows if row["errors"]]
    if not found:
        return share(0, images), "", ""
    good = round(sum(row["good"] * len(row["images"]) for row in found))
    lowest = Counter(row["lowest"] for row in found).most_common(1)[0][0]
    return share(good, images), f"{max(max(row['errors']) for row in found):.0e}", f"`{lowest}`"


def share(part: int, whole: int) -> str:
    """Return a count of a count, and nothing of nothing.

    >>> share(3, 4), share(0, 0)
    ('3/4', '')
    """
    return f"{part}/{whole}" if whole else ""


def weights(state: str) -> str:
    """Return a state of training in words.

    >>> weights("untrained"), weights("1"), weights("6")
    ('untrained', '1 epoch', '6 epochs')
    """
    return f"{state} epoch{'' if state == '1' else 's'}" if state.isdecimal() else state


def update(batch: int, protocol: str, disturbance: str) -> str:
    """Return how an update came about.

    >>> update(4, "gradient", "none"), update(2, "secure:4", "none"), update(1, "fedavg:3:.01", "noise:1e-5")
    ('4', '4 clients x 2', '1 x 3 steps, rate .01, noise:1e-5')
    """
    kind, *given = protocol.split(":")
    words = {"gradient": str(batch)}.get(kind, "")
    if kind == "secure":
        words = f"{given[0]} clients x {batch}"
    if kind == "fedavg":
        words = ", ".join(
            [f"{batch} x {given[0]} step{'' if given[0] == '1' else 's'}", *(f"rate {r}" for r in given[1:])]
        )
    return words if disturbance == "none" else f"{words}, {disturbance}"


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *lines))
