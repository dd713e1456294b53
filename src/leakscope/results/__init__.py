"""Hold what an audit leaves behind: typed rows in a store, the policy, and the verdict on them.

Names are loaded on first use, so that a policy can be looked at without loading the libraries that measure.
"""

import importlib
from typing import Any

_NAMES = {
    "policy": ("Policy",),
    "reasons": ("Reason",),
    "records": ("AttemptRecord", "ExampleRecord", "FindingRow", "JobRecord", "Row"),
    "store": ("Store", "StoreError", "StoreMismatch"),
    "setting_verdict": ("SettingVerdict", "StrongestExample"),
    "verdict": ("MeasureSummary", "SettingSummary", "Verdict", "judge", "judge_store", "summarise"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
