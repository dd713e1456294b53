"""leakscope measures what a federated-learning update reveals about the data behind it.

    import leakscope as ls
    observation = ls.FedSGD().observe(net, x, y)
    ls.attacks.InvertingGradients()(observation, seed=0)

Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.5.0"

_NAMES = {
    "Attack": "leakscope.contracts.attack",
    "Box": "leakscope.contracts.inputs",
    "Channel": "leakscope.contracts.channel",
    "Defense": "leakscope.contracts.defense",
    "Diagnosis": "leakscope.contracts.reconstruction",
    "FedAvg": "leakscope.federation",
    "FedSGD": "leakscope.federation",
    "FederatedTraining": "leakscope.federation",
    "InputSpace": "leakscope.contracts.inputs",
    "Knowledge": "leakscope.contracts.knowledge",
    "Message": "leakscope.contracts.observation",
    "Observation": "leakscope.contracts.observation",
    "Protocol": "leakscope.contracts.protocol",
    "Reconstruction": "leakscope.contracts.reconstruction",
    "Task": "leakscope.contracts.task",
    "ValueRange": "leakscope.contracts.inputs",
    "Vertical": "leakscope.federation",
    "VerticalModel": "leakscope.models.split",
    "build_model": "leakscope.models",
    "diagnose": "leakscope.limits",
    "load_data": "leakscope.data",
    "setting": "leakscope.contracts.settings",
}
_ROOMS = (
    *("contracts", "data", "models", "network", "federation", "defenses", "labels", "equations", "matching"),
    *("attacks", "limits", "metrics", "results", "report", "audit", "papers"),
)

__all__ = ["__version__", *_NAMES, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"leakscope.{name}")
    raise AttributeError(f"module 'leakscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
