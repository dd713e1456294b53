"""The JSON schema of SARIF 2.1.0, for tests: fetched once from the Python package index into the environment.

    python tools/sarif_schema.py      fetch it, and print where it is

The source distribution of the package sarif-om ships the schema as the standard's committee published it; its wheel
does not, so it cannot simply be installed. What is fetched is compared with a hash.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

PACKAGE, MEMBER = "sarif-om", "sarif_om-1.0.4/sarif-2.1.0-rtm.4.json"
SHA256 = "49729d5909e2b1b976621a29dcebef22e57c78c20d469dfe6c7f15f759904f61"
TIMEOUT = 20.0


def place() -> Path:
    """Where the schema is kept: beside the environment's own files."""
    return Path(sys.prefix) / "share" / "leakscope" / "sarif-2.1.0.json"


def fetch() -> bytes:
    """The schema, from the environment or else from the index; OSError where neither has it."""
    file = place()
    if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == SHA256:
        return file.read_bytes()
    content = _from_index()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError:  # an environment that may not be written to; it is fetched again next time
        pass
    return content


def _from_index() -> bytes:
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = f"{index}/{PACKAGE}/"
    links = re.findall(r'href="([^"]+)"', _read(page).decode("utf-8", "replace"))
    archive = MEMBER.partition("/")[0] + ".tar.gz"
    urls = [urllib.parse.urljoin(page, link.partition("#")[0]) for link in links if archive in link]
    if not urls:
        raise OSError(f"{page}: does not offer {archive}")
    with tarfile.open(fileobj=io.BytesIO(_read(urls[0]))) as files:
        member = files.extractfile(MEMBER)
        content = b"" if member is None else member.read()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise OSError(f"{urls[0]}: {MEMBER} is not the schema that was expected")
    return content


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        content: bytes = answer.read()
    return content


if __name__ == "__main__":
    fetch()
    print(place())
