"""What the command line prints for people: tables that fit the width, and the verdict with its reasons."""

import os
import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from leakscope.audit.terminal import PlainConsole

#: Between two columns of a table.
_GAP = 2
#: Columns by which what belongs to a heading is indented.
_INDENT = 2
#: Reasons that are printed unless every one is asked for.
MAX_REASONS = 8


def make_console(*, stderr: bool = False) -> Console:
    """A console without escape codes in a pipe, and none at all where NO_COLOR is set."""
    plain_text = bool(os.environ.get("NO_COLOR"))
    return PlainConsole(stderr=stderr, highlight=False, markup=False, color_system=None if plain_text else "auto")


def say(console: Console, text: str, indent: int = 0, style: str = "") -> None:
    """A paragraph, wrapped between words; what is indented hangs below its beginning."""
    console.print(Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, indent)) if indent else Text(text, style))


def say_path(console: Console, what: str, path: Path | str) -> None:
    """A path in one piece, so that it can be copied."""
    console.print(f"{what} {path}", soft_wrap=True)


def command_lines(command: str, width: int) -> list[str]:
    """Break a command between its words, so that it can be copied into a shell; words are never cut.

    >>> command_lines("leakscope audit spec.yaml --attack standard --out 'my run'", 30)
    ['leakscope audit spec.yaml \\\\', '  --attack standard \\\\', "  --out 'my run'"]
    """
    pairs: list[list[str]] = []
    for word in map(shlex.quote, shlex.split(command)):
        if pairs and not word.startswith("--") and pairs[-1][0].startswith("--") and len(pairs[-1]) == 1:
            pairs[-1].append(word)  # the value of an option stays beside it
        else:
            pairs.append([word])
    lines: list[str] = []
    for pair in pairs:
        whole = " ".join(pair)
        for piece in [whole] if cell_len(whole) + 4 <= width else pair:
            if lines and cell_len(f"{lines[-1]} {piece} \\") <= width:
                lines[-1] += f" {piece}"
            else:
                lines.append(f"  {piece}" if lines else piece)
    return [*(f"{line} \\" for line in lines[:-1]), *lines[-1:]]


def fitted(cells: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """A width for each column (``cells`` by column) in which no word is cut; None where there is no such.

    >>> fitted([["S1", "S2"], ["a few long words", "one"]], 12), fitted([["S1"], ["indivisible"]], 12)
    ([2, 8], None)
    """
    longest_words = [max((cell_len(w) for text in column for w in text.split()), default=1) for column in cells]
    longest_lines = [max((cell_len(x) for text in column for x in text.splitlines()), default=1) for column in cells]
    widths, room = list(longest_words), width - _GAP * (len(cells) - 1)
    if sum(widths) > room:
        return None
    while sum(widths) < room:
        # The column whose longest text takes the most lines gains the most from another character.
        neediest = max(range(len(widths)), key=lambda n: longest_lines[n] / widths[n])
        if longest_lines[neediest] <= widths[neediest]:
            break
        widths[neediest] += 1
    return widths


def print_table(
    title: str | None, columns: Iterable[str], rows: Iterable[Iterable[object]], console: Console | None = None
) -> None:
    """A table where its words fit side by side; where not, a block of lines for each row."""
    console = console or make_console()
    heads, lines = list(columns), [[str(cell) for cell in row] for row in rows]
    if title:
        say(console, title, style="bold")
    widths = fitted([list(column) for column in zip(heads, *lines, strict=True)], console.width)
    if widths is None:
        for line in lines:
            say(console, f"{heads[0]}: {line[0]}")
            for head, cell in zip(heads[1:], line[1:], strict=True):
                if cell:
                    say(console, f"{head}: {cell}", indent=2)
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for head, size in zip(heads, widths, strict=True):
        table.add_column(Text(head), width=size)
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)


def print_listing(lines: Iterable[tuple[str, str]], console: Console | None = None) -> None:
    """Names with a text each, the texts in a column of their own."""
    console = console or make_console()
    entries = list(lines)
    room = max((cell_len(name) for name, _ in entries), default=0)
    if room > console.width // 2:
        for name, text in entries:
            say(console, name)
            say(console, text, indent=2)
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, width=room)
    table.add_column(overflow="fold")
    for name, text in entries:
        table.add_row(Text(name), Text(text))
    console.print(table)


