"""Measure the memory of a process, and keep updates of clients in it for further jobs."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import psutil

from leakscope.contracts.observation import Observation, held_bytes

#: Bytes of updates that are kept for further jobs; the last one is kept whatever its size.
MOST_BYTES = 2**28


class PeakMemory:
    """Watch resident memory every 20 ms from now on."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = self._peak = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def megabytes(self) -> float:
        """End the watch and return the rise."""
        self._done.set()
        self._thread.join()
        self._peak = max(self._peak, self._process.memory_info().rss)
        return round((self._peak - self._start) / 2**20, 1)


class Updates:
    """Keep what clients sent; the least recently used go first."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._made: OrderedDict[Hashable, Observation] = OrderedDict()

    def get(self, whose: Hashable, make: Callable[[], Observation]) -> Observation:
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
    """Return the memory of messages and of the model that the client was sent."""
    model = sum(value.numel() * value.element_size() for value in update.model.state_dict().values())
    return model + sum(held_bytes(message) for message in update.messages)
