"""The contract of a defence: where it acts on what a client sends, and what somebody who knows it can compute with.

At each hook the parts of a :class:`Chain` act in the order of the list, but the hooks have an order of their own:
[gradient-noise, gradient-clipping] clips first, for clipping acts on the gradient and noise on the message.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import Described, setting
from leakscope.contracts.task import Reduction

Gradient = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Defense(Described):
    """A protection of the update. Override the hooks at which it acts; the others leave things as they are.

    Before the training: ``for_model``, then ``protect_model`` for the model that everybody shares, then
    ``protect_copy`` for the client's own copy of it. At each local step: ``protect_batch`` on the batch,
    ``protect_example_gradients`` and ``protect_gradient``. Last and once: ``protect_message``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        own = [name for name in (*HOOKS, "for_model") if getattr(type(self), name) is not getattr(Defense, name)]
        if type(self) is not Defense and not own:
            raise UserError(_without_hooks(type(self)))

    def for_model(self, model: nn.Module, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Defense:
        """Fill in what depends on the model; ValueError where the defence does not apply to it."""
        return self

    def protect_model(self, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        """Return a model that server and clients share in place of ``model``, drawn from a setting: all get the same.

        The caller's model is left alone, and one that is protected already comes back as it is.
        """
        return model

    def protect_copy(self, model: nn.Module) -> nn.Module:
        """Change the client's own copy of the model, in place or not; parameters keep their names.

        What its forward pass draws comes from torch's global generator, which the protocol seeds from the client's.
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
        """Return what an adversary who knows this defence can compute with, of one gradient on so many ``examples``.

        None where nobody has worked that out: then only an attack that runs the defence's own code knows it.
        """
        return Channel() if type(self) is Defense else None

    def epsilon_for(self, passes: int | None) -> float | None:
        """Epsilon of differential privacy after so many ``passes`` (else those of the settings); None without one."""
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
    def acts_on_steps(self) -> bool:
        """Whether it acts at each local step rather than on the message alone."""
        return any(hook != "protect_message" for hook in self.hooks)


#: The hooks in the order in which a protocol calls them.
HOOKS = (
    *("protect_model", "protect_copy", "protect_batch"),
    *("protect_example_gradients", "protect_gradient", "protect_message"),
)
#: Hooks behind which everything is computed from what already has its noise.
_AFTERWARDS = {"protect_gradient", "protect_message"}


def _without_hooks(cls: type) -> str:
    """Say that a class overrides no hook, which ones there are, and which one was perhaps meant."""
    names = [name for name in vars(cls) if not name.startswith("_") and callable(vars(cls)[name])]
    near = {name: difflib.get_close_matches(name, HOOKS, n=1) for name in names if not hasattr(Defense, name)}
    hint = "".join(f" {name} is none of them; did you mean {hooks[0]}?" for name, hooks in near.items() if hooks)
    wanted = ", ".join(HOOKS)
    return f"{cls.__name__}: expected a defence that overrides at least one of {wanted}; it overrides none.{hint}"


@dataclass(frozen=True, kw_only=True)
class Chain(Defense):
    """Several defences, one after another at each hook; a list of defences in a spec or an argument means this."""

    parts: tuple[Defense, ...] = setting((), "The defences, in their order.")

    def problems(self) -> list[str]:
        if not all(isinstance(part, Defense) for part in self.parts):
            return [f"parts: expected defences, got {self.parts!r}"]
        # A chain in a chain is one chain.
        object.__setattr__(self, "parts", tuple(one for part in self.parts for one in part.parts))
        return []

    def for_model(self, model: nn.Module, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Chain:
        fitted = []
        for part in self.parts:
            fitted.append(part.for_model(model, input_shape, output_shape))
            model = fitted[-1].protect_model(model, input_shape)  # what the next one meets
        return Chain(parts=tuple(fitted))

    def protect_model(self, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        return reduce(lambda shared, part: part.protect_model(shared, input_shape), self.parts, model)

    def protect_copy(self, model: nn.Module) -> nn.Module:
        return reduce(lambda own, part: part.protect_copy(own), self.parts, model)

    def protect_batch(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return reduce(lambda batch, part: part.protect_batch(*batch, generator), self.parts, (x, y))

    def protect_example_gradients(self, gradients: Gradient, generator: torch.Generator) -> Gradient:
        return reduce(lambda each, part: part.protect_example_gradients(each, generator), self.parts, gradients)

    def protect_gradient(self, gradient: Gradient, generator: torch.Generator) -> Gradient:
        return reduce(lambda mean, part: part.protect_gradient(mean, generator), self.parts, gradient)

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return reduce(lambda sent, part: part.protect_message(sent, generator), self.parts, update)

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel | None:
        """That of the parts one after another; None where it is none of the orders that a Channel can express."""
        # The model and the client's copy of it are one stage: what happens to the network before it is used.
        stages = [(part, [max(1, HOOKS.index(hook)) for hook in part.hooks]) for part in self.parts if part.hooks]
        stages.sort(key=lambda stage: max(stage[1]))
        if any(min(after) < max(before) for (_, before), (_, after) in pairwise(stages)):
            return None  # one acts in between two actions of another
        return composed(part.channel(examples=examples, reduction=reduction) for part, _ in stages)

    def epsilon_for(self, passes: int | None) -> float | None:
        """That of the one part that promises it, where all others only work on what already has its noise."""
        promising = [part for part in self.parts if part.epsilon_for(passes) is not None]
        others = [part for part in self.parts if part not in promising]
        if len(promising) != 1 or any(not set(part.hooks) <= _AFTERWARDS for part in others):
            return None
        return promising[0].epsilon_for(passes)

    @property
    def hooks(self) -> tuple[str, ...]:
        return tuple(hook for hook in HOOKS if any(hook in part.hooks for part in self.parts))


def as_defense(value: Defense | Sequence[Defense] | None) -> Defense:
    """A defence from what an argument may be: none, one, or a list of them, which is a chain.

    >>> as_defense(None)
    Defense()
    >>> as_defense([Defense(), Defense()])
    Chain(parts=(Defense(), Defense()))
    """
    if value is None:
        return Defense()
    if isinstance(value, Defense):
        return value
    if isinstance(value, list | tuple) and all(isinstance(part, Defense) for part in value):
        return value[0] if len(value) == 1 else Chain(parts=tuple(value))
    raise UserError(f"defense: expected a Defense, a list of them or None, got {value!r}")


def composed(channels: Iterable[Channel | None]) -> Channel | None:
    """Channels one behind the other as one; None where one is None or a Channel cannot express their order.

    >>> composed([Channel(clip=4.0), Channel(noise=0.3), Channel(noise=0.4), Channel(rounding="float16")]).describe()
    'clipped to 4, noise 0.5, sent as float16'
    >>> composed([Channel(noise=0.3), Channel(clip=4.0)]) is None
    True
    >>> composed([Channel(noise=0.3), Channel(prune=0.5)]).describe()
    'noise 0.3, 50 % of the entries of each tensor pruned'
    """
    whole: Channel | None = Channel()
    for channel in channels:
        if channel is None or whole is None:
            return None
        whole = _behind(whole, channel)
    return whole


def _behind(first: Channel, second: Channel) -> Channel | None:
    plain = Channel()
    if plain in (first, second):
        return second if first == plain else first
    if type(first) is not Channel or type(second) is not Channel:
        return None
    if min(first.mixed, second.mixed) > 1 or min(first.units_dropped, second.units_dropped) > 0:
        return None  # mixtures of mixtures, units dropped twice
    dropping = first if first.units_dropped else second
    changes = [_clipped(first, second), _zeroed(first, second), _noisy(first, second), _rounded(first, second)]
    joined: dict[str, Any] = {
        "unreliable": tuple(dict.fromkeys((*first.unreliable, *second.unreliable))),
        "inexact": first.inexact or second.inexact,
        "units_dropped": dropping.units_dropped,
        "dropped_layers": dropping.dropped_layers,
        "mixed": max(first.mixed, second.mixed),
    }
    for change in changes:
        if change is None:
            return None
        joined |= change
    return dataclasses.replace(first, **joined)


def _clipped(first: Channel, second: Channel) -> dict[str, Any] | None:
    if second.clip is None:
        return {}
    if first.masked or first.noisy or first.rounding != "none" or (first.clip and first.clip_per != second.clip_per):
        return None
    return {"clip": min(first.clip or second.clip, second.clip), "clip_per": second.clip_per}


def _zeroed(first: Channel, second: Channel) -> dict[str, Any] | None:
    if not second.masked:
        return {}
    if first.rounding != "none" or (second.zeros_last and second.noisy):
        return None
    if not first.masked:
        own = {name: getattr(second, name) for name in ("prune", "prune_scope", "dropout", "dropout_scaled")}
        return {**own, "zeros_last": first.noisy}
    if first.noisy and not first.zeros_last:
        return None
    if second.prune and (first.dropout or second.dropout or first.prune_scope != second.prune_scope):
        return None
    if second.prune:
        return {"prune": max(first.prune, second.prune)}
    if first.dropout and first.dropout_scaled != second.dropout_scaled:
        return None
    return {"dropout": 1 - (1 - first.dropout) * (1 - second.dropout), "dropout_scaled": second.dropout_scaled}


def _noisy(first: Channel, second: Channel) -> dict[str, Any] | None:
    if not second.noisy:
        return {}
    if first.rounding != "none" or (first.masked and first.zeros_last):
        return None
    if not first.noisy:
        return {"noise": second.noise, "noise_law": second.noise_law}
    if "laplace" in (first.noise_law, second.noise_law):
        return None  # their sum has neither law
    for names in (first.noise, second.noise):
        if isinstance(names, Mapping):
            return {"noise": {name: math.hypot(first.level(name), second.level(name)) for name in names}}
    return {"noise": math.hypot(first.level(""), second.level(""))}


def _rounded(first: Channel, second: Channel) -> dict[str, Any] | None:
    if second.rounding == "none":
        return {}
    return None if first.rounding != "none" else {"rounding": second.rounding, "bits": second.bits}
