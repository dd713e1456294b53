"""How long an audit will take: a few steps of each attack are timed before the jobs begin.

An attack tells its progress after each step, so the clock is read there, and after some steps the attack is stopped
from there. One that says nothing is stopped by an alarm.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from leakscope.audit.attempts import Bench
from leakscope.audit.budget import span
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup

#: Steps that are timed, beside the first, which is slower.
STEPS = 3
#: Seconds after which two steps are enough, after which one is, and after which a silent attack is stopped.
TWO_STEPS_SECONDS, ONE_STEP_SECONDS, SILENT_SECONDS = 2.0, 8.0, 15.0
#: Seconds for the trials of all attacks.
ALL_SECONDS = 60.0
#: An audit that takes longer is worth some advice.
LONG_SECONDS = 3600.0


class _Enough(BaseException):
    """Ends a trial; no Exception, so that an attack that catches those does not go on."""


@dataclass(frozen=True)
class Trial:
    """What one job takes: seconds in all, and of a step where it has steps; ``at_least`` where none was finished."""

    seconds: float
    step: float | None = None
    steps: int | None = None
    at_least: bool = False


def trial_jobs(jobs: Sequence[Job]) -> list[Job]:
    """One job of each attack under each protocol, attempts rather than controls."""
    chosen: dict[tuple[int, int], Job] = {}
    for job in sorted(jobs, key=lambda job: job.control is not None):
        if job.attack is not None:
            chosen.setdefault((job.attack, job.protocol), job)
    return list(chosen.values())


def try_out(setup: Setup, job: Job) -> Trial | None:
    """Time the first steps of a job; None where it fails, which its row will tell."""
    times: list[tuple[int, int, float]] = []
    started = time.perf_counter()

    def watch(done: int, total: int, _value: float) -> None:
        now = time.perf_counter()
        times.append((int(done), int(total), now))
        elapsed, steps = now - started, len(times)
        if steps > STEPS or (steps > 1 and elapsed > TWO_STEPS_SECONDS) or elapsed > ONE_STEP_SECONDS:
            raise _Enough

    try:
        with _alarm(SILENT_SECONDS):
            outcome = Bench(_uncompiled(setup)).run(job, watch)
    except _Enough:
        return _extrapolated(started, times, None if job.attack is None else setup.spec.attacks[job.attack].instance)
    return Trial(outcome.seconds) if outcome.status == "done" else None


def _extrapolated(started: float, times: list[tuple[int, int, float]], attack: Any) -> Trial:
    if not times:
        steps = getattr(attack, "iterations", None)
        return Trial(SILENT_SECONDS * (steps or 1), SILENT_SECONDS if steps else None, steps, at_least=True)
    (first, _, begun), (last, total, ended) = times[0], times[-1]
    step = (ended - begun) / (last - first) if last > first else (begun - started) / max(first, 1)
    return Trial(begun - started + step * max(total - first, 0), step, total)


def _uncompiled(setup: Setup) -> Setup:
    """The same audit without compilation, which takes longer than a trial may."""
    attacks = [
        part.model_copy(update={"instance": dataclasses.replace(part.instance, compile="never")})
        if hasattr(part.instance, "compile")
        else part
        for part in setup.spec.attacks
    ]
    return dataclasses.replace(setup, spec=setup.spec.model_copy(update={"attacks": attacks}))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """_Enough after ``seconds``, as soon as Python is asked; only the main thread can be stopped so."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    under_way = True

    def ring(_number: int, _frame: Any) -> None:
        if under_way:
            raise _Enough

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        under_way = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def estimate(setup: Setup, jobs: Sequence[Job], trials: Mapping[str, Trial | None], workers: int) -> dict[str, Any]:
    """The event that tells how long ``jobs`` will take; ``trials`` by the key of the job that was tried.

    An attack that was tried under another protocol only is taken to be as slow there. Findings are not counted.
    """
    tried = {job.key: job for job in jobs if job.key in trials}
    measured = {(tried[key].attack, tried[key].protocol): trial for key, trial in trials.items()}
    by_attack: dict[str, float] = {}
    longest: tuple[float, str, Trial] | None = None
    for job in jobs:
        if job.attack is None:
            continue
        others = [trial for (attack, _), trial in measured.items() if attack == job.attack]
        trial = measured.get((job.attack, job.protocol), next(iter(others), None))
        if trial is None:
            continue
        name = setup.spec.attacks[job.attack].name
        by_attack[name] = by_attack.get(name, 0.0) + trial.seconds / workers
        if longest is None or by_attack[name] > longest[0]:
            longest = by_attack[name], name, trial
    seconds = sum(by_attack.values())
    count = sum(job.attack is not None for job in jobs)
    advice = None
    budget = setup.spec.budget
    if budget is not None and seconds > budget:
        advice = (
            f"That is longer than the budget of {span(budget)}: what is not begun by then is left for the next run of "
            "the same command."
        )
    elif longest is not None and seconds > LONG_SECONDS:
        advice = _advice(longest[1], longest[2], findings=any(job.finding is not None for job in jobs))
    told = {"seconds": seconds, "jobs": count, "by_attack": by_attack, "advice": advice, "budget": budget}
    return {"event": "estimated", **told}


def _advice(name: str, trial: Trial, findings: bool) -> str:
    """What to change where it takes too long."""
    pace = "" if trial.step is None else f"{'at least ' if trial.at_least else ''}{trial.step:.2g} s"
    steps = f", {trial.steps} steps of {pace} a job" if pace else ""
    shorter = "" if not pace else f"fewer steps (--attack {name}:iterations=...), "
    theory = " Theory takes extra time; --no-findings leaves it out." if findings else ""
    return (
        f"Most of it is {name}{steps}. To shorten it: {shorter}fewer examples (--examples) or seeds, inputs of a "
        f"smaller size, fewer attacks or defences, more --workers, or a --budget.{theory} What is done is kept, and "
        "more can be added later."
    )
