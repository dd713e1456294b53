"""Reasons of a verdict, fates of jobs and certificates in sentences: what several of them share is told once."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.contracts.certificate import Certificate
from leakscope.contracts.reconstruction import FLAG_REMEDIES, RECOVERED
from leakscope.contracts.tables import in_words
from leakscope.metrics import MEASURES
from leakscope.report.options import typed_options, word_of
from leakscope.report.words import TEXTS, fixed, short
from leakscope.results.reasons import Reason, Remedy, because
from leakscope.results.records import NAN, FindingRow, Row, Status, counted, finding_words
from leakscope.results.setting_verdict import StrongestExample
from leakscope.results.verdict import Verdict

#: Reasons in a paragraph; the others are counted.
IN_A_PARAGRAPH = 3

#: The sentence of each reason and, with its arguments, of each remedy.
REASONS: Mapping[str, str] = TEXTS["reasons"]
REMEDIES: Mapping[str, str] = TEXTS["remedies"]
EXAMPLES: Mapping[str, str] = TEXTS["examples"]
ADVICE: Mapping[str, str] = TEXTS["advice"]
#: From here on an input is recovered (dB).
RECOVERED_PSNR = -20 * math.log10(RECOVERED)


class _Numbers:
    """The same number of several reasons: formatted as one, or as lowest and highest."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def __format__(self, spec: str) -> str:
        if spec.startswith("#"):
            return counted(self.values[0], spec[1:])
        ends = [format(end, spec) for end in (min(self.values), max(self.values))]
        return " to ".join(dict.fromkeys(ends))


def reason_text(*reasons: Reason) -> str:
    """Write reasons that differ only in their examples and numbers as one sentence, without scenario and remedy.

    >>> leaks = [Reason(code="no-control", example=index, value=20.0 + index) for index in (1, 3)]
    >>> reason_text(leaks[0])
    'example 1 reaches 21.0 dB, but no control tells how much of it comes from the update'
    >>> reason_text(*leaks)
    'examples 1, 3 reach 21.0 to 23.0 dB, but no control tells how much of it comes from the update'
    """
    first, one = reasons[0], len(reasons) == 1
    facts: dict[str, Any] = {entry.name: getattr(first, entry.name) for entry in dataclasses.fields(first)}
    numbers = {
        name: _Numbers([getattr(reason, name) for reason in reasons])
        for name in ("value", "limit", "baseline", "count", "total")
        if facts[name] is not None
    }
    several = f"{len(reasons):,} examples"
    if len(reasons) <= IN_A_PARAGRAPH:
        several = f"examples {', '.join(str(reason.example) for reason in reasons)}"
    facts |= numbers | {
        "who": f"example {first.example}" if one else several,
        "s": "s" if one else "",
        "es": "es" if one else "",
        "were": "was" if first.count == 1 else "were",
        "names": ", ".join(first.names),
        "label": MEASURES[first.measure].label if first.measure else "",
        "measured": _measured(reasons) if first.code == "reconstruction" else "",
        "chance": f", {first.baseline:.0%} without information" if first.baseline is not None else "",
        "reached": "it was not run" if first.value is None else f"it reaches {numbers['value']:.1f} dB",
    }
    late = f"{first.code}, budget"
    text = REASONS[late if first.budget is not None and late in REASONS else first.code].format(**facts)
    return f"of the attacks that know this defence: {text}" if first.knowing else text


def _measured(reasons: Sequence[Reason]) -> str:
    first = reasons[0]
    measure, values = MEASURES[first.measure or "psnr"], [reason.value or 0.0 for reason in reasons]
    if measure.digits is None:
        return measure.label.lower()
    if measure.name != "psnr":
        return f"{measure.label} {_Numbers(values):.2f}"
    lifts = [(reason.value or 0.0) - reason.baseline for reason in reasons if reason.baseline is not None]
    lift = f", {_Numbers(lifts):.1f} dB above its control" if lifts else ""
    return f"PSNR {_Numbers(values):.1f} dB{lift}"


@in_words.register
def _(reason: Reason) -> str:
    place = f"{reason.scenario.protocol}, defence {reason.scenario.defense}: " if reason.scenario else ""
    text = place + reason_text(reason)
    return text if reason.remedy is None else f"{text}. {reason.remedy}."


