"""The command line: arguments in, calls out. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from leakscope.cli.attack import attack
from leakscope.cli.audit import audit
from leakscope.cli.help import PlainCommand, PlainGroup
from leakscope.cli.limits import limits
from leakscope.cli.listing import list_names
from leakscope.cli.pages import compare, report, reproduce

INTERRUPTED, INTERNAL, USAGE = 2, 3, 4
#: Characters of an error that are printed; a file may hold a name of megabytes.
MAX_MESSAGE = 4000
CTRL_C = 130  # what typer makes of a KeyboardInterrupt

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
app.command(cls=PlainCommand)(audit)
app.command(cls=PlainCommand)(attack)
app.command(cls=PlainCommand)(limits)
app.command(cls=PlainCommand)(reproduce)
app.command(name="list", cls=PlainCommand)(list_names)
app.command(cls=PlainCommand)(report)
app.command(cls=PlainCommand)(compare)


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
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:  # before a command has begun
        code = CTRL_C
    except Exception as error:  # noqa: BLE001 - the outermost frame: sorts errors into exit codes
        sys.exit(_explain(error))
    if code == CTRL_C:
        _say("Interrupted. Finished jobs are kept; the same command resumes.")
        code = INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> int:
    import click

    if isinstance(error, click.exceptions.Abort):
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        _say(f"Error: {error.format_message()}")
        return USAGE
    if isinstance(error, ValueError | TypeError | OSError):
        _say(f"Error: {error}")
        return USAGE
    from leakscope.audit import ExecutorError

    if isinstance(error, ExecutorError):
        _say(f"Error: {error}")
        return USAGE
    import traceback

    _say("".join(traceback.format_exception(error)))
    _say("This is a defect in leakscope. Nothing that was finished is lost.")
    return INTERNAL


def _say(text: str) -> None:
    print(capped(text), file=sys.stderr)


def capped(text: str, most: int = MAX_MESSAGE) -> str:
    """A message of any length with its middle left out; the end often says what to do.

    >>> capped("abcdefghij", 6)
    'abcd [4 characters left out] ij'
    """
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end]} [{len(text) - most:,} characters left out] {text[-end:]}"
