"""From the words of a spec to protocols, defences, attacks and knowledge; rooms are loaded when needed."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

from leakscope.audit.names import find_name, folded, kebab

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Part(BaseModel):
    """A protocol, defence or attack: its name and settings, and the object itself if one was given."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: str
    options: dict[str, Any] = {}
    instance: Any = Field(default=None, exclude=True, repr=False)

    def identity(self) -> str:
        """The complete description, which goes into keys: "none" or the ``repr`` of the object."""
        return "none" if self.instance is None else repr(self.instance)


def protocol_part(value: Any) -> Part:
    from leakscope.federation import PROTOCOLS, Protocol

    return _part(value, PROTOCOLS, Protocol, "protocol")


def defense_part(value: Any) -> Part:
    from leakscope.defenses import DEFENSES, Defense

    if value is None:
        return Part(name="none")
    if isinstance(value, str | Mapping):
        name, options = _named(value, "defence")
        if folded(name) == "none" and not options:
            return Part(name="none")
        if folded(name) == "none":
            raise ValueError(f"none: expected no settings, got {', '.join(options)}")
        find_name(name, ["none", *DEFENSES], [(cls.__name__, entry) for entry, cls in DEFENSES.items()])
    return _part(value, DEFENSES, Defense, "defence")


def attack_part(value: Any) -> Part:
    from leakscope.attacks import ATTACKS

    return _part(value, {name: entry.cls for name, entry in ATTACKS.items()}, None, "attack")


def standard_attacks(protocols: Sequence[Part]) -> list[str]:
    """The attacks that "standard" means for these protocols: all that fit one of them."""
    from leakscope.attacks import STANDARD, STANDARD_VERTICAL, STANDARD_WEIGHT_UPDATES

    trained = any(part.instance.kind == "weight_delta" for part in protocols)
    wholes = () if _all_vertical(protocols) else (*STANDARD, *(STANDARD_WEIGHT_UPDATES if trained else ()))
    return [*wholes, *(STANDARD_VERTICAL if any(map(is_vertical, protocols)) else ())]


def default_knowledge(protocols: Sequence[Part]) -> str:
    """The preset that counts where a spec says nothing: the server of vertical learning announces the batches."""
    return "vertical_server" if _all_vertical(protocols) else "honest_server"


def is_vertical(part: Part) -> bool:
    """Whether in this protocol workers own different features of the same samples."""
    from leakscope.federation import Vertical

    return isinstance(part.instance, Vertical)


def _all_vertical(protocols: Sequence[Part]) -> bool:
    return bool(protocols) and all(map(is_vertical, protocols))


def model_names() -> list[str]:
    from leakscope.models import MODELS

    return list(MODELS)


def data_names() -> list[str]:
    from leakscope.data import DATA

    return list(DATA)


def in_memory_model(value: Any) -> dict[str, Any]:
    from torch import nn

    if not isinstance(value, nn.Module):
        raise ValueError(f"expected a name, a mapping or a torch.nn.Module, got {type(value).__name__}")
    return {"name": type(value).__name__, "instance": value}


def in_memory_data(value: Any) -> dict[str, Any]:
    from leakscope.data import Examples, from_tensors

    if isinstance(value, tuple) and len(value) == 2:
        try:
            value = from_tensors(*value)
        except TypeError as error:
            raise ValueError(str(error)) from error
    if not isinstance(value, Examples):
        raise ValueError(
            f"expected a name, a mapping, Examples or a pair (x, y) of tensors, got {type(value).__name__}"
        )
    return {"name": value.name, "instance": value}


def knowledge_fields(value: Any) -> dict[str, Any]:
    """All fields of the Knowledge that a preset's name, a mapping or a Knowledge means."""
    from leakscope.observation import KNOWLEDGE_PRESETS, Knowledge

    if isinstance(value, Knowledge):
        return dataclasses.asdict(value)
    if isinstance(value, str):
        return dataclasses.asdict(Knowledge.preset(find_name(value, KNOWLEDGE_PRESETS)))
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {', '.join(KNOWLEDGE_PRESETS)} or a mapping, got {value!r}")
    options = dict(value)
    if isinstance(options.get("labels"), bool):
        options["labels"] = "yes" if options["labels"] else "no"  # YAML reads the words yes and no as booleans
    return dataclasses.asdict(construct(Knowledge, options))


