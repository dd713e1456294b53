"""The sections that come from findings: weight updates, leaked embeddings, and what a defence costs in training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from leakscope.report import svg, words
from leakscope.report.words import fixed
from leakscope.results.records import NAN, FindingRow, counted, mean, number
from leakscope.results.setting_verdict import SettingVerdict

MAX_LINES = 12
MAX_REASONS = 3
# Rules of thumb: SME reconstructs well where the best cosine is about 0.997, and its own table of failures has 0.6.
NEARLY_ONE_GRADIENT = 0.99
FAR_FROM_ONE_GRADIENT = 0.9
# The axis starts at the highest of these that leaves no value out, so that plots of a page can be compared.
_FLOORS = (0.99, 0.9, 0.5, 0.0, -1.0)
# So few steps lie in two directions whatever the gradients are.
_DIRECTIONS = 2


def _pairs(content: Mapping[str, Any], places: str, values: str) -> tuple[tuple[float, float], ...]:
    """Numbers with their places; none where the store does not have as many of both.

    >>> _pairs({"a": [0, 1], "b": [0.5, None]}, "a", "b"), _pairs({"a": [0], "b": "x"}, "a", "b")
    (((0.0, 0.5), (1.0, nan)), ())
    """
    one, other = content.get(places), content.get(values)
    if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        return ()
    return tuple(zip(map(number, one), map(number, other), strict=True))


def updates_section(findings: Sequence[FindingRow], settings: Sequence[SettingVerdict]) -> list[dict[str, Any]]:
    """One entry a setting whose clients sent weight updates; none where no client did."""
    entries = []
    for setting in settings:
        own = [f for f in findings if f.kind == "trajectory" and f.scenario == setting.scenario]
        if own:
            reasons = list(dict.fromkeys(finding.reason for finding in own if finding.reason))
            entries.append(_entry(setting, [finding for finding in own if not finding.reason], reasons))
    return entries


def _entry(setting: SettingVerdict, updates: list[FindingRow], reasons: list[str]) -> dict[str, Any]:
    notes = [f"Not computed: {reason}" for reason in reasons[:MAX_REASONS]]
    if len(reasons) > MAX_REASONS:
        notes.append(f"Not computed for {len(reasons) - MAX_REASONS} more reasons, which the store holds.")
    if not updates:
        return {"setting": setting, "sentence": "", "notes": notes}
    if len(updates) > MAX_LINES:
        notes.insert(0, f"The first {MAX_LINES} of {len(updates)} updates are drawn; the numbers are of all.")
    # Of several updates the sentence is on the most exposed: a mean would hide it.
    worst = max(updates, key=lambda update: -2.0 if math.isnan(cosine := update.value("max_cosine")) else cosine)
    subject = "this update" if len(updates) == 1 else f"the most exposed of these {len(updates)} updates"
    best, start, sent = (worst.value(f"{place}_cosine") for place in ("max", "start", "message"))
    few = all(update.value("steps") <= _DIRECTIONS for update in updates)
    return {
        "setting": setting,
        "sentence": meaning(best, start=start, sent=sent, subject=subject),
        **_plots(updates[:MAX_LINES], setting.name),
        "share_note": "At most two steps always lie in two directions." if few else "",
        "numbers": _numbers(updates),
        "notes": notes,
    }


def meaning(best: float, *, start: float = math.nan, sent: float = math.nan, subject: str = "this update") -> str:
    """Explain the highest cosine on the segment; ``start``: that at w_0, ``sent``: of the message with the training's.

    >>> meaning(0.95)[:67]
    'The best point on the segment has cosine 0.950 with this update: an'
    >>> meaning(0.62)[:65]
    'No point on the segment has a gradient close to this update: the '
    """
    told: dict[str, str] = words.TEXTS["updates"]
    if math.isnan(best):
        return told["vanishes"].format(subject=subject)
    first, hiders, rest = "", "the local steps", "; one that simulates them may still succeed."
    if sent < NEARLY_ONE_GRADIENT:
        first = told["turned"].format(sent=fixed(sent, 2))
        hiders, rest = "the local steps and the defence", "."
    about = {"subject": subject, "hiders": hiders}
    if best >= NEARLY_ONE_GRADIENT:
        near = told["near-start"] if start >= NEARLY_ONE_GRADIENT else ""
        return first + told["near"].format(explained=_explained(best), **about) + near
    if best >= FAR_FROM_ONE_GRADIENT:
        return first + told["somewhat"].format(best=fixed(best, 3), **about)
    return first + told["far"].format(below=_below(best), limit=FAR_FROM_ONE_GRADIENT, rest=rest, **about)


def _explained(cosine: float) -> str:
    r"""A cosine as a percentage that is never rounded up to all of it.

    >>> _explained(0.99999), _explained(0.997), _explained(1.0)
    ('99.9\xa0%', '99.7\xa0%', '100\xa0%')
    """
    return "100\xa0%" if cosine > 1 - 1e-9 else f"{math.floor(cosine * 1000 + 1e-6) / 10:.1f}\xa0%"


def _below(cosine: float) -> str:
    """A cosine cut after two digits, so that one below a limit does not read like the limit.

    >>> _below(0.8999), _below(-0.1)
    ('0.89', '−0.10')
    """
    return fixed(math.floor(cosine * 100 + 1e-6) / 100, 2)


def _numbers(updates: Sequence[FindingRow]) -> list[tuple[str, str, str]]:
    def averaged(title: str, name: str, digits: int, small: str = "") -> tuple[str, str, str]:
        values = [update.value(name) for update in updates if not math.isnan(update.value(name))]
        low, high = (fixed(limit(values), digits) for limit in (min, max)) if values else ("", "")
        return title, fixed(mean(values), digits), f"{low} to {high}" if low != high else small

    steps = sorted({update.value("steps") for update in updates if not math.isnan(update.value("steps"))})
    ends = " to ".join(f"{n:,.0f}" for n in dict.fromkeys((steps[0], steps[-1]))) if steps else words.DASH
    shares = [s for update in updates for _, s in _pairs(update.content, "chosen", "shares") if not math.isnan(s)]
    before, after = (fixed(mean(update.value(name) for update in updates), 3) for name in ("loss_before", "loss_after"))
    return [
        ("Local steps", ends, counted(len(updates), "update")),
        ("Smallest share", fixed(min(shares, default=math.nan), 3), "in two directions"),
        averaged("Cosine at the start", "start_cosine", 3, "β = 0"),
        averaged("Highest cosine", "max_cosine", 3),
        averaged("Found at β", "best_beta", 2, "0 before, 1 after"),
        ("Loss", f"{before} → {after}", "on the client's data"),
        _bound(updates),
    ]


def _bound(updates: Sequence[FindingRow]) -> tuple[str, str, str]:
    bounded = [update for update in updates if not math.isnan(update.value("bound"))]
    if not bounded:
        reasons = (update.content.get("bound_reason") for update in updates)
        return "Bound", words.DASH, next((str(reason) for reason in reasons if reason), "")
    worst = max(bounded, key=lambda update: update.value("bound"))
    ratio = worst.value("bound") / worst.value("gradient_norm") ** 2 if worst.value("gradient_norm") > 0 else math.nan
    small = f"{_brief(ratio)} × the largest squared gradient" if math.isfinite(ratio) else ""
    return "Bound" if len(bounded) == 1 else "Largest bound", _brief(worst.value("bound")), small


def _brief(value: float) -> str:
    """Three digits are enough for an order of magnitude.

    >>> _brief(0.012345), _brief(43.21), _brief(123456.0), _brief(1.5e12)
    ('0.0123', '43.2', '123,456', '1.5e+12')
    """
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"


def _plots(updates: Sequence[FindingRow], setting: str) -> dict[str, Markup]:
    names = [f"batch {update.batch}, seed {update.seed}" for update in updates]
    cosines = [
        svg.Line(
            name=name,
            points=_pairs(update.content, "betas", "cosines"),
            mark=(update.value("best_beta"), update.value("max_cosine")),
            mark_name=f"{fixed(update.value('max_cosine'), 3)} at {fixed(update.value('best_beta'), 2)}",
        )
        for name, update in zip(names, updates, strict=True)
    ]
    steps = [tuple((step + 1, b) for step, b in _pairs(update.content, "chosen", "shares")) for update in updates]
    return {
        "cosines": svg.line_plot(
            cosines,
            title=f"Cosine along the segment, setting {setting}",
            identity=f"update-{setting}-cosines",
            x_label="β, from the weights before (0) to those after (1)",
            y_label="cosine with the update",
            x_range=(0.0, 1.0),
            floors=_FLOORS,
        ),
        "shares": svg.line_plot(
            [svg.Line(name=name, points=points) for name, points in zip(names, steps, strict=True)],
            title=f"Share of each step's gradient in the two leading directions, setting {setting}",
            identity=f"update-{setting}-shares",
            x_label="local step",
            y_label="share in two directions",
            x_range=(1.0, max([1.0, *(update.value("steps") for update in updates if update.value("steps") > 1)])),
            floors=_FLOORS[:-1],
            whole=True,
        ),
    }


def embedding_section(findings: Sequence[FindingRow], settings: Sequence[SettingVerdict]) -> list[dict[str, Any]]:
    """One entry a setting that has the finding: a sentence, and a smaller line below it."""
    entries = []
    for setting in settings:
        own = next((f for f in findings if f.kind == "embedding" and f.scenario == setting.scenario), None)
        if own is not None:
            sentence, small = ("", "") if own.reason else (embedding_meaning(own), _small(own))
            if own.reason:
                what, span = ("Single features do not follow", _span(own)) if _span(own) else ("Nothing follows", "")
                sentence = f"{what}: {own.reason}. {span}".strip()
            entries.append({"setting": setting, "sentence": sentence, "small": small, "leaks": not own.reason})
    return entries


def embedding_meaning(finding: FindingRow) -> str:
    """The finding in one sentence.

    >>> content = {"layer": "fc", "examples": 4, "numbers": 2048, "error": 1e-7, "residual": 3e-12, "exact": True}
    >>> embedding_meaning(FindingRow("k", 0, "embedding", "done", "FedSGD()", "none", 0, 0, content))
    'The 2,048 features in front of fc of each of 4 examples follow from the update, to 1e-07; certificate 3e-12.'
    """
    content = finding.content
    examples, numbers = finding.value("examples"), finding.value("numbers")
    each = "of the one example" if examples == 1 else f"of each of {_whole(examples)} examples"
    layer = str(content.get("layer") or "the last layer")
    what = f"The {_whole(numbers)} features in front of {layer} {each}"
    if content.get("reaches_input") is True:
        what = f"The examples themselves, the {_whole(numbers)} inputs of {layer} {each},"
    how = "follow" if content.get("exact") is True else "follow roughly"
    error, residual = (_power(finding.value(name)) for name in ("error", "residual"))
    return f"{what} {how} from the update, to {error}; certificate {residual}."


def _span(finding: FindingRow) -> str:
    """What is known of the span of features that do not follow one by one; empty where nothing is.

    >>> content = {"layer": "fc1", "examples": 12, "numbers": 512, "span_error": 1e-7, "span_baseline": 0.988}
    >>> _span(FindingRow("k", 0, "embedding", "done", "FedSGD()", "none", 0, 0, content))
    'The span of the 512 features in front of fc1 of 12 examples follows to 1e-07 (a random span: 0.99).'
    """
    error, baseline = finding.value("span_error"), finding.value("span_baseline")
    if math.isnan(error) or math.isnan(baseline):
        return ""
    numbers, examples = _whole(finding.value("numbers")), _whole(finding.value("examples"))
    size = _power(error) if error < 0.01 else f"{error:.2f}"
    what = f"The span of the {numbers} features in front of {finding.content.get('layer') or 'a layer'}"
    return f"{what} of {examples} examples follows to {size} (a random span: {baseline:.2f})."


def _small(finding: FindingRow) -> str:
    content, words = finding.content, []
    if isinstance(peeled := content.get("peeled"), list) and peeled:
        words.append(f"{counted(len(peeled), 'dense layer')} below the head solved as well")
    if not math.isnan(right := finding.value("labels_right")):
        words.append(f"{100 * right:.0f} % of the labels right")
    if content.get("note"):
        words.append(str(content["note"]))
    return "; ".join(words)


def _whole(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:,.0f}"


def _power(value: float) -> str:
    return "an unknown error" if math.isnan(value) else f"{value:.0e}"


#: A loss beyond so many times the first one is drawn at the edge: training that fails must not flatten the rest.
EDGE = 2.0
#: A training that leaves more of its loss than this has hardly learnt anything.
LEARNED = 0.95
#: Where the lowest loss is above this share of the highest, the axis does not begin at zero.
_NARROW = 0.5


#: The training of one setting; its values are NaN where the store says nothing that can be used.
_Curve = tuple[SettingVerdict, FindingRow]


def _points(cost: FindingRow) -> tuple[tuple[float, float], ...]:
    points = cost.content.get("points")
    pairs = [pair for pair in points if isinstance(pair, list)] if isinstance(points, list) else []
    numbers = [(number(pair[0]), number(pair[1])) for pair in pairs if len(pair) == 2]
    return tuple(pair for pair in numbers if not any(map(math.isnan, pair)))


def costs_section(findings: Sequence[FindingRow], settings: Sequence[SettingVerdict]) -> list[dict[str, Any]]:
    """One entry a protocol whose training is known; none where no protocol trains."""
    protocols: dict[str, list[_Curve]] = {}
    for setting in settings:
        cost = next((f for f in findings if f.kind == "cost" and f.scenario == setting.scenario), None)
        if cost is not None:
            protocols.setdefault(setting.protocol, []).append((setting, cost))
    return [_cost_entry(curves, f"cost-{place}") for place, curves in enumerate(protocols.values())]


def _cost_entry(curves: list[_Curve], identity: str) -> dict[str, Any]:
    bare = next((cost for setting, cost in curves if setting.defense == "none"), None)
    notes = [f"{setting.name}: not computed: {cost.reason}" for setting, cost in curves if cost.reason]
    if bare is not None and bare.value("after") > LEARNED * bare.value("before"):
        notes.append("Even without a defence the loss hardly falls in these rounds, so the ratios say little.")
    drawn = [(setting, points) for setting, cost in curves if (points := _points(cost))]
    colours = {setting.name: svg.colour(place) for place, (setting, _) in enumerate(drawn)}
    undefended = NAN if bare is None else bare.value("after")
    rounds = max((count for _, cost in curves if not math.isnan(count := cost.value("rounds"))), default=0.0)
    lines = []
    for setting, cost in curves:
        before, after, last = (cost.value(name) for name in ("before", "after", "last_tenth"))
        line = {
            "setting": setting,
            "colour": colours.get(setting.name, ""),
            "before": fixed(before, 3),
            "after": fixed(after, 3),
            "small": "" if math.isnan(last) else f"{fixed(last, 3)} at last",
            "ratio": words.DASH if setting.defense == "none" else ratio(after, undefended),
        }
        lines.append(line)
    return {
        "setting": curves[0][0],
        "rounds": counted(int(rounds), "round"),
        "drawing": _plot(drawn, identity) if drawn else "",
        "lines": lines,
        "notes": notes,
    }


def ratio(loss: float, undefended: float) -> str:
    """How many times the undefended loss this is; a dash where there is none to compare with.

    >>> ratio(1.15, 0.46), ratio(1.0, NAN), ratio(1.0, 0.0)
    ('× 2.50', '–', '–')
    """
    value = loss / undefended if undefended > 0 else NAN
    return words.DASH if math.isnan(value) else f"× {value:.2f}" if value < 1000 else f"× {value:.2g}"


def _plot(curves: list[tuple[SettingVerdict, tuple[tuple[float, float], ...]]], identity: str) -> Any:
    losses = [loss for _, points in curves for _, loss in points]
    edge = EDGE * max(points[0][1] for _, points in curves)
    low, high = min(losses), min(max(losses), edge)
    low = 0.0 if low < _NARROW * high else low - 0.05 * (high - low)
    return svg.line_plot(
        [svg.Line(name=f"{s.name} {s.defense_short}", points=points) for s, points in curves],
        title=f"Training loss under each defence, {curves[0][0].protocol_short}",
        identity=identity,
        x_label="round",
        y_label="loss of the round's batch" + (f", {high:.3g} and more at the edge" if max(losses) > high else ""),
        x_range=(1.0, max(place for _, points in curves for place, _ in points)),
        floors=(low,),
        ceiling=high if high > low else low + 1.0,
        whole=True,
    )
