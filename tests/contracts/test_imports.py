"""Code that is named: where it may come from, and that nothing else runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leakscope.audit import SpecError, load_spec
from leakscope.contracts.registry import import_object, names_of_a_spec, own_folders

MINE = """
import functools
import os
import subprocess
from os import system
from torch import load, nn


class Net(nn.Module):
    pass


class Tools:
    system = system

    @staticmethod
    def build():
        return Net()


def build():
    return Net()


ready = Net()
late = functools.partial(os.system)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, the current one, beside one with a spec; what was imported is forgotten afterwards."""
    for name in ("here", "specs"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "import_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path / "here")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("name", ["Net", "build", "Tools.build", "ready"])
def test_code_of_the_users_folder_may_be_named_by_a_spec(name: str, folder: Path) -> None:
    before = list(sys.path)
    with names_of_a_spec(folder / "specs"):
        assert callable(import_object("model", f"import_mine:{name}"))
    assert sys.path == before
    assert own_folders()[0] == str(folder / "here")


def test_code_beside_the_spec_may_be_named_by_it(folder: Path) -> None:
    (folder / "specs" / "import_beside.py").write_text(MINE)
    with pytest.raises(ValueError, match="no module named 'import_beside'"):
        import_object("model", "import_beside:Net")
    with names_of_a_spec(folder / "specs"):
        assert import_object("model", "import_beside:Net").__module__ == "import_beside"


@pytest.mark.parametrize(
    "name",
    [
        *("subprocess:run", "os:system", "os:path.join", "builtins:eval", "pickle:loads", "importlib:import_module"),
        *("test.support:run_in_subinterp", "idlelib.run:main", "import_mine:system", "import_mine:subprocess.run"),
        *("import_mine:Tools.system", "torch:load", "torch.hub:load", "torch.package:PackageImporter"),
        "import_mine:load",
    ],
)
@pytest.mark.parametrize("words", ["a spec's", "allowed", "typed"])
def test_tools_of_python_and_torch_are_never_called_for_a_name(name: str, words: str, folder: Path) -> None:
    typed = [name] if words == "typed" else []
    with (
        names_of_a_spec(folder / "specs", allowed=words == "allowed", typed=typed),
        pytest.raises(ValueError, match=f"^model '{name}': "),
    ):
        import_object("model", name)


@pytest.mark.parametrize("name", ["yaml:safe_load", "torch.nn:Linear", "leakscope.models:build_model", "__main__:x"])
def test_installed_code_needs_a_word_of_the_user(name: str, folder: Path) -> None:
    with names_of_a_spec(folder / "specs"), pytest.raises(ValueError, match="allow_code") as caught:
        import_object("model", name)
    assert "A spec is data" in str(caught.value)
    if name.startswith("_"):
        return
    with names_of_a_spec(folder / "specs", allowed=True):
        allowed = import_object("model", name)
    with names_of_a_spec(folder / "specs", typed=[name]):
        assert import_object("model", name) is allowed
    assert import_object("model", name) is allowed


def test_a_module_that_may_not_be_named_is_not_even_imported(folder: Path) -> None:
    assert "antigravity" not in sys.modules
    assert "tabnanny" not in sys.modules
    with names_of_a_spec(folder / "specs"), pytest.raises(ValueError, match="standard library"):
        import_object("model", "tabnanny:check")
    with pytest.raises(ValueError, match="standard library"):
        import_object("model", "antigravity:geohash")
    assert not {"antigravity", "tabnanny"} & set(sys.modules)


def test_what_a_spec_names_must_be_defined_there(folder: Path) -> None:
    (folder / "here" / "import_again.py").write_text("from yaml import safe_load\nfrom import_mine import build\n")
    for name in ("safe_load", "build"):
        with names_of_a_spec(folder), pytest.raises(ValueError, match="not defined in import_again"):
            import_object("model", f"import_again:{name}")
        assert callable(import_object("model", f"import_again:{name}"))
    with names_of_a_spec(folder), pytest.raises(ValueError, match="not defined in import_mine"):
        import_object("model", "import_mine:late")
    package = folder / "here" / "import_package"
    package.mkdir()
    (package / "__init__.py").write_text("from import_package.nets import build\n")
    (package / "nets.py").write_text("def build():\n    return 3\n")
    with names_of_a_spec(folder):
        assert import_object("model", "import_package:build")() == 3


def test_the_users_files_stand_in_for_nothing(folder: Path) -> None:
    here = folder / "here"
    for name in ("json", "colorsys", "yaml", "psutil"):
        (here / f"{name}.py").write_text("raise SystemExit('planted')")
    (here / "torch").mkdir()
    (here / "import_reads.py").write_text("import colorsys, json, psutil\n\ndef build():\n    return colorsys\n")
    assert import_object("model", "import_reads:build")().__file__ != str(here / "colorsys.py")
    with pytest.raises(ValueError, match=r"json is part of Python's standard library.*needs another name"):
        import_object("model", "json:build")
    with pytest.raises(ValueError, match=r"there are two modules yaml, .*Rename yours"):
        import_object("model", "yaml:build")
    assert callable(import_object("model", "torch.nn:Linear"))


@pytest.mark.parametrize(
    "line",
    [
        "model: {name: 'KIND', options: {args: [touch, ran]}}",
        "data: {name: 'KIND', options: {args: [touch, ran]}}",
        "task: 'KIND'",
        "attacks: [{'KIND': {args: [touch, ran]}}]",
        "defenses: ['KIND']",
        "protocols: ['KIND']",
        "executor: 'KIND'",
    ],
)
def test_a_hostile_spec_runs_nothing(line: str, folder: Path) -> None:
    base = {"model": "convnet", "data": "tiles"}
    lines = [f"{key}: {value}" for key, value in base.items() if not line.startswith(key)]
    for name in ("subprocess:run", "yaml:safe_load"):
        path = folder / "specs" / "spec.yaml"
        path.write_text("\n".join([*lines, line.replace("KIND", name)]))
        with pytest.raises(SpecError) as caught:
            load_spec(path)
        assert ("standard library" if name.startswith("sub") else "allow_code") in caught.value.problems[0]
    assert not list(folder.rglob("ran"))
