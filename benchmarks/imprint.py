"""What Robbing the Fed recovers of CIFAR-10, beside what the calculator expects, and what defences do to it.

    python benchmarks/imprint.py draws      64 of the test images 1000 to 1999, 128 bins, 20 times
    python benchmarks/imprint.py resnet18   two of them before ResNet18
    python benchmarks/imprint.py steps      five local steps: the ReLU form and the sparse form
    python benchmarks/imprint.py defenses   noise, pruning and clipping

Needs CIFAR-10 in LEAKSCOPE_DATA. Prints tables; PSNR is that of the examples that are alone in their bin.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import leakscope as ls
from leakscope.attacks import RobbingTheFed
from leakscope.limits import imprint_guarantee
from leakscope.metrics import assign, psnr

FIRST, LAST, BATCH, DRAWS = 1000, 2000, 64, 20
EXACT = 60.0


def main() -> None:
    wanted = sys.argv[1:] or ["draws", "resnet18", "steps", "defenses"]
    data = ls.load_data("cifar10", split="test", limit=LAST)
    tables = {"draws": _draws, "resnet18": _resnet, "steps": _steps, "defenses": _defenses}
    for name in wanted:
        tables[name](data)


def _measure(
    data: Any, draw: int, model: str, attack: RobbingTheFed, protocol: Any = None, defense: Any = None
) -> dict[str, Any]:
    """One client, one attack; the truth enters after it."""
    rows = FIRST + torch.randperm(LAST - FIRST, generator=torch.Generator().manual_seed(draw))[:BATCH]
    x, y = data.x[rows], data.y[rows]
    net = ls.build_model(model, input_shape=tuple(x.shape[1:]), num_classes=10)
    sent = attack.prepare(net, tuple(x.shape[1:]))
    knowledge = ls.Knowledge.malicious_server
    draws = torch.Generator().manual_seed(draw)
    seen = (protocol or ls.FedSGD()).observe(sent, x, y, defense, knowledge, draws, inputs=data.inputs)
    result = attack(seen, seed=0)
    measured = x.flatten(1).double() @ sent.imprint.row.double()
    places = (torch.bucketize(measured, sent.imprint.edges.double()) - 1).clamp(0, attack.bins - 1)
    alone = torch.bincount(places, minlength=attack.bins)[places] == 1
    quality = psnr(x, result.inputs[assign(x, result.inputs, cost="psnr")])
    return {
        "alone": int(alone.sum()),
        "certain": result.info["alone"],
        "exact": int((quality >= EXACT).sum()),
        "lowest": float(quality[alone].min()),
        "median": float(quality[alone].median()),
        "over 20": int((quality >= 20).sum()),
        "labels": None if result.labels is None else bool((result.labels.sort().values == y.sort().values).all()),
        "seconds": result.info["seconds"],
    }


def _row(title: str, numbers: dict[str, Any]) -> None:
    cells = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in numbers.values()]
    print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


def _head(title: str) -> None:
    columns = ("alone", "certified", ">= 60 dB", "lowest alone", "median alone", ">= 20 dB", "labels", "seconds")
    print(f"\n| {title} | " + " | ".join(columns) + " |")
    print("| --- " * (len(columns) + 1) + "|", flush=True)


def _draws(data: Any) -> None:
    guarantee = imprint_guarantee(128, BATCH)
    _head(f"convnet, draw (expected {guarantee.expected:.2f}, 95 % {guarantee.interval})")
    counts = []
    for draw in range(DRAWS):
        numbers = _measure(data, draw, "convnet", RobbingTheFed())
        counts.append(numbers["alone"])
        _row(str(draw), numbers)
    low, high = guarantee.interval
    inside = sum(low <= count <= high for count in counts)
    print(f"mean {sum(counts) / DRAWS:.2f}, inside the interval: {inside} of {DRAWS}")


def _resnet(data: Any) -> None:
    _head("resnet18, draw")
    for draw in range(2):
        _row(str(draw), _measure(data, draw, "resnet18", RobbingTheFed()))


def _steps(data: Any) -> None:
    _head("convnet, local steps of 64 examples")
    for name, variant, epochs, rate, size in (
        ("1 step, relu, lr 0.01", "relu", 1, 0.01, BATCH),
        ("5 steps, relu, lr 0.01", "relu", 5, 0.01, BATCH),
        ("5 steps, sparse, lr 0.1", "sparse", 5, 0.1, BATCH),
        ("5 steps, sparse, lr 0.01", "sparse", 5, 0.01, BATCH),
        ("5 steps, sparse, lr 0.001", "sparse", 5, 0.001, BATCH),
        ("5 epochs of 8 steps, sparse, lr 0.01", "sparse", 5, 0.01, 8),
    ):
        protocol = ls.FedAvg(epochs=epochs, batch_size=size, lr=rate)
        _row(name, _measure(data, 0, "convnet", RobbingTheFed(variant=variant), protocol))


def _defenses(data: Any) -> None:
    _head("convnet, defence")
    noise, pruning, private = ls.defenses.GradientNoise, ls.defenses.GradientPruning, ls.defenses.DPSGD
    cases = [
        ("none", None),
        *((f"noise {sigma:g} an entry", noise(sigma=sigma)) for sigma in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)),
        *((f"pruning {share:.0%}", pruning(fraction=share)) for share in (0.5, 0.9)),
        *(
            (f"DP-SGD, clip 1, noise {level:g}", private(clip=1.0, noise_multiplier=level))
            for level in (0.0, 0.001, 0.01, 0.1)
        ),
    ]
    attacks = {
        "relu": RobbingTheFed(),
        "relu, gain 1e-6": RobbingTheFed(gain=1e-6),
        "sparse, gain 1e-6": RobbingTheFed(variant="sparse", gain=1e-6),
    }
    for form, attack in attacks.items():
        for name, defense in cases:
            _row(f"{form}, {name}", _measure(data, 0, "convnet", attack, defense=defense))


if __name__ == "__main__":
    main()
