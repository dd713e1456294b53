"""Table 3 of Chen and Campbell: how well R-GAP and Hybrid recover one CIFAR-10 image from small tanh networks.

"Analysing Training-Data Leakage from Gradients through Linear Systems and Gradient Matching", BMVC 2022. One image,
one gradient, the label known; pixels minus 0.5 as the network reads them, the mean squared error of pixels in [0, 1]
without clipping, so lower is better for the attacker. The paper means over two images; its PSNR takes 255 for the
peak of pixels in [0, 1] and says nothing beyond the error, so it is left out.

Weights are PyTorch's initial ones, drawn anew for each image. The pre-trained networks saw two classes; the paper's
recipe is not known, so ours is in ``TRAINING``: airplanes and cars, one client, plain SGD. Which networks the two
published numbers of pre-trained ones belong to is not certain either, nor which of two networks is CNN4 V2.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from leakscope.attacks.hybrid import Hybrid
from leakscope.attacks.rgap import RGAP
from leakscope.contracts.attack import Attack
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.data import Examples, load_data
from leakscope.federation import FedAvg, FederatedTraining, FedSGD, cached_training
from leakscope.models import build_model
from leakscope.papers import base

MEASURE = "MSE, lower is better for the attacker"
BOX = ValueRange(low=(-0.5,), high=(0.5,))
KNOWLEDGE = dataclasses.replace(Knowledge.honest_server, labels="yes")
#: Half of the last printed digit.
ROUNDING = 5e-5
#: Classes that the pre-trained networks saw, and how.
CLASSES = (0, 1)
TRAINING = FederatedTraining(rounds=1, clients_per_round=1, protocol=FedAvg(epochs=5, batch_size=50, lr=0.05))
SMOKE_TRAINING = FederatedTraining(rounds=1, clients_per_round=1, protocol=FedAvg(epochs=1, batch_size=50, lr=0.05))
SMOKE_IMAGES = 1000
SMOKE_STEPS = 3
METHODS = ("R-GAP", "Hybrid", "Hybrid, defaults")


@dataclass(frozen=True)
class Cell:
    title: str
    model: str
    published: Mapping[str, float | None]
    pretrained: bool = False
    note: str = ""

    def __str__(self) -> str:
        return f"{self.title}{', pre-trained' if self.pretrained else ''}"


@dataclass(frozen=True)
class Scale:
    """Count images a network; ``published``: Hybrid runs with its published settings too, minutes an image."""

    images: int
    published: bool


SCALES: Mapping[str, Scale] = {"smoke": Scale(1, True), "small": Scale(2, False), "paper": Scale(10, True)}
_EITHER = "which of two networks is CNN4 V2 is not certain"
_BELONGS = "which network the number belongs to is not certain"
CELLS = (
    Cell("CNN2 V1", "cnn2-c1", {"R-GAP": 0.0, "Hybrid": 0.0008}),
    Cell("CNN2 V2", "cnn2-c2", {"R-GAP": 0.0346, "Hybrid": 0.0051}),
    Cell("CNN3 V1", "cnn3-c1", {"R-GAP": 0.0531, "Hybrid": 0.0478}),
    Cell("CNN3 V2", "cnn3-c2", {"R-GAP": None, "Hybrid": 0.0322}),
    Cell("CNN3 V3", "cnn3-c3", {"R-GAP": 0.0, "Hybrid": 0.0020}),
    Cell("CNN3 V4", "cnn3-c4", {"R-GAP": None, "Hybrid": 0.0417}),
    Cell("CNN4 V1", "cnn4-c1", {"R-GAP": 0.0547, "Hybrid": 0.0610}),
    Cell("CNN4 V2 as cnn4-c2", "cnn4-c2", {"R-GAP": None, "Hybrid": 0.0139}, note=_EITHER),
    Cell("CNN4 V2 as cnn4-c3", "cnn4-c3", {"R-GAP": None, "Hybrid": 0.0139}, note=_EITHER),
    Cell("CNN4 V1", "cnn4-c1", {"R-GAP": None, "Hybrid": 0.3449}, pretrained=True, note=_BELONGS),
    Cell("CNN4 V2 as cnn4-c2", "cnn4-c2", {"R-GAP": None, "Hybrid": 0.0288}, pretrained=True, note=_BELONGS),
)


def attacks(scale: str) -> dict[str, Attack]:
    cut: dict[str, Any] = {"iterations": SMOKE_STEPS} if scale == "smoke" else {}
    table: dict[str, Attack] = {
        "R-GAP": RGAP(ranks=False),
        "Hybrid": Hybrid.preset("paper", **cut),
        "Hybrid, defaults": Hybrid(**cut),
    }
    return {name: table[name] for name in METHODS if SCALES[scale].published or name != "Hybrid"}


def run(scale: str, seed: int, progress: base.Progress | None = None) -> list[base.Row]:
    table, count = attacks(scale), base.wanted(SCALES[scale].images)
    examples = base.examples_or_reason("cifar10", split="test")

    def trials(cell: Cell, examples: Examples) -> Iterator[dict[str, float]]:
        trained = pretrained(cell.model, scale, seed) if cell.pretrained else None
        for number, index in enumerate(_order(examples, cell, seed)[:count]):
            # Weights of different trials and different seeds are all different.
            trial = seed * 1_000_003 + number
            model, example = trained or _network(cell.model, trial), examples.subset([index])
            yield {name: error(attack, model, example, trial) for name, attack in table.items()}

    def groups() -> Iterator[base.Group]:
        for cell in CELLS:
            # The defaults stand beside the published settings' number.
            published = {name: cell.published[name.removesuffix(", defaults")] for name in table}
            lines = {
                name: base.Line(
                    f"{cell}, {name}", MEASURE, value, _note(cell, scale), max(ROUNDING, base.TOLERANCE * (value or 0))
                )
                for name, value in published.items()
            }
            yield base.Group(
                lines, examples if isinstance(examples, str) else trials(cell, examples), "Hybrid, defaults"
            )

    return base.measured_rows(groups(), count * len(CELLS), progress)


def error(attack: Attack, model: nn.Module, example: Examples, seed: int) -> float:
    """Return the mean squared error of one image in [0, 1], not clipped."""
    x = BOX.from_unit(example.x)
    observation = FedSGD().observe(
        model, x, example.y, None, KNOWLEDGE, value_range=BOX, num_classes=example.num_classes
    )
    guess = BOX.to_unit(base.recovered(base.attacked(observation, attack, x, example.y, seed)))
    return float((guess - example.x).square().mean())


def pretrained(name: str, scale: str, seed: int) -> nn.Module:
    examples = load_data("cifar10", split="train", limit=SMOKE_IMAGES if scale == "smoke" else None)
    some = examples.subset([index for index, label in enumerate(examples.y.tolist()) if label in CLASSES])
    training = SMOKE_TRAINING if scale == "smoke" else TRAINING
    return cached_training(training, _network(name, seed), [(BOX.from_unit(some.x), some.y)], seed=seed, at=[2]).last


def _network(name: str, seed: int) -> nn.Module:
    return build_model(name, input_shape=(3, 32, 32), num_classes=10, seed=seed)


def _order(examples: Examples, cell: Cell, seed: int) -> list[int]:
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    return [index for index in order if not cell.pretrained or int(examples.y[index]) in CLASSES]


def _note(cell: Cell, scale: str) -> str:
    training = "our own training on two classes" if cell.pretrained else ""
    cut = "search cut short" if scale == "smoke" else ""
    return "; ".join(
        filter(None, (f"{base.wanted(SCALES[scale].images)} images, the paper has 2", training, cell.note, cut))
    )


TABLES = base.paper_tables("hybrid", {"table3": run}, SCALES, counted=("table3",))
