"""The command ``import``: files of captured weights or of an update in, one observation out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakscope.cli.captured import Captured, takes_captured
from leakscope.contracts.errors import UserError

if TYPE_CHECKING:
    from leakscope.contracts.observation import Observation


@takes_captured
def import_update(
    captured: Captured,
    out: Annotated[Path, typer.Option(help="Where the observation goes.")] = Path("update.safetensors"),
) -> None:
    """Make an observation of a captured update.

    Give --before and --after, or --update with its --kind. All that does not fit the model is told at once, the sign
    is checked, and buffers of BatchNorm layers are read. Nothing is written unless everything fits.
    """
    from leakscope.cli.console import make_console, say, say_path
    from leakscope.contracts.files import tensor_file

    target = tensor_file(out)
    if any(path.resolve() == target.resolve() for path in captured.sources):
        raise UserError(f"--out: {out} is one of the captured files; choose another name")
    observation = captured.observe("import")
    observation.save(target)
    console = make_console()
    for line in understood(observation):
        say(console, line)
    say_path(console, "Observation:", target)


def understood(observation: Observation) -> list[str]:
    """What was understood of a captured update, a line each."""
    import torch

    from leakscope.contracts.protocol import BATCHNORM
    from leakscope.results.records import counted

    message, made, knowledge = observation.message, observation.made, observation.knowledge
    entries = sum(value.numel() for value in message.update.values())
    norm = float(torch.stack([value.double().norm() for value in message.update.values()]).norm())
    words = {"gradient": "a gradient", "weight_delta": "weights before minus weights after"}
    tensors = counted(len(message.update), "tensor")
    count = observation.num_examples
    examples = "an unknown number of examples" if count is None else counted(count, "example")
    lines = [f"Update of {examples}: {words[message.kind]}; {tensors}, {entries:,} numbers, norm {norm:.3g}."]
    if made is not None and made.sign is not None:
        lines.append(f"Sign: {made.sign}: {made.sign_reason}.")
    lines += [] if made is None else [f"Note: {note}." for note in made.notes]
    if any(isinstance(module, BATCHNORM) for module in observation.model.modules()):
        lines.append(f"BatchNorm is taken in {observation.batchnorm} mode.")
    known = [line for line in knowledge.describe()[1:] if line.startswith(("It knows", "It does not know the labels"))]
    return lines + [line.replace("It ", "The adversary ", 1) for line in known]
