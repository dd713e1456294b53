"""Small tables for notebooks, papers and data frames: everything is escaped, nothing is drawn."""

import importlib
import importlib.util
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch
from html import escape
from importlib import resources
from typing import Any

from leakscope.contracts.errors import UserError
from leakscope.contracts.printable import printable

#: Libraries of data frames, the first that is installed is taken.
FRAMES = ("pandas", "polars")
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "·": r"$\cdot$",
    "−": "$-$",
    "–": "--",
    "∞": r"$\infty$",
}


def shipped_text(package: str, file: str) -> str:
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


def shipped_table(package: str, file: str) -> dict[str, Any]:
    """Read a table of texts or numbers that the package ships as TOML.

    >>> list(shipped_table("leakscope.contracts", "flags.toml"))[0]
    'did not converge'
    """
    return tomllib.loads(shipped_text(package, file))


@singledispatch
def in_words(facts: object) -> str:
    """Write ``facts`` for people to read: the repr, unless a sentence is registered for the type."""
    return repr(facts)


def cell(value: Any) -> str:
    """A value as a table shows it.

    >>> cell(12.345), cell(None), cell(math.nan), cell(3), cell(["a", "b"])
    ('12.3', '–', '–', '3', 'a, b')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value)) or "–"
    return str(value)


def html_table(title: str, lines: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> str:
    """Lines with the same keys as an HTML table with a head, and sentences below it.

    >>> html_table("T", [{"name": "a<b", "dB": 1.25}])
    '<table><caption><b>T</b></caption><thead><tr><th>name</th><th>dB</th></tr></thead>\
<tbody><tr><td>a&lt;b</td><td>1.2</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escape(str(key))}</th>" for key in (lines[0] if lines else ()))
    rows = (f"<tr>{''.join(f'<td>{escape(cell(value))}</td>' for value in line.values())}</tr>" for line in lines)
    return _table(title, f"<thead><tr>{head}</tr></thead>", rows, notes)


def html_facts(title: str, facts: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Names and values, one below the other; what is None is left out.

    >>> html_facts("T", {"labels": None, "flags": ["x"]}, ["see y"])
    '<table><caption><b>T</b></caption><tbody><tr><th>flags</th><td>x</td></tr></tbody></table><div>see y</div>'
    """
    known = {name: value for name, value in facts.items() if value is not None}
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(cell(value))}</td></tr>" for name, value in known.items())
    return _table(title, "", rows, notes)


def _table(title: str, head: str, rows: Iterable[str], notes: Sequence[str]) -> str:
    below = "".join(f"<div>{escape(note)}</div>" for note in notes if note)
    table = f"<table><caption><b>{escape(title)}</b></caption>{head}<tbody>{''.join(rows)}</tbody></table>"
    return printable(table + below)


def latex_table(lines: Sequence[Mapping[str, Any]]) -> str:
    r"""Lines with the same keys as a LaTeX ``tabular``; numbers stand to the right. It needs no package.

    >>> print(latex_table([{"defence": "top_k", "PSNR": 12.34}, {"defence": "none", "PSNR": None}]))
    \begin{tabular}{lr}
    \hline
    defence & PSNR \\
    \hline
    top\_k & 12.3 \\
    none & -- \\
    \hline
    \end{tabular}
    """
    keys = list(lines[0]) if lines else []
    columns = "".join("r" if _numbers(line[key] for line in lines) else "l" for key in keys)
    rows = [" & ".join(map(latex_text, map(cell, line.values()))) + r" \\" for line in lines]
    head = [rf"\begin{{tabular}}{{{columns}}}", r"\hline", " & ".join(map(latex_text, keys)) + r" \\", r"\hline"]
    return "\n".join([*head, *rows, r"\hline", r"\end{tabular}"])


def latex_text(text: str) -> str:
    r"""Text with what LaTeX reads as commands escaped.

    >>> latex_text("50 % of a_b")
    '50 \\% of a\\_b'
    """
    return "".join(_LATEX.get(character, character) for character in printable(text))


def data_frame(lines: Sequence[Mapping[str, Any]], library: str | None = None) -> Any:
    """Lines with the same keys as a data frame of pandas or polars, whichever is installed, or of the one named."""
    if library is not None and library not in FRAMES:
        raise UserError(f"library: expected {' or '.join(FRAMES)}, got {library!r}")
    wanted = FRAMES if library is None else (library,)
    name = next((name for name in wanted if importlib.util.find_spec(name) is not None), None)
    if name is None:
        raise ImportError(f"to_frame: needs {' or '.join(wanted)}, which is not installed: pip install {wanted[0]}")
    module = importlib.import_module(name)
    # polars is to look at every line, for the first ones may all lack a value
    return module.DataFrame(list(lines), **({"infer_schema_length": None} if name == "polars" else {}))


def _numbers(values: Any) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
