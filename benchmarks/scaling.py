"""How cost grows: seconds of one step of search and peak memory along five axes, with the exponent of growth.

    python benchmarks/scaling.py [--axes batch pixels model local-steps vertical photo] [--out benchmarks/scaling.jsonl]

Each point is a fresh process, because a process never gives its peak memory back; memory is what it needs beyond the
libraries and the model. Seconds are processor time, the median of a few steps; for ``vertical`` those of the whole
solve. Random pictures serve: cost does not depend on what they show. ``photo`` needs LEAKSCOPE_DATA: one photo of
224x224 pixels on a ResNet-18, first the audit's own estimate, then that many steps of inverting-gradients.

An axis that is measured replaces its old rows in the file; tools/make_docs.py makes the tables of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from leakscope.attacks import CAFE
from leakscope.audit.attempts import Bench
from leakscope.audit.estimate import try_out
from leakscope.audit.plan import make_plan
from leakscope.audit.setup import build_setup
from leakscope.audit.spec import AuditSpec
from leakscope.federation import Vertical
from leakscope.matching import UnrolledSteps, steps_in_order
from leakscope.models import build_model
from matching import peak_kilobytes
from release import step
from scaling_table import AXES, read_rows

FILE = Path(__file__).with_name("scaling.jsonl")
#: The points of each axis.
POINTS: dict[str, tuple[Any, ...]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "pixels": (28, 32, 64, 128, 224),
    "model": ("convnet", "resnet18", "s3-vit"),
    "local-steps": (1, 5, 10, 50, 250),
    "vertical": (80, 200, 800, 3200),
    "photo": (40,),
}


def vertical(samples: int) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(samples, 3, 16, 16, generator=generator), torch.arange(samples) % 10
    shape = {"filters": (8, 16), "hidden": 32, "middle": 16}
    net = build_model("cafe-cnn", input_shape=(3, 16, 16), num_classes=10, **shape)
    seen = Vertical().observe(net, x, y)
    return lambda: CAFE()(seen, seed=0)


def call_of(axis: str, point: str) -> tuple[Callable[[], object], int]:
    """What is timed, and how often."""
    if axis == "batch":
        return step(batch=int(point), count=1), 5
    if axis == "pixels":
        return step(size=int(point), count=1), 5
    if axis == "model":
        return step(point, count=1), 5
    if axis == "local-steps":
        replay = UnrolledSteps(0.004, steps_in_order(4, 4, int(point)))
        return step("femnist-cnn", 4, simulation=replay, count=1), 3
    return vertical(int(point)), 1


def photo(steps: int) -> dict[str, Any]:
    """The estimate first, then the attack."""
    asked = {
        "model": "resnet18",
        "data": "photos",
        "attacks": [{"inverting-gradients": {"iterations": steps, "compile": "never"}}],
        "examples": 1,
        "threads": torch.get_num_threads(),
    }
    setup = build_setup(AuditSpec.parse(asked, "scaling"))
    job = next(job for job in make_plan(setup) if job.attack is not None and job.control is None)
    trial = try_out(setup, job)
    estimate = None if trial is None else round(trial.seconds, 1)
    least = " at least" if trial is not None and trial.at_least else ""
    print(f"photo: {steps} steps, estimated{least} {estimate} s", file=sys.stderr, flush=True)
    started = time.process_time()
    outcome = Bench(setup).run(job, lambda *_: None)
    seconds = time.process_time() - started
    psnr = None if outcome.result is None else outcome.result["examples"][0]["psnr"]
    return {"seconds": seconds, "estimate": estimate, "psnr": psnr}


def one(axis: str, point: str) -> None:
    """One row, printed for the parent."""
    # Loads what the libraries load late, optimisers among them.
    step(size=8, simulation=UnrolledSteps(0.01, ((0,),)), count=1)()
    before = peak_kilobytes()
    if axis == "photo":
        row = photo(int(point))
    else:
        call, rounds = call_of(axis, point)
        if rounds > 1:
            call()
        times = []
        for _ in range(rounds):
            started = time.process_time()
            call()
            times.append(time.process_time() - started)
        row = {"seconds": statistics.median(times)}
    print(json.dumps({**row, "megabytes": round((peak_kilobytes() - before) / 1024, 1)}))


def measure(axis: str) -> list[dict[str, Any]]:
    rows = []
    for point in POINTS[axis]:
        command = [sys.executable, __file__, "--one", axis, str(point)]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found = json.loads(out.splitlines()[-1])
        rows.append({"axis": axis, "point": point, **found, "seconds": round(found["seconds"], 4)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=POINTS, default=[axis for axis in POINTS if axis != "photo"])
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.one:
        return one(*options.one)
    for axis in options.axes:
        rows = [row for row in read_rows(options.out) if row["axis"] != axis] + measure(axis)
        rows.sort(key=lambda row: list(POINTS).index(row["axis"]))
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        if AXES[axis].grows:
            points = [row for row in rows if row["axis"] == axis]
            print(AXES[axis].exponents(points), flush=True)


if __name__ == "__main__":
    main()
