"""Invert a first linear layer in closed form.

Le Trieu Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", 2018; Geiping et al.
2020, proposition 3.1; Qian and Hansen 2021. For z = W x + b with output gradients D (examples x units): dW = D'X,
db = D'1. One example is x = dW'db / ||db||^2, for plain ratios dW_k / db_k blow up where db_k is tiny. Of several the
row space of dW is the span of the inputs (exactly, when D has full rank), so what is returned are mixtures. A weight
difference of several local steps is treated as one gradient, which is exact for one step only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.attacks.candidates import certify
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.certificate import Certificate
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.network.layers import structure


@dataclass(frozen=True, kw_only=True)
class LinearLayer(Attack):
    """Closed form for a first linear layer: one input exactly, the span of a batch."""

    requires = ()

    tolerance: float = setting(
        1e-5, "Relative singular value below which a direction counts as rounding noise.", gt=0, lt=1
    )

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        first = structure(observation.model, observation.input_shape).linear_first
        if isinstance(first, str):
            raise NotApplicable(first)
        layer = first.name
        update = observation.message.update
        if f"{layer}.weight" not in update:
            raise NotApplicable(f"the update has no gradient of {layer}.weight of its own: frozen, or tied to another")
        weight, bias = update[f"{layer}.weight"], update.get(f"{layer}.bias")
        flags: tuple[str, ...] = ()
        notes: tuple[str, ...] = ()
        certificates: tuple[Certificate, ...] = ()
        if observation.num_examples == 1:
            if bias is None:
                raise NotApplicable(f"layer {layer!r} has no bias, so the input's length is not in its gradient")
            inputs, residual = invert_single(weight, bias)
            scores = residual[None]
            found = inputs.reshape(-1, *observation.input_shape)
            certificates = certify(observation, found, None, float(residual), None, "first dense layer")
            if float(residual) > 0.1:
                notes = (f"one input explains the layer's gradient only to {float(residual):.0%}: it was altered",)
            if not bool((bias != 0).any()):
                notes = ("the layer's bias gradient is zero: nothing can be solved for",)
        else:
            basis, strengths = input_span(weight, self.tolerance)
            count = observation.num_examples or len(basis)
            inputs, scores = stretched(basis[:count], observation, upright=True), strengths[:count]
            flags = ("mixture",)
            notes = (
                f"the inputs' span has {len(basis)} dimensions; each returned input is one direction of it, "
                "scaled to the value range, not one example",
            )
        return Reconstruction(
            inputs=inputs.reshape(-1, *observation.input_shape),
            labels=None,
            scores=scores,
            flags=flags,
            notes=notes,
            info={"layer": layer, "steps": 1, "restarts": 1, "compiled": False},
            certificates=certificates,
        )


def invert_single(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The input x that best explains dW = db x', and the relative residual (zero for one untouched example).

    >>> x, residual = invert_single(torch.tensor([[2.0, 4.0], [-1.0, -2.0]]), torch.tensor([2.0, -1.0]))
    >>> x.tolist(), float(residual)
    ([[1.0, 2.0]], 0.0)
    """
    size = (bias * bias).sum()
    if float(size) == 0:
        return torch.zeros_like(weight[:1]), weight.new_tensor(torch.inf)
    x = (bias @ weight) / size
    residual = torch.linalg.vector_norm(weight - bias[:, None] * x) / torch.linalg.vector_norm(weight)
    return x[None], residual


def input_span(weight: Tensor, tolerance: float = 1e-5) -> tuple[Tensor, Tensor]:
    """An orthonormal basis (rows) of the span of a batch's inputs, and the singular values, largest first.

    >>> basis, _ = input_span(torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]]))
    >>> [round(abs(v), 4) for v in basis[0].tolist()]
    [0.7071, 0.7071, 0.0]
    """
    _, values, basis = torch.linalg.svd(weight, full_matrices=False)
    keep = values > tolerance * values[0] if float(values[0]) > 0 else torch.zeros_like(values, dtype=torch.bool)
    return basis[keep], values[keep]


def stretched(directions: Tensor, observation: Observation, *, upright: bool = False) -> Tensor:
    """Directions (n, d) shown as inputs: stretched to the value range, with ``upright`` signed by a positive mean."""
    sign = torch.where(directions.mean(1, keepdim=True) < 0, -1.0, 1.0) if upright else 1.0
    flat = directions * sign
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    unit = (flat - low) / (high - low).clamp_min(1e-30)
    return observation.inputs.from_unit(unit.reshape(-1, *observation.input_shape))
