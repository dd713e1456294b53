"""Words and numbers of the page: formatting and the glossary. Nothing here knows the store."""

import math
from typing import Any

from markupsafe import Markup

from leakscope.contracts.reconstruction import FLAGS
from leakscope.contracts.tables import shipped_table

#: Sentences by section and name.
TEXTS = shipped_table("leakscope.report", "sentences.toml")
DASH = "–"
#: Characters of a label that are shown; that of a segmentation is as large as its picture.
MAX_LABEL = 80

#: Below which PSNR a reconstruction is what. Always guessing the middle of the range has 6 dB or more.
_LIKENESS = (
    (6.0, "nothing better than a blank picture"),
    (13.0, "hardly more than a blank picture"),
    (20.0, "a rough likeness"),
    (30.0, "a recognisable picture"),
    (50.0, "a nearly identical picture"),
    (100.0, "a copy that no eye tells from the original"),
)

UNKNOWN_FLAG = "Raised by the attack or the audit as a doubt about its own result; the job's notes may say more."


def fixed(value: float, digits: int = 1) -> str:
    """A number for a table, with a true minus sign and never a negative zero.

    >>> fixed(12.345), fixed(-3.21), fixed(math.nan), fixed(math.inf), fixed(-0.01)
    ('12.3', '−3.2', '–', '∞', '0.0')
    """
    if math.isnan(value):
        return DASH
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:z.{digits}f}".replace("-", "−")


def short(value: float | None) -> str:
    """A number of any size in four digits.

    >>> short(12.3456), short(-0.5), short(5147994882048.0), short(None)
    ('12.35', '−0.5', '5.148e+12', '–')
    """
    return DASH if value is None or math.isnan(value) else f"{value:.4g}".replace("-", "−")


def percent(value: float) -> str:
    """A share as a percentage; one decimal below ten percent.

    >>> percent(0.5), percent(0.005), percent(math.nan)
    ('50 %', '0.5 %', '–')
    """
    if math.isnan(value):
        return DASH
    return f"{value * 100:.1f} %" if 0 < value < 0.1 else f"{value * 100:.0f} %"


def figure(value: float, digits: int | None) -> str:
    """A share (``digits`` None) or a number; one too small for its digits in powers of ten, lest it look like nothing.

    >>> figure(0.25, None), figure(0.01234, 4), figure(0.0000021, 4), figure(0.0, 4), figure(math.nan, 4)
    ('25 %', '0.0123', '2e−06', '0.0000', '–')
    """
    if digits is None:
        return percent(value)
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"{value:.0e}".replace("-", "−")
    return fixed(value, digits)


def span(interval: tuple[float, float], count: int, digits: int | None = 1) -> str:
    """An interval in words; one example has no spread.

    >>> span((12.0, 15.5), 4), span((0.0, 0.5), 4, None), span((1.0, 1.0), 1), span((math.nan, math.nan), 0)
    ('12.0 to 15.5', '0 % to 50 %', 'one example', '–')
    """
    low, high = interval
    if math.isnan(low):
        return DASH
    return "one example" if count == 1 else f"{figure(low, digits)} to {figure(high, digits)}"


def yes_or_share(value: float, count: int) -> str:
    """A share of one example is a yes or a no.

    >>> yes_or_share(1.0, 1), yes_or_share(0.0, 1), yes_or_share(0.5, 2), yes_or_share(math.nan, 1)
    ('yes', 'no', '50 %', '–')
    """
    if math.isnan(value) or count != 1 or value not in (0.0, 1.0):
        return percent(value)
    return "yes" if value else "no"


def label_name(label: Any, class_names: Any) -> str:
    """A label by the name of its class, a target of regression as it is.

    >>> label_name(1, ["cat", "dog"]), label_name(7, ["cat"]), label_name([0.5, 1.0], None), label_name(None, None)
    ('dog', '7', '[0.5, 1.0]', '–')
    """
    if isinstance(label, int) and isinstance(class_names, list) and 0 <= label < len(class_names):
        return str(class_names[label])
    text = DASH if label is None else str(label)
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> duration(3.21), duration(125), duration(7384), duration(math.nan)
    ('3.2 s', '2 min 5 s', '2 h 3 min', '–')
    """
    if not math.isfinite(seconds):
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def explain_flag(flag: str) -> str:
    """The glossary's sentence for a flag; a flag may carry particulars after a colon.

    >>> explain_flag("restarts disagree: 3 of 4")[:8]
    'Restarts'
    """
    return FLAGS.get(flag.partition(":")[0].strip().lower(), UNKNOWN_FLAG)


def head(text: str) -> str:
    """A repr without its arguments.

    >>> head("DLG(iterations=300)"), head("LinearLayer()"), head("none")
    ('DLG(…)', 'LinearLayer()', 'none')
    """
    name, _, arguments = text.partition("(")
    return text if arguments in ("", ")") else f"{name}(…)"


def unbroken(text: str) -> Markup:
    """Keep the names of options in one line: a browser breaks words at hyphens.

    >>> print(unbroken("<it> with --max-psnr 20"))
    &lt;it&gt; with <span class="option">--max-psnr</span> 20
    """
    option = Markup('<span class="option">{}</span>')
    return Markup(" ").join(option.format(word) if word.startswith("--") else word for word in text.split(" "))


def likeness(psnr: float) -> str:
    """How near a reconstruction of this PSNR is, in words that need no decibels.

    >>> likeness(-35.0), likeness(16.0), likeness(25.0), likeness(157.0)
    ('nothing better than a blank picture', 'a rough likeness', 'a recognisable picture', 'an essentially exact copy')
    """
    return next((text for limit, text in _LIKENESS if psnr < limit), "an essentially exact copy")
