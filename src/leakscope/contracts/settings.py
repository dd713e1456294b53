"""Settings of attacks, defences, protocols and tasks: type, bounds, default and one sentence, said once, in place.

    iterations: int = setting(300, "Steps of the search.", ge=1)

The constructor of a :class:`Described` checks every value against this description and tells all that is wrong in one
ValueError; the help of the command line, the tables of the docs and the reading of specs come from :func:`settings_of`.
"""

import dataclasses
import inspect
import math
import operator
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, Self

from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from leakscope.contracts.checks import COUNT, brief, refuse
from leakscope.contracts.errors import UserError
from leakscope.contracts.registry import find_name

_KEY = "leakscope"
_UNTOLD: Mapping[str, Any] = {"help": "", "bounds": dict.fromkeys(("ge", "gt", "le", "lt")), "choices": None}
_NOUNS: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def setting(
    default: Any,
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Iterable[str] | None = None,
) -> Any:
    """A field of a dataclass with its one sentence and its bounds, which hold for every number in it."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    facts = {"help": help, "bounds": bounds, "choices": None if choices is None else tuple(choices)}
    if isinstance(default, list | dict):
        raise UserError(f"setting: expected an immutable default, got {default!r}")
    return dataclasses.field(default=default, metadata={_KEY: facts})


@dataclass(frozen=True)
class Setting:
    """One setting of a class. ``default`` is ``dataclasses.MISSING`` where one must be given."""

    name: str
    type: Any
    default: Any
    help: str
    bounds: Mapping[str, float | None]
    choices: tuple[str, ...] | None = None

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @cached_property
    def expected(self) -> str:
        """What a value must be, in words.

        >>> @dataclass(frozen=True, kw_only=True)
        ... class Demo(Described):
        ...     steps: int = setting(3, "Steps.", ge=1)
        ...     share: float | None = setting(None, "A share.", ge=0, lt=1)
        ...     form: Literal["soft", "hard"] = setting("soft", "Which.")
        >>> [found.expected for found in settings_of(Demo)]
        ['a whole number of at least 1', 'a number of at least 0 and below 1 or None', "'soft' or 'hard'"]
        """
        return _words(self.type, self._bounds_in_words(), self.choices)

    def checked(self, value: Any) -> Any:
        """``value`` as the setting holds it: lists as tuples, whole numbers as floats; ValueError where it is wrong."""
        problem = f"{self.name}: expected {self.expected}, got {brief(value)}"
        value = self._typed(value, problem)
        if isinstance(value, int):
            COUNT.check(self.name, value)
        stray = self.choices is not None and isinstance(value, str) and value not in self.choices
        if stray or not all(math.isfinite(number) and self._within(number) for number in _numbers(value)):
            raise UserError(problem)
        return value

    def _typed(self, value: Any, problem: str) -> Any:
        if self._adapter is None:
            return _frozen(value)
        for candidate in (_frozen(value), value):  # as it is where the type asks for a list
            with suppress(ValidationError):
                return self._adapter.validate_python(candidate, strict=True)
        raise UserError(problem)

    @cached_property
    def _adapter(self) -> TypeAdapter[Any] | None:
        for config in (ConfigDict(arbitrary_types_allowed=True), None):
            with suppress(PydanticSchemaGenerationError, PydanticUserError, TypeError):
                return TypeAdapter(self.type, config=config)
        return None  # a type that only the class itself can check

    def _within(self, number: float) -> bool:
        return all(bound is None or getattr(operator, name)(number, bound) for name, bound in self.bounds.items())

    def _bounds_in_words(self) -> str:
        words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
        phrases = [f" {words[name]} {bound:g}" for name, bound in self.bounds.items() if bound is not None]
        return " and".join(phrases)


class Described:
    """Base of frozen dataclasses whose fields are settings. Override :meth:`problems` for rules between settings."""

    def __post_init__(self) -> None:
        problems = []
        for setting_ in settings_of(type(self)):
            try:
                object.__setattr__(self, setting_.name, setting_.checked(getattr(self, setting_.name)))
            except ValueError as error:
                problems.append(str(error))
        refuse(type(self).__name__, problems or self.problems())

    def problems(self) -> list[str]:
        """What is wrong between settings that are each right by themselves, one line each."""
        return []

    @classmethod
    def build(cls, options: Mapping[str, Any]) -> Self:
        """``cls(**options)``, with every unknown, missing or wrong setting told in one ValueError."""
        check_settings(settings_of(cls), options)
        return cls(**options)


def check_settings(known: Iterable[Setting], options: Mapping[str, Any]) -> None:
    """ValueError with every unknown, missing or wrong one of ``options``, a line each."""
    settings = {one.name: one for one in known}
    problems = [unknown_setting(name, settings) for name in options if name not in settings]
    for name, one in settings.items():
        if name not in options:
            problems += [f"{name}: expected {one.expected}, got nothing"] if one.required else []
            continue
        try:
            one.checked(options[name])
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))


def settings_of(cls: type) -> tuple[Setting, ...]:
    """The settings of a dataclass in their order; one without a description has none of help and bounds."""
    return _settings_of(cls)


@lru_cache(maxsize=256)
def _settings_of(cls: type) -> tuple[Setting, ...]:
    settings = []
    for entry in dataclasses.fields(cls):
        if entry.init:
            facts = entry.metadata.get(_KEY, _UNTOLD)
            made = entry.default_factory
            default = entry.default if made is dataclasses.MISSING else made()
            settings.append(Setting(entry.name, _hint(cls, entry), default, **facts))
    return tuple(settings)


def _hint(cls: type, entry: dataclasses.Field[Any]) -> Any:
    """The type of a field; Any where its annotation, and only that one, cannot be evaluated here."""
    owner = next(base for base in cls.__mro__ if entry.name in inspect.get_annotations(base))
    alone = types.SimpleNamespace(__annotations__={entry.name: entry.type})
    try:
        return typing.get_type_hints(alone, dict(vars(owner)), vars(sys.modules[owner.__module__]))[entry.name]
    except (NameError, TypeError, KeyError):
        return Any


def unknown_setting(name: str, known: Iterable[str]) -> str:
    """The line for a setting that is not among the ``known``.

    >>> unknown_setting("iteration", ["iterations", "tv"])
    "unknown setting 'iteration': expected one of iterations, tv, got 'iteration'; did you mean iterations?"
    """
    try:
        meant = find_name(name, known)
    except ValueError as error:
        return f"unknown setting {name!r}: {error}"
    return f"unknown setting {name!r}: expected it spelt {meant!r}, got {name!r}"


def _words(hint: Any, bounds: str, choices: tuple[str, ...] | None) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if choices is not None:
        return "one of " + ", ".join(choices)
    if origin is Literal:
        *others, last = map(repr, arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(part, bounds, None) for part in arguments)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return f"a list, each {_words(arguments[0], bounds, None)}"
        return f"a list of {len(arguments)}, each {_words(arguments[0], bounds, None)}" if arguments else "a list"
    if hint in (None, type(None)):
        return "None"
    noun = _NOUNS.get(hint, getattr(hint, "__name__", str(hint)))
    return noun + bounds if hint in (int, float) else noun


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value) if abs(value) < 1e300 else math.inf  # a whole number may be too large for a float
