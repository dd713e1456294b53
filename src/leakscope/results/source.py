"""Name where in somebody's files an audit was asked for; no folder of a machine is told."""

import dataclasses
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter, ValidationError

_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Point to a line of a file, relative to the repository, or to the installed packages where it is ``installed``."""

    file: Annotated[str, Field(min_length=1)]
    line: Annotated[int, Field(ge=1)] = 1
    installed: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """Point to the spec, or else the model; ``model`` is where that is made, if elsewhere. Tables are by repr."""

    whole: Place
    protocols: Mapping[str, Place] = field(default_factory=dict)
    defenses: Mapping[str, Place] = field(default_factory=dict)
    #: Where the model is made, if that is another place.
    model: Place | None = None

    def of_setting(self, protocol: str, defense: str) -> Place:
        """Return the line that asks for a setting: its defence's, its protocol's, or that of the whole."""
        return self.defenses.get(defense) or self.protocols.get(protocol) or self.whole

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, raw: Any) -> Self | None:
        """Read what a store says; None where it says nothing that can be used."""
        with suppress(ValidationError):
            return TypeAdapter(cls).validate_python(raw)
        return None


def place_of(path: str | os.PathLike[str], line: int = 1, root: Path | None = None) -> Place:
    """Return a line of ``path`` relative to ``root``, else its repository, else the current folder, else by name only.

    >>> place_of("/x/lib/python3.11/site-packages/torch/nn/modules/linear.py", 3)
    Place(file='torch/nn/modules/linear.py', line=3, installed=True)
    >>> place_of("/home/ann/project/leakscope.yaml", root=Path("/home/ann/project")).file
    'leakscope.yaml'
    """
    file = Path(os.path.abspath(path))
    for folder in _INSTALLED:
        if folder in file.parts:
            inside = file.parts[len(file.parts) - file.parts[::-1].index(folder) :]
            return Place(file="/".join(inside), line=line, installed=True)
    repository = next((folder for folder in file.parents if (folder / ".git").exists()), None)
    for candidate in (root, repository, Path.cwd()):
        # What is relative to the root of the disk tells every folder.
        if candidate is not None and candidate != Path(candidate.anchor) and file.is_relative_to(candidate):
            return Place(file=file.relative_to(candidate).as_posix(), line=line)
    return Place(file=file.name, line=line)
