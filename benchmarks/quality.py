"""Quality of the attacks with their default settings on real pictures (LEAKSCOPE_DATA must point at the data sets).

python benchmarks/quality.py [--only dlg|ig|ig4|paper] [--first 100] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from leakscope.attacks import DLG, InvertingGradients
from leakscope.contracts.attack import Attack
from leakscope.data import Examples, load_data
from leakscope.federation import FedSGD
from leakscope.metrics import evaluate
from leakscope.models import build_model


def measure(title: str, attack: Attack, model: str, data: Examples, batch: int, batches: int, first: int) -> None:
    net = build_model(model, input_shape=tuple(data.x.shape[1:]), num_classes=data.num_classes)
    found: list[float] = []
    right = converged_right = converged = 0
    started = time.perf_counter()
    for number in range(batches):
        part = data.subset(range(first + number * batch, first + (number + 1) * batch))
        seen = FedSGD().observe(net, part.x, part.y, value_range=part.value_range)
        result = attack(seen, seed=number)
        assert result.labels is not None
        unit = part.value_range.to_unit
        rows = evaluate(unit(part.x), part.y, unit(result.inputs), result.labels).rows
        found += [row["psnr"] for row in rows]
        labels = sorted(result.labels.tolist()) == sorted(part.y.tolist())
        right += labels
        if "did not converge" not in result.flags:
            converged += 1
            converged_right += labels
    print(f"{title}: median {statistics.median(found):.1f} dB, lowest {min(found):.1f}, highest {max(found):.1f}")
    print(f"    labels right {right}/{batches}; where converged {converged_right}/{converged}; ", end="")
    print(f"{(time.perf_counter() - started) / batches:.1f} s a batch; {attack!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["dlg", "ig", "ig4", "paper"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--first", type=int, default=100, help="first image; defaults were chosen on images below 40")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cifar10, cifar100 = load_data("cifar10", split="test", limit=200), load_data("cifar100", split="test", limit=200)
    tasks = {
        "dlg": ("DLG, its LeNet, CIFAR-100, one image", DLG(), "dlg-lenet", cifar100, 1, 10),
        "ig": (
            "Inverting Gradients, ConvNet, CIFAR-10, one image",
            InvertingGradients(),
            "convnet",
            cifar10,
            1,
            10,
        ),
        "ig4": (
            "Inverting Gradients, ConvNet, CIFAR-10, four images",
            InvertingGradients(),
            "convnet",
            cifar10,
            4,
            10,
        ),
        "paper": (
            "Inverting Gradients with the published objective and steps, cut to 300",
            InvertingGradients.preset("paper", iterations=300),
            "convnet",
            cifar10,
            1,
            10,
        ),
    }
    for name, task in tasks.items():
        if options.only in (None, name):
            measure(*task, options.first)


if __name__ == "__main__":
    main()
