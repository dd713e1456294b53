"""What a defence costs: curves of the same training, and the loss at the end of it against that without a defence."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fabricate import NOISE, PRUNING, SGD, VERTICAL, cost, fabricate, finding, setting

from leakscope.report.findings import costs_section
from leakscope.report.page import render
from leakscope.results import FindingRow

SETTINGS = [setting(f"S{n}", VERTICAL, defense) for n, defense in enumerate(("none", NOISE, PRUNING), start=1)]


def trained(defense: str, content: Any, *, protocol: str = VERTICAL, **changes: Any) -> FindingRow:
    return finding("cost", content, (protocol, defense), **changes)


def section(*findings: FindingRow) -> dict[str, Any]:
    (entry,) = costs_section(findings, SETTINGS)
    return entry


def test_no_training_is_no_section(tmp_path: Path) -> None:
    assert costs_section([finding("floor", {}, (VERTICAL, "none"))], SETTINGS) == []
    assert costs_section([trained("none", cost(0.5), protocol=SGD)], SETTINGS) == []
    assert "What each defence costs" not in render(fabricate(examples=1, seeds=1).write(tmp_path / "audit"))


def test_the_last_loss_is_compared_with_that_of_no_defence() -> None:
    entry = section(
        trained("none", cost(0.46)), trained(NOISE, cost(2.69)), trained(PRUNING, cost(1.15, last_tenth=None))
    )
    assert [line["setting"].name for line in entry["lines"]] == ["S1", "S2", "S3"]
    assert [line["after"] for line in entry["lines"]] == ["0.460", "2.690", "1.150"]
    assert [line["ratio"] for line in entry["lines"]] == ["–", "× 5.85", "× 2.50"]
    assert [line["small"] for line in entry["lines"]] == ["0.460 at last", "2.690 at last", ""]
    assert [line["colour"] for line in entry["lines"]] == ["c0", "c1", "c2"]
    assert entry["rounds"] == "100 rounds"
    assert entry["notes"] == []


def test_without_an_undefended_training_there_is_no_ratio() -> None:
    (line,) = section(trained(NOISE, cost(1.0)))["lines"]
    assert line["ratio"] == "–"
    assert line["after"] == "1.000"


def test_a_training_that_learns_nothing_is_no_yardstick() -> None:
    assert section(trained("none", cost(2.2)))["notes"] == [
        "Even without a defence the loss hardly falls in these rounds, so the ratios say little."
    ]
    assert section(trained("none", cost(2.0)), trained(NOISE, cost(2.25)))["notes"] == []


def test_the_chart_has_a_line_a_defence_in_the_order_of_the_table() -> None:
    tree = ElementTree.fromstring(section(trained("none", cost(0.46)), trained(NOISE, cost(1.15)))["drawing"])
    names = [str(node.text) for node in tree.iter("title")][1:]
    assert [name.partition(":")[0] for name in names] == ["S1 none", f"S2 {NOISE}"]
    ends = [line.get("points", "").split()[-1].split(",") for line in tree.iter("polyline")]
    assert float(ends[0][1]) > float(ends[1][1]), "a lower loss lies lower"


def test_a_training_that_fails_does_not_flatten_the_others() -> None:
    wild = cost(1e9, points=[[1.0, 2.2], [50.0, 1e6], [99.0, 1e9]])
    entry = section(trained("none", cost(0.46)), trained(NOISE, wild))
    tree = ElementTree.fromstring(entry["drawing"])
    first = [float(pair.split(",")[1]) for pair in next(tree.iter("polyline")).get("points", "").split()]
    assert max(first) - min(first) > 40
    assert "and more at the edge" in entry["drawing"]
    assert entry["lines"][1]["ratio"] == "× 2.2e+09"


def test_each_protocol_has_a_chart() -> None:
    other = VERTICAL.replace("0.1", "0.2")
    settings = [*SETTINGS, setting("S4", other, "none")]
    entries = costs_section([trained("none", cost(0.4)), trained("none", cost(0.8), protocol=other)], settings)
    assert [[line["setting"].name for line in entry["lines"]] for entry in entries] == [["S1"], ["S4"]]
    identities = [re.search(r'aria-labelledby="([^"]*)"', entry["drawing"]) for entry in entries]
    assert len({found[1] for found in identities if found}) == 2


def test_reasons_refusals_and_damage() -> None:
    entry = section(trained("none", {"reason": "its training diverged"}))
    assert entry["notes"] == ["S1: not computed: its training diverged"]
    assert entry["drawing"] == ""
    assert entry["lines"][0]["colour"] == ""
    failed = section(trained("none", None, status="failed", error="MemoryError: 3 GB\nTraceback"))
    assert failed["notes"] == ["S1: not computed: MemoryError: 3 GB"]
    assert failed["lines"][0]["after"] == "–"
    for damage in ({"points": "x"}, {"points": [[1], None, [None, "x"]]}, {"points": [], "after": "x", "rounds": True}):
        assert section(trained("none", {**cost(0.5), **damage}))["drawing"] == ""
    flat = section(trained("none", cost(0.5, points=[[1.0, 0.5]])))
    assert "nan" not in str(flat["drawing"])
    assert not math.isnan(float(flat["lines"][0]["after"]))


def test_the_page_shows_costs_and_rounds(tmp_path: Path) -> None:
    settings = ((VERTICAL, "none"), (VERTICAL, NOISE), (SGD, "none"))
    text = render(fabricate(settings=settings, level=(0.02, 0.3, 0.1), examples=1, seeds=1).write(tmp_path / "audit"))
    start = text.index('<section id="costs">')
    part = " ".join(re.sub(r"<[^>]*>", " ", text[start : text.index("</section>", start)]).split())
    assert "S2 GradientNoise sigma=0.01 2.250 1.150 1.150 at last × 2.50" in part
    assert "S3" not in part, "FedSGD does not train"
    start = text.index('<section id="limits">')
    part = " ".join(re.sub(r"<[^>]*>", " ", text[start : text.index("</section>", start)]).split())
    assert "S1, S2 Fabricated conclusion." in part
    assert "3 for bank, 1 for shop" in part
    assert 'href="#costs"' in text
    assert 'href="#limits"' in text
