"""Theory in words: the limits of a model as small tables of text; the section of a page on what each setting allows.

The words of the tables are in ``limits.txt.j2`` and ``vertical.txt.j2``.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.contracts.reconstruction import DIAGNOSES
from leakscope.limits.report import Limits
from leakscope.limits.vertical import VerticalLimits
from leakscope.report import words
from leakscope.report.sentences import RECOVERED_PSNR
from leakscope.report.template import cells_of, text_template
from leakscope.report.words import fixed, likeness
from leakscope.results.records import NAN, FindingRow, Row, highest, mapping, number
from leakscope.results.setting_verdict import SettingVerdict

_TEXTS: dict[str, str] = words.TEXTS["theory"]
_ANOTHER_MODEL = _TEXTS["another-model"]


def limits_section(
    rows: Sequence[Row], findings: Sequence[FindingRow], settings: Sequence[SettingVerdict]
) -> dict[str, Any]:
    """One line a setting with a floor or diagnoses; settings of vertical learning have ``rounds`` and no floor."""
    lines: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    for setting in settings:
        done = [r for r in rows if r.counts and r.status == "done" and r.job.scenario == setting.scenario]
        floor = next((f for f in findings if f.kind in ("floor", "rounds") and f.scenario == setting.scenario), None)
        outcomes = _outcomes(done, floor)
        if floor is None and not outcomes:
            continue
        # Of a whole update: on the client of the floor where there is one, else on any.
        own = [row.result for row in done if floor is None or row.job.batch == floor.batch]
        best = highest(result.whole_psnr for result in own if result is not None)
        named = any(finding.scenario == setting.scenario for finding in findings)
        counts = [{"name": name, "jobs": outcomes[name]} for name in DIAGNOSES if outcomes[name]]
        line = {"setting": setting, "best": _error(best, 10 ** (-best / 20)), "outcomes": counts}
        if floor is not None and floor.kind == "rounds":
            rounds.append({**line, **describe(floor)})
        else:
            content = {} if floor is None else floor.content
            sentences = list(filter(None, [_sentence(content, best)]))
            lines.append({**line, "floor": _floor_cells(content, _why_none(floor, named)), "sentences": sentences})
    ranked = any(line["floor"]["rank"] != words.DASH for line in lines)
    shown = {"lines": lines, "ranked": ranked, "rounds": rounds}
    return {**shown, "meanings": shared(lines), "sentences": shared(rounds)}


def _why_none(floor: FindingRow | None, other_findings: bool) -> str:
    """Why there is no floor; empty where there is one, or damage in its place."""
    if floor is not None:
        return floor.reason
    if other_findings:
        return "the bound is that of one update, and this protocol sends something else"
    return "the audit was run without findings, or has not come to them yet"


def _floor_cells(content: Mapping[str, Any], why_none: str) -> dict[str, str]:
    shown = _error(number(content.get("psnr")), number(content.get("rmse")), str(content.get("method") or ""))
    if content.get("infinite"):
        shown = {"words": "no complete copy", "small": "parts of the inputs leave no trace in the update"}
    elif why_none:
        shown = {"words": f"Not computed: {why_none}", "small": ""}
    ends = content.get("interval")
    low, high = map(number, ends) if isinstance(ends, list) and len(ends) == 2 else (NAN, NAN)
    interval = "" if math.isnan(low) else f"{low:.2g} to {high:.2g}"
    noise = f"{number(content['sigma']):.3g} per entry" if "sigma" in content else words.DASH
    if content.get("rounding_only"):
        noise = "rounding only"
    if _may_change(content) and shown["small"]:
        shown["small"] += "; of the model as it is"
    rank = count_of(number(content.get("rank")), number(content.get("unknowns")))
    return {**shown, "interval": interval, "rank": rank, "noise": noise}


def _error(psnr: float, rmse: float, method: str = "") -> dict[str, str]:
    if math.isnan(psnr):
        return {"words": words.DASH, "small": ""}
    small = f"{fixed(psnr)} dB, RMSE {rmse:.2g}" + (f", {method}" if method else "")
    return {"words": words.likeness(psnr), "small": small}


def _sentence(content: Mapping[str, Any], best: float) -> str:
    if content.get("infinite") and not best >= RECOVERED_PSNR:
        if _may_change(content):
            return f"Parts of the inputs leave no trace in the update of the model as it is. {_ANOTHER_MODEL}"
        return "Parts of the inputs leave no trace: without prior knowledge they cannot all be recovered."
    floor = number(content.get("psnr"))
    if (math.isnan(floor) and not content.get("infinite")) or math.isnan(best):
        return ""
    if best > floor + 1 and _may_change(content):
        meaning = f"The best attack does better than theory allows of the model as it is. {_ANOTHER_MODEL}"
    elif best >= RECOVERED_PSNR:
        meaning = "The inputs were recovered; what theory allows beyond the best attack are digits only."
    elif best > floor + 1:
        above = "The best attack does better than theory allows to one without prior knowledge"
        meaning = f"{above}: what it knows of pictures helps it."
    elif _unsettled(content):
        meaning = "Theory does not exclude a better attack."
    elif floor - best > 10 and floor >= RECOVERED_PSNR:
        reached, allowed = words.likeness(best), words.likeness(floor)
        meaning = _TEXTS["unprotected"].format(allowed=allowed, reached=reached, gap=floor - best)
    elif _may_change(content):
        meaning = f"The best attack is near what theory allows of the model as it is. {_ANOTHER_MODEL}"
    else:
        meaning = "The best attack is near what theory allows."
    note = content.get("note")
    return f"{meaning} The least error is estimated too low: {note}." if note else meaning


def _outcomes(done: Sequence[Row], floor: FindingRow | None) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in done:
        if row.result is not None and row.result.diagnosis is not None:
            content = floor.content if floor is not None and row.job.batch == floor.batch else {}
            counts[settled(row.result.diagnosis.outcome, row.result.whole_psnr, content)] += 1
    return counts


def settled(outcome: str, psnr: float, floor: Mapping[str, Any]) -> str:
    """The attack's own opinion where the truth agrees; else truth tells if it recovered, and the floor if it could."""
    if psnr >= RECOVERED_PSNR:
        return "recovered"
    if outcome not in ("recovered", "undecided"):
        return outcome
    if floor.get("infinite"):
        return "undecided" if _may_change(floor) else "not identifiable"
    allowed = number(floor.get("psnr"))
    if math.isnan(psnr) or math.isnan(allowed) or _unsettled(floor):
        return "undecided"
    if allowed >= RECOVERED_PSNR:
        return "optimiser failed"
    # The noise of rounding is known to its order only, and the floor of one model is not that of another.
    return "undecided" if floor.get("rounding_only") or _may_change(floor) else "not identifiable"


