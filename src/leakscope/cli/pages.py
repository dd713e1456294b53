"""The commands that print or write what is there: ``reproduce``, ``report``, ``compare``, ``list``."""

from __future__ import annotations

import dataclasses
import importlib
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.cli.output import Output, SarifFile, relative, takes, write_sarif
from leakscope.cli.recorded import Recorded, is_recorded, report_recorded
from leakscope.contracts.disk import atomic_write
from leakscope.contracts.errors import UserError

if TYPE_CHECKING:
    from leakscope.contracts.registry import Registry
    from leakscope.contracts.settings import Setting


#: Where the table of attacks by defences goes, beside the page.
LATEX = Path("attacks.tex")
Scale = StrEnum("Scale", "smoke small paper")


@takes(Output, "quiet", "no_progress", "as_json", "as_csv")
def reproduce(
    table: Annotated[str, typer.Argument(help="PAPER/TABLE (leakscope list papers).")],
    scale: Annotated[Scale, typer.Option(help="How much to run.")] = Scale.smoke,
    row: Annotated[str, typer.Option(help="Run only rows with this text in their setting or measure.")] = "",
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="Examples for each row; default: as many as the scale has.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the page; default leakscope-reproduce/PAPER-TABLE if it has pictures or curves."),
    ] = None,
    pictures: Annotated[
        bool | None, typer.Option("--pictures/--no-pictures", help="Show private pictures in the page.")
    ] = None,
    *,
    output: Output,
) -> None:
    """Run a published table again.

    Published and measured numbers are put side by side.
    """
    from leakscope.cli.console import make_console, print_reproduction, say
    from leakscope.cli.progress import step_progress
    from leakscope.papers import reproduce as run
    from leakscope.report.captured import write_reproduction
    from leakscope.report.export import document
    from leakscope.report.words import duration

    console = make_console(stderr=True)
    started = time.monotonic()

    def told(done: int, total: int, value: float) -> None:
        if done == 1 and total > 1 and output.progress:
            spent = (time.monotonic() - started) * total
            say(console, f"Estimated time: about {duration(spent)} for {total} trials at scale {scale.value}.")
        progress(done, total, value)

    with step_progress(table, show=output.progress) as progress:
        result = run(table, scale=scale.value, progress=told, row=row, count=n)
    page = None
    if out is not None or result.pictures or result.curves:
        folder = out or Path("leakscope-reproduce") / table.replace("/", "-")
        page = write_reproduction(result, folder / "report.html", pictures)
    console = make_console(stderr=output.for_machines)
    print_reproduction(f"{table} ({scale.value})", result, page, pictures, console, output.quiet)
    facts = {**result.as_dict(), "files": {} if page is None else {"report": relative(page)}}
    content = document("reproduce", facts)
    output.write(lambda: content, lambda: [_flat(row) for row in content["rows"]])


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    low, high = row["interval"] or (None, None)
    return {**{key: value for key, value in row.items() if key != "interval"}, "low": low, "high": high}


@takes(Output, "as_json", "as_csv")
@takes(Recorded)
def report(
    directory: Annotated[Path, typer.Argument(help="Folder of an audit, or of recorded updates.")],
    to: Annotated[Path | None, typer.Option(help="Where to write; default DIR/report.html.")] = None,
    pictures: Annotated[
        bool | None, typer.Option("--pictures/--no-pictures", help="Show the pictures the audit kept.")
    ] = None,
    latex: Annotated[
        bool, typer.Option("--latex", help="Also write attacks by defences, with the spread over seeds: .tex and .csv.")
    ] = False,
    sarif: SarifFile = None,
    *,
    recorded: Recorded,
    output: Output,
) -> None:
    """Write the report of an audit again, finished or not.

    Of recorded updates (Flower, Opacus) it attacks them first, and says a verdict in the words of an audit.
    """
    if is_recorded(directory):
        if output.for_machines or latex or sarif is not None:
            options = "--json, --csv, --latex and --sarif"
            raise UserError(f"{options}: expected with the folder of an audit, got recorded updates")
        report_recorded(directory, to, bool(pictures), recorded)
        return
    if typed := recorded.typed():
        raise UserError(f"{', '.join(typed)}: expected with recorded updates only, and {directory} has none")
    from leakscope.cli.console import make_console, say_path
    from leakscope.report.attack_table import attack_table
    from leakscope.report.export import audit_document, audit_table
    from leakscope.report.page import write_report
    from leakscope.results.store import Store
    from leakscope.results.verdict import judge_store

    page = write_report(directory, to, pictures=pictures)
    console = make_console(stderr=output.for_machines)
    say_path(console, "Report:", page)
    if latex:
        with Store.open(directory) as store:
            table = attack_table(store.rows())
        for name, text in ((LATEX, table.to_latex()), (LATEX.with_suffix(".csv"), table.to_csv())):
            atomic_write(page.parent / name, text.encode())
            say_path(console, "Table:", page.parent / name)
    if output.for_machines or sarif is not None:
        files = {"folder": relative(directory), "report": relative(page)}
        with Store.open(directory) as store:
            verdict = judge_store(store)
            write_sarif(store, verdict, sarif)
            output.write(lambda: audit_document(store, verdict, files), lambda: audit_table(store, verdict))


