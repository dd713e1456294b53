"""Freed memory is kept from step to step, unless the user has set the C library up otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from leakscope.matching.search import keep_freed_memory

# Blocks of 4 to 12 MB, as the gradients of a large layer; a page is 4 KB. Processor time would tell less.
FAULTS = """
import resource, sys, torch
from leakscope.matching.search import keep_freed_memory
kept = keep_freed_memory()
def step():
    return [torch.ones(size * 2**18) for size in (4, 8, 12)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[int, int]:
    command = [sys.executable, "-c", FAULTS]
    out = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True).stdout
    kept, count = map(int, out.split())
    return kept, count


@pytest.mark.slow
@pytest.mark.skipif(
    not keep_freed_memory(), reason="only glibc can be asked, and only where the user has not set it up"
)
def test_the_pages_of_a_step_are_those_of_the_last() -> None:
    kept, count = faults()
    assert kept == 1
    assert count < 10_000  # ten steps on fresh pages take 61,440; one or two may find the heap too small
    chosen, many = faults(MALLOC_MMAP_THRESHOLD_="131072")
    assert chosen == 0
    assert many > 30_000  # ten times 24 MB


def test_another_system_is_left_alone(monkeypatch) -> None:
    keep_freed_memory.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
    keep_freed_memory.cache_clear()
