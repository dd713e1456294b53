"""Models of the user's own: the callable that ``package.module:factory`` names builds one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from leakscope.contracts.errors import UserError


def call_factory(
    spec: str, factory: Callable[..., Any], facts: Mapping[str, Any], options: Mapping[str, Any]
) -> nn.Module:
    """Call ``factory`` with the ``options``, and with those ``facts`` that its signature names.

    Facts (input shape, number of classes, seed) are what every caller has at hand, so a factory that does not
    want them is not bothered; an option was asked for by the user, so one that is not accepted is an error.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]  # built-in callables may have no signature
    keywords = {
        name
        for name, p in parameters.items()
        if p.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    }
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = sorted(name for name in options if name not in keywords)
    if unknown and not takes_any:
        known = ", ".join(sorted(keywords)) or "none"
        raise UserError(f"model {spec!r} has no option {', '.join(unknown)}; it takes {known}")
    arguments = {name: value for name, value in facts.items() if name in keywords and value is not None}
    try:
        model = factory(**arguments, **options)
    except Exception as error:
        given = ", ".join(f"{k}={v!r}" for k, v in {**arguments, **options}.items())
        raise UserError(f"model {spec!r}: calling it with ({given}) raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {spec!r}: expected it to return a torch.nn.Module, got {type(model).__name__}")
    return model
