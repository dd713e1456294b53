"""Which errors are the user's and which are ours; the difference is what a pipeline acts on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from leakscope import cli
from leakscope.audit import ExecutorError, SpecError
from leakscope.contracts.checks import refuse
from leakscope.models import build_model
from leakscope.results import StoreError


def library_failure() -> None:
    json.dumps(math.inf, allow_nan=False)


def slip() -> None:
    int("seven")


def wrong_call() -> None:
    build_model()  # type: ignore[call-arg]


def own(error: Exception):
    def fail() -> None:
        raise error

    return fail


MISTAKES = {
    "a mistake that leakscope looks for": lambda: refuse("limits", ["batch: expected at least 1, got 0"]),
    "an unknown model": lambda: build_model("convnett"),
    "an unreadable file": Path("/nonexistent/spec.yaml").read_text,
}


def code_of(command, monkeypatch) -> int:
    monkeypatch.setattr(cli, "app", lambda **_: command())
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.mark.parametrize("command", [library_failure, slip, wrong_call], ids=lambda command: command.__name__)
def test_what_a_library_or_a_slip_raises_is_an_internal_error(command, monkeypatch, capsys) -> None:
    assert code_of(command, monkeypatch) == cli.INTERNAL
    assert "defect" in capsys.readouterr().err


@pytest.mark.parametrize("name", MISTAKES)
def test_what_leakscope_tells_is_a_usage_error(name, monkeypatch, capsys) -> None:
    assert code_of(MISTAKES[name], monkeypatch) == cli.USAGE
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [SpecError, StoreError, ExecutorError])
def test_errors_of_the_spec_the_store_and_the_executor_are_usage_errors(kind, monkeypatch, capsys) -> None:
    failure = kind(["model: expected one"]) if kind is SpecError else kind("told")
    assert code_of(own(failure), monkeypatch) == cli.USAGE
