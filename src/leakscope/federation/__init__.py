"""How an update comes about: the client's side of a protocol, and training over several rounds."""

from collections.abc import Mapping
from types import MappingProxyType

from leakscope.federation.base import Defense, Protocol
from leakscope.federation.checkpoints import cached_training
from leakscope.federation.fedavg import FedAvg
from leakscope.federation.fedsgd import FedSGD
from leakscope.federation.training import FederatedTraining, TrainingRun
from leakscope.federation.vertical import Vertical

PROTOCOLS: Mapping[str, type[Protocol]] = MappingProxyType({"fedsgd": FedSGD, "fedavg": FedAvg, "vertical": Vertical})

__all__ = [
    "PROTOCOLS",
    "Defense",
    "FedAvg",
    "FedSGD",
    "FederatedTraining",
    "Protocol",
    "TrainingRun",
    "Vertical",
    "cached_training",
]
