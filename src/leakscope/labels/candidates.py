"""Labels worth trying where no rule proves them: what several rules read, and the nearest alternatives.

An adversary is not bound to one rule. It tries a few readings, and what each of them explains of the update tells which
is right; see ``GradientMatching``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from leakscope.contracts.observation import Observation
from leakscope.labels.recover import RULES, RecoveredLabels, evidence_of, recover_labels

#: So many readings are tried at most.
MOST_CANDIDATES = 3


def label_candidates(observation: Observation, generator: torch.Generator | None = None) -> list[RecoveredLabels]:
    """Readings of the labels, that of the best rule first; a single one where labels are known or proved.

    Two readings are the same if they have the same counts. ValueError where nothing can be read, as in
    :func:`recover_labels`.
    """
    first = recover_labels(observation, generator=generator)
    if first.exact or observation.num_classes == 1:
        return [first]
    readings = {_counts(first.labels): first}
    for reading in _others(observation, first, generator):
        readings.setdefault(_counts(reading.labels), reading)
        if len(readings) == MOST_CANDIDATES:
            break
    return list(readings.values())


def _others(
    observation: Observation, first: RecoveredLabels, generator: torch.Generator | None
) -> Iterator[RecoveredLabels]:
    for method in RULES:
        try:
            yield recover_labels(observation, method, generator)
        except ValueError:
            continue  # a rule that does not fit this update
    evidence = evidence_of(observation)
    # The more negative an entry, the more it speaks for its class.
    entries = evidence.weight.sum(1) if evidence.bias is None else evidence.bias
    yield from _exchanges(first, entries)


def _exchanges(first: RecoveredLabels, entries: Tensor) -> Iterator[RecoveredLabels]:
    """The reading with its least likely label exchanged for the likeliest that it lacks, then for the next one."""
    present = first.labels.unique()
    absent = [int(label) for label in entries.argsort() if not bool((present == label).any())]
    doubtful = int(present[entries[present].argmax()])
    place = int(torch.nonzero(first.labels == doubtful)[0])
    for label in absent[:MOST_CANDIDATES]:
        labels = first.labels.clone()
        labels[place] = label
        yield RecoveredLabels(labels.sort().values, f"{first.method}, one exchanged", False, first.notes)


def _counts(labels: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(sorted(int(label) for label in labels))
