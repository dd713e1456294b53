"""From values to one self-contained HTML page.

Every string is untrusted and escaped; the page's own policy forbids any fetch and any script but the one it names.
"""

import base64
import hashlib
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from leakscope.contracts.disk import atomic_write, private_folder
from leakscope.contracts.printable import printable
from leakscope.contracts.tables import shipped_text
from leakscope.report import words
from leakscope.report.sentences import certificate_details, certificate_words, flag_remedy, strongest_words
from leakscope.results.records import counted, highest, mean, number, texts

FileName = str | os.PathLike[str]


def environment(**options: Any) -> Environment:
    """The templates of this room; a name that is not there is an error."""
    loader = FunctionLoader(partial(shipped_text, "leakscope.report"))
    found = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options)
    found.tests |= {"finite": math.isfinite, "nan": math.isnan, "infinite": math.isinf}
    return found


#: What stands between two cells of a text table, and what stands in values for it and for the end of a line.
BAR = "¦"
_INSIDE = {"¦": "\0", "\n": "\1"}


def text_template(name: str, filters: Mapping[str, Any]) -> Template:
    """A template of text in lines and cells, which values cannot break: see :func:`cells_of`."""
    kept = str.maketrans(_INSIDE)
    page = environment(autoescape=False, finalize=lambda value: str(value).translate(kept))
    page.filters |= {"counted": counted, **filters}
    return page.get_template(name)


def cells_of(line: str) -> tuple[str, ...]:
    """Split a line of a text template into its cells, as they were given to it."""
    back = str.maketrans({inside: outside for outside, inside in _INSIDE.items()})
    return tuple(cell.strip().translate(back) for cell in line.split(BAR))


def fill(template: str, context: dict[str, Any]) -> str:
    """``template`` with ``context``, the style sheet, the script and a policy that admits just them."""
    html = environment(autoescape=True)
    formats = ("duration", "explain_flag", "figure", "fixed", "head", "label_name", "percent", "short", "span")
    html.filters |= {name: getattr(words, name) for name in (*formats, "unbroken")}
    html.filters |= {one.__name__: one for one in (counted, flag_remedy, highest, mean, number, texts)}
    html.filters |= {"proof": certificate_details, "proved": certificate_words, "all_proved": strongest_words}
    script = shipped_text("leakscope.report", "table.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    style = Markup(shipped_text("leakscope.report", "style.css"))
    page = html.get_template(template).render(**context, style=style, script=Markup(script), script_hash=digest)
    # A lone surrogate from a JSON escape cannot be written as UTF-8.
    return printable(page).encode("utf-8", "replace").decode("utf-8")


def write_page(path: FileName, page: str) -> Path:
    """Write ``page`` whole or not at all, in a folder that is made where it is missing."""
    target = Path(path)
    private_folder(target.parent)
    atomic_write(target, page.encode("utf-8"))
    return target
