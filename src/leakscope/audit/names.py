"""Names as people type them: kebab-case, snake_case and class names all find the same entry."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def folded(name: str) -> str:
    """``name`` without case and separators.

    >>> folded("inverting-gradients") == folded("InvertingGradients") == folded("inverting_gradients")
    True
    """
    return re.sub(r"[^a-z0-9.:]", "", name.lower())


def kebab(class_name: str) -> str:
    """The name typed for a class.

    >>> kebab("InvertingGradients"), kebab("FedSGD"), kebab("DLG")
    ('inverting-gradients', 'fed-sgd', 'dlg')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", class_name).lower()


def find_name(name: str, known: Iterable[str], aliases: Iterable[tuple[str, str]] = ()) -> str:
    """The entry of ``known`` that ``name`` means; ``aliases`` are further (alias, entry) pairs.

    >>> find_name("Fed_SGD", ["fedsgd", "fedavg"])
    'fedsgd'
    >>> find_name("fedsdg", ["fedsgd", "fedavg"])
    Traceback (most recent call last):
    ...
    ValueError: expected one of fedsgd, fedavg, got 'fedsdg'; did you mean fedsgd?
    """
    entries = list(known)
    table = {folded(alias): entry for alias, entry in aliases} | {folded(entry): entry for entry in entries}
    if folded(name) in table:
        return table[folded(name)]
    close = difflib.get_close_matches(folded(name), table, n=1, cutoff=0.6)
    hint = f"; did you mean {table[close[0]]}?" if close else ""
    raise ValueError(f"expected one of {', '.join(entries)}, got {name!r}{hint}")
