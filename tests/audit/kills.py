"""Kills spread over the whole length of an audit: set-up, training, trials, jobs, the report.

    PYTHONPATH=tests python tests/audit/kills.py [KILLS] [serial|processes]

Each time the audit is killed at another moment and resumed; its rows must be those of an uninterrupted run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from audit_doubles import timeless
from command_line import typed

from leakscope.results import Store
from process_groups import group_is_gone

SPEC = """
model: {name: mlp, options: {hidden: [16]}}
data: {name: tiles, limit: 24}
training: {rounds: 6, clients: 4, epochs: 10}
examples: 2
defenses: [none, {gradient-noise: {sigma: 0.01}}]
attacks: [linear-layer, {inverting-gradients: {iterations: 20}}]
seeds: 2
workers: 2
executor: EXECUTOR
"""


class Killed:
    """An audit in a folder of its own, with a cache of its own."""

    def __init__(self, folder: Path, executor: str) -> None:
        folder.mkdir()
        self.folder, self.out = folder, folder / "run"
        (folder / "spec.yaml").write_text(SPEC.replace("EXECUTOR", executor))

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "leakscope.cli", "audit", "spec.yaml", "--out", "run"],
            cwd=self.folder,
            env={**os.environ, "LEAKSCOPE_CACHE": str(self.folder / "cache")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(self) -> int:
        return self.start().wait(600)

    def resume(self) -> int:
        """Run the audit to its end, in this process where the libraries are loaded."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setenv("LEAKSCOPE_CACHE", str(self.folder / "cache"))
            return typed("audit", "spec.yaml", "--out", "run").returncode

    def kill_after(self, seconds: float) -> str:
        """Where it was when it was killed, in words; "finished" if it was too late."""
        process = self.start()
        try:
            process.wait(seconds)
            return "finished"
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)
        if not group_is_gone(process.pid):
            raise AssertionError("a worker outlived its parent")
        if (self.out / "audit.sqlite").exists():
            with Store.open(self.out) as store:
                plan = store.meta("plan")
                done = len(store.rows()) + len(store.findings())
            whole = plan["total"] + plan["findings"]
            return f"{done} of {whole} jobs" if done < whole else "writing the report"
        return "training" if list((self.folder / "cache").rglob("*.safetensors")) else "starting"

    def results(self) -> tuple[object, ...]:
        """All that must not depend on kills."""
        with Store.open(self.out) as store:
            rows, findings = store.rows(), store.findings()
            pictures = {
                row.key: {name: value.tolist() for name, value in (store.artifact(row.key) or {}).items()}
                for row in rows
            }
            meta = [store.meta(key) for key in ("plan", "planned", "spec_hash", "audited")]
        litter = [path.name for path in self.folder.rglob("*") if path.name.endswith(".tmp")]
        assert (self.out / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
        return timeless(rows), timeless(findings), pictures, meta, litter


def compare(folder: Path, kills: int, executor: str) -> list[tuple[float, str, bool]]:
    """For each kill: when, where the audit was, and whether its results are those of an uninterrupted run."""
    whole = Killed(folder / "whole", executor)
    started = time.monotonic()
    code = whole.finish()
    length, expected = time.monotonic() - started, whole.results()
    told = []
    for number in range(kills):
        seconds, place, tries = length * (number + 0.5) / kills, "finished", 0
        while place == "finished":  # the machine has become faster
            audit = Killed(folder / f"killed-{number}-{tries}", executor)
            place, seconds, tries = audit.kill_after(seconds), 0.8 * seconds, tries + 1
        seconds /= 0.8
        told.append((seconds, place, audit.resume() == code and audit.results() == expected))
        print(f"{seconds:6.1f} s of {length:.1f}: {told[-1][1]}, {'equal' if told[-1][2] else 'DIFFERENT'}", flush=True)
    return told


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        kills, executor = int((sys.argv[1:2] or ["20"])[0]), (sys.argv[2:3] or ["processes"])[0]
        outcome = compare(Path(home), kills, executor)
    print(f"{sum(equal for _, _, equal in outcome)} of {len(outcome)} equal")
    sys.exit(not all(equal for _, _, equal in outcome))
