"""More evidence never costs a pass, and fewer attacks never buy one: random audits against random parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from leakscope.results import FindingRow, Row, Verdict, judge

pytestmark = pytest.mark.slow

PROTOCOL, NOISE = "FedAvg()", "GradientNoise(sigma=0.01)"
REQUIRED = ("head-first", "idlg")
EXTRA = ("dlg", "sme", "dlfa")
CLIENTS = 2
#: What a doubt says that comes from something like a leak: a further attack may raise it.
LEAK_LIKE = {
    "identified-above-chance",
    "no-control",
    "near-held-out",
    "labels-hide",
    "certificate-contradicted",
}
HOLDS = {"residual": 0.5, "tolerance": 1.0, "free_directions": 0, "method": "solved"}


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """The usual value more often than not, lest no audit ever passes."""
    return st.sampled_from([usual] * (2 * len(others) + 3) + list(others))


ATTEMPT = st.fixed_dictionaries(
    {
        "status": mostly("done", "failed", "NotApplicable", "MissingKnowledge"),
        "psnr": mostly(9.0, 5.0, 19.0, 25.0, None),
        "flags": mostly([], ["did not converge"], ["labels uncertain"], ["update not explained"]),
        "unexplained": mostly(0.5, 0.8, 1.0, 1e-4),
        "by_truth": mostly(0.5, 1e-4),
        "adaptive": mostly(True, False),
        "diagnosis": mostly(None, "optimiser failed", "recovered"),
        "identified": mostly(False, True, None),
        "ssim": mostly(0.4, 0.95, None),
        "label_correct": mostly(None, True, False),
        "given_psnr": mostly(None, 12.0, 25.0),
        "certificate": mostly(None, HOLDS, {**HOLDS, "free_directions": 3}),
    }
)
#: PSNR of a control, or what became of it instead.
CONTROL = mostly(8.0, 24.0, "failed", "refused", "not planned")
POSITIVE = mostly(40.0, 10.0, "failed", "refused", "not planned")
GOOD = {
    **{"status": "done", "psnr": 9.0, "ssim": 0.4, "identified": False, "label_correct": False},
    **{"adaptive": True, "unexplained": 0.5, "by_truth": 0.5},
}
ATTACK = st.fixed_dictionaries(
    {"attempts": st.lists(ATTEMPT, min_size=CLIENTS, max_size=CLIENTS), "noise": CONTROL, "planted": POSITIVE}
) | st.just({"attempts": [GOOD] * CLIENTS, "noise": 8.0, "planted": 40.0})


@st.composite
def audits(draw: st.DrawFn) -> dict[str, Any]:
    names = [*REQUIRED, *draw(st.lists(st.sampled_from(EXTRA), unique=True))]
    twin = {"head-first!": draw(ATTACK)} if draw(st.booleans()) else {}  # another configuration of the same attack
    return {
        "attacks": {name: draw(ATTACK) for name in names} | twin,
        "fewer": {name for name in (*names, *twin) if draw(mostly(True, False))},
        "defense": draw(st.sampled_from(["none", NOISE])),
        "residuals": draw(mostly(True, False)),
        "prior_mean": draw(mostly(7.0, 23.0, None, "failed")),
        "floor": draw(mostly(5.0, 147.0, None)),
        "policy": draw(
            mostly({}, {"waive": REQUIRED}, {"max_ssim": 0.9}, {"max_identification": 0.4}, {"max_label_accuracy": 0.6})
        ),
    }


def result_of(facts: Mapping[str, Any], index: int, residuals: bool) -> dict[str, Any]:
    example = {"index": index, **{k: facts.get(k) for k in ("psnr", "ssim", "identified", "label_correct")}}
    told = facts.get("given_psnr")
    return {
        "examples": [{**example, "certificate": facts.get("certificate")}],
        "flags": facts.get("flags", []),
        "adaptive": facts.get("adaptive", False),
        "diagnosis": facts.get("diagnosis") and {"outcome": facts["diagnosis"], "reason": "so it is"},
        "given_labels": [] if told is None else [{**example, "psnr": told}],
        "unexplained": facts.get("unexplained") if residuals else None,
        "unexplained_by_truth": facts.get("by_truth") if residuals else None,
    }


def verdict_of(audit: Mapping[str, Any], names: set[str]) -> Verdict:
    """The verdict on an audit with only the attacks in ``names``, and a plan of just these."""
    rows: list[Row] = []

    def add(name: str, client: int, status: str, facts: Mapping[str, Any], control: str | None = None) -> None:
        kinds = {"noise": "blind", "planted": "positive", "prior-mean": "held-out"}
        job = {
            "protocol": PROTOCOL,
            "defense": audit["defense"] if control is None else "none",
            "attack": name if name == "none" else f"{name}()",
            "attack_name": name.rstrip("!"),
            **{"seed": 0, "batch": client, "indices": [client], "knowledge": {"defense": True}},
            **{"control": control, "control_kind": kinds.get(control or "")},
        }
        done = status == "done"
        error = None if done else f"{status}: no"
        state: Any = status if status in ("done", "failed") else "refused"
        result = result_of(facts, client, audit["residuals"]) if done else None
        rows.append(Row.read(f"key{len(rows)}", len(rows), state, job, result, error, 1.0, "now"))

    for name in sorted(names):
        attack = audit["attacks"][name]
        for client, facts in enumerate(attack["attempts"]):
            add(name, client, facts["status"], facts)
        for control in ("noise", "planted"):
            for client in range(CLIENTS if control == "noise" else 1):
                value = attack[control]
                if value != "not planned":
                    add(name, client, value if isinstance(value, str) else "done", {"psnr": value}, control)
    for client in range(CLIENTS if audit["prior_mean"] is not None else 0):
        value = audit["prior_mean"]
        add("none", client, value if isinstance(value, str) else "done", {"psnr": value}, "prior-mean")
    setting = {"protocol": PROTOCOL, "defense": audit["defense"], "jobs": CLIENTS * len(names), "has_floor": True}
    plan = {"total": len(rows), "settings": [setting], "label_chance": 0.1, "standard": {PROTOCOL: list(REQUIRED)}}
    subject = {"protocol": PROTOCOL, "batch": 0, "seed": 0}
    theory = [
        FindingRow.read(f"floor{d}", 0, "floor", "done", {**subject, "defense": d}, {"psnr": audit["floor"]})
        for d in dict.fromkeys(("none", audit["defense"]))
    ]
    return judge(rows, audit["policy"], plan, theory)


@settings(max_examples=600, deadline=None)
@given(audits())
def test_more_attacks_never_cost_a_pass_and_fewer_never_buy_one(audit: dict[str, Any]) -> None:
    every = set(audit["attacks"])
    less, more = verdict_of(audit, audit["fewer"]), verdict_of(audit, every)
    event(f"{less.outcome} -> {more.outcome}")
    if less.outcome == "leaks":
        assert more.outcome == "leaks"
    if less.outcome == "within policy" and more.outcome != "leaks":
        raised = [reason.code for reason in more.reasons]
        assert set(raised) <= LEAK_LIKE


@settings(max_examples=300, deadline=None)
@given(audits())
def test_a_pass_has_every_standard_attack_or_its_waiver(audit: dict[str, Any]) -> None:
    verdict = verdict_of(audit, set(audit["attacks"]) - {"idlg"})
    waived = "idlg" in audit["policy"].get("waive", ())
    assert verdict.outcome != "within policy" or waived
    if verdict.outcome == "inconclusive" and verdict.settings[0].done:
        assert any(reason.names == ("idlg",) for reason in verdict.reasons) != waived
