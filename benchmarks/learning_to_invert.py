"""Learning to Invert beside the attacks that match gradients, under defences that all of them know.

    python benchmarks/learning_to_invert.py                          the table of docs/learning-to-invert.md
    python benchmarks/learning_to_invert.py --defenses sign --attacks learning-to-invert --images 2

One image a client, FedSGD, the LeNet of Deep Leakage from Gradients as it is initialised, MNIST. The adversary
(``informed_server``) knows the defence and has the training split; images are of the test split from ``--first`` on:
settings were chosen on those before number 100. Matching attacks are given the defence's channel where it has one.
Needs MNIST in LEAKSCOPE_DATA. PSNR in dB, mean and lowest to highest.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import leakscope as ls
from leakscope.attacks import make_attack
from leakscope.attacks.shared_work import SharedWork
from leakscope.contracts.defense import Defense
from leakscope.metrics import psnr

ATTACKS = ("learning-to-invert", "inverting-gradients", "head-first", "idlg", "dlg")


DEFENSES: dict[str, Defense] = {
    "none": Defense(),
    "sign": ls.defenses.GradientQuantisation(values="sign"),
    "pruning 0.9": ls.defenses.GradientPruning(fraction=0.9),
    "pruning 0.99": ls.defenses.GradientPruning(fraction=0.99),
    "noise 0.01": ls.defenses.GradientNoise(sigma=0.01),
    "noise 0.1": ls.defenses.GradientNoise(sigma=0.1),
}


def measure(
    model: nn.Module, attack: ls.Attack, defense: Defense, data: ls.Examples, others: ls.Examples, places: range
) -> tuple[list[float], float]:
    """The PSNR of each image, and CPU seconds for all of them."""
    started, found, shared = time.process_time(), [], SharedWork()
    for place in places:
        x, y = data.x[place : place + 1], data.y[place : place + 1]
        draws = torch.Generator().manual_seed(place)
        seen = ls.FedSGD().observe(
            model, x, y, defense, ls.Knowledge.informed_server, draws, auxiliary=(others.x, others.y)
        )
        inputs = attack(seen.with_facts(shared=shared), seed=place).inputs
        found.append(float(psnr(x, inputs.clamp(0, 1)).mean()))
    return found, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defenses", default=",".join(DEFENSES), help="some of them, with commas")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="some of them, with commas")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--first", type=int, default=1000, help="the number of the first image in the test split")
    asked = parser.parse_args()
    others, data = ls.load_data("mnist", split="train"), ls.load_data("mnist", split="test")
    model = ls.build_model("dlg-lenet", input_shape=(1, 28, 28), num_classes=10, seed=0)
    places = range(asked.first, asked.first + asked.images)
    mean = others.x.mean(0, keepdim=True)
    prior = [float(psnr(data.x[place : place + 1], mean).mean()) for place in places]
    print(f"{asked.images} images; the mean of the adversary's examples: {statistics.mean(prior):.1f} dB", flush=True)
    print("| defence | attack | mean | lowest to highest | CPU seconds for all |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for name in asked.defenses.split(","):
        for attack in asked.attacks.split(","):
            values, seconds = measure(model, make_attack(attack), DEFENSES[name], data, others, places)
            spread = f"{min(values):.1f} to {max(values):.1f}"
            print(f"| {name} | {attack} | {statistics.mean(values):.1f} | {spread} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
