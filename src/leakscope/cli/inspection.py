"""The command ``inspect``: arguments in, calls out. Nothing heavy is imported before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from leakscope.cli.parsing import parse_shape
from leakscope.contracts.errors import UserError

SUSPICIOUS = 1


def inspect(
    model: Annotated[
        str | None, typer.Argument(help="Name or package.module:factory; without it --weights alone are looked at.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="A .safetensors or .pt file of the state dictionary that was received.")
    ] = None,
    input: Annotated[str | None, typer.Option(help="Shape of one example, such as 3x32x32.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Look for layers that a server planted in a model to read its clients' data.

    Exit codes: 0 nothing found, 1 suspicious, 4 usage error.
    """
    if model is None and weights is None:
        raise UserError("inspect: expected a model (leakscope inspect MODEL), --weights FILE, or both")
    found = _inspected(model, weights, input, classes)
    title = " with ".join([*([model] if model else []), *([weights.name] if weights else [])])
    if as_json:
        print(json.dumps({"model": model, "weights": None if weights is None else weights.name, **found.as_dict()}))
    else:
        from leakscope.cli.console import print_inspection

        print_inspection(title, found)
    if found.suspicious:
        raise typer.Exit(SUSPICIOUS)


def _inspected(model: str | None, weights: Path | None, shape: str | None, classes: int | None) -> Any:
    from leakscope.models.weights import load_weights, read_weights
    from leakscope.network.inspection import inspect_model, inspect_weights

    if model is None:
        if shape is not None or classes is not None:
            raise UserError("--input and --classes: expected with a model only, weights have their own shapes")
        assert weights is not None
        return inspect_weights(read_weights(weights))
    from leakscope.models import build_model

    net = build_model(model, input_shape=None if shape is None else parse_shape(shape), num_classes=classes)
    if weights is not None:
        load_weights(net, weights)
    return inspect_model(net)
