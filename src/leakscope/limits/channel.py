"""What happens to a gradient before it is seen: clipping, pruning, dropout of entries and noise, in this order.

The definitions are those of Liu et al., "Data Reconstruction Attacks and Defenses: A Systematic Evaluation". Clipping
is of the whole batch's gradient, g / max(1, |g| / C); a guarantee of differential privacy needs that of each example's
instead. The noise of DP-SGD is absolute in the paper's main text and in units of C in its appendix: ``noise_scale``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NoiseScale = Literal["absolute", "times-clip"]
PruneScope = Literal["tensor", "global"]


@dataclass(frozen=True, kw_only=True)
class Channel:
    """From a client's gradient to what an adversary sees.

    ``clip``: the largest length that the gradient may have; ``prune``: the share of entries of smallest magnitude that
    is set to zero, of each tensor or of the whole update (``prune_scope``); ``dropout``: the probability with which an
    entry is set to zero, the others not being scaled; ``noise``: the standard deviation of Gaussian noise on what is
    left. Clipping and noise together are DP-SGD of one batch.

    >>> Channel(noise=0.5, clip=4.0, noise_scale="times-clip").sigma
    2.0
    """

    noise: float = 0.0
    clip: float | None = None
    noise_scale: NoiseScale = "absolute"
    prune: float = 0.0
    prune_scope: PruneScope = "tensor"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.noise < math.inf:
            problems.append(f"noise: expected a finite number of at least 0, got {self.noise}")
        if self.clip is not None and not 0 < self.clip < math.inf:
            problems.append(f"clip: expected a finite number above 0 or None, got {self.clip}")
        for name, share in (("prune", self.prune), ("dropout", self.dropout)):
            if not 0 <= share < 1:
                problems.append(f"{name}: expected a share of at least 0 and below 1, got {share}")
        if self.prune_scope not in ("tensor", "global"):
            problems.append(f"prune_scope: expected 'tensor' or 'global', got {self.prune_scope!r}")
        if self.noise_scale not in ("absolute", "times-clip"):
            problems.append(f"noise_scale: expected 'absolute' or 'times-clip', got {self.noise_scale!r}")
        elif self.noise_scale == "times-clip" and self.clip is None:
            problems.append("noise_scale: 'times-clip' needs clip; give a clip or use 'absolute'")
        if problems:
            raise ValueError("not a valid channel:\n  - " + "\n  - ".join(problems))

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise on an entry."""
        if self.noise_scale == "times-clip" and self.clip is not None:
            return self.noise * self.clip
        return self.noise

    @property
    def masked(self) -> bool:
        """Whether entries are set to zero."""
        return self.prune > 0 or self.dropout > 0

    def clip_factor(self, norm: float) -> float:
        """What a gradient of this length is multiplied with.

        >>> Channel(clip=2.0).clip_factor(8.0), Channel(clip=2.0).clip_factor(1.0), Channel().clip_factor(8.0)
        (0.25, 1.0, 1.0)
        """
        return 1.0 if self.clip is None or norm <= self.clip else self.clip / norm

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
        words = [] if self.clip is None else [f"clipped to {self.clip:g}"]
        if self.prune:
            scope = "of each tensor" if self.prune_scope == "tensor" else "of the update"
            words.append(f"{100 * self.prune:g} % of the entries {scope} pruned")
        if self.dropout:
            words.append(f"{100 * self.dropout:g} % of the entries dropped")
        if self.noise:
            words.append(f"noise {self.sigma:g}")
        return ", ".join(words) or "the gradient as it is"
