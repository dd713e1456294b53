"""How an observation came about: what a file of it says of itself."""

from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

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
