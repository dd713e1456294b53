"""How many directions of each layer's input a gradient leaves open, and the security metric that sums them up.

Chen and Campbell, "Analysing Training-Data Leakage from Gradients through Linear Systems and Gradient Matching", BMVC
2022, equation 12: with d convolutions, i = 0 .. d - 1 from the input, rank_i the rank of the layer's linear system and
n_i the number of its unknowns,

    c(M) = sum_i (d - i) / d * (rank_i - n_i)

Zero means that one example is recovered exactly, layer by layer; the more negative, the safer. Linear layers are always
determined and count nothing. Ranks are computed here; the formula min(n, |z| + |w| - filters^2) stands beside them.
They differ where a stride leaves the last rows and columns out: the second convolution of ``cnn4-c3`` at 32 x 32 misses
330 of its 4704 inputs, so that the metric is -220 where the formula says -170.67. Differences from the published code:
padded pixels are no unknowns, summands are not rounded, and the rank is taken relative to the largest singular value of
equations that were brought to one scale first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import ValueRange
from leakscope.equations.constraints import generic_rank, stage_system
from leakscope.equations.linear_system import MAX_RANKED, LinearSystem
from leakscope.network.chain import Chain, Stage, read_chain


@dataclass(frozen=True, kw_only=True)
class LayerSystem:
    """One stage of the model: the size of its linear system, the rank found and the rank that sizes predict.

    ``rank``, ``smallest`` (nonzero singular value) and ``condition`` are of equations brought to one scale, and None,
    with a reason, where the system was too large. ``predicted_rank`` is the published formula's; None for several
    operations in one stage or grouped convolutions. ``unseen`` unknowns are in no equation at all, such as last rows
    that a stride leaves over; the formula knows nothing of them.
    """

    name: str
    convolutional: bool
    rows: int
    unknowns: int
    unseen: int
    rank: int | None = None
    predicted_rank: int | None
    smallest: float | None = None
    condition: float | None = None
    method: str | None = None
    reason: str | None = None

    @property
    def deficiency(self) -> int | None:
        """Return rank minus unknowns, at most 0; from the predicted rank where none was computed."""
        rank = self.predicted_rank if self.rank is None else self.rank
        return None if rank is None else min(0, rank - self.unknowns)


def layer_systems(
    model: nn.Module,
    input_shape: tuple[int, ...],
    *,
    num_classes: int | None = None,
    value_range: ValueRange | None = None,
    seed: int = 0,
    max_unknowns: int = MAX_RANKED,
) -> tuple[LayerSystem, ...]:
    """Return the linear system of every stage, input first, at a random input in the box ([0, 1]), in float64.

    ``max_unknowns`` bounds the smaller of rows and unknowns of systems whose rank is computed; 0 leaves only those of
    linear layers. Raise ``NotApplicable`` where the model is no such chain.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))
    >>> [(layer.name, layer.rows, layer.unknowns, layer.rank) for layer in layer_systems(net, (1, 4, 4))]
    [('0', 26, 16, 16), ('3', 18, 18, 18)]
    """
    chain = read_chain(model, input_shape)
    outputs = math.prod(chain.stages[-1].output_shape)
    if num_classes is not None and num_classes != outputs:
        raise UserError(f"num_classes: expected the model's {outputs} outputs, got {num_classes}")
    systems = _systems(chain, input_shape, value_range or ValueRange(), seed)
    return tuple(_layer(*pair, max_unknowns) for pair in zip(chain.stages, systems, strict=True))


def security_metric(layers: Sequence[LayerSystem]) -> float:
    """Return c(M) of equation 12; NaN where a layer's rank is neither computed nor predicted.

    >>> one = dict(convolutional=True, rows=0, unseen=0, predicted_rank=None)
    >>> layers = [LayerSystem(name="a", unknowns=10, rank=8, **one), LayerSystem(name="b", unknowns=6, rank=2, **one)]
    >>> security_metric(layers)
    -4.0
    """
    deficiencies = [layer.deficiency for layer in layers if layer.convolutional]
    depth = len(deficiencies)
    return sum(
        math.nan if value is None else (depth - place) / depth * value for place, value in enumerate(deficiencies)
    )


def _systems(chain: Chain, input_shape: tuple[int, ...], box: ValueRange, seed: int) -> list[LinearSystem]:
    """Return the true systems at one random input: outputs and output gradients come from the model itself."""
    generator = torch.Generator().manual_seed(seed)
    x = box.from_unit(torch.rand((1, *input_shape), generator=generator, dtype=torch.float64))
    received: list[Tensor] = []
    for stage in chain.stages:
        received.append(stage.linear(x).requires_grad_())
        x = stage.activation(received[-1])
    # One output is a logit of two classes; the label does not matter for ranks.
    logits = x if x.shape[1] > 1 else torch.cat([x, torch.zeros_like(x)], dim=1)
    loss = nn.functional.cross_entropy(logits, torch.zeros(1, dtype=torch.long))
    parameters = chain.parameters()
    gradients = torch.autograd.grad(loss, [*received, *parameters.values()])
    update = dict(zip(parameters, gradients[len(received) :], strict=True))
    places = zip(chain.stages, received, gradients[: len(received)], strict=True)
    return [stage_system(stage, outputs, signal, update) for stage, outputs, signal in places]


def _layer(stage: Stage, system: LinearSystem, max_unknowns: int) -> LayerSystem:
    spectrum = system.spectrum_up_to(max_unknowns)
    facts: dict[str, Any] = {name: getattr(system, name) for name in ("rows", "unknowns", "unseen")}
    if spectrum is None:
        side = min(system.rows, system.unknowns)
        facts["reason"] = f"{side} rows or unknowns; the rank is computed up to {max_unknowns}"
    else:
        facts |= {name: getattr(spectrum, name) for name in ("rank", "smallest", "condition", "method")}
    predicted = generic_rank(stage)
    return LayerSystem(name=stage.name, convolutional=stage.convolutional, predicted_rank=predicted, **facts)