@takes(Output, "as_json", "as_csv")
def compare(
    first: Annotated[Path, typer.Argument(help="Folder of an audit.")],
    second: Annotated[Path, typer.Argument(help="Folder of another audit.")],
    to: Annotated[Path | None, typer.Option(help="Also write an HTML page here.")] = None,
    *,
    output: Output,
) -> None:
    """Compare two audits setting by setting."""
    from leakscope.cli.console import make_console, print_comparison, say_path, setting_names
    from leakscope.report.compare import compare_differences, compare_tables, write_comparison
    from leakscope.report.export import document
    from leakscope.results.store import Store
    from leakscope.results.verdict import judge_store

    lines, differences = compare_tables(first, second), compare_differences(first, second)
    outcomes = []
    for folder in (first, second):
        with Store.open(folder) as store:
            outcomes.append(judge_store(store).outcome)
    console = make_console(stderr=output.for_machines)
    print_comparison(list(zip(map(str, (first, second)), outcomes, strict=True)), lines, differences, console)
    if to is not None:
        say_path(console, "Page:", write_comparison(first, second, to))
    names = setting_names(lines)
    content = {
        "first": {"folder": relative(first), "outcome": outcomes[0]},
        "second": {"folder": relative(second), "outcome": outcomes[1]},
        "lines": [{"setting": names[line.place], **_comparison(line)} for line in lines],
        "differences": [dataclasses.asdict(difference) for difference in differences],
        "files": {} if to is None else {"page": relative(to)},
    }
    facts = document("compare", content)
    output.write(lambda: facts, lambda: facts["lines"])


def _comparison(line: Any) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for side, (psnr, (low, high), examples, certified) in zip(("first", "second"), line.sides, strict=True):
        numbers |= {f"psnr_{side}": psnr, f"low_{side}": low, f"high_{side}": high}
        numbers |= {f"examples_{side}": examples, f"certified_{side}": certified}
    same = {name: getattr(line, name) for name in ("protocol", "defense", "attack")}
    same["defense_second"] = line.defense_b
    return {**same, **numbers, "difference": line.difference, "overlap": line.overlap}


Listable = StrEnum("Listable", "attacks defenses protocols tasks models data papers executors")
#: Where the table of each kind is; its name is that of the kind in capitals.
_TABLES = {
    "attacks": "leakscope.attacks",
    "defenses": "leakscope.defenses",
    "protocols": "leakscope.federation",
    "tasks": "leakscope.contracts.task",
    "models": "leakscope.models",
    "data": "leakscope.data",
    "papers": "leakscope.papers",
    "executors": "leakscope.audit.executors",
}


@takes(Output, "as_json", "as_csv")
def list_names(
    what: Annotated[Listable, typer.Argument(help="What to list.")],
    name: Annotated[str | None, typer.Argument(help="One of them, or package.module:Class: its settings.")] = None,
    *,
    output: Output,
) -> None:
    """List attacks, models and so on.

    Names that can be typed elsewhere, with one line each; of one of them every setting.
    """
    table: Registry[Any] = getattr(importlib.import_module(_TABLES[what]), what.upper())
    entries = [_entry(table, name)] if name is not None else [_facts(entry) for entry in table.values()]
    if output.for_machines:
        from leakscope.report.export import document

        content = document("list", {"what": what.value, "entries": entries})
        settings = entries[0]["settings"] if name is not None else None
        short = [{key: entry[key] for key in ("name", "summary", "source")} for entry in entries]
        output.write(lambda: content, lambda: short if settings is None else settings)
    elif name is None:
        from leakscope.cli.console import print_listing

        print_listing(
            [(e["name"], f"{e['summary']} ({e['source']})" if e["source"] else e["summary"]) for e in entries]
        )
    else:
        _print_entry(entries[0])


def _facts(entry: Any) -> dict[str, Any]:
    return {"name": entry.name, "summary": entry.summary, "source": entry.source, "settings": None}


def _entry(table: Registry[Any], name: str) -> dict[str, Any]:
    """One entry of a table, or a class of the user's, with its settings."""
    nameless: dict[str, Any] = {"name": name, "summary": "", "source": "", "settings": None}
    facts = nameless if ":" in name else _facts(table.find(name))
    settings = _settings(table.target(name))
    if settings is not None:
        facts["settings"] = [
            {
                **{"name": setting.name, "expected": setting.expected},
                "default": None if setting.required else repr(setting.default),
                **{"required": setting.required, "help": setting.help},
            }
            for setting in settings
        ]
    elif ":" not in name and hasattr(entry := table.find(name), "options"):
        facts["settings"] = [
            {"name": option, "expected": "", "default": None, "required": False, "help": ""}
            for option in entry.options()
        ]
    return facts


def _settings(target: Any) -> tuple[Setting, ...] | None:
    """Those that a class describes; of an executor those that only this one has. None where there is nothing to say."""
    from leakscope.contracts.settings import Described, settings_of

    if hasattr(target, "own_settings"):
        return target.own_settings() or None
    return settings_of(target) if isinstance(target, type) and issubclass(target, Described) else None


def _print_entry(facts: dict[str, Any]) -> None:
    from leakscope.cli.console import make_console, print_listing, print_table, say

    settings = facts["settings"]
    if not settings or not any(setting["expected"] for setting in settings):
        options = ", ".join(setting["name"] for setting in settings or ())
        print_listing([(facts["name"], facts["summary"]), ("options", options or "none")])
        return
    if facts["summary"]:
        say(make_console(), f"{facts['name']}: {facts['summary']}")
    rows = [(s["name"], s["expected"], "required" if s["required"] else s["default"], s["help"]) for s in settings]
    print_table(None, ("setting", "expected", "default", "meaning"), rows)