def _may_change(floor: Mapping[str, Any]) -> bool:
    """Whether the server may send another model than the one whose floor this is."""
    return bool(floor.get("model_may_change"))


def _unsettled(floor: Mapping[str, Any]) -> bool:
    """Whether the estimate stopped early: the true floor is higher, nobody knows by how much."""
    return number(floor.get("converged")) < 1


MAX_SHARES = 4


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
    how = {True: "announced", False: "kept secret"}[announced] if isinstance(announced, bool) else ""
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
    sentences, content = [], finding.content
    conclusion = str(facts.get("conclusion") or "")
    if content.get("announced") is False:
        known = f". Of as many batches that are known theory says: {conclusion}" if conclusion else "."
        sentences.append(_TEXTS["shuffled"] + known)
    elif conclusion:
        sentences.append(conclusion)
    if finding.reason:
        sentences.append(f"Not computed: {finding.reason}.")
    needed = number(mapping(facts.get("needed")).get("least"))
    if number(facts.get("rounds")) < needed and "no safety" not in conclusion:
        sentences.append(_TEXTS["few-rounds"])
    if few := [str(worker.get("share")) for worker in workers if worker.get("enough_inputs") is False]:
        named = ", ".join(few[:MAX_SHARES]) + (f" and {len(few) - MAX_SHARES} more" if len(few) > MAX_SHARES else "")
        sentences.append(_TEXTS["few-inputs"].format(named=named))
    sentences += [_TEXTS[fact] for fact in ("moves", "mixes") if content.get(fact)]
    if content.get("alters"):
        condition = number(mapping(facts.get("index")).get("condition"))
        magnified = "" if math.isnan(condition) else f", and step I magnifies what it adds by up to {condition:.3g}"
        sentences.append(f"The equations are of gradients as they are. The defence alters them{magnified}.")
    return sentences


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, rows of as many cells, and a remark below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str | None = None


def tables_of(limits: Limits | VerticalLimits) -> tuple[Table, ...]:
    """The tables of one gradient or of rounds of vertical learning, whichever was asked."""
    return vertical_tables(limits) if isinstance(limits, VerticalLimits) else limits_tables(limits)


def limits_tables(limits: Limits) -> tuple[Table, ...]:
    return _filled("limits.txt.j2", limits)


def vertical_tables(limits: VerticalLimits) -> tuple[Table, ...]:
    return _filled("vertical.txt.j2", limits)


def brief(value: float | None) -> str:
    """Three digits, or a word.

    >>> brief(0.12345), brief(float("inf")), brief(None)
    ('0.123', 'infinite', 'not computed')
    """
    if value is None or math.isnan(value):
        return "not computed"
    return "infinite" if math.isinf(value) else f"{value:.3g}"


def met(value: bool | None) -> str:
    return "met" if value else "not met"


def _filled(template: str, limits: Limits | VerticalLimits) -> tuple[Table, ...]:
    text = text_template(template, {"brief": brief, "met": met, "likeness": likeness}).render(limits=limits)
    return tuple(map(_table, text.removeprefix("= ").split("\n= ")))


def _table(text: str) -> Table:
    title, *lines = filter(None, text.splitlines())
    note = next((line.removeprefix("> ") for line in lines if line.startswith("> ")), None)
    cells = [cells_of(line) for line in lines if not line.startswith("> ")]
    return Table(title, cells[0] if cells else (), tuple(cells[1:]), note)
