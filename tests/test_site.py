"""The documentation as a site: it builds without a warning, loads nothing from elsewhere, and every page is in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_blocks import ROOT, blocks

_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?P<url>[^\"]+)\"|<link\b[^>]*\bhref=\"(?P<link>[^\"]+)\""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not here: pip install leakscope[docs]")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (done.stdout + done.stderr).strip()
    return folder


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 40
    foreign = {
        url
        for page in pages
        for match in _LOADED.finditer(page.read_text(encoding="utf-8"))
        if "://" in (url := match["url"] or match["link"]) or url.startswith("//")
    }
    assert not foreign


def test_the_api_has_every_public_name_with_its_words(site: Path) -> None:
    table = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    for page, anchor in re.findall(r"\]\(([a-z-]+)\.md#([\w.]+)\)", table):
        assert f'id="{anchor}"' in (site / "api" / f"{page}.html").read_text(encoding="utf-8"), anchor
    attacks = (site / "api" / "attacks.html").read_text(encoding="utf-8")
    assert "Relative singular value below which a direction counts as rounding noise." in attacks
    assert "setting(" not in re.sub(r"<[^>]+>", "", attacks)


def test_a_newcomer_needs_ten_lines() -> None:
    """The script that the tutorial's test runs, on a class and arrays of the reader's own."""
    page = ROOT / "docs" / "tutorial-engineer.md"
    script = next(block for block in blocks(page) if block.title == "first_audit.py")
    assert len([line for line in script.body.splitlines() if line.strip()]) <= 10
    own = next(block for block in blocks(page) if block.title == "clinic.py")
    assert "torch.nn.Module" in own.body
    assert ".numpy()" in own.body


def test_pictures_of_the_gallery_are_small_and_shown() -> None:
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    pictures = sorted((ROOT / "docs").glob("gallery-*.png"))
    assert {path.name for path in pictures} == set(re.findall(r"\((gallery-[a-z]+\.png)\)", text))
    assert all(path.stat().st_size < 60_000 for path in pictures)
