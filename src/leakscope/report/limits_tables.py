"""The limits of a model as small tables of text; their words are in ``limits.txt.j2`` and ``vertical.txt.j2``."""

import math
from dataclasses import dataclass

from leakscope.limits.report import Limits
from leakscope.limits.vertical import VerticalLimits
from leakscope.report.template import cells_of, text_template
from leakscope.report.words import likeness


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, rows of as many cells, and a remark below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str | None = None


def tables_of(limits: Limits | VerticalLimits) -> tuple[Table, ...]:
    """The tables of one gradient or of rounds of vertical learning, whichever was asked."""
    return vertical_tables(limits) if isinstance(limits, VerticalLimits) else limits_tables(limits)


def limits_tables(limits: Limits) -> tuple[Table, ...]:
    return _filled("limits.txt.j2", limits)


def vertical_tables(limits: VerticalLimits) -> tuple[Table, ...]:
    return _filled("vertical.txt.j2", limits)


def brief(value: float | None) -> str:
    """Three digits, or a word.

    >>> brief(0.12345), brief(float("inf")), brief(None)
    ('0.123', 'infinite', 'not computed')
    """
    if value is None or math.isnan(value):
        return "not computed"
    return "infinite" if math.isinf(value) else f"{value:.3g}"


def met(value: bool | None) -> str:
    return "met" if value else "not met"


def _filled(template: str, limits: Limits | VerticalLimits) -> tuple[Table, ...]:
    text = text_template(template, {"brief": brief, "met": met, "likeness": likeness}).render(limits=limits)
    return tuple(map(_table, text.removeprefix("= ").split("\n= ")))


def _table(text: str) -> Table:
    title, *lines = filter(None, text.splitlines())
    note = next((line.removeprefix("> ") for line in lines if line.startswith("> ")), None)
    cells = [cells_of(line) for line in lines if not line.startswith("> ")]
    return Table(title, cells[0] if cells else (), tuple(cells[1:]), note)
