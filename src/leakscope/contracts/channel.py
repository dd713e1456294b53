"""What an adversary who knows the defence can compute with: the way from a client's gradient to what is seen of it.

In their order: clipping, pruning and dropout of entries, noise, rounding; with ``zeros_last`` entries are set to zero
after the noise. The definitions are those of Liu et al., "Data Reconstruction Attacks and Defenses: A Systematic
Evaluation". Clipping is of the whole batch's gradient, g / max(1, |g| / C), or of each example's, which a guarantee of
differential privacy needs. Of what is random in the client's network an adversary has a stand-in only (``inexact``)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import Described, setting

PruneScope = Literal["tensor", "global"]
NoiseLaw = Literal["gaussian", "laplace"]
Rounding = Literal["none", "sign", "uniform", "stochastic", "float16", "bfloat16"]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Channel(Described):
    """From a client's gradient to what an adversary sees.

    A defence of one's own that these settings do not describe inherits this class and overrides :meth:`mix` (what the
    client trains on in place of its examples) or :meth:`stand_in` (what becomes of an update), both differentiable.

    >>> Channel(noise=0.5).level("fc.weight"), Channel(noise={"fc.weight": 0.2}).level("fc.weight")
    (0.5, 0.2)
    """

    noise: float | Mapping[str, float] = setting(
        0.0, "Standard deviation of the noise on what is left, one number or one a tensor.", ge=0
    )
    noise_law: NoiseLaw = setting("gaussian", "The law of the noise.")
    clip: float | None = setting(None, "The largest norm that a gradient may have.", gt=0)
    clip_per: Literal["batch", "example", "step"] = setting(
        "batch", "What is clipped: what is sent, each example's gradient, or that of each local step."
    )
    prune: float = setting(0.0, "Share of entries of smallest magnitude set to zero.", ge=0, lt=1)
    prune_scope: PruneScope = setting("tensor", "Whether of each tensor or of the whole update.")
    dropout: float = setting(0.0, "Probability with which an entry is set to zero.", ge=0, lt=1)
    dropout_scaled: bool = setting(False, "Whether the entries that dropout leaves are divided by their share.")
    zeros_last: bool = setting(False, "Whether entries are set to zero after the noise, so that the zeros show.")
    rounding: Rounding = setting("none", "How values are rounded in the end; stochastic is uniform, up or down.")
    bits: int = setting(8, "Bits of a value where rounding is uniform or stochastic.", ge=2, le=32)
    unreliable: tuple[str, ...] = setting((), "Tensors that say nothing of the examples, or something false.")
    inexact: bool = setting(False, "Whether the client's network was random, and the one observed is its mean.")
    units_dropped: float = setting(
        0.0, "Probability with which the client's network dropped an input of a hidden layer.", ge=0, lt=1
    )
    dropped_layers: tuple[str, ...] = setting((), "The layers whose inputs it dropped.")
    mixed: int = setting(1, "Examples of the batch in each of the mixtures that the client trained on.", ge=1)

    def problems(self) -> list[str]:
        levels = self.noise.values() if isinstance(self.noise, Mapping) else ()
        return [] if all(0 <= level < math.inf for level in levels) else ["noise: expected finite numbers >= 0"]

    def level(self, name: str) -> float:
        return float(self.noise[name] if isinstance(self.noise, Mapping) else self.noise)

    @property
    def noisy(self) -> bool:
        return any(self.noise.values()) if isinstance(self.noise, Mapping) else self.noise > 0

    @property
    def masked(self) -> bool:
        return self.prune > 0 or self.dropout > 0

    @property
    def rounds_evenly(self) -> bool:
        """Whether values are rounded to evenly spaced ones."""
        return self.rounding in ("uniform", "stochastic")

    @property
    def clips_examples(self) -> bool:
        return self.clip is not None and self.clip_per == "example"

    def clip_factor(self, norm: float) -> float:
        """What a gradient of this norm is multiplied with.

        >>> Channel(clip=2.0).clip_factor(8.0), Channel(clip=2.0).clip_factor(1.0), Channel().clip_factor(8.0)
        (0.25, 1.0, 1.0)
        """
        return 1.0 if self.clip is None or norm <= self.clip else self.clip / norm

    # -- what attacks use --

    def mix(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the client trains on in place of these examples; as they are unless a defence mixes them."""
        return x, targets

    def survivors(self, observed: Mapping[str, Tensor]) -> Tensors:
        """Return 1 for entries that survived, as far as the update shows it, else 0; empty where all did.

        A pruned entry is exactly zero, unless noise was added afterwards. Of unreliable tensors no entry counts.

        >>> Channel(prune=0.5).survivors({"w": torch.tensor([3.0, 0.0])})["w"].tolist()
        [1.0, 0.0]
        >>> Channel(unreliable=("w",)).survivors({"w": torch.ones(2), "b": torch.ones(1)})
        {'w': tensor([0., 0.])}
        """
        shown = self.masked and (self.zeros_last or not self.noisy)
        masks = {name: (value != 0).to(value) for name, value in observed.items()} if shown else {}
        return {**masks, **{name: torch.zeros_like(observed[name]) for name in self.unreliable if name in observed}}

    def reliable(self, observed: Mapping[str, Tensor]) -> Tensors:
        """Set unreliable tensors to zero, as in what an adversary simulates."""
        return {name: torch.zeros_like(v) if name in self.unreliable else v for name, v in observed.items()}

    def clip_update(self, update: Mapping[str, Tensor]) -> Tensors:
        """An update clipped as one, differentiable."""
        if self.clip is None:
            return dict(update)
        norm = torch.sqrt(torch.stack([value.square().sum() for value in update.values()]).sum() + 1e-24)
        factor = (self.clip / norm).clamp(max=1.0)
        return {name: value * factor for name, value in update.items()}

    def stand_in(self, update: Mapping[str, Tensor], survivors: Mapping[str, Tensor]) -> Tensors:
        """What an adversary expects to see of an update, noise left out; differentiable."""
        clipped = self.clip_update(update) if self.clip_per == "batch" else dict(update)
        masked = {name: value * survivors[name] if name in survivors else value for name, value in clipped.items()}
        if self.dropout_scaled:
            masked = {name: value / (1 - self.dropout) for name, value in masked.items()}
        if self.rounding != "sign":
            return masked
        # As the client does it; the derivative is that of the value itself, for a sign has none. Measured against
        # smooth stand-ins, which leave an attack worse off.
        return {name: v + (v.sign() * v.abs().mean() - v).detach() for name, v in masked.items()}

    def settled(self, update: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> Tensors:
        """What was simulated, moved towards what was ``seen`` as far as rounding explains it; differentiable.

        >>> simulated, seen = {"w": torch.tensor([0.9, 0.6])}, {"w": torch.tensor([1.0, 0.0])}
        >>> Channel(rounding="uniform", bits=2).settled(simulated, seen)
        {'w': tensor([1.0000, 0.1000])}
        """
        reach = {name: self._reach(seen[name]) for name in update if name in seen}
        return {
            name: value - (value - seen[name]).clamp(-reach[name], reach[name]) if name in reach else value
            for name, value in update.items()
        }

    def rounding_level(self, seen: Tensor) -> float:
        """The standard deviation of what even rounding adds to an entry of a tensor.

        >>> round(Channel(rounding="uniform", bits=2).rounding_level(torch.tensor([0.0, 1.0])), 4)
        0.2887
        """
        # The nearest value errs evenly within half a spacing; up or down errs twice as far, most often a little.
        return float(self._reach(seen)) / math.sqrt(3 if self.rounding == "uniform" else 6)

    def _reach(self, seen: Tensor) -> Tensor:
        return seen.abs().max() * (0.5 if self.rounding == "uniform" else 1.0) / (2 ** (self.bits - 1) - 1)

    # -- what theory uses --

    @property
    def beyond_theory(self) -> str | None:
        """Why no floor can be told behind this channel; None where one can."""
        if type(self) is not Channel:
            return f"what a {type(self).__name__} does is known to attacks only"
        if self.inexact:
            return "the client's network was random, and a floor is that of one network"
        if self.mixed > 1:
            return "the client trained on mixtures of its examples, whose shares the calculation does not know"
        if self.unreliable:
            return f"what the update says of {', '.join(self.unreliable)} is not known to the calculation"
        if self.rounding != "none":
            return "rounding to few values is no noise with a density, of which alone a floor can be told"
        if self.zeros_last and self.prune:
            return "which entries were pruned depends on the noise, and the calculation takes them for fixed"
        return None

    def information_level(self, name: str) -> float:
        """The standard deviation of Gaussian noise on the gradient itself that hides as much of this tensor.

        The Fisher information of a location under Laplace noise of standard deviation s is 2 / s^2, twice Gaussian's.

        >>> round(Channel(noise=1.0, noise_law="laplace").information_level("w"), 4)
        0.7071
        >>> Channel(noise=1.0, dropout=0.5, dropout_scaled=True).information_level("w")
        0.5
        """
        stretch = 1 / (1 - self.dropout) if self.dropout_scaled and not self.zeros_last else 1.0
        return self.level(name) / stretch / (math.sqrt(2) if self.noise_law == "laplace" else 1.0)

    def kept(self, update: Sequence[Tensor], generator: torch.Generator) -> Tensor | None:
        """One boolean an entry of the update, in its order: true where it is not set to zero; None if all are kept.

        With one state of ``generator``, what a larger dropout keeps is part of what a smaller one keeps.

        >>> Channel(prune=0.5).kept([torch.tensor([3.0, -1.0]), torch.tensor([9.0])], torch.Generator()).tolist()
        [True, False, True]
        """
        if not self.masked:
            return None
        groups = [value.flatten() for value in update]
        if self.prune_scope == "global":
            groups = [torch.cat(groups)]
        kept = torch.cat([self._largest(group) for group in groups])
        # Drawn on the CPU, so that it is the same on every device.
        drawn = torch.rand(len(kept), generator=generator, dtype=torch.float64)
        return kept & (drawn >= self.dropout).to(kept.device)

    def with_least_noise(self, levels: Mapping[str, float]) -> Self:
        """The same channel with at least this noise on each tensor, that of rounding say."""
        return dataclasses.replace(self, noise={name: max(level, self.level(name)) for name, level in levels.items()})

    def _largest(self, flat: Tensor) -> Tensor:
        kept = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
        # Exactly floor(share * n) go; a stable sort settles ties.
        kept[torch.sort(flat.abs(), stable=True).indices[: int(self.prune * len(flat))]] = False
        return kept

    def describe(self) -> str:
        """In a few words.

        >>> Channel(clip=4.0, noise=0.1).describe()
        'clipped to 4, noise 0.1'
        """
        whose = {"batch": "", "example": " for each example", "step": " at each step"}[self.clip_per]
        words = [] if self.clip is None else [f"clipped to {self.clip:g}{whose}"]
        if self.prune:
            scope = "of each tensor" if self.prune_scope == "tensor" else "of the update"
            words.append(f"{100 * self.prune:g} % of the entries {scope} pruned")
        if self.dropout:
            words.append(f"{100 * self.dropout:g} % of the entries dropped")
            words[-1] += ", the others stretched" if self.dropout_scaled else ""
        if self.noisy:
            law = "" if self.noise_law == "gaussian" else f"{self.noise_law.capitalize()} "
            noise = f"{law}noise by tensor" if isinstance(self.noise, Mapping) else f"{law}noise {self.noise:g}"
            words.insert(len(words) - self.masked if self.zeros_last else len(words), noise)
        if self.rounding != "none":
            few = f"rounded to {self.bits} bits" + (" up or down" if self.rounding == "stochastic" else "")
            words.append(few if self.rounds_evenly else f"sent as {self.rounding}")
        if self.unreliable:
            words.append(f"without {', '.join(self.unreliable)}")
        if self.inexact:
            words.append("of a random network")
        if self.mixed > 1:
            words.append(f"of mixtures of {self.mixed} examples")
        return ", ".join(words) or "the gradient as it is"

    def facts(self) -> dict[str, Any]:
        """What a file needs to make it again, as JSON values."""
        if type(self) is not Channel:
            name = type(self).__name__
            raise UserError(f"channel: a {name} cannot be written to a file; drop it from the observation")
        noise = dict(self.noise) if isinstance(self.noise, Mapping) else self.noise
        return {**dataclasses.asdict(dataclasses.replace(self, noise=0.0)), "noise": noise}
