"""Speed of the matching step, as ratios of processor time within one run: timings are noisy, their ratios much less so.

Prints, for the 3-layer ReLU ConvNet, the step by plain autograd, by ``torch.func`` and compiled against one
forward-backward pass (a double backward cannot cost less than about 2.4), for one image and four; restarts by each way
against as many single ones; what it takes until a compiled step can run: the first time, again, and in another process;
then time and memory of a plain step against batch, input size and local steps.

    python benchmarks/matching.py [--threads 1] [--quick]
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from leakscope.federation import FedSGD
from leakscope.matching import DirectionL1, Matcher, Problem, TotalVariation, UnrolledSteps, Victim, steps_in_order
from leakscope.matching.search import Evaluate, Evaluation, keep_freed_memory
from leakscope.models import build_model


def median_seconds(*calls: Callable[[], object], rounds: int = 30) -> list[float]:
    """Median processor time of each call; calls take turns, so that a slow moment of the machine meets all of them."""
    for call in calls:
        call()
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            started = time.process_time()
            call()
            found.append(time.process_time() - started)
    return [statistics.median(found) for found in times]


def problem(net: nn.Module, size: int, batch: int, steps: int = 1) -> tuple[Problem, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(batch, 3, size, size, generator=generator), torch.arange(batch) % 10
    seen = FedSGD().observe(net, x, y)
    matcher = Matcher(distance=DirectionL1(), priors=(TotalVariation(weight=0.03),))
    if steps > 1:
        matcher = Matcher(distance=DirectionL1(), simulation=UnrolledSteps(0.01, steps_in_order(batch, batch, steps)))
    return Problem(matcher, Victim.of(seen), dict(seen.message.update), seen.inputs, len(x), y, (10,)), x, y


def start_rows(count: int, x: Tensor) -> Tensor:
    return torch.rand(count, x.numel(), generator=torch.Generator().manual_seed(1))


def convnet(size: int = 32) -> nn.Module:
    return build_model("convnet", input_shape=(3, size, size), num_classes=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="skip compiling")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as every search does
    if options.one:
        return one(*map(int, options.one.split(",")))
    if options.start:
        return start()
    print(f"torch {torch.__version__}, {options.threads} thread(s); 3-layer ReLU ConvNet, 3x32x32")
    with tempfile.TemporaryDirectory() as folder:
        if not options.quick:
            compiling(folder, options.threads)
        ways(not options.quick)
    restarts(not options.quick)
    growth(options.threads)


def compiling(folder: str, threads: int) -> None:
    """How long it takes until a compiled step can run, in processes whose compiler has an empty or a full cache."""
    command = [sys.executable, __file__, "--start", "--threads", str(threads)]
    # The children inherit it, and so does what is compiled in this process.
    os.environ["LEAKSCOPE_CACHE"] = folder
    for label in ("first of all", "in another process"):
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        print(
            f"compiling {label:20s} {float(out[0]):5.1f} s, {float(out[1]):.1f} s of it imports; "
            f"another image, same process {float(out[2]):.2f} s"
        )


def start() -> None:
    """Seconds of wall clock until a compiled step can run, of the imports among them, and of a second run's start."""
    task, _, _ = problem(convnet(), 32, 1)
    moments = [time.perf_counter()]
    importlib.import_module("torch._inductor.compile_fx")
    for other in (task, problem(convnet(), 32, 1)[0]):
        moments.append(time.perf_counter())
        other.evaluator_by("compiled")
    moments.append(time.perf_counter())
    print(moments[2] - moments[0], moments[1] - moments[0], moments[3] - moments[2])


def by_torch_func(task: Problem) -> Evaluate:
    """The oracle of the plain step: both derivatives by ``torch.func``."""
    derivative, facts = grad_and_value(task._objective(task._measure()), has_aux=True), task._facts()

    def evaluate(rows: Tensor, step: int) -> Evaluation:
        gradient, (value, judged) = derivative(rows[0], rows[0, :0], torch.tensor(float(step)), facts)
        return value[None], judged[None], gradient[None]

    return evaluate


def ways(compiled: bool) -> None:
    """Each way of evaluating one restart, in forward-backward passes."""
    net = convnet()
    for batch in (1, 4):
        task, x, y = problem(net, 32, batch)
        rows = start_rows(1, x)
        calls: dict[str, Evaluate] = {"plain": task.evaluator_by("plain"), "torch.func": by_torch_func(task)}
        if compiled:
            calls["compiled"] = task.evaluator_by("compiled")

        def forward_backward(x: Tensor = x, y: Tensor = y) -> None:
            torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))

        *seconds, unit = median_seconds(*(partial(call, rows, 0) for call in calls.values()), forward_backward)
        for way, each in zip(calls, seconds, strict=True):
            print(f"batch {batch}: {way:10s} step : forward-backward  {each / unit:5.2f}   ({1e3 * each:.1f} ms)")


def restarts(compiled: bool) -> None:
    """Seconds a restart by each way, against one restart alone by the plain one."""
    for name in ("convnet", "dlg-lenet"):
        task, x, _ = problem(build_model(name, input_shape=(3, 32, 32), num_classes=10), 32, 1)
        calls: dict[str, Evaluate] = {"plain": task.evaluator_by("plain"), "batched": task.evaluator_by("batched")}
        if compiled and name == "convnet":
            calls["compiled"] = task.evaluator_by("compiled")
        alone = partial(calls["plain"], start_rows(1, x), 0)
        for count in (2, 4, 8):
            together = [partial(call, start_rows(count, x), 0) for call in calls.values()]
            *seconds, unit = median_seconds(*together, alone, rounds=10)
            told = "  ".join(f"{way} {each / count / unit:.2f}" for way, each in zip(calls, seconds, strict=True))
            choice = task.evaluator(count, False).way
            print(f"{name}, {count} restarts: a restart against one alone  {told}  (chosen: {choice})")


def growth(threads: int) -> None:
    print(
        "\ngrowth of the plain step against the first line; memory is what a fresh process needs beyond its libraries"
    )
    base = None
    for size, batch, steps in [(32, 1, 1), (32, 4, 1), (32, 16, 1), (48, 1, 1), (64, 1, 1), (32, 1, 5), (32, 1, 10)]:
        # A process of its own, because a process never gives its peak memory back.
        command = [sys.executable, __file__, "--one", f"{size},{batch},{steps}", "--threads", str(threads)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        seconds, megabytes = float(out[0]), float(out[1])
        base = base or seconds
        print(f"size {size:3d}  batch {batch:3d}  local steps {steps:3d}   ", end="")
        print(f"time {seconds / base:6.2f}   memory {megabytes:6.0f} MB")


def one(size: int, batch: int, steps: int) -> None:
    """Seconds and megabytes of one setting, printed for the parent."""
    net = convnet(size)
    before = peak_kilobytes()
    task, x, _ = problem(net, size, batch, steps)
    evaluate, row = task.evaluator(1, False), start_rows(1, x)
    (seconds,) = median_seconds(lambda: evaluate(row, 0), rounds=7)
    print(seconds, (peak_kilobytes() - before) / 1024)


def peak_kilobytes() -> int:
    """The largest memory this process has had; getrusage would count what its parent had before it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
