"""The command ``list``: names that can be typed elsewhere, and the settings of one of them."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from leakscope.contracts.registry import Registry


class Listable(StrEnum):
    attacks = "attacks"
    defenses = "defenses"
    protocols = "protocols"
    tasks = "tasks"
    models = "models"
    data = "data"
    papers = "papers"
    executors = "executors"


#: Where the table of each kind is.
_TABLES = {
    Listable.attacks: ("leakscope.attacks", "ATTACKS"),
    Listable.defenses: ("leakscope.defenses", "DEFENSES"),
    Listable.protocols: ("leakscope.federation", "PROTOCOLS"),
    Listable.tasks: ("leakscope.contracts.task", "TASKS"),
    Listable.models: ("leakscope.models", "MODELS"),
    Listable.data: ("leakscope.data", "DATA"),
    Listable.papers: ("leakscope.papers", "PAPERS"),
    Listable.executors: ("leakscope.audit.executors", "EXECUTORS"),
}


def list_names(
    what: Annotated[Listable, typer.Argument(help="What to list.")],
    name: Annotated[str | None, typer.Argument(help="One of them, or package.module:Class: its settings.")] = None,
) -> None:
    """Names that can be typed elsewhere, with one line each; of one of them every setting."""
    from leakscope.cli.console import print_listing, print_table

    module, attribute = _TABLES[what]
    table: Registry[Any] = getattr(importlib.import_module(module), attribute)
    if name is None:
        lines = [(e.name, f"{e.summary} ({e.source})" if e.source else e.summary) for e in table.values()]
        print_listing(lines)
        return
    from leakscope.contracts.settings import Described, settings_of

    target = table.target(name)
    if not (isinstance(target, type) and issubclass(target, Described)):
        entry = table.find(name)
        options = ", ".join(entry.options()) if hasattr(entry, "options") else ""
        print_listing([(entry.name, entry.summary), ("options", options or "none")])
        return
    rows = [(s.name, s.expected, "required" if s.required else repr(s.default), s.help) for s in settings_of(target)]
    print_table(name, ("setting", "expected", "default", "meaning"), rows)
