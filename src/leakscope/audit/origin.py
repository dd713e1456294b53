"""Which file asked for an audit, and which lines of it: for findings that point into a repository."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from leakscope.audit.spec_file import item_lines
from leakscope.results.source import Place, Source, place_of

if TYPE_CHECKING:
    from leakscope.audit.spec import AuditSpec


def source_of(spec: AuditSpec, model: nn.Module) -> Source:
    """Where ``spec`` was written; without a file, where ``model`` is made."""
    made = _model_place(spec.model.name, model)
    if spec.file is None:
        return Source(whole=made)
    path = spec.file.path
    lines = item_lines(spec.file.text)
    tables = {}
    for name, parts in (("protocols", spec.protocols), ("defenses", spec.defenses)):
        starts = [] if name in spec.file.replaced else lines.get(name, [])
        pairs = zip(parts, starts, strict=False)
        tables[name] = {part.identity(): place_of(path, line) for part, line in pairs}
    first = next(iter(lines.get("model", [])), 1)
    return Source(whole=place_of(path, first), model=made, **tables)


def _model_place(name: str, model: nn.Module) -> Place:
    """Where the model's code is: its factory, its class, the script, or the class of torch that it is made of."""
    module, _, attribute = name.partition(":")
    factory = getattr(sys.modules.get(module), attribute, None) if attribute else None
    places = [place for target in (factory, *type(model).__mro__) if (place := _defined(target)) is not None]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    own = [place for place in places if not place.installed]
    if not own and script is not None and not (place := place_of(script)).installed:
        own = [place]
    return [*own, *places][0]


def _defined(target: Any) -> Place | None:
    """The first line of a function or class; None where its source is not at hand, as in a notebook."""
    try:
        file, line = inspect.getsourcefile(target), inspect.findsource(target)[1] + 1
    except (TypeError, OSError):
        return None
    return None if file is None else place_of(file, line)
