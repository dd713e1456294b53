"""Measure what comes out where nothing was to be learnt: blind controls, with which attempts are compared."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from leakscope.metrics import Measure
from leakscope.results.records import BLIND, HELD_OUT, NAN, ExampleRecord, Row, best, highest, mean

#: An example of a control, and why measures of it are missing.
Control = tuple[ExampleRecord, Mapping[str, str]]
#: The control whose labels are not those of the client; others are told them in one way or another.
_WITHOUT_LABELS = "noise"


class Baselines:
    """Hold every measure of each attack's controls on each example, for all defences.

    A control's seeds are averaged; of several controls, with or without attack, the best for the adversary counts.
    """

    def __init__(self, controls: Iterable[Row]) -> None:
        self._blind: dict[tuple[str, int], dict[str, list[Control]]] = defaultdict(lambda: defaultdict(list))
        self._held_out: dict[int, dict[str, list[Control]]] = defaultdict(lambda: defaultdict(list))
        for row in controls:
            if row.status != "done" or row.result is None:
                continue
            name, kind = row.job.control or "", row.job.control_kind or BLIND
            for example in row.examples:
                if kind == BLIND:
                    self._blind[row.job.attack, example.index][name].append((example, row.result.reasons))
                elif kind == HELD_OUT:
                    self._held_out[example.index][name].append((example, row.result.reasons))

    @property
    def identification(self) -> float:
        """Return the share of examples identified from no information, by luck or by the prior alone."""
        return self._share("identified")

    @property
    def label_accuracy(self) -> float:
        """Return the share of labels named from no information: the chance level."""
        return self._share("label_correct", only=_WITHOUT_LABELS)

    def value(self, attack: str, index: int, measure: Measure, *, held_out: bool = True) -> float:
        """Return the best of the same attack's controls and, if ``held_out``, of guesses without one; NaN if none.

        Where there is neither, the lowest of other attacks' controls: more attacks must not make less of a leak.
        """
        own, guesses = self._own(attack, index), self._guesses(index) if held_out else []
        if own or guesses:
            return best(_means([*own, *guesses], measure), measure.better)
        return best(_means(self._others(index), measure), "lower" if measure.better == "higher" else "higher")

    def why_missing(self, attack: str, index: int, measure: Measure) -> list[str]:
        """Say why there is no such value, once for each control."""
        controls = [*(self._own(attack, index) or self._others(index)), *self._guesses(index)]
        return [reasons.get(measure.key, measure.otherwise) for seeds in controls for _, reasons in seeds]

    def _own(self, attack: str, index: int) -> list[list[Control]]:
        return list(self._blind.get((attack, index), {}).values())

    def _others(self, index: int) -> list[list[Control]]:
        return [seeds for place, names in self._blind.items() if place[1] == index for seeds in names.values()]

    def _guesses(self, index: int) -> list[list[Control]]:
        return list(self._held_out.get(index, {}).values())

    def _share(self, key: str, only: str | None = None) -> float:
        values: dict[str, list[float]] = defaultdict(list)
        for names in self._blind.values():
            for name, seeds in names.items():
                if only in (None, name):
                    values[name] += [example.value(key) for example, _ in seeds]
        return highest(map(mean, values.values())) if values else NAN


def _means(controls: list[list[Control]], measure: Measure) -> list[float]:
    return [mean(example.value(measure.key) for example, _ in seeds) for seeds in controls]
