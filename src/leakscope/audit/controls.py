"""Controls: attempts from which nothing can be learnt, so that what an attack still recovers came from elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from leakscope.contracts.observation import Observation


@dataclass(frozen=True)
class Control:
    """A kind of control: how it alters an undefended observation before the attack sees it."""

    name: str
    summary: str
    alter: Callable[[Observation, torch.Generator], Observation]


def noise_of_equal_norm(observation: Observation, generator: torch.Generator) -> Observation:
    """The observation with Gaussian noise of the same norm, tensor by tensor, in place of the update.

    All else the adversary knows stays, so what an attack still recovers did not come from the update.
    """
    messages = []
    for message in observation.messages:
        update = {}
        for name, value in message.update.items():
            # Drawn on the CPU in double, so that the noise is the same for every device and precision.
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            norm = float(torch.linalg.vector_norm(noise))
            scale = float(torch.linalg.vector_norm(value.double())) / norm if norm else 0.0
            update[name] = (noise * scale).to(value)
        messages.append(dataclasses.replace(message, update=update))
    return dataclasses.replace(observation, messages=tuple(messages))


#: Kinds of controls; a further one is a function and a line here.
CONTROLS: Mapping[str, Control] = MappingProxyType(
    {
        control.name: control
        for control in (Control("noise", "Gaussian noise of the update's norm, per tensor", noise_of_equal_norm),)
    }
)
