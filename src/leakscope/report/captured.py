"""Pages of one result: an assessed update, beside one line on it and how sure it is; a table of a paper run again.

Audits and papers may not be imported here, so a result is read by its fields alone. Without the truth no measure is
claimed; originals are drawn only where somebody asked for them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from leakscope.contracts.reconstruction import FLAGS
from leakscope.contracts.registry import kebab
from leakscope.report import words
from leakscope.report.pictures import Picture, channel_note, draw
from leakscope.report.sentences import shared_words
from leakscope.report.svg import colour, curve_plot
from leakscope.report.template import FileName, fill, write_page

MAX_SHOWN = 64
#: Measures with the truth, and how many digits they are shown with.
MEASURED = {"psnr": ("PSNR, dB", 2), "ssim": ("SSIM", 3), "mse": ("MSE", 4)}
#: Inputs that know nothing of the client, by the name of their control.
BASELINES: dict[str, str] = words.TEXTS["baselines"]
_STANDINGS: dict[str, str] = words.TEXTS["standings"]


def confidence_words(result: Any) -> str:
    """Say what a result may be taken for, and why: by its certificates, the truth, or what it leaves unexplained."""
    texts, standing = words.TEXTS["captured"], result.standing
    least = min((one.unexplained for one in result.baselines if one.unexplained is not None), default=float("nan"))
    reasons = [_STANDINGS[standing].format(left=f"{result.unexplained or 0:.2g}", least=f"{least:.2g}")]
    found = result.reconstruction
    if standing != "certified":
        if found.certified:
            reasons.insert(0, texts["some-certified"].format(certified=found.certified, count=len(found.inputs)))
        if result.lift is not None:
            best, nothing = result.worst_off
            reasons[-1] = texts["near"].format(best=best, nothing=nothing)
        reasons += [texts["noise-like"]] if result.noise_like else []
        if result.one_gradient and standing != "stands out":
            reasons.append(texts["one-gradient"])
    return f"{result.outcome.capitalize()}: {' '.join(reasons)}"


def diagnosis_words(result: Any) -> tuple[str, str]:
    """Return the diagnosis and its reason; what may not be the client's is not called recovered."""
    diagnosis = result.reconstruction.diagnosis
    claimed = diagnosis.outcome == "recovered" and result.outcome != "looks recovered"
    return "update explained" if claimed else diagnosis.outcome, diagnosis.reason


def assessment_line(result: Any) -> str:
    """Say in one line where an update was taken, what was recovered, and what that stands beside."""
    origin, found = result.origin, result.reconstruction
    words = [kebab(type(result.attack).__name__)]
    if origin is not None:
        step = origin.place == "dp_step"
        whose = f"step {origin.number}" if step else f"round {origin.number}, client {origin.client}"
        words = [f"{origin.place}, {whose}: {words[0]}"]
    if found is None:
        return "; ".join([*words, f"not attacked: {result.refusal}", *result.notes])
    if result.psnr is not None:
        best, nothing = result.worst_off
        words.append(f"best {best:.1f} dB, zero information {nothing:.1f} dB")
    if result.unexplained is not None:
        noise = "" if result.unexplained_of_noise is None else f" (of noise {result.unexplained_of_noise:.0%})"
        words.append(f"{result.unexplained:.0%} of the update unexplained{noise}")
    return "; ".join([*words, *shared_words(found.certificates), *found.flags, *result.notes])


def render_captured(result: Any, title: str, pictures: bool = False, names: bool = False) -> str:
    """The HTML page of a :class:`leakscope.audit.assess.Assessment`.

    ``pictures`` shows the originals too, ``names`` the labels.
    """
    found, seen = result.reconstruction, result.observation
    headline, _, lead = confidence_words(result).partition(": ")
    hidden = {
        "hidden": result.truth is not None and not pictures,
        "hidden-labels": found.labels is not None and not names,
    }
    context = {
        "title": title,
        "headline": headline,
        "lead": f"{lead[:1].upper()}{lead[1:]}",
        "result": result,
        "found": found,
        "seen": seen,
        "count": len(found.inputs),
        "examples": _examples(result, pictures, names),
        "more": max(0, len(found.inputs) - MAX_SHOWN),
        "picture_note": channel_note(tuple(seen.input_shape)),
        "diagnosis": diagnosis_words(result),
        "hidden": [words.TEXTS["captured"][what] for what, left_out in hidden.items() if left_out],
        "rows": [("what the attack returned", result), *((BASELINES[one.name], one) for one in result.baselines)],
        "measured": MEASURED if result.evaluation is not None else {},
        "meanings": FLAGS,
        "entries": f"{sum(value.numel() for value in seen.message.update.values()):,}",
    }
    return fill("captured.html.j2", context)


