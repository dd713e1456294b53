"""What Python says of an audit: help, signature, and the result in print."""

from __future__ import annotations

import inspect
import pydoc

import torch

import leakscope as ls


def test_help_of_the_room_is_short_and_tells_how_to_call_it() -> None:
    told = pydoc.plain(pydoc.render_doc(ls.audit))
    before, _, rest = told.partition("PACKAGE CONTENTS")
    assert len((before + rest.partition("FUNCTIONS")[2]).splitlines()) < 35
    for words in ("ls.audit(model=net, data=(x, y)", "value_range", "print(result)"):
        assert words in told
    assert list(inspect.signature(ls.audit).parameters)[:2] == ["model", "data"]
    assert ls.audit.__call__.__doc__


def test_an_audit_prints_as_one_paragraph_that_names_no_temporary_folder() -> None:
    x = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    result = ls.audit(
        model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)),
        data=(x, torch.tensor([0, 1])),
        attacks=["linear-layer"],
        controls=False,
        findings=False,
    )
    told = str(result)
    assert told.startswith(str(result.verdict))
    assert "\n" not in told
    assert told.endswith("2 jobs in a temporary folder.")
