"""Where the time of an audit goes, and what a second worker gains.

python benchmarks/audit_speed.py [--only shares|workers|compiled] [--examples 6] [--jobs 24] [--steps 1000]

shares: the default audit in one process: processor seconds of each part and each attack, and those that shared work
saved.
workers: so many equal jobs by one worker and by two, in turn: the ratio of wall-clock times, which means something on
an idle machine only, and the accounting that holds on a busy one: which share of their time workers are busy with jobs,
and how many times the processor seconds the same jobs take side by side. From both the ratio that two free processors
would give. The start of workers is not in it.
compiled: so many jobs of one setting, each of so many steps, with compiled steps from an empty cache and with plain
ones: the ratio of processor seconds of two processes that run at the same time, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from leakscope.attacks.shared_work import SharedWork
from leakscope.audit import attempts
from leakscope.audit.attempts import Bench
from leakscope.audit.run import run_spec
from leakscope.audit.spec import DEFAULT_SPEC

#: Parts of a job, by the function that does it.
PARTS = {
    "_make_update": "updates of clients",
    "_attack": "attacks",
    "_compare": "comparison with the truth",
    "_finding": "findings (theory)",
    "_guess": "guesses without an attack",
}


@contextmanager
def clocked(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the processor seconds of each part, and of each attack."""

    def watch(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(self: Any, *args: Any, **rest: Any) -> Any:
            started = time.process_time()
            try:
                return function(self, *args, **rest)
            finally:
                took = time.process_time() - started
                seconds[name] += took
                if function is whole_attack:
                    seconds[f"attacks: {type(args[1]).__name__}"] += took

        return timed

    whole_attack = Bench._attack
    diagnosis = attempts._diagnosis

    def timed_diagnosis(*args: Any) -> Any:
        started = time.process_time()
        try:
            return diagnosis(*args)
        finally:
            seconds["diagnosis of results"] += time.process_time() - started

    methods = {name: watch(getattr(Bench, name), told) for name, told in PARTS.items()}
    with mock.patch.multiple(Bench, **methods), mock.patch.object(attempts, "_diagnosis", timed_diagnosis):
        yield


def shares(examples: int) -> None:
    seconds: dict[str, float] = defaultdict(float)
    costs: dict[Any, float] = {}
    saved = 0.0
    recall = SharedWork.recall

    def accounted(self: SharedWork, key: Any, generator: Any, numbers: int, work: Callable[[], Any]) -> Any:
        nonlocal saved
        done = False

        def timed() -> Any:
            nonlocal done
            done, began = True, time.process_time()
            found = work()
            costs[key] = time.process_time() - began
            return found

        found = recall(self, key, generator, numbers, timed)
        saved += 0.0 if done else costs[key]
        return found

    with tempfile.TemporaryDirectory() as folder, clocked(seconds), mock.patch.object(SharedWork, "recall", accounted):
        started = time.process_time()
        result = run_spec({**DEFAULT_SPEC, "examples": examples, "executor": "serial"}, folder, progress=False)
        jobs = time.process_time() - started
        result.report()
        seconds["report"] = time.process_time() - started - jobs
    parts = {name: took for name, took in seconds.items() if not name.startswith("attacks:")}
    seconds["set-up, plan, store"] = jobs - sum(parts.values()) + seconds["report"]
    whole = jobs + seconds["report"]
    print(f"default audit, {examples} examples, {len(result.rows)} jobs: {whole:.0f} processor seconds")
    for name, took in sorted(seconds.items(), key=lambda pair: -pair[1]):
        print(f"  {name}: {took:.1f} s, {took / whole:.1%}")
    print(f"  saved by shared work: {saved:.0f} s, so that it takes {whole / (whole + saved):.2f} of the time")


def equal_jobs(jobs: int, workers: int) -> tuple[float, float, float]:
    """Wall-clock seconds of all jobs, processor seconds of all processes, and seconds of jobs by their own clocks."""
    spec = {
        "model": "convnet",
        "data": "tiles",
        "examples": jobs,
        "attacks": [{"inverting-gradients": {"iterations": 100}}],
        "controls": False,
        "findings": False,
        "executor": "processes",
        "workers": workers,
    }
    times: list[float] = []

    def note(event: dict[str, Any]) -> None:
        if event["event"] in ("started", "finished"):
            times.append(time.perf_counter())

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        result = run_spec(spec, Path(folder), progress=note)
        took = sum(row.seconds or 0.0 for row in result.rows)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return times[-1] - times[0], spent, took


def start_seconds() -> float:
    """Processor seconds of a worker's start, which is little but loading libraries."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import leakscope.audit.executors.processes"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def workers(jobs: int, repeats: int = 2) -> None:
    measured = [(count, equal_jobs(jobs, count)) for _ in range(repeats) for count in (1, 2)]  # in turn
    best = {count: min(one for workers, one in measured if workers == count) for count in (1, 2)}
    (alone, spent_alone, busy_alone), (both, spent_both, busy_both) = best[1], best[2]
    start = start_seconds()
    shares = busy_alone / alone, busy_both / (2 * both)
    dearer = (spent_both - 2 * start) / (spent_alone - start)
    print(
        f"{jobs} equal jobs: one worker {alone:.1f} s, two {both:.1f} s, ratio {alone / both:.2f} on this machine now"
    )
    print(f"  busy with jobs: one worker {shares[0]:.1%} of its time, two {shares[1]:.1%} of theirs")
    print(f"  processor seconds of the jobs with two workers, by those with one: {dearer:.2f}")
    print(f"  ratio on two free processors, by this accounting: {2 * shares[1] / shares[0] / dearer:.2f}")


def long_jobs(jobs: int, steps: int, compile: str) -> None:
    """Processor seconds of an audit of one setting in this process, and of what it started, printed for the parent."""
    spec = {
        "model": "convnet",
        "data": "tiles",
        "examples": jobs,
        "attacks": [{"inverting-gradients": {"iterations": steps, "compile": compile}}],
        "controls": False,
        "findings": False,
        "executor": "serial",
    }
    with tempfile.TemporaryDirectory() as folder:
        result = run_spec(spec, folder, progress=False)
    assert {row.status for row in result.rows} == {"done"}
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(sum(one.ru_utime + one.ru_stime for one in used))


def compiled(jobs: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as cache:
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--long", how, "--jobs", str(jobs), "--steps", str(steps)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "LEAKSCOPE_CACHE": cache},
            )
            for how in ("always", "never")
        ]
        ours, plain = (float(process.communicate()[0]) for process in running)
    print(
        f"{jobs} jobs of {steps} steps: compiled {ours:.0f} processor seconds, plain {plain:.0f}, "
        f"ratio {ours / plain:.2f}, compilation included"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["shares", "workers", "compiled"])
    parser.add_argument("--examples", type=int, default=DEFAULT_SPEC["examples"])
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--long", choices=["always", "never"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.long:
        return long_jobs(options.jobs, options.steps, options.long)
    if options.only in (None, "shares"):
        shares(options.examples)
    if options.only in (None, "workers"):
        workers(options.jobs)
    if options.only in (None, "compiled"):
        compiled(options.jobs, options.steps)


if __name__ == "__main__":
    main()
