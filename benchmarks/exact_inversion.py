"""How exactly deployed networks are inverted: images, features and certificates of ``head-first`` without a rival.

    python benchmarks/exact_inversion.py --only "resnet18 1 eval 1" --cache DIR --out benchmarks/exact_inversion.jsonl
    python benchmarks/exact_inversion.py --only "resnet18 1 train 16" --peel-only --out FILE
    python benchmarks/exact_inversion.py --cell "vgg11 1 eval 2 gradient noise:1e-5" --count 3 --out FILE
    python benchmarks/exact_inversion.py --list
    python benchmarks/exact_inversion.py --table FILE

A row for each batch, a line of JSON, appended to FILE as soon as it is measured. Rows that this version measured are
not measured again (--again measures anew; the newest row counts). --peel-only measures features and no images, in rows
of their own. Batches are consecutive images, with their labels as they fall: CIFAR-10 test images from number 1000 on,
on which nothing was tuned, and the open photos from the first on.

The truth meets what was found here and nowhere else. Seconds are processor time of this process. tools/make_docs.py
makes the table of docs/exact-inversion.md from benchmarks/exact_inversion.jsonl. Needs LEAKSCOPE_DATA; networks are
trained once and kept in --cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exact_inversion_cells import Cell, features, matrix, observe, watched
from exact_inversion_models import SUBJECTS, data_for, network
from exact_inversion_table import CERTAIN, brief, key_of, read_rows, tables
from leakscope import __version__
from leakscope.attacks.head_first.convolutions import recover_at_convolution
from leakscope.contracts.certificate import ROUNDING
from leakscope.contracts.errors import NotApplicable
from leakscope.data import Examples
from leakscope.metrics.assignment import assign
from leakscope.metrics.image import psnr
from strength_cells import named_attack, number_or_none

#: The first test image of CIFAR-10 that counts.
FIRST = 1000
#: Batches of a cell: single images, and more.
COUNT, COUNT_OF_BATCHES = 20, 5
#: PSNR of an image that is equal in every bit, in dB.
MOST = 200.0
ATTACK = "head-first:rival=false"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.table is not None:
        print(tables(read_rows(options.table)))
        return
    cells = chosen_cells(options)
    if options.list:
        print("\n".join(cell.describe() for cell in cells))
        return
    torch.set_num_threads(options.threads)
    commit()  # files may change meanwhile
    present = set() if options.again else {(key_of(row), row["version"]) for row in read_rows(options.out)}
    data, broken = dict[str, Examples](), 0
    for cell in cells:
        if cell.model not in data:
            data = {cell.model: load(cell.model)}
        examples = data[cell.model]
        batches = draw(cell, len(examples), options.count)
        keys = [key_of({**asdict(cell), "number": number, "peel_only": options.peel_only}) for number in batches]
        todo = [number for number, key in zip(batches, keys, strict=True) if (key, __version__) not in present]
        print(f"{cell.describe()}: {len(todo)} of {len(batches)} to do", flush=True)
        for number in todo:
            places = batches[number]
            try:
                net = network(cell.model, cell.state, examples, options.cache, places)
                row = measure(cell, net, examples, places, number, peel_only=options.peel_only, limit=options.limit)
            except Exception as error:  # noqa: BLE001 - one that breaks costs no other row; another run tries again
                broken += 1
                print(f"    {number} FAILED: {type(error).__name__}: {error}", flush=True)
                continue
            with options.out.open("a", encoding="utf-8") as stream:  # one write: runs side by side do not mix
                stream.write(json.dumps(row, allow_nan=False) + "\n")
            print(f"    {number} {brief(row)}", flush=True)
    if broken:
        raise SystemExit(f"{broken} batches failed; the lines above say why")


def measure(
    cell: Cell,
    net: nn.Module,
    data: Examples,
    places: Sequence[int],
    number: int,
    *,
    peel_only: bool = False,
    limit: float | None = None,
) -> dict[str, Any]:
    """Return the row of one batch: what the attack, or its peel alone, made of the update in ``limit`` seconds."""
    seen = observe(cell, net, data, places, number)
    refused, best, began = None, None, time.process_time()
    with watched() as peeled:
        try:
            with ended_after(limit):
                if peel_only:
                    recover_at_convolution(seen)
                else:
                    best = named_attack(ATTACK)(seen, seed=number)
        except (NotApplicable, OutOfTime) as error:
            refused = str(error)
    seconds = time.process_time() - began
    row = {**asdict(cell), "number": number, "images": list(places), "peel_only": peel_only, "refused": refused}
    row |= {"psnr": [], "certified": [], "free": [], "residual": [], "false": 0, "method": None, "notes": []}
    if best is not None:
        unit, truth = data.inputs.to_unit, data.subset(places).x
        order = assign(unit(truth), unit(best.inputs.detach()))
        claims = [best.certificates[place] for place in order.tolist()] if best.certificates else []
        levels = psnr(unit(truth), unit(best.inputs.detach())[order], cap=MOST).tolist()
        row["psnr"] = [round(level, 2) for level in levels]
        row["certified"] = [one is not None and one.holds for one in claims] or [False] * len(places)
        row["free"] = [None if one is None else one.free_directions for one in claims]
        row["residual"] = [None if one is None else number_or_none(ROUNDING * one.residual) for one in claims]
        row["false"] = sum(holds and level < CERTAIN for holds, level in zip(row["certified"], levels, strict=True))
        row |= {"method": best.info.get("method"), "notes": list(best.notes)}
    row |= features(cell, peeled, net, data, places)
    row |= {"started": peeled.started, "ended": peeled.ended, "local_steps": peeled.steps}
    row |= {"seconds": round(seconds, 2), "peel_seconds": round(peeled.seconds, 2)}
    return row | {"version": __version__, "commit": commit(), "torch": torch.__version__, "machine": machine()}


class OutOfTime(BaseException):
    """The limit is over; no handler of errors in an attack takes it for one."""


@contextmanager
def ended_after(seconds: float | None) -> Iterator[None]:
    """End what is run after so many seconds of processor time."""

    def end(*_: Any) -> None:
        raise OutOfTime(f"ended after {seconds:g} s")

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def draw(cell: Cell, examples: int, count: int | None) -> dict[int, list[int]]:
    """Return the images of each batch by its number.

    >>> draw(Cell("resnet18", "1", "eval", 2), 2000, 2)
    {0: [1000, 1001], 1: [1002, 1003]}
    >>> draw(Cell("vit-s16", "untrained", "eval", 1), 10, None)[9]
    [9]
    """
    first = FIRST if SUBJECTS[cell.model].data == "cifar10" else 0
    wanted = count if count is not None else COUNT if cell.images == 1 else COUNT_OF_BATCHES
    starts = range(first, examples - cell.images + 1, cell.images)[:wanted]
    return {number: list(range(start, start + cell.images)) for number, start in enumerate(starts)}


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that were named, or those of the matrix whose description has the words of one of --only.

    Words are whole (``resnet18`` does not choose ``resnet18-half``), and "1 eval 1" asks for two ones.
    """
    if options.cell:
        return list(options.cell)
    wanted = [Counter(words.split()) for words in options.only]
    cells = list(matrix())
    return [cell for cell in cells if not wanted or any(words <= Counter(cell.describe().split()) for words in wanted)]


def load(model: str) -> Examples:
    try:
        return data_for(model)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"exact_inversion.py needs real data (set LEAKSCOPE_DATA): {error}") from error


@cache
def commit() -> str | None:
    """Return the commit that is measured, with a plus where files were changed; None outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return told.stdout.strip() or None


def machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def cell_of(words: str) -> Cell:
    cell = Cell.parse(words)
    if cell.model not in SUBJECTS:
        raise ValueError(f"expected one of {', '.join(SUBJECTS)}, got {cell.model!r}")
    return cell


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="cells with all of these words")
    parser.add_argument("--cell", action="append", type=cell_of, help="MODEL STATE MODE BATCH [PROTOCOL [DISTURBANCE]]")
    parser.add_argument("--count", type=int, help=f"batches of a cell; default: {COUNT} images, {COUNT_OF_BATCHES}")
    parser.add_argument("--peel-only", action="store_true", help="measure features and no images")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end a batch then, and keep its features")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "leakscope-strength")
    parser.add_argument("--out", type=Path, default=Path("exact_inversion.jsonl"))
    parser.add_argument("--again", action="store_true", help="measure what is there once more")
    parser.add_argument("--list", action="store_true", help="print the cells, and run nothing")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of FILE, and run nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
