"""A first answer: one example, one local step, exact and cheap attacks."""

from __future__ import annotations

import audit_doubles as doubles
import pytest

from leakscope.audit import AuditSpec, audit
from leakscope.audit.quick import SECONDS, quickened
from leakscope.contracts.errors import UserError

#: Its audits stop where others do.
DEFAULT_STOP = True


def spec(**changes: object) -> AuditSpec:
    return AuditSpec.parse({"model": "logistic", "data": "tiles", "examples": 6, "batch": 2, "seeds": 3, **changes})


def test_one_example_one_step_and_no_search() -> None:
    asked = spec(protocols=["fedsgd", {"fedavg": {"epochs": 5, "lr": 0.1}}, {"fedavg": {"epochs": 2, "lr": 0.1}}])
    quick = quickened(asked)
    assert (quick.examples, quick.batch, quick.seeds, quick.findings) == (1, 1, [0], [])
    assert [part.name for part in quick.protocols] == ["fedsgd", "fedavg"], "two recipes of one step are the same"
    fedavg = quick.protocols[1]
    assert (fedavg.instance.epochs, fedavg.instance.lr, fedavg.options["epochs"]) == (1, 0.1, 1)
    names = {part.name for part in quick.attacks}
    assert "head-first" in names
    assert not names & {"inverting-gradients", "idlg", "dlg"}


@pytest.mark.parametrize("budget, seconds", [(None, SECONDS), ("10s", 10.0), ("1h", SECONDS)])
def test_it_ends_soon(budget: str | None, seconds: float) -> None:
    assert quickened(spec(budget=budget)).budget == seconds


def test_what_has_no_single_step_is_refused() -> None:
    with pytest.raises(UserError, match="--quick: expected the protocols fedsgd or fedavg, got secure-aggregation"):
        quickened(spec(protocols=["secure-aggregation"]))


def test_a_quick_audit_finds_a_leak_and_never_passes() -> None:
    done = audit(model=doubles.net(), data=doubles.examples(), quick=True, progress=False)
    assert done.verdict.outcome == "leaks"
    assert {row.job.batch for row in done.rows} == {0}
    defended = {"defenses": [{"gradient-noise": {"sigma": 30.0}}], "knowledge": "adaptive_server"}
    hidden = audit(model=doubles.net(), data=doubles.examples(), quick=True, progress=False, **defended)
    assert hidden.verdict.outcome == "inconclusive"
