"""The section of a defence study: present where something was trained, honest about what was not tested."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from fabricate import setting
from torch import nn

from json_schema import violations
from leakscope.audit import audit
from leakscope.cli.console import make_console, print_study
from leakscope.report.defense_study import front_plot
from leakscope.report.export import audit_document, csv_text, json_text, schema, study_table
from leakscope.results.defense_study import StudyRow


def _plot(*marks: tuple[str, float, float]) -> str:
    """The plot of settings by name, utility and leakage."""
    rows = [
        StudyRow(
            **{"protocol": "P()", "defense": name, "outcome": "", "known": True, "on_front": True},
            **{"utility": utility, "utility_interval": (utility, utility)},
            **{"leakage": leakage, "leakage_interval": (leakage - 1, leakage + 1)},
        )
        for name, utility, leakage in marks
    ]
    named = {row.scenario: setting(row.defense, row.protocol, "noise") for row in rows}
    return str(front_plot(rows, named, identity="f", utility="accuracy", share=True))


def test_the_plot_has_a_mark_a_setting_and_labels_that_cover_nothing() -> None:
    drawing = ElementTree.fromstring(_plot(*((f"S{n}", 0.5 + 0.001 * n, 20.0 + 0.1 * n) for n in range(12))))
    groups = [g for g in drawing.iter("g") if "setting" in g.get("class", "")]
    assert len(groups) == 12
    told = "S2 noise: leaks 20.2 dB (19.2 to 21.2) at utility 0.502 (0.502 to 0.502), front."
    assert told == groups[2].findtext("title")
    assert told in str(drawing.findtext("desc"))
    labels = [next(g.iter("text")) for g in groups]
    boxes = [(float(t.get("x", 0)), float(t.get("y", 0)), 8.0 * len(str(t.text))) for t in labels]
    for place, one in enumerate(boxes):
        for other in boxes[:place]:
            assert abs(one[1] - other[1]) > 12.9 or one[0] >= other[0] + other[2] or other[0] >= one[0] + one[2]


def test_the_plot_leaves_out_what_is_not_finite_and_escapes_names() -> None:
    drawing = _plot(("S1", math.nan, 20.0), ("<b>", 0.5, 10.0))
    assert drawing.count('class="setting') == 1
    assert "<b>" not in drawing
    ElementTree.fromstring(drawing)
    assert "nothing to draw" in _plot(("S1", math.nan, 20.0))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Any:
    draws = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 2
    x = 0.3 * torch.rand(60, 1, 4, 4, generator=draws) + 0.4 * y[:, None, None, None]
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=draws))
    return audit(
        model=net,
        data=(x, y),
        examples=2,
        defenses=["none", {"gradient-pruning": {"fraction": 0.5}}, {"gradient-noise": {"sigma": 5.0}}],
        attacks=[
            "linear-layer",
            {"idlg": {"iterations": 20}},
            {"idlg": {"iterations": 20, "ignore_defense": True}},
        ],
        knowledge="adaptive_server",
        findings=False,
        progress=False,
        utility={"rounds": 20, "batch_size": 8, "learning_rates": [0.3], "seeds": 2},
        out=tmp_path_factory.mktemp("study") / "run",
    )


def test_the_page_has_the_study(study: Any) -> None:
    page = study.report().read_text("utf-8")
    section = page[page.index('<section id="study">') : page.index("</section>", page.index('<section id="study">'))]
    assert "on the front" in section
    assert "What to choose" in section
    assert "What knowing the defence is worth" in section
    assert "nothing to ignore" in section
    assert re.findall(r'<g class="setting (\w+)"><title>S1', section)
    assert "<img" not in section  # the data is private
    assert '<a href="#study">' in page


def test_documents_for_machines_hold_it(study: Any) -> None:
    document = audit_document(study.store, study.verdict, {})
    assert violations(document, schema("audit")) == []
    told = document["study"]
    assert [row["setting"] for row in told["rows"]] == ["S1", "S2", "S3"]
    assert {worth["setting"] for worth in told["worth_of_knowing"]} == {"S2", "S3"}
    assert told["rows"][0]["training"]["seeds"] == [0, 1]
    lines = csv_text(study_table(study.study, study.verdict)).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("setting,protocol,defense,outcome,leakage,leakage_low,leakage_high")
    study.report()
    assert (study.directory / "defense-study.csv").read_text("utf-8").splitlines() == lines
    assert json_text(document)


def test_the_console_tells_it(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    print_study(study.study, study.verdict, make_console())
    told = capsys.readouterr().out
    assert "Defence study" in told
    assert "Knowing the defence of S2 is worth" in " ".join(told.split())


def test_without_training_there_is_no_section(study: Any, tmp_path: Any) -> None:
    plain = audit(
        model=nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
        data=(torch.rand(6, 1, 2, 2, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 2),
        examples=1,
        attacks=["linear-layer"],
        findings=False,
        controls=False,
        progress=False,
        out=tmp_path / "plain",
    )
    assert 'id="study"' not in plain.report().read_text("utf-8")
    assert not (tmp_path / "plain" / "defense-study.csv").exists()
    assert audit_document(plain.store, plain.verdict, {})["study"] is None
