"""Table 2 of "Data Reconstruction Attacks and Defenses: A Systematic Evaluation" (Liu et al.): feature errors.

The features in front of a dense layer of random units, from its gradient, for batches of 1 to 8 under defences. The
error is what the recovered span leaves of each feature, the mean over the batch. Features are drawn from a sphere;
smaller scales keep the ratio of 512 features to 14 336 random units, on which the error of moments depends.

Each update is read twice. "Stein as published": the eigenvectors of the symmetric second moment of gradient and
weights. "kept": what ``leakscope.recover_features`` keeps by what the adversary can see. Where the layer's gradient is
visible and untouched, singular vectors give the span exactly, so the published 0.17 is an artefact of the estimator;
pruning and noise are undone by the gradient of the head, which the paper's estimator does not read.

The paper states neither the constants behind the random units nor the client's learning rate. Constants are k / v with
v the number of random units, whose signal noise of 0.001 would bury; under noise they are signs
(:mod:`leakscope.attacks.gaussian_neurons`) of size 0.17, at which one example behind noise 0.1 has about the published
error. Local steps have a rate of 1e-4. Pruning is of each tensor, clipping of the whole update.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from leakscope.attacks.gaussian_neurons import with_gaussian_neurons
from leakscope.contracts.defense import Defense
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import Protocol
from leakscope.defenses import GradientClipping, GradientNoise, GradientPruning
from leakscope.equations.features import features_of, read_dense_gradient
from leakscope.equations.stein_moments import activation_class, head_loadings, stein_span
from leakscope.federation import FedAvg, FedSGD
from leakscope.metrics import feature_error
from leakscope.models import build_model
from leakscope.papers.base import Group, Line, Progress, Row, measured_rows, paper_tables, wanted

MEASURE = "feature error"
CLASSES, LEARNING_RATE, SIGN_SIZE = 10, 1e-4, 0.17
BATCHES = (1, 2, 4, 8)
#: Defence, its strength, and for batches of 1, 2, 4 and 8 the published error and its spread.
PUBLISHED = (
    ("none", 0.0, ((0.171, None), (0.171, None), (0.174, None), (0.175, None))),
    ("pruning", 0.3, ((0.173, 0.002), (0.171, 0.003), (0.186, 0.114), (0.188, 0.044))),
    ("pruning", 0.5, ((0.173, 0.002), (0.218, 0.011), (0.277, 0.106), (0.266, 0.071))),
    ("pruning", 0.7, ((0.248, 0.006), (0.443, 0.120), (0.483, 0.075), (0.425, 0.043))),
    ("clipping", 2.0, ((0.173, 0.002), (0.169, 0.003), (0.174, 0.116), (0.179, 0.041))),
    ("clipping", 4.0, ((0.173, 0.002), (0.169, 0.003), (0.175, 0.127), (0.179, 0.041))),
    ("clipping", 8.0, ((0.173, 0.002), (0.170, 0.003), (0.177, 0.113), (0.179, 0.041))),
    ("noise", 0.001, ((0.172, 0.003), (0.166, 0.003), (0.190, 0.021), (0.198, 0.114))),
    ("noise", 0.01, ((0.174, 0.002), (0.252, 0.082), (0.252, 0.106), (0.499, 0.104))),
    ("noise", 0.1, ((0.259, 0.012), (0.850, 0.108), (0.714, 0.102), (0.953, 0.108))),
    ("local steps", 3.0, ((0.181, 0.067), (0.186, 0.127), (0.192, 0.079), (0.202, 0.073))),
    ("local steps", 5.0, ((0.213, 0.071), (0.210, 0.087), (0.218, 0.081), (0.223, 0.069))),
)


@dataclass(frozen=True)
class Scale:
    trials: int
    features: int
    units: int
    batches: tuple[int, ...] = BATCHES


SCALES: Mapping[str, Scale] = {
    "smoke": Scale(2, 32, 896, (4,)),
    "small": Scale(3, 128, 3584),
    "paper": Scale(10, 512, 14_336),
}


def run(scale: str, seed: int, progress: Progress | None = None) -> list[Row]:
    size = replace(SCALES[scale], trials=wanted(SCALES[scale].trials))

    def groups() -> Iterator[Group]:
        for defence, strength, cells in PUBLISHED:
            for batch, (published, spread) in zip(BATCHES, cells, strict=True):
                if batch not in size.batches:
                    continue
                name = defence if defence == "none" else f"{defence} {strength:g}"
                names = {"stein": "Stein as published", "kept": "kept"}
                lines = {
                    key: Line(f"B={batch}, {name}, {words}", MEASURE, published, _note(key, defence), spread)
                    for key, words in names.items()
                }
                numbers = (seed * 1_000_003 + number for number in range(size.trials))
                yield Group(lines, (trial(size, batch, defence, strength, n) for n in numbers), main="kept")

    return measured_rows(groups(), size.trials * len(PUBLISHED) * len(size.batches), progress)


def trial(size: Scale, batch: int, defence: str, strength: float, seed: int) -> dict[str, float]:
    draws = torch.Generator().manual_seed(seed)
    x = nn.functional.normalize(torch.randn((batch, size.features), generator=draws, dtype=torch.float64), dim=1)
    y = torch.randperm(CLASSES, generator=draws)[:batch]
    layer = read_dense_gradient(observed(size, x, y, defence, strength, seed))
    assert layer.activation is not None
    assert layer.head is not None
    loadings, moments = head_loadings(layer.head)[:1], activation_class(layer.activation)
    published = stein_span(layer.gradient, layer.weight, loadings, batch, moments, draws, whiten=False)
    kept = features_of(layer, count=batch, generator=draws)
    return {"stein": feature_error(x, published), "kept": feature_error(x, kept.span)}


def observed(size: Scale, x: torch.Tensor, y: torch.Tensor, defence: str, strength: float, seed: int) -> Observation:
    net = build_model("mlp", input_shape=(size.features,), num_classes=CLASSES, hidden=size.units, seed=seed)
    net = net.double()  # differences of weights after steps of this rate are below float32's rounding
    units: dict[str, Any] = {"head": "signs", "size": SIGN_SIZE} if defence == "noise" else {"head": "published"}
    net = with_gaussian_neurons(net, (size.features,), **units, seed=seed)
    protocol: Protocol = FedSGD()
    if defence == "local steps":
        protocol = FedAvg(epochs=int(strength), batch_size=len(x), lr=LEARNING_RATE)
    protections: Mapping[str, Defense] = {
        "pruning": GradientPruning(fraction=min(strength, 0.99)),
        "clipping": GradientClipping(norm=max(strength, 1e-9)),
        "noise": GradientNoise(sigma=strength),
    }
    draws, knowledge = torch.Generator().manual_seed(seed + 1), Knowledge.malicious_server
    return protocol.observe(net, x, y, protections.get(defence), knowledge, draws, num_classes=CLASSES)


def _note(key: str, defence: str) -> str:
    if key == "stein":
        return "signs of size 0.17 behind the units" if defence == "noise" else "constants k / v behind the units"
    if defence in ("none", "clipping", "local steps"):
        return "singular vectors of the visible gradient are exact: the published error is its estimator's"
    return "refined on the head's gradient, which the published estimator does not read"


TABLES = paper_tables("systematic", {"table2": run}, SCALES, counted=("table2",))
