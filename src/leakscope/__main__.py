"""Start the command line. Ctrl-C ends it in silence from here on, also while libraries are loaded."""

import signal
from typing import NoReturn

from leakscope.contracts.signals import leave


def main() -> NoReturn:
    """Start the command line; the entry point."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    from leakscope.cli import main as run

    run()


if __name__ == "__main__":
    from leakscope.__main__ import main as start  # under the name by which others import it

    start()
