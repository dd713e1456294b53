from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
import torch
from audit_doubles import BASE, run, timeless
from safetensors.torch import save_file

import leakscope
from leakscope.audit import Audit, SpecError, run_spec
from leakscope.audit.controls import noise_of_equal_norm
from leakscope.contracts.inputs import ValueRange
from leakscope.federation import FedSGD
from leakscope.results import Store, StoreError, StoreMismatch
from leakscope.results.records import plain
from leakscope.results.store import STORE_FORMAT


def test_finds_the_leak_and_clears_the_defence(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.verdict.outcome == "leaks"
    assert done.worst is not None
    assert (done.worst.attack_name, done.worst.defense) == ("quotient", "none")
    assert done.worst.psnr > 60
    assert done.worst.value("label_correct") == 1
    none, noise = done.verdict.settings
    assert none.outcome == "leaks"
    assert noise.outcome == "inconclusive"  # poor pixels, but no attack here knows of the noise
    assert any(reason.code == "defence-unknown" for reason in noise.reasons)
    assert sum(row.counts for row in done.rows) == 2 * 2 * 3
    assert all(row.status == "done" for row in done.rows)
    assert "leaks, worst" in repr(done)
    row = done.rows[0]
    assert row.job.attack_name == "quotient"
    assert row.job.indices == (0,)
    assert row.job.knowledge["normalisation"] is True
    assert row.result is not None
    assert row.result.info["threads"] == 1
    assert row.result.info["steps"] == 1
    assert row.raw is not None
    told = {"index", "label_correct", "mse", "psnr", "ssim", "lpips", "identified", "score"}
    assert told <= row.raw["examples"][0].keys()
    assert not {"label", "label_guess"} & row.raw["examples"][0].keys(), "examples in memory are private"
    assert (row.result.adaptive, row.result.diagnosis is None) == (False, False)
    assert done.store.history(row.key) == {"objective": [[1.0, 0.5, None]]}
    meta = {key: done.store.meta(key) for key in ("format", "plan", "policy", "data", "model", "versions")}
    assert meta["format"] == STORE_FORMAT
    assert meta["plan"]["total"] == len(done.rows)
    assert meta["plan"]["findings"] == len(done.findings) == 4
    assert meta["data"]["shape"] == [1, 4, 4]
    assert meta["model"]["parameters"] == 51
    limits = {"max_psnr", "min_lift", "max_ssim", "max_identification", "max_label_accuracy"}
    assert set(meta["policy"]) == {*limits, "waive"}
    assert meta["plan"]["standard"] == {"FedSGD(batchnorm='eval', dropout='eval', reduction='mean')": doubles.STANDARD}
    assert set(meta["versions"]) == {"leakscope", "torch", "numpy", "python", "platform"}
    assert done.store.meta("threat_model")[0].startswith("The adversary sees")


def test_the_room_can_be_called() -> None:
    assert leakscope.audit(model=doubles.net(), data=doubles.examples(), **BASE).verdict.outcome == "leaks"


def test_two_runs_agree(tmp_path: Path) -> None:
    assert timeless(run(tmp_path / "a").rows) == timeless(run(tmp_path / "b").rows)


def test_batches_are_attacked_with_different_starts(tmp_path: Path) -> None:
    x, y = doubles.examples(1)
    done = run(tmp_path, data=(x.repeat(2, 1, 1, 1), y.repeat(2)), examples=2, attacks=[doubles.Guess()])
    first, second = (row.examples[0].value("mse") for row in done.rows[:2])
    assert first != second


def test_temporary_folder_goes_with_the_audit() -> None:
    done = run()
    folder = done.directory
    assert folder.is_dir()
    del done
    gc.collect()  # frames of exceptions that were met on the way may hold it in a cycle
    assert not folder.exists()


def test_private_pictures_are_not_written(tmp_path: Path) -> None:
    done = run(tmp_path / "private")
    assert done.store.meta("data")["private"] is True
    assert done.store.meta("pictures") is False
    assert list((tmp_path / "private" / "artifacts").glob("*.safetensors")) == []
    asked = run(tmp_path / "asked", pictures=True)
    found = asked.store.artifact(asked.rows[0].key)
    assert found is not None
    assert set(found) == {"originals", "reconstructions"}
    assert torch.allclose(found["originals"], doubles.examples()[0][:1])
    assert torch.allclose(found["reconstructions"], found["originals"], atol=1e-4)
    assert all(t.dtype == torch.float32 and t.min() >= 0 and t.max() <= 1 for t in found.values())


def test_published_pictures_are_written_unless_declined(tmp_path: Path) -> None:
    settings = {"model": "logistic", "data": "tiles", "examples": 1, "attacks": [doubles.Guess()]}
    done = run_spec(settings, tmp_path / "a")
    assert done.store.artifact(done.rows[0].key) is not None
    done = run_spec({**settings, "pictures": False}, tmp_path / "b")
    assert done.store.artifact(done.rows[0].key) is None


def test_nan_never_passes(tmp_path: Path) -> None:
    done = run(tmp_path, attacks=[doubles.Guess(nan=True)])
    assert done.verdict.outcome != "within policy"
    assert done.verdict.exit_code == 5


def test_troubles_become_rows(tmp_path: Path) -> None:
    troubles = [doubles.Trouble(how=how) for how in ("raise", "refuse", "missing")]
    done = run(tmp_path, attacks=[*troubles, doubles.Guess()], defenses=None, examples=1)
    told = {(row.job.attack, row.job.control): row for row in done.rows}
    failed = told["Trouble(ignore_defense=False, how='raise')", None]
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.startswith("RuntimeError: the line search failed\n")
    assert "audit_doubles.py" in failed.error
    assert told["Trouble(ignore_defense=False, how='refuse')", None].status == "refused"
    assert told["Trouble(ignore_defense=False, how='refuse')", None].error == "NotApplicable: only models without bias"
    assert told["Trouble(ignore_defense=False, how='missing')", "noise"].status == "refused"
    assert told["Guess(ignore_defense=False, flags=(), nan=False)", None].status == "done"
    assert done.verdict.outcome == "inconclusive"


def test_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, attacks=[doubles.Guess(), doubles.Quotient(), doubles.Trouble(how="interrupt")], defenses=None)
    with Store.open(tmp_path) as store:
        # One client after another, so the interrupt comes after the first client's other attacks.
        attempts = [row for row in store.rows() if row.job.control is None]
        assert [(row.status, row.job.batch) for row in attempts] == [("done", 0)] * 2


