"""Turn the words of a spec into protocols, defences, attacks, tasks and knowledge; rooms are loaded when needed."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from leakscope.contracts.errors import UserError
from leakscope.contracts.registry import Registry, find_name, folded
from leakscope.contracts.settings import Described

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Part(BaseModel):
    """A protocol, defence, attack or task: its name and settings, and the object itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: str
    options: dict[str, Any] = {}
    instance: Any = Field(default=None, exclude=True, repr=False)

    def identity(self) -> str:
        """Return the complete description, which goes into keys."""
        return "none" if self.instance is None else repr(self.instance)

    def facts(self) -> dict[str, Any]:
        """Return what rows keep beside the identity."""
        kind = type(self.instance).__name__
        return {} if self.instance is None else {"name": self.name, "class": kind, "options": self.options}


def part_at(parts: Sequence[Part], number: int | None) -> Part:
    return Part(name="none") if number is None else parts[number]


def protocol_part(value: Any) -> Part:
    from leakscope.federation import PROTOCOLS

    return _part(value, PROTOCOLS)


def defense_part(value: Any) -> Part:
    from leakscope.defenses import DEFENSES

    if value is None:
        return Part(name="none")
    if isinstance(value, list | tuple):
        return _chain(value)
    if isinstance(value, str | Mapping):
        name, options = _named(value, "defence")
        if folded(name) == "chain" and isinstance(options.get("parts"), list | tuple) and len(options) == 1:
            return _chain(options["parts"])
        if folded(name) == "none" and not options:
            return Part(name="none")
        if folded(name) == "none":
            raise UserError(f"none: expected no settings, got {', '.join(options)}")
        if ":" not in name:
            find_name(name, ["none", *DEFENSES], [(e.target.__name__, e.name) for e in DEFENSES.values()])
    return _part(value, DEFENSES)


def _chain(values: Sequence[Any]) -> Part:
    """Join several defences, without those called none."""
    from leakscope.contracts.defense import as_defense

    parts = [part for part in map(defense_part, values) if part.instance is not None]
    if len(parts) < 2:
        raise UserError(f"expected at least two defences in a list of them, got {list(values)!r}; leave the list out")
    options = [{part.name: part.options} for part in parts]
    return Part(name="chain", options={"parts": options}, instance=as_defense([part.instance for part in parts]))


def attack_part(value: Any) -> Part:
    from leakscope.attacks import ATTACKS

    return _part(value, ATTACKS)


def task_part(value: Any) -> Part:
    """Find a task by name, or take the user's own: a class that inherits Task, or a function loss(outputs, targets)."""
    from leakscope.contracts.registry import import_object
    from leakscope.contracts.task import TASKS, CustomLoss, Task

    if callable(value) and not isinstance(value, Task | type):
        value = CustomLoss(name=f"{value.__module__}:{value.__qualname__}", function=value)
    if isinstance(value, str | Mapping) and ":" in (named := _named(value, "task"))[0]:
        target = import_object("task", named[0])
        if not (isinstance(target, type) and issubclass(target, Task)):
            value = CustomLoss.load(named[0], **named[1])
    return _part(value, TASKS)


def executor_part(value: Any) -> Part:
    from leakscope.audit.executors import EXECUTORS
    from leakscope.contracts.settings import check_settings

    if isinstance(value, Part):
        return value
    if not isinstance(value, str | Mapping):
        raise UserError(f"expected the name of an executor, got {value!r}")
    name, options = _named(value, EXECUTORS.kind)
    known = name if ":" in name else EXECUTORS.find(name).name
    try:
        check_settings(EXECUTORS.target(name).own_settings(), options)
    except ValueError as error:
        raise UserError(f"{known}: {'; '.join(lines(str(error)))}") from error
    return Part(name=known, options=options)


