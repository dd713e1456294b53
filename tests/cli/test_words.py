"""What is typed in one word, what can be listed, and what the help says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from leakscope.attacks import ATTACKS
from leakscope.audit import EXECUTORS, AuditSpec
from leakscope.cli import app
from leakscope.cli.output import parse_part, parse_parts, parse_shape
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.settings import settings_of
from leakscope.contracts.task import TASKS
from leakscope.federation import PROTOCOLS
from leakscope.results import Store


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")

    def run(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, (done.output, done.exception)
        return done.output

    return run


@pytest.mark.parametrize("name", ["dlg", "inverting-gradients", "InvertingGradients", "cafe"])
def test_every_setting_of_an_attack_is_listed_with_its_sentence(say: Any, name: str) -> None:
    told = say("list", "attacks", name)
    settings = settings_of(ATTACKS.find(name).target)
    assert len(settings) > 3
    for setting in settings:
        (line,) = [line for line in told.splitlines() if line.split()[:1] == [setting.name]]
        cells = [cell.strip() for cell in re.split(r" {2,}", line.strip())]
        default = "required" if setting.required else repr(setting.default)
        assert cells == [setting.name, setting.expected, default, setting.help], line
        assert setting.help, f"{setting.name} says nothing of itself"


@pytest.mark.parametrize("what, table", [("tasks", TASKS), ("protocols", PROTOCOLS), ("executors", EXECUTORS)])
def test_tables_are_listed_with_one_line_each(say: Any, what: str, table: Any) -> None:
    lines = say("list", what).splitlines()
    assert [line.split()[0] for line in lines] == list(table)
    for line, entry in zip(lines, table.values(), strict=True):
        assert entry.summary in line


def test_settings_of_other_kinds(say: Any) -> None:
    assert "How far an output is from its target." in say("list", "tasks", "regression")
    assert "The client's learning rate." in say("list", "protocols", "fedavg")
    assert "Share of the entries set to zero." in say("list", "defenses", "gradient-pruning")
    assert "activation" in say("list", "models", "one-layer-cnn")
    assert "split" in say("list", "data", "mnist")
    assert "in this process, one job after another" in say("list", "executors", "serial")
    assert "how often the label" in say("list", "papers", "idlg/labels")


@pytest.mark.parametrize("words, told", [(("attacks", "dgl"), "did you mean dlg?"), (("nonsense",), "nonsense")])
def test_what_cannot_be_listed_is_told(words: tuple[str, ...], told: str) -> None:
    done = CliRunner().invoke(app, ["list", *words])
    assert done.exit_code != 0
    assert told in f"{done.output}{done.exception}"


@pytest.mark.parametrize(
    "text, part",
    [
        ("dlg", "dlg"),
        ("dlg:iterations=500", {"dlg": {"iterations": 500}}),
        ("fedavg:epochs=5,batch_size=10,lr=4e-3", {"fedavg": {"epochs": 5, "batch_size": 10, "lr": 0.004}}),
        ("fedavg: epochs=5, shuffle=false", {"fedavg": {"epochs": 5, "shuffle": False}}),
        ("sme:optimizer=adam,restarts=null", {"sme": {"optimizer": "adam", "restarts": None}}),
        ("dlg:preset=paper", {"dlg": {"preset": "paper"}}),
        ("mine:Attack", "mine:Attack"),
        ("my.package.parts:Attack", "my.package.parts:Attack"),
        ("mine:Attack:steps=2", {"mine:Attack": {"steps": 2}}),
        ("my.parts:Outer.Inner:steps=2,name=a", {"my.parts:Outer.Inner": {"steps": 2, "name": "a"}}),
        ("mine:loss:targets=given", {"mine:loss": {"targets": "given"}}),
        ("gauss-newton:start=a=b", {"gauss-newton": {"start": "a=b"}}),
    ],
)
def test_a_part_in_one_word(text: str, part: Any) -> None:
    assert parse_part(text) == part


@pytest.mark.parametrize("text", ["", "dlg=3", "dlg,idlg", "dlg:iterations=3,tv", "dlg:iterations=3,=2", "=3", ":a=1"])
def test_what_is_no_part_is_told_as_it_was_typed(text: str) -> None:
    with pytest.raises(ValueError, match="expected name:key=value,key=value") as caught:
        parse_part(text)
    assert repr(text) in str(caught.value)


def test_several_parts_and_none() -> None:
    assert parse_parts(["none", "gradient-noise:sigma=1e-2"]) == ["none", {"gradient-noise": {"sigma": 0.01}}]
    assert parse_parts(None) is parse_parts([]) is None
    assert parse_shape("3X32x32") == (3, 32, 32)


def test_the_help_of_audit_is_plain_text_and_says_what_the_spec_says(say: Any) -> None:
    told = " ".join(say("audit", "--help").split())
    for markdown in ("`", "](", ".md", "**"):
        assert markdown not in told
    for option in ("--task", "--knowledge", "--findings", "--no-findings", "--attack", "--defense", "--max-psnr"):
        assert option in told
    for key in ("workers", "threads", "device", "batch"):
        sentence = str(AuditSpec.model_fields[key].description).replace("`", "")
        assert sentence[1:] in told, sentence


@pytest.mark.parametrize(
    "command, argument",
    [
        ("audit", "[SPEC] YAML spec; without it the options, or the default audit."),
        ("attack", "[OBSERVATION] A saved observation (.safetensors with a .json beside it); or the files below."),
        ("plan", "[SPEC]"),
        ("limits", "[SPEC] YAML spec of an audit"),
        ("reproduce", "TABLE PAPER/TABLE (leakscope list papers)."),
        ("list", "What to list."),
        ("report", "DIRECTORY Folder of an audit, or of recorded updates."),
        ("compare", "SECOND Folder of another audit."),
    ],
)
def test_help_has_no_stray_backslash_and_a_sentence_for_each_argument(say: Any, command: str, argument: str) -> None:
    told = say(command, "--help")
    assert "\\" not in told
    assert argument in " ".join(told.partition("Arguments:")[2].split())


def test_knowledge_is_typed_by_name(say: Any, tmp_path: Any) -> None:
    words = ["audit", "--model", "logistic", "--data", "tiles", "--examples", "1", "--serial", "--no-findings"]
    words += ["--attack", "linear-layer", "--defense", "gradient-noise:sigma=0.1"]
    say(*words, "--knowledge", "adaptive_server", "--out", str(tmp_path / "out"), code=5)
    with Store.open(tmp_path / "out") as store:
        assert Knowledge(**store.meta("spec")["knowledge"]) == Knowledge.adaptive_server
        assert store.rows()[0].job.knowledge["defense"] is True
        assert store.findings() == []
    done = CliRunner().invoke(app, [*words, "--knowledge", "adaptiv", "--out", str(tmp_path / "other")])
    assert "did you mean adaptive_server?" in str(done.exception)
    assert not (tmp_path / "other").exists()
