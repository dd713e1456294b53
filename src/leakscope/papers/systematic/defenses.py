"""Tables 4, 5, 7 and 8 of "Data Reconstruction Attacks and Defenses: A Systematic Evaluation" (Liu et al.): defences.

Table 7 has the paper's attack under every defence, table 8 the same without features, table 4 both beside Robbing the
Fed and the cocktail party attack, table 5 the final training loss. Client and attacks are those of tables 3 and 6
(:mod:`leakscope.papers.systematic.attack`): the attacker of the paper does not make use of knowing the defence.

The "RMSE" of the paper is very probably the error over its own largest entry, and is compared as such, beside our true
RMSE. Noise is absolute, clipping that of the whole batch's gradient, pruning that of each tensor, dropout leaves the
other entries as they are. Not stated in the paper: rate and batch of local steps (here 1e-3 and the whole batch); all
of table 5's training but the batch size (here the best learning rate of a few, BatchNorm in train mode).
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from leakscope.attacks import CocktailParty, RobbingTheFed
from leakscope.audit.sections import DataSpec, UtilitySpec
from leakscope.audit.utility import describe_utility, make_course
from leakscope.contracts.attack import Attack
from leakscope.contracts.defense import Defense
from leakscope.contracts.protocol import Protocol
from leakscope.contracts.task import Classification
from leakscope.data import Examples
from leakscope.defenses import GradientClipping, GradientDropout, GradientNoise, GradientPruning
from leakscope.federation import FedAvg, FedSGD
from leakscope.models import build_model
from leakscope.papers.base import PaperTable, Progress, Row, examples_or_reason, measured_row, not_run
from leakscope.papers.systematic.attack import CLIENT, PAPER, PSNR, RMSE, TRUE_RMSE, run_cells, variants

LOSS = "final training loss"
LOCAL_RATE = 1e-3
_MEASURES: Mapping[str, str] = {"psnr": PSNR, "rmse_maxnorm": RMSE}
#: How the paper calls its attack without features.
_OURS, _WITHOUT = "Ours", "GradientInversion"
#: What a smoke test runs: one of each kind.
_SMOKE = ("none", "noise_0.01", "prune_0.9", "clip_4", "drop_0.5", "local_3")


@dataclass(frozen=True)
class Scale:
    batches: Mapping[int, int]
    width: int
    images: int | None
    rounds: int
    rates: tuple[float, ...]
    seeds: int
    words: str


SIZES: Mapping[str, Scale] = {
    "smoke": Scale({2: 1}, 4, 32, 4, (0.03,), 2, "one batch of 2, one defence of each kind, 3 steps, a narrow net"),
    "small": Scale(
        *({2: 2, 4: 1}, 8, 2000, 400, (0.03, 0.1), 2),
        "two batches of 2 and one of 4, a net of quarter width; trainings of 400 rounds, an eighth of the width",
    ),
    "paper": Scale(
        *({2: 25, 4: 13, 8: 7}, 64, None, 20_000, (0.003, 0.01, 0.03, 0.1), 3),
        "50 images, the published network and settings: weeks of a graphics processor",
    ),
}


@cache
def published(number: int) -> tuple[Mapping[str, str], ...]:
    path = resources.files("leakscope.papers").joinpath("published", f"systematic_table{number}.csv")
    return tuple(MappingProxyType(row) for row in csv.DictReader(path.read_text("utf-8").splitlines()))


def protection(name: str) -> tuple[Defense | None, int | None]:
    """Return the defence that a cell names, and of local steps how many.

    >>> protection("noise_0.01")[0], protection("local_3"), protection("none")
    (GradientNoise(sigma=0.01, law='gaussian'), (None, 3), (None, None))
    """
    kind, _, strength = name.partition("_")
    if kind == "none":
        return None, None
    if kind == "local":
        return None, int(strength)
    made: Mapping[str, Defense] = {
        "noise": GradientNoise(sigma=float(strength)),
        "prune": GradientPruning(fraction=min(float(strength), 0.99)),
        "drop": GradientDropout(probability=min(float(strength), 0.99)),
        "clip": GradientClipping(norm=float(strength)),
    }
    return made[kind], None


def run_table_4(scale: str, seed: int, progress: Progress | None = None) -> list[Row]:
    rows = [{**row, "measure": "rmse_maxnorm", "mean": row["rmse_maxnorm"], "spread": ""} for row in published(4)]
    return _run_attacks(rows, "", scale, seed, progress)


def attacks(scale: str) -> dict[str, Attack]:
    _, without, whole = variants(scale).values()
    rivals: dict[str, Attack] = {"Robbing The Fed": RobbingTheFed(), "CPA": CocktailParty()}
    return {_OURS: whole, _WITHOUT: without, **rivals}


def _run_attacks(
    rows: Iterable[Mapping[str, str]], attack: str, scale: str, seed: int, progress: Progress | None
) -> list[Row]:
    """Add a row for the true RMSE of each attack to the published cells of the scale."""
    cells: dict[tuple[int, str], dict[tuple[str, str], tuple[float | None, float | None]]] = defaultdict(dict)
    for row in rows:
        if scale == "smoke" and row["defence"] not in _SMOKE:
            continue
        cell, name = cells[int(row["batch"]), row["defence"]], row.get("attack", attack)
        cell[name, _MEASURES[row["measure"]]] = float(row["mean"]), float(row["spread"]) if row["spread"] else None
        cell[name, TRUE_RMSE] = None, None
    return run_cells(cells, attacks(scale), SIZES[scale].batches, scale, seed, progress, _way)


def _way(batch: int, defence: str) -> tuple[Protocol, Defense | None]:
    defense, steps = protection(defence)
    local = None if steps is None else FedAvg(epochs=steps, batch_size=batch, lr=LOCAL_RATE, batchnorm="eval")
    return local or CLIENT, defense


def run_table_5(scale: str, seed: int, progress: Progress | None = None) -> list[Row]:
    size = SIZES[scale]
    rows = [row for row in published(5) if int(row["batch"]) in size.batches]
    rows = [row for row in rows if scale != "smoke" or row["defence"] in _SMOKE]
    examples = examples_or_reason("cifar10", split="train", limit=size.images)
    if isinstance(examples, str):
        return [not_run(_place(row), LOSS, float(row["final_training_loss"]), examples) for row in rows]
    measured = []
    for number, row in enumerate(rows):
        measured.append(_loss_row(row, examples, size, seed))
        if progress is not None:
            progress(number + 1, len(rows), math.inf if measured[-1].measured is None else measured[-1].measured)
    return measured


def _loss_row(row: Mapping[str, str], examples: Examples, size: Scale, seed: int) -> Row:
    batch, number = int(row["batch"]), float(row["final_training_loss"])
    spec = UtilitySpec(rounds=size.rounds, batch_size=batch, learning_rates=list(size.rates))
    net = build_model("resnet18", seed=seed, width=size.width)
    course = make_course(spec, DataSpec(name="cifar10"), examples, net, "", "")
    defense, _ = protection(row["defence"])
    told = [
        describe_utility(course, FedSGD(batchnorm="train"), defense, Classification(), seed + draw)
        for draw in range(size.seeds)
    ]
    rates = ", ".join(sorted({f"{one['learning_rate']:g}" for one in told}))
    note = f"{size.rounds} rounds on {len(course.train)} images, learning rate {rates} of {len(size.rates)}"
    if any(one["diverged"] for one in told):
        return Row(_place(row), LOSS, number, None, None, len(told), "above", f"the training broke down; {note}")
    return measured_row(_place(row), LOSS, number, [one["loss"] for one in told], note)


def _place(row: Mapping[str, str]) -> str:
    return f"B={row['batch']}, {row['defence']}"


_WORDS = {name: size.words for name, size in SIZES.items()}
TABLES = (
    PaperTable(
        "systematic/table4",
        run_table_4,
        "four attacks under noise, pruning, clipping and dropout of gradients, batches of 2 to 8",
        PAPER,
        title="The strongest of four attacks under each defence",
        scales=_WORDS,
    ),
    PaperTable(
        "systematic/table5",
        run_table_5,
        "what the same defences cost: the training loss at the end",
        PAPER,
        title="Final training loss under each defence",
        scales=_WORDS,
    ),
    PaperTable(
        "systematic/table7",
        lambda scale, seed, progress: _run_attacks(published(7), _OURS, scale, seed, progress),
        "PSNR and RMSE of the drawing attack with features under each defence, local steps included",
        PAPER,
        title="The whole attack under each defence",
        scales=_WORDS,
    ),
    PaperTable(
        "systematic/table8",
        lambda scale, seed, progress: _run_attacks(published(8), _WITHOUT, scale, seed, progress),
        "the same without features",
        PAPER,
        title="The attack without features under each defence",
        scales=_WORDS,
    ),
)
