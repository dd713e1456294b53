"""Files that lie in the current folder are not taken for modules of Python, in no process of an audit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = """
model: MODEL
data: {name: tiles, limit: 2}
examples: 1
attacks: [linear-layer]
findings: false
controls: false
workers: 1
"""
MINE = """
from torch import nn

import helper


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(helper.SIZE, 9))
"""
PLANTED = ("socket", "pickle", "typing", "signal", "selectors", "random", "yaml", "filelock", "psutil")


def audit(folder: Path, *start: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *start],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.slow
def test_a_planted_module_runs_neither_here_nor_in_a_worker(tmp_path: Path) -> None:
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\nraise SystemExit('planted')\n")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helper.py").write_text("SIZE = 3 * 32 * 32\n")
    (tmp_path / "spec.yaml").write_text(SPEC.replace("MODEL", "'mine:Net'"))
    done = audit(tmp_path, "-m", "leakscope.cli", "audit", "spec.yaml", "--out", "run")
    assert done.returncode in (0, 1, 5), done.stderr
    assert [p.name for p in tmp_path.glob("ran-*")] == []
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_nor_where_a_script_has_the_folder_on_its_path(tmp_path: Path) -> None:
    """The parent was started before the file was there, as a notebook is; its workers start afterwards."""
    script = """
import sys
from leakscope.audit import run_spec

if __name__ == "__main__":
    sys.path.insert(0, "")
    open("pickle.py", "w").write("open('ran', 'w')")
    run_spec("spec.yaml", "run").verdict
"""
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "spec.yaml").write_text(SPEC.replace("MODEL", "logistic") + "executor: processes\n")
    done = audit(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "run" / "audit.sqlite").is_file()
