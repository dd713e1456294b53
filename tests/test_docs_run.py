"""Every command and snippet of the documentation, and every example, run as a reader would: a page at a time."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs_blocks import PAGES, ROOT, blocks, run_block
from docs_folders import FOLDERS

pytestmark = pytest.mark.slow

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; modules that are loaded from it are forgotten with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEAKSCOPE_CACHE", str(tmp_path / "cache"))
    # Probes of the diagnosis run, and end early: what they find has tests of its own, and here they took minutes.
    monkeypatch.setattr("leakscope.limits.diagnosis.PROBES", (1, 10))
    data = ROOT.parent / "shared" / "data"
    if data.is_dir():
        monkeypatch.setenv("LEAKSCOPE_DATA", str(data))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(blocks(page))], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_what_a_page_shows_works(page: Path, folder: Path) -> None:
    FOLDERS.get(page.stem, lambda folder: None)(folder)
    for block in blocks(page):
        run_block(block, folder)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip(), "an example says what it found"


def test_there_are_five_examples_and_a_page_lists_each() -> None:
    listed = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert len(EXAMPLES) >= 5
    assert not [example.name for example in EXAMPLES if f"../examples/{example.name}" not in listed]
