"""Tables 3 to 8 of "Data Reconstruction Attacks and Defenses: A Systematic Evaluation" (Liu et al.): batches.

A client sends the gradient of B CIFAR-10 images on a ResNet-18 with one more dense layer, trained for one epoch, in
evaluation mode; labels and BatchNorm statistics of the batch are known. Table 3 compares LPIPS with that of earlier
attacks, table 6 takes parts of the attack away, both without a defence. Table 7 has the paper's attack under every
defence, table 8 the same without features, table 4 both beside Robbing the Fed and the cocktail party attack; none of
them makes use of knowing the defence. Table 5 is the final training loss. Numbers are means over images after
assignment.

Of the paper's 50 images the selection is not stated: these are of the test split, in an order that the seed draws. Its
"RMSE" is very probably error over the largest error, see docs/measures.md, and is compared as such, under defences
beside our true RMSE; whether its LPIPS rests on VGG or AlexNet is not stated: ours is AlexNet's. At the smaller scales
the network is narrower, its dense layer has fewer units, none of them random, and a smaller network draws with fewer
steps. Noise is absolute, clipping that of the whole batch's gradient, pruning that of each tensor, dropout leaves the
other entries as they are. Not stated in the paper: rate and batch of local steps (here 1e-3 and the whole batch); all
of table 5's training but the batch size (here the best learning rate of a few, BatchNorm in train mode).
"""

import csv
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from leakscope.attacks import CocktailParty, InvertingGradients, RobbingTheFed, SystematicEvaluation
from leakscope.audit.assess import Ruler
from leakscope.audit.sections import DataSpec, UtilitySpec
from leakscope.audit.utility import describe_utility, make_course
from leakscope.contracts.attack import Attack
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.protocol import Protocol
from leakscope.contracts.tables import shipped_text
from leakscope.contracts.task import Classification
from leakscope.data import Examples, load_data
from leakscope.defenses import GradientClipping, GradientDropout, GradientNoise, GradientPruning
from leakscope.federation import CentralTraining, FedAvg, FedSGD, cached_training
from leakscope.metrics import find_lpips, load_lpips
from leakscope.metrics.perceptual import NO_WEIGHTS
from leakscope.models import build_model
from leakscope.papers import base

KNOWLEDGE = dataclasses.replace(Knowledge.malicious_server, labels="yes", batchnorm_statistics=True)
PSNR, RMSE, LPIPS = "PSNR (dB)", "RMSE over largest error", "LPIPS"
#: Without a published number: what the paper calls so is very probably another measure.
TRUE_RMSE = "RMSE"
MEASURES: Mapping[str, str] = {"psnr": PSNR, "rmse_maxnorm": RMSE, "rmse": TRUE_RMSE, "lpips": LPIPS}
CLIENT = FedSGD(batchnorm="eval")
NO_JEON = "the attack of Jeon et al. needs a generator trained on such images, which is not part of this package"
LOSS = "final training loss"
LOCAL_RATE = 1e-3
#: What a smoke test runs: one of each kind.
_SMOKE = ("none", "noise_0.01", "prune_0.9", "clip_4", "drop_0.5", "local_3")


@dataclass(frozen=True)
class Scale:
    """Size the attacked net, the images that train it, and how many batches of a size are attacked.

    ``batches`` are those of tables 3 and 6, ``defended`` those of the others. ``options`` are the attack's, ``rival``
    those of Inverting Gradients with its published settings.
    """

    width: int
    hidden: int
    training: int | None
    batches: Mapping[int, int]
    defended: Mapping[int, int]
    options: Mapping[str, Any]
    rival: Mapping[str, Any]


@dataclass(frozen=True)
class Course:
    """Size the trainings of table 5: the net, its images, rounds, learning rates and seeds."""

    width: int
    images: int | None
    rounds: int
    rates: tuple[float, ...]
    seeds: int


