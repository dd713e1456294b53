"""What is wrong with arguments, told in one error; and how large things from files and specs may be.

Caps are far above honest use and far below what takes a machine down. Check a size before anything of it is made.
"""

import os
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def check_seed(seed: Any) -> None:
    """Raise UserError unless torch takes it as a seed."""
    if not (is_whole(seed, -(2**63)) and seed < 2**64):
        raise UserError(f"seed: expected a whole number from -2**63 to 2**64 - 1, got {brief(seed)}")


@dataclass(frozen=True)
class Cap:
    """The most there may be ``of`` something, unless the environment variable ``name`` allows more."""

    name: str
    default: int
    unit: str
    of: str = ""

    @property
    def value(self) -> int:
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) > 0):
            raise UserError(f"{self.name}: expected a whole number of {self.unit}, got {brief(text)}")
        return int(text)

    def problem(self, amount: int, fix: str = "") -> str | None:
        """What is wrong with so much, and how to put it right; None if nothing is.

        >>> Cap("LEAKSCOPE_MAX_DEMO", 3, "things").problem(4, "Take fewer.")
        'expected at most 3 things, got 4. Take fewer. LEAKSCOPE_MAX_DEMO=4 would allow it'
        """
        if amount <= self.value:
            return None
        told = f"{amount:,}" if amount < 10**18 else "far more"
        allow = f"{self.name}={amount} would allow it" if amount < 10**18 else ""
        return " ".join(filter(None, (f"expected at most {self.value:,} {self.unit}, got {told}.", fix, allow)))

    def check(self, where: str, amount: int, fix: str = "") -> None:
        """ValueError where there is too much of it."""
        if problem := self.problem(amount, fix):
            raise UserError(f"{where}: {problem}")


_MEMORY = "examples in memory, as the 32-bit floats they become; a file read whole"
BYTES = Cap("LEAKSCOPE_MAX_BYTES", 1 << 30, "bytes", _MEMORY)
PIXELS = Cap("LEAKSCOPE_MAX_PIXELS", 64_000_000, "pixels", "one picture of a folder, before it is resized")
PARAMETERS = Cap("LEAKSCOPE_MAX_PARAMETERS", 200_000_000, "parameters", "a reference model, before it is built")
JOBS = Cap("LEAKSCOPE_MAX_JOBS", 100_000, "jobs", "attempts and controls of one audit")
_WHOLE = "whole numbers in settings: epochs, local steps, rounds, iterations"
EXAMPLES = Cap("LEAKSCOPE_MAX_EXAMPLES", 10_000, "examples", "what one attack searches for")
COUNT = Cap("LEAKSCOPE_MAX_COUNT", 1_000_000, "of them", _WHOLE)
PIECES = Cap("LEAKSCOPE_MAX_PIECES", 1_000, "of them", "layers and workers of a reference model")
SPEC_BYTES = Cap("LEAKSCOPE_MAX_SPEC_BYTES", 1 << 17, "bytes", "the text of a spec")
SPEC_VALUES = Cap("LEAKSCOPE_MAX_SPEC_VALUES", 5_000, "values", "a spec with its aliases written out")
FACTS_BYTES = Cap("LEAKSCOPE_MAX_FACTS_BYTES", 1 << 22, "bytes", "the facts beside an observation")
CAPS = (BYTES, PIXELS, PARAMETERS, JOBS, EXAMPLES, COUNT, PIECES, SPEC_BYTES, SPEC_VALUES, FACTS_BYTES)
#: Lists within lists; nothing honest comes near it.
DEPTH = 40
#: Axes of one example; torch itself knows no more than 64 of them.
MAX_AXES = 16
#: Bytes of a number as examples hold it.
FLOAT = 4
