"""The usual costs as ratios to a fixed loop in the same run, against those of the last release.

    python benchmarks/release.py [--write] [--only NAME ...] [--rounds 9] [--tolerance 0.1]

Exit code 1 where a ratio has grown by more than the tolerance. Ratios of processor time: another machine, or a busy
one, changes a case and the loop beside it alike. What looks slower is timed again twice before it is called so. --write
stores the ratios of this run as those to compare with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from leakscope.attacks import CAFE, SME, GaussNewton, HeadFirst, LinearLayer
from leakscope.data import load_data
from leakscope.federation import FedAvg, FedSGD, Vertical
from leakscope.matching import (
    DirectionL1,
    Matcher,
    Problem,
    SegmentGradient,
    Simulation,
    SingleGradient,
    TotalVariation,
    UnrolledSteps,
    Victim,
    steps_in_order,
)
from leakscope.models import MODELS, build_model

STORED = Path(__file__).with_name("release.json")
Call = Callable[[], object]


def calibration() -> Call:
    """Convolutions, their derivatives and many small calls, as a step of a search has them."""
    net = build_model("convnet", input_shape=(3, 32, 32), num_classes=10)
    x, small = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.ones(10)

    def loop() -> None:
        for _ in range(4):
            torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        for _ in range(500):
            small.add(1.0)

    return loop


def step(
    model: str = "convnet",
    batch: int = 1,
    restarts: int = 1,
    compiled: bool = False,
    simulation: Simulation | None = None,
    count: int = 5,
    size: int | None = None,
) -> Call:
    """``count`` steps of a search on random pictures: cost does not depend on what they show."""
    simulation = simulation or SingleGradient()
    generator = torch.Generator().manual_seed(0)
    entry = MODELS[model]
    shape = entry.input_shape if size is None else (entry.input_shape[0], size, size)
    x, y = torch.rand(batch, *shape, generator=generator), torch.arange(batch) % entry.num_classes
    protocol = FedSGD() if simulation == SingleGradient() else FedAvg(epochs=2, batch_size=batch, lr=0.004)
    seen = protocol.observe(build_model(model, input_shape=shape), x, y)
    matcher = Matcher(distance=DirectionL1(), priors=(TotalVariation(weight=0.03),), simulation=simulation)
    task = Problem(matcher, Victim.of(seen), dict(seen.message.update), seen.inputs, batch, y, (entry.num_classes,))
    rows = torch.rand(restarts, x.numel() + len(simulation.unknowns), generator=generator)
    evaluate = task.evaluator(restarts, compiled)

    def run() -> None:
        for number in range(count):
            evaluate(rows, number)

    return run


def head_first() -> Call:
    data = load_data("tiles")
    net = build_model("convnet", input_shape=data.shape, num_classes=data.num_classes)
    seen = FedSGD().observe(net, data.x[:1], data.y[:1], value_range=data.value_range)
    attack = HeadFirst(iterations=20)
    return lambda: attack(seen, seed=0)


def linear_layer() -> Call:
    data = load_data("tiles")
    net = build_model("mlp", input_shape=data.shape, num_classes=data.num_classes)
    seen = FedSGD().observe(net, data.x[:4], data.y[:4], value_range=data.value_range)
    return lambda: LinearLayer()(seen, seed=0)


def gauss_newton() -> Call:
    net = build_model("dlg-lenet", input_shape=(1, 16, 16), num_classes=4)
    x = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = FedSGD().observe(net, x, torch.tensor([1]))
    return lambda: GaussNewton(steps=5, restarts=1)(seen, seed=0)


def vertical() -> Call:
    data = load_data("tiles")
    shape = {"filters": (8, 16), "hidden": 32, "middle": 16}
    net = build_model("cafe-cnn", input_shape=data.shape, num_classes=data.num_classes, **shape)
    seen = Vertical(batch_size=4).observe(net, data.x[:8], data.y[:8], value_range=data.value_range)
    return lambda: CAFE()(seen, seed=0)


#: What is timed, and how it is made ready; making ready does not count.
CASES: dict[str, Callable[[], Call]] = {
    "step, 1 image": step,
    "step, 4 images": lambda: step(batch=4),
    "compiled step, 1 image": lambda: step(compiled=True),
    "compiled step, 4 images": lambda: step(batch=4, compiled=True),
    "step, 4 restarts": lambda: step(restarts=4),
    "replay of 10 local steps": lambda: step(
        "femnist-cnn", 4, simulation=UnrolledSteps(0.004, steps_in_order(4, 4, 10)), count=1
    ),
    "step of sme": lambda: step("femnist-cnn", 4, simulation=SegmentGradient(every=SME().beta_every), count=20),
    "head-first, 20 steps": head_first,
    "linear-layer": linear_layer,
    "gauss-newton": gauss_newton,
    "vertical solve": vertical,
}


def ratio(case: Call, loop: Call, rounds: int) -> float:
    """Median of the case's processor time over the loop's; they take turns."""
    case()
    found = []
    for _ in range(rounds):
        moments = [time.process_time()]
        for call in (loop, case, loop):
            call()
            moments.append(time.process_time())
        before, middle, after = (b - a for a, b in itertools.pairwise(moments))
        found.append(2 * middle / (before + after))
    return statistics.median(found)


def compare(
    names: Sequence[str], stored: dict[str, float], rounds: int, tolerance: float
) -> tuple[dict[str, float], list[str]]:
    """The ratio of each case, and the names of those that have grown."""
    loop, found, grown = calibration(), {}, []
    loop()
    print(f"{'case':26s} {'ratio':>8s} {'release':>8s}  change")
    for name in names:
        case = CASES[name]()
        value, before = ratio(case, loop, rounds), stored.get(name)
        for _ in range(2):
            if before is not None and value > (1 + tolerance) * before:
                value = min(value, ratio(case, loop, rounds))
        found[name] = value
        if before is None:
            told = f"{'':>8s}  new"
        else:
            told = f"{before:8.3f}  {value / before - 1:+.0%}"
            if value > (1 + tolerance) * before:
                grown.append(name)
                told += "  slower"
        print(f"{name:26s} {value:8.3f} {told}", flush=True)
    return found, grown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store this run's ratios")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--stored", type=Path, default=STORED)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    stored = json.loads(options.stored.read_text())["ratios"] if options.stored.exists() else {}
    found, grown = compare(options.only, stored, options.rounds, options.tolerance)
    if options.write:
        ratios = {name: round(value, 4) for name, value in {**stored, **found}.items() if name in CASES}
        options.stored.write_text(json.dumps({"torch": torch.__version__, "ratios": ratios}, indent=2) + "\n")
        print(f"written: {options.stored.name}")
        return 0
    if grown:
        print(f"slower by more than {options.tolerance:.0%}, three times measured: {', '.join(grown)}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
