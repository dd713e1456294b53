"""What is wrong with arguments: one line each, and one error that tells them all."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from leakscope.contracts.errors import UserError

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother, _BRIEF.maxlong = 4, 120, 120, 60
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxdict = 8


def brief(value: Any) -> str:
    """``value`` as errors show it: its repr, cut short however large or deep it is.

    >>> brief([1, 2]), brief(list(range(99)))
    ('[1, 2]', '[0, 1, 2, 3, 4, 5, 6, 7, ...]')
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length():,} bits"
    return _BRIEF.repr(value)


def is_whole(value: Any, least: int = 1) -> TypeGuard[int]:
    """Whether it is a whole number of at least ``least``; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def expected(what: str, fits: Callable[[Any], bool], /, **values: Any) -> list[str]:
    """A line for each of the named values that does not fit.

    >>> expected("a share", lambda value: 0 <= value <= 1, dropout=0.5, pruned=2)
    ['pruned: expected a share, got 2']
    """
    return [f"{name}: expected {what}, got {brief(value)}" for name, value in values.items() if not fits(value)]


def whole(least: int = 1, /, **values: Any) -> list[str]:
    """A line for each of the named values that is no whole number of at least ``least``."""
    return expected(f"a whole number of at least {least}", lambda value: is_whole(value, least), **values)


def refuse(where: str, problems: Sequence[str], most: int | None = None) -> None:
    """Raise one ValueError with all ``problems``, or with ``most`` of them and how many more there are; if any."""
    if problems:
        told = list(problems[:most])
        more = [f"and {len(problems) - len(told)} more"] if len(problems) > len(told) else []
        raise UserError("\n  - ".join([f"{where}:", *told, *more]))
