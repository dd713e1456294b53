"""The page: complete, self-contained, the same for the same store, and safe against what the store says."""

from __future__ import annotations

import base64
import hashlib
import re
import sqlite3
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fabricate import (
    ANALYTIC,
    AVG,
    DLG,
    GEIPING,
    HOSTILE,
    HOSTILE_ATTRIBUTE,
    NOISE,
    PRUNING,
    SGD,
    Fabricated,
    fabricate,
    floor,
)

from leakscope.metrics import MEASURES
from leakscope.report import render, write_report
from leakscope.report.page import policy_lines
from leakscope.results import Policy, Store, Verdict, judge_store

VOID = {"meta", "img", "input", "br", "line", "circle", "path", "polyline", "link", "hr"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and insists on balanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fabricate(missing=3).write(tmp_path_factory.mktemp("report") / "audit")


@pytest.fixture(scope="module")
def page(store: Path) -> Page:
    return Page(render(store))


def test_same_store_gives_the_same_bytes_wherever_it_lies(store: Path, tmp_path: Path) -> None:
    moved = fabricate(missing=3).write(tmp_path / "elsewhere")
    assert render(store) == render(store) == render(moved)
    assert str(store) not in render(store)


def test_write_report_writes_beside_the_store_or_where_told(store: Path, tmp_path: Path) -> None:
    assert write_report(store) == store / "report.html"
    other = write_report(store, tmp_path / "new" / "page.html")
    assert other.read_bytes() == (store / "report.html").read_bytes()
    assert [file.name for file in other.parent.iterdir()] == ["page.html"]


def test_banner_says_the_verdict_and_what_it_rests_on(page: Page) -> None:
    assert "Leaks above policy" in page.text
    assert re.search(r"Of 99 jobs planned: \d+ done, 3 failed, 16 refused, 3 missing", page.text)
    assert "20 dB or more and at least 3 dB above the zero-information baseline" in page.text
    assert "Example 0 original without a defence with S2" in page.text


def test_page_has_every_section(page: Page) -> None:
    sections = {a.get("id") for a in page.all("section")}
    assert {"threat", "settings", "examples", "curves", "jobs", "glossary", "provenance"} <= sections
    for words in ("It does not know the labels", "15,826", "GradientPruning(fraction=0.9)", "chance 0.5 %"):
        assert words in page.text
    for words in ("Fabricated waves", "leakscope audit spec.yaml --out DIR", "2025-03-01T10:00:00", "2.6.0"):
        assert words in page.text
    assert hashlib.sha256(b"digits").hexdigest() in page.text


def test_failed_and_refused_jobs_show_their_reasons(page: Page) -> None:
    assert page.text.count("the line search produced a NaN objective at step 12") >= 3
    assert page.text.count("the first layer must be linear with a bias") >= 16
    bodies = [a for a in page.all("tbody") if a.get("class") in ("failed", "refused")]
    assert len(bodies) == 19


def test_a_dash_tells_why_there_is_no_number(tmp_path: Path) -> None:
    text = render(fabricate(shape=(1, 32), examples=2).write(tmp_path / "audit"))
    assert "not an image: SSIM needs two spatial axes" in text
    cells = [a for a in Page(text).all("td") if a.get("title") and a.get("data-value") == ""]
    assert any("SSIM needs" in str(a["title"]) for a in cells)
    assert any("the line search" in str(a["title"]) for a in cells)


def test_every_measure_has_an_interval_and_a_baseline(page: Page) -> None:
    start = page.text.index("All measures, with intervals and the zero-information baseline")
    part = page.text[start : page.text.index("Strongest attack for each example")]
    assert part.count("Without information Its interval n") == 3
    for name in ("MSE", "RMSE", "RMSE, max-norm", "PSNR, dB", "SSIM"):
        assert len(re.findall(rf"\b{name} [\d.]+ [\d.]+ to [\d.]+ [\d.]+ [\d.]+ to [\d.]+ 4 ", part)) == 3, name
    assert part.count("Labels 100 % 100 % to 100 % 0 % 0 % to 0 % 4") == 3
    assert len(re.findall(r"Identified \d+ % \d+ % to \d+ % 0 % 0 % to 0 % 4", part)) == 3
    assert part.count("LPIPS – – – – 0") == 3
    told = [a for a in page.all("td") if a.get("title") == "no perceptual network is installed"]
    assert len(told) == 3 * 5
    (box,) = [a for a in page.all("details") if a.get("id") == "all-measures"]
    assert "open" not in box
    # The mean in the table is the mean in the summary above it.
    summary = page.text[page.text.index("Mean PSNR, dB Best") : start]
    for mean in re.findall(r"PSNR, dB ([\d.]+) ", part):
        assert f" {mean} " in summary


def test_measures_without_controls_or_results_are_dashes_with_reasons(tmp_path: Path) -> None:
    built = fabricate(examples=1, seeds=1, failures=False)
    built.jobs[:] = [row for row in built.jobs if not row["job"]["control"]]
    for row in built.jobs:
        if row["job"]["defense"] == NOISE:
            row.update(status="refused", result=None, error="NotApplicable: no")
    page = Page(render(built.write(tmp_path / "audit")))
    assert len(re.findall(r"PSNR, dB [\d.]+ one example – – 1 ", page.text)) == 2
    assert [a for a in page.all("td") if a.get("title") == "no control was measured"]
    assert "No attack gave a result." in page.text


def test_examples_without_a_control_are_counted_beside_the_others(tmp_path: Path) -> None:
    built = fabricate(examples=4, seeds=1, failures=False)
    built.jobs[:] = [row for row in built.jobs if not (row["job"]["control"] and row["job"]["batch"] == 3)]
    page = Page(render(built.write(tmp_path / "audit")))
    assert page.text.count(" 4, without 3 ") == 7 * 3, "every measure but LPIPS, in every setting"
    assert [a for a in page.all("td") if a.get("title") == "no control was measured"]


def test_flags_that_occur_are_explained_and_others_are_not(page: Page) -> None:
    glossary = page.text[page.text.index("Flags in this audit") :]
    assert "restarts disagree" in glossary
    assert "did not converge" not in glossary


def test_page_fetches_nothing_and_its_policy_admits_only_its_own_script(store: Path) -> None:
    text = render(store)
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"url\(|@import", text)
    (policy,) = (a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    script = text[text.index("<script>") + 8 : text.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert f"script-src 'sha256-{digest}'" in policy
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    built = fabricate(examples=2)
    for word in (HOSTILE, HOSTILE_ATTRIBUTE):
        built.meta["model"]["name"] += word
        built.meta["data"]["name"] += word
        built.meta["data"]["credits"] += word
        built.meta["threat_model"].append(word)
        built.meta["versions"][word] = word
        built.meta["spec"][word] = word
    built.meta["model"]["repr"] = "</pre>" + HOSTILE
    built.meta["data"]["class_names"] = [HOSTILE, HOSTILE_ATTRIBUTE]
    for row in built.jobs:
        row["job"]["attack_name"] += HOSTILE_ATTRIBUTE
        row["job"]["attack"] += HOSTILE
        row["job"]["protocol"] = f"Fed{HOSTILE_ATTRIBUTE}(a='{HOSTILE}')"
        if row["job"]["defense"] != "none":
            row["job"]["defense"] += HOSTILE_ATTRIBUTE
        if row["error"]:
            row["error"] = HOSTILE + HOSTILE_ATTRIBUTE + " \x1b[31m\x00"
        if row["result"]:
            row["result"]["flags"] = [HOSTILE, HOSTILE_ATTRIBUTE]
            row["result"]["notes"] = [HOSTILE, "half a letter \ud800"]
            row["result"]["reasons"] = {"lpips": HOSTILE_ATTRIBUTE}
    clean = Page(render(fabricate(examples=2).write(tmp_path / "clean")))
    text = render(built.write(tmp_path / "hostile"))
    page = Page(text)
    assert len(page.all("script")) == 1
    assert "x" not in [a.get("src") for a in page.all("img")]
    assert len(page.all("img")) == len(clean.all("img"))
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "alert(1)" in page.text
    assert "\x1b" not in text
    assert "\x00" not in text
    text.encode("utf-8")


def test_private_data_shows_no_picture_unless_asked(tmp_path: Path) -> None:
    hidden = fabricate(private=True, pictures=False).write(tmp_path / "hidden")
    text = render(hidden)
    assert not Page(text).all("img")
    assert "The data is private" in text
    assert "--pictures" in text
    assert "The store holds no pictures" in render(hidden, pictures=True)
    kept = fabricate(private=True, pictures=True).write(tmp_path / "kept")
    assert Page(render(kept)).all("img")
    assert not Page(render(kept, pictures=False)).all("img")


def test_an_attack_on_paths_through_a_key_is_refused(tmp_path: Path) -> None:
    built = fabricate(examples=1, seeds=1)
    for number, row in enumerate(built.jobs):
        row["key"] = f"../../secret{number}"
    built.artifacts.clear()
    built.histories.clear()
    assert not Page(render(built.write(tmp_path / "audit"))).all("img")


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 12), (5, 8, 8), (2, 40), (12,)], ids=str)
def test_every_shape_of_data_is_drawn(shape: tuple[int, ...], tmp_path: Path) -> None:
    page = Page(render(fabricate(shape=shape, examples=2).write(tmp_path / "audit")))
    if len(shape) == 3:
        # Original, without and with the defence in the banner; then each example with a reconstruction a setting.
        assert len(page.all("img")) == 3 + 2 * (1 + 3)
    else:
        assert not page.all("img")
        assert [a for a in page.all("polyline") if a.get("class") == "signal guess"]
    assert ("first of 5 channels" in page.text) == (shape[0] == 5)


