"""Memory of a process: how far it rises while something runs, and updates of clients kept in it for further jobs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import psutil

from leakscope.contracts.observation import Observation, held_bytes

#: Bytes of updates that are kept for further jobs; the one that was last asked for is kept whatever its size.
MOST_BYTES = 2**28


class PeakMemory:
    """The rise of resident memory above where it stood when this was made, in megabytes, looked at every 20 ms."""

    _EVERY = 0.02

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = self._peak = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(self._EVERY):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def megabytes(self) -> float:
        """The rise so far; the watch ends."""
        self._done.set()
        self._thread.join()
        self._peak = max(self._peak, self._process.memory_info().rss)
        return round((self._peak - self._start) / 2**20, 1)


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
        sizes = {key: update_bytes(update) for key, update in self._made.items()}
        while sizes and sum(sizes.values()) + max(sizes.values()) > self._most:
            sizes.pop(self._made.popitem(last=False)[0])
        self._made[whose] = make()
        return self._made[whose]


def update_bytes(update: Observation) -> int:
    """What it takes in memory: messages, and the model that the client was sent."""
    model = sum(value.numel() * value.element_size() for value in update.model.state_dict().values())
    return model + sum(held_bytes(message) for message in update.messages)
