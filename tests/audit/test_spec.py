from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest

from leakscope.attacks import DLG
from leakscope.audit import DEFAULT_SPEC, AuditSpec, SpecError, load_spec, parse_yaml, read_yaml
from leakscope.audit.spec import DEFAULT_SPEC as DIRECT
from leakscope.contracts.knowledge import Knowledge
from leakscope.federation import FedAvg, Vertical

SMALL = {"model": "logistic", "data": "tiles"}


def spec(**changes: Any) -> AuditSpec:
    return AuditSpec.parse({**SMALL, **changes})


def problems(**changes: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        spec(**changes)
    return caught.value.problems


def test_default_spec_is_valid_and_complete() -> None:
    checked = AuditSpec.parse(DEFAULT_SPEC)
    assert DIRECT is DEFAULT_SPEC
    assert [part.name for part in checked.defenses] == ["none", "gradient-noise", "gradient-pruning"]
    assert checked.defenses[0].identity() == "none"
    assert checked.defenses[1].instance.sigma == 0.01
    assert len(checked.attacks) >= 1


def test_names_of_every_spelling_mean_the_same() -> None:
    spellings = ["gradient-pruning", "gradient_pruning", "GradientPruning"]
    assert len({spec(defenses=[name]).defenses[0].identity() for name in spellings}) == 1
    assert spec(protocols="FedSGD").protocols[0].name == "fedsgd"
    assert spec(knowledge="honest-server").knowledge == spec(knowledge="honest_server").knowledge


def test_forms_of_a_part() -> None:
    given = FedAvg(epochs=2, batch_size=1, lr=0.1)
    forms = [
        {"fedavg": {"epochs": 2, "batch_size": 1, "lr": 0.1}},
        {"name": "fedavg", "options": {"epochs": 2, "batch_size": 1, "lr": 0.1}},
        given,
    ]
    assert {spec(protocols=[form]).protocols[0].identity() for form in forms} == {repr(given)}


def test_published_settings_by_name() -> None:
    part = spec(attacks=[{"dlg": {"preset": "paper", "iterations": 5}}]).attacks[0]
    assert part.instance == DLG.preset("paper", iterations=5)
    assert "attacks[0]: dlg: expected one of" in problems(attacks=[{"dlg": {"preset": "papper"}}])[0]
    assert "unknown setting 'preset'" in problems(protocols=[{"fedsgd": {"preset": "paper"}}])[0]


def test_seeds_are_a_list_or_a_count() -> None:
    assert spec(seeds=3).seeds == [0, 1, 2]
    assert spec(seeds=[5, 7]).seeds == [5, 7]
    for wrong in (0, [], [1, 1], ["a"], True, [-1], [0.5]):
        assert problems(seeds=wrong)[0].startswith("seeds: expected")


def test_yaml_pitfalls_are_bridged() -> None:
    checked = parse_yaml(
        """
        model: logistic
        data: tiles
        protocols: [{fedavg: {lr: 1e-3}}]
        knowledge: {labels: yes}
        """
    )
    assert checked.protocols[0].instance.lr == 1e-3
    assert Knowledge(**checked.knowledge).labels == "yes"


def test_every_problem_is_told_once() -> None:
    found = problems(
        model="convnett",
        exampels=4,
        examples=5,
        batch=2,
        protocols=["fedsgdd", {"fedavg": {"epochs": 0, "lr": 0.1}}, {"fedavg": {"epochz": 1}}],
        defenses=[{"gradient-noise": {"sigma": "much"}}],
        attacks=["no-such-attack"],
        policy={"max_psnr": "high"},
        threads=0,
        executor="cloud",
        timeout=5,
        device=3,
    )
    told = "\n".join(found)
    for expected in (
        "model: expected one of",
        "did you mean convnet",
        "exampels: unknown key: expected one of",
        "did you mean examples",
        "examples: expected a multiple of batch (2), got 5",
        "protocols[0]: expected one of fedsgd, fedavg, secure-aggregation, vertical, got 'fedsgdd'; "
        "did you mean fedsgd?",
        "protocols[1]: fedavg: epochs: expected a whole number of at least 1, got 0",
        "protocols[2]: fedavg: unknown setting 'epochz'",
        "defenses[0]: gradient-noise: sigma: expected",
        "attacks[0]: expected one of",
        "policy: max_psnr: expected a number",
        "threads: expected",
        "executor: unknown executor 'cloud': expected one of serial, processes, ray, or package.module:Name for",
        "device: expected",
    ):
        assert expected in told, (expected, told)
    assert all("\n" not in line for line in found)


def test_wrong_shapes_of_a_spec() -> None:
    assert "expected a value, got nothing" in problems(model=None)[0] or "model" in problems(model=None)[0]
    with pytest.raises(SpecError, match="expected a mapping"):
        AuditSpec.parse([1])
    with pytest.raises(SpecError, match="not valid YAML"):
        parse_yaml("a: [")
    with pytest.raises(SpecError, match="expected a value"):
        parse_yaml("")
    assert "unknown key 'instance'" in problems(model={"name": "logistic", "instance": 1})[0]
    assert "both mean and std" in problems(data={"name": "tiles", "mean": [0.5]})[0]
    assert "expected a mapping of settings" in problems(attacks=[{"dlg": 3}])[0]
    assert "got the keys" in problems(protocols=[{"fedsgd": {}, "fedavg": {}}])[0]
    assert "at least one" in problems(attacks=[])[0]
    assert "more than once" in problems(defenses=["none", None])[0]
    assert "executor 'processes'" in problems(timeout=3)[0]


def test_objects_need_a_repr_that_tells_all() -> None:
    class Vague(doubles.Guess):
        __repr__ = object.__repr__

    assert "repr tells all" in problems(attacks=[Vague()])[0]
    assert "name of an attack or an attack object" in problems(attacks=[object()])[0]
    assert "name of a protocol" in problems(protocols=[3])[0]
    assert "torch.nn.Module" in problems(model=3)[0]
    assert "pair (x, y)" in problems(data=3)[0]


def test_unregistered_attack_has_a_name() -> None:
    part = spec(attacks=[doubles.Quotient()]).attacks[0]
    assert (part.name, part.identity()) == ("quotient", "Quotient(ignore_defense=False, slow=0.0)")


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: logistic\ndata: tiles\nattacks: [nonsense]\n")
    with pytest.raises(SpecError, match=r"spec.yaml: cannot be used:\n  - attacks\[0\]"):
        load_spec(path)
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec(tmp_path / "absent.yaml")


def test_training() -> None:
    assert spec().training is None
    assert spec().normalised()["training"] is None
    checked = parse_yaml(
        """
        model: logistic
        data: tiles
        training: {rounds: 5, split: dirichlet, clients: 20, alpha: 1e-1, lr: 4e-3}
        """
    )
    training = checked.training
    assert training is not None
    assert (training.rounds, training.clients, training.alpha, training.lr) == (5, 20, 0.1, 0.004)
    assert (training.clients_per_round, training.epochs, training.batch_size, training.seed) == (10, 1, 10, 0)
    told = training.describe()
    assert told.startswith("round 5; 20 clients, split dirichlet with alpha 0.1, 10 a round; epochs 1, batch size 10")
    assert AuditSpec.parse(checked.normalised()) == checked
    assert "one client a group" in (spec(training={"rounds": 1, "split": "group"}).training or training).describe()


def test_training_that_cannot_be_is_told_with_the_rest() -> None:
    found = problems(
        training={"rounds": 0, "split": "writer", "clients": 0, "alpha": 0, "lr": -1, "roundz": 3, "epochs": 1.5},
        batch=0,
    )
    told = "\n".join(found)
    for expected in (
        "training.rounds: expected greater than or equal to 1, got 0",
        "training.split: expected 'group', 'dirichlet' or 'iid', got 'writer'",
        "training.clients: expected",
        "training.alpha: expected greater than 0, got 0",
        "training.lr: expected greater than 0, got -1",
        "training.epochs: expected",
        "training.roundz: unknown key: expected one of rounds, split",
        "did you mean rounds",
        "batch: expected",
    ):
        assert expected in told, (expected, told)
    assert problems(training={}) == ["training.rounds: expected a value, got nothing"]
    assert "training: expected" in problems(training=5)[0]
    both = problems(training={"rounds": 2, "split": "group", "clients": 3, "alpha": 0.5})
    assert both == [
        "training: clients: expected none with split group, where each group is a client, got 3; "
        "alpha: expected with split dirichlet only, got 0.5"
    ]
    assert problems(training={"rounds": 2, "split": "dirichlet"}) == [
        "training: clients: expected how many with split dirichlet, got nothing; "
        "alpha: expected a number with split dirichlet, got nothing"
    ]


def test_normalised_spec_parses_to_itself() -> None:
    plain = spec(seeds=2, defenses=["none", {"gradient-noise": {"sigma": 0.1}}]).normalised()
    assert AuditSpec.parse(plain).normalised() == plain


def test_spec_module_is_light() -> None:
    code = "import sys, leakscope.audit.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=doubles.environment()).returncode == 0


def test_standard_attacks_follow_the_protocols_and_what_is_listed_besides() -> None:
    def names(**changes: Any) -> list[str]:
        return [part.name for part in AuditSpec.parse({"model": "convnet", "data": "tiles", **changes}).attacks]

    fedavg = {"fedavg": {"epochs": 2}}
    assert "sme" not in names()
    assert "sme" in names(protocols=["fedsgd", fedavg])
    assert names(protocols=[fedavg], attacks=["standard", {"sme": {"iterations": 5}}]).count("sme") == 1
    assert names(attacks=["standard", "Inverting_Gradients"]).count("inverting-gradients") == 1
    assert "robbing-the-fed" in names(knowledge="malicious_server")
    assert "robbing-the-fed" not in names(knowledge="adaptive_server")


VERTICAL = {"vertical": {"batch_size": 2}}


def test_vertical_protocols_have_attacks_of_their_own() -> None:
    def names(*protocols: Any, attacks: Any = "standard") -> list[str]:
        return [part.name for part in spec(protocols=list(protocols), attacks=attacks).attacks]

    standard = ["linear-layer", "cocktail-party", "head-first", "gauss-newton", "inverting-gradients", "idlg"]
    assert names(VERTICAL) == ["cafe"]
    assert names(VERTICAL, Vertical(batch_size=3)) == ["cafe"]
    assert names("fedsgd", VERTICAL) == [*standard, "cafe"]
    assert names(VERTICAL, "fedavg") == [*standard, "sme", "cafe"]
    assert names("fedsgd") == standard
    assert names(VERTICAL, attacks=["standard", {"cafe": {"iterations": 5}}]) == ["cafe"]
    assert "protocols[0]" in "".join(problems(protocols=["vertica"]))


def test_the_default_knowledge_follows_the_protocols() -> None:
    def knowledge(**changes: Any) -> Knowledge:
        return Knowledge(**spec(**changes).knowledge)

    assert knowledge() == Knowledge.honest_server
    assert knowledge(protocols=[VERTICAL]) == Knowledge.vertical_server
    assert knowledge(protocols=[VERTICAL], knowledge=None) == Knowledge.vertical_server
    assert knowledge(protocols=["fedsgd", VERTICAL]) == Knowledge.honest_server
    # What is said counts, even where it takes something away: secure shuffling.
    assert knowledge(protocols=[VERTICAL], knowledge="honest_server") == Knowledge.honest_server
    assert knowledge(protocols=[VERTICAL], knowledge={"batch_indices": False}) == Knowledge.eavesdropper
    assert knowledge(knowledge="vertical-server") == Knowledge.vertical_server
    (told,) = problems(knowledge="vertical")
    names = "eavesdropper, honest_server, adaptive_server, informed_server, vertical_server, malicious_server, full"
    assert f"expected one of {names}" in told


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 30)
)


