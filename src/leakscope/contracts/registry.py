"""Names that users type, and what they stand for: one kind of table for attacks, defences, protocols, models and so on.

Kebab-case, snake_case and class names all find the same entry. Where a name has a colon it is the user's own,
``package.module:Name``, imported from the current folder or an installed package.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from leakscope.contracts.errors import UserError


def folded(name: str) -> str:
    """``name`` without case and separators.

    >>> folded("inverting-gradients") == folded("InvertingGradients") == folded("inverting_gradients")
    True
    """
    return re.sub(r"[^a-z0-9.:]", "", name.lower())


def kebab(class_name: str) -> str:
    """The name typed for a class.

    >>> kebab("InvertingGradients"), kebab("FedSGD"), kebab("DLG")
    ('inverting-gradients', 'fed-sgd', 'dlg')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", class_name).lower()


def find_name(name: str, known: Iterable[str], aliases: Iterable[tuple[str, str]] = (), own: str = "") -> str:
    """The entry of ``known`` that ``name`` means; ``aliases`` are further (alias, entry) pairs.

    ``own`` says what else may be typed.

    >>> find_name("Fed_SGD", ["fedsgd", "fedavg"])
    'fedsgd'
    >>> find_name("fedsdg", ["fedsgd", "fedavg"])
    Traceback (most recent call last):
    ...
    leakscope.contracts.errors.UserError: expected one of fedsgd, fedavg, got 'fedsdg'; did you mean fedsgd?
    """
    entries = list(known)
    table = {folded(alias): entry for alias, entry in aliases} | {folded(entry): entry for entry in entries}
    if folded(name) in table:
        return table[folded(name)]
    close = difflib.get_close_matches(folded(name), table, n=1, cutoff=0.6)
    hint = f"; did you mean {table[close[0]]}?" if close else ""
    if name.endswith(".py"):
        hint = f"; for your own, in the file's folder write {module_of(name)}:NAME, the function or class in it"
    raise UserError(f"expected one of {', '.join(entries)}{f', or {own}' if own else ''}, got {name!r}{hint}")


def module_of(file: str) -> str:
    """The name that a module has for Python which people give as a file.

    >>> module_of("./nets.py"), module_of("C:\\\\work\\\\nets.py")
    ('nets', 'nets')
    """
    return re.split(r"[/\\]", file)[-1].removesuffix(".py")


@dataclass(frozen=True)
class Entry:
    """A name, the class or function it stands for, and one line on it; ``source`` is the paper or the user's module."""

    name: str
    target: Any
    summary: str
    source: str = ""


E = TypeVar("E", bound=Entry)


class Registry(Mapping[str, E], Generic[E]):
    """Entries of one kind by name, open to the user's own.

    ``base`` is the class that the user's classes must inherit; None where entries are functions.

    >>> shapes = Registry("shape", [Entry("square", int, "four sides")])
    >>> shapes.find("Square").summary, "square" in shapes
    ('four sides', True)
    >>> shapes.register(Entry("square", float, "another"))
    Traceback (most recent call last):
    ...
    leakscope.contracts.errors.UserError: shape 'square': there is one already; choose another name
    """

    def __init__(self, kind: str, entries: Iterable[E], base: type | None = None) -> None:
        self.kind, self.base = kind, base
        self._entries: dict[str, E] = {}
        for entry in entries:
            self.register(entry)

    def __getitem__(self, name: str) -> E:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, entry: E) -> None:
        """Add an entry; a name that is taken is an error, never a silent change."""
        if entry.name in self._entries:
            raise UserError(f"{self.kind} {entry.name!r}: there is one already; choose another name")
        self._entries[entry.name] = entry

    def find(self, name: str) -> E:
        """The entry that a name as people type it means; ValueError with the nearest one otherwise."""
        if not isinstance(name, str):
            raise UserError(f"{self.kind}: expected a name, got {type(name).__name__}")
        aliases = [(e.target.__name__, e.name) for e in self._entries.values() if hasattr(e.target, "__name__")]
        try:
            return self._entries[find_name(name, self._entries, aliases, "package.module:Name for your own")]
        except ValueError as error:
            raise UserError(f"unknown {self.kind} {name!r}: {error}") from None

    def target(self, name: str) -> Any:
        """The class or function that ``name`` stands for: of the table, or the user's own ``package.module:Name``."""
        if ":" not in str(name):
            return self.find(name).target
        from leakscope.contracts.imports import import_object

        target = import_object(self.kind, name)
        if self.base is not None and not (isinstance(target, type) and issubclass(target, self.base)):
            raise UserError(
                f"{self.kind} {name!r}: expected a class that inherits leakscope.{self.base.__name__}, got {target!r}"
            )
        return target

    def name_of(self, cls: type) -> str:
        """The name under which a class stands in the table, or what its name would be."""
        return next((entry.name for entry in self._entries.values() if entry.target is cls), kebab(cls.__name__))
