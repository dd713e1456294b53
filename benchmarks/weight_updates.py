"""What attacks on weight updates cost: SME against IG, replays against their steps, checkpoints against one graph.

    python benchmarks/weight_updates.py [--threads 1] [--quick]

Random pictures serve: cost does not depend on what they show. Calls that are compared take turns in one process; memory
is what a fresh process needs for one step beyond what a single gradient had made it take.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from leakscope.attacks import SME
from leakscope.audit.memory import PeakMemory
from leakscope.contracts.knowledge import Knowledge
from leakscope.federation import FedAvg
from leakscope.matching import Cosine, Matcher, Problem, SegmentGradient, UnrolledSteps, Victim, steps_in_order
from leakscope.matching.simulations import Simulation
from leakscope.models import MODELS, build_model

RATE = 0.004
EVERY = SME().beta_every


def problem(model: str, batch: int, simulation: Simulation) -> tuple[Problem, torch.Tensor]:
    """One matching problem on an update of a few steps, and a row to evaluate."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(batch, *MODELS[model].input_shape, generator=generator)
    y = torch.arange(batch) % MODELS[model].num_classes
    seen = FedAvg(epochs=2, batch_size=batch, lr=RATE).observe(
        build_model(model), x, y, None, Knowledge.full, generator
    )
    task = Problem(
        Matcher(distance=Cosine(), simulation=simulation),
        Victim.of(seen),
        dict(seen.message.update),
        seen.inputs,
        len(x),
        y,
        seen.output_shape,
    )
    return task, torch.rand(1, x.numel() + len(simulation.unknowns), generator=generator)


def steps(simulation: Simulation, model: str, batch: int, compiled: bool, count: int = EVERY) -> Callable[[], None]:
    """``count`` steps in a row, so that a derivative that is taken at some of them counts with its share."""
    task, row = problem(model, batch, simulation)
    evaluate = task.evaluator(1, compiled)

    def run() -> None:
        for iteration in range(count):
            evaluate(row, iteration)

    return run


def in_turns(*calls: Callable[[], None], rounds: int) -> list[float]:
    """Median seconds of each call; they take turns, so that a slow moment of the machine meets all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, found in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            if number:  # the first round warms up, and compiles
                found.append(time.perf_counter() - started)
    return [statistics.median(found) for found in times]


def sme_against_ig(compiled: bool, rounds: int) -> None:
    how = "compiled" if compiled else "eager"
    print(f"\nSME step : IG step, {how}; beta's derivative at every {EVERY}th step, then at each")
    for model, batch in (("femnist-cnn", 10), ("femnist-cnn", 50), ("cifar-cnn", 10)):
        ig, lazy, each = in_turns(
            steps(SegmentGradient(beta=0.0, step=0.0), model, batch, compiled),
            steps(SegmentGradient(every=EVERY), model, batch, compiled),
            steps(SegmentGradient(every=1), model, batch, compiled),
            rounds=rounds,
        )
        milliseconds = f"(IG {1e3 * ig / EVERY:.1f} ms)"
        print(f"  {model:12s} N={batch:3d}   {lazy / ig:5.3f}   {each / ig:5.3f}   {milliseconds}", flush=True)


def one(kind: str, count: int) -> None:
    """Seconds and megabytes of one evaluation, printed for the parent."""
    batch = 10
    simulation: Simulation = SegmentGradient(every=1)
    if kind != "sme":
        simulation = UnrolledSteps(RATE, steps_in_order(batch, batch, count), kind == "checkpoint")
    warm, row = problem("femnist-cnn", batch, SegmentGradient(beta=0.0, step=0.0))
    warm.evaluator(1, False)(row, 0)
    task, row = problem("femnist-cnn", batch, simulation)
    evaluate = task.evaluator(1, False)
    memory = PeakMemory()
    evaluate(row, 0)
    megabytes = memory.megabytes()
    (seconds,) = in_turns(lambda: evaluate(row, 0), rounds=3)
    print(seconds, megabytes)


def replays(threads: int) -> None:
    print("\nReplaying T steps on femnist-cnn, N = B = 10, beside SME, whose cost does not know T")
    print("   T   plain s    MB   checkpointed s    MB   time ratio   memory ratio   SME s    MB")
    for count in (10, 20, 50):
        found = {}
        for kind in ("plain", "checkpoint", "sme"):
            # A process of its own, because a process never gives its peak memory back.
            command = [sys.executable, __file__, "--one", f"{kind},{count}", "--threads", str(threads)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            found[kind] = (float(out[0]), float(out[1]))
        plain, check, sme = found["plain"], found["checkpoint"], found["sme"]
        print(
            f"{count:4d}   {plain[0]:7.2f} {plain[1]:5.0f}   {check[0]:14.2f} {check[1]:5.0f}   "
            f"{check[0] / plain[0]:10.2f}   {check[1] / plain[1]:12.2f}   {sme[0]:5.2f} {sme[1]:5.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few rounds, skip compiling")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        kind, count = options.one.split(",")
        return one(kind, int(count))
    print(f"torch {torch.__version__}, {options.threads} thread(s)")
    sme_against_ig(compiled=False, rounds=3 if options.quick else 5)
    if not options.quick:
        sme_against_ig(compiled=True, rounds=5)
    replays(options.threads)


if __name__ == "__main__":
    main()
