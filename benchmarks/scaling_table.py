"""The tables of ``scaling.py``: what the measured rows say, as Markdown. Reads its file and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = Mapping[str, Any]
NOTHING = "Nothing has been measured yet."


class Axis(NamedTuple):
    """``title`` of the table, ``point`` the head of its first column; the exponent is of points from ``tail`` on."""

    title: str
    point: str
    grows: bool = True
    tail: float = 0.0

    def exponents(self, rows: Sequence[Row]) -> str:
        """How time and memory grow with the axis, in words."""
        late = [row for row in rows if row["point"] >= self.tail]
        points = [float(row["point"]) for row in late]
        seconds, megabytes = (growth(points, [row[name] for row in late]) for name in ("seconds", "megabytes"))
        return f"From {late[0]['point']} on, time grows with the power {seconds:.2f} and memory with {megabytes:.2f}."


AXES: Mapping[str, Axis] = {
    "batch": Axis("Images in a batch (ConvNet, 32x32), one step", "images", tail=4),
    "pixels": Axis("Pixels a side (ConvNet, one image), one step", "pixels", tail=64),
    "model": Axis("Models (one image of 32x32), one step", "model", grows=False),
    "local-steps": Axis("Local steps replayed (FEMNIST CNN, 4 images), one step of the search", "local steps", tail=10),
    "vertical": Axis("Samples in vertical learning (3x16x16, batches of 8), the whole solve", "samples"),
    "photo": Axis("One photo of 224x224 pixels on a ResNet-18, inverting-gradients", "steps", grows=False),
}


def growth(points: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent e of cost = c point^e, by least squares on logarithms.

    >>> round(growth([16, 32, 64], [1.0, 8.0, 64.0]), 6)
    3.0
    """
    x, y = [math.log(point) for point in points], [math.log(max(cost, 1e-9)) for cost in costs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The measured points; none without a file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def plot_file(axis: str) -> str:
    """The name of an axis' plot, beside the page that shows it."""
    return f"scaling-{axis}.svg"


def drawn_axes(rows: Sequence[Row]) -> list[str]:
    """The axes along which cost grows and that have two points at least."""
    return [name for name, axis in AXES.items() if axis.grows and sum(row["axis"] == name for row in rows) > 1]


def tables(rows: Sequence[Row]) -> str:
    """One table an axis, with its plot above and the exponent of growth below it."""
    parts, drawn = [], drawn_axes(rows)
    for name, axis in AXES.items():
        points = [row for row in rows if row["axis"] == name]
        if not points:
            continue
        more = [key for key in ("estimate", "psnr") if key in points[0]]
        titles = {"estimate": "estimated s", "psnr": "PSNR, dB"}
        heads = [axis.point, "seconds", "MB", *(titles[key] for key in more)]
        plot = [f"![{axis.title}]({plot_file(name)})", ""] if name in drawn else []
        lines = [f"**{axis.title}**", "", *plot, "| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
        for row in points:
            others = ["" if row[key] is None else f"{row[key]:.1f}" for key in more]
            cells = [str(row["point"]), f"{row['seconds']:.3g}", f"{row['megabytes']:.0f}", *others]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
        if name in drawn:
            parts.append(axis.exponents(points))
    return "\n\n".join(parts) or NOTHING
