"""The command line: arguments in, calls out. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from leakscope.cli_limits import limits

INTERRUPTED, INTERNAL, USAGE = 2, 3, 4
CTRL_C = 130  # what typer makes of a KeyboardInterrupt

app = typer.Typer(
    help="What can somebody who sees a federated-learning update learn about the data behind it?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Exit codes of audit: 0 within policy, 1 leaks above policy, 2 interrupted, 3 internal error, "
    "4 usage or spec error, 5 nothing audited or inconclusive.",
)


class Listable(StrEnum):
    attacks = "attacks"
    defenses = "defenses"
    models = "models"
    data = "data"
    papers = "papers"


class Scale(StrEnum):
    smoke = "smoke"
    small = "small"
    paper = "paper"


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
    print(text, file=sys.stderr)


@app.command()
def audit(
    spec: Annotated[
        Path | None, typer.Argument(help="YAML spec; without it the options, or the default audit.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of rows and report; resumed if it exists.")] = Path(
        "leakscope-audit"
    ),
    model: Annotated[str | None, typer.Option(help="Name (leakscope list models) or package.module:factory.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights of the model, a .safetensors file.")] = None,
    data: Annotated[str | None, typer.Option(help="Name of the data (leakscope list data).")] = None,
    data_path: Annotated[Path | None, typer.Option(help="Where the data lies.")] = None,
    examples: Annotated[int | None, typer.Option(help="How many examples to attack.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples a client holds.")] = None,
    protocol: Annotated[
        list[str] | None, typer.Option(help="fedsgd, fedavg:epochs=5,batch_size=10,lr=0.004 or vertical:batch_size=8.")
    ] = None,
    defense: Annotated[
        list[str] | None, typer.Option(help="none, or gradient-pruning:fraction=0.9. Repeatable.")
    ] = None,
    attack: Annotated[list[str] | None, typer.Option(help="standard, or a name with options. Repeatable.")] = None,
    knowledge: Annotated[
        str | None, typer.Option(help="eavesdropper, honest_server, vertical_server, malicious_server or full.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.")] = None,
    max_psnr: Annotated[float | None, typer.Option(help="Policy: a reconstruction this good leaks (dB).")] = None,
    workers: Annotated[int | None, typer.Option(help="Jobs side by side; default one a core.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads a job; default 1.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    serial: Annotated[bool, typer.Option("--serial", help="Run jobs in this process, one after another.")] = False,
    pictures: Annotated[
        bool | None, typer.Option("--pictures/--no-pictures", help="Show private pictures in the report.")
    ] = None,
) -> None:
    """Audit a model and its protocol: attack updates, compare with the truth, judge, write a report."""
    chosen = {
        "model": {"name": model, "weights": weights} if model and weights else model,
        "data": _data_option(data, data_path, spec),
        "examples": examples,
        "batch": batch,
        "protocols": _parts(protocol),
        "defenses": _parts(defense),
        "attacks": _parts(attack),
        "knowledge": knowledge,
        "seeds": seeds,
        "policy": None if max_psnr is None else {"max_psnr": max_psnr},
        "workers": workers,
        "threads": threads,
        "device": device,
        "pictures": pictures,
        "executor": "serial" if serial else None,
    }
    options = {key: value for key, value in chosen.items() if value is not None}
    if weights and not model:
        raise ValueError("--weights: expected together with --model")
    code = _run_audit(spec, options, out)
    raise typer.Exit(code)


def _data_option(name: str | None, path: Path | None, spec: Path | None) -> Any:
    if path is None:
        return name
    if name is None and spec is None:
        name = "folder"
    return {"path": path} if name is None else {"name": name, "path": path}


def _run_audit(spec: Path | None, options: dict[str, Any], out: Path) -> int:
    from leakscope.audit import DEFAULT_SPEC, AuditSpec, SpecError, read_yaml, run_spec

    settings: dict[str, Any]
    if spec is not None:
        if not spec.is_file():
            raise SpecError([f"{spec}: no such file; expected a YAML spec"], str(spec))
        written = read_yaml(spec.read_text(encoding="utf-8", errors="replace"), str(spec))
        if not isinstance(written, dict):
            raise SpecError([f"expected a mapping of settings, got {type(written).__name__}"], str(spec))
        settings = {**written, **options}
        for key in ("policy", "data"):  # an option changes one thing of these, not all of them
            if isinstance(written.get(key), dict) and isinstance(options.get(key), dict):
                settings[key] = {**written[key], **options[key]}
    else:
        settings = {**DEFAULT_SPEC, **options}
        if ("data" in options or "batch" in options) and "examples" not in options:
            settings.pop("examples")  # six fit the default data and batch only
    settings.setdefault("executor", "processes")
    checked = AuditSpec.parse(settings, str(spec or "audit"))
    from leakscope.console import audit_progress, print_verdict

    with audit_progress() as progress:
        result = run_spec(checked, out, progress)
    print_verdict(result, result.report())
    return result.verdict.exit_code


def _parts(texts: list[str] | None) -> list[Any] | None:
    """``name:key=value,key=value`` as a spec says it: {name: {key: value}}."""
    if not texts:
        return None
    from leakscope.audit import read_yaml

    parts: list[Any] = []
    for text in texts:
        name, _, rest = text.partition(":")
        if not rest:
            parts.append(name)
            continue
        options = {}
        for pair in rest.split(","):
            key, equals, value = pair.partition("=")
            if not equals or not key.strip():
                raise ValueError(f"{text!r}: expected name:key=value,key=value, got {pair!r}")
            options[key.strip()] = read_yaml(value, text)
        parts.append({name: options})
    return parts


@app.command()
def attack(
    observation: Annotated[Path, typer.Argument(help="A saved observation (.safetensors with a .json beside it).")],
    attack: Annotated[str, typer.Option(help="Name with options, such as dlg:iterations=500.")] = "inverting-gradients",
    model: Annotated[str | None, typer.Option(help="Name or package.module:factory; default the one stored.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attack.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Say why it is what it is even where that takes minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for what was recovered.")] = Path("leakscope-attack"),
) -> None:
    """Attack a captured update and write what was recovered: pictures, tensors and the attack's own opinion."""
    from leakscope.audit.parts import attack_part
    from leakscope.models import MODELS, build_model
    from leakscope.observation import Observation
    from leakscope.observation_files import read_observation_files

    _, facts = read_observation_files(observation)
    name = model or facts["model_name"]
    # A file may name a reference model, but never a factory: that would be code chosen by a data file.
    if not isinstance(name, str) or (model is None and name not in MODELS):
        raise ValueError(f"{observation}: does not name a reference model; pass --model")
    net = build_model(name, input_shape=tuple(facts["input_shape"]), num_classes=facts["num_classes"])
    seen = Observation.load(observation, net)
    recover = attack_part((_parts([attack]) or [attack])[0]).instance
    from leakscope.console import step_progress, write_reconstruction

    with step_progress() as progress:
        result = recover(seen, seed=seed, device=device, progress=progress, diagnose=True if diagnose else None)
    write_reconstruction(result, seen, {"attack": repr(recover), "seed": seed}, out)
    for line in (*result.flags, *result.notes):
        print(f"note: {line}")
    if result.diagnosis is not None:
        print(f"{result.diagnosis.outcome}: {result.diagnosis.reason}")
    print(f"returned {len(result.inputs)} inputs in {result.info['seconds']:.1f} s: {out}")


