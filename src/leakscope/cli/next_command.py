"""The command that tries what a verdict advises: the one that was typed, with its options changed."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from click.core import ParameterSource

from leakscope.audit.spec import AuditSpec
from leakscope.audit.yaml_text import read_yaml
from leakscope.report.options import options_of, word_of
from leakscope.results.advice import Advice

#: A time budget that ends no audit, in place of one that stands in a file.
_NO_BUDGET = ["--budget", "2700h"]


@dataclass(frozen=True)
class Typed:
    """What was typed: the words of each parameter by its name, arguments first."""

    words: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, context: typer.Context) -> "Typed":
        words: dict[str, list[str]] = {}
        for parameter in context.command.params:
            value = context.params.get(parameter.name or "")
            if value is None or context.get_parameter_source(parameter.name or "") is not ParameterSource.COMMANDLINE:
                continue
            if parameter.param_type_name == "argument":
                words = {str(parameter.name): [str(value)], **words}
            elif isinstance(value, bool):
                switch = parameter.opts[0] if value else parameter.secondary_opts[0]
                words[str(parameter.name)] = [switch]
            else:
                several = value if isinstance(value, list | tuple) else [value]
                words[str(parameter.name)] = [word for one in several for word in (parameter.opts[0], str(one))]
        return cls(words)


def next_command(typed: Typed, advice: Advice, spec: AuditSpec, out: Path) -> str | None:
    """Return the command that makes the audit which ``advice`` asks for; None where there is none."""
    if advice.changes is None:
        return None
    words = {name: list(one) for name, one in typed.words.items()}
    written = {} if spec.file is None else read_yaml(spec.file.text, str(spec.file.path))
    for key, options in options_of(advice.changes).items():
        parameter = {"attacks": "attack", "defenses": "defense", "policy": "max_identification"}.get(key, key)
        if key == "attacks":
            before = _attacks(words, spec, written)[1::2]
            every = dict.fromkeys([*before, *options[1::2]])
            options = [word for attack in every for word in ("--attack", attack)]
        words[parameter] = options
    if "knowledge" in advice.changes and "labels" not in options_of(advice.changes):
        words.pop("labels", None)
    if "budget" in advice.changes:
        words.pop("budget", None)
        words |= {"budget": _NO_BUDGET} if written.get("budget") is not None else {}
    place = words.pop("out", None)
    if advice.new_folder:
        place = ["--out", str(new_folder(out))]
    words |= {"out": place} if place is not None else {}
    return shlex.join(["leakscope", "audit", *(word for one in words.values() for word in one)])


def _attacks(words: Mapping[str, list[str]], spec: AuditSpec, written: Mapping[str, Any]) -> list[str]:
    """Return the attacks that were asked for: another folder does not know them, and this one may miss jobs of them."""
    if "attack" in words or "attacks" not in written:
        return words.get("attack", ["--attack", "standard"])
    parts = written["attacks"] if isinstance(written["attacks"], list) else [written["attacks"]]
    return [word for part in parts for word in ("--attack", word_of(part))]


def new_folder(out: Path) -> Path:
    """Return the first folder of this name with a number that is not there yet.

    >>> new_folder(Path("no/such-4"))
    PosixPath('no/such-5')
    """
    match = re.fullmatch(r"(.*)-(\d+)", out.name)
    stem, number = (match[1], int(match[2]) + 1) if match else (out.name, 2)
    while (folder := out.with_name(f"{stem}-{number}")).exists():
        number += 1
    return folder
