"""The commands as a user types them: output, exit codes, and that a mistake costs nothing."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from json_schema import violations
from leakscope.cli import app, main
from leakscope.cli.audit import _data_option, _merged
from leakscope.contracts.knowledge import Knowledge
from leakscope.federation import FedSGD
from leakscope.models import build_model
from leakscope.report.export import schema
from leakscope.results import Store

TINY = """
model: {name: mlp, options: {hidden: [8]}}
data: {name: tiles, limit: 4}
examples: 2
attacks: [linear-layer, {inverting-gradients: {iterations: 3}}]
executor: serial
"""


def leakscope(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in this process, where the libraries are loaded already: ``main`` as the console script calls it."""
    words, out, err = [str(a) for a in arguments], io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["leakscope", *words])
        for name, value in {"COLUMNS": "160", **environment}.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(words, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def in_a_shell(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "leakscope.cli", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "spec.yaml").write_text(TINY)
    done = in_a_shell("audit", "spec.yaml", "--out", "run", cwd=folder)
    assert done.returncode == 1, done.stderr
    assert "Verdict: LEAKS" in done.stdout
    assert (folder / "run" / "report.html").is_file()
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_running_again_resumes_and_says_so(finished) -> None:
    again = leakscope("audit", "spec.yaml", "--out", "run", cwd=finished)
    assert again.returncode == 1
    assert re.search(r"resuming: \d+ of \d+ jobs are done", again.stderr)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["audit", "missing.yaml"], "no such file"),
        (["audit", "broken.yaml"], "not valid YAML"),
        (["audit", "list.yaml"], "expected a mapping"),
        (["audit", "wrong.yaml"], "nonsense"),
        (["audit", "--model", "no.such.module:factory"], "no.such.module"),
        (["audit", "--model", "convnett"], "convnet"),
        (["audit", "--data", "cifar10", "--data-path", "truncated.bin"], "truncated.bin"),
        (["audit", "--data", "tiles:nonsense=1"], "data 'tiles' has no option nonsense"),
        (["audit", "--data", "folder:path=a", "--data-path", "b"], "got both"),
        (["audit", "--attack", "dlg:nonsense=1"], "nonsense"),
        (["audit", "--attack", "dlg:iterations"], "key=value"),
        (["audit", "--attack", "dlg:history=0"], "history"),
        (["audit", "--attack", "dlg:iterations=abc"], "iterations"),
        (["audit", "--examples", "0"], "examples"),
        (["audit", "--frobnicate"], "frobnicate"),
        (["audit", "spec.yaml", "--threads", "2"], "threads: the store has 1, now 2"),
        (["audit", "spec.yaml", "--budget", "soon"], "budget: expected a time such as 90s, 10m or 1h30m, or seconds"),
    ],
)
def test_a_mistake_is_one_clear_error_with_code_4_and_leaves_the_store_alone(arguments, words, finished) -> None:
    (finished / "broken.yaml").write_text("model: [unclosed")
    (finished / "list.yaml").write_text("- a\n- b\n")
    (finished / "wrong.yaml").write_text(TINY + "nonsense: 3\nbatch: -1\n")
    (finished / "truncated.bin").write_bytes(b"\x01" * 1000)
    before = snapshot(finished / "run")
    result = leakscope(*arguments, *(["--out", "run"] if arguments[0] == "audit" else []), cwd=finished)
    assert result.returncode == 4, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    after = snapshot(finished / "run")
    assert {k: v for k, v in before.items() if "-wal" not in k and "-shm" not in k} == {
        k: v for k, v in after.items() if "-wal" not in k and "-shm" not in k
    }


