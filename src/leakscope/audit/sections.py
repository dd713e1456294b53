"""Sections of a spec: model, data and training, each with its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from leakscope.contracts.caps import COUNT


class Strict(BaseModel):
    """A part of a spec: every key is known, and nothing changes once it is checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)


def key(help: str, default: Any = ..., **bounds: Any) -> Any:
    """A key of a spec: its one sentence, which the help and the docs show, its default (none: required) and bounds."""
    return Field(default, description=help, **bounds)


class ModelSpec(Strict):
    name: str = key("a [reference model](models-and-data.md#models) or `package.module:factory`")
    options: dict[str, Any] = key("the model's own options", {})
    seed: int = key("seed of the initial weights", 0, ge=-(2**63), lt=2**63)
    weights: Path | None = key(
        "a `.safetensors` or `.pt` file of the state dictionary, loaded over the initial weights", None
    )
    instance: Any = Field(default=None, exclude=True, repr=False)


class DataSpec(Strict):
    name: str = key("a [data set](models-and-data.md#data) or `package.module:function`")
    path: Path | None = key("where the files are; default: the folder `LEAKSCOPE_DATA`", None)
    split: str | None = key("a split, where the reader has them", None)
    limit: int | None = key("use only the first so many examples; also shrinks the pool for identification", None, ge=1)
    options: dict[str, Any] = key("the reader's own options", {})
    mean: tuple[float, ...] | None = key(
        "with `std`: normalise (unit value − mean) / std, one number a channel or one for all", None
    )
    std: tuple[float, ...] | None = key("see `mean`", None)
    instance: Any = Field(default=None, exclude=True, repr=False)


class TrainingSpec(Strict):
    """Federated training on the audit's data before the audit: the model is attacked as it is in round ``rounds``."""

    rounds: int = key("the model is attacked as a client receives it in this round; 1 is the initial model", ge=1)
    split: Literal["group", "dirichlet", "iid"] = key(
        "how the data is divided: at random, with label shares from a Dirichlet, or a client a group", "iid"
    )
    clients: int | None = key("how many clients; required with `iid` and `dirichlet`, not for `group`", None, ge=1)
    alpha: float | None = key(
        "with `dirichlet`, and required there: the smaller, the fewer clients share a class", None, gt=0
    )
    clients_per_round: int = key(
        "clients that the server draws each round; all of them where there are fewer", 10, ge=1
    )
    epochs: int = key("local epochs, as in [FedAvg](protocols-and-defenses.md)", 1, ge=1)
    batch_size: int = key("size of the local batches", 10, ge=1)
    lr: float = key("local learning rate of SGD", 0.01, gt=0)
    seed: int = key("seed of the split, of the server's draws and of the order of local batches", 0, ge=0, lt=2**63)

    def describe(self) -> str:
        """In one line, for reports.

        >>> TrainingSpec(rounds=5, clients=20).describe()
        'round 5; 20 clients, split iid, 10 a round; epochs 1, batch size 10, learning rate 0.01; seed 0'
        """
        clients = "one client a group" if self.clients is None else f"{self.clients} clients"
        split = self.split if self.alpha is None else f"{self.split} with alpha {self.alpha:g}"
        drawn = f"{clients}, split {split}, {self.clients_per_round} a round"
        local = f"epochs {self.epochs}, batch size {self.batch_size}, learning rate {self.lr:g}"
        return f"round {self.rounds}; {drawn}; {local}; seed {self.seed}"


def whole_training(training: TrainingSpec | None) -> TrainingSpec | None:
    """The training itself; ValueError with what is wrong between its keys."""
    if training is None:
        return None
    names = ("rounds", "clients", "clients_per_round", "epochs", "batch_size")
    counts = {name: getattr(training, name) for name in names}
    problems = [f"{name}: {problem}" for name, count in counts.items() if (problem := COUNT.problem(count or 0))]
    if training.split == "group" and training.clients is not None:
        problems.append(
            f"clients: expected none with split group, where each group is a client, got {training.clients}"
        )
    if training.split != "group" and training.clients is None:
        problems.append(f"clients: expected how many with split {training.split}, got nothing")
    if training.split == "dirichlet" and training.alpha is None:
        problems.append("alpha: expected a number with split dirichlet, got nothing")
    if training.split != "dirichlet" and training.alpha is not None:
        problems.append(f"alpha: expected with split dirichlet only, got {training.alpha}")
    if problems:
        raise ValueError("\n".join(problems))
    return training
