"""What people type in one word, as a spec says it."""

import re
from typing import Any

from leakscope.contracts.errors import UserError

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