@pytest.mark.parametrize(
    ("typed", "path", "spec", "section"),
    [
        (None, None, None, None),
        ("tiles", None, None, "tiles"),
        (None, "pictures", None, {"name": "folder", "path": Path("pictures")}),
        (None, "pictures", "spec.yaml", {"path": Path("pictures")}),
        (
            *("folder:mode=L,resize=28,limit=9,mean=0.5,std=0.2", "pictures", None),
            {
                **{"name": "folder", "path": Path("pictures"), "limit": 9, "mean": [0.5], "std": [0.2]},
                "options": {"mode": "L", "resize": 28},
            },
        ),
    ],
)
def test_data_has_options_on_the_command_line(typed, path, spec, section) -> None:
    assert _data_option(typed, path and Path(path), spec and Path(spec)) == section


def test_data_that_is_named_replaces_that_of_the_spec() -> None:
    written = {"data": {"name": "folder", "path": "clinic", "options": {"resize": 8}}}
    assert _merged(written, Path("s"), {"data": {"path": "b"}})["data"] == {**written["data"], "path": "b"}
    assert _merged(written, Path("s"), {"data": {"name": "mnist", "limit": 3}})["data"] == {"name": "mnist", "limit": 3}


def test_an_option_changes_one_limit_of_the_policy_not_all(finished) -> None:
    (finished / "policy.yaml").write_text(TINY + "policy: {max_psnr: 500, max_ssim: 0.1}\n")
    more = ["--max-psnr", "400", "--waive", "idlg", "--waive", "head-first"]
    result = leakscope("audit", "policy.yaml", *more, "--out", "run", cwd=finished)
    assert result.returncode == 1, result.stderr
    assert "SSIM" in result.stdout
    told = " ".join(result.stdout.split())
    assert "Warning: Waived: the policy allows a pass without the standard attacks idlg, head-first." in told


def test_a_budget_that_ends_is_told_and_the_same_command_goes_on(finished) -> None:
    command = ["audit", "spec.yaml", "--out", "short"]
    first = leakscope(*command, "--budget", "0.000001s", cwd=finished)  # of the many jobs one is always begun
    assert first.returncode == 5, first.stderr
    assert "Verdict: NOTHING AUDITED" in first.stdout
    told = " ".join(first.stdout.split())
    assert "ended before 4 of 4 attempts were made" in told
    assert "Run the same command without --budget, or again: what is done stays" in told
    rest = leakscope(*command, "--budget", "1h30m", cwd=finished)
    assert rest.returncode == 1, rest.stderr
    assert "resuming: 1 of " in rest.stderr
    assert "ended before" not in rest.stdout
    # linear-layer recovers the first undefended example exactly, so that nothing more is spent on that scenario
    assert "Run the same command with --no-stop-on-leak to have them too" in " ".join(rest.stdout.split())
    with Store.open(finished / "short") as store:
        assert store.meta("spec")["budget"] == 5400.0


def test_usage_errors_do_not_create_a_folder(tmp_path) -> None:
    assert leakscope("audit", "--model", "nothing", "--out", "new", cwd=tmp_path).returncode == 4
    assert list(tmp_path.iterdir()) == []


def test_attack_on_a_captured_update(tmp_path) -> None:
    net = build_model("mlp", input_shape=(3, 8, 8), num_classes=5)
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = FedSGD().observe(net, x, torch.tensor([3]), knowledge=Knowledge.honest_server, model_name="mlp")
    seen.save(tmp_path / "update.safetensors")
    done = leakscope("attack", "update.safetensors", "--attack", "linear-layer", "--out", "found", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "found" / "reconstruction-0.png").is_file()
    told = json.loads((tmp_path / "found" / "reconstruction.json").read_text())
    assert told["flags"] == []
    from safetensors.torch import load_file

    found = load_file(tmp_path / "found" / "reconstruction.safetensors")["inputs"]
    assert float((found - x).abs().max()) < 1e-4


@pytest.mark.parametrize("harm", ["damaged", "hostile name", "not finite"])
def test_attack_refuses_bad_updates_with_code_4(harm, tmp_path) -> None:
    net = build_model("mlp", input_shape=(3, 8, 8), num_classes=5)
    x = torch.rand(1, 3, 8, 8)
    seen = FedSGD().observe(net, x, torch.tensor([3]), model_name="mlp")
    if harm == "not finite":
        update = {k: v.clone() for k, v in seen.message.update.items()}
        next(iter(update.values())).fill_(float("nan"))
        seen = seen.with_update(update)
    seen.save(tmp_path / "update")
    if harm == "damaged":
        (tmp_path / "update.safetensors").write_bytes(b"oh no")
    if harm == "hostile name":  # code named by a data file must not run
        text = (tmp_path / "update.json").read_text().replace('"mlp"', '"os:getcwd"')
        (tmp_path / "update.json").write_text(text)
    done = leakscope("attack", "update", "--out", "found", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "found").exists()


def test_other_commands(finished) -> None:
    for what in ("attacks", "defenses", "models", "data", "papers"):
        done = leakscope("list", what, cwd=finished)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) >= 2
    assert leakscope("report", "run", "--to", "page.html", cwd=finished).stdout.strip().endswith("page.html")
    compared = leakscope("compare", "run", "run", "--to", "compare.html", cwd=finished)
    assert compared.returncode == 0, compared.stderr
    assert (finished / "compare.html").is_file()
    assert leakscope("report", "nowhere", cwd=finished).returncode == 4
    done = leakscope("limits", "--model", "mlp", "--input", "1x8x8", "--batch", "2", "--json", cwd=finished)
    assert json.loads(done.stdout)["batch"] == 2
    assert json.loads(done.stdout)["floor"] is None
    assert leakscope("reproduce", "gradients/counting", cwd=finished).returncode == 0
    assert leakscope("reproduce", "no/such", cwd=finished).returncode == 4
    assert leakscope("--version", cwd=finished).stdout.startswith("leakscope ")


@pytest.mark.parametrize(
    "kind, arguments",
    [
        ("audit", ["audit", "spec.yaml", "--out", "run"]),
        ("audit", ["report", "run"]),
        ("compare", ["compare", "run", "run"]),
        ("list", ["list", "attacks"]),
        ("list", ["list", "attacks", "dlg"]),
        ("list", ["list", "data", "mnist"]),
        ("reproduce", ["reproduce", "gradients/counting"]),
    ],
)
def test_machines_get_a_document_by_its_schema_and_a_table(kind: str, arguments: list[str], finished: Path) -> None:
    done = leakscope(*arguments, "--json", cwd=finished)
    told = json.loads(done.stdout)
    assert violations(told, schema(kind)) == []
    assert str(finished) not in done.stdout
    table = leakscope(*arguments, "--csv", cwd=finished)
    assert table.returncode == done.returncode == (1 if arguments[0] == "audit" else 0)
    lines = list(csv.DictReader(io.StringIO(table.stdout)))
    assert len(lines) >= 2
    assert all(None not in line and None not in line.values() for line in lines)
    assert leakscope(*arguments, "--csv", "--json", cwd=finished).returncode == 4


def test_text_for_people_leaves_stdout_to_the_document_and_quiet_is_two_lines(finished: Path) -> None:
    both = leakscope("audit", "spec.yaml", "--out", "run", "--json", cwd=finished)
    assert "Verdict: LEAKS" in both.stderr
    quiet = leakscope("audit", "spec.yaml", "--out", "run", "-q", cwd=finished)
    assert quiet.stdout.splitlines() == ["Verdict: LEAKS", "Report:  run/report.html"]
    assert quiet.stderr == ""
    assert json.loads(both.stdout)["files"] == {"folder": "run", "report": "run/report.html"}
    assert leakscope("audit", "spec.yaml", "-q", "-v", cwd=finished).returncode == 4


@pytest.mark.parametrize("width", ["60", "80"])
def test_what_is_printed_fits_and_has_no_escape_codes_in_a_pipe(width: str, finished: Path) -> None:
    commands = [["audit", "spec.yaml", "--out", "run"], ["compare", "run", "run"], ["list", "papers"]]
    commands += [["list", "attacks", "dlg"], ["reproduce", "gradients/counting"], ["limits", "spec.yaml"]]
    for command in commands:
        told = leakscope(*command, cwd=finished, COLUMNS=width)
        assert max(map(len, told.stdout.splitlines())) <= int(width), command
        assert "\x1b" not in told.stdout + told.stderr


