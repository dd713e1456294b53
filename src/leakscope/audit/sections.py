"""Sections of a spec: model, data, training and utility, each with its keys."""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from leakscope.audit.parts import Part
from leakscope.contracts.checks import COUNT, JOBS, brief
from leakscope.contracts.errors import UserError
from leakscope.contracts.registry import find_name, import_object

#: Seconds that a budget or a timeout may have.
LONGEST = 10**7
_SPAN = re.compile(r"(?:(?P<h>[\d.]+)h)?(?:(?P<m>[\d.]+)m)?(?:(?P<s>[\d.]+)s?)?")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}


class Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False, validate_default=True
    )


def key(help: str, default: Any = ..., **bounds: Any) -> Any:
    """Declare a key of a spec: its sentence in help and docs, its default (none: required) and bounds."""
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
    skip: int = key("leave out the first so many examples", 0, ge=0)
    limit: int | None = key(
        "use only the first so many examples behind `skip`; also shrinks the pool for identification", None, ge=1
    )
    options: dict[str, Any] = key("the reader's own options", {})
    mean: tuple[float, ...] | None = key(
        "with `std`: normalise (unit value − mean) / std, one number a channel or one for all", None
    )
    std: tuple[float, ...] | None = key("see `mean`", None)
    instance: Any = Field(default=None, exclude=True, repr=False)


def _named(value: Any, kind: type[Strict], in_memory: Callable[[Any], Any]) -> Any:
    """Take a name, a mapping, or an object from Python; in a file the key "instance" is a mistake like any other."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and "instance" in value:
        raise UserError("unknown key 'instance'")
    return value if value is None or isinstance(value, Mapping | kind) else in_memory(value)


def _own_model(value: Any) -> ModelSpec:
    from torch import nn

    if not isinstance(value, nn.Module):
        raise UserError(f"expected a name, a mapping or a torch.nn.Module, got {type(value).__name__}")
    return ModelSpec(name=type(value).__name__, instance=value)


def _own_data(value: Any) -> DataSpec:
    from leakscope.data import from_object

    examples = from_object(value)
    return DataSpec(name=examples.name, instance=examples)


def _found(section: Any, table: Iterable[str], load: Callable[[], Any]) -> Any:
    """Complete the name of a section; code is loaded now, while it is known who named it."""
    if section.instance is not None:
        return section
    if ":" in section.name:
        load()
        return section
    return section.model_copy(update={"name": find_name(section.name, list(table))})


def _model_name(model: ModelSpec) -> Any:
    from leakscope.models import MODELS, model_factory

    return _found(model, MODELS, lambda: model_factory(model.name, model.seed))


def _data_name(data: DataSpec | None) -> Any:
    if data is None:
        return None
    from leakscope.data import DATA

    if (data.mean is None) != (data.std is None):
        raise UserError("expected both mean and std, or neither")
    return _found(data, DATA, lambda: import_object("data", data.name))


_AS_DATA = BeforeValidator(lambda value: _named(value, DataSpec, _own_data)), AfterValidator(_data_name)
ModelKey = Annotated[
    ModelSpec, BeforeValidator(lambda value: _named(value, ModelSpec, _own_model)), AfterValidator(_model_name)
]
DataKey = Annotated[DataSpec, *_AS_DATA]
_OptionalData = Annotated[DataSpec | None, *_AS_DATA]


def seed_list(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise UserError(f"expected a list of seeds or a count of at least 1, got {value}")
        JOBS.check("how many", value)
        return list(range(value))
    if isinstance(value, range | tuple | set):
        JOBS.check("how many", len(value))
        value = sorted(value) if isinstance(value, set) else list(value)
    if not isinstance(value, list) or not all(type(seed) is int and 0 <= seed < 2**63 for seed in value):
        raise UserError(f"expected whole numbers >= 0, or how many, got {brief(value)}")
    return value


def _distinct(values: list[Any]) -> list[Any]:
    if not values:
        raise UserError("expected at least one, got none")
    identities = [value.identity() if isinstance(value, Part) else repr(value) for value in values]
    twice = sorted(name for name, count in Counter(identities).items() if count > 1)
    if twice:
        raise UserError(f"expected each once, got {', '.join(twice)} more than once")
    return values


ONCE = AfterValidator(_distinct)


def _rates(rates: list[float] | None) -> list[float] | None:
    if rates is not None and (not rates or not all(rate > 0 for rate in rates)):
        raise UserError(f"expected at least one, each above 0, got {brief(rates)}")
    return rates


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
        """Describe it in one line.

        >>> TrainingSpec(rounds=5, clients=20).describe()
        'round 5; 20 clients, split iid, 10 a round; epochs 1, batch size 10, learning rate 0.01; seed 0'
        """
        clients = "one client a group" if self.clients is None else f"{self.clients} clients"
        split = self.split if self.alpha is None else f"{self.split} with alpha {self.alpha:g}"
        local = f"epochs {self.epochs}, batch size {self.batch_size}, learning rate {self.lr:g}; seed {self.seed}"
        return f"round {self.rounds}; {clients}, split {split}, {self.clients_per_round} a round; {local}"


class UtilitySpec(Strict):
    """Training under each defence, from the audit's model as it is before `training`: the same for each defence."""

    rounds: int = key("steps of the server, each by the mean of the clients' updates", 200, ge=1, le=10**7)
    clients: int = key("clients that send an update in each round; they share the training examples", 1, ge=1, le=10**6)
    batch_size: int = key("examples behind each client's update", 16, ge=1, le=10**6)
    learning_rates: Annotated[list[float] | None, AfterValidator(_rates)] = key(
        "step sizes of the server, of which the one with the lowest training loss is taken, for each defence and seed "
        "by itself; default: 0.03, 0.1 and 0.3 for gradients, 1 for weight updates",
        None,
    )
    seeds: Annotated[list[int], BeforeValidator(seed_list), ONCE] = key(
        "seeds of the order of examples and the draws of a defence; a number n means 0 to n − 1", [0, 1]
    )
    train: _OptionalData = key("the training examples, with the keys of `data`; default: the audit's data", None)
    test: _OptionalData = key(
        "the examples that accuracy is measured on, with the keys of `data`; default: held out of those for training",
        None,
    )
    test_share: float = key("the share that is held out where `test` names none", 0.2, gt=0, lt=1)
    limit: int | None = key("train on at most so many examples", None, ge=1)
    tolerance: float = key("accuracies this near to each other count as the same cost", 0.02, ge=0, le=1)

    def rates(self, kind: str) -> tuple[float, ...]:
        """Return the step sizes for what a client sends.

        >>> UtilitySpec().rates("gradient"), UtilitySpec(learning_rates=[0.5]).rates("weight_delta")
        ((0.03, 0.1, 0.3), (0.5,))
        """
        if self.learning_rates is not None:
            return tuple(self.learning_rates)
        return (0.03, 0.1, 0.3) if kind == "gradient" else (1.0,)

    def identity(self) -> dict[str, Any]:
        """Return what all trainings of a folder have in common, so that their costs can be compared."""
        return self.model_dump(include={"rounds", "clients", "batch_size", "learning_rates"})