def _part(value: Any, table: Mapping[str, type], base: type | None, kind: str) -> Part:
    if isinstance(value, Part):
        return value
    if not isinstance(value, str | Mapping):
        return _given(value, table, base, kind)
    name, options = _named(value, kind)
    known = find_name(name, table, [(cls.__name__, entry) for entry, cls in table.items()])
    try:
        instance = construct(table[known], _with_preset(table[known], options))
    except ValueError as error:
        raise ValueError(f"{known}: {'; '.join(lines(str(error)))}") from error
    return Part(name=known, options=_plain_fields(instance), instance=instance)


def _with_preset(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """The settings published under the name in ``preset``, if there is one, changed by the other options."""
    presets: Mapping[str, Mapping[str, Any]] = getattr(cls, "presets", {})
    if "preset" not in options or not presets:
        return options
    chosen = find_name(str(options["preset"]), presets)
    return {**presets[chosen], **{name: value for name, value in options.items() if name != "preset"}}


def _named(value: str | Mapping[str, Any], kind: str) -> tuple[str, dict[str, Any]]:
    if isinstance(value, str):
        return value, {}
    if "name" in value and set(value) <= {"name", "options"}:
        name, options = value["name"], value.get("options")
    elif len(value) == 1:
        name, options = next(iter(value.items()))
    else:
        raise ValueError(
            f"expected a {kind}'s name, or one name with its settings as in {{name: {{setting: value}}}}, "
            f"got the keys {', '.join(map(str, value))}"
        )
    options = {} if options is None else options
    if not isinstance(name, str):
        raise ValueError(f"expected the name of a {kind}, got {name!r}")
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ValueError(f"{name}: expected a mapping of settings, got {options!r}")
    return name, dict(options)


def _given(value: Any, table: Mapping[str, type], base: type | None, kind: str) -> Part:
    fits = callable(value) if base is None else isinstance(value, base)
    if isinstance(value, type) or not fits:
        raise ValueError(f"expected the name of a {kind} or a {kind} object, got {value!r}")
    if _ADDRESS.search(repr(value)):
        raise ValueError(
            f"expected a {kind} whose repr tells all its settings, got {value!r}; make it a frozen dataclass"
        )
    name = next((entry for entry, cls in table.items() if type(value) is cls), kebab(type(value).__name__))
    return Part(name=name, options=_plain_fields(value), instance=value)


def _plain_fields(instance: Any) -> dict[str, Any]:
    """The settings of a dataclass; what JSON cannot hold is told by its repr."""
    if not dataclasses.is_dataclass(instance):
        return {}
    plain = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        try:
            plain[field.name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            plain[field.name] = repr(value)
    return plain


def construct(cls: type, options: Mapping[str, Any]) -> Any:
    """``cls(**options)``, with every unknown, missing or mistyped setting told in one ValueError."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    problems, values = [], {}
    hints = _hints(cls)
    for name, value in options.items():
        if name not in fields:
            problems.append(_unknown_setting(name, fields))
            continue
        try:
            values[name] = TypeAdapter(hints[name]).validate_python(value) if name in hints else value
        except ValidationError as error:
            reasons = {e["msg"].replace("Input should be ", "", 1) for e in error.errors()}
            problems.append(f"{name}: expected {' or '.join(sorted(reasons))}, got {value!r}")
        except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
            values[name] = value  # a type only the class itself can check
    for name, field in fields.items():
        unset = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if unset and name not in options:
            problems.append(f"{name}: expected a value, got nothing")
    if problems:
        raise ValueError("\n".join(problems))
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _unknown_setting(name: str, fields: Iterable[str]) -> str:
    try:
        meant = find_name(name, fields)
    except ValueError as error:
        return f"unknown setting {name!r}: {error}"
    return f"unknown setting {name!r}: expected it spelt {meant!r}, got {name!r}"


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):
        return {}


def lines(message: str) -> list[str]:
    """The lines of another room's message, without bullets and headings.

    >>> lines("FedAvg:\\n  - epochs: expected at least 1, got 0")
    ['epochs: expected at least 1, got 0']
    """
    found = [line.strip().removeprefix("- ").strip() for line in message.splitlines() if line.strip()]
    return [line for line in found if not line.endswith(":")] or found


def without_addresses(text: str) -> str:
    """``text`` with memory addresses cut out, which differ from run to run.

    >>> without_addresses("<function relu at 0x7f3a>")
    '<function relu>'
    """
    return _ADDRESS.sub("", text)
