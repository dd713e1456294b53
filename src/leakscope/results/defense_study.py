"""Study what each defence leaves to the strongest attack, and what it costs.

Leakage of a setting is the mean over examples of the best PSNR of any attack, or of a guess that needs no update. Cost
is what the model fails to learn when every update is protected. A setting is on the front where no other leaks less at
no higher cost, nor costs less at no more leakage; one from which more examples are identified beats nothing.

What has not been tested is shown, but beats nothing and is never recommended: a defence that no attack knew, attacks
that fail undefended, and a training in which nothing is learnt even without a defence.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.metrics import MEASURES, interval
from leakscope.results.baselines import Baselines
from leakscope.results.coverage import WIDE_GAP
from leakscope.results.names import parts_of
from leakscope.results.reasons import InScenario, Reason, Scenario, because
from leakscope.results.records import NAN, UTILITY, FindingRow, Row, highest, mean, number
from leakscope.results.setting_verdict import SettingVerdict
from leakscope.results.verdict import Verdict

#: PSNR below this apart counts as the same leakage (dB): what few examples tell apart is no finding.
SAME_LEAKAGE = 1.0
#: Accuracy above that of a constant guess from which on a training has learnt something.
LEARNT = 0.1
#: Limits for which the study names the cheapest defence (dB).
LIMITS = (30.0, 25.0, 20.0, 15.0, 12.0)
Interval = tuple[float, float]
#: Beyond this PSNR pictures look the same (dB): an exact copy leaks no more than one that no eye tells apart.
LEGIBLE = 60.0
#: The option of an attack that leaves out what it knows of the defence.
IGNORES = "ignore_defense"


@dataclass(frozen=True, kw_only=True)
class Worth(InScenario):
    """Hold what knowing a defence was worth to one attack, in dB."""

    protocol: str
    defense: str
    attack_name: str
    gain: float
    interval: Interval
    examples: int


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hold the trainings of one setting, a number for each seed."""

    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    losses: tuple[float, ...]
    test_losses: tuple[float, ...]
    learning_rates: tuple[float, ...]
    diverged: int = 0
    chance: float = NAN
    epsilon: float = NAN

    @property
    def is_accuracy(self) -> bool:
        return not all(math.isnan(value) for value in self.accuracies)

    @property
    def utilities(self) -> tuple[float, ...]:
        """Return accuracies, or negative test losses where there are none."""
        return self.accuracies if self.is_accuracy else tuple(-loss for loss in self.test_losses)

    @property
    def learns(self) -> bool:
        """Check whether it learnt more than a constant guess knows; assumed where nobody can tell."""
        return not self.is_accuracy or math.isnan(self.chance) or mean(self.accuracies) > self.chance + LEARNT


@dataclass(frozen=True, kw_only=True)
class StudyRow(InScenario):
    """Say what one protocol with one defence leaks and costs, and whether something else is better at both."""

    protocol: str
    defense: str
    outcome: str
    #: Mean over examples of the best PSNR of any attack, at most LEGIBLE each; and the highest, uncut. Neither is less
    #: than what a guess without the update reaches, where controls tell.
    leakage: float = NAN
    leakage_interval: Interval = (NAN, NAN)
    highest: float = NAN
    #: Mean over examples of the least RMSE of any attack.
    error: float = NAN
    error_interval: Interval = (NAN, NAN)
    examples: int = 0
    #: PSNR of the best guess without the update, mean and highest; and the share of examples that were identified.
    guess: float = NAN
    highest_guess: float = NAN
    identified: float = NAN
    #: The attack that was strongest most often.
    attack: str = ""
    training: Training | None = None
    utility: float = NAN
    utility_interval: Interval = (NAN, NAN)
    #: Utility lost to the same protocol without a defence, seed by seed.
    cost: float = NAN
    cost_interval: Interval = (NAN, NAN)
    allowed_psnr: float = NAN
    feature_error: float = NAN
    #: Whether an attack made use of knowing the defence; always where there is none.
    known: bool = False
    #: Whether the attacks find what lies open, and the training learns something without a defence.
    telling: bool = True
    doubts: tuple[Reason, ...] = ()
    on_front: bool = False
    #: Defence of a setting that is better, where there is one, and whether intervals bear that out.
    beaten_by: str | None = None
    beaten_clearly: bool = False

    @property
    def comparable(self) -> bool:
        """Check that it may stand on the front: attacked by somebody who knew it, and trained."""
        return self.known and self.telling and math.isfinite(self.leakage) and math.isfinite(self.utility)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Name the cheapest defence whose every example stays below any of ``limits`` dB; None where there is none.

    Without limits it is the cheapest that lets no example be identified. ``alike``: others that cost as much.
    """

    protocol: str
    limits: tuple[float, ...]
    row: StudyRow | None
    alike: tuple[StudyRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """Hold all settings in the order of the verdict. ``accuracy``: utility is that, else the negative test loss."""

    rows: tuple[StudyRow, ...]
    choices: tuple[Choice, ...]
    worths: tuple[Worth, ...]
    tolerance: float
    accuracy: bool = True


def study_store(store: Any, verdict: Verdict) -> Study | None:
    """Study a store's audit; None where nothing was trained."""
    spec = store.meta("spec") or {}
    section = spec.get(UTILITY) if isinstance(spec, Mapping) else None
    tolerance = number(section.get("tolerance")) if isinstance(section, Mapping) else NAN
    return make_study(verdict, store.rows(), store.findings(), 0.02 if math.isnan(tolerance) else tolerance)


def make_study(
    verdict: Verdict, rows: Iterable[Row], findings: Iterable[FindingRow], tolerance: float = 0.02
) -> Study | None:
    """Study what each setting leaks and costs; None where no training was asked for. ``tolerance``: of utility."""
    rows, findings = list(rows), list(findings)
    by_setting: dict[Scenario, list[FindingRow]] = defaultdict(list)
    for finding in findings:
        if finding.kind == UTILITY:
            by_setting[finding.scenario].append(finding)
    if not by_setting:
        return None
    trainings = {cell: _training([f for f in some if f.status == "done"]) for cell, some in by_setting.items()}
    accuracy = any(not math.isnan(a) for one in trainings.values() if one is not None for a in one.accuracies)
    trained = [setting for setting in verdict.settings if setting.scenario in trainings]
    guesses = {protocol: _guesses(rows, protocol) for protocol in {setting.protocol for setting in trained}}
    ranked = _ranked([_row(s, rows, findings, trainings, guesses[s.protocol]) for s in trained], tolerance)
    choices, worths = _choices(ranked, tolerance), tuple(worth_of_knowing(rows))
    return Study(rows=ranked, choices=choices, worths=worths, tolerance=tolerance, accuracy=accuracy)


def _training(done: Sequence[FindingRow]) -> Training | None:
    if not done:
        return None

    broken = [finding.content.get("diverged") is True for finding in done]

    def every(name: str, where_diverged: float = NAN) -> tuple[float, ...]:
        pairs = zip(broken, (finding.value(name) for finding in done), strict=True)
        return tuple(where_diverged if diverged and math.isnan(value) else value for diverged, value in pairs)

    return Training(
        seeds=tuple(finding.seed for finding in done),
        accuracies=every("accuracy"),
        losses=every("loss", math.inf),
        test_losses=every("test_loss", math.inf),
        learning_rates=every("learning_rate"),
        diverged=sum(broken),
        chance=done[0].value("chance"),
        epsilon=highest(every("epsilon")),
    )


def _guesses(rows: Iterable[Row], protocol: str) -> dict[int, float]:
    own = [row for row in rows if row.job.protocol == protocol]
    baselines = Baselines(row for row in own if not row.counts)
    attacks = dict.fromkeys(row.job.attack for row in own if row.counts)
    indices = dict.fromkeys(example.index for row in own if row.counts for example in row.examples)
    psnr = MEASURES["psnr"]
    return {index: highest(baselines.value(attack, index, psnr) for attack in attacks) for index in indices}


