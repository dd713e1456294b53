"""The section on weight updates of many local steps: whether each could pass for one gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.report import svg, words
from leakscope.report.settings import Setting
from leakscope.report.words import fixed
from leakscope.results.records import FindingRow, counted, mean, number

MAX_LINES = 12
MAX_REASONS = 3
# Rules of thumb, not theorems. Published attacks that search the segment (SME) reconstruct well where the best cosine
# is about 0.997, and their own table of failures has 0.6; between lies a slope, not an edge.
NEARLY_ONE_GRADIENT = 0.99
FAR_FROM_ONE_GRADIENT = 0.9
# The axis starts at the highest of these that leaves no value out, so that plots of a page can be compared.
_FLOORS = (0.99, 0.9, 0.5, 0.0, -1.0)
# So few steps lie in two directions whatever the gradients are.
_DIRECTIONS = 2


@dataclass(frozen=True, kw_only=True)
class _Update:
    """What one finding says of a client's update; NaN where it says nothing that can be used."""

    name: str
    steps: float
    betas: list[float]
    cosines: list[float]
    best_beta: float
    max_cosine: float
    start_cosine: float
    message_cosine: float
    chosen: list[float]
    shares: list[float]
    loss_before: float
    loss_after: float
    bound: float
    gradient_norm: float
    bound_reason: str