def write_captured(result: Any, path: FileName, title: str, pictures: bool = False, names: bool = False) -> Path:
    """Write the page of an attack on a captured update to ``path``."""
    return write_page(path, render_captured(result, title, pictures, names))


def _examples(result: Any, pictures: bool, names: bool) -> list[dict[str, Any]]:
    """Each recovered input, and with the truth the original that it was matched with."""
    reconstruction, space = result.reconstruction, result.observation.inputs
    unit = space.to_unit(reconstruction.inputs.cpu()).clamp(0, 1)
    order = [] if result.evaluation is None else result.evaluation.order.tolist()
    drawn = space.to_unit(result.baselines[-1].inputs.cpu()).clamp(0, 1)
    originals = None if result.truth is None or not pictures else result.ruler.originals(result.truth.x)
    examples = []
    for number, value in enumerate(unit[:MAX_SHOWN]):
        place = order.index(number) if number in order else None
        original: Picture | None = None
        if originals is not None and place is not None:
            original = draw(originals[place], alt=f"original {place}", identity=f"o{number}", inputs=space)
        labels = reconstruction.labels if names else None
        examples.append(
            {
                "recovered": draw(value, alt=f"returned input {number}", identity=f"r{number}", inputs=space),
                "blind": draw(drawn[number], alt=f"baseline {number}", identity=f"b{number}", inputs=space),
                "original": original,
                "label": None if labels is None else labels[number].tolist(),
                "score": float(reconstruction.scores.reshape(-1)[min(number, reconstruction.scores.numel() - 1)]),
                "psnr": None if place is None else result.psnr_of_inputs[number],
                "certificate": reconstruction.certificates[number] if reconstruction.certificates else None,
            }
        )
    return examples


#: A curve is drawn as its mean over so large a share of its steps, for the loss of single batches is ragged.
SMOOTHED = 0.02


def render_reproduction(result: Any, pictures: bool | None = None) -> str:
    """The page of a :class:`leakscope.papers.Reproduction`; ``pictures`` None: those not private, True: all."""
    count = Counter(row.verdict for row in result.rows)
    known = ("matches", "above", "below", "too few to tell", "measured", "not run")
    context = {
        "result": result,
        "seconds": words.duration(result.seconds),
        "provenance": [*result.versions.items(), *result.machine.items()],
        "verdicts": ", ".join(f"{count[name]} {name}" for name in known if count[name]),
        "charts": [_chart(curves, f"curves{n}") for n, curves in enumerate(result.curves)],
        "grids": [_grid(grid, pictures, f"grid{n}") for n, grid in enumerate(result.pictures)],
    }
    return fill("reproduction.html.j2", context)


def write_reproduction(result: Any, path: FileName, pictures: bool | None = None) -> Path:
    """Write the page of a reproduced table to ``path``."""
    return write_page(path, render_reproduction(result, pictures))


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the ``window`` - 1 before it, as far as there are so many.

    >>> smooth([4.0, 2.0, 3.0, 1.0], 2)
    [4.0, 3.0, 2.5, 2.0]
    """
    if not all(math.isfinite(value) for value in values):
        return list(values)  # one of them would spoil all that follow
    sums = [0.0, *accumulate(values)]
    return [(sums[n] - sums[max(0, n - window)]) / min(n, window) for n in range(1, len(sums))]


def _chart(curves: Any, identity: str) -> dict[str, Any]:
    window = max([1, *(round(SMOOTHED * len(values)) for values in curves.lines.values())])
    drawn = [(str(name), smooth(values, window)) for name, values in curves.lines.items()]
    axes = f"{curves.y_label} by {curves.x_label}"
    return {
        "title": curves.title,
        "axes": axes if window == 1 else f"{axes}, each point the mean of {window}",
        "drawing": curve_plot(drawn, title=curves.title, identity=identity),
        "legend": [(name, colour(n), values[-1] if values else None) for n, (name, values) in enumerate(drawn)],
    }


def _grid(grid: Any, pictures: bool | None, identity: str) -> dict[str, Any]:
    if grid.private if pictures is None else not pictures:
        why = "reproduced-hidden" if pictures is False else "reproduced-private"
        return {"title": grid.title, "message": words.TEXTS["pictures"][why]}
    originals, guesses = (
        [draw(value, alt=f"{what} sample {n}", identity=f"{identity}-{what[0]}{n}") for n, value in enumerate(values)]
        for what, values in (("original of", grid.originals), ("attack's guess of", grid.recovered))
    )
    cells = list(zip(originals, guesses, grid.captions, strict=True))
    return {"title": grid.title, "message": "", "cells": cells, "note": channel_note(grid.originals.shape[1:])}
