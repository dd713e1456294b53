"""Tell which scenarios a verdict is about for whoever decides what to ship, and what came back under them.

Where a protocol has defended scenarios, its undefended one is a reference: nobody ships it. Defences are alternatives,
so the best of a protocol counts. Protocols are not, so the worst of them counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from leakscope.results.setting_verdict import Outcome, SettingVerdict, StrongestExample
from leakscope.results.verdict import Verdict

#: Of a protocol the first of these that one of its scenarios has. A leak that is known comes before a doubt.
_OF_A_PROTOCOL: tuple[Outcome, ...] = ("within policy", "leaks", "inconclusive")
#: Of several protocols the first of these.
_OF_ALL: tuple[Outcome, ...] = ("leaks", "inconclusive", "within policy")


@dataclass(frozen=True)
class Headline:
    """Hold the outcome for what may be shipped, the ``decisive`` scenarios that have it, and the ``others``.

    ``references`` are undefended scenarios beside defended ones.
    """

    outcome: Outcome
    decisive: tuple[SettingVerdict, ...] = ()
    others: tuple[SettingVerdict, ...] = ()
    references: tuple[SettingVerdict, ...] = ()

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        defended = {one.protocol for one in verdict.settings if one.defense != "none"}
        references = [one for one in verdict.settings if one.defense == "none" and one.protocol in defended]
        candidates = [one for one in verdict.settings if one not in references]
        if not candidates or verdict.outcome == "nothing audited":
            return cls(verdict.outcome, (), tuple(candidates), tuple(references))
        protocols = {one.protocol: _first(_OF_A_PROTOCOL, candidates, one.protocol) for one in candidates}
        outcome = next(one for one in _OF_ALL if one in protocols.values())
        decisive = [one for one in candidates if one.outcome == outcome == protocols[one.protocol]]
        others = [one for one in candidates if one not in decisive]
        if outcome == "within policy" and verdict.doubts_of_all:
            outcome = "inconclusive"  # what is missing or failed for the whole audit stands in the way of each pass
        return cls(outcome, tuple(decisive), tuple(others), tuple(references))

    @property
    def most_exposed(self) -> StrongestExample | None:
        """Return the example that came nearest under a decisive scenario."""
        examples = [example for one in self.decisive for example in one.examples]
        return max(examples, key=lambda example: (example.leaks, example.exposure), default=None)

    @property
    def compared(self) -> tuple[StrongestExample | None, StrongestExample | None]:
        """Return an example to show and the same under its undefended reference, which may lack it.

        That is the most exposed one. Where nothing leaks, it is the most exposed of those that the reference has too.
        """
        bare = {(one.protocol, example.index): example for one in self.references for example in one.examples}
        examples = [e for one in self.decisive for e in one.examples if (e.protocol, e.index) in bare]
        shown = max(examples, key=lambda example: example.exposure, default=None)
        if shown is None or self.outcome == "leaks":
            shown = self.most_exposed
        return shown, None if shown is None else bare.get((shown.protocol, shown.index))


def _first(order: Iterable[Outcome], settings: Iterable[SettingVerdict], protocol: str) -> Outcome:
    found = {one.outcome for one in settings if one.protocol == protocol}
    return next(outcome for outcome in order if outcome in found)
