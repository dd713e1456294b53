"""What executors take: runs of many short jobs for docs/scaling.md, and what a second worker gains.

python benchmarks/executors.py runs [--jobs 10 100 1000] [--executors processes ray] [--workers 1 2] [--out FILE]
python benchmarks/executors.py speedup [--jobs 24] [--repeats 2] [--executors processes ray]

runs: so many short jobs with each executor and number of workers, a line of JSON each, appended to the file: wall-clock
seconds until the first job and from there on, processor seconds of the audit's own process and of all that it started
(these hold on a busy machine too), bytes of the folder, and how many processors were busy meanwhile, with whatever.
speedup: equal jobs of about a second by one worker and by two, in turn: the ratio of wall-clock times, which means
something on an idle machine only, and the accounting that holds on a busy one: which share of their time workers are
busy with jobs. The start of workers is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from leakscope.audit.run import run_spec

RUNS = Path(__file__).with_name("executor_runs.jsonl")
#: Clients of a short run; further jobs are further seeds.
CLIENTS = 50


def short_jobs(jobs: int) -> dict[str, Any]:
    """Jobs of some hundredths of a second: a first layer that gives its input away, of a small network."""
    clients = min(jobs, CLIENTS)
    return _spec("mlp", "linear-layer", clients, jobs // clients)


def equal_jobs(jobs: int) -> dict[str, Any]:
    """Jobs of about a second: a hundred steps of a search."""
    return _spec("convnet", {"inverting-gradients": {"iterations": 100, "compile": "never"}}, jobs, 1)


def _spec(model: str, attack: Any, examples: int, seeds: int) -> dict[str, Any]:
    return {
        "model": model,
        "data": "tiles",
        "examples": examples,
        "seeds": seeds,
        "attacks": [attack],
        "controls": False,
        "findings": False,
    }


def measure(spec: dict[str, Any], executor: str, workers: int) -> dict[str, Any]:
    """One run: until the first job starts, from there to the last row, and what it leaves on disk."""
    moments: list[Moment] = []

    def note(event: dict[str, Any]) -> None:
        last = event["event"] == "finished" and event["completed"] == event["total"]
        if last or (event["event"] == "started" and not moments):
            moments.append(Moment.now())

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        psutil.cpu_percent()
        began = Moment.now()
        result = run_spec({**spec, "executor": executor, "workers": workers}, out, progress=note)
        busy = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
        assert {row.status for row in result.rows} == {"done"}, [row.error for row in result.rows if row.error][:1]
        size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    first, end = moments
    return {
        "executor": executor,
        "workers": workers,
        "jobs": len(result.rows),
        "start_seconds": round(first.wall - began.wall, 2),
        "start_cpu_seconds": round(first.own - began.own + first.others - began.others, 2),
        "wall_seconds": round(end.wall - first.wall, 2),
        "job_seconds": round(sum(row.seconds or 0.0 for row in result.rows), 2),
        "own_cpu_seconds": round(end.own - first.own, 2),
        "worker_cpu_seconds": round(end.others - first.others, 2),
        "bytes": size,
        "processors_busy": round(busy, 2),
        "processors": psutil.cpu_count(),
    }


@dataclass(frozen=True)
class Moment:
    """Clocks: the wall's, this process's processor seconds, and those of all processes that it started."""

    wall: float
    own: float
    others: float

    @classmethod
    def now(cls) -> Moment:
        others = 0.0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                others += times.user + times.system
        return cls(time.perf_counter(), time.process_time(), others)


def runs(counts: list[int], executors: list[str], workers: list[int], out: Path) -> None:
    for jobs in counts:
        for executor in executors:
            for count in workers:
                row = measure(short_jobs(jobs), executor, count)
                print(json.dumps(row), flush=True)
                with out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")


def speedup(jobs: int, repeats: int, executors: list[str]) -> None:
    for executor in executors:
        measured = [(count, measure(equal_jobs(jobs), executor, count)) for _ in range(repeats) for count in (1, 2)]
        one, two = (min((r for n, r in measured if n == count), key=lambda r: r["wall_seconds"]) for count in (1, 2))
        ratio = one["wall_seconds"] / two["wall_seconds"]
        shares = [row["job_seconds"] / row["workers"] / row["wall_seconds"] for row in (one, two)]
        print(
            f"{executor}, {jobs} equal jobs: one worker {one['wall_seconds']:.1f} s, two {two['wall_seconds']:.1f} s, "
            f"ratio {ratio:.2f} on this machine now"
        )
        print(f"  busy with jobs: one worker {shares[0]:.1%} of its time, two {shares[1]:.1%} of theirs")
        print(
            f"  a job took {one['job_seconds'] / jobs:.2f} s beside none, {two['job_seconds'] / jobs:.2f} s beside one"
        )
        print(f"  ratio on two free processors, by this accounting: {2 * shares[1] / shares[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "speedup"])
    parser.add_argument("--jobs", type=int, nargs="+")
    parser.add_argument("--executors", nargs="+", default=["processes", "ray"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RUNS)
    asked = parser.parse_args()
    os.environ.pop("LEAKSCOPE_DATA", None)  # perceptual measures, where their weights are there, make a job longer
    if asked.what == "runs":
        runs(asked.jobs or [10, 100, 1000], asked.executors, asked.workers, asked.out)
    else:
        speedup((asked.jobs or [24])[0], asked.repeats, asked.executors)


if __name__ == "__main__":
    main()