def test_resume_skips_done_and_retries_failed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    attacks = [doubles.Guess(), doubles.Trouble(how="refuse"), doubles.OnceFailing(marker=str(marker))]
    first = run(tmp_path / "out", attacks=attacks, defenses=None, controls=False)
    assert [row.status for row in first.rows] == ["done"] * 3 + ["refused"] * 3 + ["failed"] * 3
    marker.touch()
    events: list[dict[str, Any]] = []
    second = run(tmp_path / "out", attacks=attacks, defenses=None, controls=False, progress=events.append)
    assert [row.status for row in second.rows] == ["done"] * 3 + ["refused"] * 3 + ["done"] * 3
    assert second.rows[:6] == first.rows[:6]
    assert events[0] == {"event": "planned", "total": 11, "finished": 8}
    assert [e["position"] for e in events if e["event"] == "finished"] == [6, 7, 8]
    assert events[-1]["completed"] == 11
    assert events[-1]["status"] == "done"
    json.dumps(events)


def test_another_audits_folder_is_refused_untouched(tmp_path: Path) -> None:
    first = run(tmp_path)
    with pytest.raises(StoreMismatch, match=r"model\.fingerprint: the store has") as caught:
        run(tmp_path, seeds=2, model=doubles.net(seed=3))
    assert "folder" in str(caught.value)
    assert Audit(tmp_path).rows == first.rows


def test_policy_may_change_on_resume(tmp_path: Path) -> None:
    assert run(tmp_path, defenses=None).verdict.outcome == "leaks"
    again = run(tmp_path, defenses=None, policy={"max_psnr": 500.0, "max_identification": 1.0})
    assert "standard-not-run" in {reason.code for reason in again.verdict.reasons}
    lenient = {"max_psnr": 500.0, "max_identification": 1.0, "waive": doubles.STANDARD}
    again = run(tmp_path, defenses=None, policy=lenient)
    assert again.verdict.outcome == "within policy"
    assert any("Waived: " in line["text"] for line in again.store.meta("audited"))
    assert "The policy allows a pass without the standard attacks linear-layer, " in again.report().read_text()
    assert json.loads(again.to_json())["policy"]["waive"] == doubles.STANDARD
    stricter = run(tmp_path, defenses=None, policy={"max_psnr": 500.0, "max_identification": 1.0})
    assert not any("Waived: " in line["text"] for line in stricter.store.meta("audited"))
    assert stricter.store.meta("policy")["max_psnr"] == 500.0


