"""How large things from files and specs may be: far above honest use, far below what takes a machine down.

A size is compared with its cap before anything of that size is made. Whoever honestly needs more sets the environment
variable of that name, which the error names too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from leakscope.contracts.checks import brief


@dataclass(frozen=True)
class Cap:
    """The most there may be of something, unless the environment variable ``name`` allows more."""

    name: str
    default: int
    unit: str

    @property
    def value(self) -> int:
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) > 0):
            raise ValueError(f"{self.name}: expected a whole number of {self.unit}, got {brief(text)}")
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
        return " ".join(
            part for part in (f"expected at most {self.value:,} {self.unit}, got {told}.", fix, allow) if part
        )

    def check(self, where: str, amount: int, fix: str = "") -> None:
        """ValueError where there is too much of it."""
        problem = self.problem(amount, fix)
        if problem is not None:
            raise ValueError(f"{where}: {problem}")


#: Examples in memory, as the 32-bit floats that they become; also files that are read whole.
BYTES = Cap("LEAKSCOPE_MAX_BYTES", 1 << 30, "bytes")
#: One picture of a folder, before it is resized.
PIXELS = Cap("LEAKSCOPE_MAX_PIXELS", 64_000_000, "pixels")
#: A reference model, before it is built.
PARAMETERS = Cap("LEAKSCOPE_MAX_PARAMETERS", 200_000_000, "parameters")
#: Attempts and controls of one audit.
JOBS = Cap("LEAKSCOPE_MAX_JOBS", 100_000, "jobs")
#: Whole numbers in settings and facts: local steps, epochs, rounds, iterations, restarts.
COUNT = Cap("LEAKSCOPE_MAX_COUNT", 1_000_000, "of them")
#: Layers, workers and axes, each of which costs time however small it is.
PIECES = Cap("LEAKSCOPE_MAX_PIECES", 1_000, "of them")
#: The text of a spec; and what it holds once its aliases are written out.
SPEC_BYTES = Cap("LEAKSCOPE_MAX_SPEC_BYTES", 1 << 17, "bytes")
SPEC_VALUES = Cap("LEAKSCOPE_MAX_SPEC_VALUES", 5_000, "values")
#: The facts beside an observation, and the curves of a job.
JSON_BYTES = Cap("LEAKSCOPE_MAX_JSON_BYTES", 1 << 26, "bytes")
#: Lists within lists; nothing honest comes near it.
DEPTH = 40
#: Axes of one example; torch itself knows no more than 64 of them.
MAX_AXES = 16
#: Bytes of a number as examples hold it.
FLOAT = 4
