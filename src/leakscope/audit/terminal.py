"""Print to terminals, which act on control characters that a file's names may hold."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from leakscope.contracts.printable import printable


class PlainConsole(Console):
    """A console whose own colours reach the terminal, and no escape sequence of the text that it prints."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and (shown := printable(renderable.plain)) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = shown
        return super().render(renderable, options)
