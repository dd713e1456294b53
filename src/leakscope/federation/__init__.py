"""How an update comes about: the client's side of a protocol."""

from collections.abc import Mapping
from types import MappingProxyType

from leakscope.federation.base import Defense, Protocol
from leakscope.federation.fedavg import FedAvg
from leakscope.federation.fedsgd import FedSGD

PROTOCOLS: Mapping[str, type[Protocol]] = MappingProxyType({"fedsgd": FedSGD, "fedavg": FedAvg})

__all__ = ["PROTOCOLS", "Defense", "FedAvg", "FedSGD", "Protocol"]
