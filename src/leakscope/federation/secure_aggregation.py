"""Secure aggregation: the server sees the mean of several clients' updates, and no client's own.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017. What the cryptography
leaves to be seen is sum_l B_l G_l / sum_l B_l over the clients l of the cohort, B_l their numbers of examples and G_l
their protected updates. For one gradient a client this is the gradient of one batch of all examples together, exactly.
Nobody learns whose example it was, but every attack on a batch applies. Defences act at each client by itself.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.errors import UserError
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import LocalTraining, Message, UpdateKind
from leakscope.contracts.protocol import ClientSide, Protocol, own_randomness
from leakscope.contracts.registry import folded
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction
from leakscope.federation.client import batchnorm_statistics, protected
from leakscope.federation.fedavg import FedAvg, FedSGD

_BY_NAME: Mapping[str, type[FedSGD] | type[FedAvg]] = {"fedsgd": FedSGD, "fedavg": FedAvg}
#: Settings of the cohort that are those of its clients' protocol, too.
_MODES = ("batchnorm", "dropout")


@dataclass(frozen=True, kw_only=True)
class SecureAggregation(Protocol):
    """``clients`` that share the examples as equally as can be, each with ``protocol``; their weighted mean is seen."""

    clients: int = setting(2, "Clients of the cohort.", ge=1)
    protocol: FedSGD | FedAvg = field(default_factory=FedSGD)

    def problems(self) -> list[str]:
        modes = [(name, getattr(self.protocol, name), getattr(self, name)) for name in _MODES]
        return [
            f"{name}: expected that of the protocol, {own!r}, got {got!r}" for name, own, got in modes if own != got
        ]

    @classmethod
    def build(cls, options: Mapping[str, Any]) -> Self:
        """Build it; ``protocol`` may be the words of a spec: fedsgd, fedavg, or {fedavg: {setting: value}}."""
        words = options.get("protocol")
        if isinstance(words, str) or (isinstance(words, Mapping) and len(words) == 1):
            name, settings = (words, {}) if isinstance(words, str) else next(iter(words.items()))
            if folded(str(name)) not in _BY_NAME:
                raise UserError(f"protocol: expected {' or '.join(_BY_NAME)}, got {name!r}")
            told = {name: options[name] for name in _MODES if name in options}
            options = {**options, "protocol": _BY_NAME[folded(str(name))].build({**told, **(settings or {})})}
        return super().build(options)

    @property
    def kind(self) -> UpdateKind:  # type: ignore[override]
        return self.protocol.kind

    @property
    def reduction(self) -> Reduction:
        return self.protocol.reduction

    def check(self, model: Any, x: Any) -> None:
        self.protocol.check(model, x)
        if isinstance(x, torch.Tensor) and x.dim() > 1 and len(x) < self.clients:
            raise UserError(f"clients: expected at most {len(x)}, one example each, got {self.clients}; lower it")

    def findings(self) -> tuple[str, ...]:
        return tuple(finding for finding in self.protocol.findings() if finding != "trajectory")

    def passes(self, examples: int) -> int:
        return self.protocol.passes(examples)

    def easiest(self) -> Self:
        """Take one client, whose update is then its own."""
        return replace(self, batchnorm="eval", dropout="eval", clients=1, protocol=self.protocol.easiest())

    def easiest_examples(self, examples: int) -> int:
        return self.protocol.easiest_examples(max(self._sizes(examples)))

    def channel(self, defense: Defense, examples: int) -> Channel | None:
        """Return the channel of the mean: noise adds up; clipping or zeros at several clients are no one thing."""
        sizes = self._sizes(examples)
        each = [self.protocol.channel(defense, size) for size in sizes]
        if len(each) == 1:
            return each[0]
        noise = 0.0
        for share, own in zip(self._shares(sizes), each, strict=True):
            if own is None or type(own) is not Channel or isinstance(own.noise, Mapping):
                return None
            batch_clip = own.clip is not None and not own.clips_examples
            if batch_clip or own.masked or own.rounding != "none" or own.noise_law != "gaussian":
                return None
            noise = math.hypot(noise, share * own.noise)
        first = each[0]
        assert first is not None
        # A client of one example has nothing to mix it with.
        return replace(first, noise=noise, mixed=max(own.mixed for own in each if own is not None))

    def _exchange(self, client: ClientSide, knowledge: Knowledge) -> tuple[tuple[Message, ...], LocalTraining]:
        statistics = None
        if knowledge.batchnorm_statistics:
            with own_randomness(client.generator):
                statistics = batchnorm_statistics(client.model, client.x)
        sizes = self._sizes(len(client.x))
        total: Gradient = {}
        recipe = LocalTraining()
        for places, share in zip(torch.arange(len(client.x)).split(sizes), self._shares(sizes), strict=True):
            one = replace(client.at(places), model=copy.deepcopy(client.model))
            with own_randomness(one.generator):
                update, recipe = self.protocol._train(one)
            for name, value in protected(one, update).items():
                # Summed in double precision: the mean owes nothing to the number of clients.
                total[name] = total.get(name, 0.0) + share * value.double()
        mean = {name: value.to(client.trained[name].dtype) for name, value in total.items()}
        message = Message(update=mean, kind=self.kind, batchnorm_statistics=statistics)
        return (message,), self._of_the_cohort(recipe, sizes)

    def _sizes(self, examples: int) -> list[int]:
        return [len(part) for part in torch.arange(examples).tensor_split(self.clients)]

    def _shares(self, sizes: list[int]) -> list[float]:
        if self.reduction == "sum":
            return [1.0] * len(sizes)
        return [size / sum(sizes) for size in sizes]

    def _of_the_cohort(self, recipe: LocalTraining, sizes: list[int]) -> LocalTraining:
        """Return the recipe of one client with all examples and as many steps: its batch is one of every client.

        Up to the first order in the learning rate it makes the same update. Its batch order is not told.
        """
        if len(sizes) == 1:
            return recipe
        batch = None if recipe.batch_size is None else sum(min(recipe.batch_size, size) for size in sizes)
        return replace(recipe, batch_size=batch, batch_order=None)
