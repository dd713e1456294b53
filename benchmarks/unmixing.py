"""Batches of CIFAR-10 through a dense net 3072-1024-10: what ``cocktail-party`` and others recover of them.

    LEAKSCOPE_DATA=... python benchmarks/unmixing.py [--batches 8 32] [--starts 1000 1200] [--attacks cocktail-party]

One line a batch: mean and least PSNR, examples above 60 dB, labels, the certificate and the time. The net is untrained,
and after one epoch of Adam on 10 000 training images, which leaves about a tenth of its units alive. Test images from
``--starts`` on; images before 1000 were used for tuning.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

from leakscope.attacks import make_attack
from leakscope.contracts.errors import NotApplicable
from leakscope.data import Examples, load_data
from leakscope.federation import FedSGD
from leakscope.metrics import assign, psnr
from leakscope.metrics.perceptual import find_lpips, load_lpips
from leakscope.models import build_model

UNITS, IMAGES, BATCH, RATE = 1024, 10_000, 64, 1e-3


def victim(trained: bool) -> nn.Module:
    """The dense net, untrained or after one epoch."""
    net = build_model("mlp", input_shape=(3, 32, 32), num_classes=10, hidden=(UNITS,), seed=0)
    if trained:
        data = load_data("cifar10", split="train", limit=IMAGES)
        optimiser, draws = torch.optim.Adam(net.parameters(), RATE), torch.Generator().manual_seed(0)
        for rows in torch.randperm(len(data), generator=draws).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(net(data.x[rows]), data.y[rows]).backward()
            optimiser.step()
    return net


def measure(net: nn.Module, data: Examples, start: int, count: int, attack: str, options: dict[str, object]) -> str:
    """One line on one batch."""
    x, y = data.x[start : start + count], data.y[start : start + count]
    observation = FedSGD().observe(net, x, y)
    began = time.perf_counter()
    try:
        result = make_attack(attack, **options)(observation)
    except NotApplicable as error:
        return f"refused: {error}"
    seconds = time.perf_counter() - began
    inputs = result.inputs.clamp(0, 1)
    order = assign(x, inputs)
    matched = order >= 0
    score = psnr(x[matched], inputs[order[matched]])
    lpips = (
        "" if find_lpips() is None else f"LPIPS {float(load_lpips()(x[matched], inputs[order[matched]]).mean()):.3f}, "
    )
    labels = "none" if result.labels is None else int((result.labels[order[matched]] == y[matched]).sum())
    return (
        f"PSNR {float(score.mean()):.1f} (least {float(score.min()):.1f}), {lpips}exact {int((score > 60).sum())}, "
        f"labels {labels}, certificate {result.info.get('certificate')}, {seconds:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--starts", type=int, nargs="+", default=[1000, 1200])
    parser.add_argument("--attacks", nargs="+", default=["cocktail-party"])
    parser.add_argument("--states", nargs="+", default=["untrained", "trained"], choices=["untrained", "trained"])
    parser.add_argument("--unmix-only", action="store_true", help="leave out the solving step of cocktail-party")
    arguments = parser.parse_args()
    data = load_data("cifar10", split="test")
    for state in arguments.states:
        net = victim(state == "trained")
        for count in arguments.batches:
            for start in arguments.starts:
                for attack in arguments.attacks:
                    options = {"solve": False} if arguments.unmix_only and attack == "cocktail-party" else {}
                    line = measure(net, data, start, count, attack, options)
                    print(f"{state}, {count} images from {start}, {attack}: {line}", flush=True)


if __name__ == "__main__":
    main()
