"""The example under examples/flower, run really: a SuperLink, ``flwr run``, two clients in Ray, two rounds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None,
    reason="flwr[simulation] is not installed: pip install 'leakscope[flower]' 'flwr[simulation]'",
)
def test_both_rounds_of_both_clients_are_audited_on_both_sides(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    out = tmp_path / "recordings"
    result = subprocess.run(
        [sys.executable, str(EXAMPLE / "run.py"), str(out)],
        # Somebody's settings of Flower must neither be read nor changed.
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert not (home / ".flwr").exists()
    assert "altered between client and server: nothing" in result.stdout

    from leakscope.capture.recordings import recordings

    taken = {side: [one.origin for one in recordings(out / side)] for side in ("clients", "server")}
    clients = {origin.client for origin in taken["server"]}
    assert len(clients) == 2
    expected = {(place, number, client) for place in ("raw", "as_sent") for number in (1, 2) for client in clients}
    assert {(one.place, one.number, one.client) for one in taken["clients"]} == expected
    assert {(one.place, one.number, one.client) for one in taken["server"]} == {
        ("server", number, client) for number in (1, 2) for client in clients
    }
    assert len(list((out / "clients").glob("*.truth.safetensors"))) == 8
    assert not list((out / "server").glob("*.truth.safetensors"))

    metrics = json.loads((out / "metrics.json").read_text())
    assert sorted(metrics) == ["1", "2"]
    for record in metrics.values():
        # The defence is far too weak, and the audit says so; the raw update gives everything away.
        assert record["leakscope.raw.psnr.worst_client"] > 100
        assert 25 < record["leakscope.as_sent.psnr.worst_client"] < 60
        assert record["leakscope.server.unexplained"] < 0.6 < record["leakscope.server.unexplained_of_noise"]
        assert not [key for key in record if key.startswith("leakscope.server") and "psnr" in key]
