"""Write to streams that may be closed: what nobody reads is lost, and nothing else is."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO


class Unfailing:
    """A text stream that never raises: a closed pipe, a full disk or a lost terminal must not end hours of work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            return self.write(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._give_up()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        # The descriptor itself is redirected, so that what is still buffered has somewhere to go when Python ends.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextlib.contextmanager
def unfailing_output() -> Iterator[None]:
    """Keep standard output and error from raising."""
    before = sys.stdout, sys.stderr
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by whoever started us; the next file opened must not take its place
            os.open(os.devnull, os.O_RDWR)
    # A stream is None where there was none when Python started; print and rich know what to do then.
    sys.stdout, sys.stderr = (stream and Unfailing(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
