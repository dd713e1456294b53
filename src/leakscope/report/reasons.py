"""Reasons of a verdict for the top of the page: each told once, with the settings and examples that share it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from leakscope.report.settings import Setting
from leakscope.results.reasons import Reason

#: Examples that are named in a line; those beyond are counted.
MAX_EXAMPLES = 8
_EXAMPLE = re.compile(r"example (\d+)(?=\D)")


@dataclass
class Line:
    """One reason, the settings it holds for, and the examples it is told of."""

    text: str
    settings: list[str] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)

    @property
    def names(self) -> str:
        return ", ".join(self.settings)

    @property
    def others(self) -> str:
        """The further examples it holds for, in words."""
        others = self.examples[1:]
        named = ", ".join(map(str, others[:MAX_EXAMPLES]))
        more = f" and {len(others) - MAX_EXAMPLES} more" if len(others) > MAX_EXAMPLES else ""
        return f"also example{'s' if len(others) > 1 else ''} {named}{more}" if others else ""


@dataclass(frozen=True)
class Group:
    """Reasons with the same remedy; none where there is none to tell."""

    remedy: str
    lines: list[Line]


def grouped(settings: Sequence[Setting], doubts: Iterable[Reason]) -> list[Group]:
    """The reasons of all settings, then those of the whole audit, in the order in which they first come.

    >>> [group] = grouped([], [Reason("example 1: no SSIM", "Drop it"), Reason("example 4: no SSIM", "Drop it")])
    >>> [(line.text, line.others) for line in group.lines], group.remedy
    ([('example 1: no SSIM', 'also example 4')], 'Drop it')
    """
    told = [(setting.name, reason) for setting in settings for reason in setting.verdict.reasons]
    remedies: dict[str, dict[str, Line]] = {}
    for name, reason in (*told, *(("", doubt) for doubt in doubts)):
        lines = remedies.setdefault(reason.remedy.rstrip("."), {})
        example = _EXAMPLE.match(reason.text)
        same = _EXAMPLE.sub("example", reason.text, count=1) if example else reason.text
        line = lines.setdefault(same, Line(reason.text))
        if name and name not in line.settings:
            line.settings.append(name)
        if example and int(example[1]) not in line.examples:
            line.examples.append(int(example[1]))
    return [Group(remedy, list(lines.values())) for remedy, lines in remedies.items()]


def remarks(settings: Sequence[Setting]) -> list[Line]:
    """What the policy does not limit and people ought to know, each once."""
    lines: dict[str, Line] = {}
    for setting in settings:
        for remark in setting.verdict.remarks:
            lines.setdefault(remark, Line(remark)).settings.append(setting.name)
    return list(lines.values())