def whole_training(training: TrainingSpec | None) -> TrainingSpec | None:
    """Return the training itself; raise UserError with what is wrong between its keys."""
    if training is None:
        return None
    split, clients, alpha = training.split, training.clients, training.alpha
    names = ("rounds", "clients", "clients_per_round", "epochs", "batch_size")
    problems = [f"{name}: {wrong}" for name in names if (wrong := COUNT.problem(getattr(training, name) or 0))]
    if split == "group" and clients is not None:
        problems.append(f"clients: expected none with split group, where each group is a client, got {clients}")
    if split != "group" and clients is None:
        problems.append(f"clients: expected how many with split {split}, got nothing")
    if split == "dirichlet" and alpha is None:
        problems.append("alpha: expected a number with split dirichlet, got nothing")
    if split != "dirichlet" and alpha is not None:
        problems.append(f"alpha: expected with split dirichlet only, got {alpha}")
    if problems:
        raise UserError("\n".join(problems))
    return training


def seconds_of(value: Any) -> float | None:
    """Read a time as people write it, in seconds.

    >>> [seconds_of(text) for text in ("90s", "10m", "1h30m", "1.5 h", "45", 600)]
    [90.0, 600.0, 5400.0, 5400.0, 45.0, 600.0]
    """
    if value is None:
        return None
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) <= LONGEST else math.nan
    elif isinstance(value, str) and (match := _SPAN.fullmatch(value.replace(" ", "").lower())):
        with contextlib.suppress(ValueError):  # two points in a number
            seconds = sum(_SECONDS[unit] * float(number) for unit, number in match.groupdict().items() if number)
    if not 0 < seconds <= LONGEST:
        expected = f"expected a time such as 90s, 10m or 1h30m, or seconds, up to {LONGEST:,} s"
        raise UserError(f"{expected}, got {brief(value)}")
    return seconds


def span(seconds: float) -> str:
    """Write a time so that it can be read again.

    >>> span(600), span(5400), span(90), span(0.5), span(3725.5)
    ('10 m', '1 h 30 m', '1 m 30 s', '0.5 s', '1 h 2 m 5.5 s')
    """
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    return " ".join(f"{number:g} {unit}" for number, unit in ((hours, "h"), (minutes, "m"), (left, "s")) if number)
