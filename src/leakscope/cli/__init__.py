"""The command line: arguments in, calls out. Nothing heavy is imported before a command runs."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, Any, NoReturn, get_type_hints

import click
import typer
from typer.core import TyperCommand, TyperGroup

from leakscope.audit.output import unfailing_output
from leakscope.cli.audit import audit
from leakscope.cli.captured import attack, import_update
from leakscope.cli.limits import inspect, limits, plan
from leakscope.cli.pages import compare, list_names, report, reproduce
from leakscope.contracts.signals import INTERRUPTED, leave, loading

INTERNAL, USAGE = 3, 4
#: Characters of an error that are printed; a file may hold a name of megabytes.
MAX_MESSAGE = 4000
CTRL_C = 130  # what typer makes of a KeyboardInterrupt


class PlainCommand(TyperCommand):
    """A command whose help has no stray backslash, and a sentence for each argument."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                name, text = record[0], record[1].replace("\\[", "[")
                if isinstance(param, click.Argument):
                    own = bool(getattr(param, "help", None))
                    text = text if own else f"{_help_of(self.callback, str(param.name))}  {text}".strip()
                    records["Arguments"].append((name, text))
                else:
                    records["Options"].append((name, text))
        for title, lines in records.items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


class PlainGroup(TyperGroup):
    """Commands of which one that is not there is told once: click and typer both suggest the nearest."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        return click.Group.resolve_command(self, ctx, args)


def _help_of(command: Any, argument: str) -> str:
    hint = get_type_hints(command, include_extras=True).get(argument)
    return next((entry.help for entry in getattr(hint, "__metadata__", ()) if getattr(entry, "help", None)), "")


app = typer.Typer(
    help="What can somebody who sees a federated-learning update learn about the data behind it?",
    no_args_is_help=True,
    add_completion=False,
    cls=PlainGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Exit codes of audit: 0 within policy, 1 leaks above policy, 2 interrupted, 3 internal error, "
    "4 usage or spec error, 5 nothing audited or inconclusive.",
)
_NAMES: dict[Any, str] = {import_update: "import", list_names: "list"}
for _command in (audit, plan, attack, import_update, limits, inspect, reproduce, list_names, report, compare):
    app.command(name=_NAMES.get(_command), cls=PlainCommand)(_command)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from leakscope import __version__

        print(f"leakscope {__version__}")
        raise typer.Exit()


def main() -> NoReturn:
    """The entry point: every expected problem is one clear message and the right exit code."""
    with unfailing_output(), _signals_end_it() as received:
        code = _run()
        if code == CTRL_C:
            cause = f"Ended by {received[0]}" if received else "Interrupted"
            _say(f"{cause}. Finished jobs are kept; the same command resumes.")
            code = INTERRUPTED
    sys.exit(code)


def _run() -> int:
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:  # before a command has begun
        return CTRL_C
    except Exception as error:  # noqa: BLE001 - the outermost frame: sorts errors into exit codes
        return _explain(error)
    return code if isinstance(code, int) else 0


@contextlib.contextmanager
def _signals_end_it() -> Iterator[list[str]]:
    """End a command like Ctrl-C on SIGTERM and SIGHUP, unless ignored (nohup); yield the name of the one that did."""
    received: list[str] = []
    ending = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

    def end(number: int, frame: FrameType | None) -> None:
        if loading():
            leave(number, frame)
        if number != signal.SIGINT:
            received.append(signal.Signals(number).name)
            for one in handled:  # the way out is not to be interrupted by more of the same
                signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in ending}
    handled = [n for n, own in before.items() if own in (signal.SIG_DFL, signal.default_int_handler, leave)]
    for number in handled:
        signal.signal(number, end)
    try:
        yield received
    finally:
        for number in [] if received else handled:
            signal.signal(number, before[number])


def _explain(error: Exception) -> int:
    if isinstance(error, click.exceptions.Abort):
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        _say(f"Error: {error.format_message()}")
        return USAGE
    from leakscope.contracts.errors import LeakscopeError

    if isinstance(error, OSError | LeakscopeError):
        _say(f"Error: {error}")
        return USAGE
    import traceback

    _say("".join(traceback.format_exception(error)))
    _say("This is a defect in leakscope, or in code of yours that it ran. Nothing that was finished is lost.")
    return INTERNAL


def _say(text: str) -> None:
    from leakscope.contracts.printable import printable

    print(printable(capped(text)), file=sys.stderr)


def capped(text: str, most: int = MAX_MESSAGE) -> str:
    """A message of any length with its middle left out; the end often says what to do.

    >>> capped("abcdefghij", 6)
    'abcd [4 characters left out] ij'
    """
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end]} [{len(text) - most:,} characters left out] {text[-end:]}"
