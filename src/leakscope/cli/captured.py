"""The commands ``import`` and ``attack``: captured weights or an update in, an observation or what was recovered out.

Both have the options of :class:`Captured`: files, and what is known of the client.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.cli.output import parse_numbers, parse_part, parse_shape, takes
from leakscope.contracts.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from leakscope.contracts.inputs import ValueRange
    from leakscope.contracts.observation import Observation


Kind = StrEnum("Kind", "gradient weight_delta")
Sign = StrEnum("Sign", "check flip trust")
Optimizer = StrEnum("Optimizer", "sgd adam")
Mode = StrEnum("Mode", "eval train")
PAGE = "report.html"
_FILES = ".safetensors, .pt, .pth or .npz"


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What was typed of a captured update: each field is an option of the commands that take it."""

    before: Annotated[
        Path | None, typer.Option(help=f"Weights the client received ({_FILES}); default the factory's.")
    ] = None
    after: Annotated[Path | None, typer.Option(help=f"Weights the client returned ({_FILES}).")] = None
    update: Annotated[Path | None, typer.Option(help=f"An update instead of --after ({_FILES}); say its --kind.")] = (
        None
    )
    kind: Annotated[
        Kind | None, typer.Option(help="What --update holds: a gradient, or weights before minus weights after.")
    ] = None
    sign: Annotated[
        Sign,
        typer.Option(help="A wrong sign is refused (check), turned (flip: before and after swapped), or kept (trust)."),
    ] = Sign.check
    model: Annotated[str | None, typer.Option(help="Name or package.module:factory.")] = None
    input: Annotated[str | None, typer.Option(help="Shape of one example, such as 3x32x32.")] = None
    classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None
    examples: Annotated[int | None, typer.Option(help="Number of the client's examples behind the update.")] = None
    lr: Annotated[float | None, typer.Option(help="The client's learning rate.")] = None
    epochs: Annotated[int | None, typer.Option(help="The client's local epochs.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Examples in a local batch.")] = None
    optimizer: Annotated[Optimizer | None, typer.Option(help="The client's optimiser.")] = None
    momentum: Annotated[float | None, typer.Option(help="Its momentum.")] = None
    range: Annotated[str | None, typer.Option(help="Valid input values, such as 0,1.")] = None
    mean: Annotated[
        str | None, typer.Option(help="Mean that inputs in [0, 1] are normalised by, one a channel or one.")
    ] = None
    std: Annotated[str | None, typer.Option(help="Deviation that they are divided by, one a channel or one.")] = None
    labels: Annotated[str | None, typer.Option(help="The labels, where they are known, such as 3,5.")] = None
    batchnorm: Annotated[Mode | None, typer.Option(help="The client's BatchNorm mode, where no buffers tell it.")] = (
        None
    )

    @property
    def sources(self) -> list[Path]:
        return [path for path in (self.before, self.after, self.update) if path is not None]

    def typed(self) -> list[str]:
        """The options that were typed, as they are spelled."""
        return [f"--{name.replace('_', '-')}" for name, v in vars(self).items() if v not in (None, Sign.check)]

    def check(self) -> None:
        """Raise one error with all that does not go together."""
        from leakscope.contracts.checks import refuse

        problems = []
        if (self.after is None) == (self.update is None):
            got = "both" if self.after is not None else "neither"
            problems.append(f"expected --after FILE (with --before FILE), or --update FILE with --kind, got {got}")
        if self.update is not None and self.kind is None:
            problems.append("--update: expected --kind gradient or --kind weight_delta with it, got none")
        if self.update is None and self.kind is not None:
            problems.append("--kind: expected with --update only; weights before and after are a weight_delta")
        if self.model is None:
            problems.append("--model: expected a name (leakscope list models) or package.module:factory, got none")
        if self.before is None and self.model is not None and ":" not in self.model:
            problems.append("--before: expected the weights the client received, which no reference model has")
        if (self.mean is None) != (self.std is None):
            problems.append("--mean and --std: expected both or neither")
        if self.mean is not None and self.range is not None:
            problems.append("--range: expected without --mean and --std, which say the range of pixels in [0, 1]")
        refuse("the captured update is not described", problems)

    def observe(self, command: str) -> Observation:
        """The observation of what the files hold."""
        self.check()
        from leakscope.capture import observe_captured
        from leakscope.capture.files import read_captured
        from leakscope.models import MODELS, build_model

        assert self.model is not None
        shape, classes = None if self.input is None else parse_shape(self.input), self.classes
        if self.model in MODELS:
            entry = MODELS[self.model]
            shape, classes = shape or tuple(entry.input_shape), classes or entry.num_classes
        if shape is None or classes is None:
            raise UserError(f"model {self.model!r}: expected --input and --classes with a model of your own")
        net = build_model(self.model, input_shape=shape, num_classes=classes)
        received = None if self.before is None else read_captured(self.before)[0]
        source = self.after or self.update
        assert source is not None
        content, told = read_captured(source)
        examples = told if self.examples is None else self.examples
        kind = "weights" if self.kind is None else self.kind.value
        facts = self._facts(shape, classes, examples) | {
            "model_name": self.model if self.model in MODELS else None,
            "made_by": f"leakscope {command}",
            "sources": tuple(path.name for path in self.sources),
        }
        return observe_captured(content, kind, received, net, facts)

    def _facts(self, shape: tuple[int, ...], classes: int, examples: int | None) -> dict[str, Any]:
        return {
            "input_shape": shape,
            "num_classes": classes,
            "num_examples": examples,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "learning_rate": self.lr,
            "optimizer": None if self.optimizer is None else self.optimizer.value,
            "momentum": self.momentum,
            "value_range": self._value_range(),
            "labels": self._labels(examples),
            "batchnorm": None if self.batchnorm is None else self.batchnorm.value,
            "sign": self.sign.value,
        }

    def _value_range(self) -> ValueRange | None:
        from leakscope.contracts.inputs import ValueRange

        if self.mean is not None and self.std is not None:
            return ValueRange.normalised(parse_numbers("--mean", self.mean), parse_numbers("--std", self.std))
        if self.range is None:
            return None
        ends = parse_numbers("--range", self.range)
        if len(ends) != 2:
            raise UserError(f"--range: expected the lowest and the highest value such as 0,1, got {self.range!r}")
        return ValueRange((ends[0],), (ends[1],))

    def _labels(self, examples: int | None) -> Any:
        if self.labels is None:
            return None
        import torch

        numbers = parse_numbers("--labels", self.labels)
        if any(not number.is_integer() or abs(number) > 2**31 for number in numbers):
            raise UserError(f"--labels: expected class numbers such as 3,5, got {self.labels!r}")
        if examples is not None and len(numbers) != examples:
            raise UserError(f"--labels: expected one for each of {examples} examples, got {len(numbers)}")
        return torch.tensor([int(number) for number in numbers])


