"""From a spec to a verdict: plan the grid, run each job, keep the rows, judge them.

The module can be called, and is then its function ``audit``:

    import leakscope as ls
    result = ls.audit(model=net, data=(x, y), attacks=["inverting-gradients"], out="run")
    print(result)                # the verdict in one paragraph
    result.report("page.html")   # the same with tables, curves and pictures
    result.rows, result.verdict  # everything that was measured

``run_spec("spec.yaml")`` runs a file. Names are loaded on first use, so that a spec can be looked at without loading
the libraries that run it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakscope.audit.controls import CONTROLS
    from leakscope.audit.executors import EXECUTORS, Executor, ExecutorError
    from leakscope.audit.findings import FINDINGS
    from leakscope.audit.run import Audit, audit, run_spec
    from leakscope.audit.spec import DEFAULT_SPEC, AuditSpec, load_spec, parse_yaml
    from leakscope.audit.yaml_text import SpecError, read_yaml

_NAMES = {
    "controls": ("CONTROLS",),
    "executors": ("EXECUTORS", "Executor", "ExecutorError"),
    "findings": ("FINDINGS",),
    "run": ("Audit", "audit", "run_spec"),
    "spec": ("DEFAULT_SPEC", "AuditSpec", "load_spec", "parse_yaml"),
    "yaml_text": ("SpecError", "read_yaml"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

#: What help shows; the other names have a page of their own.
__all__ = ["audit"]


class _Room(ModuleType):
    """Make the module callable, as Python binds ``leakscope.audit`` to the package and not to the function."""

    def __call__(self, **settings: Any) -> Audit:
        """Audit ``model`` on ``data``; help(leakscope.audit.audit) tells of every argument."""
        from leakscope.audit.run import audit

        return audit(**settings)


sys.modules[__name__].__class__ = _Room


def __getattr__(name: str) -> Any:
    if name == "__signature__":  # that of the function, for editors and inspect
        return inspect.signature(importlib.import_module(f"{__name__}.run").audit)
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
