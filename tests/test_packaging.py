"""What is published: wheel and sdist are whole, the wheel runs by itself, and its extras fit the constraints."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

import leakscope
from leakscope.cli import app

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "tools" / "check_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("build", reason="building needs the package build: pip install -e .[dev]")
    pytest.importorskip("setuptools", reason="building needs setuptools: pip install -e .[dev]")
    wheel, sdist = tool.build(tmp_path_factory.mktemp("wheel"))
    return wheel, sdist


def test_wheel_and_sdist_hold_what_they_should_and_nothing_else(tool: ModuleType, built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    assert tool.wheel_problems(wheel) == []
    assert tool.sdist_problems(sdist) == []
    assert wheel.stat().st_size < 3_000_000


def test_a_file_that_a_wheel_lacks_is_noticed(tool: ModuleType, tmp_path: Path, built: tuple[Path, Path]) -> None:
    import zipfile

    thin = tmp_path / "thin.whl"
    with zipfile.ZipFile(built[0]) as whole, zipfile.ZipFile(thin, "w") as copy:
        for name in whole.namelist():
            if name != "leakscope/py.typed":
                copy.writestr(name, whole.read(name))
        copy.writestr("tests/test_it.py", "")
    assert tool.wheel_problems(thin) == ["lacks leakscope/py.typed", "holds tests/test_it.py"]


@pytest.mark.slow
def test_the_wheel_runs_an_audit_and_is_a_plug_in(tool: ModuleType, built: tuple[Path, Path], tmp_path: Path) -> None:
    python = tool.borrowed_environment(built[0], tmp_path / "environment")
    (tmp_path / "spec.yaml").write_text(tool.SPEC)
    said = tool.audit(python, tmp_path / "run", str(tmp_path / "spec.yaml"), "--json")
    assert json.loads(said)["outcome"] == "leaks"
    ask = "import leakscope, pathlib; print(pathlib.Path(leakscope.__file__).resolve())"
    for command, wanted in (
        ((str(python), "-c", ask), str(tmp_path / "environment")),
        ((str(python), "-m", "pytest", "--help"), "--leakscope-update-baseline"),
    ):
        done = subprocess.run(command, cwd=tmp_path, env=tool.clean(), capture_output=True, text=True, check=True)
        assert wanted in done.stdout


@pytest.mark.slow
def test_the_extras_resolve_under_the_constraints(tool: ModuleType, built: tuple[Path, Path]) -> None:
    try:
        assert tool.resolve(built[0]) == ""
    except OSError as error:
        pytest.skip(str(error))


def test_every_version_is_the_same() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f'version = "{leakscope.__version__}"' in project
    assert str(citation["version"]) == leakscope.__version__


def vendored(name: str) -> Any:
    """A schema that the package check-jsonschema ships; its code is not loaded."""
    spec = importlib.util.find_spec("check_jsonschema")
    if spec is None or spec.origin is None:
        pytest.skip("the schema is that of check-jsonschema: pip install -e .[dev]")
    return json.loads((Path(spec.origin).parent / "builtin_schemas" / "vendor" / f"{name}.json").read_text("utf-8"))


def test_the_citation_keeps_its_schema() -> None:
    citation = yaml.load((ROOT / "CITATION.cff").read_text(encoding="utf-8"), yaml.BaseLoader)
    assert len(citation["references"]) == 5
    told = {
        **citation,
        "references": [{k: int(v) if k == "year" else v for k, v in r.items()} for r in citation["references"]],
    }
    jsonschema.validate(told, vendored("citation-file-format"))


@pytest.fixture(scope="module")
def action() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    return found


def test_the_action_keeps_its_schema(action: dict[str, Any]) -> None:
    jsonschema.validate(action, vendored("github-actions"))


def test_the_action_uses_options_that_exist_and_inputs_that_are_declared(action: dict[str, Any]) -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    used = set(re.findall(r"inputs\.([a-z-]+)", text))
    assert used == set(action["inputs"])
    scripts = [step["run"] for step in action["runs"]["steps"] if "run" in step]
    (audit,) = (script for script in scripts if "leakscope audit" in script)
    help_text = CliRunner().invoke(app, ["audit", "--help"], env={"COLUMNS": "200"}).output
    options = set(re.findall(r"--[a-z-]+", audit))
    assert options == {"--out", "--sarif", "--no-progress", "--budget"}
    assert all(option in help_text for option in options)
    # What people write into a workflow is data for the shell, never a part of the script.
    assert not [script for script in scripts if "${{" in script]


@pytest.mark.parametrize("code", [0, 1, 4, 5])
def test_the_action_fails_by_the_audits_exit_code(action: dict[str, Any], code: int, tmp_path: Path) -> None:
    """Its scripts, run by bash as the runner does, with a command in place of leakscope."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "leakscope").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/arguments"\nexit {code}\n')
    (tools / "leakscope").chmod(0o755)
    steps = {step["name"]: step for step in action["runs"]["steps"]}
    output = tmp_path / "output"
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"]
    given = {"SPEC": "my spec.yaml", "OUT": "out", "SARIF": "s.sarif", "BUDGET": "", "GITHUB_OUTPUT": str(output)}
    environment = {"PATH": f"{tools}:/usr/bin:/bin", **given}
    subprocess.run([*shell, steps["Audit"]["run"]], env=environment, check=True)
    wanted = ["audit", "my spec.yaml", "--out", "out", "--sarif", "s.sarif", "--no-progress"]
    assert (tmp_path / "arguments").read_text().splitlines() == wanted
    assert output.read_text() == f"exit-code={code}\n"
    told = subprocess.run([*shell, steps["Verdict"]["run"]], env={**environment, "CODE": str(code)}, check=False)
    assert told.returncode == code
    died = subprocess.run([*shell, steps["Verdict"]["run"]], env={**environment, "CODE": ""}, check=False)
    assert died.returncode == 3  # an audit that told nothing is no pass
    assert steps["Verdict"]["if"] == "always()"
    assert action["runs"]["steps"][-1]["name"] == "Verdict"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", (ROOT / name).read_text(encoding="utf-8"))
    assert targets
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []
