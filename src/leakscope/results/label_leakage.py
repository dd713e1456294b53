"""What attacks learn of the labels: a leak of its own, and what stands in the way of recovering the inputs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Self

from leakscope.contracts.reconstruction import REMEDIES
from leakscope.results.policy import Policy
from leakscope.results.reasons import Reason
from leakscope.results.records import NAN, Row, counted, highest, mean

#: The flag of attacks that guessed the labels.
UNCERTAIN_LABELS = "labels uncertain"


@dataclass(frozen=True, eq=False)
class LabelLeakage:
    """How many labels attacks name.

    ``accuracy`` is the share that one attack with one seed names, the best of them; ``chance`` is the share of the most
    frequent label, or what attacks name where the update is noise. Both NaN where the adversary knows the labels.
    ``certain`` is the share if every example that was not attacked yet is named wrong.
    """

    accuracy: float = NAN
    chance: float = NAN
    certain: float = NAN

    @classmethod
    def of(cls, done: list[Row], chance: float, examples: int = 0) -> Self:
        """Of these rows; with ``examples`` of at least so many examples, some of them not attacked yet."""
        named: dict[tuple[str, int], list[float]] = defaultdict(list)
        for row in done:
            if row.job.knowledge.get("labels") != "yes":
                named[row.job.attack, row.job.seed] += [example.value("label_correct") for example in row.examples]
        if not named:
            return cls()
        right = {attempt: [value for value in values if not math.isnan(value)] for attempt, values in named.items()}
        certain = [math.fsum(values) / max(len(values), examples) for values in right.values() if values]
        return cls(highest(map(mean, named.values())), chance, highest(certain))

    def leaks(self, policy: Policy) -> list[Reason]:
        limit = policy.max_label_accuracy
        if limit is None or not self.certain > limit or self.certain <= self.chance:
            return []
        return [Reason(f"{self._words()}; the limit is {limit:.0%}", kind="labels")]

    def remarks(self, policy: Policy) -> list[str]:
        """Labels that leak although the policy does not limit them."""
        if policy.max_label_accuracy is not None or math.isnan(self.accuracy) or self.accuracy <= self.chance:
            return []
        return [f"{self._words()}; the policy sets no limit (max_label_accuracy)"]

    def doubts(self, policy: Policy, done: list[Row]) -> list[Reason]:
        doubts = []
        if policy.max_label_accuracy is not None and done and math.isnan(self.accuracy):
            known = all(row.job.knowledge.get("labels") == "yes" for row in done)
            why = "the adversary knows the labels" if known else "no attack names labels"
            remedy = "Withhold them (--labels no)" if known else "Add an attack that reads labels, such as idlg"
            doubts.append(Reason(f"{why}, but the policy limits their recovery", remedy))
        return doubts + _only_labels_hide(policy, done)

    def _words(self) -> str:
        chance = "" if math.isnan(self.chance) else f", {self.chance:.0%} without information"
        return f"{self.accuracy:.0%} of the labels are recovered{chance}"


def unresolved_labels(rows: list[Row]) -> list[Reason]:
    """The doubt about labels that were guessed wrong, if any were."""
    unresolved = [row for row in rows if UNCERTAIN_LABELS in row.flags and not settled(row)]
    text = f"{len(unresolved)} of {counted(len(rows), 'attempt')}: the labels were guessed wrong"
    return [Reason(text, REMEDIES[UNCERTAIN_LABELS])] if unresolved else []


def settled(row: Row) -> bool:
    """Whether uncertain labels did not matter: they were right, or the attack was also run with the right ones."""
    right = [example.value("label_correct") for example in row.examples]
    return bool(row.result and row.result.given_labels) or (bool(right) and all(value == 1 for value in right))


def _only_labels_hide(policy: Policy, done: list[Row]) -> list[Reason]:
    """Examples that cross the limit as soon as the attack is told the labels, which it may also guess."""
    told: dict[int, float] = {}
    for row in done:
        for example in row.result.given_labels if row.result else ():
            told[example.index] = highest([told.get(example.index, NAN), example.value("psnr")])
    crossed = {index: psnr for index, psnr in told.items() if psnr >= policy.max_psnr}
    if not crossed:
        return []
    text = f"{counted(len(crossed), 'example')} would reach {max(crossed.values()):.1f} dB with the right labels"
    return [Reason(f"{text}, which an adversary may guess", "Judge one who knows them with --labels yes")]
