"""What the site needs beyond docs/: pages that lie elsewhere in the repository, and links that lead to them.

mkdocs calls these functions (``hooks`` in mkdocs.yml). Files outside docs/ that are pages of the site keep one home, at
the top of the repository, where people and hosts look for them; links to other files outside become plain names.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
#: Pages of the site by the file of the repository that they show.
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "README.md": "index.md",
    "src/leakscope/data/CREDITS.md": "credits.md",
}
_LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere."""
    for source, page in ELSEWHERE.items():
        path = ROOT / source
        if path.exists() and page != "index.md":
            text = relinked(path.read_text(encoding="utf-8"), posixpath.dirname(source), "")
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links out of docs/ to pages of the site."""
    if page.file.src_uri in ELSEWHERE.values() and page.file.src_uri != "index.md":
        return markdown  # done already
    return relinked(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)), page.file.src_uri)


def relinked(markdown: str, folder: str, page: str) -> str:
    """``markdown`` of a file in ``folder`` of the repository with links as the site has them, seen from ``page``.

    >>> relinked("[c](../CHANGELOG.md#x) and [p](../src/a.py), [d](audit.md)", "docs", "index.md")
    '[c](changelog.md#x) and p (`src/a.py`), [d](audit.md)'
    >>> relinked("[d](docs/audit.md)", "", "changelog.md")
    '[d](audit.md)'
    """
    here = posixpath.dirname(page)

    def lead(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        source = posixpath.normpath(posixpath.join(folder, target))
        inside = source.removeprefix("docs/") if source.startswith("docs/") else ELSEWHERE.get(source)
        if inside is None:
            return f"{match['text'].strip('!')[1:-1]} (`{source}`)"
        return f"{match['text']}({posixpath.relpath(inside, here or '.')}{match['anchor'] or ''})"

    parts, last = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(lead, markdown[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, _LINK.sub(lead, markdown[last:])])