app.command()(limits)


@app.command()
def reproduce(
    table: Annotated[str, typer.Argument(help="PAPER/TABLE (leakscope list papers).")],
    scale: Annotated[Scale, typer.Option(help="How much to run.")] = Scale.smoke,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the page; default leakscope-reproduce/PAPER-TABLE if it has pictures or curves."),
    ] = None,
    pictures: Annotated[
        bool | None, typer.Option("--pictures/--no-pictures", help="Show private pictures in the page.")
    ] = None,
) -> None:
    """Run a published table and put published and measured numbers side by side."""
    from leakscope.console import print_reproduction, step_progress
    from leakscope.papers import reproduce as run
    from leakscope.report import write_reproduction

    with step_progress() as progress:
        result = run(table, scale=scale.value, progress=progress)
    page = None
    if out is not None or result.pictures or result.curves:
        folder = out or Path("leakscope-reproduce") / table.replace("/", "-")
        page = write_reproduction(result, folder / "report.html", pictures)
    print_reproduction(f"{table} ({scale.value})", result, page, pictures)


@app.command(name="list")
def list_(what: Annotated[Listable, typer.Argument(help="What to list.")]) -> None:
    """Names that can be typed elsewhere, with one line each."""
    from leakscope.console import print_listing

    print_listing(_listing(what))


def _listing(what: Listable) -> list[tuple[str, str]]:
    if what is Listable.attacks:
        from leakscope.attacks import ATTACKS

        return [(a.name, f"{a.summary} ({a.paper})") for a in ATTACKS.values()]
    if what is Listable.defenses:
        from leakscope.defenses import DEFENSES

        return [(name, (cls.__doc__ or "").strip().splitlines()[0]) for name, cls in DEFENSES.items()]
    if what is Listable.models:
        from leakscope.models import MODELS

        return [(m.name, m.summary) for m in MODELS.values()]
    if what is Listable.data:
        from leakscope.data import DATA

        return [(d.name, d.summary) for d in DATA.values()]
    from leakscope.papers import PAPERS

    return [(p.name, p.summary) for p in PAPERS.values()]


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="Folder of an audit.")],
    to: Annotated[Path | None, typer.Option(help="Where to write; default DIR/report.html.")] = None,
    pictures: Annotated[
        bool | None, typer.Option("--pictures/--no-pictures", help="Show the pictures the audit kept.")
    ] = None,
) -> None:
    """Write the report of an audit again, finished or not."""
    from leakscope.report import write_report

    print(write_report(directory, to, pictures=pictures))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Folder of an audit.")],
    second: Annotated[Path, typer.Argument(help="Folder of another audit.")],
    to: Annotated[Path | None, typer.Option(help="Also write an HTML page here.")] = None,
) -> None:
    """Compare two audits setting by setting."""
    from leakscope.console import print_comparison
    from leakscope.report import compare_tables, write_comparison

    print_comparison(f"{first} against {second}", compare_tables(first, second))
    if to is not None:
        print(write_comparison(first, second, to))


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from leakscope import __version__

        print(f"leakscope {__version__}")
        raise typer.Exit()


if __name__ == "__main__":
    main()