_CUT: dict[str, Any] = {"iterations": 3, "compile": "never"}
_COSINE = {"distance": "cosine"}
_FIFTY, _FIFTY_DEFENDED = {4: 13, 8: 7, 16: 4, 32: 2}, {2: 25, 4: 13, 8: 7}
SCALES: Mapping[str, Scale] = {
    "smoke": Scale(4, 32, 128, {4: 1, 16: 1}, {2: 1}, {**_COSINE, **_CUT}, _CUT),
    "small": Scale(16, 1024, None, {4: 2, 8: 1, 16: 1}, {2: 2, 4: 1}, _COSINE, {"iterations": 1000}),
    "paper": Scale(64, 16_384, None, _FIFTY, _FIFTY_DEFENDED, SystematicEvaluation.published("paper"), {}),
}
COURSES: Mapping[str, Course] = {
    "smoke": Course(4, 32, 4, (0.03,), 2),
    "small": Course(8, 2000, 400, (0.03, 0.1), 2),
    "paper": Course(64, None, 20_000, (0.003, 0.01, 0.03, 0.1), 3),
}


@cache
def published(number: int) -> tuple[Mapping[str, str], ...]:
    text = shipped_text("leakscope.papers", f"published/systematic_table{number}.csv")
    return tuple(MappingProxyType(row) for row in csv.DictReader(text.splitlines()))


def protection(name: str) -> tuple[Defense | None, int | None]:
    """Return the defence that a cell names, and of local steps how many.

    >>> protection("noise_0.01")[0], protection("local_3"), protection("none")
    (GradientNoise(sigma=0.01, law='gaussian'), (None, 3), (None, None))
    """
    kind, _, strength = name.partition("_")
    if kind in ("", "none"):
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


def victim(scale: str, seed: int) -> nn.Module:
    size = SCALES[scale]
    data = load_data("cifar10", split="train", limit=size.training)
    net = build_model("resnet18", seed=seed, width=size.width, hidden=size.hidden)
    return cached_training(CentralTraining(rounds=1), net, [(data.x, data.y)], seed=seed).last.eval()


def attacks(scale: str) -> dict[str, Attack]:
    """Return every attack under the names that the tables give it."""
    whole = SystematicEvaluation(**SCALES[scale].options)
    without = dataclasses.replace(whole, features="none")
    return {
        "without reweighting and features": dataclasses.replace(without, reweight=False),
        **{"without features": without, "whole": whole},
        **{"GradientInversion": without, "Ours": whole},
        "Geiping": InvertingGradients.preset("paper", **SCALES[scale].rival),
        **{"Robbing The Fed": RobbingTheFed(), "CPA": CocktailParty()},
    }


def trials(
    attack: Attack, model: nn.Module, examples: Examples, batches: tuple[int, int], seed: int, defence: str
) -> Iterator[dict[str, float]]:
    """Yield the measures of each image; ``batches`` are their size and how many."""
    size, count = batches
    defense, steps = protection(defence)
    local = None if steps is None else FedAvg(epochs=steps, batch_size=size, lr=LOCAL_RATE, batchnorm="eval")
    protocol: Protocol = local or CLIENT
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).split(size)[:count]
    lpips = load_lpips() if find_lpips() is not None else None
    for number, rows in enumerate(order):
        some, draws = examples.subset(rows), torch.Generator().manual_seed(seed + number)
        sent = attack.prepare(model, some.shape)
        seen = protocol.observe(sent, some.x, some.y, defense, KNOWLEDGE, draws)
        ruler = Ruler(seen.inputs, seen.task, lpips=lpips)
        found = base.attacked(seen, attack, some.x, some.y, seed + number, ruler=ruler).evaluation
        assert found is not None
        for row in found.rows:
            yield {title: row[key] for key, title in MEASURES.items()}


