"""Whether processes that were started in a group of their own are gone."""

from __future__ import annotations

import os
import time


def group_is_gone(group: int) -> bool:
    """Whether every process of the group ends soon; the tracker of multiprocessing takes a moment."""
    for _ in range(400):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
