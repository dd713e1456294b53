"""Help as plain text: typer escapes brackets for rich even where rich draws nothing, and loses help of arguments."""

from __future__ import annotations

from typing import Any, get_type_hints

import click
from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command whose help has no stray backslash, and a sentence for each argument."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                name, text = record[0], record[1].replace("\\[", "[")
                if isinstance(param, click.Argument):
                    text = f"{_help_of(self.callback, str(param.name))}  {text}".strip() if not _own(param) else text
                    records["Arguments"].append((name, text))
                else:
                    records["Options"].append((name, text))
        for title, lines in records.items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


class PlainGroup(TyperGroup):
    """Commands of which one that is not there is told once: click and typer both suggest the nearest."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        return click.Group.resolve_command(self, ctx, args)


def _own(param: click.Argument) -> bool:
    return bool(getattr(param, "help", None))


def _help_of(command: Any, argument: str) -> str:
    """What the signature says of an argument."""
    hint = get_type_hints(command, include_extras=True).get(argument)
    return next((entry.help for entry in getattr(hint, "__metadata__", ()) if getattr(entry, "help", None)), "")
