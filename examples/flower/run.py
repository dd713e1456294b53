"""Run the federation without touching anybody's Flower settings, then attack what was recorded.

    python run.py [FOLDER]

``flwr run .`` does the same with the settings in ~/.flwr. Here Flower gets a home of its own, a SuperLink on free ports
that ends with this script, and no network.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil

HERE = Path(__file__).resolve().parent


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def superlink(home: Path) -> Iterator[dict[str, str]]:
    """A SuperLink in simulation mode of our own, and the environment in which ``flwr`` finds it."""
    http, control = free_ports(2)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{http}"\ninsecure = true\n'
    )
    scripts = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # The app's dependencies are those of this environment.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A cluster of its own, whatever else runs on this machine.
        "RAY_ADDRESS": "local",
        # Ray's workers step back behind everything else that runs, which on a busy machine means not at all.
        "RAY_worker_niceness": "0",
        "PATH": scripts + os.pathsep + os.environ.get("PATH", ""),
    }
    command = [
        *("flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"),
        *("--control-api-address", f"127.0.0.1:{control}", "--host", "127.0.0.1", "--port", str(http)),
    ]
    with open(home / "superlink.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        await_health(f"http://127.0.0.1:{http}/health", process)
        yield environment
    finally:
        end(process.pid)


def end(pid: int) -> None:
    """End a process and all that it started, Ray among it, which Flower would leave behind."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.terminate()
    for one in psutil.wait_procs(family, timeout=10)[1]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def await_health(address: str, process: subprocess.Popen[bytes], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(address, timeout=1):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the SuperLink did not start: exit code {process.poll()}")


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "recordings").resolve()
    with tempfile.TemporaryDirectory() as home, superlink(Path(home)) as environment:
        command = [
            *("flwr", "run", str(HERE), "--stream", "--run-config", f'recordings="{out}"'),
            *("--federation-config", "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=2"),
        ]
        subprocess.run(command, env=environment, check=True)

    from audited_federation.task import make_model

    from leakscope.integrations.flower import altered_on_the_way, audit_recordings

    for side in ("clients", "server"):
        audit = audit_recordings(out / side, model=make_model(), attack="cocktail-party")
        print(audit.describe())
        print("page:", audit.report(out / side / "report.html"))
    print("altered between client and server:", altered_on_the_way(out / "clients", out / "server") or "nothing")
    print(json.dumps(json.loads((out / "metrics.json").read_text()), indent=1))


if __name__ == "__main__":
    main()