@takes(Captured)
def import_update(
    captured: Captured,
    out: Annotated[Path, typer.Option(help="Where the observation goes.")] = Path("update.safetensors"),
) -> None:
    """Make an observation of a captured update.

    Give --before and --after, or --update with its --kind. All that does not fit the model is told at once, the sign
    is checked, and buffers of BatchNorm layers are read. Nothing is written unless everything fits.
    """
    from leakscope.cli.console import make_console, say_path
    from leakscope.contracts.files import tensor_file

    target = tensor_file(out)
    if any(path.resolve() == target.resolve() for path in captured.sources):
        raise UserError(f"--out: {out} is one of the captured files; choose another name")
    observation = captured.observe("import")
    observation.save(target)
    console = make_console()
    _tell_understood(observation, console)
    say_path(console, "Observation:", target)


def _tell_understood(observation: Observation, console: Console) -> None:
    """Say how a captured update was understood."""
    import torch

    from leakscope.cli.console import write
    from leakscope.contracts.protocol import BATCHNORM

    values = list(observation.message.update.values())
    facts = {
        "entries": sum(value.numel() for value in values),
        "norm": float(torch.stack([value.double().norm() for value in values]).norm()),
        "batchnorm": any(isinstance(module, BATCHNORM) for module in observation.model.modules()),
    }
    write("understood", console, seen=observation, **facts)


@takes(Captured)
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
    show_names: Annotated[bool, typer.Option("--show-names", help="Tell labels, in the page and the JSON.")] = False,
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
    _write(result, {"attack": repr(result.attack), "seed": seed}, out, title, pictures, show_names)
    _tell(result, out)


def _attacked(observed: Any, attack: str, truth: Path | None, new: bool, settings: dict[str, Any]) -> Any:
    """The assessment of the attack so named; of a ``new`` observation it is told first how it was understood."""
    from leakscope.audit.assess import assess
    from leakscope.audit.parts import attack_part
    from leakscope.capture.files import read_truth
    from leakscope.cli.console import make_console
    from leakscope.cli.progress import step_progress

    recover = attack_part(parse_part(attack)).instance
    known = None if truth is None else read_truth(truth, observed)
    if new:
        _tell_understood(observed, make_console())
    with step_progress() as progress:
        found = assess(observed, recover, known, progress=progress, **settings)
    if found.refusal is not None:
        raise found.refusal
    return found


def _tell(result: Any, out: Path) -> None:
    from leakscope.cli.console import make_console, say_path, write
    from leakscope.report.captured import confidence_words, diagnosis_words
    from leakscope.report.sentences import shared_words
    from leakscope.results.records import counted

    console, recovered = make_console(), result.reconstruction
    shared = shared_words(recovered.certificates, result.psnr_of_inputs)
    said = {"confidence": confidence_words(result), "diagnosis": diagnosis_words(result)}
    write("assessed", console, result=result, shared=shared, **said)
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
    name = model or facts.model_name
    # A file may name a reference model, but never a factory: that would be code chosen by a data file.
    if not isinstance(name, str) or (model is None and name not in MODELS):
        raise UserError(f"{observation}: does not name a reference model; pass --model")
    # A model with more weights than the file holds is not the one observed, and need not be made to see that.
    held = sum(value.numel() for value in tensors.values())
    shape, classes = tuple(facts.inputs.shape), facts.num_classes
    return Observation.load(observation, build_model(name, input_shape=shape, num_classes=classes, most=held))


def _write(result: Any, facts: dict[str, Any], out: Path, title: str, pictures: bool, names: bool) -> None:
    """What an attack recovered: tensors, pictures, the attack's own opinion beside ``facts``, and the page.

    Labels are written where ``names`` are asked for.
    """
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
        "labels": None if recovered.labels is None or not names else recovered.labels.tolist(),
        "scores": recovered.scores.tolist(),
        "flags": list(recovered.flags),
        "notes": list(result.notes),
        "diagnosis": dataclasses.asdict(recovered.diagnosis),
        "certified": recovered.certified,
        "certificates": [None if proof is None else dataclasses.asdict(proof) for proof in recovered.certificates],
        "info": dict(recovered.info),
        "left_unexplained": result.unexplained,
        "baselines": [{"name": BASELINES[one.name], "left_unexplained": one.unexplained} for one in result.baselines],
        "outcome": result.outcome,
        "confidence": confidence_words(result),
        "made": None if made is None else made.facts(),
        "measures": None if result.evaluation is None else result.evaluation.told(names),
    }
    atomic_write(out / "reconstruction.json", json.dumps(plain(summary), indent=1, allow_nan=False).encode())
    write_captured(result, out / PAGE, title, pictures, names)
