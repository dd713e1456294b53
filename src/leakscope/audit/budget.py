"""How long the attacks of an audit may go on: once that is used up no further job is begun, and the verdict says so."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any

from leakscope.contracts.checks import brief
from leakscope.contracts.errors import UserError

LONGEST = 10**7
_SPAN = re.compile(r"(?:(?P<h>[\d.]+)h)?(?:(?P<m>[\d.]+)m)?(?:(?P<s>[\d.]+)s?)?")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}


class Budget:
    """Seconds that jobs may be begun in, counted from the first; None is no limit.

    The first job is always begun, so that a budget however small gets on with every run.

    >>> ticks = iter([0.0, 5.0, 10.0])
    >>> budget = Budget(10.0, clock=lambda: next(ticks))
    >>> budget.allows(), budget.allows(), budget.allows()
    (True, True, False)
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._since: float | None = None
        #: Which jobs are not worth the time; they are passed over (``audit/spared.py``).
        self.spares: Callable[[Any], bool] = lambda job: False

    def allows(self) -> bool:
        """Whether one more job may be begun."""
        if self.seconds is None:
            return True
        now = self._clock()
        self._since = now if self._since is None else self._since
        return now - self._since < self.seconds

    def trial_seconds(self, most: float) -> float:
        """What timing some steps beforehand may take, beside the budget.

        >>> Budget().trial_seconds(60.0), Budget(10.0).trial_seconds(60.0)
        (60.0, 10.0)
        """
        return most if self.seconds is None else min(most, self.seconds)


def seconds_of(value: Any) -> float | None:
    """A time as people write it, in seconds.

    >>> [seconds_of(text) for text in ("90s", "10m", "1h30m", "1.5 h", "45", 600)]
    [90.0, 600.0, 5400.0, 5400.0, 45.0, 600.0]
    """
    if value is None:
        return None
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) <= LONGEST else math.nan
    elif isinstance(value, str) and (match := _SPAN.fullmatch(value.replace(" ", "").lower())):
        try:
            seconds = sum(_SECONDS[unit] * float(number) for unit, number in match.groupdict().items() if number)
        except ValueError:  # two points in a number
            seconds = math.nan
    if not 0 < seconds <= LONGEST:
        most = f"{LONGEST:,} s"
        raise UserError(f"expected a time such as 90s, 10m or 1h30m, or seconds, up to {most}, got {brief(value)}")
    return seconds


def span(seconds: float) -> str:
    """A time in words, as it may be written again.

    >>> span(600), span(5400), span(90), span(0.5), span(3725.5)
    ('10 m', '1 h 30 m', '1 m 30 s', '0.5 s', '1 h 2 m 5.5 s')
    """
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    words = [f"{number:g} {unit}" for number, unit in ((hours, "h"), (minutes, "m"), (left, "s")) if number]
    return " ".join(words)
