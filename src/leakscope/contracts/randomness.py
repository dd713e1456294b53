"""Where a client's draws come from: the system's randomness, or a seed that whoever knows it can repeat.

Noise that can be computed again is no protection: it is subtracted. An audit repeats by its seeds and says so; an
update that is made for others draws from the system unless its maker asks for a seed.
"""

from __future__ import annotations

import os
from typing import Literal

import torch

#: Where the draws behind an observation came from. Never the seed itself: an attack must not compute the noise from it.
Randomness = Literal["system", "seeded"]

#: torch keeps the Mersenne twister as 624 words of eight bytes each, behind 24 bytes of other state.
_WORDS = slice(24, 24 + 624 * 8)


def system_generator() -> torch.Generator:
    """Draws that nobody can repeat: the generator's whole state comes from the operating system.

    A seed would not do: torch uses 32 bits of it, few enough to try them all.

    >>> one, two = (torch.rand(3, generator=system_generator()) for _ in range(2))
    >>> bool((one == two).any())
    False
    """
    generator = torch.Generator()
    state = generator.get_state()
    drawn = torch.frombuffer(bytearray(os.urandom(4 * 624)), dtype=torch.int32)
    state[_WORDS].view(torch.int64).copy_(drawn.long() & 0xFFFFFFFF)
    generator.set_state(state)
    return generator
