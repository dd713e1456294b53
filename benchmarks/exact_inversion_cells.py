"""The cells of ``exact_inversion.py``, what is seen of a batch, and how what was found is compared with the truth."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exact_inversion_models import TRAINED
from leakscope.attacks.head_first import convolutions
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import Protocol
from leakscope.data import Examples
from leakscope.equations.peeling import Peel
from leakscope.federation import FedAvg, FedSGD, SecureAggregation
from leakscope.metrics.assignment import assign
from leakscope.network.gates import GatedNetwork, read_gated
from leakscope.network.layers import find_head
from strength_cells import disturbed
from strength_models import UNTRAINED
from strength_table import NONE

GRADIENT, EVAL = "gradient", "eval"
#: Learning rate of a client whose cell names none.
RATE = 0.05
#: The relative error of a feature map up to which an image counts as found there.
EXACT_FEATURES = 1e-4


@dataclass(frozen=True)
class Cell:
    """A place in the matrix. ``batch``: images of a client; ``mode``: of BatchNorm; ``disturbance``: of the update.

    ``protocol``: ``gradient``, ``secure:CLIENTS`` or ``fedavg:STEPS[:RATE]``, each step on all images of the client.
    """

    model: str
    state: str
    mode: str
    batch: int
    protocol: str = GRADIENT
    disturbance: str = NONE

    @classmethod
    def parse(cls, words: str) -> Cell:
        """Read a cell from its words; the last two may be left out.

        >>> Cell.parse("vit-96 1 eval 1").describe()
        'vit-96 1 eval 1 gradient none'
        """
        parts = words.split()
        if not 4 <= len(parts) <= 6 or not parts[3].isdecimal() or parts[2] not in (EVAL, "train"):
            raise ValueError(f"expected MODEL STATE eval|train BATCH [PROTOCOL [DISTURBANCE]], got {words!r}")
        cell = cls(parts[0], parts[1], parts[2], int(parts[3]), *parts[4:])
        cell.sends()
        return cell

    def describe(self) -> str:
        return " ".join(map(str, vars(self).values()))

    @property
    def images(self) -> int:
        """Return the images of all clients.

        >>> Cell("resnet18", "1", "eval", 2, "secure:4").images
        8
        """
        kind, _, clients = self.protocol.partition(":")
        return self.batch * (int(clients) if kind == "secure" else 1)

    def sends(self) -> Protocol:
        """Return how the update comes about."""
        kind, *given = self.protocol.split(":")
        mode: Any = self.mode
        if kind == "secure" and len(given) == 1:
            return SecureAggregation(clients=int(given[0]), protocol=FedSGD(batchnorm=mode), batchnorm=mode)
        if kind == "fedavg" and given:
            rate = float(given[1]) if len(given) > 1 else RATE
            return FedAvg(epochs=int(given[0]), batch_size=self.batch, lr=rate, batchnorm=mode)
        if self.protocol != GRADIENT:
            raise ValueError(f"expected gradient, secure:CLIENTS or fedavg:STEPS[:RATE], got {self.protocol!r}")
        return FedSGD(batchnorm=mode)


def matrix() -> Iterator[Cell]:
    """Yield the cells of docs/exact-inversion.md."""
    modes = (EVAL, "train")
    plain = [("resnet18", state, 1) for state in (UNTRAINED, "1", "6")]
    plain += [("resnet18", "1", batch) for batch in (4, 8, 16, 32)]
    narrow = ("resnet18-half", "resnet18-narrow", "resnet50-half", "wrn-16-4", "vgg11")
    plain += [(model, "1", batch) for model in narrow for batch in (1, 4)]
    plain += [("resnet20", TRAINED, 1), ("resnet18-imagenet", UNTRAINED, 1)]
    yield from (Cell(model, state, mode, batch) for model, state, batch in plain for mode in modes)
    yield from (Cell(model, state, EVAL, 1) for model in ("vit-96", "vit-192") for state in (UNTRAINED, "1"))
    yield Cell("vit-s16", UNTRAINED, EVAL, 1)
    shared = ((2, "secure:4"), (1, "fedavg:3"), (1, "fedavg:2:.01"), (2, "fedavg:3"), (4, "fedavg:1"))
    yield from (Cell("resnet18", "1", mode, batch, protocol) for batch, protocol in shared for mode in modes)
    noise = (*(f"noise:1e-{digits}" for digits in (6, 5, 4, 3)), "float16", "clip")
    for model, some in (("resnet18", modes), ("vit-96", (EVAL,))):
        yield from (Cell(model, "1", mode, 1, disturbance=word) for word in noise for mode in some)


def observe(cell: Cell, net: nn.Module, data: Examples, places: Sequence[int], number: int) -> Observation:
    """Return what an honest server sees of the update that the examples at ``places`` give."""
    _, defense = disturbed(cell.disturbance, cell.images)
    part, draws = data.subset(places), torch.Generator().manual_seed(number)
    return cell.sends().observe(net, part.x, part.y, defense, generator=draws, inputs=part.inputs)


@dataclass
class Watched:
    """What the attack's peel found, before later local steps are forgotten; ``ended`` says why it went no further."""

    seconds: float = 0.0
    started: str | None = None
    ended: str | None = None
    network: GatedNetwork | None = None
    steps: int = 1
    values: dict[int, Tensor] = field(default_factory=dict)


