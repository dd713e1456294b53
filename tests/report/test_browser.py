"""The page in a real browser: no error, no overflow, and the table answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fabricate import AVG, NOISE, PRUNING, SGD, VERTICAL, fabricate

from leakscope.papers import Reproduction, Row
from leakscope.report import write_comparison, write_report, write_reproduction

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
webdriver: Any = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="no Chromium with chromedriver here to open the page in"
    ),
]
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1200,900"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in OPTIONS.split():
        options.add_argument(option)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # A named driver keeps selenium from looking for one to download.
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("browser")
    settings = ((SGD, "none"), (SGD, PRUNING), (AVG, "none"), (AVG, NOISE))
    wide = fabricate(settings=settings, level=(0.02, 0.1, 0.2, 0.3), missing=2).write(folder / "wide")
    signal = fabricate(shape=(1, 50), examples=2).write(folder / "signal")
    private = fabricate(private=True, pictures=False, examples=2).write(folder / "private")
    settings = ((VERTICAL, "none"), (VERTICAL, NOISE))
    vertical = fabricate(settings=settings, level=(0.02, 0.3), examples=2).write(folder / "vertical")
    found = {d.name: write_report(d) for d in (wide, signal, private, vertical)}
    found["comparison"] = write_comparison(wide, signal, folder / "comparison.html")
    note = "a long note on what was run in place of what the paper has, " * 3
    rows = [
        Row(f"setting {n}", "label accuracy (%)", 89.9, 100.0, (29.2, 100.0), 3, "too few to tell", note, 9.0)
        for n in (1, 2)
    ]
    table = Reproduction("paper/table", "A table", "Its paper", "smoke", 0, tuple(rows))
    return found | {"reproduction": write_reproduction(table, folder / "reproduction.html")}


@pytest.fixture
def opened(browser: Any, files: dict[str, Path]) -> Iterator[Any]:
    from selenium.webdriver.support.wait import WebDriverWait

    _resize(browser, 1200)
    browser.get(files["wide"].as_uri())
    # On a busy machine the driver may come back while the page is still being read.
    WebDriverWait(browser, 30).until(lambda b: b.execute_script("return document.readyState") == "complete")
    yield browser
    _expect_no_errors(browser)


def _resize(browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def _expect_no_errors(browser: Any) -> None:
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def _column(browser: Any, name: str) -> list[str]:
    return browser.execute_script(
        "const n = [...document.querySelectorAll('#job-table thead th')]"
        ".findIndex(th => th.textContent.startsWith(arguments[0]));"
        "return [...document.getElementById('job-table').tBodies].filter(b => !b.hidden)"
        ".map(b => b.rows[0].cells[n].dataset.value)",
        name,
    )


def _sort_button(browser: Any, name: str) -> Any:
    buttons = browser.find_elements("css selector", "#job-table thead button")
    return next(button for button in buttons if button.text.startswith(name))


def test_verdict_is_visible(opened: Any) -> None:
    heading = opened.find_element("css selector", "h1")
    assert heading.is_displayed()
    assert heading.text.startswith("Leaks above policy")


def test_pictures_are_decoded(opened: Any) -> None:
    opened.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    widths = opened.execute_script("return [...document.images].map(i => i.naturalWidth)")
    assert len(widths) == 3 + 4 * 5
    assert all(width == 16 for width in widths)


def test_clicking_a_header_sorts_and_tells_so(opened: Any) -> None:
    before = _column(opened, "PSNR")
    button = _sort_button(opened, "PSNR")
    header = button.find_element("xpath", "..")
    assert header.get_attribute("aria-sort") is None
    button.click()
    after = _column(opened, "PSNR")
    assert header.get_attribute("aria-sort") == "descending"
    assert after != before
    known = [float(v) for v in after if v]
    assert known == sorted(known, reverse=True)
    assert after[len(known) :] == [""] * (len(after) - len(known)), "what was not measured comes last"
    button.click()
    assert header.get_attribute("aria-sort") == "ascending"
    known = [float(v) for v in _column(opened, "PSNR") if v]
    assert known == sorted(known)
    assert _column(opened, "PSNR")[-1] == ""


def test_the_keyboard_sorts_too(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    button = _sort_button(opened, "Attack")
    button.send_keys(Keys.ENTER)
    assert button.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
    assert len(opened.find_elements("css selector", "#job-table th[aria-sort]")) == 1
    names = _column(opened, "Attack")
    assert names == sorted(names)


def test_filter_hides_what_does_not_match(opened: Any) -> None:
    total = len(_column(opened, "#"))
    box = opened.find_element("id", "filter")
    box.send_keys("refused S2")
    assert set(_column(opened, "Status")) == {"refused"}
    assert set(_column(opened, "Setting")) == {"S2"}
    shown = len(_column(opened, "#"))
    assert 0 < shown < total
    assert opened.find_element("id", "count").text == f"{shown} of {total} jobs"
    box.clear()
    opened.execute_script("arguments[0].dispatchEvent(new Event('input'))", box)
    assert len(_column(opened, "#")) == total


@pytest.mark.parametrize("width", [420, 1280])
@pytest.mark.parametrize("name", ["wide", "vertical", "comparison", "reproduction"])
def test_tables_of_results_are_seen_whole(browser: Any, files: dict[str, Path], name: str, width: int) -> None:
    """Wide ones side by side, narrow ones stacked with the name of the column before each cell."""
    _resize(browser, width)
    browser.get(files[name].as_uri())
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('.stacked')].map(b => [b.scrollWidth, b.clientWidth])"
    )
    assert boxes
    assert all(content <= room for content, room in boxes)
    labels = browser.execute_script(
        "return [...document.querySelectorAll('.stacked td:not(.row-name)')]"
        ".map(td => getComputedStyle(td, '::before').content)"
    )
    assert all((label not in ("none", "normal", '""')) == (width == 420) for label in labels)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 760, 1280])
@pytest.mark.parametrize("name", ["wide", "signal", "private", "vertical", "comparison", "reproduction"])
def test_the_page_never_scrolls_sideways(
    browser: Any, files: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    _resize(browser, width)
    browser.get(files[name].as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    inner, scroll = browser.execute_script("return [innerWidth, document.documentElement.scrollWidth]")
    assert inner == width
    assert scroll <= inner
    _expect_no_errors(browser)
