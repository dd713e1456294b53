"""Speed of the matching step, as ratios within one run: timings are noisy, their ratios much less so.

Prints, for the 3-layer ReLU ConvNet, the step compiled : eager, restarts batched : one after another, and the full
step : one forward-backward pass (a double backward cannot cost less than about 2.5); then time and memory against
batch, input size and local steps.

    python benchmarks/matching.py [--threads 1] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from leakscope.federation import FedSGD
from leakscope.matching import DirectionL1, Matcher, Problem, TotalVariation, UnrolledSteps, Victim, steps_in_order
from leakscope.models import build_model


def median_seconds(*calls: Callable[[], object], rounds: int = 30) -> list[float]:
    """Median time of each call; calls take turns, so that a slow moment of the machine meets all of them."""
    for call in calls:
        call()
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
    return [statistics.median(found) for found in times]


def problem(net: nn.Module, size: int, batch: int, steps: int = 1) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(batch, 3, size, size, generator=generator), torch.arange(batch) % 10
    seen = FedSGD().observe(net, x, y)
    matcher = Matcher(distance=DirectionL1(), priors=(TotalVariation(weight=0.03),))
    if steps > 1:
        matcher = Matcher(distance=DirectionL1(), simulation=UnrolledSteps(0.01, steps_in_order(batch, batch, steps)))
    return Problem(matcher, Victim.of(seen), dict(seen.message.update), seen.inputs, len(x), y, (10,)), x, y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="skip compiling")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        return one(*map(int, options.one.split(",")))
    print(f"torch {torch.__version__}, {options.threads} thread(s); 3-layer ReLU ConvNet, 3x32x32")
    net = build_model("convnet", input_shape=(3, 32, 32), num_classes=10)
    task, x, y = problem(net, 32, 1)
    row = torch.rand(1, x.numel(), generator=torch.Generator().manual_seed(1))

    def forward_backward() -> None:
        loss = nn.functional.cross_entropy(net(x), y)
        torch.autograd.grad(loss, list(net.parameters()))

    eager = task.evaluator(1, False)
    if options.quick:
        step, plain = median_seconds(lambda: eager(row, 0), forward_backward)
        print(f"eager step : forward-backward      {step / plain:5.2f}   ({1e3 * step:.1f} ms : {1e3 * plain:.1f} ms)")
    else:
        started = time.perf_counter()
        compiled = task.evaluator(1, True)
        compiled(row, 0)
        cost = time.perf_counter() - started
        fast, step, plain = median_seconds(lambda: compiled(row, 0), lambda: eager(row, 0), forward_backward)
        print(f"compiled step : eager step         {fast / step:5.2f}   ({1e3 * fast:.1f} ms : {1e3 * step:.1f} ms)")
        print(f"eager step : forward-backward      {step / plain:5.2f}   ({1e3 * plain:.1f} ms)")
        print(f"compiled step : forward-backward   {fast / plain:5.2f}")
        print(f"compiling took {cost:.0f} s, as long as {cost / max(step - fast, 1e-9):.0f} steps of what it saves")
    for restarts in (2, 4, 8):
        rows = torch.rand(restarts, x.numel(), generator=torch.Generator().manual_seed(1))
        together = task.evaluator(restarts, False)

        def one_by_one(rows: torch.Tensor = rows) -> None:
            for each in rows.split(1):
                eager(each, 0)

        both = median_seconds(lambda t=together, r=rows: t(r, 0), one_by_one, rounds=10)
        print(f"{restarts} restarts batched : one by one   {both[0] / both[1]:5.2f}")

    print(
        "\ngrowth of the eager step against the first line; memory is what a fresh process needs beyond its libraries"
    )
    base = None
    for size, batch, steps in [(32, 1, 1), (32, 4, 1), (32, 16, 1), (48, 1, 1), (64, 1, 1), (32, 1, 5), (32, 1, 10)]:
        # A process of its own, because a process never gives its peak memory back.
        command = [sys.executable, __file__, "--one", f"{size},{batch},{steps}", "--threads", str(options.threads)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        seconds, megabytes = float(out[0]), float(out[1])
        base = base or seconds
        print(f"size {size:3d}  batch {batch:3d}  local steps {steps:3d}   ", end="")
        print(f"time {seconds / base:6.2f}   memory {megabytes:6.0f} MB")


def one(size: int, batch: int, steps: int) -> None:
    """Seconds and megabytes of one setting, printed for the parent."""
    net = build_model("convnet", input_shape=(3, size, size), num_classes=10)
    before = peak_kilobytes()
    task, x, _ = problem(net, size, batch, steps)
    row = torch.rand(1, x.numel(), generator=torch.Generator().manual_seed(1))
    evaluate = task.evaluator(1, False)
    (seconds,) = median_seconds(lambda: evaluate(row, 0), rounds=7)
    print(seconds, (peak_kilobytes() - before) / 1024)


def peak_kilobytes() -> int:
    """The largest memory this process has had; getrusage would count what its parent had before it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