def run_attacks(table: int, scale: str, seed: int, progress: base.Progress | None = None) -> list[base.Row]:
    """Measure each published cell of a table; under defences with a row for the true RMSE of each attack."""
    defended = table not in (3, 6)
    rows = [row for row in published(table) if scale != "smoke" or not defended or row["defence"] in _SMOKE]
    own = SCALES[scale].defended if defended else _sizes(rows, scale)
    batches = {batch: base.wanted(count, each=batch) for batch, count in own.items()}
    cells: dict[tuple[int, str, str], dict[str, tuple[float | None, float | None]]] = {}
    for row in rows:
        if int(row["batch"]) in batches:
            cell = cells.setdefault((int(row["batch"]), row["defence"], row["attack"]), {})
            cell[MEASURES[row["measure"]]] = float(row["mean"]), float(row["spread"]) if row["spread"] else None
            if defended:
                cell[TRUE_RMSE] = None, None
    examples = base.examples_or_reason("cifar10", split="test")
    model = None if isinstance(examples, str) else victim(scale, seed)
    hidden = set() if find_lpips() is not None else {LPIPS}
    known = attacks(scale)

    def values(batch: int, defence: str, name: str, lines: Mapping[str, base.Line]) -> Iterable[dict[str, float]] | str:
        if isinstance(examples, str) or model is None:
            return str(examples)
        images = trials(known[name], model, examples, (batch, batches[batch]), seed, defence)
        try:
            first = next(images)
        except NotApplicable as refusal:
            return f"the attack does not apply: {refusal}"
        return ({key: image[key] for key in lines} for image in chain([first], images))

    def groups() -> Iterator[base.Group]:
        for (batch, defence, name), numbers in cells.items():
            setting = ", ".join(filter(None, (f"B={batch}", defence, name)))
            cut = scale == "smoke" and isinstance(known.get(name), SystematicEvaluation | InvertingGradients)
            lines = {key: base.Line(setting, key, mean, _note(spread, cut)) for key, (mean, spread) in numbers.items()}
            if name not in known:
                yield base.Group(lines, NO_JEON)
                continue
            unseen = {key: line for key, line in lines.items() if key in hidden}
            lines = {key: line for key, line in lines.items() if key not in hidden}
            yield base.Group(unseen, NO_WEIGHTS)
            if base.selected(lines):
                yield base.Group(lines, values(batch, defence, name, lines))

    run = (batch for (batch, _, name), cell in cells.items() if name in known and set(cell) - hidden)
    return base.measured_rows(groups(), sum(batch * batches[batch] for batch in run), progress)


def _sizes(rows: Iterable[Mapping[str, str]], scale: str) -> dict[int, int]:
    there = {int(row["batch"]) for row in rows}
    sizes = {batch: count for batch, count in SCALES[scale].batches.items() if batch in there}
    return dict([next(iter(sizes.items()))]) if scale == "smoke" else sizes


def _note(spread: float | None, cut_short: bool) -> str:
    spoken = [] if spread is None else [f"published standard deviation over images {spread:g}"]
    return "; ".join([*spoken, *(["search cut short"] if cut_short else [])])


def run_table_5(scale: str, seed: int, progress: base.Progress | None = None) -> list[base.Row]:
    size = COURSES[scale]
    rows = [row for row in published(5) if int(row["batch"]) in SCALES[scale].defended]
    rows = [row for row in rows if scale != "smoke" or row["defence"] in _SMOKE]
    examples = base.examples_or_reason("cifar10", split="train", limit=size.images)
    if isinstance(examples, str):
        return [base.Line(_place(row), LOSS, float(row["final_training_loss"])).not_run(examples) for row in rows]
    measured = []
    for number, row in enumerate(rows):
        measured.append(_loss_row(row, examples, size, seed))
        if progress is not None:
            progress(number + 1, len(rows), math.inf if measured[-1].measured is None else measured[-1].measured)
    return measured


def _loss_row(row: Mapping[str, str], examples: Examples, size: Course, seed: int) -> base.Row:
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
        return base.Row(_place(row), LOSS, number, None, None, len(told), "above", f"the training broke down; {note}")
    return base.Line(_place(row), LOSS, number, note).measured([one["loss"] for one in told])


def _place(row: Mapping[str, str]) -> str:
    return f"B={row['batch']}, {row['defence']}"


_RUNS = {f"table{number}": partial(run_attacks, number) for number in (3, 6, 4, 7, 8)}
TABLES = base.paper_tables("systematic", {**_RUNS, "table5": run_table_5}, counted=_RUNS)
