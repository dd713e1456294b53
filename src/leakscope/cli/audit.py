"""The command ``audit``; what its options mean stands in the spec, which they are keys of."""

import re
import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from leakscope.audit.sections import DataSpec, ModelSpec
from leakscope.audit.spec import AuditSpec
from leakscope.audit.yaml_text import SpecError, SpecFile, read_yaml
from leakscope.cli.output import (
    ALLOW_CODE,
    Output,
    SarifFile,
    own_names,
    parse_defense,
    parse_part,
    parse_parts,
    relative,
    takes,
    write_sarif,
)
from leakscope.contracts.checks import SPEC_BYTES
from leakscope.contracts.disk import read_whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.registry import names_of_a_spec
from leakscope.contracts.settings import settings_of
from leakscope.results.policy import Policy


def _sentence(key: str, example: str = "", model: Any = AuditSpec) -> str:
    """The sentence of a key of a spec."""
    sentence = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", str(model.model_fields[key].description)).replace("`", "")
    return f"{sentence[0].upper()}{sentence[1:]}{f'; {example}' if example else ''}."


def _help(key: str, example: str = "", model: Any = AuditSpec) -> Any:
    """The option of a key of a spec, with the key's own sentence."""
    return typer.Option(help=_sentence(key, example, model))


_LIMITS = {setting.name: f"Policy: {setting.help}." for setting in settings_of(Policy)}

#: The name under which a repository keeps its audit; it is never run unasked.
POLICY_FILE = Path("leakscope.yaml")

#: Where an audit is kept, and a quick one, unless --out says so.
OUT, QUICK_OUT = Path("leakscope-audit"), Path("leakscope-quick")

Labels = StrEnum("Labels", "no counts yes")


@takes(Output)
def audit(
    context: typer.Context,
    spec: Annotated[
        Path | None, typer.Argument(help="YAML spec; without it the options, or the default audit.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of rows and report; resumed if it exists.")] = OUT,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A first answer in minutes: one example, one local step, exact and cheap attacks. It may find a leak, "
            f"but never passes. Default folder: {QUICK_OUT}.",
        ),
    ] = False,
    model: Annotated[str | None, _help("name", model=ModelSpec)] = None,
    weights: Annotated[Path | None, _help("weights", model=ModelSpec)] = None,
    data: Annotated[str | None, _help("name", "folder:mode=L,resize=28,limit=500", model=DataSpec)] = None,
    data_path: Annotated[Path | None, _help("path", model=DataSpec)] = None,
    task: Annotated[str | None, _help("task", "regression:distance=absolute")] = None,
    examples: Annotated[int | None, _help("examples")] = None,
    batch: Annotated[int | None, _help("batch")] = None,
    protocol: Annotated[list[str] | None, _help("protocols", "fedavg:epochs=5,batch_size=10,lr=0.004")] = None,
    defense: Annotated[
        list[str] | None,
        _help("defenses", "gradient-pruning:fraction=0.9; repeatable, + makes a chain"),
    ] = None,
    attack: Annotated[list[str] | None, _help("attacks", "dlg:iterations=500; repeatable")] = None,
    knowledge: Annotated[str | None, _help("knowledge", "adaptive_server lets attacks know the defence")] = None,
    labels: Annotated[
        Labels | None,
        typer.Option(
            help="What attacks know of the labels, whatever --knowledge says: nothing, how many of each, all."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.")] = None,
    max_psnr: Annotated[float | None, typer.Option(help=_LIMITS["max_psnr"])] = None,
    max_label_accuracy: Annotated[float | None, typer.Option(help=_LIMITS["max_label_accuracy"])] = None,
    max_identification: Annotated[float | None, typer.Option(help=_LIMITS["max_identification"])] = None,
    waive: Annotated[list[str] | None, typer.Option(help=f"{_LIMITS['waive']} Repeatable.")] = None,
    findings: Annotated[
        bool | None, typer.Option("--findings/--no-findings", help="Theory beside the attacks.")
    ] = None,
    controls: Annotated[
        bool | None, typer.Option("--controls/--no-controls", help="Controls beside each attack.")
    ] = None,
    workers: Annotated[str | None, _help("workers")] = None,
    threads: Annotated[int | None, _help("threads")] = None,
    device: Annotated[str | None, _help("device")] = None,
    dtype: Annotated[str | None, _help("dtype")] = None,
    budget: Annotated[str | None, _help("budget")] = None,
    stop_on_leak: Annotated[
        bool | None, typer.Option("--stop-on-leak/--no-stop-on-leak", help=_sentence("stop_on_leak"))
    ] = None,
    executor: Annotated[str | None, _help("executor", "ray:address=HOST:PORT,gpus=0.25")] = None,
    serial: Annotated[bool, typer.Option("--serial", help="Run jobs in this process, one after another.")] = False,
    pictures: Annotated[
        bool | None, typer.Option("--pictures/--no-pictures", help="Show private pictures in the report.")
    ] = None,
    show_names: Annotated[
        bool | None, typer.Option("--show-names", help="Tell names and labels of private data.")
    ] = None,
    about: Annotated[list[str] | None, _help("about", 'by="Ann Lee"; repeatable')] = None,
    allow_code: Annotated[bool, typer.Option("--allow-code", help=ALLOW_CODE)] = False,
    sarif: SarifFile = None,
    *,
    output: Output,
) -> None:
    """Audit what the updates of a model leak.

    Updates are attacked, the results compared with the truth and judged, and a report is written. With the section
    utility in the spec it is a defence study: every defence is trained with too, and the report says what it costs.
    """
    if serial and executor is not None:
        raise UserError("--serial and --executor: expected one of them, got both")
    if weights and not model:
        raise UserError("--weights: expected together with --model")
    shares = {"max_label_accuracy": max_label_accuracy, "max_identification": max_identification}
    limits = {"max_psnr": max_psnr, **shares, "waive": waive or None}
    chosen = {
        "model": {"name": model, "weights": weights} if model and weights else model,
        "data": _data_option(data, data_path, spec),
        "task": None if task is None else parse_part(task),
        "examples": examples,
        "batch": batch,
        "protocols": parse_parts(protocol),
        "defenses": [parse_defense(text) for text in defense] if defense else None,
        "attacks": parse_parts(attack),
        "knowledge": None if knowledge is None else parse_part(knowledge),
        "seeds": seeds,
        "policy": {name: limit for name, limit in limits.items() if limit is not None} or None,
        "findings": findings,
        "controls": controls,
        "workers": int(workers) if workers is not None and workers.isdecimal() else workers,
        "threads": threads,
        "budget": budget,
        "stop_on_leak": stop_on_leak,
        "device": device,
        "dtype": dtype,
        "pictures": pictures,
        "show_names": show_names,
        "about": _about_option(about) if about else None,
        "executor": "serial" if serial else None if executor is None else parse_part(executor),
    }
    options = {key: value for key, value in chosen.items() if value is not None}
    checked = checked_spec(spec, options, labels, allow_code)
    if quick:
        from leakscope.audit.quick import quickened

        checked, out = quickened(checked), QUICK_OUT if out == OUT else out
    from leakscope.audit.run import run_spec
    from leakscope.cli.console import make_console, print_verdict, say
    from leakscope.cli.next_command import Typed, next_command
    from leakscope.cli.progress import audit_progress
    from leakscope.report.export import audit_document, audit_table

    if not (spec or options or output.quiet) and POLICY_FILE.is_file():
        say(make_console(stderr=True), f"Hint: the embedded audit; yours is run by: leakscope audit {POLICY_FILE}")
    again = None if quick else quick_command(sys.argv[1:], out)
    with audit_progress(show=output.progress, verbose=output.verbose, quiet=output.quiet, quick=again) as progress:
        result = run_spec(checked, out, progress)
    page, verdict = result.report(), result.verdict
    command = None if verdict.advice is None else next_command(Typed.of(context), verdict.advice, checked, out)
    console = make_console(stderr=output.for_machines)
    print_verdict(result, page, console, command, quiet=output.quiet, verbose=output.verbose)
    write_sarif(result.store, verdict, sarif)
    files = {"folder": relative(out), "report": relative(page)}
    output.write(
        lambda: audit_document(result.store, verdict, files, command), lambda: audit_table(result.store, verdict)
    )
    raise typer.Exit(verdict.exit_code)


def quick_command(words: Sequence[str], out: Path = OUT) -> str:
    """Return the command of the quick audit of what ``words`` audit in ``out``, in a folder of its own.

    >>> quick_command(["audit", "my spec.yaml"], OUT), quick_command(["audit", "--out", "a"], Path("a"))
    ("leakscope audit 'my spec.yaml' --quick", 'leakscope audit --quick --out a-quick')
    >>> quick_command(["audit", "--out=a", "--data", "tiles"], Path("a"))
    'leakscope audit --data tiles --quick --out a-quick'
    """
    folder = [] if out == OUT else ["--out", f"{out}-quick"]
    rest = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if "--out" not in (before, word) and not word.startswith("--out=")
    ]
    return shlex.join(["leakscope", *rest, "--quick", *folder])


def _data_option(typed: str | None, path: Path | None, spec: Path | None) -> Any:
    """Return the section that ``--data name:key=value`` and ``--data-path`` mean: keys of it, or the reader's own."""
    part = None if typed is None else parse_part(typed)
    if path is None and not isinstance(part, dict):
        return part
    ((name, options),) = part.items() if isinstance(part, dict) else ((part, {}),)
    if "path" in options and path is not None:
        raise UserError(f"--data {typed}: expected a path there or as --data-path, got both")
    own = DataSpec.model_fields.keys() - {"name", "options", "instance"}
    section: dict[str, Any] = {key: value for key, value in options.items() if key in own}
    for key in section.keys() & {"mean", "std"}:  # one number is all that a word can hold
        section[key] = [section[key]]
    section |= {} if path is None else {"path": path}
    name = "folder" if name is None and spec is None else name
    section |= {} if name is None else {"name": name}
    rest = {key: value for key, value in options.items() if key not in own}
    return {**section, "options": rest} if rest else section


def _about_option(typed: Sequence[str]) -> dict[str, str]:
    """Return the words of each ``--about KEY=TEXT``."""
    if wrong := [one for one in typed if "=" not in one]:
        raise UserError(f"--about {wrong[0]}: expected model=TEXT, data=TEXT or by=TEXT")
    return {key: text for key, _, text in (one.partition("=") for one in typed)}


def checked_spec(
    spec: Path | None, options: dict[str, Any], labels: Labels | None = None, allow_code: bool = False
) -> AuditSpec:
    """Return what the command line audits: a file or the default, with options in place of its keys."""
    text = None if spec is None else _text(spec)
    settings = _default(options) if spec is None or text is None else _merged(read_yaml(text, str(spec)), spec, options)
    settings.setdefault("executor", "processes")
    # What is typed is the user's own word; what stands in the file is data.
    with names_of_a_spec(spec.parent if spec else Path.cwd(), allowed=allow_code, typed=own_names(options)):
        checked = AuditSpec.parse(settings, str(spec or "audit"))
        if labels is not None:  # on top of the preset or the mapping, which only the checked spec tells
            settings["knowledge"] = {**checked.knowledge, "labels": labels.value}
            checked = AuditSpec.parse(settings, str(spec or "audit"))
    return checked if spec is None or text is None else checked.written_in(SpecFile(spec, text, frozenset(options)))


def _text(spec: Path) -> str:
    if not spec.is_file():
        raise SpecError([f"{spec}: no such file; expected a YAML spec"], str(spec))
    return read_whole(spec, SPEC_BYTES).decode("utf-8", errors="replace")


def _merged(written: Any, spec: Path, options: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(written, dict):
        raise SpecError([f"expected a mapping of settings, got {type(written).__name__}"], str(spec))
    settings = {**written, **options}
    for key in ("policy", "data", "about"):  # an option changes one thing of these, not all of them
        named = key == "data" and "name" in options.get(key, ())
        if isinstance(written.get(key), dict) and isinstance(options.get(key), dict) and not named:
            settings[key] = {**written[key], **options[key]}
    return settings


def _default(options: dict[str, Any]) -> dict[str, Any]:
    from leakscope.audit.spec import DEFAULT_SPEC

    settings: dict[str, Any] = {**DEFAULT_SPEC, **options}
    if ("model" in options or "data" in options) and "defenses" not in options:
        settings["defenses"] = ["none"]  # those of the embedded audit are no part of what the user has
    if ("data" in options or "batch" in options) and "examples" not in options:
        settings.pop("examples")  # six fit the default data and batch only
    return settings
