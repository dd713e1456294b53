"""What to audit, as a YAML file or a mapping says it, checked as a whole before anything runs.

Every problem is found and told in one :class:`SpecError`, a line each: where, what was expected, what got.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails

from leakscope.audit import parts
from leakscope.audit.names import find_name, folded
from leakscope.audit.parts import Part

_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class SpecError(ValueError):
    """The spec cannot be audited; ``problems`` has one line for each reason."""

    def __init__(self, problems: list[str], source: str = "audit spec") -> None:
        self.problems = list(problems)
        self.source = source
        super().__init__(f"{source}: cannot be used:\n" + "\n".join(f"  - {line}" for line in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.source)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)


class Policy(_Strict):
    """From where on a reconstruction counts as a leak; ``None`` switches a limit off.

    >>> Policy().max_psnr, Policy().min_lift
    (20.0, 3.0)
    """

    max_psnr: float = 20.0
    min_lift: float = 3.0
    max_ssim: Annotated[float, Field(ge=-1, le=1)] | None = None
    max_identification: Annotated[float, Field(ge=0, le=1)] | None = None


class ModelSpec(_Strict):
    name: str
    options: dict[str, Any] = {}
    seed: int = 0
    weights: Path | None = None
    instance: Any = Field(default=None, exclude=True, repr=False)


class DataSpec(_Strict):
    name: str
    path: Path | None = None
    split: str | None = None
    limit: Annotated[int, Field(ge=1)] | None = None
    options: dict[str, Any] = {}
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    instance: Any = Field(default=None, exclude=True, repr=False)


class TrainingSpec(_Strict):
    """Federated training on the audit's data before the audit: the model is attacked as it is in round ``rounds``."""

    rounds: Annotated[int, Field(ge=1)]
    split: Literal["group", "dirichlet", "iid"] = "iid"
    clients: Annotated[int, Field(ge=1)] | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None
    clients_per_round: Annotated[int, Field(ge=1)] = 10
    epochs: Annotated[int, Field(ge=1)] = 1
    batch_size: Annotated[int, Field(ge=1)] = 10
    lr: Annotated[float, Field(gt=0)] = 0.01
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

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


