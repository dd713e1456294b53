"""The code blocks of the documentation: how they are marked, and how each is run.

Every fenced block says what becomes of it, by a comment on the line before it or by a title:

    <!-- tested -->                  run: Python as it is; of a shell block every command
    <!-- tested; audits with: ... -->  the same, with these options behind every ``leakscope audit`` of the block
    <!-- not run: REASON -->         too slow, or needs what a test has not; only checked as far as that goes
    ```python title="mine.py"        a file, written for the blocks behind it

A YAML block without any of these is a spec, and is parsed as one. ``text`` is a drawing or a printed result. The blocks
of a page are run in order in one folder; each Python block has names of its own. A ``console`` block shows commands
behind ``$`` and what they print, which is compared ("..." stands for anything). ``# exit code N`` behind a command says
how it ends; without it a command ends with 0, an audit with any outcome (0, 1 or 5).
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click
import pytest
import typer

from leakscope.audit import parse_yaml
from leakscope.cli import app, main
from leakscope.data import DATA

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
SHELL, FILES = ("sh", "console"), ("python", "yaml", "yml", "toml", "ini", "json")
#: Outcomes of an audit, which are no errors.
OUTCOMES = (0, 1, 5)
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<kind>\w*)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    mark: str
    kind: str
    title: str | None
    body: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def tested(self) -> bool:
        return self.mark == "tested" or self.mark.startswith("tested; ")

    @property
    def not_run(self) -> bool:
        return bool(re.fullmatch(r"not run: \S.*", self.mark))

    @property
    def audit_options(self) -> list[str]:
        """What is added to every audit of the block, so that it takes seconds."""
        return shlex.split(self.mark.partition("audits with: ")[2])

    @property
    def problem(self) -> str | None:
        """Why it is not clear what becomes of the block."""
        if self.kind == "text":
            return None
        if self.kind not in (*FILES, *SHELL):
            return f"{self.place}: a block of the kind {self.kind!r}; expected text, {', '.join((*FILES, *SHELL))}"
        spec = self.kind == "yaml" and not self.mark
        if self.tested or self.not_run or self.title or spec:
            return None
        return f"{self.place}: not marked: <!-- tested -->, <!-- not run: REASON -->, or a title"

    def commands(self) -> list[tuple[str, str]]:
        """The commands of a shell block, each with what is shown of its output."""
        body = self.body.replace("\\\n", " ")
        if self.kind == "sh":
            return [(line, "") for line in body.splitlines() if line.strip() and not line.startswith("#")]
        pieces = re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
        return [(piece.partition("\n")[0], piece.partition("\n")[2]) for piece in pieces]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text[: match.start("body")].count("\n")
        yield Block(page, line, match["mark"] or "", match["kind"], match["title"], match["body"])


def without_blocks(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def run_block(block: Block, folder: Path) -> None:
    """Do with a block what it says, in ``folder``."""
    if block.title is not None:
        (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.title).write_text(block.body, encoding="utf-8")
    if block.kind in SHELL:
        for command, shown in block.commands():
            check_command(command, block.place)
            if block.tested:
                run_command(command, shown, block)
    elif block.kind == "python":
        # Lines count as in the page; this file's own __future__ imports are not the reader's.
        code = compile("\n" * block.line + block.body, str(block.page), "exec", dont_inherit=True)
        if block.tested:
            names: dict[str, object] = {"__name__": "docs_example"}
            exec(code, names)
            assert len(names) > 1
    elif block.kind == "yaml" and not block.mark and (block.title or "spec.yaml").endswith("spec.yaml"):
        assert parse_yaml(block.body).attacks, block.place


def split_command(command: str) -> tuple[list[str], Path | None, int | None]:
    """The words of a command, the file its output goes to, and the exit code that it says it has.

    >>> split_command("leakscope report run --csv > jobs.csv  # any audit")
    (['leakscope', 'report', 'run', '--csv'], PosixPath('jobs.csv'), None)
    """
    stated = re.search(r"#.*exit code (\d)", command)
    words = shlex.split(command, comments=True)
    target = None
    if ">" in words:
        target = Path(words[words.index(">") + 1])
        words = words[: words.index(">")]
    return words, target, int(stated[1]) if stated else None


def check_command(command: str, place: str) -> None:
    """Whether the command line has the command and every option that a page speaks of."""
    words = shlex.split(command, comments=True)
    if len(words) < 2 or words[0] != "leakscope" or words[1].startswith("-"):
        return
    known = typer.main.get_command(app)
    assert isinstance(known, click.Group)
    assert words[1] in known.commands, f"{place}: leakscope has no command {words[1]!r}"
    options = {"--help", *(name for p in known.commands[words[1]].params for name in (*p.opts, *p.secondary_opts))}
    unknown = [word for word in words if word.startswith("-") and word.partition("=")[0] not in options]
    assert not unknown, f"{place}: leakscope {words[1]} has no {', '.join(unknown)}"


def run_command(command: str, shown: str, block: Block) -> None:
    """Run one command in the current folder and compare how it ends and what it prints with what the page says."""
    words, target, stated = split_command(command)
    if not runnable(words):
        return
    if words[:2] == ["leakscope", "audit"]:
        words += block.audit_options
    code, out, err = call(words)
    place = f"{block.place}: {command}"
    allowed = OUTCOMES if words[:2] == ["leakscope", "audit"] else (0,)
    assert code in ((stated,) if stated is not None else allowed), f"{place}: exit code {code}\n{out}\n{err}"
    if target is not None:
        target.write_text(out, encoding="utf-8")
    if shown.strip():
        pattern = re.escape(" ".join(shown.split())).replace(r"\.\.\.", ".*?")
        printed = " ".join((out + err).split())
        assert re.search(pattern, printed), f"{place} prints\n{out}{err}\nexpected\n{shown}"


def runnable(words: Sequence[str]) -> bool:
    """Not: tables of papers, whose own tests run them, and data sets that are not here."""
    if words[:2] == ["leakscope", "reproduce"]:
        return False
    named = [DATA.get(value) for option, value in pairwise(words) if option == "--data"]
    needs_files = any(entry is not None and entry.needs_path for entry in named) and "--data-path" not in words
    return not needs_files or Path(os.environ.get("LEAKSCOPE_DATA", "no data")).is_dir()


def call(words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code and output. leakscope and plain scripts run in this process, where the libraries are loaded."""
    if words[:2] in (["python", "-m"], ["pytest"]) or words[0] == "pytest":
        module = ["-m", "pytest", *words[1:]] if words[0] == "pytest" else list(words[1:])
        done = subprocess.run([sys.executable, *module], capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stdout, done.stderr
    if words[0] not in ("leakscope", "python"):
        raise ValueError(f"the documentation's tests cannot run {words[0]!r}; mark the block: <!-- not run: REASON -->")
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "argv", list(words) if words[0] == "leakscope" else list(words[1:]))
        try:
            if words[0] == "leakscope":
                main()
            else:
                patch.syspath_prepend(str(Path(words[1]).parent))
                runpy.run_path(words[1], run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        else:
            code = 0
    return code, out.getvalue(), err.getvalue()
