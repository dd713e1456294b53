"""How an update comes about: the client's side of a protocol, and training over several rounds."""

from leakscope.contracts.protocol import Protocol
from leakscope.contracts.registry import Entry, Registry
from leakscope.federation.checkpoints import cached_training
from leakscope.federation.fedavg import FedAvg, FedSGD
from leakscope.federation.secure_aggregation import SecureAggregation
from leakscope.federation.training import (
    CentralTraining,
    DefendedTraining,
    Diverged,
    FederatedTraining,
    Training,
    TrainingRun,
)
from leakscope.federation.vertical import Vertical

PROTOCOLS: Registry[Entry] = Registry(
    "protocol",
    (
        Entry("fedsgd", FedSGD, "one gradient of the client's whole batch"),
        Entry("fedavg", FedAvg, "local training over epochs and batches; the difference of weights is sent"),
        Entry("secure-aggregation", SecureAggregation, "only the mean of several clients' updates is seen"),
        Entry("vertical", Vertical, "workers own different features of the same samples; one gradient a round"),
    ),
    Protocol,
)
