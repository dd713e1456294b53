"""Updates of clients, made once for all jobs on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from leakscope.contracts.observation import Observation, held_bytes

#: Bytes of updates that are kept for further jobs; the one that was last asked for is kept whatever its size.
MOST_BYTES = 2**28


class Updates:
    """What clients sent, by whose update it is; the least recently used go first."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._made: OrderedDict[Hashable, Observation] = OrderedDict()

    def get(self, whose: Hashable, make: Callable[[], Observation]) -> Observation:
        """The update of this client, made unless it is at hand."""
        if whose in self._made:
            self._made.move_to_end(whose)
            return self._made[whose]
        # Room first, for one as large as any so far: two at a time may be too much for the memory.
        sizes = {key: _bytes(update) for key, update in self._made.items()}
        while sizes and sum(sizes.values()) + max(sizes.values()) > self._most:
            sizes.pop(self._made.popitem(last=False)[0])
        self._made[whose] = make()
        return self._made[whose]


def _bytes(update: Observation) -> int:
    """What it takes in memory: messages, and the model that the client was sent."""
    model = sum(value.numel() * value.element_size() for value in update.model.state_dict().values())
    return model + sum(held_bytes(message) for message in update.messages)
