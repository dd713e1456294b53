"""Tables 1, 2, 3, 6 and 7 of "Surrogate Model Extension (SME)" (Zhu, Yao, Blaschko, ICML 2023).

A client holds N images (FEMNIST: the first N of one writer; CIFAR-100: N drawn at random), trains the paper's network
from PyTorch's initial weights (the paper: JAX's) for E epochs of plain SGD with batches of B, and sends the difference
of weights; labels are known. IG (beta fixed at 0) and SME run with the published settings (``SME.preset``), "...,
defaults" and DLFA with this package's. PSNR is the mean over a client's images after assignment, in [0, 1] space;
intervals are over clients. Cells whose published number is not at hand are measured alone.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.attacks import DLFA, SME
from leakscope.audit.assess import Assessment
from leakscope.audit.findings import Subject
from leakscope.audit.keys import derived_seed
from leakscope.audit.trajectory import describe_update
from leakscope.contracts.attack import Attack
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.task import Classification
from leakscope.data import Examples, split_by_group
from leakscope.federation import FedAvg, FederatedTraining, cached_training
from leakscope.models import build_model
from leakscope.papers import base

BOXES: Mapping[str, ValueRange] = {
    "femnist": ValueRange.normalised((0.96424,), (0.15768,)),
    "cifar100": ValueRange.normalised((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}
MODELS: Mapping[str, str] = {"femnist": "femnist-cnn", "cifar100": "cifar-cnn"}
#: Every label is known, the order of visits is not.
KNOWLEDGE = dataclasses.replace(Knowledge.honest_server, labels="yes")
WRITER_IMAGES = 50
#: At the smallest scale every search is cut to so many steps: it shows that the table runs, no more.
SMOKE_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Setting:
    data: str = "femnist"
    epochs: int = 10
    examples: int = 10
    batch_size: int = 10
    model: str | None = None
    lr: float = 0.004

    def __str__(self) -> str:
        name = {"femnist": "FEMNIST", "cifar100": "CIFAR-100"}[self.data]
        return f"{name}, E={self.epochs}, N={self.examples}, B={self.batch_size}"

    @property
    def protocol(self) -> FedAvg:
        return FedAvg(epochs=self.epochs, batch_size=self.batch_size, lr=self.lr)

    def network(self, seed: int) -> nn.Module:
        return build_model(self.model or MODELS[self.data], seed=seed)


@dataclass(frozen=True, eq=False)
class Client:
    x: Tensor
    y: Tensor
    box: ValueRange
    number: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.number, 0, "client"))

    def attacked(self, observation: Observation, attack: Attack) -> Assessment:
        return base.attacked(observation, attack, self.x, self.y, self.number)


def clients(setting: Setting, count: int, seed: int, examples: Examples) -> Iterator[Client]:
    generator = torch.Generator().manual_seed(seed)
    if examples.group is not None:
        whole = [rows for rows in split_by_group(examples, limit=WRITER_IMAGES) if len(rows) >= setting.examples]
        order = torch.randperm(len(whole), generator=generator).tolist()
        parts = [whole[i][: setting.examples] for i in order[:count]]
    else:
        parts = list(torch.randperm(len(examples), generator=generator).split(setting.examples))[:count]
    box = BOXES[setting.data]
    for number, rows in enumerate(parts):
        some = examples.subset(rows)
        yield Client(box.from_unit(some.x), some.y, box, seed * 1_000_003 + number)


def observe(setting: Setting, client: Client, model: nn.Module, knowledge: Knowledge = KNOWLEDGE) -> Observation:
    return setting.protocol.observe(
        model, client.x, client.y, None, knowledge, client.generator(), value_range=client.box, model_name=setting.model
    )


def diagnosis(setting: Setting, client: Client, model: nn.Module) -> dict[str, Any]:
    """Measure how near one gradient on the segment comes to the update; see ``leakscope.limits.surrogate``."""
    private: dict[str, Any] = {"x": client.x, "y": client.y, "draws": client.generator}
    facts: dict[str, Any] = {"protocol": setting.protocol, "defense": None, "task": Classification()}
    trajectory = describe_update(Subject(observation=observe(setting, client, model), **facts, **private))
    if trajectory.get("max_cosine") is None:
        why = trajectory.get("reason", "the gradient vanishes along the segment")
        raise UserError(f"{setting}: no diagnosis: {why}")
    return trajectory


def attacks(setting: Setting, scale: str, kinds: tuple[str, ...]) -> dict[str, Attack]:
    cut: dict[str, Any] = {"iterations": SMOKE_STEPS, "compile": "never"} if scale == "smoke" else {}
    published = "paper-vit" if setting.model == "s3-vit" else "paper"
    baseline: dict[str, Any] = {"beta": 0.0, "beta_lr": 0.0}
    table: dict[str, Attack] = {
        "IG": SME.preset(published, **baseline, **cut),
        "SME": SME.preset(published, **cut),
        "IG, defaults": SME(**baseline, **cut),
        "SME, defaults": SME(**cut),
        "DLFA": DLFA(**cut),
    }
    return {kind: table[kind] for kind in kinds if kind in table}


@dataclass(frozen=True)
class Cell:
    """Put beside a setting what the paper reports for it, by measure; None where its number is not at hand.

    ``clients`` at the scales smoke, small and paper; 0 leaves the cell out. ``spread``: what the paper prints after its
    +-.
    """

    setting: Setting
    published: Mapping[str, float | None]
    clients: tuple[int, int, int] = (1, 3, 100)
    title: str = ""
    spread: float | None = None

    def count(self, scale: str) -> int:
        return self.clients[("smoke", "small", "paper").index(scale)]

    def __str__(self) -> str:
        return f"{self.title}{self.setting}"


PSNR, COSINE, SHARE, OBJECTIVE = "PSNR (dB)", "largest cosine", "smallest share in two directions", "1 - cosine"
_LARGE, _PAPER = (0, 1, 100), (0, 0, 100)
#: The first row of table 2 also gives the objective the search ended with.
_SIMILARITY = {f"IG {OBJECTIVE}": 0.044, f"SME {OBJECTIVE}": 0.019}
TABLE_1 = (
    Cell(Setting(epochs=10, examples=50, batch_size=50), {COSINE: 0.997, SHARE: 0.996}, (1, 10, 100), spread=0.002),
    Cell(Setting(epochs=20, examples=50, batch_size=10), {COSINE: None, SHARE: None}, (0, 10, 100)),
)
TABLE_2 = (
    Cell(Setting(), {"IG": 27.8, "DLFA": 24.9, "SME": 30.3, "SME, defaults": 30.3, **_SIMILARITY}, spread=0.3),
    Cell(Setting(examples=50), {"IG": None, "DLFA": 21.7, "SME": None, "SME, defaults": None}, _PAPER),
    Cell(Setting(epochs=20, examples=50), {"IG": 17.0, "SME": 21.5, "SME, defaults": 21.5}, _LARGE),
    Cell(Setting(data="cifar100"), {"IG": 26.0, "DLFA": 26.7, "SME": 28.5, "SME, defaults": 28.5}),
    Cell(Setting(data="cifar100", examples=50), {"IG": None, "DLFA": 20.3, "SME": None, "SME, defaults": None}, _PAPER),
    Cell(Setting(data="cifar100", epochs=20, examples=50), {"IG": 14.8, "SME": 21.7, "SME, defaults": 21.7}, _PAPER),
)
_ALONE: Mapping[str, None] = {"IG": None, "SME": None, "SME, defaults": None}
TABLE_7 = (
    Cell(Setting(model="s3-mlp"), _ALONE, title="MLP, "),
    Cell(Setting(model="lenet-tanh", lr=0.4), _ALONE, title="LeNet, "),
    Cell(Setting(model="resnet8"), _ALONE, title="ResNet8, "),
    Cell(Setting(model="s3-vit"), _ALONE, title="ViT, "),
)
#: Rounds in which a client is attacked, with the published largest cosine.
TABLE_6: Mapping[int, float | None] = {1: None, 5: None, 10: None, 20: 0.602}
#: Hours of 100 attacks on a V100, E=20, N=50.
TABLE_3: Mapping[str, float] = {"femnist": 0.29, "cifar100": 1.6}


def run_table_1(scale: str, seed: int, progress: base.Progress | None = None) -> list[base.Row]:
    def measure(cell: Cell, client: Client) -> dict[str, float]:
        trajectory = diagnosis(cell.setting, client, cell.setting.network(client.number))
        return {COSINE: trajectory["max_cosine"], SHARE: trajectory["share_min"]}

    return _run(TABLE_1, scale, seed, progress, measure, lambda cell, name: (str(cell), name))


def run_reconstruction(
    cells: tuple[Cell, ...], scale: str, seed: int, progress: base.Progress | None
) -> list[base.Row]:
    """Return PSNR of each attack on each cell, and 1 - cosine at the end where it is published."""

    def measure(cell: Cell, client: Client) -> dict[str, float]:
        observation = observe(cell.setting, client, cell.setting.network(client.number))
        values = {}
        for name, attack in attacks(cell.setting, scale, tuple(cell.published)).items():
            found = client.attacked(observation, attack)
            values[name] = fmean(found.psnr or ())
            if (objective := f"{name} {OBJECTIVE}") in cell.published and found.reconstruction is not None:
                values[objective] = float(found.reconstruction.info["distance"])
        return values

    def words(cell: Cell, name: str) -> tuple[str, str]:
        return f"{cell}, {name.removesuffix(OBJECTIVE).strip()}", OBJECTIVE if OBJECTIVE in name else PSNR

    return _run(cells, scale, seed, progress, measure, words)


def run_table_3(scale: str, seed: int, progress: base.Progress | None = None) -> list[base.Row]:
    """Time 100 attacks, from one attack cut to a few steps, and measure the memory that one needs."""
    steps = {"smoke": 2, "small": 10, "paper": 50}[scale]
    rows: list[base.Row] = []
    settings = [Setting(data=data, epochs=20, examples=50) for data in TABLE_3][: 1 if scale == "smoke" else None]
    for number, setting in enumerate(settings):
        examples = base.examples_or_reason(setting.data, split="train")
        if isinstance(examples, str):
            rows.append(base.Line(f"{setting}, SME", "hours for 100 attacks", TABLE_3[setting.data]).not_run(examples))
            continue
        client = next(clients(setting, 1, seed, examples))
        # Short searches for the visiting order are no steps of the attack that is timed, so the order is given.
        told = dataclasses.replace(KNOWLEDGE, batch_order=True)
        observation = observe(setting, client, setting.network(client.number), told)
        table: dict[str, SME | DLFA] = {
            "IG": SME.preset("paper-ig", iterations=steps, compile="never"),
            "SME": SME.preset("paper", iterations=steps, compile="never"),
            "DLFA": DLFA(iterations=max(1, steps // 10), compile="never"),
        }
        for name, attack in table.items():
            found = base.attacked(observation, attack, client.x, client.y, seed)
            each = found.reconstruction.info["seconds"] / attack.iterations if found.reconstruction else math.nan
            whole = {"DLFA": 400}.get(name, 1000)
            published = TABLE_3[setting.data] if name == "SME" else None
            title = f"{setting}, {name}"
            note = f"{each:.3f} s a step on this machine, {whole} steps; published on a V100"
            rows.append(base.Line(title, "hours for 100 attacks", published, note).measured([each * whole / 36]))
            rows.append(base.Line(title, "peak memory (MB)", None).measured([found.peak_memory_mb or 0.0]))
        if progress is not None:
            progress(number + 1, len(settings), rows[-2].measured or 0.0)
    return rows


def run_table_6(scale: str, seed: int, progress: base.Progress | None = None) -> list[base.Row]:
    """Train a model by many writers with 50 images each; then attack N images of some of them."""
    setting = Setting()
    local = Setting(examples=10 if scale == "smoke" else WRITER_IMAGES)
    rounds = [1, 2] if scale == "smoke" else list(TABLE_6)
    count = {"smoke": 1, "small": 2, "paper": 100}[scale]
    examples = base.examples_or_reason(setting.data, split="train")
    if isinstance(examples, str):
        return [base.Line(f"round {number}", COSINE, TABLE_6.get(number)).not_run(examples) for number in rounds]
    everyone = list(clients(local, 4 if scale == "smoke" else 100, seed, examples))
    each = 2 if scale == "smoke" else 10
    training = FederatedTraining(rounds=max(rounds), clients_per_round=each, protocol=local.protocol)
    people = [(c.x, c.y) for c in everyone]
    trained = cached_training(training, setting.network(seed), people, seed=seed, at=rounds)

    def measure(model: nn.Module, client: Client) -> dict[str, float]:
        table = attacks(setting, scale, ("IG", "SME", "SME, defaults"))
        observation = observe(setting, client, model)
        psnrs = {name: fmean(client.attacked(observation, attack).psnr or ()) for name, attack in table.items()}
        return {COSINE: diagnosis(setting, client, model)["max_cosine"], **psnrs}

    def group(number: int) -> base.Group:
        lines = {name: base.Line(f"round {number}, {name}", PSNR, None) for name in ("IG", "SME", "SME, defaults")}
        lines[COSINE] = base.Line(f"round {number}", COSINE, TABLE_6.get(number), str(setting))
        people = clients(setting, count, seed, examples)
        return base.Group(lines, map(partial(measure, trained.models[number]), people), main=COSINE)

    return base.measured_rows(map(group, rounds), len(rounds) * count, progress)


def _run(
    cells: tuple[Cell, ...],
    scale: str,
    seed: int,
    progress: base.Progress | None,
    measure: Callable[[Cell, Client], dict[str, float]],
    words: Callable[[Cell, str], tuple[str, str]],
) -> list[base.Row]:
    """``measure`` every client of every cell; one row a cell and name."""

    def group(cell: Cell) -> base.Group:
        examples = base.examples_or_reason(cell.setting.data, split="train")
        people = [] if isinstance(examples, str) else list(clients(cell.setting, cell.count(scale), seed, examples))
        note = f"{len(people)} of {cell.clients[-1]} clients{', search cut short' if scale == 'smoke' else ''}"
        lines = {
            name: base.Line(*words(cell, name), value, note, None if OBJECTIVE in name else cell.spread)
            for name, value in cell.published.items()
        }
        trials = examples if isinstance(examples, str) else map(partial(measure, cell), people)
        return base.Group(lines, trials)

    runnable = [cell for cell in cells if cell.count(scale)]
    return base.measured_rows(map(group, runnable), sum(cell.count(scale) for cell in runnable), progress)


TABLES = base.paper_tables(
    "sme",
    {
        **{"table1": run_table_1, "table3": run_table_3, "table6": run_table_6},
        "table2": partial(run_reconstruction, TABLE_2),
        "table7": partial(run_reconstruction, TABLE_7),
    },
)
