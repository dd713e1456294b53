"""How far the memory of this process rises while something runs."""

from __future__ import annotations

import threading

import psutil


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
