"""Reasons of a verdict and fates of jobs, told briefly: what several examples, settings or jobs share is told once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leakscope.results.names import name_settings
from leakscope.results.records import FindingRow, Row, Status, counted, finding_words

if TYPE_CHECKING:
    from leakscope.results.reasons import Reason
    from leakscope.results.verdict import Verdict

#: Reasons in a paragraph; the others are counted.
IN_A_PARAGRAPH = 3
_EXAMPLE = re.compile(r"example (\d+)(:?) (.+)", re.DOTALL)
#: A number that is no part of a word: not that of a layer "conv1".
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.]*[A-Za-z_])")
_PLURAL = {"leaks": "leak", "reaches": "reach", "is": "are", "has": "have", "was": "were"}
_REFUSAL = re.compile(r"^(NotApplicable|MissingKnowledge): ")


@dataclass(frozen=True)
class SharedReason:
    """One reason with the names of the settings it holds for; none where it concerns the whole audit."""

    settings: tuple[str, ...]
    text: str
    remedy: str = ""

    @property
    def names(self) -> str:
        return ", ".join(self.settings)

    def __str__(self) -> str:
        return f"{self.names}: {self.text}" if self.settings else self.text


@dataclass(frozen=True)
class RemedyGroup:
    """Reasons with the same remedy, which is empty where there is none to tell."""

    remedy: str
    reasons: list[SharedReason]


def by_remedy(verdict: Verdict, others: Iterable[Reason] = ()) -> list[RemedyGroup]:
    """Every reason once, ``others`` last; those with the same remedy together, in the order in which they come."""
    groups: dict[str, list[SharedReason]] = {}
    for reason in (*shared_reasons(verdict), *(SharedReason((), other.text, other.remedy) for other in others)):
        groups.setdefault(reason.remedy.rstrip("."), []).append(reason)
    return [RemedyGroup(remedy, reasons) for remedy, reasons in groups.items()]


def shared_remarks(verdict: Verdict) -> list[SharedReason]:
    """What the policy does not limit and people ought to know, each once."""
    places: dict[str, list[str]] = {}
    for setting in name_settings(verdict):
        for remark in setting.verdict.remarks:
            places.setdefault(remark, []).append(setting.name)
    return [SharedReason(tuple(names), remark) for remark, names in places.items()]


def shared_reasons(verdict: Verdict) -> list[SharedReason]:
    """Every reason once: examples of a setting in one sentence, equal sentences of several settings in one line."""
    settings = name_settings(verdict)
    places: dict[tuple[str, str], list[str]] = {}
    for setting in settings:
        for told in over_examples(setting.verdict.reasons):
            places.setdefault(told, []).append(setting.name)
    whole = [(reason.text, reason.remedy) for reason in verdict.doubts_of_all]
    shared = [SharedReason(tuple(names), *told) for told, names in places.items()]
    return [*shared, *(SharedReason((), *told) for told in dict.fromkeys(whole))]


def over_examples(reasons: Iterable[Reason]) -> list[tuple[str, str]]:
    """Text and remedy of each reason, those that differ only in the example and its numbers as one."""
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for reason in reasons:
        match = _EXAMPLE.fullmatch(reason.text)
        index, colon, rest = match.groups() if match else ("", "", reason.text)
        pattern = (colon, _NUMBER.sub("#", rest), reason.remedy) if match else ("no example", rest, reason.remedy)
        groups.setdefault(pattern, []).append((index, rest))
    told = []
    for (colon, _, remedy), members in groups.items():
        indices, rests = [index for index, _ in members], [rest for _, rest in members]
        if colon == "no example":
            told.append((rests[0], remedy))
        elif len(members) == 1:
            told.append((f"example {indices[0]}{colon} {rests[0]}", remedy))
        else:
            told.append((_of_several(indices, colon, _with_ranges(rests)), remedy))
    return told


def _of_several(indices: Sequence[str], colon: str, rest: str) -> str:
    """A sentence on one example as one on several.

    >>> _of_several(["1", "3"], "", "leaks by dlg: PSNR 30 dB"), _of_several(list("12345"), ":", "SSIM is missing")
    ('examples 1, 3 leak by dlg: PSNR 30 dB', '5 examples: SSIM is missing')
    """
    few = len(indices) <= IN_A_PARAGRAPH
    subject = f"examples {', '.join(indices)}" if few else counted(len(indices), "example")
    verb, _, object_ = rest.partition(" ")
    plain_verb = not colon and verb in _PLURAL
    return f"{subject} {_PLURAL[verb]} {object_}" if plain_verb else f"{subject}: {rest}"


def _with_ranges(texts: Sequence[str]) -> str:
    """Texts that differ in their numbers as one, with the lowest and the highest.

    >>> _with_ranges(["PSNR 21.4 dB, 9 dB above", "PSNR 30.5 dB, 9 dB above"])
    'PSNR 21.4 to 30.5 dB, 9 dB above'
    """
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    spans = (
        column[0] if len(set(column)) == 1 else f"{min(column, key=float)} to {max(column, key=float)}"
        for column in columns
    )
    return _NUMBER.sub(lambda _: next(spans), texts[0])


@dataclass(frozen=True)
class SharedFate:
    """Jobs of one attack, or findings of one kind, that gave no result for the same reason."""

    status: Status
    name: str
    reason: str
    count: int

    def __str__(self) -> str:
        return f"{self.status}: {self.name}, {counted(self.count, 'job')}: {self.reason}"


def shared_fates(rows: Iterable[Row], findings: Iterable[FindingRow] = ()) -> list[SharedFate]:
    """Refused and failed jobs, a line for each attack and reason; of findings only what failed."""
    counts: dict[tuple[Status, str, str], int] = {}
    told = [(row.status, row.job.attack_name, row.reason) for row in rows if row.status != "done"]
    told += [(row.status, finding_words(row.kind), row.reason) for row in findings if row.status == "failed"]
    for status, name, reason in told:
        fate = (status, name, _REFUSAL.sub("", reason))
        counts[fate] = counts.get(fate, 0) + 1
    return [SharedFate(*fate, count) for fate, count in sorted(counts.items(), key=lambda item: item[0][0] == "failed")]


def paragraph(verdict: Verdict) -> str:
    """The verdict in one paragraph: outcome, strongest reconstruction, and the first reasons with their remedies."""
    names = {setting.cell: f"{setting.name} ({setting.short})" for setting in name_settings(verdict)}
    sentences = [verdict.outcome.upper()]
    if (worst := verdict.worst) is not None:
        best = f"example {worst.index} at {worst.psnr:.1f} dB by {worst.attack_name}"
        sentences.append(f"Strongest reconstruction: {best}, {names[worst.protocol, worst.defense]}")
    reasons = shared_reasons(verdict)
    for reason in reasons[:IN_A_PARAGRAPH]:
        sentences += [str(reason), reason.remedy]
    if (more := len(reasons) - IN_A_PARAGRAPH) > 0:
        sentences.append(f"There {'is' if more == 1 else 'are'} {counted(more, 'more reason')}")
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)
