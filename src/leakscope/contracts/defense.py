"""The contract of a defence: where it acts on what a client sends, and what somebody who knows it can compute with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.channel import Channel
from leakscope.contracts.settings import Described
from leakscope.contracts.task import Reduction

Gradient = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Defense(Described):
    """A protection of the update. Override the hooks at which it acts; the others leave things as they are.

    The protocol calls the hooks in this order: ``protect_batch`` once for each batch the client trains on,
    ``protect_example_gradients`` and ``protect_gradient`` at each local step, ``protect_message`` once, last.
    """

    def protect_batch(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return x, y

    def protect_example_gradients(self, gradients: Gradient, generator: torch.Generator) -> Gradient:
        """``gradients`` have a leading axis of examples; the same shape comes back."""
        return gradients

    def protect_gradient(self, gradient: Gradient, generator: torch.Generator) -> Gradient:
        return gradient

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return update

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel | None:
        """What an adversary who knows this defence can compute with; None where nobody has worked that out.

        Of one gradient on so many ``examples``. Without a channel only an attack that runs the defence's own
        code can be said to know it; where none did, an audit does not call it safe.
        """
        return Channel() if type(self) is Defense else None

    def epsilon_for(self, passes: int | None) -> float | None:
        """Epsilon of differential privacy after each example entered so many gradients; None where none is promised.

        Without ``passes`` it is what the defence's own settings say.
        """
        return None

    @property
    def needs_example_gradients(self) -> bool:
        return type(self).protect_example_gradients is not Defense.protect_example_gradients

    @property
    def acts_on_steps(self) -> bool:
        """Whether it acts at each local step rather than on the message alone."""
        hooks = ("protect_batch", "protect_example_gradients", "protect_gradient")
        return any(getattr(type(self), hook) is not getattr(Defense, hook) for hook in hooks)