def test_nothing_is_left_when_the_spec_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "out"
    broken = doubles.net()
    with torch.no_grad():
        broken[1].bias[0] = float("nan")
    for wrong in (
        {"model": torch.nn.Linear(3, 3)},
        {"examples": 99},
        {"nonsense": 1},
        {"model": broken},
        {"data": (torch.rand(2, 1, 4, 4), torch.tensor([0, 9])), "examples": 2},
        {"data": (torch.rand(2, 1, 4, 4), None)},
        {"lpips": "/nonexistent.npz"},
    ):
        with pytest.raises(SpecError):
            run(out, **wrong)
        assert not out.exists()


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="expected a folder"):
        run(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_protocol_or_protocols(tmp_path: Path) -> None:
    done = run(tmp_path, protocol=FedSGD(reduction="sum"))
    assert "reduction='sum'" in done.rows[0].job.protocol
    with pytest.raises(SpecError, match="got both"):
        run(protocol="fedsgd", protocols=["fedsgd"])


def test_value_range_of_tensors() -> None:
    x, y = doubles.examples()
    box = ValueRange((-1.0,), (1.0,))
    done = run(data=(x * 2 - 1, y), value_range=box, num_classes=3)
    assert done.worst is not None
    assert done.worst.psnr > 60
    with pytest.raises(SpecError, match="data: expected Examples, a pair"):
        run(data="tiles", value_range=box)
    with pytest.raises(SpecError, match="data: "):
        run(data=(x, y), num_classes=1)


def test_weights_from_a_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(16, 3)
    path = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), path)
    spec = {
        "model": {"name": "audit_doubles:linear", "weights": str(path)},
        "data": doubles.examples(),
        "examples": 1,
        "attacks": [doubles.Guess()],
    }
    stored = run_spec(spec, tmp_path / "a").store.meta("model")["fingerprint"]
    with torch.no_grad():
        model.bias += 1
    save_file(model.state_dict(), path)
    assert run_spec(spec, tmp_path / "b").store.meta("model")["fingerprint"] != stored
    path.write_bytes(b"junk")
    with pytest.raises(SpecError, match="not a readable safetensors file"):
        run_spec(spec, tmp_path / "c")


@pytest.mark.parametrize("shape", [(5,), (2, 9), (4, 6, 6)])
@pytest.mark.parametrize("batch", [1, 3])
def test_any_shape(shape: tuple[int, ...], batch: int) -> None:
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0)) * 4 - 1
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(x[0].numel(), 5))
    protocols = ["fedsgd", {"fedavg": {"batch_size": 2}}]
    done = run(model=model, data=(x, torch.arange(3)), batch=batch, protocols=protocols, knowledge="full")
    assert {row.status for row in done.rows if row.job.control in (None, "noise", "planted")} == {"done"}
    assert len(done.verdict.settings) == 4
    assert sorted(e.index for e in done.verdict.settings[0].examples) == [0, 1, 2]


def test_a_server_that_may_choose_the_model_does(tmp_path: Path) -> None:
    quick = {"attacks": [doubles.Malicious()], "defenses": None, "examples": 1, "controls": False}
    (honest,) = run(tmp_path / "honest", **quick).rows
    assert honest.status == "refused"
    assert "choose_weights" in str(honest.error)
    (malicious,) = run(tmp_path / "malicious", knowledge="malicious-server", **quick).rows
    assert malicious.status == "done"


def test_the_control_keeps_norms_and_loses_all_else() -> None:
    x, y = doubles.examples()
    observation = FedSGD().observe(doubles.net(), x, y)
    null = noise_of_equal_norm(observation, torch.Generator().manual_seed(0))
    for name, value in observation.message.update.items():
        other = null.message.update[name]
        assert float(other.norm()) == pytest.approx(float(value.norm()), rel=1e-5)
        assert not torch.allclose(other, value)
    assert null.num_examples == observation.num_examples


def test_plain_values() -> None:
    assert plain({"a": math.inf, "b": torch.tensor([1.0, math.nan]), "c": {1: (True, "x")}}) == {
        "a": None,
        "b": [1.0, None],
        "c": {"1": [True, "x"]},
    }
