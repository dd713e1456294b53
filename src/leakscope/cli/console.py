"""What the command line prints for people: tables that fit the width, and the verdict with its reasons."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from leakscope.results.records import counted

#: Between two columns of a table.
_GAP = 2
#: Reasons that are printed unless every one is asked for.
MAX_REASONS = 8


def make_console(*, stderr: bool = False) -> Console:
    """A console without escape codes in a pipe, and none at all where NO_COLOR is set."""
    plain_text = bool(os.environ.get("NO_COLOR"))
    return Console(stderr=stderr, highlight=False, markup=False, color_system=None if plain_text else "auto")


def say(console: Console, text: str, indent: int = 0, style: str = "") -> None:
    """A paragraph, wrapped between words; what is indented hangs below its beginning."""
    console.print(Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, indent)) if indent else Text(text, style))


def say_path(console: Console, what: str, path: Path | str) -> None:
    """A path in one piece, so that it can be copied."""
    console.print(f"{what} {path}", soft_wrap=True)


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


def print_limits(title: str, limits: Any) -> None:
    """What theory says, in small tables, each with its remark below."""
    from leakscope.report import tables_of

    console = make_console()
    say(console, title, style="bold")
    for table in tables_of(limits):
        console.print()
        if table.rows:
            print_table(table.title, table.columns, table.rows, console)
        else:
            say(console, f"{table.title}:", style="bold")
        if table.note:
            say(console, table.note, indent=2)
    console.print()
    say(console, f"Conclusion: {limits.conclusion}", style="bold")


def print_inspection(title: str, found: Any) -> None:
    """What is suspicious in a received model, layer by layer, and what to do."""
    console = make_console()
    say(console, f"{title}: {counted(found.layers, 'layer')} with weights", style="bold")
    for suspicion in found.suspicions:
        console.print()
        say(console, f"{suspicion.layer}: {suspicion.kind}", style="bold")
        say(console, f"{suspicion.reason[0].upper()}{suspicion.reason[1:]}.", indent=2)
        say(console, suspicion.consequence, indent=2)
    console.print()
    conclusion, advice = "nothing suspicious found", "That is no proof: weights can be chosen to look ordinary."
    if found.suspicious:
        conclusion = "SUSPICIOUS"
        advice = "Do not train it on private data; compare it with the structure and the weights that were agreed on."
    say(console, f"Conclusion: {conclusion}", style="bold")
    say(console, advice, indent=2)


def print_reproduction(
    title: str, result: Any, page: Path | None, pictures: bool | None, console: Console, quiet: bool = False
) -> None:
    """Published and measured numbers side by side, then where the page is and what it leaves out."""
    if not quiet:
        notes = list(dict.fromkeys(row.note for row in result.rows if row.note))
        print_table(
            title,
            ("setting", "measure", "published", "tolerance", "measured", "95 %", "n", "verdict", "note"),
            (
                (
                    row.setting,
                    row.measure,
                    figure(row.published),
                    figure(row.tolerance),
                    figure(row.measured),
                    "-" if row.interval is None else f"{figure(row.interval[0])} to {figure(row.interval[1])}",
                    row.count,
                    row.verdict,
                    f"({notes.index(row.note) + 1})" if row.note else "",
                )
                for row in result.rows
            ),
            console,
        )
        print_listing([(f"({number})", note) for number, note in enumerate(notes, start=1)], console)
        say(console, result.caption)
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

    protocols, defenses = short_names(line.protocol for line in lines), short_names(line.defense for line in lines)
    names = setting_names(lines)
    print_listing([(side, f"{name}: {told}") for side, (name, told) in zip("AB", outcomes, strict=True)], console)
    console.print()
    proofs = any(line.certified_a or line.certified_b for line in lines)
    print_table(
        None,
        ("setting", "attack", "A, dB", "B, dB", "B - A", "intervals overlap", *(["certified, A and B"] * proofs)),
        (
            (
                names[line.protocol, line.defense],
                line.attack,
                decibels(line.psnr_a),
                decibels(line.psnr_b),
                decibels(line.difference),
                {True: "yes", False: "no", None: "-"}[line.overlap],
                *([f"{line.certified_a} and {line.certified_b}"] * proofs),
            )
            for line in lines
        ),
        console,
    )
    console.print()
    legend = [(name, f"{protocols[protocol]} · {defenses[defense]}") for (protocol, defense), name in names.items()]
    print_listing(legend, console)
    console.print()
    if differences:
        rows = [(difference.name, difference.first, difference.second) for difference in differences]
        print_table("What else differs", ("what", "A", "B"), rows, console)
    else:
        say(console, "Nothing else differs.")


def setting_names(lines: Iterable[Any]) -> dict[Any, str]:
    """A short name for each setting of a comparison, in order."""
    cells = dict.fromkeys((line.protocol, line.defense) for line in lines)
    return {cell: f"S{number}" for number, cell in enumerate(cells, start=1)}


def print_verdict(result: Any, page: Path, console: Console, *, quiet: bool = False, verbose: bool = False) -> None:
    """What was audited, the settings, what gave no result, and the verdict: why, and what to do."""
    from leakscope.report.sentences import shared_fates, shared_remarks

    verdict = result.verdict
    if not quiet:
        _print_audited(result.store.meta("audited"), console)
        _print_settings(verdict, console)
        for remark in shared_remarks(verdict):
            say(console, f"Note: {remark}")
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
        _print_reasons(verdict, console, verbose)
    say_path(console, "Report: ", page)


def _print_audited(audited: Any, console: Console) -> None:
    lines = [line for line in audited or [] if isinstance(line, dict) and line.get("text")]
    if not lines:
        return
    say(console, "Audited", style="bold")
    for line in lines:
        warning = line.get("warning") is True
        say(console, f"{'Warning: ' if warning else ''}{line['text']}", indent=2, style="bold" if warning else "")
    console.print()


def _print_settings(verdict: Any, console: Console) -> None:
    from leakscope.report.sentences import strongest_words

    settings = verdict.settings
    print_table(
        "Strongest attack on each example, by setting",
        ("setting", "mean PSNR (95 %)", "no info", "identified", "labels", "outcome"),
        (
            (
                row.name,
                f"{decibels(row.mean_psnr)} ({decibels_between(row.interval)})",
                decibels(row.baseline_psnr),
                percent(row.identification),
                percent(row.label_accuracy),
                row.outcome,
            )
            for row in settings
        ),
        console,
    )
    console.print()
    print_listing([(setting.name, setting.short) for setting in settings], console)
    say(console, "PSNR in dB; no info: what is reached without the update; labels: share named.")
    for setting in settings:
        for line in strongest_words(setting.examples):
            say(console, f"{setting.name}, {line}.")


def print_study(study: Any, verdict: Any, console: Console) -> None:
    """What each defence leaks and costs, what to choose, and what knowing it is worth."""
    from leakscope.report.defense_study import choice_words, cost_words, goal, place_words, utility_words

    named = {setting.scenario: setting for setting in verdict.settings}
    print_table(
        "Defence study: what protection costs",
        ("setting", "leakage (95 %)", "identified", utility_words(study), "cost", "place"),
        (
            (
                named[row.scenario].name,
                f"{decibels(row.leakage)} ({decibels_between(row.leakage_interval)})",
                percent(row.identified),
                percent(row.utility) if study.accuracy else figure(-row.utility),
                cost_words(row, study),
                place_words(row, named),
            )
            for row in study.rows
        ),
        console,
    )
    for choice in study.choices:
        name = "" if choice.row is None else f"{named[choice.row.scenario].name}, "
        say(console, f"So that {goal(choice.limits)}: {name}{choice_words(choice.row, study)}.")
    for worth in study.worths:
        gain = f"{decibels(worth.gain)} dB to {worth.attack_name} ({decibels_between(worth.interval)})"
        say(console, f"Knowing the defence of {named[worth.scenario].name} is worth {gain}.")


def _print_reasons(verdict: Any, console: Console, verbose: bool) -> None:
    """A paragraph for each remedy, with the reasons that it helps against."""
    from leakscope.report.sentences import by_remedy

    groups = by_remedy(verdict)
    left = sum(map(len, groups.values())) if verbose else MAX_REASONS
    unsaid = 0
    for remedy, reasons in groups.items():
        shown, unsaid = reasons[:left], unsaid + len(reasons[left:])
        left -= len(shown)
        if not shown:
            continue
        console.print()
        for reason in shown:
            say(console, f"Why: {reason}", indent=2)
        if remedy:
            say(console, f"What to do: {remedy}", indent=2)
    if unsaid:
        console.print()
        say(console, f"{counted(unsaid, 'more reason')} in the report; -v prints all.", indent=2)
    console.print()


def decibels(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.1f}"


def decibels_between(ends: Sequence[float]) -> str:
    return f"{decibels(ends[0])} to {decibels(ends[1])}"


def percent(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.0f} %"


def figure(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.4g}"
