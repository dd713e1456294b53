"""Words and numbers of the page: formatting, short names, and the glossary. Nothing here knows the store."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from leakscope.attacks.base import FLAGS

DASH = "–"

MEASURES: tuple[tuple[str, str, str], ...] = (
    (
        "PSNR",
        "0 dB and up, higher = closer",
        "Peak signal-to-noise ratio, −10·log₁₀ of the mean squared error, for each example in unit space "
        "[0, 1]. About 20 dB is recognisable, above 30 dB nearly identical; 200 dB stands for an exact copy.",
    ),
    (
        "SSIM",
        "−1 to 1, higher = closer",
        "Structural similarity: luminance, contrast and structure in local windows. Images only.",
    ),
    ("MSE, RMSE", "0 to 1, lower = closer", "Mean squared error in unit space, and its root."),
    (
        "RMSE, max-norm",
        "0 to 1",
        "RMSE after the error is divided by its largest entry, for comparison with published tables: it tells the "
        "error's shape, not its size.",
    ),
    (
        "LPIPS",
        "0 and up, lower = closer",
        "Perceptual distance between deep features; needs a network for it.",
    ),
    (
        "Identified",
        "share from 0 to 100 %",
        "Whether the reconstruction is nearer to its own original than to every other candidate of the data; "
        "the chance of a blind guess is stated beside it.",
    ),
    ("Labels", "share from 0 to 100 %", "How many labels the attack named correctly, where it names labels."),
    (
        "Baseline",
        "dB",
        "PSNR of the same attack when the update is replaced by Gaussian noise of the same norm in each "
        "tensor: what its prior alone achieves with zero information about the example.",
    ),
    ("Lift", "dB, may be negative", "PSNR minus baseline: what the update itself gave away."),
    ("Interval", "in the measure's unit", "Bootstrap interval (95 %) of a mean over the examples."),
)

UNKNOWN_FLAG = "Raised by the attack or the audit as a doubt about its own result; the job's notes may say more."
FLAG_RULE = "A result within policy that carries a flag is counted as inconclusive, not as a pass."


def number(value: Any) -> float:
    """``value`` as a float; NaN for anything that is no number, so that a damaged store cannot stop the page.

    >>> number(3), number(None), number("x"), number(True)
    (3.0, nan, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def mean(values: Iterable[float]) -> float:
    """Mean of what is not NaN; NaN of nothing.

    >>> mean([1.0, math.nan, 3.0]), mean([])
    (2.0, nan)
    """
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def share(values: Iterable[Any]) -> float:
    """Share of ``True`` among the booleans; NaN where there are none.

    >>> share([True, False, None, True, True])
    0.75
    """
    return mean(float(v) for v in values if isinstance(v, bool))


def fixed(value: float, digits: int = 1) -> str:
    """A number for a table, with a true minus sign and never a negative zero.

    >>> fixed(12.345), fixed(-3.21), fixed(math.nan), fixed(math.inf), fixed(-0.01)
    ('12.3', '−3.2', '–', '∞', '0.0')
    """
    if math.isnan(value):
        return DASH
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")


def percent(value: float) -> str:
    """A share as a percentage; one decimal below ten percent.

    >>> percent(0.5), percent(0.005), percent(math.nan)
    ('50 %', '0.5 %', '–')
    """
    if math.isnan(value):
        return DASH
    return f"{value * 100:.1f} %" if 0 < value < 0.1 else f"{value * 100:.0f} %"


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> duration(3.21), duration(125), duration(7384), duration(math.nan)
    ('3.2 s', '2 min 5 s', '2 h 3 min', '–')
    """
    if not math.isfinite(seconds):
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def explain_flag(flag: str) -> str:
    """The glossary's sentence for a flag; a flag may carry particulars after a colon.

    >>> explain_flag("restarts disagree: 3 of 4")[:8]
    'Restarts'
    """
    name = flag.partition(":")[0].strip().lower()
    return FLAGS.get(name, UNKNOWN_FLAG)


def split_repr(text: str) -> tuple[str, list[str]]:
    """Name and top-level arguments of a repr.

    >>> split_repr("FedAvg(epochs=5, order=(1, 2))")
    ('FedAvg', ['epochs=5', 'order=(1, 2)'])
    >>> split_repr("none")
    ('none', [])
    """
    name, bracket, rest = text.partition("(")
    if not bracket or not rest.endswith(")"):
        return text, []
    arguments, depth, current = [], 0, ""
    for character in rest[:-1]:
        depth += character in "([{"
        depth -= character in ")]}"
        if character == "," and depth == 0:
            arguments.append(current.strip())
            current = ""
        else:
            current += character
    return name, [a for a in (*arguments, current.strip()) if a]


def short_names(reprs: Iterable[str]) -> dict[str, str]:
    """For each repr its name with only those arguments that tell it from others of the same name.

    >>> short_names(["Noise(sigma=1, kind='a')", "Noise(sigma=2, kind='a')", "Prune(fraction=0.9)", "none"])
    {"Noise(sigma=1, kind='a')": 'Noise(sigma=1)', "Noise(sigma=2, kind='a')": 'Noise(sigma=2)', \
'Prune(fraction=0.9)': 'Prune(fraction=0.9)', 'none': 'no defence'}
    """
    unique = list(dict.fromkeys(reprs))
    families: dict[str, list[set[str]]] = {}
    for text in unique:
        name, arguments = split_repr(text)
        families.setdefault(name, []).append(set(arguments))
    result = {}
    for text in unique:
        name, arguments = split_repr(text)
        family = families[name]
        if len(family) > 1:
            arguments = [a for a in arguments if not all(a in other for other in family)]
        elif any(is_word(a) for a in arguments):
            # A single one is told by its numbers; words such as scope='tensor' are mostly defaults.
            arguments = [a for a in arguments if not is_word(a)][:3]
        else:
            arguments = arguments[:3]
        result[text] = "no defence" if text == "none" else name + (f"({', '.join(arguments)})" if arguments else "")
    return result


def is_word(argument: str) -> bool:
    """Whether an argument of a repr is a word or a switch and not a number.

    >>> is_word("scope='tensor'"), is_word("fraction=0.9")
    (True, False)
    """
    value = argument.partition("=")[2]
    return value[:1] in ("'", '"') or value in ("True", "False", "None")


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "job"), counted(3, "job")
    ('1 job', '3 jobs')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
