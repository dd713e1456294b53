"""Certificates on networks whose update does not determine the input, and on networks whose update does.

    LEAKSCOPE_DATA=... python benchmarks/certificates.py --out certificates.jsonl

One line a run: PSNR, residual, free directions, diagnosis. A false certificate is one that holds below 80 dB. The
sixteen networks of the first part have something in front that hides directions of the input, each with ReLU and with
tanh; on these no certificate may hold. Those of the second part are determined and keep theirs. The third part has
inputs and weights that are degenerate. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakscope import __version__
from leakscope.attacks import HeadFirst
from leakscope.contracts.errors import NotApplicable
from leakscope.data import Examples, load_data
from leakscope.federation import FedSGD
from leakscope.limits import diagnose
from leakscope.metrics import evaluate
from leakscope.models.weights import load_weights
from strength_models import IMAGES, UNTRAINED, fingerprint, train, victim

#: Below this a certificate is false (dB), and the first image: no setting was chosen on those from there on.
FALSE, FIRST = 80.0, 1200
SIDE, CLASSES = 32, 10
Activation = Callable[[], nn.Module]


class PixelMask(nn.Module):
    """Set every fourth pixel of every fourth row to zero."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(1, SIDE, SIDE)
        mask[:, ::4, ::4] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def body(activation: Activation, channels: int = 3, side: int = SIDE, widths: tuple[int, ...] = (32, 64, 128)) -> Any:
    """Three convolutions and the head."""
    layers: list[nn.Module] = []
    for number, width in enumerate(widths):
        stride = 1 if number == 0 else 2
        layers += [nn.Conv2d(channels, width, 3, stride, 1), activation()]
        channels, side = width, -(-side // stride)
    return *layers, nn.Flatten(), nn.Linear(channels * side * side, CLASSES)


def kill(net: nn.Module, name: str) -> None:
    """Set two of three filters in front to zero, or the units of the second layer beyond what any input wakes.

    Training brings them back, so that it is done after it too.
    """
    layers = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    with torch.no_grad():
        if name == "dead filters":
            layers[0].weight[1:] = 0
        if name == "dead":
            assert layers[1].bias is not None
            layers[1].bias.fill_(-100.0)


HIDING: dict[str, Callable[[Activation], nn.Module]] = {
    "average pooling": lambda a: nn.Sequential(nn.AvgPool2d(2), *body(a, side=SIDE // 2)),
    "1x1, stride 2": lambda a: nn.Sequential(nn.Conv2d(3, 8, 1, 2), *body(a, 8, SIDE // 2)),
    "2x2, stride 3": lambda a: nn.Sequential(nn.Conv2d(3, 16, 2, 3), *body(a, 16, 10)),
    "3-to-1": lambda a: nn.Sequential(nn.Conv2d(3, 1, 1), *body(a, 1)),
    "dead filters": lambda a: nn.Sequential(nn.Conv2d(3, 3, 1), *body(a)),
    "pixel mask": lambda a: nn.Sequential(PixelMask(), *body(a)),
    "too few filters": lambda a: nn.Sequential(*body(a, widths=(2, 4, 8))),
    "dead": lambda a: nn.Sequential(*body(a)),
}
ACTIVATIONS: dict[str, Activation] = {"ReLU": nn.ReLU, "tanh": nn.Tanh}
DETERMINED = ("convnet", "mlp", "femnist-cnn")


@dataclass(frozen=True, eq=False)
class Run:
    """A network in a state, and the examples that its client holds."""

    part: str
    name: str
    state: str
    number: int
    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    data: Examples

    @property
    def key(self) -> str:
        return f"{self.part} | {self.name} | {self.state} | {self.number}"


def hiding_net(name: str, activation: str, state: str, cache: Path) -> nn.Module:
    """One of the sixteen, untrained or after one epoch."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        net = HIDING[name](ACTIVATIONS[activation]).eval()
    kill(net, name)
    if state != UNTRAINED:
        kept = cache / f"hiding-{fingerprint(net)}.safetensors"
        if not kept.exists():
            train(net, 1, load_data("cifar10", split="train", limit=IMAGES), lambda _: kept)
        load_weights(net, kept)
        kill(net, name)
    return net.eval()


def runs(images: int, singles: int, cache: Path) -> Iterator[Run]:
    """Every run, the most important first."""
    data = load_data("cifar10", split="test")
    for state in (UNTRAINED, "1"):
        for name in HIDING:
            for activation in ACTIVATIONS:
                for number in range(images):
                    make = partial(hiding_net, name, activation, state, cache)
                    rows = slice(FIRST + number, FIRST + number + 1)
                    yield Run("hiding", f"{name}, {activation}", state, number, make, data.x[rows], data.y[rows], data)
    for name in DETERMINED:
        own = load_data("femnist", split="test") if name == "femnist-cnn" else data
        for state in (UNTRAINED, "1"):
            for number in range(singles if name == "convnet" else images):
                rows = slice(FIRST + number, FIRST + number + 1)
                yield Run(
                    *("determined", name, state, number, partial(victim, name, state, own, cache)),
                    *(own.x[rows], own.y[rows], own),
                )
    yield from degenerate(data, cache)


def degenerate(data: Examples, cache: Path) -> Iterator[Run]:
    """Inputs that are alike, constant or out of range, and weights that saturate."""
    x, y = data.x[FIRST : FIRST + 2], data.y[FIRST : FIRST + 2]
    cases = {
        "constant": (torch.full_like(x[:1], 0.4), y[:1]),
        "black": (torch.zeros_like(x[:1]), y[:1]),
        "twins": (x[:1].repeat(2, 1, 1, 1), y[:1].repeat(2)),
        "twins, other labels": (x[:1].repeat(2, 1, 1, 1), y[:2] if y[0] != y[1] else (y[:2] + torch.tensor([0, 1]))),
        "out of range": (1.5 * x[:1] - 0.2, y[:1]),
        "saturated": (x[:1], y[:1]),
        "zero gradient": (x[:1], y[:1]),
    }
    for case, (inputs, labels) in cases.items():
        for name in ("convnet", "convnet-tanh", "mlp"):
            for state in (UNTRAINED, "1"):
                make = partial(_spoilt, partial(victim, name, state, data, cache), case, int(labels[0]))
                yield Run("degenerate", f"{case}, {name}", state, 0, make, inputs, labels % CLASSES, data)


def _spoilt(make: Callable[[], nn.Module], case: str, label: int) -> nn.Module:
    """Make the softmax certain of the label, or so certain that its gradient is zero."""
    net = make()
    head = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        if case in ("saturated", "zero gradient"):
            head.bias[label] += 8.0 if case == "saturated" else 1e3
    return net


def measure(run: Run) -> dict[str, Any]:
    """One row."""
    net = run.make()
    seen = FedSGD().observe(net, run.x, run.y, inputs=run.data.inputs)
    row = {"key": run.key, "part": run.part, "name": run.name, "state": run.state, "version": __version__}
    started = time.process_time()
    try:
        result = HeadFirst()(seen, seed=run.number)
    except (NotApplicable, ValueError) as error:
        return {**row, "refused": str(error), "psnr": [], "certificates": [], "diagnosis": None}
    seconds = time.process_time() - started
    told = diagnose(seen, result)
    unit = run.data.inputs.to_unit
    found = evaluate(unit(run.x), run.y, unit(result.inputs), result.labels, inputs=run.data.inputs)
    proofs = [result.certificates[place] if result.certificates else None for place in found.order.tolist()]
    return {
        **row,
        "psnr": [round(one["psnr"], 1) for one in found.rows],
        "certificates": [
            None if p is None else {"residual": p.residual, "free": p.free_directions, "holds": p.holds} for p in proofs
        ],
        "diagnosis": told.outcome,
        "hidden": told.hidden,
        "reason": told.reason,
        "method": result.info.get("method"),
        "seconds": round(seconds, 1),
        "diagnosis_seconds": round(time.process_time() - started - seconds, 1),
    }


def false_certificates(row: dict[str, Any]) -> int:
    """Count certificates that hold on an image below 80 dB, or on a network that determines none."""
    pairs = zip(row["psnr"], row["certificates"], strict=False)
    return sum(bool(p and p["holds"]) and (row["part"] == "hiding" or psnr < FALSE) for psnr, p in pairs)


def summary(rows: list[dict[str, Any]]) -> str:
    """The table: a line for each network."""
    lines = ["| part | network | state | PSNR | free directions | certified | false | diagnosis |", "|---" * 8 + "|"]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["part"], row["name"], row["state"]), []).append(row)
    for place, group in groups.items():
        psnr = ", ".join(f"{value:.0f}" for row in group for value in row["psnr"])
        hidden = ", ".join(str(row.get("hidden")) for row in group)
        certified = sum(bool(p and p["holds"]) for row in group for p in row["certificates"])
        outcomes = ", ".join(dict.fromkeys(str(row["diagnosis"] or "refused") for row in group))
        false = sum(map(false_certificates, group))
        lines.append(f"| {' | '.join(place)} | {psnr} | {hidden} | {certified} | {false} | {outcomes} |")
    return "\n".join([*lines, "", f"false certificates: {sum(map(false_certificates, rows))} of {len(rows)} runs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2, help="images for each network")
    parser.add_argument("--singles", type=int, default=10, help="images for the ConvNet in each state")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "leakscope-strength")
    parser.add_argument("--out", type=Path, default=Path("certificates.jsonl"))
    parser.add_argument("--only", default="", help="only runs whose key has this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.cache.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {row["key"] for row in rows}
    for run in runs(options.images, options.singles, options.cache):
        if run.key in done or options.only not in run.key:
            continue
        rows.append(measure(run))
        with options.out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(run.key, {k: rows[-1].get(k) for k in ("psnr", "certificates", "diagnosis", "seconds")}, flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