def write(macro: str, console: Console, **facts: Any) -> None:
    """Print what a macro of ``report/console.txt.j2`` says: titles, tables, listings and paragraphs."""
    from leakscope.report.template import BAR, cells_of, text_template

    filters = {"decibels": decibels, "between": decibels_between, "percent": percent, "figure": figure}
    text: str = getattr(text_template("console.txt.j2", filters).module, macro)(**facts)
    for (table, listing), group in groupby(text.splitlines(), key=lambda line: (BAR in line, line.startswith("- "))):
        lines = list(group)
        if table and listing:
            entries = (cells_of(line.removeprefix("- ")) for line in lines)
            print_listing([(name, told) for name, told in entries], console)
        elif table:
            print_table(None, cells_of(lines[0].removeprefix("# ")), map(cells_of, lines[1:]), console)
        for line in () if table else lines:
            shown = line.removeprefix("= ")
            say(console, cells_of(shown)[0], 2 if shown.startswith("  ") else 0, "bold" if shown != line else "")


def print_limits(title: str, limits: Any) -> None:
    """What theory says, in small tables, each with its remark below."""
    from leakscope.report import tables_of

    write("limits", make_console(), title=title, limits=limits, tables=tables_of(limits))


def print_reproduction(
    title: str, result: Any, page: Path | None, pictures: bool | None, console: Console, quiet: bool = False
) -> None:
    """Published and measured numbers side by side, then where the page is and what it leaves out."""
    if not quiet:
        write("reproduction", console, title=title, result=result)
    verdicts = [row.verdict for row in result.rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    say(console, f"Result: {counts}", style="bold")
    if page is None:
        return
    if not quiet and pictures is None and any(grid.private for grid in result.pictures):
        say(console, "Private pictures are left out of the page; --pictures shows them.")
    say_path(console, "Page:  ", page)


def print_comparison(
    outcomes: Sequence[tuple[str, str]], lines: Sequence[Any], differences: Sequence[Any], console: Console
) -> None:
    """Two audits, setting by setting, and what differs between them; ``outcomes`` are folder and outcome of each."""
    from leakscope.results.names import short_names

    names = {
        "names": setting_names(lines),
        "protocols": short_names(line.protocol for line in lines),
        "defenses": short_names(name for line in lines for name in (line.defense, line.defense_b)),
    }
    write("comparison", console, outcomes=outcomes, lines=lines, differences=differences, **names)


def setting_names(lines: Iterable[Any]) -> dict[Any, str]:
    """A short name for each setting of a comparison, in order."""
    cells = dict.fromkeys(line.place for line in lines)
    return {cell: f"S{number}" for number, cell in enumerate(cells, start=1)}


def print_verdict(
    result: Any,
    page: Path,
    console: Console,
    command: str | None = None,
    *,
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """What was audited, the settings, what gave no result, and the verdict: why, what to do, and by which command."""
    from leakscope.report.audited import audited_lines
    from leakscope.report.sentences import advice_text, by_remedy, shared_fates, shared_remarks, strongest_words

    verdict = result.verdict
    if not quiet:
        audited = audited_lines(result.store, result.rows, verdict)
        told = {"settings": verdict.settings, "remarks": shared_remarks(verdict), "proved": strongest_words}
        write("settings", console, audited=audited, **told)
        if result.study is not None:
            console.print()
            print_study(result.study, verdict, console)
        if fates := shared_fates(result.rows, result.findings):
            console.print()
        for fate in fates:
            say(console, str(fate)[0].upper() + str(fate)[1:])
        console.print()
    say(console, f"Verdict: {verdict.outcome.upper()}", style="bold")
    if not quiet:
        groups = by_remedy(verdict)
        count = sum(map(len, groups.values()))
        left = count if verbose else MAX_REASONS
        for remedy, reasons in groups.items():
            groups[remedy] = reasons[:left]
            left -= len(groups[remedy])
        write("reasons", console, groups=groups, left=count - sum(map(len, groups.values())))
        if verdict.advice is not None and verdict.advice.kind == "undecidable":
            say(console, advice_text(verdict), style="bold")
        if command is not None:
            console.print("Next:")
            for line in command_lines(command, console.width - _INDENT):
                console.print(" " * _INDENT + line, soft_wrap=True)
    say_path(console, "Report: ", page)


def print_study(study: Any, verdict: Any, console: Console) -> None:
    """What each defence leaks and costs, what to choose, and what knowing it is worth."""
    from leakscope.report import defense_study

    named = {setting.scenario: setting for setting in verdict.settings}
    write("study", console, study=study, named=named, words=defense_study)


def decibels(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.1f}"


def decibels_between(ends: Sequence[float]) -> str:
    return f"{decibels(ends[0])} to {decibels(ends[1])}"


def percent(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.0f} %"


def figure(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.4g}"