@in_words.register
def _(remedy: Remedy) -> str:
    sentences = [REMEDIES[one.kind].format(**_told_of(one)) for one in remedy.alternatives]
    return ". Or ".join([sentences[0], *(text[0].lower() + text[1:] for text in sentences[1:])])


def _told_of(remedy: Remedy) -> dict[str, Any]:
    arguments, options = remedy.arguments, typed_options(remedy.changes or {})
    points = [f"{value:g}" for value in arguments.get("measured", ())]
    measured = f" (in the defence study they cost {in_a_row(points)} points of accuracy)" if points else ""
    return {
        **arguments,
        "how": f": {options}" if options else EXAMPLES.get(remedy.kind, "") if remedy.changes is None else "",
        "waivers": " ".join(f"--waive {name}" for name in arguments.get("attacks", ())),
        "defences": ", ".join(map(word_of, arguments.get("defenses", ()))),
        "study": measured,
    }


def in_a_row(words: Sequence[str]) -> str:
    """Join words as a sentence does.

    >>> in_a_row(["5", "6", "18"]), in_a_row(["5"])
    ('5, 6 and 18', '5')
    """
    return " and ".join(one for one in (", ".join(words[:-1]), *words[-1:]) if one)


def advice_text(verdict: Verdict) -> str:
    """Say what to do next in one sentence; empty where nothing is, or where nobody says what was asked for."""
    advice, told = verdict.advice, ADVICE
    if advice is None or advice.kind == "nothing":
        return ""
    if advice.kind == "undecidable":
        names = verdict.names
        places = [(names.get(one.scenario) if one.scenario else None, reason_text(one)) for one in advice.open]
        lines = [f"{place}: {text}" if place else text for place, text in places]
        return told["undecidable"].format(reasons="; ".join(dict.fromkeys(lines[:IN_A_PARAGRAPH])))
    if advice.changes is None:
        return ""
    options = typed_options(advice.changes)
    text = told["options"].format(options=options) if options else told["again"]
    whole = told["budget"] if "budget" in advice.changes else ""
    return f"{text}{whole}{told['folder'] if advice.new_folder else ''}."


def flag_remedy(flag: str) -> str:
    """What to do about a raised flag, in one sentence; empty where nothing is known."""
    return str(because("flag", *FLAG_REMEDIES[flag]).remedy) if flag in FLAG_REMEDIES else ""


@dataclass(frozen=True)
class SharedReason:
    """One reason with the names of the scenarios it holds for; none where it concerns the whole audit."""

    settings: tuple[str, ...]
    text: str
    remedy: str = ""
    code: str = ""

    @property
    def names(self) -> str:
        return ", ".join(self.settings)

    def __str__(self) -> str:
        return f"{self.names}: {self.text}" if self.settings else self.text


def by_remedy(verdict: Verdict, others: Iterable[SharedReason] = ()) -> dict[str, list[SharedReason]]:
    """Every reason once by its remedy (empty where there is none), in the order in which they come, ``others`` last."""
    groups: dict[str, list[SharedReason]] = {}
    for reason in (*shared_reasons(verdict), *others):
        groups.setdefault(reason.remedy, []).append(reason)
    return groups


def shared_remarks(verdict: Verdict) -> list[SharedReason]:
    """What the policy does not limit and people ought to know, each once."""
    return _shared(verdict, lambda setting: setting.remarks)


def shared_reasons(verdict: Verdict) -> list[SharedReason]:
    """Every reason once: examples of a scenario in one sentence, equal sentences of several scenarios in one line."""
    whole = [SharedReason((), *told) for told in dict.fromkeys(over_examples(verdict.doubts_of_all))]
    return [*_shared(verdict, lambda setting: setting.reasons), *whole]


def _shared(verdict: Verdict, reasons: Callable[[Any], list[Reason]]) -> list[SharedReason]:
    places: dict[tuple[str, str, str], list[str]] = {}
    for setting in verdict.settings:
        for told in over_examples(reasons(setting)):
            places.setdefault(told, []).append(setting.name)
    return [SharedReason(tuple(names), *told) for told, names in places.items()]


