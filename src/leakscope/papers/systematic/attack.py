"""Tables 3 and 6 of "Data Reconstruction Attacks and Defenses: A Systematic Evaluation" (Liu et al.): the attack.

A client sends the gradient of B CIFAR-10 images on a ResNet-18 with one more dense layer, trained for one epoch, in
evaluation mode; labels and BatchNorm statistics of the batch are known, nothing is defended. Table 3 compares LPIPS
with that of earlier attacks, table 6 takes parts of the attack away. Numbers are means over images after assignment.

Of the paper's 50 images the selection is not stated: these are of the test split, in an order that the seed draws. Its
"RMSE" is very probably error over the largest error, see docs/measures.md, and is compared as such; whether its LPIPS
rests on VGG or AlexNet is not stated: ours is AlexNet's. At the smaller scales the network is narrower, its dense layer
has fewer units, none of them random, and a smaller network draws with fewer steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from leakscope.attacks import InvertingGradients, SystematicEvaluation
from leakscope.audit.assess import Ruler
from leakscope.contracts.attack import Attack
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.protocol import Protocol
from leakscope.data import Examples, load_data
from leakscope.federation import CentralTraining, FedSGD, cached_training
from leakscope.metrics import find_lpips, load_lpips
from leakscope.metrics.perceptual import NO_WEIGHTS
from leakscope.models import build_model
from leakscope.papers.base import Group, Line, PaperTable, Progress, Row, attacked, examples_or_reason, measured_rows

PAPER = "Liu et al., Data Reconstruction Attacks and Defenses: A Systematic Evaluation"
KNOWLEDGE = dataclasses.replace(Knowledge.malicious_server, labels="yes", batchnorm_statistics=True)
PSNR, RMSE, LPIPS = "PSNR (dB)", "RMSE over largest error", "LPIPS"
#: Without a published number: what the paper calls so is very probably another measure.
TRUE_RMSE = "RMSE"
MEASURES: Mapping[str, str] = {PSNR: "psnr", RMSE: "rmse_maxnorm", TRUE_RMSE: "rmse", LPIPS: "lpips"}
_BARE, _REWEIGHTED, _WHOLE = "without reweighting and features", "without features", "whole"
#: By batch size, variant and measure: mean and standard deviation over images.
TABLE_6: Mapping[int, Mapping[str, Mapping[str, tuple[float, float]]]] = {
    4: {
        _BARE: {PSNR: (21.25, 6.02), RMSE: (0.16, 0.05), LPIPS: (0.12, 0.08)},
        _REWEIGHTED: {PSNR: (22.41, 5.84), RMSE: (0.16, 0.04), LPIPS: (0.09, 0.08)},
        _WHOLE: {PSNR: (23.59, 5.39), RMSE: (0.15, 0.03), LPIPS: (0.09, 0.07)},
    },
    8: {
        _BARE: {PSNR: (20.71, 5.96), RMSE: (0.18, 0.05), LPIPS: (0.15, 0.12)},
        _REWEIGHTED: {PSNR: (23.21, 5.60), RMSE: (0.16, 0.04), LPIPS: (0.11, 0.09)},
        _WHOLE: {PSNR: (23.37, 5.42), RMSE: (0.15, 0.04), LPIPS: (0.10, 0.09)},
    },
    16: {
        _BARE: {PSNR: (17.68, 5.61), RMSE: (0.21, 0.06), LPIPS: (0.24, 0.15)},
        _REWEIGHTED: {PSNR: (20.01, 5.33), RMSE: (0.18, 0.06), LPIPS: (0.16, 0.13)},
        _WHOLE: {PSNR: (21.90, 5.18), RMSE: (0.16, 0.04), LPIPS: (0.14, 0.11)},
    },
    32: {
        _BARE: {PSNR: (15.05, 4.05), RMSE: (0.23, 0.06), LPIPS: (0.30, 0.12)},
        _REWEIGHTED: {PSNR: (19.84, 5.30), RMSE: (0.18, 0.05), LPIPS: (0.18, 0.12)},
        _WHOLE: {PSNR: (20.69, 4.88), RMSE: (0.17, 0.05), LPIPS: (0.15, 0.11)},
    },
}
#: LPIPS by batch size and attack: mean and standard deviation over images.
TABLE_3: Mapping[int, Mapping[str, tuple[float, float]]] = {
    16: {"Geiping": (0.41, 0.09), "Jeon": (0.17, 0.12), "Ours": (0.14, 0.11)},
    32: {"Geiping": (0.45, 0.11), "Jeon": (0.24, 0.13), "Ours": (0.15, 0.11)},
}
#: By batch size and defence: by attack and measure the published mean and spread.
Cells = Mapping[tuple[int, str], Mapping[tuple[str, str], tuple[float | None, float | None]]]
CLIENT = FedSGD(batchnorm="eval")
NO_JEON = "the attack of Jeon et al. needs a generator trained on such images, which is not part of this package"


@dataclass(frozen=True)
class Scale:
    """Size the net, the images that train it, and how many ``batches`` of a size are attacked.

    ``options`` are the attack's, ``rival`` those of Inverting Gradients with its published settings.
    """

    width: int
    hidden: int
    training: int | None
    batches: Mapping[int, int]
    options: Mapping[str, Any]
    rival: Mapping[str, Any]
    words: str


_CUT: dict[str, Any] = {"iterations": 3, "compile": "never"}
SCALES: Mapping[str, Scale] = {
    "smoke": Scale(
        *(4, 32, 128, {4: 1, 16: 1}, {"distance": "cosine", **_CUT}, _CUT),
        "one batch of 4 or 16, a very narrow net, 3 steps",
    ),
    "small": Scale(
        *(16, 1024, None, {4: 2, 8: 1, 16: 1}, {"distance": "cosine"}, {"iterations": 1000}),
        "one or two batches up to 16, a net of quarter width, a tiny network draws",
    ),
    "paper": Scale(
        *(64, 16_384, None, {4: 13, 8: 7, 16: 4, 32: 2}, SystematicEvaluation.published("paper"), {}),
        "50 images, the published network and settings: days of a graphics processor",
    ),
}


def victim(scale: str, seed: int) -> nn.Module:
    size = SCALES[scale]
    data = load_data("cifar10", split="train", limit=size.training)
    net = build_model("resnet18", seed=seed, width=size.width, hidden=size.hidden)
    return cached_training(CentralTraining(rounds=1), net, [(data.x, data.y)], seed=seed).last.eval()


def variants(scale: str) -> dict[str, SystematicEvaluation]:
    whole = SystematicEvaluation(**SCALES[scale].options)
    without = dataclasses.replace(whole, features="none")
    return {_BARE: dataclasses.replace(without, reweight=False), _REWEIGHTED: without, _WHOLE: whole}


def trials(
    attack: Attack,
    model: nn.Module,
    examples: Examples,
    batches: tuple[int, int],
    seed: int,
    protocol: Protocol,
    defense: Defense | None,
) -> Iterator[dict[str, float]]:
    """Yield the measures of each image; ``batches`` are their size and how many."""
    size, count = batches
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).split(size)[:count]
    lpips = load_lpips() if find_lpips() is not None else None
    for number, rows in enumerate(order):
        some, draws = examples.subset(rows), torch.Generator().manual_seed(seed + number)
        sent = attack.prepare(model, some.shape)
        seen = protocol.observe(sent, some.x, some.y, defense, KNOWLEDGE, draws)
        ruler = Ruler(seen.inputs, seen.task, lpips=lpips)
        found = attacked(seen, attack, some.x, some.y, seed + number, ruler=ruler).evaluation
        assert found is not None
        for row in found.rows:
            yield {title: row[key] for title, key in MEASURES.items()}


def run_cells(
    cells: Cells,
    attacks: Mapping[str, Attack],
    batches: Mapping[int, int],
    scale: str,
    seed: int,
    progress: Progress | None,
    way: Callable[[int, str], tuple[Protocol, Defense | None]] = lambda batch, defence: (CLIENT, None),
) -> list[Row]:
    """Measure each published cell of these ``batches`` (size, how many); ``way``: protocol and defence of a cell."""
    examples = examples_or_reason("cifar10", split="test")
    model = None if isinstance(examples, str) else victim(scale, seed)
    hidden = set() if find_lpips() is not None else {LPIPS}
    runs = [
        (batch, defence, name, {measure: numbers for (attack, measure), numbers in cell.items() if attack == name})
        for (batch, defence), cell in cells.items()
        if batch in batches
        for name in dict.fromkeys(attack for attack, _ in cell)
    ]

    def values(batch: int, defence: str, name: str, lines: Mapping[str, Line]) -> Iterable[dict[str, float]] | str:
        if isinstance(examples, str) or model is None:
            return str(examples)
        place = (model, examples, (batch, batches[batch]), seed)
        images = trials(attacks[name], *place, *way(batch, defence))
        try:
            first = next(images)
        except NotApplicable as refusal:
            return f"the attack does not apply: {refusal}"
        return ({key: image[key] for key in lines} for image in chain([first], images))

    def groups() -> Iterator[Group]:
        for batch, defence, name, numbers in runs:
            setting = ", ".join(filter(None, (f"B={batch}", defence, name)))
            cut = scale == "smoke" and isinstance(attacks.get(name), SystematicEvaluation | InvertingGradients)
            lines = {key: Line(setting, key, mean, _note(spread, cut)) for key, (mean, spread) in numbers.items()}
            if name not in attacks:
                yield Group(lines, NO_JEON)
                continue
            unseen = {key: line for key, line in lines.items() if key in hidden}
            lines = {key: line for key, line in lines.items() if key not in hidden}
            yield Group(unseen, NO_WEIGHTS)
            if lines:
                yield Group(lines, values(batch, defence, name, lines))

    total = sum(batch * batches[batch] for batch, _, name, cell in runs if name in attacks and set(cell) - hidden)
    return measured_rows(groups(), total, progress)


def run_table_6(scale: str, seed: int, progress: Progress | None = None) -> list[Row]:
    cells = {
        (batch, ""): {(variant, measure): cell for variant, row in rows.items() for measure, cell in row.items()}
        for batch, rows in TABLE_6.items()
    }
    return run_cells(cells, variants(scale), _sizes(TABLE_6, scale), scale, seed, progress)


def run_table_3(scale: str, seed: int, progress: Progress | None = None) -> list[Row]:
    cells = {(batch, ""): {(name, LPIPS): cell for name, cell in row.items()} for batch, row in TABLE_3.items()}
    attacks = {
        "Geiping": InvertingGradients.preset("paper", **SCALES[scale].rival),
        "Ours": SystematicEvaluation(**SCALES[scale].options),
    }
    return run_cells(cells, attacks, _sizes(TABLE_3, scale), scale, seed, progress)


def _sizes(table: Mapping[int, Any], scale: str) -> dict[int, int]:
    sizes = {batch: count for batch, count in SCALES[scale].batches.items() if batch in table}
    return dict([next(iter(sizes.items()))]) if scale == "smoke" else sizes


def _note(spread: float | None, cut_short: bool) -> str:
    spoken = [] if spread is None else [f"published standard deviation over images {spread:g}"]
    return "; ".join([*spoken, *(["search cut short"] if cut_short else [])])


_WORDS = {name: size.words for name, size in SCALES.items()}
TABLES = (
    PaperTable(
        "systematic/table3",
        run_table_3,
        "LPIPS of the drawing attack beside Inverting Gradients, batches of 16 and 32",
        PAPER,
        title="Perceptual distance of reconstructions from batches",
        scales=_WORDS,
    ),
    PaperTable(
        "systematic/table6",
        run_table_6,
        "PSNR, RMSE and LPIPS without reweighting, without features, and whole, by batch size",
        PAPER,
        title="What reweighting and known features are worth",
        scales=_WORDS,
    ),
)
