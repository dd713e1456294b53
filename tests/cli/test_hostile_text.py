"""Names in other people's files reach neither the terminal nor a page as they are, where they would act."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.text import Text
from safetensors.torch import save_file

from leakscope.audit.terminal import PlainConsole
from leakscope.cli import main
from leakscope.contracts.errors import UserError
from leakscope.contracts.printable import printable
from leakscope.contracts.tables import html_facts, latex_text
from leakscope.models import build_model
from leakscope.report.export import csv_text

#: A colour, a window's title, the bell, a direction, the 8-bit form of an escape sequence.
HOSTILE = "\x1b[31mX\x1b]0;t\x07\u202egnp\u2067\x9b5m"
SHOWN = r"\u001b[31mX"
NAMED = ["--model", "mlp", "--input", "3x4x4", "--classes", "3", "--kind", "gradient"]


def acts(text: str) -> list[str]:
    return [c for c in text if c not in "\t\n" and (ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u202e\u2067")]


def told(*words: str) -> tuple[object, str]:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["leakscope", *words])
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code, out.getvalue() + err.getvalue()


def written(folder: Path, ending: str) -> Path:
    file = folder / f"update{ending}"
    tensors = {HOSTILE: torch.zeros(2)}
    if ending == ".npz":
        np.savez(file, **{name: value.numpy() for name, value in tensors.items()})
    elif ending == ".pt":
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    return file


@pytest.mark.parametrize("ending", [".pt", ".safetensors", ".npz"])
def test_names_of_tensors(ending: str, tmp_path: Path) -> None:
    save_file(build_model("mlp", input_shape=(3, 4, 4), num_classes=3).state_dict(), tmp_path / "before.safetensors")
    files = ["--before", str(tmp_path / "before.safetensors"), "--update", str(written(tmp_path, ending))]
    code, text = told("attack", *NAMED, *files, "--out", str(tmp_path / "out"))
    assert code == 4
    assert SHOWN in text
    assert acts(text) == []


@pytest.mark.parametrize(
    "words",
    [("audit", f"{HOSTILE}.yaml"), ("report", HOSTILE), ("attack", HOSTILE), (HOSTILE,), ("audit", "--data", HOSTILE)],
    ids=["spec", "folder", "observation", "command", "option"],
)
def test_arguments(words: tuple[str, ...]) -> None:
    code, text = told(*words)
    assert code == 4
    assert acts(text) == []


def test_keys_of_a_spec(tmp_path: Path) -> None:
    escaped = HOSTILE.encode("unicode_escape").decode()
    (tmp_path / "spec.yaml").write_text(f'model: mlp\ndata: tiles\n"{escaped}": 1\n', encoding="utf-8")
    code, text = told("audit", str(tmp_path / "spec.yaml"))
    assert code == 4
    assert acts(text) == []


def test_pictures_that_name_their_class_so(tmp_path: Path) -> None:
    for number in range(3):
        pictures = tmp_path / "data" / f"{HOSTILE}{number}"
        pictures.mkdir(parents=True)
        Image.fromarray(np.full((4, 4, 3), 60 * number, np.uint8)).save(pictures / f"{HOSTILE}.png")
    what = ["--model", "mlp", "--data", "folder", "--data-path", str(tmp_path / "data"), "--attack", "linear-layer"]
    how = ["--examples", "1", "--no-findings", "--no-controls", "--serial", "--show-names", "--pictures", "-v"]
    where = ["--out", str(tmp_path / f"run{HOSTILE}"), "--sarif", str(tmp_path / "log.sarif")]
    code, text = told("audit", *what, *how, *where)
    assert code in (1, 5)
    assert acts(text) == []
    pages = [*(tmp_path / f"run{HOSTILE}").glob("*.html"), tmp_path / "log.sarif"]
    assert len(pages) == 2
    assert [acts(page.read_text(encoding="utf-8")) for page in pages] == [[], []]
    assert SHOWN in pages[0].read_text(encoding="utf-8")


def printed(pieces: Iterable[object]) -> str:
    console = PlainConsole(file=io.StringIO(), force_terminal=True, color_system="standard", width=200, highlight=False)
    for piece in pieces:
        console.print(piece, markup=False)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_console_keeps_its_own_colours() -> None:
    text = printed([Text(HOSTILE, "bold"), HOSTILE])
    assert text.startswith("\x1b[1m")
    assert acts(re.sub(r"\x1b\[[01]m", "", text)) == []


@pytest.mark.parametrize(
    "write", [latex_text, lambda text: csv_text([{text: text}]), lambda text: html_facts(text, {text: text})]
)
def test_tables(write: object) -> None:
    assert callable(write)
    assert acts(write(HOSTILE)) == []


def test_an_error_in_python() -> None:
    assert str(UserError(HOSTILE)) == printable(HOSTILE)
