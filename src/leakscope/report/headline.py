"""The first screen of an audit's page: may it be sent, what came back, and what to do next."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from leakscope.metrics import MEASURES
from leakscope.report import words
from leakscope.report.pictures import Gallery
from leakscope.report.sentences import advice_text, certificate_words, in_a_row, reason_text
from leakscope.results.headline import Headline
from leakscope.results.policy import Policy
from leakscope.results.records import mapping
from leakscope.results.setting_verdict import SettingVerdict, StrongestExample
from leakscope.results.store import Store
from leakscope.results.verdict import Verdict

_TEXTS: dict[str, Any] = words.TEXTS["headline"]
_TITLES: dict[str, str] = words.TEXTS["titles"]
_RECOMMENDED: dict[str, str] = words.TEXTS["recommended"]
#: From which lift on the update has told something (dB), as the policy has it by default.
LIFT = Policy().min_lift
#: Scenarios that are told one by one; more are counted.
MOST_TOLD = 3


def headline_section(store: Store, verdict: Verdict, gallery: Gallery, finished: str) -> dict[str, Any]:
    """Return title, sentences, recommendation, pictures and numbers of the first screen."""
    headline, data = Headline.of(verdict), mapping(store.meta("data"))
    told = Told(headline, data, int(mapping(store.meta("plan")).get("examples") or 0))
    about = mapping(mapping(store.meta("spec")).get("about"))
    model = mapping(store.meta("model")).get("name")
    recommended, following = recommendation(headline, verdict, told)
    return {
        "outcome": headline.outcome,
        "title": _TITLES.get(headline.outcome, headline.outcome),
        "where": told.where,
        "lead": told.lead(),
        "recommended": recommended,
        "next": following,
        "model": str(about.get("model") or model or "unnamed model"),
        "data": str(about.get("data") or data.get("name") or "unnamed data"),
        "by": str(about.get("by") or ""),
        "date": (finished or str(store.meta("created") or ""))[:10],
        "figures": told.figures(gallery),
        "shown": headline.compared[0],
        "tiles": told.tiles(verdict),
        "nearest": told.nearest_details(),
        "whole": "" if verdict.outcome == headline.outcome else _whole(verdict),
        "came_back": {one.scenario: f"{_leaking(one)} of {len(one.examples)}" for one in verdict.settings},
    }


class Told:
    """Write one headline in words; ``planned`` examples may be more than were attacked."""

    def __init__(self, headline: Headline, data: Mapping[str, Any], planned: int) -> None:
        self.headline, self.planned = headline, planned
        drawn = len(data.get("shape") or ()) == 3 and mapping(data.get("inputs")).get("kind", "box") == "box"
        self.noun = "image" if drawn else "example"
        candidates = (*headline.decisive, *headline.others)
        self.candidates = candidates
        self._several = len({one.protocol for one in candidates}) > 1

    def place(self, setting: SettingVerdict) -> str:
        """Name a scenario within a sentence."""
        key = "bare" if setting.defense == "none" else "defended"
        under = _TEXTS["under"].format(protocol=setting.protocol_short) if self._several else ""
        return str(_TEXTS[key].format(defense=setting.defense_short)) + under

    @property
    def where(self) -> str:
        """Name the scenarios that the title is about, where there are others."""
        headline = self.headline
        if not headline.decisive or not (headline.others or headline.references):
            return ""
        if len(headline.decisive) > 2:
            return str(_TEXTS["share"].format(count=len(headline.decisive), total=len(self.candidates)))
        return in_a_row([self.place(one) for one in headline.decisive])

    def lead(self) -> list[str]:
        """Say what came back under each scenario, the decisive ones first."""
        headline = self.headline
        if not headline.decisive:
            return [_TEXTS["unmeasured"]]
        if len(self.candidates) > MOST_TOLD:
            counts: Counter[str] = Counter(one.outcome for one in self.candidates)
            shares = [f"{counts[one]} {_TEXTS[one][counts[one] > 1]}" for one in _TITLES if counts[one]]
            defended = _TEXTS["of-defended"] if headline.references else ""
            lines = [_TEXTS["of"].format(total=len(self.candidates), defended=defended, shares=in_a_row(shares))]
        else:
            lines = [self.came_back(one) for one in self.candidates]
        return [*lines, *self._nearest(), *(self.came_back(one) for one in headline.references[:2])]

    def came_back(self, setting: SettingVerdict) -> str:
        """Say how many examples of a scenario came back, and how near."""
        alone = len(self.candidates) == 1 and not self.headline.references and setting.defense == "none"
        total, leaking = len(setting.examples), [e.psnr for e in setting.examples if e.leaks]
        share = "none" if not leaking else "all" if len(leaking) == total else "some"
        key = "nothing" if not total else f"{share}-one" if total == 1 else share
        what = _TEXTS[key].format(
            count=len(leaking),
            total=total,
            what=self.noun + ("" if total == 1 else "s") + (_TEXTS["attacked"] if total < self.planned else ""),
            how=self._how(leaking),
        )
        # Labels may leak, or who is who, where no example comes back.
        other = [reason_text(one) for one in setting.reasons if one.kind in ("identification", "labels")]
        other += [_TEXTS["doubts"]] * (setting.outcome == "inconclusive" and total > 0)
        text = " ".join(part for part in ("" if alone else self.place(setting), what) if part)
        return ", but ".join([text[:1].upper() + text[1:], *other[:1]]) + "."

    def _how(self, psnrs: Sequence[float]) -> str:
        """Say how near those that came back are, from the farthest to the nearest."""
        steps = [(float(limit), how) for limit, how in _TEXTS["near"]]
        found = [next((how for limit, how in steps if psnr < limit), "") for psnr in psnrs]
        measured = [how for how in dict.fromkeys(how for _, how in steps) if how in found]
        if not measured:
            return ""
        return f" {measured[0]}" if len(measured) == 1 else f" {measured[0]}, some {measured[-1]}"

    def _nearest(self) -> list[str]:
        """Say how near the best attempt came where nothing came back."""
        shown = self.headline.most_exposed
        # Dark images have a high PSNR from the start: a likeness is told only of what the update gave away.
        if shown is None or shown.leaks or self.noun != "image" or math.isnan(shown.lift):
            return []
        near = shown.lift >= LIFT
        return [_TEXTS["nearest"].format(likeness=words.likeness(shown.psnr)) if near else _TEXTS["known"]]

    def nearest_details(self) -> str:
        """Name the most exposed example with its numbers, for small print."""
        shown = self.headline.most_exposed
        if shown is None:
            return ""
        side = "above" if shown.lift >= 0 else "below"
        lift = "" if math.isnan(shown.lift) else _TEXTS[side].format(lift=words.fixed(abs(shown.lift)))
        proof = shown.certificate
        facts = {"index": shown.index, "name": self._name(shown), "attack": shown.attack_name, "seed": shown.seed}
        psnr = f"{MEASURES['psnr'].label} {words.fixed(shown.psnr)} dB"
        text = _TEXTS["details"].format(psnr=psnr, lift=lift, **facts)
        if proof is None:
            return text
        proved = _TEXTS["proved"].format(words=certificate_words(proof, shown.psnr), method=proof.method)
        return f"{text} {proved}"

    def figures(self, gallery: Gallery) -> list[tuple[Any, str]]:
        """Show one example: the original, and what came back without and with the defence."""
        shown, reference = self.headline.compared
        if shown is None:
            return []
        original, guess = gallery.pair(shown, "worst")
        if original is None or guess is None:
            return []
        drawn = [(original, _TEXTS["original"])]
        if reference is not None and (bare := gallery.pair(reference, "bare")[1]) is not None:
            drawn.append((bare, _TEXTS["bare"]))
        caption = "with-it" if len(drawn) > 1 else "came-back" if shown.leaks else "attempt"
        return [*drawn, (guess, _TEXTS[caption].format(name=self._name(shown)))]

    def _name(self, example: StrongestExample) -> str:
        return next(one.name for one in self.headline.decisive if one.scenario == example.scenario)

    def tiles(self, verdict: Verdict) -> list[tuple[str, Any, str]]:
        """Return name, number and remark of what came back, with and without the defence, and of scenarios."""
        leaking = max(self.headline.decisive, key=_leaking, default=None)
        tiles: list[tuple[str, Any, str]] = []
        if leaking is not None:
            count, total = _share_of(leaking)
            total += f" {_TEXTS['with-it'].format(name=leaking.name)}" if self.where else ""
            tiles.append((_TEXTS["tile"].format(what=f"{self.noun}s".capitalize()), count, total))
            same = [one for one in self.headline.references if one.protocol == leaking.protocol]
            tiles += [(_TEXTS["bare"].capitalize(), *_share_of(one)) for one in same]
        within = sum(one.outcome == "within policy" for one in verdict.settings)
        return [*tiles, (_TEXTS["within-tile"], within, f"of {len(verdict.settings)}")]


def _whole(verdict: Verdict) -> str:
    return str(_TEXTS["whole"].format(outcome=verdict.outcome, code=verdict.exit_code))


def _leaking(setting: SettingVerdict) -> int:
    return sum(example.leaks for example in setting.examples)


def _share_of(setting: SettingVerdict) -> tuple[int, str]:
    return _leaking(setting), f"of {len(setting.examples)}"


def recommendation(headline: Headline, verdict: Verdict, told: Told) -> tuple[str, str]:
    """Say what to do with the updates, and what to run next; the latter is empty where nothing is."""
    key: str = headline.outcome
    if key == "within policy" and (headline.others or headline.references):
        key += ", some"
    text = _RECOMMENDED[key].format(places=in_a_row([told.place(one) for one in headline.decisive[:MOST_TOLD]]))
    if verdict.outcome == headline.outcome:
        return text, advice_text(verdict)
    # What the whole audit needs next is about the reference, which nobody ships.
    reasons = [reason for one in headline.decisive for reason in one.reasons if reason.remedy is not None]
    return text, f"{reasons[0].remedy}." if reasons and headline.outcome != "within policy" else ""
