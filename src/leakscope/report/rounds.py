"""Theory of vertical learning in words and numbers: what the announced batches of a setting give away."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from leakscope.report import words
from leakscope.results.records import NAN, FindingRow, mapping, number

MAX_SHARES = 4
_HOW = {True: "announced", False: "kept secret"}


def describe(finding: FindingRow) -> dict[str, Any]:
    """The cells of a setting's line and the sentences below it, from the finding on its rounds."""
    facts = mapping(finding.content.get("found"))
    samples, every = number(facts.get("samples")), facts.get("workers")
    workers = [worker for worker in every if isinstance(worker, dict)] if isinstance(every, list) else []
    return {
        "batches": _batches(facts, finding.content.get("announced")),
        "independent": count_of(number(mapping(facts.get("index")).get("rank")), samples),
        "needed": _needed(mapping(facts.get("needed"))),
        "invisible": _invisible(workers) if facts else words.DASH,
        "follows": _follows(workers, samples),
        "sentences": _sentences(finding, facts, workers),
    }


def count_of(count: float, total: float) -> str:
    """A count out of a total; a dash where one is missing.

    >>> count_of(11.0, 12.0), count_of(math.nan, 12.0)
    ('11 of 12', '–')
    """
    return words.DASH if math.isnan(count) or math.isnan(total) else f"{count:,.0f} of {total:,.0f}"


def shared(lines: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Each sentence of the lines once, with the names of the settings it is about."""
    names: dict[str, list[str]] = {}
    for line in lines:
        for sentence in line["sentences"]:
            names.setdefault(sentence, []).append(line["setting"].name)
    return [{"names": ", ".join(settings), "text": sentence} for sentence, settings in names.items()]


def _batches(facts: Mapping[str, Any], announced: Any) -> dict[str, str]:
    rounds, batch, samples = (number(facts.get(name)) for name in ("rounds", "batch", "samples"))
    how = _HOW[announced] if isinstance(announced, bool) else ""
    if math.isnan(rounds):
        return {"text": words.DASH, "small": how}
    return {"text": f"{rounds:,.0f} of {batch:,.0f}", "small": f"of {samples:,.0f}, {how}"}


def _needed(needed: Mapping[str, Any]) -> dict[str, str]:
    if not needed:
        return {"text": words.DASH, "small": ""}
    least, apart = number(needed.get("least")), number(needed.get("apart"))
    small = "" if math.isnan(apart) else f"{apart:,.0f} to tell apart"
    return {"text": "no number" if math.isnan(least) else f"{least:,.0f}", "small": small}


def _invisible(workers: list[dict[str, Any]]) -> str:
    """How many samples leave no output gradient with which worker.

    >>> _invisible([{"share": "bank", "invisible": [3, 5]}, {"share": "shop", "invisible": []}])
    '2 for bank'
    >>> _invisible([{"share": "bank", "invisible": []}])
    'none'
    """
    hiding = [w for w in workers if isinstance(w.get("invisible"), list) and w["invisible"]]
    more = [f"and for {len(hiding) - MAX_SHARES} more"] if len(hiding) > MAX_SHARES else []
    return ", ".join([f"{len(w['invisible'])} for {w.get('share')}" for w in hiding[:MAX_SHARES]] + more) or "none"


def _follows(workers: list[dict[str, Any]], samples: float) -> dict[str, str]:
    """At the worker that gives away least: by its own steps I and II, and by all rounds together where that is more."""
    solved = min((number(w.get("determined")) for w in workers), default=NAN)
    apart = min((number(w.get("separable")) for w in workers), default=NAN)
    small = f"{count_of(apart, samples)} in principle" if apart > solved else ""
    return {"text": count_of(solved, samples), "small": small}


def _sentences(finding: FindingRow, facts: Mapping[str, Any], workers: list[dict[str, Any]]) -> list[str]:
    """What the equations say, and what of the setting they leave out."""
    sentences, content = [], finding.content
    conclusion = str(facts.get("conclusion") or "")
    if content.get("announced") is False:
        sentences.append(
            "The batches are shuffled securely: the adversary does not know which samples are in a batch, and attacks "
            "that read rounds refuse. The protection rests on the shuffling alone"
            + (f". Of as many batches that are known theory says: {conclusion}" if conclusion else ".")
        )
    elif conclusion:
        sentences.append(conclusion)
    if finding.reason:
        sentences.append(f"Not computed: {finding.reason}.")
    needed = number(mapping(facts.get("needed")).get("least"))
    if number(facts.get("rounds")) < needed and "no safety" not in conclusion:
        sentences.append(
            "Fewer rounds than samples are no safety: more rounds follow, and where the inputs of the first dense "
            "layer are linearly independent, telling all samples apart can be enough."
        )
    few = [str(worker.get("share")) for worker in workers if worker.get("enough_inputs") is False]
    if few:
        named = ", ".join(few[:MAX_SHARES]) + (f" and {len(few) - MAX_SHARES} more" if len(few) > MAX_SHARES else "")
        sentences.append(
            f"For {named} the first dense layer reads fewer numbers than there are features: what it reads does not "
            "give them away without knowledge of what samples look like."
        )
    if content.get("moves"):
        sentences.append(
            "The equations take the model to stand still. It learns between these rounds, so that output gradients "
            "drift, and they hold the less the faster it learns."
        )
    if content.get("mixes"):
        sentences.append("BatchNorm in train mode mixes the samples of a batch, which the equations leave out.")
    if content.get("alters"):
        condition = number(mapping(facts.get("index")).get("condition"))
        magnified = "" if math.isnan(condition) else f", and step I magnifies what it adds by up to {condition:.3g}"
        sentences.append(f"The equations are of gradients as they are. The defence alters them{magnified}.")
    return sentences
