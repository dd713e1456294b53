"""Elementwise activations that can be undone: value, inverse and derivative, in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from leakscope.contracts.errors import NotApplicable, UserError


@dataclass(frozen=True)
class Activation:
    """One of :data:`INVERTIBLE`; ``slope`` is that of the LeakyReLU below zero, or the beta of the softplus.

    >>> leaky = Activation("leaky-relu", slope=0.2)
    >>> leaky.inverse(torch.tensor([-1.0, 3.0])).tolist(), leaky.derivative(torch.tensor([3.0])).tolist()
    ([-5.0, 3.0], [1.0])
    """

    name: str
    slope: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in INVERTIBLE:
            raise UserError(f"activation: expected one of {', '.join(INVERTIBLE)}, got {self.name!r}")
        if not self.slope > 0:
            raise UserError(f"slope: expected a positive number, got {self.slope}")

    @property
    def homogeneous(self) -> bool:
        """Tell whether f(s z) = s f(z) for positive s: the norm of the input cannot be told from its direction."""
        return self.name in ("identity", "leaky-relu")

    def __call__(self, z: Tensor) -> Tensor:
        return _FORMULAS[self.name][0](z, self.slope)

    def inverse(self, y: Tensor, clip: float = 1 - 1e-15) -> Tensor:
        """Return the z with f(z) = y; outputs that no z has are moved into the range first.

        ``clip`` bounds the outputs of tanh; the range of the sigmoid is cut alike, and softplus kept above 1 - clip.
        """
        return _FORMULAS[self.name][1](y, self.slope, clip)

    def derivative(self, z: Tensor) -> Tensor:
        return _FORMULAS[self.name][2](z, self.slope)


def _softplus_inverse(y: Tensor, beta: float, clip: float) -> Tensor:
    scaled = (beta * y).clamp(min=1 - clip)
    # log(e^y - 1) without an overflow for large y
    return (scaled + torch.log(-torch.expm1(-scaled))) / beta


#: Value of z, inverse of y, derivative at z; s is the slope.
_FORMULAS: Mapping[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "identity": (lambda z, s: z, lambda y, s, clip: y, lambda z, s: torch.ones_like(z)),
    "leaky-relu": (
        nn.functional.leaky_relu,
        lambda y, s, clip: torch.where(y < 0, y / s, y),
        lambda z, s: torch.where(z > 0, torch.ones_like(z), s),  # two plain numbers would be float32
    ),
    "tanh": (
        lambda z, s: torch.tanh(z),
        lambda y, s, clip: torch.atanh(y.clamp(-clip, clip)),
        lambda z, s: 1 - torch.tanh(z).square(),
    ),
    "sigmoid": (
        lambda z, s: torch.sigmoid(z),
        lambda y, s, clip: torch.logit(y.clamp((1 - clip) / 2, (1 + clip) / 2)),
        lambda z, s: torch.sigmoid(z) * torch.sigmoid(-z),
    ),
    "softplus": (nn.functional.softplus, _softplus_inverse, lambda z, s: torch.sigmoid(s * z)),
}
INVERTIBLE = tuple(_FORMULAS)
#: How a model may call them: as a layer, and as a function or method of a tensor.
_NAMES: Mapping[Any, str] = (
    {nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.LeakyReLU: "leaky-relu", nn.Softplus: "softplus"}
    | {torch.tanh: "tanh", nn.functional.tanh: "tanh", "tanh": "tanh"}
    | {torch.sigmoid: "sigmoid", nn.functional.sigmoid: "sigmoid", "sigmoid": "sigmoid"}
    | {nn.functional.leaky_relu: "leaky-relu", nn.functional.softplus: "softplus"}
)
#: The argument that is the slope, and its default.
_SLOPES = {"leaky-relu": ("negative_slope", 0.01), "softplus": ("beta", 1.0)}


def activation_of(node: fx.Node, module: nn.Module | None) -> Activation | None:
    """Return the activation that a traced node computes, or None where it cannot be inverted."""
    name = _NAMES.get(node.target if module is None else type(module))
    if name is None or name not in _SLOPES:
        return None if name is None else Activation(name)
    argument, default = _SLOPES[name]
    if module is not None:
        slope = getattr(module, argument)
    else:
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get(argument, default)
    if name == "leaky-relu" and not float(slope) > 0:
        raise NotApplicable(f"a LeakyReLU of slope {slope} below zero cannot be inverted")
    return Activation(name, float(slope))
