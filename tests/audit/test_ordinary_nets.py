"""Twelve nets as people bring them, at 28, 32 and 64 pixels: each audit ends with a verdict, and no job fails.

Nets are tiny and steps few: what is shown is that they can be audited from a user's file, not what they leak.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import ordinary_nets
import pytest
import yaml
from command_line import typed
from ordinary_nets import NETS

from leakscope.results import FindingRow, Row, Store

SHAPES = {28: (1, 28, 28), 32: (3, 32, 32), 64: (3, 64, 64)}
ATTACKS: list[Any] = [
    "linear-layer",
    {"inverting-gradients": {"iterations": 2}},
    {"gauss-newton": {"steps": 1, "restarts": 1, "smooth_only": False}},
]


def audited(folder: Path, model: Any, side: int, **settings: Any) -> tuple[list[Row], list[FindingRow]]:
    """An audit of a spec beside a file of nets and a pack of pictures, typed on the command line."""
    shutil.copy(ordinary_nets.__file__, folder / "mynets.py")
    draws = np.random.default_rng(side)
    np.savez(folder / "pack.npz", x=draws.random((4, *SHAPES[side]), dtype=np.float32), y=np.array([1, 9, 3, 0]))
    data = {"name": "npz", "path": str(folder / "pack.npz")}
    plain = {"examples": 1, "controls": False, "findings": False, "attacks": ATTACKS, "executor": "serial"}
    (folder / "spec.yaml").write_text(yaml.safe_dump({"model": model, "data": data, **plain, **settings}))
    done = typed("audit", folder / "spec.yaml", "--out", folder / "run")
    assert done.returncode in (0, 1, 5), done.stderr
    assert "Verdict: " in done.stdout
    assert (folder / "run" / "report.html").is_file()
    with Store.open(folder / "run") as store:
        return store.rows(), store.findings()


@pytest.mark.slow
@pytest.mark.parametrize("side", SHAPES)
@pytest.mark.parametrize("name", NETS)
def test_an_ordinary_net_gets_a_verdict_and_no_job_fails(
    name: str, side: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Probes of the diagnosis run, and end early: what they find has tests of its own, and here they took minutes.
    monkeypatch.setattr("leakscope.limits.diagnosis.PROBES", (1, 10))
    factory, protocol = NETS[name]
    # Statistics of a batch need two; of the small pictures too, so that theory, which has tests below, takes no time.
    batch = 2 if protocol or side == 28 else 1
    rows, _ = audited(folder, f"mynets:{factory}", side, protocols={"fedsgd": protocol}, examples=batch, batch=batch)
    assert len(rows) == len(ATTACKS)
    assert {row.status for row in rows} <= {"done", "refused"}, [row.error for row in rows]
    assert [row.status for row in rows[1:]] == ["done", "done"]


@pytest.mark.parametrize(
    ("model", "defense"),
    [
        ("mynets:lenet", "none"),
        ("mynets:stride_cnn", "none"),
        ("mynets:stride_cnn", {"gradient-pruning": {"fraction": 0.99}}),
        pytest.param("femnist-cnn", {"gradient-pruning": {"fraction": 0.99}}, marks=pytest.mark.slow),
    ],
    ids=["LeNet", "stride CNN", "99 % pruning", "femnist-cnn, 99 % pruning"],
)
def test_an_infinite_condition_number_is_stored_as_such(model: str, defense: Any, folder: Path) -> None:
    settings = {"defenses": defense, "findings": ["floor"], "attacks": ATTACKS[1:2]}
    _, (floor,) = audited(folder, model, 28, **settings)
    assert floor.status == "done"
    assert floor.content["infinite"] is True
    assert (floor.content["condition"], floor.content["rmse"]) == (None, None)
    assert "leave no trace" in floor.content["note"] or "cannot show" in floor.content["note"]


@pytest.mark.parametrize("name", ["transformer", "LSTM over rows", "U-Net-like"])
def test_theory_and_controls_beside_every_kind_of_layer(name: str, folder: Path) -> None:
    settings = {"findings": True, "controls": True, "attacks": ATTACKS[1:2]}
    rows, (floor, embedding) = audited(folder, f"mynets:{NETS[name][0]}", 28, **settings)
    assert {row.status for row in rows} == {"done"}, [row.error for row in rows]
    assert floor.status == "done", floor.error
    assert embedding.status == "done", embedding.error
    assert floor.content["unknowns"] == 784


def test_limits_of_ordinary_nets_are_json(folder: Path) -> None:
    shutil.copy(ordinary_nets.__file__, folder / "mynets.py")
    for name, (factory, _) in NETS.items():
        done = typed(
            "limits", "--model", f"mynets:{factory}", "--input", "1x16x16", "--classes", 10, "--noise", 0.1, "--json"
        )
        assert done.returncode == 0, (name, done.stderr)
        assert json.loads(done.stdout, parse_constant=pytest.fail)["unknowns"] == 256
