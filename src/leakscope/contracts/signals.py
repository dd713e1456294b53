"""End a process in silence while it is only loading libraries."""

import os
import sys
from types import FrameType

#: Exit code of a command that somebody stopped.
INTERRUPTED = 2


def leave(_number: int, _frame: FrameType | None) -> None:
    """End the process at once: nothing has begun, and what is being loaded turns an exception into other errors."""
    os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)


def loading() -> bool:
    """Check whether torch, without which nothing begins, is still to come."""
    torch = sys.modules.get("torch")
    return torch is None or bool(getattr(torch.__spec__, "_initializing", False))
