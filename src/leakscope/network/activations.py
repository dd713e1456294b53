"""Elementwise activations that can be undone: value, inverse and derivative, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

INVERTIBLE = ("identity", "leaky-relu", "tanh", "sigmoid", "softplus")


class Unsupported(ValueError):
    """The model is not a chain of stages that can be solved one by one; its reason names what stands in the way."""

    def __str__(self) -> str:
        return f"not supported because {super().__str__()}"


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
            raise ValueError(f"activation: expected one of {', '.join(INVERTIBLE)}, got {self.name!r}")
        if not self.slope > 0:
            raise ValueError(f"slope: expected a positive number, got {self.slope}")

    @property
    def homogeneous(self) -> bool:
        """Whether f(s z) = s f(z) for positive s, so that the norm of the input cannot be told from its direction."""
        return self.name in ("identity", "leaky-relu")

    def __call__(self, z: Tensor) -> Tensor:
        if self.name == "leaky-relu":
            return nn.functional.leaky_relu(z, self.slope)
        if self.name == "tanh":
            return torch.tanh(z)
        if self.name == "sigmoid":
            return torch.sigmoid(z)
        if self.name == "softplus":
            return nn.functional.softplus(z, self.slope)
        return z

    def inverse(self, y: Tensor, clip: float = 1 - 1e-15) -> Tensor:
        """The z with f(z) = y; outputs that no z has are moved into the range first.

        ``clip`` is the largest size that an output of tanh may have; the range of the sigmoid is cut alike, and the
        softplus is kept above 1 - clip.
        """
        if self.name == "leaky-relu":
            return torch.where(y < 0, y / self.slope, y)
        if self.name == "tanh":
            return torch.atanh(y.clamp(-clip, clip))
        if self.name == "sigmoid":
            return torch.logit(y.clamp((1 - clip) / 2, (1 + clip) / 2))
        if self.name == "softplus":
            scaled = (self.slope * y).clamp(min=1 - clip)
            # log(e^y - 1) without an overflow for large y
            return (scaled + torch.log(-torch.expm1(-scaled))) / self.slope
        return y

    def derivative(self, z: Tensor) -> Tensor:
        if self.name == "leaky-relu":
            return torch.where(z > 0, torch.ones_like(z), self.slope)  # two plain numbers would be float32
        if self.name == "tanh":
            return 1 - torch.tanh(z).square()
        if self.name == "sigmoid":
            return torch.sigmoid(z) * torch.sigmoid(-z)
        if self.name == "softplus":
            return torch.sigmoid(self.slope * z)
        return torch.ones_like(z)


_FUNCTIONS: Mapping[Any, str] = MappingProxyType(
    {
        torch.tanh: "tanh",
        torch.sigmoid: "sigmoid",
        nn.functional.tanh: "tanh",
        nn.functional.sigmoid: "sigmoid",
        nn.functional.leaky_relu: "leaky-relu",
        nn.functional.softplus: "softplus",
    }
)


def activation_of(node: fx.Node, module: nn.Module | None) -> Activation | None:
    """The activation that a traced node computes, or None where it cannot be inverted."""
    if module is not None:
        return _of_module(module)
    name = node.target if node.op == "call_method" else _FUNCTIONS.get(node.target)
    make: dict[str, Callable[[], Activation]] = {
        "tanh": lambda: Activation("tanh"),
        "sigmoid": lambda: Activation("sigmoid"),
        "leaky-relu": lambda: _leaky(_argument(node, "negative_slope", 0.01)),
        "softplus": lambda: Activation("softplus", float(_argument(node, "beta", 1.0))),
    }
    return make[name]() if name in make else None


def _of_module(module: nn.Module) -> Activation | None:
    if type(module) is nn.LeakyReLU:
        return _leaky(module.negative_slope)
    if type(module) is nn.Softplus:
        return Activation("softplus", float(module.beta))
    return {nn.Tanh: Activation("tanh"), nn.Sigmoid: Activation("sigmoid")}.get(type(module))


def _leaky(slope: Any) -> Activation:
    if not float(slope) > 0:
        raise Unsupported(f"a LeakyReLU of slope {slope} below zero cannot be inverted")
    return Activation("leaky-relu", float(slope))


def _argument(node: fx.Node, name: str, default: float) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get(name, default)
