"""Names as people type them find what they mean, and a name of the user's own is imported."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from leakscope.contracts.registry import Entry, Registry, find_name, import_object


class Base:
    pass


class InvertingGradients(Base):
    pass


class DLG(Base):
    pass


def registry() -> Registry[Entry]:
    entries = (Entry("inverting-gradients", InvertingGradients, "search"), Entry("dlg", DLG, "the first", "a paper"))
    return Registry("attack", entries, Base)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's own in the current folder."""
    name = f"own_parts_{abs(hash(tmp_path))}"
    source = """
        from tests_registry_base import Base

        class Mine(Base):
            class Inner(Base):
                pass

        class Stranger:
            pass

        def function():
            return 3

        value = 4
    """
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tests_registry_base", sys.modules[__name__])
    return name


@pytest.mark.parametrize(
    "typed", ["inverting-gradients", "InvertingGradients", "inverting_gradients", "INVERTING GRADIENTS"]
)
def test_every_spelling_finds_the_same_entry(typed: str) -> None:
    table = registry()
    assert table.find(typed).target is InvertingGradients
    assert table.target(typed) is InvertingGradients


def test_class_names_are_aliases_of_entries_called_otherwise() -> None:
    table = Registry("attack", [Entry("first", DLG, "")], Base)
    assert table.find("DLG").name == "first"
    assert find_name("b", ["a"], [("B", "a")]) == "a"


def test_a_registry_is_a_mapping_in_the_order_of_its_entries() -> None:
    table = registry()
    assert list(table) == ["inverting-gradients", "dlg"]
    assert len(table) == 2
    assert table["dlg"].source == "a paper"
    assert "DLG" not in table, "only find() reads names as people type them"
    with pytest.raises(KeyError):
        table["DLG"]


def test_unknown_names_say_which_there_are_and_which_is_near() -> None:
    with pytest.raises(ValueError, match="unknown attack 'dgl': expected one of inverting-gradients, dlg") as caught:
        registry().find("dgl")
    assert "did you mean dlg?" in str(caught.value)
    assert "package.module:Name" in str(caught.value)
    with pytest.raises(ValueError, match="unknown attack") as caught:
        registry().find("zzzz")
    assert "did you mean" not in str(caught.value)
    with pytest.raises(ValueError, match="attack: expected a name, got int"):
        registry().find(3)  # type: ignore[arg-type]


def test_registering_adds_and_never_overwrites() -> None:
    table = registry()
    table.register(Entry("mine", Base, "my own"))
    assert table.find("Mine").summary == "my own"
    with pytest.raises(ValueError, match="attack 'dlg': there is one already"):
        table.register(Entry("dlg", Base, "another"))
    assert table["dlg"].target is DLG


def test_names_of_classes_in_the_table_and_out_of_it() -> None:
    assert registry().name_of(InvertingGradients) == "inverting-gradients"
    assert registry().name_of(type("FedProxLike", (Base,), {})) == "fed-prox-like"


def test_a_class_of_the_users_own_is_imported_from_the_current_folder(own: str) -> None:
    before = list(sys.path)
    target = registry().target(f"{own}:Mine")
    assert issubclass(target, Base)
    assert registry().target(f"{own}:Mine.Inner") is target.Inner
    assert sys.path == before


@pytest.mark.parametrize(
    "name, words",
    [
        (":Stranger", "expected a class that inherits leakscope.Base"),
        (":function", "expected a class that inherits leakscope.Base"),
        (":value", "value is a int, expected a function or class"),
        (":Absent", "has no 'Absent'. Callables in it: Base, Mine, Stranger, function"),
        (":", "expected package.module:Name"),
        (":two words", "expected package.module:Name"),
    ],
)
def test_wrong_classes_of_the_users_own_are_named(own: str, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"attack '{own}{name}': ") as caught:
        registry().target(own + name)
    assert words in str(caught.value)


def test_functions_are_allowed_where_no_class_is_asked_for(own: str) -> None:
    assert Registry("model", []).target(f"{own}:function")() == 3


def test_what_an_import_raises_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "breaks_at_once.py").write_text("1 / 0")
    (tmp_path / "lacks_a_package.py").write_text("import no_such_package_anywhere")
    with pytest.raises(ValueError, match="importing breaks_at_once raised ZeroDivisionError: division by zero"):
        import_object("attack", "breaks_at_once:Mine")
    with pytest.raises(ValueError, match=r"importing lacks_a_package failed: .*Install what it needs"):
        import_object("attack", "lacks_a_package:Mine")
    with pytest.raises(ValueError, match="no module named 'no_such_module_here'"):
        import_object("attack", "no_such_module_here:Mine")
