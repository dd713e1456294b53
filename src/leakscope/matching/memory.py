"""Freed memory is kept for the next step, which wants the same again."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

#: mallopt's numbers of the two settings, and what they are set to: blocks up to 32 MB come from the process's own heap,
#: which is given back to the system only beyond 512 MB of free space at its end.
TRIM_THRESHOLD, MMAP_THRESHOLD = (-1, 2**29), (-3, 2**25)
#: By these a user has chosen otherwise.
CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Ask the C library of this process to keep freed memory; whether it does.

    A step allocates and frees every gradient several times over. By default blocks of some megabytes go back to the
    system each time, and the processor spends up to half of a step on mapping and clearing fresh pages. Only glibc can
    be asked, and it is not where the user has set it up.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in CHOICES):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  other C libraries number their settings differently, or have none
    except (OSError, AttributeError):
        return False
    return all(library.mallopt(*setting) == 1 for setting in (TRIM_THRESHOLD, MMAP_THRESHOLD))
