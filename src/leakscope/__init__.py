"""leakscope measures what a federated-learning update reveals about the data behind it.

    import leakscope as ls
    observation = ls.FedSGD().observe(net, x, y)
    ls.attacks.InvertingGradients()(observation, seed=0)

Names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.4.0"

_NAMES = {
    "FedAvg": "leakscope.federation",
    "FedSGD": "leakscope.federation",
    "FederatedTraining": "leakscope.federation",
    "Knowledge": "leakscope.observation",
    "Message": "leakscope.observation",
    "Observation": "leakscope.observation",
    "Reconstruction": "leakscope.attacks",
    "ValueRange": "leakscope.observation",
    "Vertical": "leakscope.federation",
    "VerticalModel": "leakscope.vertical",
    "build_model": "leakscope.models",
    "load_data": "leakscope.data",
}
_ROOMS = (
    "attacks",
    "audit",
    "data",
    "defenses",
    "federation",
    "labels",
    "limits",
    "matching",
    "metrics",
    "models",
    "papers",
    "report",
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