def _row(
    setting: SettingVerdict,
    rows: Sequence[Row],
    findings: Sequence[FindingRow],
    trainings: Mapping[Scenario, Training | None],
    guesses: Mapping[int, float],
) -> StudyRow:
    cell = setting.scenario
    training, undefended = trainings[cell], trainings.get(Scenario(setting.protocol, "none"))
    attempts = [row for row in rows if row.counts and row.status == "done" and row.job.scenario == cell]
    guessed = [guesses.get(example.index, NAN) for example in setting.examples]
    reached = [highest((example.psnr, guess)) for example, guess in zip(setting.examples, guessed, strict=True)]
    leaked = [min(psnr, LEGIBLE) for psnr in reached]
    least: dict[int, list[float]] = defaultdict(list)
    for row in attempts:
        for example in row.examples:
            least[example.index].append(example.value("rmse"))
    errors = [min(finite) for tries in least.values() if (finite := [e for e in tries if not math.isnan(e)])]
    utilities = () if training is None else training.utilities
    seeds = [{} if one is None else dict(zip(one.seeds, one.utilities, strict=True)) for one in (undefended, training)]
    lost = [seeds[0][seed] - value for seed, value in seeds[1].items() if seed in seeds[0]]
    embedding = [f for f in findings if f.kind == "embedding" and f.scenario == cell][:1]
    feature_errors = [f.value(name) for f in embedding for name in ("error", "span_error")]
    known = setting.defense == "none" or any(row.result is not None and row.result.adaptive for row in attempts)
    names = Counter(example.attack_name for example in setting.examples)
    learnt = undefended is None or undefended.learns
    return StudyRow(
        protocol=setting.protocol,
        defense=setting.defense,
        outcome=setting.outcome,
        leakage=mean(leaked),
        leakage_interval=interval(leaked),
        highest=highest(reached),
        error=mean(errors),
        error_interval=interval(errors),
        examples=len(setting.examples),
        guess=mean(guessed),
        highest_guess=highest(guessed),
        identified=setting.identification,
        attack=names.most_common(1)[0][0] if names else "",
        training=training,
        utility=mean(utilities),
        utility_interval=interval(utilities),
        cost=mean(lost),
        cost_interval=interval(lost),
        allowed_psnr=setting.allowed_psnr,
        feature_error=next((error for error in feature_errors if not math.isnan(error)), NAN),
        known=known,
        telling=not setting.weakness and learnt,
        doubts=tuple(_doubts(setting, known, training, learnt)),
    )


def _doubts(setting: SettingVerdict, known: bool, training: Training | None, learnt: bool) -> Iterable[Reason]:
    if not setting.examples:
        yield because("no-result")
    elif not known:
        yield because("defence-unused")
    if setting.weakness is not None:
        yield setting.weakness
    elif min(setting.allowed_psnr, LEGIBLE) - highest(example.psnr for example in setting.examples) > WIDE_GAP:
        yield because("theory-allows", limit=setting.allowed_psnr)
    if not learnt:
        yield because("nothing-learnt")
    if setting.missing:
        yield because("attempts-not-run", count=setting.missing)
    if setting.failed:
        yield because("attempts-failed", count=setting.failed)
    if training is None:
        yield because("no-training")
    elif training.diverged:
        yield because("training-diverged", count=training.diverged, total=len(training.seeds))


def _ranked(rows: Sequence[StudyRow], tolerance: float) -> tuple[StudyRow, ...]:
    """Place each row on the front of its protocol, or name the one that beats it and leaks least."""
    ranked = []
    for row in rows:
        rivals = [other for other in rows if other.protocol == row.protocol and other.comparable]
        better = [other for other in rivals if row.comparable and _beats(other, row, tolerance)]
        if not row.comparable:
            ranked.append(row)
        elif not better:
            ranked.append(dataclasses.replace(row, on_front=True))
        else:
            best = min(better, key=lambda other: (other.leakage, -other.utility))
            less = best.leakage_interval[1] < row.leakage_interval[0]
            clear = less or best.utility_interval[0] > row.utility_interval[1]
            ranked.append(dataclasses.replace(row, beaten_by=best.defense, beaten_clearly=clear))
    return tuple(ranked)


def _beats(one: StudyRow, other: StudyRow, tolerance: float) -> bool:
    points = (one.leakage, one.utility), (other.leakage, other.utility)
    return not one.identified > other.identified and dominates(*points, SAME_LEAKAGE, tolerance)


def dominates(one: tuple[float, float], other: tuple[float, float], leakage: float = 0.0, utility: float = 0.0) -> bool:
    """Check whether ``one`` (leakage, utility) is better than ``other`` by more than these tolerances.

    >>> dominates((10.0, 0.9), (20.0, 0.9)), dominates((10.0, 0.9), (10.5, 0.9), leakage=1.0)
    (True, False)
    """
    if not all(map(math.isfinite, (*one, *other))):
        return False
    less, more = other[0] - one[0], one[1] - other[1]
    return less >= -leakage and more >= -utility and (less > leakage or more > utility)


