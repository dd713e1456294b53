"""Start the command line. Ctrl-C ends it in silence from here on, also while libraries are loaded."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 2


def leave(_number: int, _frame: FrameType | None) -> None:
    """End the process at once: nothing has begun, and what is being loaded turns an exception into other errors."""
    os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)


def loading() -> bool:
    """Check whether torch, without which nothing begins, is still to come."""
    torch = sys.modules.get("torch")
    return torch is None or bool(getattr(torch.__spec__, "_initializing", False))


def main() -> NoReturn:
    """Start the command line; the entry point."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    from leakscope.cli import main as run

    run()


if __name__ == "__main__":
    from leakscope.__main__ import main as start  # under the name by which others import it

    start()