@contextmanager
def watched() -> Iterator[Watched]:
    """Look on while an attack peels convolutions: it is not run a second time for its features."""
    seen, peel = Watched(), convolutions.peel

    def look(*given: Any, **options: Any) -> Peel:
        began = time.process_time()
        try:
            found = peel(*given, **options)
        except NotApplicable as error:
            seen.ended = seen.ended or str(error)
            raise
        finally:
            seen.seconds += time.process_time() - began
        seen.started, seen.ended = found.started, found.ended
        seen.network, seen.steps = found.network.each[0], len(found.network)
        seen.values = {step: value for step, value in found.values.items() if step}
        return found

    with mock.patch.object(convolutions, "peel", look):
        yield seen


def features(cell: Cell, seen: Watched, net: nn.Module, data: Examples, places: Sequence[int]) -> dict[str, Any]:
    """Return how far the values of the peel are from the true ones, for each image; nothing where it found none.

    ``errors`` are those of the lowest layer at the first local step, ``later`` the largest of each other step,
    ``worst`` the largest of all layers and steps. ``exact`` is the lowest layer where every image is found.
    """
    if seen.network is None or not seen.values:
        return {"lowest": None, "exact": None, "errors": [], "later": [], "worst": None, "good": None}
    truths = true_values(cell, seen, net, data, places)
    lowest, found = min(seen.values), list[dict[int, list[float]]]()
    for number, truth in enumerate(truths):
        own = {step: value.tensor_split(seen.steps)[number] for step, value in seen.values.items()}
        order = assign(truth[lowest], own[lowest], "cosine")
        found.append({step: errors(truth[step], value[order]) for step, value in own.items()})
    every = [max(of[step][image] for of in found for step in of) for image in range(len(places))]
    at_lowest = [max(of[lowest][image] for of in found) for image in range(len(places))]
    right = [step for step in seen.values if max(error for of in found for error in of[step]) <= EXACT_FEATURES]
    return {
        "lowest": reader(seen.network, lowest),
        "exact": reader(seen.network, min(right)) if right else None,
        "errors": found[0][lowest],
        "later": [max(of[lowest]) for of in found[1:]],
        "worst": max(every),
        "good": sum(error <= EXACT_FEATURES for error in at_lowest) / len(at_lowest),
    }


def errors(truth: Tensor, found: Tensor) -> list[float]:
    """Return the relative error of each image."""
    apart = (truth - found).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1).clamp_min(1e-300)
    return [float(f"{error:.3g}") for error in apart.tolist()]


def reader(network: GatedNetwork, step: int) -> str:
    """Return the layer that reads what a step gives."""
    readers = (layer.step for layer in network.layers if step in network.steps[layer.step].sources)
    return network.steps[next(readers, step)].name


def true_values(
    cell: Cell, seen: Watched, net: nn.Module, data: Examples, places: Sequence[int]
) -> list[dict[int, Tensor]]:
    """Return what the true images give at each step of the network, once for each local step that the peel found."""
    assert seen.network is not None
    part = data.subset(places)
    clients = part.x.double().split(cell.batch)  # BatchNorm in train mode joins the images of a client only
    networks = [seen.network]
    if seen.steps > 1:
        networks = local_networks(cell, net, part, seen.steps)
    found = []
    for network in networks:
        each = [network.onwards(0, x).values for x in clients]
        found.append({step: torch.cat([values[step] for values in each]) for step in seen.values})
    return found


def local_networks(cell: Cell, net: nn.Module, part: Examples, steps: int) -> list[GatedNetwork]:
    """Return the client's network before each of its local steps, all of which are on all of its images."""
    protocol = cell.sends()
    assert isinstance(protocol, FedAvg)
    head = find_head(net, part.shape, part.num_classes).module_name
    local, found = copy.deepcopy(net).train(cell.mode == "train"), []
    weights = list(local.parameters())
    for _ in range(steps):
        found.append(read_gated(local, part.shape, head, training=cell.mode == "train"))
        slopes = torch.autograd.grad(F.cross_entropy(local(part.x), part.y), weights)
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight -= protocol.lr * slope
    return found
