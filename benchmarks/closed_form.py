"""What solving costs instead of searching (LEAKSCOPE_DATA must point at the data sets).

python benchmarks/closed_form.py [--only rgap|newton|four|floor] [--sizes 16 24 32 48] [--images 10] [--threads 1]

rgap: seconds and memory of R-GAP on CNN6 against the side of the input, and the exponent of their growth.
newton: Gauss-Newton on the DLG LeNet, and how long DLG's L-BFGS takes to 30 dB on the same image in the same run.
four: four MNIST images with different labels at once.
floor: the error of Gauss-Newton under gradient noise over the Cramer-Rao floor.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.attacks import DLG, RGAP, GaussNewton
from leakscope.audit.memory import PeakMemory
from leakscope.contracts.attack import Attack
from leakscope.contracts.channel import Channel
from leakscope.contracts.observation import Observation
from leakscope.data import Examples, load_data
from leakscope.defenses import GradientNoise
from leakscope.federation import FedSGD
from leakscope.limits import cramer_rao
from leakscope.matching import GradientMap
from leakscope.models import build_model
from scaling_table import growth


def look(net: nn.Module, part: Examples, dtype: torch.dtype, **how: Any) -> tuple[Observation, Tensor]:
    x = part.x.to(dtype)
    return FedSGD().observe(net.to(dtype), x, part.y, value_range=part.value_range, **how), x


def timed(attack: Attack, seen: Observation, seed: int) -> tuple[Tensor, float, float | None, dict[str, Any]]:
    memory, started = PeakMemory(), time.perf_counter()
    found = attack(seen, seed=seed)
    return found.inputs, time.perf_counter() - started, memory.megabytes(), {"flags": found.flags, **found.info}


def rgap(sizes: list[int], data: Examples) -> None:
    print("R-GAP, CNN6 with ten classes, float64; ranks left out")
    seconds, megabytes = [], []
    for side in sizes:
        part = data.subset([0])
        x = nn.functional.interpolate(part.x, size=(side, side), mode="bilinear", antialias=True)
        net = build_model("cnn6", input_shape=(3, side, side), num_classes=10).double()
        seen = FedSGD().observe(net, x.double(), part.y, value_range=part.value_range)
        inputs, spent, memory, _ = timed(RGAP(ranks=False), seen, 0)
        seconds.append(spent)
        megabytes.append(memory or 0.0)
        worst = float((inputs - x.double()).abs().max())
        print(f"  side {side}: {spent:6.1f} s, {memory} MB, largest error {worst:.1e}", flush=True)
    print(f"  grows with the side to the power {growth(sizes, seconds):.1f} in time", end="")
    print(f", {growth(sizes, megabytes):.1f} in memory")


def newton(images: int, published: int, data: Examples, first: int) -> None:
    for activation, init in (("sigmoid", "uniform"), ("gelu", "default")):
        print(f"Gauss-Newton, DLG LeNet, {activation}, {init} weights, float64, one CIFAR-100 image at a time")
        good, ratios = 0, []
        for number in range(images):
            part = data.subset([first + number])
            net = build_model("dlg-lenet", activation=activation, init=init)
            seen, x = look(net, part, torch.float64)
            inputs, spent, _, facts = timed(GaussNewton(), seen, number)
            error = float((inputs - x).square().mean())
            good += error <= 1e-15 and facts["steps"] <= 15 and facts["restarts"] == 1
            narrow = look(net, part, torch.float32)[0]
            rival, steps = time_to(30.0, DLG(compile="never"), narrow, part.x, number)
            ratios.append(spent / rival)
            print(f"  image {first + number}: MSE {error:.1e}, {facts['steps']} steps, {spent:.1f} s", end="")
            print(f"; DLG {told(rival, steps)}", end="", flush=True)
            if number < published:
                rival, steps = time_to(30.0, DLG.preset("paper", compile="never"), narrow, part.x, number)
                print(f"; with its published settings {told(rival, steps)}", end="")
            print(flush=True)
        print(f"  within 15 steps to 1e-15: {good} of {images}; time over DLG's to 30 dB: ", end="")
        print(f"median {sorted(ratios)[len(ratios) // 2]:.2f}, largest {max(ratios):.2f}")


def told(seconds: float, steps: int) -> str:
    return "not within 2000 steps" if math.isinf(seconds) else f"{seconds:.1f} s ({steps} steps)"


def time_to(decibels: float, attack: DLG, seen: Observation, x: Tensor, seed: int) -> tuple[float, int]:
    """Seconds of the shortest run, on a grid of lengths, that reaches so many dB; infinite where none does."""
    steps = 100
    while steps <= 2000:
        inputs, spent, _, _ = timed(dataclasses.replace(attack, iterations=steps), seen, seed)
        if -10 * math.log10(float((inputs - x).square().mean())) >= decibels:
            return spent, steps
        steps = math.ceil(1.3 * steps)
    return math.inf, steps


def four(data: Examples) -> None:
    chosen: dict[int, int] = {}
    for index, label in enumerate(data.y.tolist()):
        chosen.setdefault(label, index)
    part = data.subset(list(chosen.values())[:4])
    net = build_model("dlg-lenet", input_shape=data.shape, num_classes=data.num_classes)
    seen, x = look(net, part, torch.float64)
    inputs, spent, _, facts = timed(GaussNewton(), seen, 0)
    # Known order: the labels are recovered ascending, the examples were given in the order of the data.
    order = part.y.argsort()
    error = float((inputs - x[order]).square().mean())
    print(f"four MNIST images, labels {part.y.tolist()}: MSE {error:.1e}, {facts['steps']} steps, {spent:.1f} s")


def floor(data: Examples, first: int) -> None:
    print("Gauss-Newton under gradient noise, DLG LeNet, sigmoid, CIFAR-100: its error over the Cramer-Rao floor")
    for sigma in (1e-5, 1e-4, 1e-3):
        part = data.subset([first])
        net = build_model("dlg-lenet")
        seen, x = look(net, part, torch.float64, defense=GradientNoise(sigma=sigma))
        mapping = GradientMap.of(seen, part.y)
        best = cramer_rao(mapping, mapping.flat(x), Channel(noise=sigma))
        inputs, spent, _, facts = timed(GaussNewton(noise=sigma), seen, 0)
        error = float((inputs - x).square().mean().sqrt())
        print(f"  noise {sigma:g}: error {error:.2e}, floor {best.rmse:.2e}, ratio {error / best.rmse:.2f}, ", end="")
        print(f"{facts['steps']} steps, {spent:.1f} s {facts['flags']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["rgap", "newton", "four", "floor"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 24, 32, 48])
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--published", type=int, default=2, help="images for DLG's published settings, which are slow")
    parser.add_argument("--first", type=int, default=150, help="first image; settings were chosen on image 100")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.only in (None, "rgap"):
        rgap(options.sizes, load_data("cifar10", split="test", limit=10))
    images = load_data("cifar100", split="test", limit=options.first + options.images)
    if options.only in (None, "newton"):
        newton(options.images, options.published, images, options.first)
    if options.only in (None, "four"):
        four(load_data("mnist", split="test", limit=100))
    if options.only in (None, "floor"):
        floor(images, options.first)


if __name__ == "__main__":
    main()
