"""The pages under docs: generated parts up to date, examples that run, specs that parse, links that lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from leakscope.audit import parse_yaml

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
_FENCE = re.compile(r"^(?P<mark><!-- tested -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def _blocks(kind: str, *, marked: bool = False) -> list:  # type: ignore[type-arg]
    found = []
    for page in PAGES:
        for number, match in enumerate(_FENCE.finditer(page.read_text(encoding="utf-8"))):
            if match["kind"] == kind and (match["mark"] or not marked):
                found.append(pytest.param(match["body"], id=f"{page.stem}-{number}"))
    return found


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The addresses that a reader's browser gives to headings."""
    heads = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
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


@pytest.mark.parametrize("body", _blocks("python", marked=True))
def test_python_examples_run(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # This file's own __future__ imports are not the reader's.
    names: dict[str, object] = {"__name__": "docs_example"}
    exec(compile(body, "docs", "exec", dont_inherit=True), names)
    assert len(names) > 1


@pytest.mark.parametrize("body", _blocks("yaml"))
def test_specs_parse(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_nets.py").write_text("def make(): ...")  # which the page writes before
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    assert parse_yaml(body).attacks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for match in _LINK.finditer(_prose(page)):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        file = page if not target else page.parent / target
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            lost.append(match["target"])
    assert not lost
