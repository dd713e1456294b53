"""Options that ``import`` and ``attack`` share: captured weights or an update, and what is known of the client."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.cli.parsing import parse_numbers, parse_shape
from leakscope.contracts.errors import UserError

if TYPE_CHECKING:
    from leakscope.contracts.inputs import ValueRange
    from leakscope.contracts.observation import Observation


Kind = StrEnum("Kind", "gradient weight_delta")
Sign = StrEnum("Sign", "check flip trust")
Optimizer = StrEnum("Optimizer", "sgd adam")
Mode = StrEnum("Mode", "eval train")
_FILES = ".safetensors, .pt, .pth or .npz"


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What was typed of a captured update: each field is an option of the commands that :func:`takes_captured`."""

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
        if any(not number.is_integer() for number in numbers):
            raise UserError(f"--labels: expected class numbers such as 3,5, got {self.labels!r}")
        if examples is not None and len(numbers) != examples:
            raise UserError(f"--labels: expected one for each of {examples} examples, got {len(numbers)}")
        return torch.tensor([int(number) for number in numbers])


def takes_captured(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :class:`Captured` in place of its parameter ``captured``.

    An option that the command has itself, with a help of its own, is not repeated.
    """
    own, options = (inspect.signature(one, eval_str=True).parameters for one in (command, Captured))
    taken: dict[str, inspect.Parameter] = {}
    for name, parameter in own.items():
        more = {key: option for key, option in options.items() if key not in own}
        taken |= more if name == "captured" else {name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)}

    @functools.wraps(command)
    def typed(**values: Any) -> None:
        captured = Captured(**{name: values[name] for name in options})
        command(captured=captured, **{name: value for name, value in values.items() if name in own})

    typed.__signature__ = inspect.Signature(list(taken.values()))  # type: ignore[attr-defined]
    typed.__annotations__ = {name: parameter.annotation for name, parameter in taken.items()}
    return typed
