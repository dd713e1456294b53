"""Models of the user's own, named package.module:Name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from leakscope.models import build_model, parameter_count

SOURCE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, 2)
    class Inner(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)

def shaped(input_shape, num_classes, *, scale=1):
    return nn.Linear(input_shape[0] * scale, num_classes)
def plain():
    return nn.Linear(3, 2)
def anything(**options):
    return nn.Linear(options["width"], len(options))
def seeded(seed):
    return nn.Linear(seed, 1)
def broken():
    raise RuntimeError("no weights today")
def wrong():
    return "a model"
instance = nn.Linear(3, 2)
number = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, under a name that no other test uses."""
    name = f"own_net_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_raises.py").write_text("raise OSError('disk on fire')\n")
    (tmp_path / f"{name}_needs.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / f"{name}_syntax.py").write_text("def broken(:\n")
    monkeypatch.chdir(tmp_path)
    return name


def test_factories(module: str) -> None:
    before = list(sys.path)
    assert parameter_count(build_model(f"{module}:plain", input_shape=(9,), num_classes=9)) == 8
    assert parameter_count(build_model(f"{module}:shaped", input_shape=(5,), num_classes=3)) == 18
    assert parameter_count(build_model(f"{module}:shaped", input_shape=(5,), num_classes=3, scale=2)) == 33
    assert parameter_count(build_model(f"{module}:Net")) == 10
    assert parameter_count(build_model(f"{module}:Net", width=7)) == 16
    assert parameter_count(build_model(f"{module}:Net.Inner")) == 6
    # **options are the user's own: facts that nobody asked for are not slipped in.
    assert parameter_count(build_model(f"{module}:anything", input_shape=(9,), num_classes=9, width=3)) == 4
    assert parameter_count(build_model(f"{module}:seeded", seed=6)) == 7
    assert sys.path == before


def test_seed_and_global_state(module: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (build_model(f"{module}:plain", seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first["weight"], again["weight"])
    assert not torch.equal(first["weight"], other["weight"])


@pytest.mark.parametrize(
    "suffix, options, words",
    [
        (":broken", {}, ["RuntimeError", "no weights today"]),
        (":wrong", {}, ["torch.nn.Module", "got str"]),
        (":missing", {}, ["has no 'missing'", "plain", "shaped"]),
        (":number", {}, ["is a int", "function or class"]),
        (":instance", {}, ["is a model already", "Wrap it"]),
        (":plain", {"depth": 3}, ["no option depth", "none"]),
        (":shaped", {}, ["TypeError", "input_shape"]),
        (":", {}, ["package.module:Name"]),
        (":two words", {}, ["package.module:Name"]),
        (":a:b", {}, ["package.module:Name"]),
        ("_raises:net", {}, ["OSError", "disk on fire"]),
        ("_needs:net", {}, ["a_package_that_is_not_there", "Install what it needs"]),
        ("_syntax:net", {}, ["SyntaxError"]),
        ("_absent:net", {}, ["no module named", "run in the folder"]),
    ],
)
def test_every_failure_is_one_clear_error(module: str, suffix: str, options: dict, words: list[str]) -> None:
    before = list(sys.path)
    with pytest.raises(ValueError, match="model") as caught:
        build_model(module + suffix, **options)
    for word in words:
        assert word in str(caught.value)
    assert sys.path == before


@pytest.mark.parametrize("spec", [":net", "..x:net", "a b:net", "absent_package.part:net"])
def test_bad_names(spec: str) -> None:
    with pytest.raises(ValueError, match=r"package.module:Name|no module named"):
        build_model(spec)
