"""Say what to run next: remedies as changes of the spec, without those that the audit has tried already.

A remedy that an audit can try has ``changes``: keys of the spec with their new values. Of these, ``attacks`` are added
to those that were asked for; none at all mean the same audit again. A remedy without changes is for a person. Each
change adds evidence and can be made once, so that following remedies ends: in a verdict, or in the news that none can
be reached here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from leakscope.contracts.errors import UserError
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.tables import shipped_table
from leakscope.results.policy import Policy
from leakscope.results.reasons import Reason, Remedy, Scenario, chained
from leakscope.results.records import items, mapping, number, texts
from leakscope.results.scale import Scale, read_scales
from leakscope.results.setting_verdict import IDENTIFIED_ABOVE_CHANCE

#: Where noise of the level to be tried was not enough, try so many times as much (ratio).
_STRONGER = 3.0
#: The facts of a client's recipe, without which local steps cannot be replayed.
_RECIPE = ("num_examples", "local_epochs", "batch_size", "learning_rate", "normalisation")
#: Keys of a spec that are part of an audit's identity, or judged apart: their change asks for another folder.
_OF_ANOTHER_AUDIT = ("knowledge", "dtype", "defenses")
#: Reasons with jobs that were planned and have not been run.
_MISSING = ("attempts-missing", "findings-missing", "jobs-missing", "spared")
#: Reasons with jobs that the same audit makes again.
_FAILED = ("job-failed", "control-failed")

_TABLE = shipped_table(__package__, "advice.toml")

Changes = dict[str, Any]
#: A remedy that has been tried, or does not apply.
_TRIED = None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Say what to do about a verdict: nothing; defend the update; run a further audit; or stop, as none would help.

    ``changes`` are those of all remedies together, None where there is no audit to run. ``open``: what stands in the
    way of a verdict and is not changed by any audit.
    """

    kind: Literal["nothing", "defend", "continue", "undecidable"]
    changes: Mapping[str, Any] | None = None
    open: tuple[Reason, ...] = ()

    @property
    def new_folder(self) -> bool:
        """Check that the changes make another audit, whose rows cannot join those that are there."""
        return self.changes is not None and any(key in self.changes for key in _OF_ANOTHER_AUDIT)

    def applied_to(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of an audit with the changes, in the words of a spec.

        >>> advice = Advice(kind="continue", changes={"attacks": ["sme"], "budget": None})
        >>> advice.applied_to({"attacks": "standard", "budget": "10m", "batch": 2})
        {'attacks': ['standard', 'sme'], 'batch': 2}
        """
        changed = {**settings, **(self.changes or {})}
        if self.changes and "attacks" in self.changes:
            asked = settings.get("attacks", "standard")
            before = list(asked) if isinstance(asked, list | tuple) else [asked]
            changed["attacks"] = [*before, *(one for one in self.changes["attacks"] if one not in before)]
        if self.changes and "policy" in self.changes:
            changed["policy"] = {**mapping(settings.get("policy")), **self.changes["policy"]}
        return {key: value for key, value in changed.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Hold what was asked for in a folder, as far as remedies depend on it."""

    knowledge: Mapping[str, Any]
    attacks: tuple[tuple[str, Mapping[str, Any]], ...]
    policy: Policy
    dtype: str | None = None
    batch: int = 1
    #: Kinds of jobs that were switched off: controls, findings.
    left_out: frozenset[str] = frozenset()
    standard: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[Scenario, Scale] = field(default_factory=dict)
    failed_again: bool = False

    @classmethod
    def read(cls, spec: Mapping[str, Any], plan: Mapping[str, Any], policy: Policy) -> Asked:
        """Read the spec and the plan of a store; what an older version did not write is taken for not tried."""
        return cls(
            knowledge=_knowledge(spec.get("knowledge")),
            attacks=_parts(spec.get("attacks")),
            policy=policy,
            dtype=spec.get("dtype"),
            batch=spec["batch"] if isinstance(spec.get("batch"), int) else 1,
            left_out=frozenset(texts(plan.get("left_out"))),
            standard={protocol: texts(names) for protocol, names in mapping(plan.get("standard")).items()},
            kinds={protocol: str(kind) for protocol, kind in mapping(plan.get("kinds")).items()},
            scales=read_scales(plan),
            failed_again=bool(plan.get("failed_again")),
        )

    def has(self, name: str) -> bool:
        return any(asked == name for asked, _ in self.attacks)


def _knowledge(value: Any) -> dict[str, Any]:
    """Read all facts; none where they are damaged, so that every one counts as withheld."""
    try:
        return dataclasses.asdict(Knowledge.build(mapping(value)))
    except UserError:
        return {}


def _parts(value: Any) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    entries = [mapping(entry) for entry in items(value)]
    return tuple((str(entry.get("name")), mapping(entry.get("options"))) for entry in entries)


class Adviser:
    """Turn the remedies of one verdict into changes of its spec."""

    def __init__(self, asked: Asked, outcomes: Mapping[Scenario, str]) -> None:
        self._asked = asked
        #: Of each protocol a defence that is within the policy, and those that leak.
        self._safe = {cell.protocol: cell.defense for cell, told in outcomes.items() if told == "within policy"}
        self._leaking = [cell for cell, told in outcomes.items() if told == "leaks"]

    def settle(self, reason: Reason) -> Reason:
        """Return the reason with the remedies that are left, each with its changes; a leak gets what to do about it."""
        remedies = [] if reason.remedy is None else reason.remedy.alternatives
        if reason.kind != "doubt" and reason.scenario is not None:
            remedies = [self._defend(reason.scenario)]
        left = [one for remedy in remedies if (one := self._settled(remedy, reason)) is not None]
        return dataclasses.replace(reason, remedy=chained(left))

    def advise(self, outcome: str, reasons: Iterable[Reason]) -> Advice:
        """Join the first change of each reason, of a leak only what concerns leaks.

        What was asked for is finished before anything is added. A limit of the policy comes next: no job runs again for
        it, and no attack removes a doubt about identification. Changes that make the adversary stronger wait until
        there are no others, for they answer another question.
        """
        if outcome == "within policy":
            return Advice(kind="nothing")
        leaks = outcome == "leaks"
        about = [reason for reason in reasons if (reason.kind != "doubt") == leaks]
        changes = [one for reason in about if (one := _first_change(reason)) is not None]
        unfinished = [one for reason in about if reason.code in _MISSING and (one := _first_change(reason)) is not None]
        limits = [one for one in changes if "policy" in one]
        within = [one for one in changes if leaks or not self._of_another_question(one)]
        changes = unfinished or limits or within or changes
        joined = self._joined(changes) if changes else None
        if leaks:
            return Advice(kind="defend", changes=joined)
        if joined is None:
            return Advice(kind="undecidable", open=tuple(about))
        return Advice(kind="continue", changes=joined)

    def _of_another_question(self, changes: Changes) -> bool:
        facts = {
            name for name, value in changes.get("knowledge", {}).items() if self._asked.knowledge.get(name) != value
        }
        return bool(facts - {"defense"})

    def _settled(self, remedy: Remedy, reason: Reason) -> Remedy | None:
        if remedy.changes is not None or remedy.kind not in _WAYS:
            return remedy
        changes = _WAYS[remedy.kind](self, reason, remedy.kind)
        return None if changes is _TRIED else dataclasses.replace(remedy, changes=changes)

    def _joined(self, every: Iterable[Changes]) -> Changes:
        joined: Changes = {}
        for changes in every:
            for key, value in changes.items():
                if key == "knowledge":
                    own = {k: v for k, v in value.items() if self._asked.knowledge.get(k) != v}
                    joined[key] = {**self._asked.knowledge, **joined.get(key, {}), **own}
                elif isinstance(value, list):
                    joined[key] = [*joined.get(key, []), *(one for one in value if one not in joined.get(key, []))]
                else:
                    joined[key] = {**joined.get(key, {}), **value} if isinstance(value, dict) else value
        if "standard" in joined.get("attacks", ()):
            named = {name for names in self._asked.standard.values() for name in names}
            joined["attacks"] = [one for one in joined["attacks"] if isinstance(one, dict) or one not in named]
        return joined

    # -- what each remedy changes; _TRIED where the audit has it already --

    def _know(self, **facts: Any) -> Changes | None:
        known = self._asked.knowledge
        if all(known.get(name) == value for name, value in facts.items()):
            return _TRIED
        return {"knowledge": {**known, **facts}}

    def _grant_labels(self, _reason: Reason, _kind: str) -> Changes | None:
        return self._know(labels="yes")

    def _grant_defence(self, _reason: Reason, _kind: str) -> Changes | None:
        return self._know(defense=True)

    def _grant_lacking(self, reason: Reason, _kind: str) -> Changes | None:
        lacking: dict[str, Any] = dict.fromkeys(reason.names, True)
        if lacking.pop("labels", False) or lacking.pop("label_counts", False):
            lacking["labels"] = "yes"
        return self._know(**lacking) if lacking else _TRIED

    def _grant_client(self, reason: Reason, _kind: str) -> Changes | None:
        """Grant the recipe, then the order of the batches, then the labels."""
        weights = self._kind(reason) == "weight_delta"
        steps: list[dict[str, Any]] = [dict.fromkeys(_RECIPE if weights else _RECIPE[:1], True)]
        steps += [{"batch_order": True, "labels": "yes"} if weights else {"labels": "yes"}]
        return next((changes for facts in steps if (changes := self._know(**facts)) is not _TRIED), _TRIED)

    def _grant_recipe(self, reason: Reason, kind: str) -> Changes | None:
        added = self._add(reason, kind)
        return added if added is not _TRIED else self._know(**dict.fromkeys(_RECIPE, True))

    def _withhold_labels(self, _reason: Reason, _kind: str) -> Changes | None:
        return self._know(labels="no")

    def _more_steps(self, reason: Reason, _kind: str) -> Changes | None:
        return self._search_with(next(iter(_TABLE["search"].get(self._kind(reason), {}).items()), None))

    def _more_restarts(self, reason: Reason, _kind: str) -> Changes | None:
        return self._search_with(next(iter(_TABLE["restarts"].items())))

    def _search_with(self, wanted: tuple[str, Mapping[str, int]] | None) -> Changes | None:
        if wanted is None:
            return _TRIED
        name, options = wanted
        tried = [own for asked, own in self._asked.attacks if asked == name]
        if any(all(number(own.get(key)) >= value for key, value in options.items()) for own in tried):
            return _TRIED
        return {"attacks": [{name: dict(options)}]}

    def _add(self, _reason: Reason, kind: str) -> Changes | None:
        name = next((name for name in _TABLE["attacks"][kind] if not self._asked.has(name)), None)
        return _TRIED if name is None else {"attacks": [name]}

    def _precisely(self, reason: Reason, kind: str) -> Changes | None:
        added = self._add(reason, kind)
        return added if added is not _TRIED else self._in_double(reason, kind)

    def _in_double(self, _reason: Reason, _kind: str) -> Changes | None:
        return _TRIED if self._asked.dtype == "float64" else {"dtype": "float64"}

    def _train(self, _reason: Reason, _kind: str) -> Changes | None:
        (name,) = _TABLE["attacks"]["trained-attack"]
        facts = {**self._asked.knowledge, "defense": True, "auxiliary_data": True}
        return _TRIED if self._asked.has(name) else {"attacks": [name], "knowledge": facts}

    def _standard(self, reason: Reason, _kind: str) -> Changes | None:
        standard = [self._asked.standard.get(reason.scenario.protocol, ())] if reason.scenario else []
        names = {name for one in standard or self._asked.standard.values() for name in one}
        return {"attacks": ["standard"]} if any(not self._asked.has(name) for name in names) else _TRIED

    def _switch_on(self, _reason: Reason, kind: str) -> Changes | None:
        what = kind.removeprefix("keep-")
        return {what: True} if what in self._asked.left_out else _TRIED

    def _again(self, reason: Reason, _kind: str) -> Changes | None:
        return _TRIED if reason.code in _FAILED and self._asked.failed_again else {}

    def _without_budget(self, _reason: Reason, _kind: str) -> Changes | None:
        return {"budget": None}

    def _whole_scenario(self, _reason: Reason, _kind: str) -> Changes | None:
        return {"stop_on_leak": False}

    def _limit(self, _reason: Reason, _kind: str) -> Changes | None:
        unset = self._asked.policy.max_identification is None
        return {"policy": {"max_identification": IDENTIFIED_ABOVE_CHANCE}} if unset else _TRIED

    def _kind(self, reason: Reason) -> str:
        return self._asked.kinds.get(reason.scenario.protocol if reason.scenario else "", "gradient")

    # -- leaks --

    def _defend(self, scenario: Scenario) -> Remedy:
        if (safe := self._safe.get(scenario.protocol)) is not None:
            return Remedy("use-defence", {"defense": safe})
        kind = self._asked.kinds.get(scenario.protocol, "gradient")
        scale = self._asked.scales.get(scenario) or self._asked.scales.get(Scenario(scenario.protocol, "none"))
        entries = _TABLE["defenses"][kind]
        parts = [self._defence(entry, scenario.protocol, scale) for entry in entries]
        # The study measured what its own noise costs, not what more of it does: of no protocol, no noise has leaked.
        raised = parts != [self._defence(entry, "", scale) for entry in entries]
        facts = {"measured": [float(entry["points"]) for entry in entries if "points" in entry and not raised]}
        changes: Changes = {"defenses": parts}
        if not self._asked.knowledge.get("defense"):
            changes["knowledge"] = {**self._asked.knowledge, "defense": True}
        return Remedy("defend", {"defenses": parts, **facts}, changes=changes)

    def _defence(self, entry: Mapping[str, Any], protocol: str, scale: Scale | None) -> Any:
        """Return a defence of the table, with levels that fit the update and exceed those that were not enough."""
        known = scale is not None and scale.update > 0
        sigma = scale.sigma(entry["noise"]) if scale is not None and known else entry["sigma"]
        clip = entry.get("clip", 0.0) * (scale.update if scale is not None and known else 1.0)
        chain = []
        for name in entry["parts"]:
            if name == "gradient-noise":
                chain.append({name: {"sigma": self._above(protocol, "sigma", sigma)}})
            elif name == "dp-sgd":  # whose noise is on the sum of the examples, in units of clip
                multiplier = self._above(protocol, "noise_multiplier", sigma * self._asked.batch / clip)
                chain.append({name: {"clip": _rounded(clip), "noise_multiplier": multiplier}})
            else:
                chain.append({name: {"norm": _rounded(clip)}})
        return chain[0] if len(chain) == 1 else chain

    def _above(self, protocol: str, option: str, level: float) -> float:
        """Return the level, or more than one that leaks."""
        level_of = re.compile(rf"\b{option}=(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\b")
        own = [level_of.search(cell.defense) for cell in self._leaking if cell.protocol == protocol]
        weak = [float(found[1]) for found in own if found is not None]
        return _rounded(max([level, *(_STRONGER * one for one in weak)]))


_Way = Callable[[Adviser, Reason, str], "Changes | None"]
#: How the kinds of remedies that an audit can try change its spec; all others are for people.
_WAYS: Mapping[str, _Way] = {
    **dict.fromkeys(("grant-labels", "grant-all-labels", "judge-with-labels"), Adviser._grant_labels),
    "withhold-labels": Adviser._withhold_labels,
    "know-defence": Adviser._grant_defence,
    "grant-knowledge": Adviser._grant_lacking,
    "grant-client": Adviser._grant_client,
    "grant-recipe": Adviser._grant_recipe,
    **dict.fromkeys(("more-steps", "more-iterations"), Adviser._more_steps),
    "more-restarts": Adviser._more_restarts,
    **dict.fromkeys(("unmixing-attack", "label-attack", "choose-model"), Adviser._add),
    "precise-attack": Adviser._precisely,
    **dict.fromkeys(("trained-attack", "learn-defence"), Adviser._train),
    "lower-learning-rate": Adviser._in_double,
    **dict.fromkeys(("other-attacks", "standard-attacks"), Adviser._standard),
    **dict.fromkeys(("keep-controls", "keep-findings"), Adviser._switch_on),
    **dict.fromkeys(("again", "retry"), Adviser._again),
    **dict.fromkeys(("more-time", "without-budget"), Adviser._without_budget),
    "whole-scenario": Adviser._whole_scenario,
    "set-limit": Adviser._limit,
}


def _first_change(reason: Reason) -> Changes | None:
    remedies = [] if reason.remedy is None else reason.remedy.alternatives
    return next((dict(remedy.changes) for remedy in remedies if remedy.changes is not None), None)


def _rounded(value: float) -> float:
    """Keep two digits, which can be typed.

    >>> _rounded(0.10023), _rounded(1234.5)
    (0.1, 1200.0)
    """
    return float(f"{value:.2g}") if math.isfinite(value) else value
