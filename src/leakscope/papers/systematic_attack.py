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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.attacks import InvertingGradients, SystematicEvaluation
from leakscope.contracts.attack import Attack
from leakscope.contracts.defense import Defense
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.protocol import Protocol
from leakscope.data import Examples, load_data
from leakscope.federation import CentralTraining, FedSGD, cached_training
from leakscope.metrics import assign, find_lpips, load_lpips, psnr, rmse, rmse_maxnorm
from leakscope.metrics.perceptual import NO_WEIGHTS
from leakscope.models import build_model
from leakscope.papers.base import Group, Line, PaperTable, Progress, Row, examples_or_reason, measured_rows

PAPER = "Liu et al., Data Reconstruction Attacks and Defenses: A Systematic Evaluation"
KNOWLEDGE = dataclasses.replace(Knowledge.malicious_server, labels="yes", batchnorm_statistics=True)
PSNR, RMSE, LPIPS = "PSNR (dB)", "RMSE over largest error", "LPIPS"
#: Without a published number: what the paper calls so is very probably another measure.
TRUE_RMSE = "RMSE"
MEASURES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {PSNR: psnr, RMSE: rmse_maxnorm, TRUE_RMSE: rmse}
)
_BARE, _REWEIGHTED, _WHOLE = "without reweighting and features", "without features", "whole"
#: By batch size, variant and measure: mean and standard deviation over images.
TABLE_6: Mapping[int, Mapping[str, Mapping[str, tuple[float, float]]]] = MappingProxyType(
    {
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
)
#: LPIPS by batch size and attack: mean and standard deviation over images.
TABLE_3: Mapping[int, Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        16: {"Geiping": (0.41, 0.09), "Jeon": (0.17, 0.12), "Ours": (0.14, 0.11)},
        32: {"Geiping": (0.45, 0.11), "Jeon": (0.24, 0.13), "Ours": (0.15, 0.11)},
    }
)
NO_JEON = "the attack of Jeon et al. needs a generator trained on such images, which is not part of this package"


@dataclass(frozen=True)
class Scale:
    """The net's ``width`` and ``hidden`` units, images that train it, and how many ``batches`` of a size are attacked.

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
SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        "smoke": Scale(
            4,
            32,
            128,
            {4: 1, 16: 1},
            {"distance": "cosine", **_CUT},
            _CUT,
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
)


def victim(scale: str, seed: int) -> nn.Module:
    """ResNet-18 with one more dense layer after one epoch."""
    size = SCALES[scale]
    data = load_data("cifar10", split="train", limit=size.training)
    net = build_model("resnet18", seed=seed, width=size.width, hidden=size.hidden)
    return cached_training(CentralTraining(rounds=1), net, [(data.x, data.y)], seed=seed).last.eval()


def variants(scale: str) -> dict[str, SystematicEvaluation]:
    """The attack and what is left of it when parts are taken away."""
    whole = SystematicEvaluation(**SCALES[scale].options)
    without = dataclasses.replace(whole, features="none")
    return {_BARE: dataclasses.replace(without, reweight=False), _REWEIGHTED: without, _WHOLE: whole}


def trials(
    attacks: Mapping[str, Attack],
    model: nn.Module,
    examples: Examples,
    batch: int,
    count: int,
    seed: int,
    *,
    protocol: Protocol | None = None,
    defense: Defense | None = None,
) -> Iterator[dict[str, float]]:
    """One mapping an image: each attack's measures by ``attack, measure``; one gradient and no defence unless told."""
    protocol = FedSGD(batchnorm="eval") if protocol is None else protocol
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).split(batch)[:count]
    lpips = load_lpips() if find_lpips() is not None else None
    measures = dict(MEASURES) if lpips is None else {**MEASURES, LPIPS: lpips.__call__}
    for number, rows in enumerate(order):
        some = examples.subset(rows)
        columns: dict[str, list[float]] = {}
        for name, attack in attacks.items():
            sent = attack.prepare(model, some.shape)
            draws = torch.Generator().manual_seed(seed + number)
            seen = protocol.observe(sent, some.x, some.y, defense, KNOWLEDGE, draws)
            found = attack(seen, seed=seed + number).inputs.clamp(0, 1)
            found = found[assign(some.x, found)]
            columns |= {f"{name}, {title}": measure(some.x, found).tolist() for title, measure in measures.items()}
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def run_table_6(scale: str, seed: int, progress: Progress | None = None) -> list[Row]:
    """PSNR, "RMSE" and LPIPS of the attack with and without its parts."""
    published = {
        batch: {f"{variant}, {measure}": cell for variant, row in rows.items() for measure, cell in row.items()}
        for batch, rows in TABLE_6.items()
    }
    return _run(published, {}, variants(scale), scale, seed, progress)


def run_table_3(scale: str, seed: int, progress: Progress | None = None) -> list[Row]:
    """LPIPS of the attack and of Inverting Gradients."""
    published = {batch: {f"{name}, {LPIPS}": cell for name, cell in row.items()} for batch, row in TABLE_3.items()}
    attacks = {
        "Geiping": InvertingGradients.preset("paper", **SCALES[scale].rival),
        "Ours": SystematicEvaluation(**SCALES[scale].options),
    }
    return _run(published, {f"Jeon, {LPIPS}": NO_JEON}, attacks, scale, seed, progress)


def _run(
    published: Mapping[int, Mapping[str, tuple[float, float]]],
    reasons: Mapping[str, str],
    attacks: Mapping[str, Attack],
    scale: str,
    seed: int,
    progress: Progress | None,
) -> list[Row]:
    """The rows of every batch size that this scale runs; ``reasons``: why some cannot be."""
    examples = examples_or_reason("cifar10", split="test")
    model = None if isinstance(examples, str) else victim(scale, seed)
    sizes = {batch: count for batch, count in SCALES[scale].batches.items() if batch in published}
    if scale == "smoke":
        sizes = dict([next(iter(sizes.items()))])

    def groups() -> Iterator[Group]:
        for batch, count in sizes.items():
            lines = {
                key: Line(f"B={batch}, {_name(key)}", _measure(key), cell[0], _note(cell, scale))
                for key, cell in published[batch].items()
            }
            idle = {
                key: reasons.get(key, NO_WEIGHTS if _measure(key) == LPIPS and not find_lpips() else "")
                for key in lines
            }
            runs = {key: line for key, line in lines.items() if not idle[key]}
            for reason in dict.fromkeys(filter(None, idle.values())):
                some = {key: line for key, line in lines.items() if idle[key] == reason}
                yield Group(some, reason, next(iter(some)))
            if isinstance(examples, str) or model is None:
                yield Group(runs, str(examples), "")
            elif runs:
                values = map(partial(_only, runs), trials(attacks, model, examples, batch, count, seed))
                yield Group(runs, values, next(reversed(runs)))

    return measured_rows(groups(), sum(batch * count for batch, count in sizes.items()), progress)


def _only(lines: Mapping[str, Line], values: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if key in lines}


def _name(key: str) -> str:
    return key.rpartition(", ")[0]


def _measure(key: str) -> str:
    return key.rpartition(", ")[2]


def _note(cell: tuple[float, float], scale: str) -> str:
    cut = "; search cut short" if scale == "smoke" else ""
    return f"published standard deviation over images {cell[1]}{cut}"


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
