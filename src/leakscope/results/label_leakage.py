"""Judge what attacks learn of the labels: a leak of its own, and an obstacle to recovering the inputs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from leakscope.contracts.reconstruction import FLAG_REMEDIES
from leakscope.results.policy import Policy
from leakscope.results.reasons import Reason, because
from leakscope.results.records import NAN, Row, highest, mean

#: The flag of attacks that guessed the labels.
UNCERTAIN_LABELS = "labels uncertain"


@dataclass(frozen=True)
class Share:
    """Hold a share of the examples of a scenario, such as those whose labels are named.

    ``certain`` is the share if every example that was not attacked yet is none of them. ``chance`` is the share without
    information; NaN where the limit of the policy does not ask for it.
    """

    value: float = NAN
    certain: float = NAN
    chance: float = NAN

    def exceeds(self, limit: float) -> bool:
        return self.certain > limit and not self.certain <= self.chance


def label_share(done: list[Row], chance: float, examples: int = 0) -> Share:
    """Return the share of labels that the best attack and seed names, of at least ``examples``; NaN where they are
    known.
    """
    named: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in done:
        if row.job.knowledge.get("labels") != "yes":
            named[row.job.attack, row.job.seed] += [example.value("label_correct") for example in row.examples]
    if not named:
        return Share()
    right = {attempt: [value for value in values if not math.isnan(value)] for attempt, values in named.items()}
    certain = [math.fsum(values) / max(len(values), examples) for values in right.values() if values]
    return Share(highest(map(mean, named.values())), highest(certain), chance)


def label_remarks(share: Share, policy: Policy) -> list[Reason]:
    """Remark labels that leak although the policy does not limit them."""
    if policy.max_label_accuracy is not None or math.isnan(share.value) or share.value <= share.chance:
        return []
    return [because("labels-unlimited", measure="label_accuracy", value=share.value, baseline=share.chance)]


def label_doubts(share: Share, policy: Policy, done: list[Row]) -> list[Reason]:
    doubts = []
    if policy.max_label_accuracy is not None and done and math.isnan(share.value):
        known = all(row.job.knowledge.get("labels") == "yes" for row in done)
        doubts.append(because("labels-known", "withhold-labels") if known else because("no-labels", "label-attack"))
    return doubts + _only_labels_hide(policy, done)


def unresolved_labels(rows: list[Row]) -> list[Reason]:
    unresolved = [row for row in rows if UNCERTAIN_LABELS in row.flags and not settled(row)]
    remedies = FLAG_REMEDIES[UNCERTAIN_LABELS]
    return [because("labels-wrong", *remedies, count=len(unresolved), total=len(rows))] if unresolved else []


def settled(row: Row) -> bool:
    """Check that uncertain labels did not matter: they were right, or the attack was also run with the right ones."""
    right = [example.value("label_correct") for example in row.examples]
    return bool(row.result and row.result.given_labels) or (bool(right) and all(value == 1 for value in right))


def _only_labels_hide(policy: Policy, done: list[Row]) -> list[Reason]:
    """Doubt examples that cross the limit as soon as the attack is told the labels, which it may also guess."""
    told: dict[int, float] = {}
    for row in done:
        for example in row.result.given_labels if row.result else ():
            told[example.index] = highest([told.get(example.index, NAN), example.value("psnr")])
    crossed = {index: psnr for index, psnr in told.items() if psnr >= policy.max_psnr}
    if not crossed:
        return []
    facts = {"measure": "psnr", "value": max(crossed.values()), "limit": policy.max_psnr}
    return [because("labels-hide", "judge-with-labels", count=len(crossed), **facts)]
