"""What people type in one word, as a spec says it; how much a command says, and where.

People read stderr as soon as a document has stdout to itself.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.contracts.errors import UserError

if TYPE_CHECKING:
    from leakscope.results.store import Store
    from leakscope.results.verdict import Verdict

SarifFile = Annotated[
    Path | None, typer.Option("--sarif", help="Also write the findings here as SARIF 2.1.0, for code scanning.")
]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What was typed of a command's output: each field is an option of the commands that :func:`takes` it."""

    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only the outcome and where the files are.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for every job, and every reason.")] = False
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No bar, and no lines while it runs.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document; text for people goes to stderr.")] = (
        False
    )
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table as CSV; text for people goes to stderr.")] = False

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise UserError("--quiet and --verbose: expected one of them, got both")
        if self.as_json and self.as_csv:
            raise UserError("--json and --csv: expected one of them, got both")

    @property
    def progress(self) -> bool:
        return not (self.no_progress or self.quiet)

    @property
    def for_machines(self) -> bool:
        return self.as_json or self.as_csv

    def write(
        self, document: Callable[[], Mapping[str, Any]], table: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        """Print the document or the table where one is asked for, and nothing else."""
        from leakscope.report.export import csv_text, json_text

        if self.for_machines:
            sys.stdout.write(json_text(document()) if self.as_json else csv_text(table()))
            sys.stdout.flush()


def takes(kind: type, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a dataclass, or those of these names, in place of its parameter of that type.

    An option that the command has itself, with a help of its own, is not repeated.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own, options = (inspect.signature(one, eval_str=True).parameters for one in (command, kind))
        place = next(name for name, parameter in own.items() if parameter.annotation is kind)
        taken: dict[str, inspect.Parameter] = {}
        for name, parameter in own.items():
            more = {key: option for key, option in options.items() if key not in own and (not names or key in names)}
            taken |= more if name == place else {name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)}

        @functools.wraps(command)
        def typed(**values: Any) -> None:
            told = kind(**{name: values[name] for name in options if name in values})
            command(**{place: told}, **{name: value for name, value in values.items() if name in own})

        typed.__signature__ = inspect.Signature(list(taken.values()))  # type: ignore[attr-defined]
        typed.__annotations__ = {name: parameter.annotation for name, parameter in taken.items()}
        return typed

    return decorate


def write_sarif(store: Store, verdict: Verdict, path: Path | None) -> None:
    """The findings of an audit as a SARIF file, where one is asked for."""
    if path is None:
        return
    from leakscope.contracts.disk import atomic_write, private_folder
    from leakscope.report.export import json_text
    from leakscope.report.sarif import sarif_log

    private_folder(path.parent)
    atomic_write(path, json_text(sarif_log(store, verdict)).encode())


def relative(path: Path) -> str:
    """A path as seen from here, so that no document names somebody's home.

    >>> relative(Path("run") / "report.html")
    'run/report.html'
    """
    return Path(os.path.relpath(path)).as_posix()


#: NAME or NAME:key=value,key=value, where the name may be package.module:Class.
_WORD = re.compile(r"(?P<name>[^=,]+?)(?::(?P<options>[^:=,]+=.*))?", re.DOTALL)

#: The help of an option that several commands have.
ALLOW_CODE = "Run code that the spec names (package.module:Name) even if it is of an installed package."


def own_names(value: Any) -> set[str]:
    """Every ``package.module:Name`` in what was typed.

    >>> sorted(own_names({"attacks": ["dlg", {"mine:Best": {"steps": 3}}], "model": "mine:Net"}))
    ['mine:Best', 'mine:Net']
    """
    if isinstance(value, dict):
        return own_names([*value, *value.values()])
    if isinstance(value, list):
        return set().union(*map(own_names, value))
    return {value} if isinstance(value, str) and ":" in value else set()


def parse_part(text: str) -> Any:
    """``name:key=value,key=value`` as a spec says it: {name: {key: value}}.

    >>> parse_part("dlg"), parse_part("mine.attacks:Best:steps=3,tv=1e-3")
    ('dlg', {'mine.attacks:Best': {'steps': 3, 'tv': 0.001}})
    """
    from leakscope.audit.yaml_text import read_value

    match = _WORD.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r}: expected name:key=value,key=value")
    if match["options"] is None:
        return match["name"]
    options = {}
    for pair in match["options"].split(","):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"{text!r}: expected name:key=value,key=value, got {pair!r}")
        options[key.strip()] = read_value(value, text)
    return {match["name"]: options}


def parse_defense(text: str) -> Any:
    """A defence as a spec says it; several with + between them are a list, which is a chain.

    >>> parse_defense("gradient-clipping:norm=0.5+gradient-noise:sigma=1e+2")
    [{'gradient-clipping': {'norm': 0.5}}, {'gradient-noise': {'sigma': 100.0}}]
    """
    parts = [parse_part(part) for part in re.split(r"\+(?=[A-Za-z_])", text)]
    return parts[0] if len(parts) == 1 else parts


def parse_parts(texts: list[str] | None) -> list[Any] | None:
    return [parse_part(text) for text in texts] if texts else None


def parse_shape(text: str) -> tuple[int, ...]:
    """A shape such as 3x32x32.

    >>> parse_shape("3x32x32")
    (3, 32, 32)
    """
    try:
        return tuple(int(size) for size in text.lower().split("x"))
    except ValueError as error:
        raise UserError(f"--input: expected sizes such as 3x32x32, got {text!r}") from error


def parse_numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between them.

    >>> parse_numbers("--mean", "0.5, 0.25")
    (0.5, 0.25)
    """
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise UserError(f"{option}: expected numbers such as 0.5,0.25, got {text!r}") from error
