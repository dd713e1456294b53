"""The command ``list``: names that can be typed elsewhere, and the settings of one of them."""

from __future__ import annotations

import importlib
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.cli.output import AsCsv, AsJson, Output

if TYPE_CHECKING:
    from leakscope.contracts.registry import Registry
    from leakscope.contracts.settings import Setting


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
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """List attacks, models and so on.

    Names that can be typed elsewhere, with one line each; of one of them every setting.
    """
    output = Output.of(as_json=as_json, as_csv=as_csv)
    module, attribute = _TABLES[what]
    table: Registry[Any] = getattr(importlib.import_module(module), attribute)
    entries = [_entry(table, name)] if name is not None else [_facts(entry) for entry in table.values()]
    if output.for_machines:
        from leakscope.report.export import document

        content = document("list", {"what": what.value, "entries": entries})
        settings = entries[0]["settings"] if name is not None else None
        short = [{key: entry[key] for key in ("name", "summary", "source")} for entry in entries]
        output.write(lambda: content, lambda: short if settings is None else settings)
    elif name is None:
        from leakscope.cli.console import print_listing

        print_listing(
            [(e["name"], f"{e['summary']} ({e['source']})" if e["source"] else e["summary"]) for e in entries]
        )
    else:
        _print_entry(entries[0])


def _facts(entry: Any) -> dict[str, Any]:
    return {"name": entry.name, "summary": entry.summary, "source": entry.source, "settings": None}


def _entry(table: Registry[Any], name: str) -> dict[str, Any]:
    """One entry of a table, or a class of the user's, with its settings."""
    target = table.target(name)
    nameless: dict[str, Any] = {"name": name, "summary": "", "source": "", "settings": None}
    facts = nameless if ":" in name else _facts(table.find(name))
    settings = _settings(target)
    if settings is not None:
        facts["settings"] = [
            {
                "name": setting.name,
                "expected": setting.expected,
                "default": None if setting.required else repr(setting.default),
                "required": setting.required,
                "help": setting.help,
            }
            for setting in settings
        ]
    elif ":" not in name and hasattr(entry := table.find(name), "options"):
        facts["settings"] = [
            {"name": option, "expected": "", "default": None, "required": False, "help": ""}
            for option in entry.options()
        ]
    return facts


def _settings(target: Any) -> tuple[Setting, ...] | None:
    """Those that a class describes; of an executor those that only this one has. None where there is nothing to say."""
    from leakscope.contracts.settings import Described, settings_of

    if hasattr(target, "own_settings"):
        return target.own_settings() or None
    return settings_of(target) if isinstance(target, type) and issubclass(target, Described) else None


def _print_entry(facts: dict[str, Any]) -> None:
    from leakscope.cli.console import make_console, print_listing, print_table, say

    settings = facts["settings"]
    if not settings or not any(setting["expected"] for setting in settings):
        options = ", ".join(setting["name"] for setting in settings or ())
        print_listing([(facts["name"], facts["summary"]), ("options", options or "none")])
        return
    if facts["summary"]:
        say(make_console(), f"{facts['name']}: {facts['summary']}")
    rows = [(s["name"], s["expected"], "required" if s["required"] else s["default"], s["help"]) for s in settings]
    print_table(None, ("setting", "expected", "default", "meaning"), rows)