def over_examples(reasons: Iterable[Reason]) -> list[tuple[str, str, str]]:
    """Text, remedy and code of each reason, those that differ only in the example and its numbers as one."""
    groups: dict[Reason, list[Reason]] = {}
    for reason in reasons:
        alike = dataclasses.replace(reason, scenario=None)
        if reason.example is not None:
            known = [None if number is None else 0 for number in (reason.value, reason.baseline)]
            alike = dataclasses.replace(alike, example=-1, value=known[0], baseline=known[1])
        groups.setdefault(alike, []).append(reason)
    return [
        (reason_text(*(members if alike.example is not None else members[:1])), str(alike.remedy or ""), alike.code)
        for alike, members in groups.items()
    ]


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
    told = [(row.status, row.job.attack_name, row.refusal) for row in rows if row.status != "done"]
    told += [(row.status, finding_words(row.kind), row.reason) for row in findings if row.status == "failed"]
    counts = sorted(Counter(told).items(), key=lambda item: item[0][0] == "failed")
    return [SharedFate(*fate, count) for fate, count in counts]


@in_words.register
def paragraph(verdict: Verdict) -> str:
    """The verdict in one paragraph: outcome, strongest reconstruction, and the first reasons with their remedies."""
    names = {setting.scenario: f"{setting.name} ({setting.short})" for setting in verdict.settings}
    sentences = [verdict.outcome.upper()]
    if (worst := verdict.worst) is not None:
        best = f"example {worst.index} at {worst.psnr:.1f} dB by {worst.attack_name}"
        sentences.append(f"Strongest reconstruction: {best}, {names[worst.scenario]}")
    reasons = shared_reasons(verdict)
    for reason in reasons[:IN_A_PARAGRAPH]:
        sentences += [str(reason), reason.remedy]
    if (more := len(reasons) - IN_A_PARAGRAPH) > 0:
        sentences.append(f"There {'is' if more == 1 else 'are'} {counted(more, 'more reason')}")
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)


def certificate_words(certificate: Certificate | None, psnr: float = NAN) -> str:
    """Say what a certificate proves of one example; empty without one. The truth has the last word, where known.

    >>> proof = Certificate(residual=0.4, tolerance=1.0, free_directions=0, method="masks decoded")
    >>> certificate_words(proof), certificate_words(proof, 12.0)
    ('recovered, certified', 'certified, but the original differs (12.0 dB)')
    >>> certificate_words(Certificate(residual=0.4, tolerance=1.0, free_directions=2304, method="Gauss-Newton"))
    'explains the update, but 2,304 directions of the input are not determined'
    """
    if certificate is None:
        return ""
    if certificate.holds:
        wrong = psnr < RECOVERED_PSNR
        return f"certified, but the original differs ({fixed(psnr)} dB)" if wrong else "recovered, certified"
    if certificate.not_unique:
        free = counted(certificate.free_directions or 0, "direction")
        verb = "is" if certificate.free_directions == 1 else "are"
        return f"explains the update, but {free} of the input {verb} not determined"
    if certificate.explains:
        return "explains the update; free directions were not counted"
    return "does not explain the update"


def certificate_details(certificate: Certificate | None, psnr: float = NAN) -> str:
    """Say the same with the method and the residual."""
    if certificate is None:
        return ""
    residual = f"residual {short(certificate.residual)} (limit {short(certificate.tolerance)})"
    return f"{certificate_words(certificate, psnr)}; {certificate.method}, {residual}"


def shared_words(certificates: Sequence[Certificate | None], psnrs: Sequence[float] = ()) -> list[str]:
    """Say once what several examples share; leave out those that do not explain the update.

    >>> proof = Certificate(residual=0.4, tolerance=1.0, free_directions=0, method="masks decoded")
    >>> shared_words([proof, None, proof])
    ['2 of 3 examples: recovered, certified (masks decoded)']
    """
    if not certificates:
        return []
    known = psnrs or [NAN] * len(certificates)
    told = Counter(
        f"{certificate_words(proof, psnr)} ({proof.method})"
        for proof, psnr in zip(certificates, known, strict=True)
        if proof is not None and proof.explains
    )
    return [f"{count} of {counted(len(certificates), 'example')}: {words}" for words, count in told.items()]


def strongest_words(examples: Sequence[StrongestExample]) -> list[str]:
    """Say what was proved of the strongest reconstruction of each example, beside the truth."""
    return shared_words([example.certificate for example in examples], [example.psnr for example in examples])
