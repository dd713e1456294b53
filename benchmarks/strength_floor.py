"""What theory allows in one cell of ``strength.py``: the Cramér–Rao floor, as a row beside those of the attacks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense
from leakscope.contracts.observation import Observation
from leakscope.data import Examples
from leakscope.limits import affordable_floor, cramer_rao
from leakscope.matching import GradientMap
from strength_cells import Cell, HalfPrecision, RelativeNoise, cpu_seconds, disturbed, number_or_none
from strength_table import FLOOR

#: Of an estimate, where the floor cannot be exact.
PROBES, STEPS = 4, 400


def floor_row(cell: Cell, seen: Observation, data: Examples, places: Sequence[int], number: int) -> dict[str, Any]:
    """The floor of one update, in decibels; refused where there is none, which says why.

    Rounding of float32 is the least noise: without any other the floor says how well the gradient determines its
    inputs. An estimate that has not settled is too high in decibels, and so a floor all the same.
    """
    started = cpu_seconds()
    row = {**asdict(cell), "number": number, "attack": FLOOR, "images": list(places), "certificate": []}
    row |= {"settings": f"Cramer-Rao, {PROBES} probes", "tries": 1, "label_accuracy": None, "flags": []}
    truth = data.subset(places)
    mapping = GradientMap.of(seen.without_channel().to(dtype=torch.float64), truth.y)
    plan = affordable_floor(mapping, probes=PROBES, steps=STEPS)
    refused = plan if isinstance(plan, str) else None
    if seen.message.kind != "gradient":
        refused = "the floor is that of one gradient, and this is a weight update"
    if refused is not None:
        return {**row, "refused": refused, "psnr": [], "seconds": 0.0}
    method, steps = plan
    flat = mapping.flat(truth.x.double())
    channel = channel_of(cell, mapping.update(flat))
    floor = cramer_rao(mapping, flat, channel, method=method, probes=PROBES, steps=steps)
    psnr = number_or_none(floor.psnr)
    why = None if psnr is not None else floor.reason or "infinite"
    row |= {"flags": [floor.reason] if floor.reason else [], "refused": why}
    return {**row, "psnr": [] if psnr is None else [psnr] * len(places), "seconds": round(cpu_seconds() - started, 2)}


def channel_of(cell: Cell, gradient: Mapping[str, Tensor]) -> Channel:
    """What becomes of this gradient on its way, as far as theory can tell, with the noise of rounding at least."""
    sizes = {name: float(value.square().mean().sqrt()) or 1.0 for name, value in gradient.items()}
    _, defense = disturbed(cell.disturbance, cell.batch)
    # To the nearest: an error up to eps / 2 of an entry's size, all of them equally likely.
    share = torch.finfo(torch.float16 if isinstance(defense, HalfPrecision) else torch.float32).eps / math.sqrt(12)
    if isinstance(defense, RelativeNoise):
        share = max(share, defense.share)
    known = isinstance(defense, RelativeNoise | HalfPrecision)
    channel = Channel() if known else (defense or Defense()).channel(examples=cell.batch)
    assert channel is not None, cell.disturbance
    return channel.with_least_noise({name: share * size for name, size in sizes.items()})
