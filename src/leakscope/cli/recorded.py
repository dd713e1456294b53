"""What ``leakscope report`` does with a folder of recorded updates: attack them, say the verdict, write the page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakscope.contracts.errors import UserError

if TYPE_CHECKING:
    from torch import nn

PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What was typed of recorded updates: each field is an option of ``leakscope report``."""

    model: Annotated[
        str | None, typer.Option(help="Of recorded updates: a reference model or package.module:factory.")
    ] = None
    attack: Annotated[
        str | None, typer.Option(help="Of recorded updates: a name with options; default head-first:iterations=60.")
    ] = None
    at_most: Annotated[
        int | None, typer.Option(min=1, help="Attack so many of the recorded updates only; default: all.")
    ] = None

    def typed(self) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]


def is_recorded(directory: Path) -> bool:
    """Tell whether a folder holds recorded updates."""
    return next(directory.glob("*.origin.json"), None) is not None


def report_recorded(directory: Path, to: Path | None, pictures: bool, typed: Recorded) -> None:
    """Attack what was recorded, print the verdict and write the page."""
    from leakscope.audit.parts import attack_part
    from leakscope.capture.recordings import recordings
    from leakscope.cli.console import make_console, say, say_path
    from leakscope.cli.output import parse_part
    from leakscope.integrations.leakage import QUICK, audit_recordings
    from leakscope.report.recorded import recorded_words

    found = recordings(directory)[: typed.at_most]
    model = _model(found[0].path, typed.model)
    attack = QUICK if typed.attack is None else attack_part(parse_part(typed.attack)).instance
    audit = audit_recordings(found, model=model, attack=attack)
    page = audit.report(directory / PAGE if to is None else to, pictures)
    console = make_console()
    for line in (*recorded_words(audit), *(one.describe() for one in audit)):
        say(console, line)
    say_path(console, "Report:", page)


def _model(path: Path, name: str | None) -> nn.Module:
    from leakscope.contracts.files import read_observation_files
    from leakscope.models import build_model

    if name is None:
        what = "a reference model (leakscope list models) or package.module:factory"
        raise UserError(f"--model: expected the model of these recorded updates, {what}, got none")
    tensors, facts = read_observation_files(path)
    held = sum(value.numel() for value in tensors.values())
    return build_model(name, input_shape=tuple(facts.inputs.shape), num_classes=facts.num_classes, most=held)
