"""The pages under docs: generated parts up to date, blocks that say what becomes of them, links that lead somewhere.

What the blocks do is run by test_docs_run.py.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from docs_blocks import PAGES, ROOT, blocks, check_command, without_blocks

_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_INLINE = re.compile(r"`(?P<command>leakscope [a-z][^`\[\]|…<]*)`")


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/").removesuffix(".md")


def _anchors(page: Path) -> set[str]:
    """The addresses that a reader's browser gives to headings, and those of the API's objects."""
    text = without_blocks(page)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
    return slugs | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "tools" / "make_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_pages() -> None:
    assert len(PAGES) >= 9


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_generated_parts_are_up_to_date(page: Path, make_docs: ModuleType) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- generated: ") == text.count("<!-- end -->")
    assert make_docs.regenerate(text) == text, "run: python tools/make_docs.py"


def test_drawn_files_are_up_to_date_and_shown(make_docs: ModuleType) -> None:
    pictures = make_docs.pictures()
    assert sorted(pictures) == sorted(path.name for path in (ROOT / "docs").glob("*.svg"))
    for name, text in pictures.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run: python tools/make_docs.py"
        assert any(f"]({name})" in page.read_text(encoding="utf-8") for page in PAGES)


def test_every_part_is_used_once(make_docs: ModuleType) -> None:
    used = [name for page in PAGES for name in re.findall(r"<!-- generated: ([a-z-]+) -->", page.read_text("utf-8"))]
    assert sorted(used) == sorted(make_docs.PARTS)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_says_what_becomes_of_it(page: Path) -> None:
    assert not [block.problem for block in blocks(page) if block.problem]
    # An indented block has no place for a mark; four spaces behind an empty line that follows plain text are one.
    lines = without_blocks(page).splitlines()
    starts = [n for n in range(2, len(lines)) if lines[n].startswith("    ") and not lines[n - 1].strip()]
    continued = re.compile(r"\s*([-*]|\d+\.) |\s+\S")  # within a list four spaces are its text
    assert not [lines[n] for n in starts if not continued.match(lines[n - 2])]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_in_the_text_exist(page: Path) -> None:
    for match in _INLINE.finditer(without_blocks(page)):
        check_command(match["command"].replace("...", "").replace("'", ""), page.name)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for match in _LINK.finditer(without_blocks(page)):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:  # none is fetched: a test that needs the network tells of the network
            continue
        file = page if not target else page.parent / target
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            lost.append(match["target"])
    assert not lost
