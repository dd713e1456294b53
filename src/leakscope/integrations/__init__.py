"""Integrate other libraries: one file each, behind its extra, loaded on first use."""

from importlib import import_module
from types import ModuleType


def load_library(module: str, extra: str) -> ModuleType:
    """Import a module of an optional library, or raise one error that names the extra to install.

    >>> load_library("no_such_library.part", "flower")
    Traceback (most recent call last):
    ImportError: no_such_library.part cannot be imported (No module named 'no_such_library'). Install what is needed \
with: pip install 'leakscope[flower]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}). Install what is needed with: pip install 'leakscope[{extra}]'"
        ) from error
