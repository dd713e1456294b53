"""How many workers an audit is worth: as many as fit, and no more than make it faster.

Processors are those that the system lets this process use. Whether so many really help is measured: the workers make
the first client's update over and over, one alone and several side by side, in turn, so that what else the machine
does falls on all alike. Results do not depend on any of it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Twice as many workers must do so many times the work.
WORTHWHILE = 1.15
#: Seconds of each measurement; each is taken twice, and the better counts.
PACE_SECONDS = 0.2
REPEATS = 2
#: Where fewer updates a second are made, measuring takes longer than it is worth.
SLOWEST_PACE = 0.5
#: Share of the free memory that workers may fill.
MEMORY_SHARE = 0.8
#: Fewer jobs a worker than this are done before a measurement pays.
JOBS_A_WORKER = 4

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Pace:
    """What a worker did in one measurement: updates a second, and the memory it takes, in bytes."""

    rate: float
    memory: int


@dataclass(frozen=True)
class Choice:
    """How many workers, and why."""

    workers: int
    reason: str


def usable_processors(cgroup: Path = _CGROUP) -> int:
    """Processors that this process may keep busy: by affinity, and by the quota of its control group."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return usable if quota is None else max(1, min(usable, math.floor(quota + 0.5)))


def _quota(cgroup: Path) -> float | None:
    """Processors by the quota of the control group; None where there is none."""
    try:
        limit, _, period = (cgroup / "cpu.max").read_text().partition(" ")
        return None if limit == "max" else float(limit) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        limit, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(limit) / float(period) if float(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that may still be used: of the machine, and of the control group."""
    free: int = psutil.virtual_memory().available
    older = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for limit, used in (("memory.max", "memory.current"), older):
        try:
            free = min(free, int((cgroup / limit).read_text()) - int((cgroup / used).read_text()))
        except (OSError, ValueError):
            continue
    return max(0, free)


def sizes(most: int) -> list[int]:
    """Numbers of workers to measure.

    >>> sizes(1), sizes(2), sizes(6)
    ([1], [1, 2], [1, 2, 4, 6])
    """
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def choose(paces: Mapping[int, list[Pace]], free: int) -> Choice:
    """The number of workers by what was measured: from each number of them, a pace of each.

    >>> alone, beside, slowed = Pace(10.0, 10**9), Pace(9.5, 10**9), Pace(5.2, 10**9)
    >>> choose({1: [alone], 2: [beside, beside]}, free=10**10)
    Choice(workers=2, reason='2 together do 1.9 times the work of one')
    >>> choose({1: [alone], 2: [slowed, slowed]}, free=10**10)
    Choice(workers=1, reason='2 together do only 1.0 times the work of one')
    >>> choose({1: [alone], 2: [beside, beside]}, free=10**9 // 2)
    Choice(workers=1, reason='there is memory for no more: each takes 1.0 GB and 0.5 GB is free beside them')
    """
    rates = {count: sum(pace.rate for pace in each) for count, each in sorted(paces.items())}
    counts = list(rates)
    chosen = counts[0]
    reason = "there is one processor" if len(counts) == 1 else ""
    for count in counts[1:]:
        needed = WORTHWHILE ** math.log2(count / chosen)
        gain = rates[count] / rates[1] if rates[1] else 0.0
        if rates[count] < needed * rates[chosen]:
            reason = f"{count} together do only {gain:.1f} times the work of {_times(rates, chosen)}"
            break
        chosen, reason = count, f"{count} together do {gain:.1f} times the work of one"
    memory = max(pace.memory for each in paces.values() for pace in each)
    # Those that were measured are there already, with all that they take until their jobs take more.
    room = max(1, math.floor(MEMORY_SHARE * (free + memory * counts[-1]) / (2 * memory))) if memory else chosen
    if room < chosen:
        free_words = f"each takes {memory / 1e9:.1f} GB and {free / 1e9:.1f} GB is free beside them"
        return Choice(room, f"there is memory for no more: {free_words}")
    return Choice(chosen, reason)


def memory_room(workers: list[int | None], needed: int) -> int:
    """For how many workers there is memory if each may take so many bytes; those there are by their process ids."""
    taken = [rss for rss in map(_resident, workers) if rss]
    needed = max([needed, *taken])
    return max(1, math.floor(MEMORY_SHARE * (free_memory() + sum(taken)) / needed)) if needed else len(workers)


def _resident(process: int | None) -> int:
    try:
        return int(psutil.Process(process).memory_info().rss) if process is not None else 0
    except psutil.Error:
        return 0


def _times(rates: Mapping[int, float], chosen: int) -> str:
    return "one" if chosen == 1 else f"one, and {chosen} do {rates[chosen] / rates[1]:.1f}" if rates[1] else "one"


def measure_pace(work: Callable[[], object], seconds: float = PACE_SECONDS) -> Pace:
    """How often ``work`` is done in a second, and the memory of this process."""
    started, done, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < seconds:
        work()
        done += 1
        elapsed = time.perf_counter() - started
    return Pace(done / elapsed, psutil.Process().memory_info().rss)