@pytest.mark.parametrize(
    "text, words",
    [
        (LAUGHS, "line 5: with its aliases written out expected at most 5,000 values"),
        ("[" * 100_000, "at most 40 lists and mappings in each other"),
        ("a: &a [*a]", "does not hold itself"),
        ("- x\n" * 10_000, "expected at most 5,000 values"),
        ("x" * 200_000, "expected at most 131,072 bytes, got 200,000"),
        ("a: !!python/object/apply:os.system ['true']", "got the tag !!python/object/apply:os.system"),
        ("a: !!binary zzz", "got the tag !!binary"),
        ("a:\n b: !!set {x}", "line 2: expected text, numbers, lists and mappings, got the tag !!set"),
        ("a: !!timestamp 2020-13-45", "got the tag !!timestamp"),
        ("a: !mine x", "got the tag !mine"),
        ("batch: 1\nbatch: 2", "line 2: expected each key once, got 'batch' again"),
        ("1: x", "expected text as a key, quoted where it reads as something else, got '1'"),
        ("yes: x", "got 'yes'"),
        ("? [a]\n: b", "got a list or mapping"),
        ("a: " + "9" * 400, "expected numbers of at most 63 bits"),
        ("a: " + "9" * 5000, "not valid YAML: a value cannot be read"),
        ("a: !!int x", "a value cannot be read"),
        ("a: \x00", "not valid YAML"),
    ],
    ids=lambda value: value[:20],
)
def test_yaml_that_no_spec_needs(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)) as caught:
        read_yaml(text)
    assert len(str(caught.value)) < 700


