"""Fixtures that every test may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Helpers that several folders of tests share lie beside this file.
sys.path.insert(0, str(Path(__file__).parent))

#: Files that take longest, the longest first: begun early, none keeps one worker busy after the others have ended.
LONGEST = (
    "test_docs_run.py",
    "test_ray.py",
    "test_flower_example.py",
    "test_executors.py",
    "test_pytest_plugin.py",
    "test_head_first.py",
    "test_packaging.py",
    "test_kills.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, each in its own order, so that what a module shares is made once."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Test workers run side by side: one thread each is several times faster than two."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _repeatable_clients() -> Iterator[None]:
    """Clients without a generator draw from the system's randomness; here from a seed, so that runs are the same."""
    with pytest.MonkeyPatch.context() as patch:
        seeded = "leakscope.contracts.protocol.system_generator"
        patch.setattr(seeded, lambda: torch.Generator().manual_seed(0x1EA6_5C0F))
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets, from LEAKSCOPE_DATA or beside the checkout; skips where there is none."""
    candidates = [os.environ.get("LEAKSCOPE_DATA"), Path(__file__).parents[2] / "shared" / "data"]
    for candidate in candidates:
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    pytest.skip("no real data here: set LEAKSCOPE_DATA to a folder with the data sets")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