def _choices(rows: Sequence[StudyRow], tolerance: float) -> tuple[Choice, ...]:
    """Choose the cheapest setting for each limit above every guess, and for nobody to be identified."""
    choices = []
    for protocol in dict.fromkeys(row.protocol for row in rows):
        own = [row for row in rows if row.protocol == protocol and row.comparable]
        if not own:
            continue
        guess = highest(row.highest_guess for row in own)
        answers: dict[StudyRow | None, list[float]] = {}
        for limit in LIMITS:
            if not limit <= guess:
                answers.setdefault(cheapest([row for row in own if row.highest < limit], tolerance), []).append(limit)
        for best, limits in answers.items():
            alike = _alike(best, [row for row in own if row.highest < min(limits)], tolerance)
            choices.append(Choice(protocol=protocol, limits=tuple(limits), row=best, alike=alike))
        if any(row.identified > 0 for row in own):
            unseen = [row for row in own if row.identified == 0]
            best = cheapest(unseen, tolerance)
            choices.append(Choice(protocol=protocol, limits=(), row=best, alike=_alike(best, unseen, tolerance)))
    return tuple(choices)


def _alike(best: StudyRow | None, rows: Sequence[StudyRow], tolerance: float) -> tuple[StudyRow, ...]:
    return tuple(r for r in rows if best is not None and r is not best and best.utility - r.utility <= tolerance)


def cheapest(rows: Sequence[StudyRow], tolerance: float) -> StudyRow | None:
    """Choose the highest utility; of those within the tolerance of it, the one that leaks least.

    >>> def row(defense, leakage, utility):
    ...     return StudyRow(protocol="P()", defense=defense, outcome="", leakage=leakage, utility=utility)
    >>> cheapest([row("A()", 14.0, 0.91), row("B()", 12.0, 0.90), row("C()", 8.0, 0.5)], 0.02).defense
    'B()'
    """
    if not rows:
        return None
    most = max(row.utility for row in rows)
    return min((row for row in rows if most - row.utility <= tolerance), key=lambda row: row.leakage)


def worth_of_knowing(rows: Iterable[Row]) -> list[Worth]:
    """Compare, for each defence and attack, runs with knowledge of the defence and without: the difference in dB.

    >>> job = {"protocol": "P()", "defense": "D()", "attack_name": "a", "seed": 0, "batch": 0}
    >>> def row(key, ignores, psnr):
    ...     result = {"examples": [{"index": 0, "psnr": psnr}], "adaptive": not ignores}
    ...     return Row.read(key, 0, "done", {**job, "attack": f"A(ignore_defense={ignores})"}, result)
    >>> [worth] = worth_of_knowing([row("a", True, 12.0), row("b", False, 20.5)])
    >>> worth.gain, worth.examples
    (8.5, 1)
    """
    rows = list(rows)
    parts = parts_of(rows)
    best: dict[tuple[Scenario, str, str, bool], dict[int, float]] = defaultdict(dict)
    for row in rows:
        options = parts[row.job.attack].options if row.counts and row.status == "done" else {}
        if IGNORES in options:
            others = str({name: value for name, value in options.items() if name != IGNORES})
            own = best[row.job.scenario, row.job.attack_name, others, options[IGNORES] is True]
            for example in row.examples:
                own[example.index] = highest((own.get(example.index, NAN), example.value("psnr")))
    worths = []
    for (scenario, name, others, ignores), blind in best.items():
        knowing = best.get((scenario, name, others, False))
        if not ignores or knowing is None:
            continue
        pairs = [(knowing[index], psnr) for index, psnr in blind.items() if index in knowing]
        gains = [min(with_it, LEGIBLE) - min(without, LEGIBLE) for with_it, without in pairs]
        gains = [gain for gain in gains if not math.isnan(gain)]
        if gains:
            facts: dict[str, Any] = {**scenario._asdict(), "attack_name": name}
            worths.append(Worth(**facts, gain=mean(gains), interval=interval(gains), examples=len(gains)))
    return worths