def knowledge_fields(value: Any) -> dict[str, Any]:
    """Return all fields of the Knowledge that a preset's name, a preset with changes, a mapping or a Knowledge means.

    >>> knowledge_fields({"honest_server": {"batch_order": True}})["batch_order"]
    True
    """
    from leakscope.contracts.knowledge import KNOWLEDGE_PRESETS, Knowledge

    if isinstance(value, Knowledge):
        return dataclasses.asdict(value)
    if isinstance(value, str):
        return dataclasses.asdict(Knowledge.preset(find_name(value, KNOWLEDGE_PRESETS)))
    if not isinstance(value, Mapping):
        raise UserError(f"expected {', '.join(KNOWLEDGE_PRESETS)} or a mapping, got {value!r}")
    options, base = dict(value), {}
    if len(options) == 1 and isinstance(changes := next(iter(options.values())), Mapping):
        base, options = knowledge_fields(str(next(iter(options)))), dict(changes)
    if isinstance(options.get("labels"), bool):
        options["labels"] = "yes" if options["labels"] else "no"  # YAML reads the words yes and no as booleans
    return dataclasses.asdict(Knowledge.build({**base, **options}))


def _part(value: Any, table: Registry[Any]) -> Part:
    if isinstance(value, Part):
        return value
    if not isinstance(value, str | Mapping):
        return _given(value, table)
    name, options = _named(value, table.kind)
    own = ":" in name
    known = name if own else find_name(name, table, [(e.target.__name__, e.name) for e in table.values()])
    cls: type[Described] = _own(name, table) if own else table.target(known)
    try:
        instance = cls.build(_with_preset(cls, options))
    except ValueError as error:
        raise UserError(f"{known}: {'; '.join(lines(str(error)))}") from error
    return Part(name=known, options=_plain_fields(instance), instance=instance)


def _own(name: str, table: Registry[Any]) -> type[Described]:
    try:
        cls: type[Described] = table.target(name)
    except ValueError as error:
        known, _, rest = name.partition(":")
        hint = f" For a setting of {known} write {known}:key=value, not {known}:{rest}." if known in table else ""
        raise UserError(f"{error}{hint}") from error
    return cls


def _with_preset(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings published as ``preset``, if there is one, changed by the other options."""
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
        raise UserError(
            f"expected {_a(kind)}'s name, or one name with its settings as in {{name: {{setting: value}}}}, "
            f"got the keys {', '.join(map(str, value))}"
        )
    options = {} if options is None else options
    if not isinstance(name, str):
        raise UserError(f"expected the name of {_a(kind)}, got {name!r}")
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise UserError(f"{name}: expected a mapping of settings, got {options!r}")
    return name, dict(options)


def _given(value: Any, table: Registry[Any]) -> Part:
    if isinstance(value, type) or table.base is None or not isinstance(value, table.base):
        raise UserError(f"expected the name of {_a(table.kind)} or {_a(table.kind)} object, got {value!r}")
    if _ADDRESS.search(repr(value)):
        raise UserError(
            f"expected {_a(table.kind)} whose repr tells all its settings, got {value!r}; make it a frozen dataclass"
        )
    return Part(name=table.name_of(type(value)), options=_plain_fields(value), instance=value)


def _plain_fields(instance: Any) -> dict[str, Any]:
    """Return the settings of a dataclass; what JSON cannot hold is told by its repr."""
    settings = {}
    for field in dataclasses.fields(instance) if dataclasses.is_dataclass(instance) else ():
        value = _in_words(getattr(instance, field.name))
        try:
            settings[field.name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            settings[field.name] = without_addresses(repr(value))
    return settings


def _in_words(value: Any) -> Any:
    """Write a part within a part, such as the protocol of secure aggregation, as a spec says it."""
    if isinstance(value, tuple) and any(isinstance(item, Described) for item in value):
        return [_in_words(item) for item in value]
    return {type(value).__name__: _plain_fields(value)} if isinstance(value, Described) else value


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def lines(message: str) -> list[str]:
    """Return the lines of a message, without bullets and headings.

    >>> lines("FedAvg:\\n  - epochs: expected at least 1, got 0")
    ['epochs: expected at least 1, got 0']
    """
    stripped = [line.strip().removeprefix("- ").strip() for line in message.splitlines() if line.strip()]
    return [line for line in stripped if not line.endswith(":")] or stripped


def without_addresses(text: str) -> str:
    """Cut out memory addresses, which differ from run to run.

    >>> without_addresses("<function relu at 0x7f3a>")
    '<function relu>'
    """
    return _ADDRESS.sub("", text)
