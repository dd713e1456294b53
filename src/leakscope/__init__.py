"""leakscope measures what a federated-learning update reveals about the data behind it.

    import leakscope as ls
    observation = ls.FedSGD().observe(net, x, y)
    ls.attacks.InvertingGradients()(observation, seed=0)

Names are loaded on first use, so that importing the package costs nothing.
"""

import os
import sys

# ``python -m`` looks for every module in the current folder first, where a socket.py of anybody's may lie. That ends
# here, before all other imports (__future__ among them), unless the package itself is found that way.
_started_as_module = sys.argv[:1] == ["-m"] and {"leakscope", "-mleakscope", "leakscope.cli", "-mleakscope.cli"} & set(
    sys.orig_argv
)
if _started_as_module and not sys.flags.safe_path and os.path.dirname(os.path.dirname(__file__)) != sys.path[0]:
    del sys.path[0]

__version__ = "0.14.0"

_NAMES = {
    "Attack": "leakscope.contracts.attack",
    "Box": "leakscope.contracts.inputs",
    "Certificate": "leakscope.contracts.certificate",
    "Channel": "leakscope.contracts.channel",
    "Defense": "leakscope.contracts.defense",
    "Diagnosis": "leakscope.contracts.reconstruction",
    "Embedding": "leakscope.equations.embedding",
    "FedAvg": "leakscope.federation",
    "FedSGD": "leakscope.federation",
    "FederatedTraining": "leakscope.federation",
    "InputSpace": "leakscope.contracts.inputs",
    "Knowledge": "leakscope.contracts.knowledge",
    "Message": "leakscope.contracts.observation",
    "ModelInspection": "leakscope.network.inspection",
    "Observation": "leakscope.contracts.observation",
    "Protocol": "leakscope.contracts.protocol",
    "Reconstruction": "leakscope.contracts.reconstruction",
    "SecureAggregation": "leakscope.federation",
    "RecoveredFeatures": "leakscope.equations.feature_separation",
    "Task": "leakscope.contracts.task",
    "ValueRange": "leakscope.contracts.inputs",
    "Vertical": "leakscope.federation",
    "VerticalModel": "leakscope.models.split",
    "build_model": "leakscope.models",
    "diagnose": "leakscope.limits",
    "inspect_model": "leakscope.network.inspection",
    "load_data": "leakscope.data",
    "recover_embedding": "leakscope.equations.embedding",
    "recover_features": "leakscope.equations.features",
    "setting": "leakscope.contracts.settings",
}
_ROOMS = (
    *("contracts", "data", "models", "network", "federation", "defenses", "labels", "equations", "matching"),
    *("attacks", "limits", "metrics", "results", "report", "capture", "audit", "papers"),
)

__all__ = ["__version__", *_NAMES, *_ROOMS]


def __getattr__(name: str) -> object:
    import importlib

    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"leakscope.{name}")
    raise AttributeError(f"module 'leakscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