def _model(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if value is None or isinstance(value, Mapping | ModelSpec):
        return _without_instance(value)
    return ModelSpec(**parts.in_memory_model(value))


def _data(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if value is None or isinstance(value, Mapping | DataSpec):
        return _without_instance(value)
    return DataSpec(**parts.in_memory_data(value))


def _without_instance(value: Any) -> Any:
    """Objects come from Python only; in a file the word is a mistake like any other."""
    if isinstance(value, Mapping) and "instance" in value:
        raise ValueError("unknown key 'instance'")
    return value


def _known_model(model: ModelSpec) -> ModelSpec:
    if model.instance is not None or ":" in model.name:
        return model
    return model.model_copy(update={"name": find_name(model.name, parts.model_names())})


def _known_data(data: DataSpec) -> DataSpec:
    if (data.mean is None) != (data.std is None):
        raise ValueError("expected both mean and std, or neither")
    if data.instance is not None:
        return data
    return data.model_copy(update={"name": find_name(data.name, parts.data_names())})


def _whole_training(training: TrainingSpec | None) -> TrainingSpec | None:
    if training is None:
        return None
    problems = []
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


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _names(item: Any) -> bool:
    return isinstance(item, str) or (isinstance(item, dict) and len(item) == 1)


def _attacks(value: Any, info: ValidationInfo) -> Any:
    items = _listed(value)
    chosen = {folded(item if isinstance(item, str) else next(iter(item), "")) for item in items if _names(item)}
    wanted: list[Any] = []
    for item in items:
        if item == "standard":  # with settings of one's own, an attack of these is not run twice
            wanted += [name for name in parts.standard_attacks(_protocols(info)) if folded(name) not in chosen]
        else:
            wanted.append(item)
    return wanted


def _seeds(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"expected a list of seeds or a count of at least 1, got {value}")
        return list(range(value))
    if isinstance(value, range | tuple | set):
        value = sorted(value) if isinstance(value, set) else list(value)
    if not isinstance(value, list) or not all(type(seed) is int and 0 <= seed < 2**63 for seed in value):
        raise ValueError(f"expected whole numbers >= 0, or how many, got {value!r}")
    return value


def _distinct(values: list[Any]) -> list[Any]:
    if not values:
        raise ValueError("expected at least one, got none")
    told = [value.identity() if isinstance(value, Part) else repr(value) for value in values]
    twice = sorted({name for name in told if told.count(name) > 1})
    if twice:
        raise ValueError(f"expected each once, got {', '.join(twice)} more than once")
    return values


def _knowledge(value: Any, info: ValidationInfo) -> dict[str, Any]:
    return parts.knowledge_fields(parts.default_knowledge(_protocols(info)) if value is None else value)


def _protocols(info: ValidationInfo) -> list[Part]:
    """Those of the spec that is being checked; none where they are wrong, which is told anyway."""
    found: list[Part] = info.data.get("protocols", [])
    return found


def _dtype(value: str | None) -> str | None:
    return None if value is None else find_name(value.removeprefix("torch."), ["float32", "float64"])


_Positive = Annotated[int, Field(ge=1)]
_Protocol = Annotated[Part, BeforeValidator(parts.protocol_part)]
_Defense = Annotated[Part, BeforeValidator(parts.defense_part)]
_Attack = Annotated[Part, BeforeValidator(parts.attack_part)]


class AuditSpec(_Strict):
    """One audit: protocols x defences x attacks x seeds x batches, with a null control beside each attack."""

    model: Annotated[ModelSpec, BeforeValidator(_model), AfterValidator(_known_model)]
    data: Annotated[DataSpec, BeforeValidator(_data), AfterValidator(_known_data)]
    training: Annotated[TrainingSpec | None, AfterValidator(_whole_training)] = None
    examples: _Positive | None = None
    batch: _Positive = 1
    protocols: Annotated[list[_Protocol], BeforeValidator(_listed), AfterValidator(_distinct)] = Field(
        default_factory=lambda: ["fedsgd"], validate_default=True
    )
    defenses: Annotated[list[_Defense], BeforeValidator(_listed), AfterValidator(_distinct)] = Field(
        default_factory=lambda: ["none"], validate_default=True
    )
    attacks: Annotated[list[_Attack], BeforeValidator(_attacks), AfterValidator(_distinct)] = Field(
        default_factory=lambda: ["standard"], validate_default=True
    )
    knowledge: Annotated[dict[str, Any], BeforeValidator(_knowledge)] = Field(default=None, validate_default=True)
    seeds: Annotated[list[int], BeforeValidator(_seeds), AfterValidator(_distinct)] = [0]
    policy: Policy = Policy()
    pictures: bool | None = None
    controls: bool = True
    lpips: Path | None = None
    device: str = "cpu"
    dtype: Annotated[str | None, AfterValidator(_dtype)] = None
    threads: _Positive = 1
    executor: Literal["serial", "processes"] = "serial"
    workers: _Positive | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    @classmethod
    def parse(cls, mapping: Any, source: str = "audit spec") -> AuditSpec:
        """The checked spec of ``mapping``; SpecError with every problem otherwise."""
        if isinstance(mapping, AuditSpec):
            return mapping
        if not isinstance(mapping, Mapping):
            raise SpecError([f"expected a mapping of settings, got {type(mapping).__name__}"], source)
        problems = _across(mapping)
        try:
            spec = cls.model_validate(dict(mapping))
        except ValidationError as error:
            found = [_line(entry) for entry in error.errors(include_url=False)]
            # The lines tell everything; the library's own account would only bury them.
            raise SpecError(found + problems, source) from None
        if problems:
            raise SpecError(problems, source)
        return spec

    def normalised(self) -> dict[str, Any]:
        """The whole spec as plain JSON values; objects are told by name and settings."""
        return self.model_dump(mode="json")


def load_spec(source: AuditSpec | Mapping[str, Any] | str | os.PathLike[str]) -> AuditSpec:
    """The spec in a YAML file (or in a mapping); SpecError if it cannot be read or is wrong."""
    if isinstance(source, Mapping | AuditSpec):
        return AuditSpec.parse(source)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([f"cannot be read: {error}"], str(path)) from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str = "audit spec") -> AuditSpec:
    """The spec in ``text``."""
    return AuditSpec.parse(read_yaml(text, source), source)


def read_yaml(text: str, source: str = "audit spec") -> Any:
    """What ``text`` says, numbers as people mean them, not yet checked as a spec."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError([f"not valid YAML: {' '.join(str(error).split())}"], source) from error
    return _numbers({} if content is None else content)


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e-3, without a point, as text; people mean the number."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value


def _across(mapping: Mapping[str, Any]) -> list[str]:
    """Problems between settings, told even when another setting is wrong."""
    problems = []
    examples, batch = mapping.get("examples"), mapping.get("batch", 1)
    if type(examples) is int and type(batch) is int and examples >= 1 and batch >= 1 and examples % batch:
        problems.append(f"examples: expected a multiple of batch ({batch}), got {examples}")
    if mapping.get("timeout") is not None and mapping.get("executor", "serial") == "serial":
        problems.append("timeout: expected executor 'processes', as only a process of its own can be stopped")
    return problems


def _line(error: ErrorDetails) -> str:
    where = ""
    for step in error["loc"]:
        where += f"[{step}]" if isinstance(step, int) else f"{'.' if where else ''}{step}"
    got = error["input"]
    if error["type"] == "missing":
        return f"{where}: expected a value, got nothing"
    if error["type"] == "extra_forbidden":
        key = str(error["loc"][-1])
        known = {1: AuditSpec, 2: _NESTED.get(str(error["loc"][0]))}.get(len(error["loc"]))
        fields = [name for name in known.model_fields if name != "instance"] if known else []
        try:
            find_name(key, fields)
        except ValueError as unknown:
            return f"{where}: unknown key: {unknown}"
        return f"{where}: unknown key: expected it spelt {find_name(key, fields)}, got {key!r}"
    if error["type"] == "value_error":
        return f"{where}: " + "; ".join(parts.lines(str(error["ctx"]["error"])))
    message = error["msg"].replace("Input should be ", "expected ", 1)
    return f"{where}: {message[0].lower()}{message[1:]}, got {got!r}"


_NESTED: dict[str, type[_Strict]] = {"model": ModelSpec, "data": DataSpec, "training": TrainingSpec, "policy": Policy}