def test_labels_change_one_thing_of_the_knowledge(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(TINY + "knowledge: {labels: 'no', learning_rate: true}\n")
    options = ["--labels", "counts", "--max-label-accuracy", "0.25", "--no-findings", "--attack", "linear-layer", "-q"]
    for spec, known in ((["spec.yaml"], Knowledge(learning_rate=True)), ([], Knowledge.honest_server)):
        done = leakscope(
            "audit", *spec, *options, "--out", f"run{len(spec)}", "--examples", "1", "--serial", cwd=tmp_path
        )
        assert done.returncode in (0, 1, 5), done.stderr
        with Store.open(tmp_path / f"run{len(spec)}") as store:
            found = Knowledge(**store.meta("spec")["knowledge"])
            assert store.meta("policy")["max_label_accuracy"] == 0.25
        assert found == dataclasses.replace(known, labels="counts")
    assert leakscope("audit", "--labels", "some", cwd=tmp_path).returncode == 4


def test_an_error_of_megabytes_is_capped_and_a_near_name_is_told_once(tmp_path: Path) -> None:
    long = leakscope("audit", "--attack", "x" * 3_000_000, cwd=tmp_path)
    assert (long.returncode, len(long.stderr) < 5000) == (4, True)
    assert "characters left out" in long.stderr
    for words in (["adit"], ["reproduce", "idlg/label"], ["list", "attacks", "dgl"], ["audit", "--protocol", "fedsdg"]):
        told = leakscope(*words, cwd=tmp_path)
        assert told.stderr.lower().count("did you mean") == 1, told.stderr
        assert told.stderr.strip().endswith("?")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--input", "abc"], "3x32x32"),
        ([], "--input"),
        (["--input", "1x8x8", "--prune", "1"], "prune:"),
        (
            ["--input", "1x8x8", "--noise", "1", "--noise-scale", "times-clip"],
            "expected together with --noise and --clip",
        ),
        (["--input", "1x8x8", "--noise", "1", "--probes", "1", "--data", "tiles"], "has shape 3x32x32"),
        (["--data", "no-such-data"], "unknown data"),
        (["--data", "tiles", "--index", "-1"], "--index"),
        (["--data", "tiles", "--index", "100000"], "between 0 and"),
    ],
)
def test_mistakes_in_limits_are_named(arguments, words) -> None:
    done = CliRunner().invoke(app, ["limits", "--model", "mlp", *arguments])
    assert isinstance(done.exception, ValueError), done.output  # main turns these into code 4
    assert words in str(done.exception)


def test_limits_with_a_channel_and_with_real_examples(tmp_path) -> None:
    options = ["--model", "mlp", "--batch", "2", "--noise", "0.1", "--clip", "0.5", "--dropout", "0.1", "--seed", "3"]
    done = leakscope("limits", *options, "--input", "1x4x4", cwd=tmp_path, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    for words in ("What is observed", "Identifiability", "least RMSE", "clip factor", "DP-SGD", "Conclusion:"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    real = ["--data", "tiles", "--index", "1", "--probes", "2", "--json"]
    done = CliRunner().invoke(app, ["limits", "--model", "logistic", "--noise", "0.1", *real])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["point"] == "the batch that was given"
    assert facts["floor"]["method"] == "estimate"
    assert facts["num_classes"] == 9


VERTICAL = """
model: {name: vertical-mlp, options: {workers: 2, hidden: 6, middle: 4, slices: strips}}
data: {name: tiles, limit: 12}
examples: 12
batch: 12
protocols: [{vertical: {batch_size: 3, rounds: 5}}]
attacks: [inverting-gradients]
executor: serial
"""


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "vertical-mlp", "--input", "16"], "--samples: 'vertical-mlp' is a vertical model"),
        (["--model", "mlp", "--input", "16", "--samples", "4"], "for a vertical model only, and 'mlp' is none"),
        (["--model", "mlp", "--input", "16", "--rounds", "4"], "for a vertical model only"),
        (["--model", "vertical-mlp", "--input", "16", "--samples", "4", "--batch", "5"], "at most the 4 samples"),
        (["--model", "vertical-mlp", "--input", "16", "--samples", "4", "--noise", "1"], "leave them out"),
        (["--model", "vertical-mlp", "--data", "tiles", "--samples", "0"], "--samples"),
        ([], "expected a spec (leakscope limits SPEC.yaml) or --model"),
        (["spec.yaml", "--batch", "3", "--data", "tiles"], "--batch, --data: expected without a spec"),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_mistakes_in_limits_of_vertical_models_are_named(arguments, words) -> None:
    done = CliRunner().invoke(app, ["limits", *arguments])
    assert isinstance(done.exception, ValueError), done.output
    assert words in str(done.exception)