def test_what_yaml_has_for_people_still_works() -> None:
    text = "base: &b {iterations: 5}\nmine:\n  <<: *b\n  lr: 1e-3\nday: 2020-01-01"
    expected = {"base": {"iterations": 5}, "mine": {"iterations": 5, "lr": 0.001}, "day": "2020-01-01"}
    assert read_yaml(text) == expected


def test_thousands_of_problems_are_counted() -> None:
    with pytest.raises(SpecError, match=r"attacks\[39\].*\n  - and 960 more$") as caught:
        spec(attacks=[0] * 1000)
    assert len(caught.value.problems) == 1000


def test_what_a_policy_waives_is_an_attack_of_the_table_in_any_spelling() -> None:
    spec = AuditSpec.parse({**DEFAULT_SPEC, "policy": {"waive": ["Head_First", "sme"]}})
    assert spec.policy.waive == ("head-first", "sme")
    assert spec.normalised()["policy"]["waive"] == ["head-first", "sme"]
    with pytest.raises(SpecError, match=r"policy: expected one of linear-layer, .*, got 'head'"):
        AuditSpec.parse({**DEFAULT_SPEC, "policy": {"waive": ["head"]}})
    with pytest.raises(SpecError, match="waive: expected"):
        AuditSpec.parse({**DEFAULT_SPEC, "policy": {"waive": 3}})
