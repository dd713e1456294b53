"""From a spec to a verdict: plan the grid, run each job, keep the rows, judge them.

The room can be called: ``leakscope.audit(model=net, data=(x, y))`` is ``leakscope.audit.audit(...)``. Names
are loaded on first use, so that a spec can be looked at without loading the libraries that run it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakscope.audit.controls import CONTROLS
    from leakscope.audit.default import DEFAULT_SPEC
    from leakscope.audit.executors import EXECUTORS, Executor, ExecutorError
    from leakscope.audit.findings import FINDINGS
    from leakscope.audit.run import Audit, audit, run_spec
    from leakscope.audit.spec import AuditSpec, load_spec, parse_yaml
    from leakscope.audit.yaml_text import SpecError, read_yaml

_NAMES = {
    "controls": ("CONTROLS",),
    "default": ("DEFAULT_SPEC",),
    "executors": ("EXECUTORS", "Executor", "ExecutorError"),
    "findings": ("FINDINGS",),
    "run": ("Audit", "audit", "run_spec"),
    "spec": ("AuditSpec", "load_spec", "parse_yaml"),
    "yaml_text": ("SpecError", "read_yaml"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


class _Room(ModuleType):
    """Lets the name of the room serve as the name of its main function."""

    def __call__(self, **settings: Any) -> Audit:
        from leakscope.audit.run import audit

        return audit(**settings)


sys.modules[__name__].__class__ = _Room


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