def test_the_verdict_that_is_handed_over_is_shown_and_none_is_made(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(store) as opened:
        verdict = judge_store(opened)
    expected = render(store)
    monkeypatch.setattr("leakscope.report.page.judge_store", lambda store: pytest.fail("judged twice"))
    assert render(store, verdict=verdict) == expected
    assert "Inconclusive" in Page(render(store, verdict=Verdict(outcome="inconclusive"))).text


def test_a_defence_that_no_attack_knew_is_told_with_its_setting(tmp_path: Path) -> None:
    built = fabricate(settings=((SGD, "none"), (SGD, NOISE)), level=(0.3, 0.4), failures=False)
    for row in built.jobs:
        row["result"] |= {"adaptive": False, "flags": []}
    page = Page(render(built.write(tmp_path / "audit")))
    assert "Inconclusive" in page.text
    assert page.text.count("no attack that knows this defence was run") == 1
    assert "inconclusive S2 FedSGD · GradientNoise(sigma=0.01) 0 of 4 came back" in page.text
    assert "S2 no attack that knows this defence was run → What to do: Let attacks know the defence" in page.text


def test_findings_are_listed_with_their_fate(tmp_path: Path) -> None:
    built = fabricate(examples=1, seeds=1, failures=False)
    built.findings[1] |= {"status": "failed", "content": None, "error": "MemoryError: 3 GB\nTraceback", "seconds": 2.25}
    built.findings[2]["content"] = {"reason": HOSTILE}
    built.meta["plan"]["findings"] = 4
    page = Page(render(built.write(tmp_path / "audit")))
    assert "Findings: 2 done, 1 failed, 1 of 4 missing" in page.text
    assert "floor S1 0 0 done 0.5 floor S2 0 0 failed 2.2 MemoryError: 3 GB floor S3 0 0 done 0.5 <script>" in page.text
    assert "S2 GradientPruning fraction=0.9 FedSGD Not computed: MemoryError: 3 GB" in page.text
    assert len(page.all("script")) == 1


def test_a_page_without_findings_has_no_list_of_them(tmp_path: Path) -> None:
    built = fabricate(examples=1, seeds=1)
    built.findings.clear()
    assert "Findings" not in Page(render(built.write(tmp_path / "audit"))).text


def test_targets_of_regression_take_the_place_of_labels(tmp_path: Path) -> None:
    built = fabricate(settings=((SGD, "none"),), level=(0.1,), examples=2, seeds=1, failures=False)
    built.meta["data"] |= {"num_classes": None, "class_names": None, "task": "Regression()"}
    for row in built.jobs:
        for example in row["result"]["examples"]:
            del example["label_correct"]
            example |= {"label": [0.5], "label_guess": [0.75], "target_error": 0.25}
    page = Page(render(built.write(tmp_path / "audit")))
    assert "Target error 0.250 0.250 to 0.250 0.250 0.250 to 0.250 2" in page.text
    assert "Mean lift SSIM Target error Identified Jobs done" in page.text
    assert "Labels" not in page.text[: page.text.index("Glossary Measures")]
    assert "[0.5] [0.75]" in page.text
    assert "Task Regression()" in page.text


def test_the_policy_is_told_as_far_as_it_limits() -> None:
    first, *rest = policy_lines(Policy(max_ssim=0.9, max_identification=0.25))
    assert first == (
        "An example counts as leaked when its PSNR is 20 dB or more and at least 3 dB above the zero-information "
        "baseline."
    )
    assert rest == [
        "An example also counts as leaked when its SSIM is 0.9 or more.",
        "A setting also leaks when more than 25 % of examples are identified.",
    ]
    assert policy_lines(Policy(min_lift=0)) == ["An example counts as leaked when its PSNR is 20 dB or more."]


def test_the_glossary_has_every_measure(page: Page) -> None:
    glossary = page.text[page.text.index("Glossary Measures") :]
    for measure in MEASURES.values():
        assert f"{measure.label} {measure.span} {measure.meaning}" in glossary
    for term in ("Baseline dB", "Lift dB, may be negative", "Interval in the measure's unit"):
        assert term in glossary


def test_empty_and_unfinished_stores_have_a_page(tmp_path: Path) -> None:
    empty = fabricate()
    empty.jobs.clear()
    assert "Nothing audited" in Page(render(empty.write(tmp_path / "empty"))).text
    broken = fabricate()
    broken.jobs[:] = [row for row in broken.jobs if row["status"] != "done"]
    assert "Nothing audited" in Page(render(broken.write(tmp_path / "broken"))).text


def test_certificates_stand_beside_the_pictures_and_in_the_table_of_jobs(tmp_path: Path) -> None:
    built = fabricate(settings=((SGD, "none"),), level=(0.01,), examples=3, seeds=1, failures=False)
    proof = {"residual": 0.4, "tolerance": 1.0, "free_directions": 0, "method": "masks decoded"}
    proofs = {0: proof, 1: {**proof, "free_directions": 2304}}
    for row in built.jobs:
        if row["job"]["attack_name"] == "inverting-gradients" and not row["job"]["control"]:
            row["result"]["examples"][0]["certificate"] = proofs.get(row["job"]["batch"])
    text = render(built.write(tmp_path / "run"))
    free = "explains the update, but 2,304 directions of the input are not determined"
    assert text.count("inverting-gradients<br>recovered, certified</span>") == 1
    assert text.count(f"inverting-gradients<br>{free}</span>") == 1
    assert "<small>1 of 3 examples: recovered, certified (masks decoded)</small>" in text
    assert "<td>recovered, certified; masks decoded, residual 0.4 (limit 1)</td>" in text
    assert "<th>Certificate</th>" in text


def test_a_store_without_certificates_has_no_column_of_them(store: Path) -> None:
    text = render(store)
    assert "recovered, certified" not in text
    assert "<th>Certificate</th>" not in text


def convincing(built: Fabricated) -> Fabricated:
    """Adds what a pass needs: the easiest case recovered, and theory that allows no more than attacks reach."""
    for row in [row for row in built.jobs if row["job"]["seed"] == 0 and not row["job"]["control"] and row["result"]]:
        job = {**row["job"], "control": "planted", "control_kind": "positive"}
        examples = [{**example, "psnr": 60.0} for example in row["result"]["examples"]]
        result = {**row["result"], "examples": examples, "flags": []}
        planted = {"key": f"planted{len(built.jobs)}", "position": len(built.jobs), "job": job, "result": result}
        built.jobs.append({**row, **planted})
    for entry in built.findings:
        entry["content"] = floor(12.0)
    built.meta["plan"]["total"] = len(built.jobs)
    return built


def test_within_policy_and_inconclusive(tmp_path: Path) -> None:
    options: dict[str, Any] = {"settings": ((SGD, "none"),), "level": (0.3,)}
    text = Page(render(convincing(fabricate(**options, failures=False)).write(tmp_path / "a"))).text
    assert "Within policy" in text
    assert "What to do" not in text
    assert "None of 4 images came back." in text
    assert "Inconclusive" in Page(render(fabricate(**options, failures=True).write(tmp_path / "b"))).text


def test_recovered_is_said_only_of_what_was(tmp_path: Path) -> None:
    weak = render(fabricate(settings=((SGD, "none"),), level=(0.3,)).write(tmp_path / "weak"))
    banner = Page(weak).text[: Page(weak).text.index("Threat model, model and protocol")]
    assert "nearest attempt" in banner
    assert not re.search(r"what came back|was recovered", banner)
    assert not re.search(r'alt="[^"]*recovered', weak)
    strong = render(fabricate(settings=((SGD, "none"),), level=(0.03,)).write(tmp_path / "strong"))
    assert "what came back" in Page(strong).text
    assert 'alt="example 0, recovered"' in strong


def test_a_result_that_only_the_attack_calls_recovered_is_not_called_so(tmp_path: Path) -> None:
    built = fabricate(settings=((SGD, "none"),), level=(0.3,), examples=1, seeds=1, failures=False)
    for row in built.jobs:
        row["result"]["diagnosis"] = {"outcome": "recovered", "reason": "it fits"}
    text = Page(render(built.write(tmp_path / "audit"))).text
    assert "Why undecided: it fits; the attack itself took it for recovered" in text


def test_what_was_audited_stands_at_the_top_with_its_warnings(tmp_path: Path) -> None:
    built = fabricate(examples=1, seeds=1)
    built.meta["audited"] = [
        {"text": "weights: random, seed 0", "warning": True},
        {"text": f"3 attacks {HOSTILE}", "warning": False},
        *({"warning": True}, "damage", None),
    ]
    page = Page(render(built.write(tmp_path / "audit")))
    banner, below = page.text.split("Scenarios within policy")
    assert "Warning: weights: random, seed 0" in banner
    assert "What was audited 3 attacks <script>" in below
    assert len([a for a in page.all("p") if a.get("class") == "warning"]) == 1
    assert len(page.all("script")) == 1
    built.meta["audited"] = "damage"
    assert "Warning:" not in Page(render(built.write(tmp_path / "damaged"))).text


def test_equal_reasons_are_told_once_with_their_remedy(tmp_path: Path) -> None:
    built = fabricate(examples=4, failures=False, level=(0.3, 0.3, 0.4))
    built.meta["policy"]["max_ssim"] = 0.99
    for row in built.jobs:
        for example in row["result"]["examples"]:
            example["ssim"] = None
    text = Page(render(built.write(tmp_path / "audit"))).text
    banner = text[: text.index("Threat model, model and protocol")]
    assert banner.count("SSIM could not be measured") == 1
    assert "S1, S2, S3 4 examples: SSIM could not be measured, but the policy limits it" in banner
    assert banner.count("→ What to do: Drop max_ssim from the policy.") == 1


def test_the_matrix_has_every_attack_in_every_setting(tmp_path: Path) -> None:
    page = Page(render(fabricate().write(tmp_path / "audit")))
    start = page.text.index("Attack S1 S2 S3 Baseline")
    part = page.text[start : page.text.index("All measures, with intervals")]
    number, ends = r"[\d.]+", r"[\d.]+ to [\d.]+"
    cell = rf"{number} {ends} lift [+−][\d.]+ "
    assert re.search(rf"inverting-gradients ({cell}){{3}}{number} ", part)
    assert re.search(rf"deep-leakage ({cell}1 failed ){{3}}{number} ", part)
    assert re.search(rf"analytic {cell}refused refused {number} ", part)
    assert "S2, S3 analytic refused: the first layer must be linear with a bias; got Conv2d(1, 12)" in part
    assert "S2 FedSGD · GradientPruning(fraction=0.9)" in part, "a legend"
    heats = [a["class"] for a in page.all("td") if "heat" in str(a.get("class"))]
    assert {"n heat3", "n heat0"} <= set(heats)
    # The mean of the strongest attack is that of the summary, and no attack is above it.
    means = [float(m) for m in re.findall(rf"({number}) {ends} lift", part)]
    assert means[-3] == max(means)


def test_the_matrix_tells_attacks_of_one_name_apart_and_protocols_baselines(tmp_path: Path) -> None:
    built = fabricate(settings=((SGD, "none"), (AVG, "none")), level=(0.1, 0.2), failures=False)
    for row in built.jobs:
        if row["job"]["attack"] == DLG:
            row["job"] |= {"attack": GEIPING.replace("500", "900"), "attack_name": "inverting-gradients"}
    text = Page(render(built.write(tmp_path / "audit"))).text
    assert "inverting-gradients iterations=500" in text
    assert "inverting-gradients iterations=900" in text
    assert "Attack S1 S2 Baseline of S1 Baseline of S2" in text


def test_long_reprs_are_folded_and_no_label_is_cut(tmp_path: Path) -> None:
    long = "GradientNoise(" + ", ".join(f"option{n}={n}.5" for n in range(9)) + ")"
    built = fabricate(settings=((AVG, "none"), (AVG, long)), level=(0.1, 0.3), examples=1)
    text = render(built.write(tmp_path / "audit"))
    assert re.search(r"<summary><code>GradientNoise\(…\)</code></summary><code>GradientNoise\(option0", text)
    assert not re.search(r"<text[^>]*>[^<]*…</text>", text)
    label = "S2 GradientNoise(option0=0.5, option1=1.5, option2=2.5)"
    chart = text[text.index("dots-narrow-d") : text.index("</svg>", text.index("dots-narrow-d"))]
    shown = " ".join(re.findall(r'<text class="label"[^>]*>([^<]*)</text>', chart))
    assert label in shown


def test_labels_stand_beside_their_chance(tmp_path: Path) -> None:
    built = fabricate(settings=((SGD, "none"),), level=(0.3,), examples=2)
    built.meta["plan"]["label_chance"] = 0.25
    built.meta["policy"]["max_label_accuracy"] = 0.5
    text = Page(render(built.write(tmp_path / "audit"))).text
    assert "100 % chance 25 %" in text
    assert "A setting also leaks when more than 50 % of labels are recovered and more than by chance." in text
    assert "None of 2 images came back, but 100% of the labels are recovered" in text


def test_damaged_artifacts_do_not_stop_the_page(tmp_path: Path) -> None:
    built = fabricate(examples=2)
    directory = built.write(tmp_path / "audit")
    for file in (directory / "artifacts").iterdir():
        file.write_bytes(b"damaged")
    page = Page(render(directory))
    assert not page.all("img")
    assert "could not be read" in page.text
    assert "No attack left a history" in page.text


def test_numbers_that_are_no_numbers_become_dashes(tmp_path: Path) -> None:
    built = fabricate(examples=2, failures=False)
    for row in built.jobs:
        for example in row["result"]["examples"]:
            example["psnr"] = None
            example["ssim"] = None
    assert "–" in Page(render(built.write(tmp_path / "audit"))).text


def test_page_of_no_store_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no audit here"):
        render(tmp_path)
    (tmp_path / "audit.sqlite").write_bytes(b"")
    with pytest.raises(ValueError, match="not an audit"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_large_audit_stays_readable(tmp_path: Path) -> None:
    settings = ((SGD, "none"), (SGD, PRUNING), (AVG, "none"), (AVG, NOISE))
    built = fabricate(settings=settings, level=(0.02, 0.1, 0.2, 0.3), examples=15, seeds=2, shape=(1, 8, 8))
    text = render(built.write(tmp_path / "audit"))
    assert len(built.jobs) > 500
    assert len(text) < 3_000_000
    assert not [a for a in Page(text).all("details") if "open" in a]
    assert "9 more examples" in text


def test_the_store_is_only_read(store: Path) -> None:
    connection = sqlite3.connect(store / "audit.sqlite")
    before = connection.execute("SELECT * FROM jobs ORDER BY key").fetchall()
    render(store)
    assert connection.execute("SELECT * FROM jobs ORDER BY key").fetchall() == before
    connection.close()


def test_long_batches_are_cut_in_the_details(tmp_path: Path) -> None:
    built = fabricate(examples=1, seeds=1, failures=False)
    for row in built.jobs:
        first = row["result"]["examples"][0]
        row["result"]["examples"] = [{**first, "index": n} for n in range(40)]
    page = Page(render(built.write(tmp_path / "audit")))
    assert "16 more examples are in the store" in page.text
    assert "Best PSNR, dB" in page.text
    assert GEIPING in page.text
    assert ANALYTIC in page.text
