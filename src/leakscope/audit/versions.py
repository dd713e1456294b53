"""What computed: kept with an audit and with a reproduced table."""

from __future__ import annotations

import platform

import numpy
import torch

from leakscope import __version__


def versions() -> dict[str, str]:
    """The versions that numbers may depend on; no name of a host or a user."""
    return {
        "leakscope": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
    }
