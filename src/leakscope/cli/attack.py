"""The command ``attack``: a captured update in, what was recovered out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from leakscope.cli.captured import Captured, takes_captured
from leakscope.cli.parsing import parse_part
from leakscope.contracts.errors import UserError

PAGE = "report.html"


@takes_captured
def attack(
    observation: Annotated[
        Path | None,
        typer.Argument(help="A saved observation (.safetensors with a .json beside it); or the files below."),
    ] = None,
    attack: Annotated[str, typer.Option(help="Name with options, such as dlg:iterations=500.")] = "head-first",
    model: Annotated[str | None, typer.Option(help="Name or package.module:factory; default the one stored.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attack.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Say why it is what it is even where that takes minutes.")
    ] = False,
    control: Annotated[
        bool, typer.Option("--control/--no-control", help="Run it on noise in place of the update too, as a baseline.")
    ] = True,
    truth: Annotated[
        Path | None,
        typer.Option(help="Measure against this: .npz, .safetensors or .pt with x and y, a picture, or a folder."),
    ] = None,
    pictures: Annotated[bool, typer.Option("--pictures", help="Show originals of --truth in the page.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for what was recovered.")] = Path("leakscope-attack"),
    *,
    captured: Captured,
) -> None:
    """Attack a captured update.

    What was recovered is written: pictures, tensors, the attack's own opinion, and a page that shows them beside what
    knows nothing of the client. Give a saved observation, or what the command import takes.
    """
    if pictures and truth is None:
        raise UserError("--pictures: expected with --truth only; what was recovered is always shown")
    observed = captured.observe("attack") if observation is None else _stored(observation, model, captured.typed())
    controls = ("grey", "random", *(("noise",) if control else ()))
    settings = {"seed": seed, "device": device, "controls": controls, "thorough": diagnose}
    result = _attacked(observed, attack, truth, observation is None, settings)
    title = ", ".join(path.name for path in ([observation] if observation else captured.sources))
    _write(result, {"attack": repr(result.attack), "seed": seed}, out, title, pictures)
    _tell(result, out)


def _attacked(observed: Any, attack: str, truth: Path | None, new: bool, settings: dict[str, Any]) -> Any:
    """The assessment of the attack so named; of a ``new`` observation it is told first how it was understood."""
    from leakscope.audit.assess import assess
    from leakscope.audit.parts import attack_part
    from leakscope.capture.files import read_truth
    from leakscope.cli.console import make_console, say
    from leakscope.cli.importing import understood
    from leakscope.cli.progress import step_progress

    recover = attack_part(parse_part(attack)).instance
    known = None if truth is None else read_truth(truth, observed)
    console = make_console()
    for line in understood(observed) if new else ():
        say(console, line)
    with step_progress() as progress:
        found = assess(observed, recover, known, progress=progress, **settings)
    if found.refusal is not None:
        raise found.refusal
    return found


def _tell(result: Any, out: Path) -> None:
    from leakscope.cli.console import make_console, say, say_path
    from leakscope.report.captured import confidence_words
    from leakscope.report.certificate import shared_words
    from leakscope.results.records import counted

    console, recovered = make_console(), result.reconstruction
    for line in (*recovered.flags, *result.notes):
        say(console, f"Note: {line}")
    say(console, f"{recovered.diagnosis.outcome}: {recovered.diagnosis.reason}")
    for line in shared_words(recovered.certificates, result.psnr_of_inputs):
        say(console, f"{line}.")
    say(console, confidence_words(result))
    if result.evaluation is not None:
        values = ", ".join(f"{row['psnr']:.1f}" for row in result.evaluation.rows)
        say(console, f"PSNR against the truth, dB: {values}")
    time = f"{recovered.info['seconds']:.1f} s"
    say_path(console, f"Returned {counted(len(recovered.inputs), 'input')} in {time}:", out)
    say_path(console, "Page:", out / PAGE)


def _stored(observation: Path, model: str | None, options: list[str]) -> Any:
    from leakscope.contracts.files import read_observation_files
    from leakscope.contracts.observation import Observation
    from leakscope.models import MODELS, build_model

    typed = [name for name in options if name != "--model"]
    if typed:
        raise UserError(f"{', '.join(typed)}: expected without an observation, which has its own facts")
    tensors, facts = read_observation_files(observation)
    name = model or facts["model_name"]
    # A file may name a reference model, but never a factory: that would be code chosen by a data file.
    if not isinstance(name, str) or (model is None and name not in MODELS):
        raise UserError(f"{observation}: does not name a reference model; pass --model")
    # A model with more weights than the file holds is not the one observed, and need not be made to see that.
    held = sum(value.numel() for value in tensors.values())
    shape, classes = tuple(facts["inputs"]["shape"]), facts["num_classes"]
    return Observation.load(observation, build_model(name, input_shape=shape, num_classes=classes, most=held))


def _write(result: Any, facts: dict[str, Any], out: Path, title: str, pictures: bool) -> None:
    """What an attack recovered: tensors, pictures, the attack's own opinion beside ``facts``, and the page."""
    from safetensors.torch import save

    from leakscope.contracts.disk import atomic_write, private_folder
    from leakscope.report.captured import BASELINES, confidence_words, write_captured
    from leakscope.report.pictures import png
    from leakscope.results.records import plain

    private_folder(out)
    recovered, made = result.reconstruction, result.observation.made
    tensors = {"inputs": recovered.inputs.cpu().contiguous(), "scores": recovered.scores.cpu().contiguous()}
    atomic_write(out / "reconstruction.safetensors", save(tensors))
    if recovered.inputs.dim() == 4:
        for number, picture in enumerate(result.observation.inputs.to_unit(recovered.inputs.cpu()).clamp(0, 1)):
            atomic_write(out / f"reconstruction-{number}.png", png(picture))
    summary = {
        **facts,
        "labels": None if recovered.labels is None else recovered.labels.tolist(),
        "scores": recovered.scores.tolist(),
        "flags": list(recovered.flags),
        "notes": list(result.notes),
        "diagnosis": dataclasses.asdict(recovered.diagnosis),
        "certified": recovered.certified,
        "certificates": [None if proof is None else dataclasses.asdict(proof) for proof in recovered.certificates],
        "info": dict(recovered.info),
        "left_unexplained": result.unexplained,
        "baselines": [{"name": BASELINES[one.name], "left_unexplained": one.unexplained} for one in result.baselines],
        "confidence": confidence_words(result),
        "made": None if made is None else made.facts(),
        "measures": None if result.evaluation is None else list(result.evaluation.rows),
    }
    atomic_write(out / "reconstruction.json", json.dumps(plain(summary), indent=1, allow_nan=False).encode())
    write_captured(result, out / PAGE, title, pictures)