def test_limits_of_a_vertical_model(tmp_path) -> None:
    options = ["--model", "vertical-mlp", "--input", "16", "--classes", "3", "--samples", "20", "--batch", "4"]
    done = leakscope("limits", *options, "--rounds", "30", cwd=tmp_path, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    for words in ("vertical-mlp, 20 x 16, 30 rounds of 4", "Announced batches", "Workers", "as printed", "Conclusion:"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    options = ["--model", "vertical-mlp", "--data", "tiles", "--index", "2", "--samples", "6", "--batch", "2"]
    done = CliRunner().invoke(app, ["limits", *options, "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["samples"], facts["batch"], facts["point"]) == (6, 2, "the samples that were given")


def test_limits_of_a_spec(tmp_path) -> None:
    (tmp_path / "vertical.yaml").write_text(VERTICAL)
    done = CliRunner().invoke(app, ["limits", str(tmp_path / "vertical.yaml"), "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["samples"], facts["batch"], facts["rounds"], facts["sampling"]) == (12, 3, 5, "uniform")
    assert facts["index"]["rank"] <= 5
    assert len(facts["workers"]) == 2
    shuffled = VERTICAL.replace("rounds: 5", "sampling: epochs").replace("]\nattacks", ", fedsgd]\nattacks")
    (tmp_path / "two.yaml").write_text(shuffled)
    done = CliRunner().invoke(app, ["limits", str(tmp_path / "two.yaml"), "--json"])
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.stdout)
    assert (first["rounds"], first["sampling"]) == (20, "epochs")
    assert (second["batch"], second["input_shape"]) == (12, [3, 32, 32])
    (tmp_path / "plain.yaml").write_text(TINY)
    done = CliRunner().invoke(app, ["limits", str(tmp_path / "plain.yaml"), "--noise", "0.1", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["batch"], facts["point"]) == (1, "the batch that was given")
    assert facts["floor"] is not None


def test_limits_of_a_users_own_data(tmp_path: Path) -> None:
    import numpy

    numpy.savez(tmp_path / "own.npz", x=numpy.random.default_rng(0).random((4, 1, 8, 8)), y=numpy.array([0, 1, 2, 1]))
    done = leakscope(
        *("limits", "--model", "logistic", "--data", "npz", "--data-path", "own.npz", "--index", "2", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["input_shape"], told["num_classes"], told["point"]) == ([1, 8, 8], 3, "the batch that was given")
    missing = leakscope("limits", "--model", "logistic", "--data-path", "nowhere", cwd=tmp_path)
    assert missing.returncode == 4
    assert "nowhere" in missing.stderr


@pytest.mark.parametrize("command", ["audit", "limits"])
@pytest.mark.parametrize("name", ["nets.py", "./nets.py:small"])
def test_a_model_given_as_a_file_comes_with_the_name_to_write(command: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("def small(): ...\n")
    options = ["--input", "1x4x4"] if command == "limits" else []
    done = leakscope(command, "--model", name, *options, cwd=tmp_path)
    assert done.returncode == 4
    assert f"nets:{'small' if ':' in name else 'NAME'}" in done.stderr
