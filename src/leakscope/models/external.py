"""Models of the user's own: ``package.module:factory`` -> a callable that builds one."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

EXAMPLE = "expected package.module:factory, for example mypackage.nets:make_net"


@contextmanager
def working_directory_importable() -> Iterator[None]:
    """The current directory at the front of sys.path, only for as long as an import takes."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        # A module written a moment ago is invisible until the finder forgets its listing of the folder.
        importlib.invalidate_caches()
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def find_factory(spec: str) -> Callable[..., Any]:
    """The callable that ``spec`` names; one ValueError that says which part of it is wrong."""
    module_name, _, attribute = spec.partition(":")
    parts = [*module_name.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"model {spec!r}: {EXAMPLE}")
    try:
        with working_directory_importable():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ValueError(
                f"model {spec!r}: no module named {error.name!r}. Install its package, or run in the folder it is in."
            ) from error
        raise ValueError(f"model {spec!r}: importing {module_name} failed: {error}. Install what it needs.") from error
    except Exception as error:
        raise ValueError(f"model {spec!r}: importing {module_name} raised {type(error).__name__}: {error}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = sorted(n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n)))
            raise ValueError(
                f"model {spec!r}: {module_name} has no {attribute!r}. Callables in it: {', '.join(names) or 'none'}"
            )
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        raise ValueError(
            f"model {spec!r}: {attribute} is a model already, expected a function or class that builds one. "
            "Wrap it in a function that returns it."
        )
    if not callable(found):
        raise ValueError(f"model {spec!r}: {attribute} is a {type(found).__name__}, expected a function or class")
    return found


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
        raise ValueError(f"model {spec!r} has no option {', '.join(unknown)}; it takes {known}")
    arguments = {name: value for name, value in facts.items() if name in keywords and value is not None}
    try:
        model = factory(**arguments, **options)
    except Exception as error:
        given = ", ".join(f"{k}={v!r}" for k, v in {**arguments, **options}.items())
        raise ValueError(f"model {spec!r}: calling it with ({given}) raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {spec!r}: expected it to return a torch.nn.Module, got {type(model).__name__}")
    return model
