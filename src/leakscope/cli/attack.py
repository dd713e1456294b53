"""The command ``attack``: a captured update in, what was recovered out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from leakscope.cli.parsing import parse_part


def attack(
    observation: Annotated[Path, typer.Argument(help="A saved observation (.safetensors with a .json beside it).")],
    attack: Annotated[str, typer.Option(help="Name with options, such as dlg:iterations=500.")] = "head-first",
    model: Annotated[str | None, typer.Option(help="Name or package.module:factory; default the one stored.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attack.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Say why it is what it is even where that takes minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for what was recovered.")] = Path("leakscope-attack"),
) -> None:
    """Attack a captured update.

    What was recovered is written: pictures, tensors and the attack's own opinion.
    """
    from leakscope.audit.parts import attack_part
    from leakscope.cli.console import make_console, say, say_path
    from leakscope.cli.progress import step_progress
    from leakscope.contracts.files import read_observation_files
    from leakscope.contracts.observation import Observation
    from leakscope.limits import diagnose as explain
    from leakscope.models import MODELS, build_model
    from leakscope.results.records import counted

    tensors, facts = read_observation_files(observation)
    name = model or facts["model_name"]
    # A file may name a reference model, but never a factory: that would be code chosen by a data file.
    if not isinstance(name, str) or (model is None and name not in MODELS):
        raise ValueError(f"{observation}: does not name a reference model; pass --model")
    # A model with more weights than the file holds is not the one observed, and need not be made to see that.
    held = sum(value.numel() for value in tensors.values())
    shape, classes = tuple(facts["inputs"]["shape"]), facts["num_classes"]
    net = build_model(name, input_shape=shape, num_classes=classes, most=held)
    observed = Observation.load(observation, net)
    recover = attack_part(parse_part(attack)).instance
    with step_progress() as progress:
        result = recover(observed, seed=seed, device=device, progress=progress)
    result = dataclasses.replace(result, diagnosis=explain(observed, result, thorough=diagnose))
    _write(result, observed, {"attack": repr(recover), "seed": seed}, out)
    console = make_console()
    for line in (*result.flags, *result.notes):
        say(console, f"Note: {line}")
    say(console, f"{result.diagnosis.outcome}: {result.diagnosis.reason}")
    say_path(console, f"Returned {counted(len(result.inputs), 'input')} in {result.info['seconds']:.1f} s:", out)


def _write(result: Any, observed: Any, facts: dict[str, Any], out: Path) -> None:
    """What an attack recovered: tensors, pictures, and the attack's own opinion beside ``facts``."""
    from safetensors.torch import save

    from leakscope.contracts.disk import atomic_write, private_folder
    from leakscope.report.pictures import png
    from leakscope.results.records import plain

    private_folder(out)
    tensors = {"inputs": result.inputs.cpu().contiguous(), "scores": result.scores.cpu().contiguous()}
    atomic_write(out / "reconstruction.safetensors", save(tensors))
    if result.inputs.dim() == 4:
        unit = observed.inputs.to_unit(result.inputs.cpu()).clamp(0, 1)
        for number, picture in enumerate(unit):
            atomic_write(out / f"reconstruction-{number}.png", png(picture))
    summary = {
        **facts,
        "labels": None if result.labels is None else result.labels.tolist(),
        "scores": result.scores.tolist(),
        "flags": list(result.flags),
        "notes": list(result.notes),
        "diagnosis": dataclasses.asdict(result.diagnosis),
        "info": dict(result.info),
    }
    atomic_write(out / "reconstruction.json", json.dumps(plain(summary), indent=1, allow_nan=False).encode())
