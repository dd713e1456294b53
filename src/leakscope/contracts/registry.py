"""Names that users type, and what they stand for: one kind of table for attacks, defences, protocols, models and so on.

A name with a colon, ``package.module:Name``, is code of the user's own. If the user types it, in Python or on the
command line, it is run. In a spec it is data: it runs only if it is defined in a module of the current folder or of the
spec's, or if the user allows it. Importing a module runs it, so where it lies is looked up before.
"""

import difflib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

from leakscope.contracts.errors import UserError


def folded(name: str) -> str:
    """Drop case and separators.

    >>> folded("inverting-gradients") == folded("InvertingGradients") == folded("inverting_gradients")
    True
    """
    return re.sub(r"[^a-z0-9.:]", "", name.lower())


def kebab(class_name: str) -> str:
    """The name typed for a class.

    >>> kebab("InvertingGradients"), kebab("FedSGD"), kebab("DLG")
    ('inverting-gradients', 'fed-sgd', 'dlg')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", class_name).lower()


def find_name(name: str, known: Iterable[str], aliases: Iterable[tuple[str, str]] = (), own: str = "") -> str:
    """Find the entry of ``known`` that ``name`` means; ``aliases`` are (alias, entry); ``own`` is what else to type.

    >>> find_name("Fed_SGD", ["fedsgd", "fedavg"])
    'fedsgd'
    >>> find_name("fedsdg", ["fedsgd", "fedavg"])
    Traceback (most recent call last):
    ...
    leakscope.contracts.errors.UserError: expected one of fedsgd, fedavg, got 'fedsdg'; did you mean fedsgd?
    """
    entries = list(known)
    table = {folded(alias): entry for alias, entry in aliases} | {folded(entry): entry for entry in entries}
    if folded(name) in table:
        return table[folded(name)]
    close = difflib.get_close_matches(folded(name), table, n=1, cutoff=0.6)
    hint = f"; did you mean {table[close[0]]}?" if close else ""
    if name.endswith(".py"):
        hint = f"; for your own, in the file's folder write {module_of(name)}:NAME, the function or class in it"
    raise UserError(f"expected one of {', '.join(entries)}{f', or {own}' if own else ''}, got {name!r}{hint}")


def module_of(file: str) -> str:
    """The name that a module has for Python which people give as a file.

    >>> module_of("./nets.py"), module_of("C:\\\\work\\\\nets.py")
    ('nets', 'nets')
    """
    return re.split(r"[/\\]", file)[-1].removesuffix(".py")


@dataclass(frozen=True)
class Entry:
    """A name, the class or function it stands for, and one line on it; ``source`` is the paper or the user's module."""

    name: str
    target: Any
    summary: str
    source: str = ""


E = TypeVar("E", bound=Entry)


class Registry(Mapping[str, E], Generic[E]):
    """Entries of one kind by name, open to the user's own; ``base`` is the class that the user's classes must inherit.

    >>> shapes = Registry("shape", [Entry("square", int, "four sides")])
    >>> shapes.find("Square").summary, "square" in shapes
    ('four sides', True)
    >>> shapes.register(Entry("square", float, "another"))
    Traceback (most recent call last):
    ...
    leakscope.contracts.errors.UserError: shape 'square': there is one already; choose another name
    """

    def __init__(self, kind: str, entries: Iterable[E], base: type | None = None) -> None:
        self.kind, self.base = kind, base
        self._entries: dict[str, E] = {}
        for entry in entries:
            self.register(entry)

    def __getitem__(self, name: str) -> E:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, entry: E) -> None:
        """Add an entry; a name that is taken is an error, never a silent change."""
        if entry.name in self._entries:
            raise UserError(f"{self.kind} {entry.name!r}: there is one already; choose another name")
        self._entries[entry.name] = entry

    def find(self, name: str) -> E:
        """The entry that a name as people type it means; ValueError with the nearest one otherwise."""
        if not isinstance(name, str):
            raise UserError(f"{self.kind}: expected a name, got {type(name).__name__}")
        aliases = [(e.target.__name__, e.name) for e in self._entries.values() if hasattr(e.target, "__name__")]
        try:
            return self._entries[find_name(name, self._entries, aliases, "package.module:Name for your own")]
        except ValueError as error:
            raise UserError(f"unknown {self.kind} {name!r}: {error}") from None

    def target(self, name: str) -> Any:
        """Return what ``name`` stands for: of the table, or the user's own ``package.module:Name``."""
        if ":" not in str(name):
            return self.find(name).target
        target = import_object(self.kind, name)
        if self.base is not None and not (isinstance(target, type) and issubclass(target, self.base)):
            wanted = f"a class that inherits leakscope.{self.base.__name__}"
            raise UserError(f"{self.kind} {name!r}: expected {wanted}, got {target!r}")
        return target

    def name_of(self, cls: type) -> str:
        """The name under which a class stands in the table, or what its name would be."""
        return next((entry.name for entry in self._entries.values() if entry.target is cls), kebab(cls.__name__))


@dataclass(frozen=True)
class _Spec:
    folder: Path | None = None
    allowed: bool = True
    typed: frozenset[str] = frozenset()


_READING: ContextVar[_Spec | None] = ContextVar("spec", default=None)
#: Folders in which a module was found because its name was given, the latest last.
_FOLDERS: dict[str, None] = {}


def own_folders() -> list[str]:
    """Where modules of the user's own were found, the latest first: another process has to look there too."""
    return list(reversed(_FOLDERS))


