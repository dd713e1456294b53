"""The contract of a defence: where it acts on what a client sends, and what somebody who knows it can compute with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.settings import Described
from leakscope.contracts.task import Reduction

Gradient = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Defense(Described):
    """A protection of the update. Override the hooks at which it acts; the others leave things as they are.

    Before the training: ``for_model``, then ``protect_model`` for the model that everybody shares, then
    ``protect_copy`` for the client's own copy of it. At each local step: ``protect_batch`` on the batch,
    ``protect_example_gradients`` and ``protect_gradient``. Last and once: ``protect_message``.
    """

    def for_model(self, model: nn.Module, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Defense:
        """The same defence with what depends on the model filled in; ValueError where it does not apply to it."""
        return self

    def protect_model(self, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        """The model that server and clients share in place of ``model``; one that is protected already as it is.

        What it draws at random comes from a setting, so that all get the same. The caller's model is left alone.
        """
        return model

    def protect_copy(self, model: nn.Module) -> nn.Module:
        """The client's own copy of the model as it trains it, with the same parameters under the same names.

        It may be changed in place, hooks included. What its forward pass draws comes from torch's global generator,
        which the protocol seeds from the client's.
        """
        return model

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

        Of one gradient on so many ``examples``. Without a channel no attack can be said to know the defence, and an
        audit does not call it safe.
        """
        return Channel() if type(self) is Defense else None

    def epsilon_for(self, passes: int | None) -> float | None:
        """Epsilon of differential privacy after each example entered so many gradients; None where none is promised.

        Without ``passes`` it is what the defence's own settings say.
        """
        return None

    @property
    def parts(self) -> tuple[Defense, ...]:
        """The defences that act one after another in it: itself, unless it is a chain."""
        return (self,)

    @property
    def hooks(self) -> tuple[str, ...]:
        """The hooks at which it acts, in the order in which they are called."""
        return tuple(hook for hook in HOOKS if getattr(type(self), hook) is not getattr(Defense, hook))

    @property
    def needs_example_gradients(self) -> bool:
        return "protect_example_gradients" in self.hooks

    @property
    def acts_on_steps(self) -> bool:
        """Whether it acts at each local step rather than on the message alone."""
        return any(hook != "protect_message" for hook in self.hooks)


#: The hooks in the order in which a protocol calls them.
HOOKS = (
    *("protect_model", "protect_copy", "protect_batch"),
    *("protect_example_gradients", "protect_gradient", "protect_message"),
)
