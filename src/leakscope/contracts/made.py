"""How an observation came about: what a file of it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import PurePath
from typing import Any

from leakscope import __version__

#: Characters of a fact that a file may say of itself.
MAX_FACT = 2000


@dataclass(frozen=True, kw_only=True)
class Made:
    """By which function or command, of which files (names without folders), and what the check of the sign answered."""

    by: str
    version: str = __version__
    sources: tuple[str, ...] = ()
    sign: str | None = None
    sign_reason: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = (PurePath(str(source).replace("\\", "/")).name for source in self.sources)
        object.__setattr__(self, "sources", tuple(names))

    def facts(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any] | None) -> Made | None:
        """What a file without :func:`problems_of_made` says; None where it says nothing, as up to format 2.

        >>> Made.from_facts(Made(by="a test", sources=("home/update.pt",)).facts()).sources
        ('update.pt',)
        """
        if facts is None:
            return None
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in facts.items()}
        return cls(**values)


def problems_of_made(facts: Any) -> list[str]:
    if facts is None:
        return []
    known = [field.name for field in fields(Made)]
    if not isinstance(facts, dict) or "by" not in facts or set(facts) - set(known):
        return [f"expected null or a mapping of {', '.join(known)} with 'by' in it"]
    lists = {"sources", "notes"}
    wrong = [name for name, value in facts.items() if not (_texts(value) if name in lists else _text(value, name))]
    return [f"{name}: expected {'a list of texts' if name in lists else 'a text'}" for name in wrong]


def _text(value: Any, name: str) -> bool:
    optional = value is None and name in ("sign", "sign_reason")
    return optional or (isinstance(value, str) and len(value) <= MAX_FACT)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_FACT and all(_text(entry, "") for entry in value)
