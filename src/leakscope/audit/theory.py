"""What theory allows of a client's gradient, to stand beside what attacks made of it.

The truth's side: computed at the private inputs, for the report and never for an attack. It is taken of the first
client of each setting, for it takes longer than many an attack.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from leakscope.defenses import Defense, GradientNoise, GradientPruning
from leakscope.limits import Channel, affordable_steps, cramer_rao
from leakscope.matching import GradientMap
from leakscope.observation import Observation

#: Up to so many unknowns the floor is exact; above them it is estimated from so many random directions and steps.
EXACT_UNKNOWNS = 1024
PROBES = 4
STEPS = 200


def describe_limits(observation: Observation, x: Tensor, y: Tensor, defense: Defense | None) -> dict[str, Any]:
    """The Cramér-Rao floor of one observed gradient; plain JSON values, or only a ``reason``.

    Where the defence adds no noise, the update's own rounding is the noise, taken to be in proportion to the size of
    each tensor: a floor of 110 dB says that in principle everything is there.
    """
    try:
        return _describe(observation, x, y, defense)
    except Exception as error:  # noqa: BLE001 - the attack's result is worth keeping whatever goes wrong here
        return {"reason": f"{type(error).__name__}: {error}"}


def channel_of(defense: Defense | None, rounding: float) -> Channel | str:
    """The channel that a defence amounts to, or why there is none; without noise of its own, that of rounding.

    >>> channel_of(GradientNoise(sigma=0.5), rounding=1e-9).noise, channel_of(None, rounding=1e-9).noise
    (0.5, 1e-09)
    """
    if defense is None or type(defense) is Defense:
        return Channel(noise=rounding)
    if isinstance(defense, GradientNoise):
        return Channel(noise=max(defense.sigma, rounding))
    if isinstance(defense, GradientPruning):
        return Channel(noise=rounding, prune=defense.fraction, prune_scope=defense.scope)
    return f"what {type(defense).__name__} does to a gradient is not known to the calculation"


def _describe(observation: Observation, x: Tensor, y: Tensor, defense: Defense | None) -> dict[str, Any]:
    if observation.message.kind != "gradient":
        return {"reason": "the floor is that of one gradient, and the client sent a weight update"}
    wide = observation.to(device="cpu", dtype=torch.float64)
    mapping = GradientMap.of(wide, y)
    flat = mapping.flat(x.double())
    # Rounding to the nearest: an error up to eps / 2 of an entry's size, all of them equally likely. Sizes differ much
    # from layer to layer, less within one.
    rounding = torch.finfo(observation.dtype).eps / math.sqrt(12)
    sizes = {name: float(value.square().mean().sqrt()) or 1.0 for name, value in mapping.update(flat).items()}
    if isinstance(defense, GradientNoise) and defense.sigma > rounding * min(sizes.values()):
        sizes = dict.fromkeys(sizes, 1.0)
    elif isinstance(defense, GradientPruning) and defense.scope == "global":
        sizes = dict.fromkeys(sizes, min(sizes.values()))  # one scale for all, lest another set be pruned
    channel = channel_of(defense, rounding)
    if isinstance(channel, str):
        return {"reason": channel}
    mapping = dataclasses.replace(mapping, scales=sizes)
    exact = mapping.unknowns <= EXACT_UNKNOWNS
    steps = min(STEPS, affordable_steps(mapping))
    floor = cramer_rao(mapping, flat, channel, method="auto" if exact else "estimate", probes=PROBES, steps=steps)
    return {
        "entries": mapping.entries,
        "unknowns": floor.unknowns,
        "rank": floor.rank,
        "condition": floor.condition,
        "rmse": floor.rmse if math.isfinite(floor.rmse) else None,
        "infinite": math.isinf(floor.rmse),
        "interval": None if floor.interval is None else list(floor.interval),
        "psnr": floor.psnr if math.isfinite(floor.psnr) else None,
        "method": floor.method,
        "converged": floor.converged,
        "sigma": floor.sigma,
        "rounding_only": not isinstance(defense, GradientNoise) or channel.noise == rounding,
        "surviving": floor.surviving,
        "note": floor.reason,
    }
