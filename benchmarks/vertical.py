"""What CAFE recovers and costs in vertical learning (LEAKSCOPE_DATA must point at the data sets).

python benchmarks/vertical.py [--only cifar|yale|scaling|moving|defended|methods] [--samples 80] [--batch 8]

cifar: PSNR of assembled CIFAR-10 pictures, with seconds for making the rounds and for the attack, and memory.
yale: the same for Yale faces, 160 of them in batches of 40.
scaling: seconds and memory against the number of samples, and the exponent of their growth.
moving: the direct method and the single loop while the model trains, against the learning rate.
defended: the direct method against each defence, beside noise in place of the rounds and a grey picture.
methods: direct, loops, and plain gradient matching on the same rounds, seconds as a ratio to the direct method.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.attacks import CAFE
from leakscope.audit.controls import noise_of_equal_norm
from leakscope.audit.memory import PeakMemory
from leakscope.contracts.attack import Attack
from leakscope.contracts.defense import Defense
from leakscope.contracts.observation import Observation
from leakscope.data import Examples, load_data
from leakscope.defenses import DPSGD, FakeGradients, GradientNoise, GradientPruning
from leakscope.federation import Vertical
from leakscope.models import build_model
from scaling_table import growth

#: The settings of step III were chosen on pictures 1000 to 1015 of the training split.
FIRST = 2000


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    error = (found.clamp(0, 1) - truth).square().flatten(1).mean(1)
    return -10 * torch.log10(error.clamp_min(1e-12))


def rounds(net: nn.Module, part: Examples, batch: int, defense: Defense | None = None, **how: Any) -> Observation:
    return Vertical(batch_size=batch, **how).observe(net, part.x, part.y, defense, value_range=part.value_range)


def attacked(attack: Attack, seen: Observation, part: Examples) -> tuple[str, float, float | None]:
    """What came of it in words, seconds, and megabytes."""
    memory, started = PeakMemory(), time.perf_counter()
    found = attack(seen, seed=0)
    seconds = time.perf_counter() - started
    each = psnr(found.inputs, part.x)
    labels = "" if found.labels is None else f", labels {float((found.labels == part.y).float().mean()):.0%}"
    flags = f" {list(found.flags)}" if found.flags else ""
    left = found.info.get("unexplained")
    told = "" if left is None else f", unexplained {left:.2g}"
    return (
        f"{float(each.mean()):.1f} dB (worst {float(each.min()):.1f}){labels}{told}{flags}",
        seconds,
        memory.megabytes(),
    )


def whole(title: str, part: Examples, batch: int, **how: Any) -> None:
    net = build_model("cafe-cnn", input_shape=part.shape, num_classes=part.num_classes)
    memory, started = PeakMemory(), time.perf_counter()
    seen = rounds(net, part, batch, **how)
    making, held = time.perf_counter() - started, memory.megabytes()
    words, seconds, rise = attacked(CAFE(), seen, part)
    print(
        f"{title}: {len(seen.messages)} rounds in {making:.0f} s ({held} MB), attack {seconds:.0f} s (+{rise} MB): "
        f"{words}"
    )


def small_net(part: Examples) -> nn.Module:
    return build_model(
        "cafe-cnn", input_shape=part.shape, num_classes=part.num_classes, filters=(32, 128), hidden=64, middle=32
    )


def scaling(data: Examples, sizes: list[int]) -> None:
    seconds, megabytes = [], []
    for size in sizes:
        part = data.subset(range(size))
        _, spent, rise = attacked(CAFE(), rounds(small_net(part), part, 4), part)
        seconds.append(spent)
        megabytes.append(rise or 1.0)
        print(f"  {size} samples: {spent:.1f} s, {rise} MB")
    print(f"  growth with the samples: seconds ^{growth(sizes, seconds):.2f}, memory ^{growth(sizes, megabytes):.2f}")


def moving(part: Examples) -> None:
    for lr in (0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        seen = rounds(small_net(part), part, 4, rounds=60, lr=lr)
        for name, attack in (("direct", CAFE()), ("single loop", CAFE(method="single-loop", iterations=1000))):
            words, seconds, _ = attacked(attack, seen, part)
            print(f"  lr {lr:g}, {name}: {words}, {seconds:.0f} s")


def defended(part: Examples) -> None:
    net = small_net(part)
    seen = rounds(net, part, 4, rounds=60)
    print(f"  a grey picture: {float(psnr(torch.full_like(part.x, 0.5), part.x).mean()):.1f} dB")
    noise = noise_of_equal_norm(seen, torch.Generator().manual_seed(0))
    print(f"  noise in place of the rounds: {attacked(CAFE(), noise, part)[0]}")
    print(f"  no defence: {attacked(CAFE(), seen, part)[0]}")
    defenses: list[Defense] = [
        FakeGradients(),
        FakeGradients(order="magnitude"),
        DPSGD(epsilon=10.0, steps=60, sampling_rate=4 / len(part)),
        DPSGD(epsilon=1.0, steps=60, sampling_rate=4 / len(part)),
        GradientNoise(sigma=1e-4),
        GradientNoise(sigma=1e-3),
        GradientPruning(fraction=0.9),
    ]
    for defense in defenses:
        print(f"  {defense}: {attacked(CAFE(), rounds(net, part, 4, defense, rounds=60), part)[0]}")


def methods(part: Examples) -> None:
    seen = rounds(small_net(part), part, 4, rounds=60)
    attacks = {
        "direct": CAFE(),
        "nested": CAFE(method="nested", iterations=1000),
        "single loop": CAFE(method="single-loop", iterations=1000),
        **{name: CAFE.preset(name, iterations=1000) for name in ("dlg", "cosine", "sapag", "group-consistency")},
    }
    first = 0.0
    for name, attack in attacks.items():
        words, seconds, _ = attacked(attack, seen, part)
        first = first or seconds
        print(f"  {name}: {words}, {seconds / first:.1f} times the direct method's time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["cifar", "yale", "scaling", "moving", "defended", "methods"])
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--whole-rounds", type=int, help="rounds kept whole; for many samples, to save memory")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wanted = [options.only] if options.only else ["cifar", "yale", "scaling", "moving", "defended", "methods"]
    if "cifar" in wanted:
        data = load_data("cifar10", split="train", limit=FIRST + options.samples)
        part = data.subset(range(FIRST, FIRST + options.samples))
        title = f"CIFAR-10, {options.samples} samples in batches of {options.batch}"
        whole(title, part, options.batch, whole_rounds=options.whole_rounds)
    if "yale" in wanted:
        faces = load_data("yale", limit=160)
        whole("Yale faces, 160 samples in batches of 40", faces, 40, whole_rounds=options.whole_rounds)
    few = load_data("cifar10", split="train", limit=FIRST + 32).subset(range(FIRST, FIRST + 32))
    for name, run in (("moving", moving), ("defended", defended), ("methods", methods)):
        if name in wanted:
            print(f"{name}, 16 CIFAR-10 pictures in batches of 4, 60 rounds, a smaller net")
            run(few.subset(range(16)))
    if "scaling" in wanted:
        print("scaling, batches of 4, a smaller net")
        scaling(few, [8, 16, 32])


if __name__ == "__main__":
    main()