@contextmanager
def names_of_a_spec(folder: Path, *, allowed: bool = False, typed: Collection[str] = ()) -> Iterator[None]:
    """While a spec in ``folder`` is read: its names are data unless ``allowed``; those ``typed`` beside it are not."""
    token = _READING.set(_Spec(folder, allowed, frozenset(typed)))
    try:
        yield
    finally:
        _READING.reset(token)


def import_object(kind: str, name: str) -> Callable[..., Any]:
    """The callable that ``package.module:Name`` names; one ValueError that says which part of it is wrong."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        example = f"{module_of(module_name)}:{attribute}" if module_name.endswith(".py") else "mypackage.parts:Mine"
        raise UserError(f"{kind} {name!r}: expected package.module:Name, for example {example}")
    spec, package = _READING.get() or _Spec(), module_name.partition(".")[0]
    by_data = not spec.allowed and name not in spec.typed
    importlib.invalidate_caches()  # a module written a moment ago is invisible until the finder forgets its listing
    try:
        own = _own_folder(package, [Path.cwd(), *([] if spec.folder is None else [spec.folder.resolve()])])
        if by_data and own is None and (package in sys.modules or _found(package) is not None):
            raise UserError(f"{package} is installed, not a file of your folder or the spec's. {_HOW_TO_ALLOW}")
    except ValueError as error:
        raise UserError(f"{kind} {name!r}: {error}") from None
    with _searched_last(own):
        target: Any = _module(kind, name, module_name)
    for part in attribute.split("."):
        if not hasattr(target, part):
            module = sys.modules[module_name]
            names = sorted(n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n)))
            have = f"Callables in it: {', '.join(names) or 'none'}"
            raise UserError(f"{kind} {name!r}: {module_name} has no {attribute!r}. {have}")
        target = getattr(target, part)
    if not callable(target):
        raise UserError(f"{kind} {name!r}: {attribute} is a {type(target).__name__}, expected a function or class")
    if wrong := _why_not_called(target, package if by_data else None):
        raise UserError(f"{kind} {name!r}: {wrong}")
    return target


_HOW_TO_ALLOW = "A spec is data: such code runs only with allow_code, or if the name is typed and not read from a spec"


def _own_folder(package: str, folders: list[Path]) -> str | None:
    found = _found(package)
    if package in sys.stdlib_module_names or _in_standard_library(found):
        why = f"{package} is part of Python's standard library, whose code is never run for a name"
        raise UserError(f"{why}. A file of your own needs another name")
    for folder in map(str, folders):
        own = PathFinder.find_spec(package, [folder])
        if own is None or (found is not None and own.origin is None and found.origin is not None):
            continue  # a folder that merely has the name of a package is none
        if found is not None and _place(found) != _place(own):
            two = f"there are two modules {package}, {_place(own)} and {_place(found)}"
            raise UserError(f"{two}. Rename yours, for it must not stand in for the other")
        return folder
    return None


def _found(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except ValueError:
        return None  # a script, which has no place


def _place(spec: ModuleSpec) -> str:
    locations = spec.submodule_search_locations
    place = spec.origin if spec.has_location and spec.origin else next(iter(locations or ()), str(spec.origin))
    return os.path.realpath(place)


def _in_standard_library(spec: ModuleSpec | None) -> bool:
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        return False
    place, library = Path(_place(spec)), Path(sysconfig.get_path("stdlib")).resolve()
    installed = {"site-packages", "dist-packages"}
    return place.is_relative_to(library) and not installed & set(place.relative_to(library).parts)


@contextmanager
def _searched_last(folder: str | None) -> Iterator[None]:
    """``folder`` at the end of the search path, where it stands in for nothing, for as long as an import takes."""
    if folder is None or folder in sys.path:
        yield
        return
    _FOLDERS.pop(folder, None)
    _FOLDERS[folder] = None
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _module(kind: str, name: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            fix = "Install its package, or run in the folder it is in."
            raise UserError(f"{kind} {name!r}: no module named {error.name!r}. {fix}") from error
        raise UserError(f"{kind} {name!r}: importing {module_name} failed: {error}. Install what it needs.") from error
    except Exception as error:
        raise UserError(f"{kind} {name!r}: importing {module_name} raised {type(error).__name__}: {error}") from error


def _why_not_called(target: Any, package: str | None) -> str:
    """Why ``target`` is not called for a name; for one that a spec gives it must be of the named ``package``."""
    from torch import nn  # here, so that a command line without a name of one's own starts without torch

    if isinstance(target, nn.Module):
        return ""  # a model already, which is refused where one is built, with its own hint
    named = isinstance(target, type | FunctionType | BuiltinFunctionType | MethodType)
    home = str(getattr(target if named else type(target), "__module__", None) or "unknown")
    top = home.partition(".")[0]
    what = f"it is {home}.{getattr(target, '__qualname__', type(target).__name__)}"
    if package is not None and top != package:
        return f"{what}, not defined in {package}. {_HOW_TO_ALLOW}"
    if named and (top in sys.stdlib_module_names or top == "unknown"):
        return f"{what}, and code of Python's standard library is never called for a name. Name a function of your own"
    if top == "torch" and not (isinstance(target, type) and issubclass(target, nn.Module)):
        return f"{what}, and of torch only subclasses of nn.Module are called for a name. Name a function of your own"
    return ""
