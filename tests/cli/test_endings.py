"""How a command ends when somebody stops it, and when nobody reads what it says; real processes throughout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leakscope.audit.output import Unfailing
from leakscope.results import Store
from process_groups import group_is_gone

SPEC = """
model: {name: mlp, options: {hidden: [8]}}
data: {name: tiles, limit: 4}
examples: 2
attacks: [ATTACKS{inverting-gradients: {iterations: STEPS}}]
findings: false
controls: false
stop_on_leak: false
"""
#: A shell that starts the tests in the background has its children ignore Ctrl-C, and nohup has them ignore SIGHUP.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start(folder: Path, executor: str, ignored: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    """An audit in its own session, its closed form done within a second and its search never."""
    (folder / "spec.yaml").write_text(SPEC.replace("ATTACKS", "linear-layer, ").replace("STEPS", "1000000"))

    def defaults() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    command = [sys.executable, "-m", "leakscope.cli", "audit", "spec.yaml", "--out", "run", "--workers", "1", "-v"]
    return subprocess.Popen(
        [*command, *(["--serial"] if executor == "serial" else [])],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=defaults,
    )


def wait_for_first_row(run: subprocess.Popen[str]) -> None:
    assert run.stderr is not None
    told = []
    for line in run.stderr:
        told.append(line)
        if line.startswith("[1/"):
            return
    raise AssertionError("".join(told))


def ended(run: subprocess.Popen[str], folder: Path) -> str:
    """What it said last, once it has ended with code 2, kept its row and left no process behind."""
    _, rest = run.communicate(timeout=60)
    assert run.returncode == 2, rest
    assert "Traceback" not in rest
    assert group_is_gone(run.pid)
    with Store.open(folder / "run") as store:
        assert [row.job.attack_name for row in store.rows()] == ["linear-layer"]
    return rest


@pytest.mark.slow
@pytest.mark.parametrize(
    "executor, name, words",
    [
        ("serial", "SIGINT", "Interrupted."),
        ("processes", "SIGINT", "Interrupted."),
        ("serial", "SIGHUP", "Ended by SIGHUP."),
        ("processes", "SIGTERM", "Ended by SIGTERM."),
    ],
)
def test_a_signal_keeps_what_is_done_and_ends_with_code_2(executor: str, name: str, words: str, tmp_path: Path) -> None:
    run = start(tmp_path, executor)
    wait_for_first_row(run)
    run.send_signal(getattr(signal, name))
    rest = ended(run, tmp_path)
    last = f"{words} Finished jobs are kept; the same command resumes."
    assert rest.splitlines()[-1] == last
    assert rest.count(words) == 1


@pytest.mark.slow
def test_what_the_caller_ignores_stays_ignored_and_a_closed_terminal_reaches_all(tmp_path: Path) -> None:
    run = start(tmp_path, "processes", ignored=(signal.SIGHUP, signal.SIGINT))
    wait_for_first_row(run)
    os.killpg(run.pid, signal.SIGHUP)
    os.killpg(run.pid, signal.SIGINT)
    time.sleep(0.5)
    assert run.poll() is None
    os.killpg(run.pid, signal.SIGTERM)  # as a service manager does: to all of them at once
    assert "Ended by SIGTERM." in ended(run, tmp_path)


@pytest.mark.slow
def test_closed_pipes_neither_end_the_audit_nor_tell_its_verdict(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("ATTACKS", "").replace("STEPS", "2"))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "leakscope.cli", "audit", "spec.yaml", "--out", "run", "--serial"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=writer, timeout=120, check=False)
    os.close(writer)
    assert done.returncode == 5  # 1 would say that something leaks, 120 that the last words could not be written
    assert (tmp_path / "run" / "report.html").is_file()
    with Store.open(tmp_path / "run") as store:
        assert len(store.rows()) == 2


@pytest.mark.parametrize("moment", ["leakscope.cli", "torch"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_libraries_are_loaded_ends_in_silence(moment: str, name: str, tmp_path: Path) -> None:
    if (moment, name) == ("leakscope.cli", "SIGTERM"):
        pytest.skip("nothing has taken the signal over yet, and its default makes no sound either")
    code = f"""
import builtins, os, signal
from leakscope.__main__ import main
real, done = builtins.__import__, []
def interrupted(name, *rest):
    if name == {moment!r} and not done:
        done.append(name)
        os.kill(os.getpid(), signal.{name})
    return real(name, *rest)
builtins.__import__ = interrupted
main()
"""
    command = [sys.executable, "-c", code, "audit", "--out", "run"]

    def defaults() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, preexec_fn=defaults
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "Interrupted.\n")


def test_a_stream_that_failed_goes_on_in_silence() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        output = Unfailing(stream)
        output.write("read\n")
        assert os.read(reader, 10) == b"read\n"
        os.close(reader)
        for _ in range(3):
            output.writelines(["nobody reads this\n"] * 2)
            output.flush()
        assert output.fileno() == writer
    output.write("closed, too")
    output.flush()