def updates_section(findings: Sequence[FindingRow], settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """One entry a setting whose clients sent weight updates; none where no client did."""
    entries = []
    for setting in settings:
        own = [f for f in findings if f.kind == "trajectory" and f.setting == setting.cell]
        if own:
            updates = [_read(finding) for finding in own if not finding.reason]
            reasons = list(dict.fromkeys(finding.reason for finding in own if finding.reason))
            entries.append(_entry(setting, updates, reasons, f"update-{setting.name}"))
    return entries


def _entry(setting: Setting, updates: list[_Update], reasons: list[str], identity: str) -> dict[str, Any]:
    shown = updates[:MAX_LINES]
    notes = [f"Not computed: {reason}" for reason in reasons[:MAX_REASONS]]
    if len(reasons) > MAX_REASONS:
        notes.append(f"Not computed for {len(reasons) - MAX_REASONS} more reasons, which the store holds.")
    if len(updates) > MAX_LINES:
        notes.insert(0, f"The first {MAX_LINES} of {len(updates)} updates are drawn; the numbers are of all.")
    few = bool(updates) and all(update.steps <= _DIRECTIONS for update in updates)
    return {
        "setting": setting,
        "sentence": _meaning(updates) if updates else "",
        "cosines": _cosine_plot(shown, setting, f"{identity}-cosines") if updates else "",
        "shares": _share_plot(shown, setting, f"{identity}-shares") if updates else "",
        "share_note": "At most two steps always lie in two directions." if few else "",
        "numbers": _numbers(updates) if updates else [],
        "notes": notes,
    }


def _meaning(updates: Sequence[_Update]) -> str:
    """Of several updates the sentence is on the most exposed: a mean would hide it."""
    worst = max(updates, key=lambda update: -2.0 if math.isnan(update.max_cosine) else update.max_cosine)
    several = f"the most exposed of these {len(updates)} updates"
    subject = "this update" if len(updates) == 1 else several
    return meaning(worst.max_cosine, start=worst.start_cosine, sent=worst.message_cosine, subject=subject)


def meaning(best: float, *, start: float = math.nan, sent: float = math.nan, subject: str = "this update") -> str:
    """What the highest cosine on the segment means, in plain words.

    ``start`` is the cosine at w_0, ``sent`` that of the message with what the training did.

    >>> meaning(0.95)[:67]
    'The best point on the segment has cosine 0.950 with this update: an'
    >>> meaning(0.62)[:65]
    'No point on the segment has a gradient close to this update: the '
    """
    if math.isnan(best):
        return f"The gradient vanishes along the whole segment, so there is nothing to compare {subject} with."
    turned = sent < NEARLY_ONE_GRADIENT
    hiders = "the local steps and the defence" if turned else "the local steps"
    rest = "." if turned else "; one that simulates them may still succeed."
    first = ""
    if turned:
        first = f"The defence turned what was sent: its cosine with the training's own update is {fixed(sent, 2)}. "
    if best >= NEARLY_ONE_GRADIENT:
        text = (
            f"One point on the segment explains {_explained(best)} of the direction of {subject}, so an attack that "
            f"searches that point (SME) sees nearly a plain gradient; {hiders} hide little."
        )
        if start >= NEARLY_ONE_GRADIENT:
            text += " The gradient at the weights before training is nearly as close: no search is needed."
        return first + text
    if best >= FAR_FROM_ONE_GRADIENT:
        return first + (
            f"The best point on the segment has cosine {fixed(best, 3)} with {subject}: an attack that searches it "
            f"(SME) works with a gradient that is somewhat off and may recover a part; {hiders} hide some."
        )
    return first + (
        f"No point on the segment has a gradient close to {subject}: the highest cosine is {_below(best)}, below "
        f"{FAR_FROM_ONE_GRADIENT:g}. An attack that takes it for one gradient is misled by {hiders}{rest}"
    )


def _explained(cosine: float) -> str:
    r"""A cosine as a percentage that is never rounded up to all of it.

    >>> _explained(0.99999), _explained(0.997), _explained(1.0)
    ('99.9\xa0%', '99.7\xa0%', '100\xa0%')
    """
    if cosine > 1 - 1e-9:
        return "100\xa0%"
    return f"{math.floor(cosine * 1000 + 1e-6) / 10:.1f}\xa0%"


def _below(cosine: float) -> str:
    """A cosine cut after two digits, so that one below a limit does not read like the limit.

    >>> _below(0.8999), _below(-0.1)
    ('0.89', '−0.10')
    """
    return fixed(math.floor(cosine * 100 + 1e-6) / 100, 2)


def _numbers(updates: Sequence[_Update]) -> list[dict[str, str]]:
    """The row of numbers: name, value, and a smaller line below it."""

    def averaged(name: str, pick: Callable[[_Update], float], digits: int, small: str = "") -> dict[str, str]:
        values = [value for value in map(pick, updates) if not math.isnan(value)]
        low, high = (fixed(limit(values), digits) for limit in (min, max)) if values else ("", "")
        spread = f"{low} to {high}" if low != high else ""
        return {"name": name, "value": fixed(mean(values), digits), "small": spread or small}

    steps = sorted({update.steps for update in updates if not math.isnan(update.steps)})
    worst = min((share for update in updates for share in update.shares if not math.isnan(share)), default=math.nan)
    before, after = mean(u.loss_before for u in updates), mean(u.loss_after for u in updates)
    return [
        {
            "name": "Local steps",
            "value": "–" if not steps else " to ".join(f"{n:,.0f}" for n in dict.fromkeys((steps[0], steps[-1]))),
            "small": counted(len(updates), "update"),
        },
        {"name": "Smallest share", "value": fixed(worst, 3), "small": "in two directions"},
        averaged("Cosine at the start", lambda u: u.start_cosine, 3, "β = 0"),
        averaged("Highest cosine", lambda u: u.max_cosine, 3),
        averaged("Found at β", lambda u: u.best_beta, 2, "0 before, 1 after"),
        {"name": "Loss", "value": f"{fixed(before, 3)} → {fixed(after, 3)}", "small": "on the client's data"},
        _bound(updates),
    ]


def _bound(updates: Sequence[_Update]) -> dict[str, str]:
    """The largest bound, and how far it exceeds the squared gradients themselves; or why there is none."""
    bounded = [update for update in updates if not math.isnan(update.bound)]
    if not bounded:
        why = next((update.bound_reason for update in updates if update.bound_reason), "")
        return {"name": "Bound", "value": words.DASH, "small": why}
    worst = max(bounded, key=lambda update: update.bound)
    ratio = worst.bound / worst.gradient_norm**2 if worst.gradient_norm > 0 else math.nan
    small = f"{_brief(ratio)} × the largest squared gradient" if math.isfinite(ratio) else ""
    return {"name": "Bound" if len(bounded) == 1 else "Largest bound", "value": _brief(worst.bound), "small": small}


def _brief(value: float) -> str:
    """Three digits are enough for an order of magnitude.

    >>> _brief(0.012345), _brief(43.21), _brief(123456.0), _brief(1.5e12)
    ('0.0123', '43.2', '123,456', '1.5e+12')
    """
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"


def _cosine_plot(updates: Sequence[_Update], setting: Setting, identity: str) -> Any:
    lines = [
        svg.Line(
            name=update.name,
            points=tuple(zip(update.betas, update.cosines, strict=True)),
            mark=(update.best_beta, update.max_cosine),
            mark_name=f"{fixed(update.max_cosine, 3)} at {fixed(update.best_beta, 2)}",
        )
        for update in updates
    ]
    return svg.line_plot(
        lines,
        title=f"Cosine along the segment, setting {setting.name}",
        identity=identity,
        x_label="β, from the weights before (0) to those after (1)",
        y_label="cosine with the update",
        x_range=(0.0, 1.0),
        floors=_FLOORS,
    )


def _share_plot(updates: Sequence[_Update], setting: Setting, identity: str) -> Any:
    lines = [
        svg.Line(name=u.name, points=tuple((step + 1, s) for step, s in zip(u.chosen, u.shares, strict=True)))
        for u in updates
    ]
    last = max((update.steps for update in updates if not math.isnan(update.steps)), default=1.0)
    return svg.line_plot(
        lines,
        title=f"Share of each step's gradient in the two leading directions, setting {setting.name}",
        identity=identity,
        x_label="local step",
        y_label="share in two directions",
        x_range=(1.0, max(1.0, last)),
        floors=_FLOORS[:-1],
        whole=True,
    )


def _read(finding: FindingRow) -> _Update:
    content = finding.content
    betas, cosines = _pair(content.get("betas"), content.get("cosines"))
    chosen, shares = _pair(content.get("chosen"), content.get("shares"))
    single = ("steps", "best_beta", "max_cosine", "start_cosine", "message_cosine", "loss_before", "loss_after")
    return _Update(
        name=f"batch {finding.batch}, seed {finding.seed}",
        betas=betas,
        cosines=cosines,
        chosen=chosen,
        shares=shares,
        bound_reason=str(content.get("bound_reason") or ""),
        **{name: number(content.get(name)) for name in (*single, "bound", "gradient_norm")},
    )


def _pair(one: Any, other: Any) -> tuple[list[float], list[float]]:
    """Two lists of numbers of equal length; empty where the store has something else.

    >>> _pair([0, 1], [0.5, None]), _pair([0], "x")
    (([0.0, 1.0], [0.5, nan]), ([], []))
    """
    if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        return [], []
    return [number(value) for value in one], [number(value) for value in other]
