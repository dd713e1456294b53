"""The benchmark that is run as a habit: what it calls slower, what it stores, and that its cases still run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import release

    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of the other tests
    return release


@pytest.fixture
def clock(release: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Cases that take as long as the dictionary says, beside a loop of ten milliseconds."""
    lengths = {"one": 0.02, "two": 0.01}
    monkeypatch.setattr(release, "calibration", lambda: lambda: spin(0.01))
    cases = {name: (lambda name=name: lambda: spin(lengths[name])) for name in lengths}
    monkeypatch.setattr(release, "CASES", cases)
    return lengths


def test_what_has_become_slower_is_named_and_ends_with_code_1(release, clock, tmp_path, capsys) -> None:
    stored = tmp_path / "release.json"
    common = ["--rounds", "3", "--stored", str(stored), "--tolerance", "0.3"]
    assert release.main(common) == 0  # nothing to compare with
    assert not stored.exists()
    assert release.main([*common, "--write"]) == 0
    ratios = json.loads(stored.read_text())["ratios"]
    assert ratios == {"one": pytest.approx(2, rel=0.2), "two": pytest.approx(1, rel=0.2)}
    assert release.main(common) == 0
    clock["two"] = 0.02
    capsys.readouterr()
    assert release.main(common) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("three times measured: two")
    assert release.main([*common, "--only", "one"]) == 0


def test_stored_figures_are_those_of_the_cases(release) -> None:
    stored = json.loads(release.STORED.read_text())["ratios"]
    assert list(stored) == list(release.CASES)
    assert all(value > 0 for value in stored.values())


@pytest.mark.parametrize("name", ["step, 4 restarts", "step of sme", "linear-layer", "gauss-newton"])
def test_cases_run(release, name) -> None:
    release.CASES[name]()()
