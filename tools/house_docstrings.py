"""Docstrings as the API pages show them: marks of one house style turned into Markdown, settings read off their field.

mkdocstrings loads this extension (mkdocs.yml). It reads the source and runs none of it.
"""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:mod|meth|class|func|data|attr):`~?([^`]*)`")
_EQUALS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def markdown_of(text: str) -> str:
    """A docstring's text as Markdown has it: roles, double backticks, and doctests in fences.

    >>> markdown_of("See :class:`Box` and ``x``.\\n\\n>" + ">> 1 + 1\\n2")
    'See `Box` and `x`.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(f"```pycon\n{p}\n```" if p.startswith(">>>") else _plain(p) for p in paragraphs)


def _plain(paragraph: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", _ROLE.sub(r"`\1`", paragraph))


class HouseDocstrings(griffe.Extension):
    """Markdown for docstrings; ``setting(default, "help", ge=1)`` as an attribute with its default and its words."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown_of(obj.docstring.value)

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        call = getattr(node, "value", None)
        if not (isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "setting"):
            return
        arguments = [ast.unparse(argument) for argument in call.args]
        words = next((arg.value for arg in call.args[1:] if isinstance(arg, ast.Constant)), None)
        limits = [(one.arg, ast.unparse(one.value)) for one in call.keywords]
        bounds = [f"{_EQUALS[name]} {value}" for name, value in limits if name in _EQUALS]
        attr.value = arguments[0] if arguments else None
        if words and attr.docstring is None:
            text = f"{words} Bounds: {', '.join(bounds)}." if bounds else str(words)
            attr.docstring = griffe.Docstring(markdown_of(text), parent=attr)
