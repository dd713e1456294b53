"""Words and page of recorded updates: the verdict of an audit, why, what to do, and a line for each update."""

from pathlib import Path
from typing import Any

from leakscope.contracts.errors import NotApplicable
from leakscope.report import words
from leakscope.report.captured import MAX_SHOWN, confidence_words
from leakscope.report.pictures import draw
from leakscope.report.template import FileName, fill, write_page
from leakscope.results.records import counted

_TEXTS: dict[str, str] = words.TEXTS["recorded"]


def recorded_words(audit: Any) -> list[str]:
    """Say the verdict, why, and what to do; one line each."""
    why, todo = reason_words(audit)
    return [f"Verdict: {audit.outcome.upper()}", f"Why: {why}", f"What to do: {todo}"]


def reason_words(audit: Any) -> tuple[str, str]:
    """Say why the verdict is what it is, and what to do about it."""
    attacked = [one for one in audit if one.reconstruction is not None]
    leaking = [one for one in attacked if one.outcome == "looks recovered"]
    counts = {"leaking": len(leaking), "attacked": counted(len(attacked), "update")}
    counts["total"] = counted(len(audit), "update")
    key = audit.outcome.replace(" ", "-")
    # Nothing that a recording could tell makes an attack fit a model.
    misfits = key == "nothing-audited" and all(isinstance(one.refusal, NotApplicable) for one in audit)
    todo = "nothing-applicable" if misfits else key
    return _TEXTS[f"why-{key}"].format(**counts), _TEXTS[f"todo-{todo}"]


def place_words(one: Any) -> str:
    """Say where an update was taken.

    >>> from types import SimpleNamespace
    >>> place_words(SimpleNamespace(origin=SimpleNamespace(place="dp_step", number=3, client="self")))
    'DP-SGD, step 3'
    """
    origin = one.origin
    if origin is None:
        return "captured"
    return _TEXTS[f"place-{origin.place}"].format(number=origin.number, client=origin.client)


def render_recorded(audit: Any, pictures: bool = False) -> str:
    """The HTML page of recorded updates; ``pictures`` shows what was recovered."""
    why, todo = reason_words(audit)
    context = {"audit": audit, "why": why, "todo": todo, "lines": [_line(one, pictures) for one in audit]}
    return fill("recorded.html.j2", context)


def write_recorded(audit: Any, path: FileName, pictures: bool = False) -> Path:
    """Write the page of recorded updates to ``path``."""
    return write_page(path, render_recorded(audit, pictures))


def _line(one: Any, pictures: bool) -> dict[str, Any]:
    found, drawn = one.reconstruction, []
    if found is not None and pictures:
        space = one.observation.inputs
        unit = space.to_unit(found.inputs.cpu()).clamp(0, 1)[:MAX_SHOWN]
        name = f"{place_words(one)}-{one.origin.client if one.origin else ''}"
        drawn = [draw(x, alt=f"returned input {n}", identity=f"{name}-{n}", inputs=space) for n, x in enumerate(unit)]
    answer, reason = "Not attacked", str(one.refusal)
    if found is not None:
        answer, _, reason = confidence_words(one).partition(": ")
    best, nothing = one.worst_off
    made = one.observation.made
    notes = dict.fromkeys((*one.notes, *(() if made is None else made.notes)))
    return {
        **{"place": place_words(one), "answer": answer, "reason": reason, "best": best, "nothing": nothing},
        **{"count": 0 if found is None else len(found.inputs), "certified": one.certified, "pictures": drawn},
        **{"unexplained": one.unexplained, "notes": list(notes), "flags": () if found is None else found.flags},
    }
