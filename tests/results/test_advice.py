"""What a verdict says to do next: changes of the spec that were not made before, and an end where none is left."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from leakscope.attacks import ATTACKS
from leakscope.audit.spec import AuditSpec
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.reconstruction import FLAG_REMEDIES
from leakscope.results import Row, Verdict, judge
from leakscope.results.advice import _TABLE, _WAYS, Adviser, Asked
from leakscope.results.policy import Policy
from leakscope.results.reasons import Reason, Remedy, Scenario, because
from leakscope.results.scale import LOST, Scale, read_scales
from verdict_rows import NOISE, SGD, control, make, planted

HONEST = dataclasses.asdict(Knowledge.honest_server)
STANDARD = ["linear-layer", "head-first", "cocktail-party", "inverting-gradients"]
AVG = "FedAvg()"


def asked(attacks: list[Any] | None = None, **facts: Any) -> Asked:
    spec = {"knowledge": {**HONEST, **facts.pop("knowledge", {})}, "dtype": facts.pop("dtype", None)}
    spec["attacks"] = [_part(one) for one in (STANDARD if attacks is None else attacks)]
    plan = {"standard": {SGD: STANDARD, AVG: STANDARD}, "kinds": {SGD: "gradient", AVG: "weight_delta"}, **facts}
    return Asked.read(spec, plan, Policy())


def _part(one: Any) -> dict[str, Any]:
    name, options = (one, {}) if isinstance(one, str) else next(iter(one.items()))
    return {"name": name, "options": options}


def changes(reason: Reason, known: Asked, protocol: str = SGD) -> list[Any]:
    settled = Adviser(known, {}).settle(dataclasses.replace(reason, scenario=Scenario(protocol, "none")))
    return [] if settled.remedy is None else [remedy.changes for remedy in settled.remedy.alternatives]


def test_a_remedy_never_names_what_was_done() -> None:
    """A batch behind cocktail-party was told to add cocktail-party; a client whose recipe is known, to grant it."""
    mixture = because("flag", *FLAG_REMEDIES["mixture"], names=("mixture",))
    assert changes(mixture, asked(["linear-layer"])) == [{"attacks": ["head-first"]}]
    assert changes(mixture, asked(["head-first"])) == [{"attacks": ["cocktail-party"]}]
    assert changes(mixture, asked(["head-first", "cocktail-party"])) == []
    unexplained = because("unexplained", "grant-client", count=1, total=1)
    (granted,) = changes(unexplained, asked(knowledge={"local_epochs": False}), AVG)
    assert granted["knowledge"] == HONEST
    (order,) = changes(unexplained, asked(), AVG)
    assert (order["knowledge"]["batch_order"], order["knowledge"]["labels"]) == (True, "yes")
    assert changes(unexplained, asked(knowledge={"batch_order": True, "labels": "yes"}), AVG) == []


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("know-defence", {}, {"knowledge": {"defense": True}}),
        ("grant-labels", {}, {"knowledge": {"labels": "yes"}}),
        ("more-steps", {}, {"attacks": [{"head-first": {"iterations": 1000}}]}),
        ("more-restarts", {}, {"attacks": [{"inverting-gradients": {"restarts": 4}}]}),
        ("lower-learning-rate", {}, {"dtype": "float64"}),
        ("standard-attacks", {"attacks": ["dlg"]}, {"attacks": STANDARD}),
        ("keep-controls", {"left_out": ["controls"]}, {"left_out": []}),
        ("label-attack", {}, {"attacks": ["idlg"]}),
        ("grant-recipe", {}, {"attacks": ["sme"]}),
    ],
)
def test_a_remedy_is_a_change_that_can_be_made_once(kind: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    assert changes(because("no-result", kind), asked(**before)) not in ([], [None])
    assert changes(because("no-result", kind), asked(**after)) == []


def test_more_steps_are_more_than_any_search_has_had() -> None:
    weak = because("weak-on-easy-case", "more-steps")
    target = _TABLE["search"]["gradient"]["head-first"]["iterations"]
    assert changes(weak, asked([{"head-first": {"iterations": target - 1}}]))
    assert not changes(weak, asked([{"head-first": {"iterations": 3}}, {"head-first": {"iterations": target}}]))


def test_a_job_that_fails_again_is_not_tried_a_third_time() -> None:
    failed = because("job-failed", "retry", count=1)
    assert changes(failed, asked()) == [{}]
    assert changes(failed, asked(failed_again=["key"])) == []
    assert changes(because("attempts-missing", "again", count=1), asked(failed_again=["key"])) == [{}]


def test_a_damaged_spec_is_no_crash_and_counts_for_nothing() -> None:
    spec = {"knowledge": {"labels": 3}, "attacks": [{"name": "head-first", "options": {"iterations": "x"}}, 7]}
    known = Asked.read({**spec, "batch": "x"}, {"scales": 3, "standard": 4, "kinds": []}, Policy())
    assert (known.knowledge, known.batch, known.has("head-first")) == ({}, 1, True)
    assert changes(because("weak-on-easy-case", "more-steps"), known)


def test_what_an_attack_lacks_is_granted_by_name() -> None:
    error = "MissingKnowledge: SME needs to know learning_rate, batch_order, which this threat model withholds. Grant"
    rows = [make(0, attack="A()", status="refused", error=error), planted(1)]
    (reason,) = [one for one in judge(rows).reasons if one.code == "job-starved"]
    assert reason.names == ("batch_order", "learning_rate")
    (granted,) = changes(reason, asked(knowledge={"learning_rate": False}))
    assert granted["knowledge"] == {**HONEST, "batch_order": True}


def audited(rows: list[Row], plan: dict[str, Any] | None = None, **spec: Any) -> Verdict:
    facts = {"knowledge": HONEST, "attacks": [_part(one) for one in STANDARD], **spec}
    return judge(rows, None, {"kinds": {SGD: "gradient"}, "standard": {SGD: []}, **(plan or {})}, spec=facts)


def test_a_leak_says_what_to_send_instead() -> None:
    scale = {"update": 2.0, "change": 0.0, "sent": 2.0, "cosine": 1.0, "entries": 10_000.0}
    plan = {"scales": [{"protocol": SGD, "defense": "none", **scale}]}
    leak = [make(0, 30.0), control(1), planted(2)]
    told = audited(leak, plan).advice
    assert told is not None
    assert told.changes is not None
    assert (told.kind, told.new_folder, told.changes["knowledge"]["defense"]) == ("defend", True, True)
    noise, (clipping, _), dp_sgd = told.changes["defenses"]
    # The noise of the study in units of the update: 9 times its norm, over 10,000 entries.
    assert noise == {"gradient-noise": {"sigma": pytest.approx(9 * 2.0 / 100)}}
    assert clipping == {"gradient-clipping": {"norm": pytest.approx(0.8)}}
    assert dp_sgd["dp-sgd"]["clip"] * dp_sgd["dp-sgd"]["noise_multiplier"] == pytest.approx(0.18)
    checked = AuditSpec.parse(told.applied_to({"model": "mlp", "data": "tiles"}))
    assert [part.name for part in checked.defenses] == ["gradient-noise", "chain", "dp-sgd"]


def test_noise_that_leaks_is_not_advised_again() -> None:
    weak = "GradientNoise(sigma=0.5, law='gaussian')"
    told = audited([make(0, 30.0, defense=weak, adaptive=True), control(1), planted(2)]).advice
    assert told is not None
    assert told.changes is not None
    assert told.changes["defenses"][0] == {"gradient-noise": {"sigma": 1.5}}


@pytest.mark.parametrize("defense, measured", [("none", 3), ("GradientNoise(sigma=0.5, law='gaussian')", 0)])
def test_costs_of_the_study_are_those_of_its_own_noise(defense: str, measured: int) -> None:
    verdict = audited([make(0, 30.0, defense=defense, adaptive=True), control(1), planted(2)])
    (remedy,) = [reason.remedy for reason in verdict.settings[0].reasons if reason.code == "reconstruction"]
    assert remedy is not None
    assert len(remedy.arguments["measured"]) == measured


def test_a_leak_beside_a_defence_within_the_policy_points_to_it() -> None:
    rows = [make(0, 30.0), make(1, 9.0, defense=NOISE, adaptive=True, residuals=(0.5, 0.5)), control(2), planted(3)]
    verdict = audited(rows, {"settings": [{"protocol": SGD, "defense": d, "jobs": 1} for d in ("none", NOISE)]})
    assert [setting.outcome for setting in verdict.settings] == ["leaks", "within policy"]
    (reason,) = verdict.settings[0].reasons
    assert reason.remedy is not None
    assert (reason.remedy.kind, reason.remedy.arguments["defense"]) == ("use-defence", NOISE)
    assert verdict.advice is not None
    assert verdict.advice.changes is None


def test_a_doubt_without_a_change_left_is_undecidable_and_never_a_pass() -> None:
    rows = [make(0, 9.0, flags=("mixture",)), control(1), planted(2)]
    first, last = audited(rows, attacks=[_part("linear-layer")]), audited(rows)
    assert (first.outcome, last.outcome) == ("inconclusive", "inconclusive")
    assert first.advice is not None
    assert last.advice is not None
    assert (first.advice.kind, last.advice.kind) == ("continue", "undecidable")
    assert [reason.code for reason in last.advice.open] == ["flag"]


def test_the_threat_model_is_changed_last_and_what_was_planned_is_run_first() -> None:
    doubts = [
        because("labels-wrong", "grant-labels"),
        because("flag", "more-steps"),
        because("spared", "without-budget"),
    ]
    adviser = Adviser(asked(), {})
    settled = [adviser.settle(doubt) for doubt in doubts]
    told = [adviser.advise("inconclusive", settled[:count]).changes for count in (1, 2, 3)]
    assert [list(one or ()) for one in told] == [["knowledge"], ["attacks"], ["budget"]]
    limit = adviser.settle(because("identified-above-chance", Remedy("set-limit", {"limit": "max_identification"})))
    told = [adviser.advise("inconclusive", [*settled[:count], limit]).changes for count in (2, 3)]
    assert [list(one or ()) for one in told] == [["policy"], ["budget"]], "no job runs again for a limit"
    known = adviser.settle(because("defence-unknown", "know-defence"))  # without which nothing else is evidence
    assert list(adviser.advise("inconclusive", [*settled[:2], known]).changes or ()) == ["attacks", "knowledge"]


def test_advice_is_silent_without_a_spec_and_where_all_is_well() -> None:
    good = [make(0, 9.0, residuals=(0.0, 0.0)), control(1), planted(2)]
    assert judge(good).advice is None
    told = audited(good).advice
    assert told is not None
    assert (told.kind, told.changes) == ("nothing", None)


def test_the_table_names_attacks_that_exist_and_defences_as_they_were_measured() -> None:
    names = {name for names in _TABLE["attacks"].values() for name in names}
    searches = {name for kind in _TABLE["search"].values() for name in kind}
    assert names | searches | set(_TABLE["restarts"]) <= set(ATTACKS)
    assert set(_TABLE["attacks"]) <= set(_WAYS)
    study = Path(__file__).parents[2] / "benchmarks" / "defense_study.csv"
    with study.open() as stream:
        rows = {row["defense"]: row for row in csv.DictReader(stream)}
    for entries in _TABLE["defenses"].values():
        assert 2 <= len(entries) <= 3
        for entry in entries:
            assert ("study" in entry) == ("points" in entry)
            if "study" in entry:
                row = rows[entry["study"]]
                assert (row["outcome"], float(row["identified"])) == ("within policy", 0.0)
                assert 100 * float(row["cost"]) == pytest.approx(entry["points"], abs=0.06)


def scale(ratio: float, cosine: float = 0.0, sent: float = 1.0) -> Scale:
    return Scale(update=0.17, change=0.17 * ratio, sent=sent, cosine=cosine, entries=1.2e6)


def test_an_update_is_lost_where_the_noise_is_far_larger() -> None:
    """Sigma 0.01 on 1.2 million weights has norm 11, beside an update of 0.17."""
    assert scale(11 / 0.17).lost
    assert scale(LOST).lost
    assert not scale(0.99 * LOST).lost
    assert not scale(LOST, cosine=0.5).lost, "larger, and yet along the update"
    assert scale(LOST, cosine=0.49).lost
    assert scale(1.0, sent=0.0).lost
    assert scale(0.0).unchanged
    assert not scale(1e-9).unchanged
    assert math.isnan(Scale(update=0.0, change=1.0, sent=1.0, cosine=0.0, entries=1).ratio)


def test_scales_are_read_from_a_plan_and_damage_is_no_number() -> None:
    cell = Scenario(SGD, NOISE)
    assert read_scales({"scales": [scale(2.0).as_dict(cell)]}) == {cell: scale(2.0)}
    assert read_scales({}) == {}
    (broken,) = read_scales({"scales": [{"protocol": SGD, "defense": NOISE, "update": "x"}]}).values()
    assert not broken.unchanged
    assert not broken.lost
