"""How an observation came about: what a file of it says of itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from leakscope import __version__

#: Characters of a fact that a file may say of itself.
MAX_FACT = 2000
Text = Annotated[str, Field(max_length=MAX_FACT)]
Texts = Annotated[tuple[Text, ...], Field(max_length=MAX_FACT)]


@dataclass(frozen=True, kw_only=True)
class Made:
    """By which function or command, of which files (names without folders), and what the check of the sign answered."""

    by: Text
    version: Text = __version__
    sources: Texts = ()
    sign: Text | None = None
    sign_reason: Text | None = None
    notes: Texts = ()

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        names = (PurePath(str(source).replace("\\", "/")).name for source in self.sources)
        object.__setattr__(self, "sources", tuple(names))

    def facts(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any] | None) -> Self | None:
        """What a file without :func:`problems_of_made` says; None where it says nothing, as up to format 2.

        >>> Made.from_facts(Made(by="a test", sources=("home/update.pt",)).facts()).sources
        ('update.pt',)
        """
        return None if facts is None else TypeAdapter(cls).validate_python(facts)


def problems_of_made(facts: Any) -> list[str]:
    try:
        Made.from_facts(facts)
    except ValidationError as error:
        return [": ".join([*map(str, one["loc"]), one["msg"]]) for one in error.errors(include_url=False)]
    return []
