"""Reasons of a verdict and fates of jobs in sentences: what several examples, scenarios or jobs share is told once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.contracts.tables import in_words
from leakscope.metrics import MEASURES
from leakscope.results.names import name_settings
from leakscope.results.reasons import FLAG_REMEDIES, Reason, Remedy, because
from leakscope.results.records import FindingRow, Row, Status, counted, finding_words
from leakscope.results.verdict import Verdict

#: Reasons in a paragraph; the others are counted.
IN_A_PARAGRAPH = 3

_TOO_WEAK = "attack too weak to judge: "
_LABELS = "{value:.0%} of the labels are recovered{chance}; "
_LATE = "the budget of {budget} ended before "
#: The sentence of each reason. Numbers are formatted as usual, "#job" counts jobs; ``who`` are the examples.
REASONS: Mapping[str, str] = {
    "reconstruction": "{who} leak{s} by {attack}: {measured}",
    "identification": "{value:.0%} of the examples are identified, the limit is {limit:.0%}",
    "labels": _LABELS + "the limit is {limit:.0%}",
    "labels-unlimited": _LABELS + "the policy sets no limit (max_label_accuracy)",
    "labels-known": "the adversary knows the labels, but the policy limits their recovery",
    "no-labels": "no attack names labels, but the policy limits their recovery",
    "labels-wrong": "{count} of {total:#attempt}: the labels were guessed wrong",
    "labels-hide": "{count:#example} would reach {value:.1f} dB with the right labels, which an adversary may guess",
    "identification-unmeasured": "identification could not be measured for every example, but the policy limits it",
    "identified-above-chance": (
        "{value:.0%} of the examples are identified, against {baseline:.0%} without information"
    ),
    "certificate-contradicted": "{who}: its certificate contradicts the measured PSNR",
    "no-control": "{who} reach{es} {value:.1f} dB, but no control tells how much of it comes from the update",
    "near-held-out": "{who} reach{es} {value:.1f} dB, but a held-out image is nearly as near ({baseline:.1f} dB)",
    "psnr-unmeasured": "{count:#reconstruction} could not be measured (PSNR is not a number)",
    "measure-missing": "{who}: {label} could not be measured, but the policy limits it",
    "unexplained": "{count} of {total} updates: the best attack leaves up to {value:.1%} of the update unexplained, "
    "the true examples leave {baseline:.1%}",
    "gap": "theory allows {limit:.0f} dB and the best attack reaches {value:.1f} dB: a better one may cross the limit",
    "standard-not-run": "standard attacks not run: {names}",
    "no-support": "{count:#update}: no attack gave a result that could support a pass",
    "no-positive-control": "no positive control gave a result, so nothing shows that these attacks find what is there",
    "weak-on-easy-case": _TOO_WEAK + "without a defence, its labels and visiting order known, it reaches "
    "{value:.1f} dB, {limit:g} dB would show that it works",
    "weak-without-theory": _TOO_WEAK + "it fails without a defence too, and theory does not tell whether the update "
    "hides the inputs",
    "weak-undefended": _TOO_WEAK + "without a defence {reached}, where theory allows {limit:.0f} dB",
    "search-missed": "{count:#update} of {total}: the update determines the inputs, but the search missed them "
    "(optimiser failed)",
    "flag": "{count} of {total:#attempt} raised the flag: {names}",
    "defence-unknown": "no attack that knows this defence was run",
    "defence-unread": "no attack that knows this defence was run: the defence has no channel, or no attack here "
    "reads it",
    "model-not-chosen": "the server may choose the model, and no attack that does so was run",
    "no-result": "no attack gave a result",
    "job-failed": "{count:#job} failed",
    "job-starved": "{count:#job} refused for want of knowledge",
    "control-failed": "{count:#control job} failed",
    "attempts-missing": "{count:#job} missing",
    "attempts-missing, budget": _LATE + "{count} of {total} attempts were made",
    "findings-missing": "{count:#finding} missing",
    "findings-missing, budget": _LATE + "{count:#finding} {were} made",
    "jobs-missing": "{count} of {total} jobs have not been run",
    "jobs-missing, budget": _LATE + "{count} of {total} jobs were run, controls included",
    "spared": "{count:#attempt} {were} not made, on examples that another attack had recovered exactly before",
    "defence-unused": "no attack made use of knowing the defence, so that it has not been tested",
    "theory-allows": "theory allows {limit:.0f} dB",
    "nothing-learnt": "even without a defence the training learns hardly more than a constant guess",
    "attempts-not-run": "{count:#attempt} not run yet",
    "attempts-failed": "{count:#attempt} failed",
    "no-training": "no training is done",
    "training-diverged": "the training broke down with {count} of {total:#seed}",
}

_MORE = "Give the attack more steps"
_KEPT = "un the same command again: what is done "
#: The sentence of each remedy, with its arguments.
REMEDIES: Mapping[str, str] = {
    "again": f"R{_KEPT}stays",
    "retry": f"The report says why. R{_KEPT}stays",
    "more-time": f"Raise --budget, or r{_KEPT}is kept",
    "without-budget": "Run the same command without --budget to have them too",
    "more-steps": f"{_MORE} or restarts, or add others (leakscope list attacks)",
    "more-iterations": f"{_MORE}, such as --attack head-first:iterations=1000",
    "more-restarts": "Give the attack more restarts",
    "other-attacks": "Add attacks that fit (leakscope list attacks), or --attack standard",
    "standard-attacks": "Run them with --attack standard",
    "waive": "Do without them in the policy with {waivers}",
    "precise-attack": "Add another attack, such as head-first, or use dtype: float64",
    "unmixing-attack": "Add an attack that tells the examples of a batch apart, such as head-first or cocktail-party",
    "trained-attack": "Add an attack that is trained on protected updates",
    "label-attack": "Add an attack that reads labels, such as idlg",
    "choose-model": "Add an attack that chooses the model, such as --attack robbing-the-fed",
    "honest-server": "Take the server for honest (--knowledge)",
    "learn-defence": "Add learning-to-invert, which needs no channel, with --knowledge informed_server",
    "know-defence": "Let attacks know it with --knowledge adaptive_server",
    "grant-client": "Grant what the attacks do not know of the client (--knowledge)",
    "grant-knowledge": "Grant what they ask for (knowledge), or leave these attacks out (standard ones with "
    "--waive NAME)",
    "grant-recipe": "Grant the client's recipe (knowledge local_epochs, batch_size, learning_rate), or add the attack "
    "sme, which needs none",
    "grant-labels": "Grant the labels with --labels counts or --labels yes",
    "grant-all-labels": "Grant the labels with --labels yes",
    "judge-with-labels": "Judge an adversary who knows them with --labels yes",
    "withhold-labels": "Withhold them (--labels no)",
    "true-simulations": "Tell the attack the real protocol and defence, or give it examples of the same kind",
    "lower-learning-rate": "Lower the attack's learning rate, or use dtype: float64",
    "slower-protocol": "Lower the protocol's learning rate, or add another attack",
    "more-rounds": "Give the protocol more rounds",
    "stronger-defence": "Use a stronger defence",
    "keep-controls": "Leave the controls on (controls: true)",
    "keep-findings": "Leave the findings on (no --no-findings)",
    "more-data": "Give the data more examples to tell them from",
    "set-limit": "Set {limit} in the policy",
    "drop-limit": "Drop {limit} from the policy",
    "look-at-pictures": "Look at the pictures",
    "report-defect": "Report it: either the attack's proof or the measure is wrong",
    "audit-again": "The same audit in the same folder makes it again",
}


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
    sentences = []
    for one in remedy.alternatives:
        waivers = " ".join(f"--waive {name}" for name in one.arguments.get("attacks", ()))
        sentences.append(REMEDIES[one.kind].format(**{**one.arguments, "waivers": waivers}))
    return ". Or ".join([sentences[0], *(text[0].lower() + text[1:] for text in sentences[1:])])


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
    for setting in name_settings(verdict):
        for told in over_examples(reasons(setting.verdict)):
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
    names = {setting.scenario: f"{setting.name} ({setting.short})" for setting in name_settings(verdict)}
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
