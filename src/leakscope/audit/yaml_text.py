"""What a text says in YAML, and the error for what cannot be audited."""

from __future__ import annotations

import re
from typing import Any

import yaml

_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class SpecError(ValueError):
    """The spec cannot be audited; ``problems`` has one line for each reason."""

    def __init__(self, problems: list[str], source: str = "audit spec") -> None:
        self.problems = list(problems)
        self.source = source
        super().__init__(f"{source}: cannot be used:\n" + "\n".join(f"  - {line}" for line in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.source)


def read_yaml(text: str, source: str = "audit spec") -> Any:
    """What ``text`` says, not yet checked as a spec; nothing at all is a spec without keys."""
    content = read_value(text, source)
    return {} if content is None else content


def read_value(text: str, source: str) -> Any:
    """What ``text`` says in YAML, numbers as people mean them."""
    try:
        return _numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise SpecError([f"not valid YAML: {' '.join(str(error).split())}"], source) from error


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e-3, without a point, as text; people mean the number."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value
