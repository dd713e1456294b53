"""The commands ``limits``, ``inspect`` and ``plan``, which run no attack. Nothing heavy is imported before they run."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakscope.cli.audit import checked_spec, quick_command
from leakscope.cli.output import ALLOW_CODE, Output, parse_shape, takes
from leakscope.contracts.errors import UserError

if TYPE_CHECKING:
    from leakscope.audit.estimate import Sizing

Options = dict[str, Any]
NoiseScale = StrEnum("NoiseScale", {"absolute": "absolute", "times_clip": "times-clip"})
PruneScope = StrEnum("PruneScope", {"tensor": "tensor", "whole": "global"})


def limits(
    spec: Annotated[Path | None, typer.Argument(help="YAML spec of an audit, for its model, data and batch.")] = None,
    model: Annotated[str | None, typer.Option(help="Name or package.module:factory.")] = None,
    input: Annotated[str | None, typer.Option(help="Shape of one example, such as 3x32x32.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples in the batch; default 1.")] = None,
    samples: Annotated[int | None, typer.Option(help="Vertical model: samples that batches are drawn from.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Vertical model: how many batches; default enough.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None,
    data: Annotated[str | None, typer.Option(help="Look at real examples of this data, not at random ones.")] = None,
    data_path: Annotated[Path | None, typer.Option(help="Where its files are; alone, a folder of pictures.")] = None,
    index: Annotated[int | None, typer.Option(help="Number of the first of these examples; default 0.")] = None,
    noise: Annotated[float | None, typer.Option(help="Noise on the gradient, for the least error.")] = None,
    clip: Annotated[float | None, typer.Option(help="Clip the gradient to this length first.")] = None,
    noise_scale: Annotated[NoiseScale, typer.Option(help="Unit of --noise.")] = NoiseScale.absolute,
    prune: Annotated[float | None, typer.Option(help="Share of smallest entries set to zero.")] = None,
    prune_scope: Annotated[PruneScope, typer.Option(help="Share of what.")] = PruneScope.tensor,
    dropout: Annotated[float | None, typer.Option(help="Share of entries set to zero at random.")] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Rank and least error exactly, even if it takes long.")
    ] = False,
    probes: Annotated[int, typer.Option(help="Random directions of an estimate.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of inputs, batches, dropout and probes.")] = 0,
    allow_code: Annotated[bool, typer.Option("--allow-code", help=ALLOW_CODE)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """What theory says can be recovered, before any attack."""
    from leakscope.contracts.channel import Channel

    chosen = {"noise": noise, "clip": clip, "prune": prune, "dropout": dropout}
    settings: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if noise_scale is NoiseScale.times_clip:
        if clip is None or noise is None:
            raise UserError("--noise-scale times-clip: expected together with --noise and --clip")
        settings["noise"] = noise * clip
    channel = Channel(**settings, prune_scope=prune_scope.value) if settings else None
    from leakscope.cli.console import print_limits
    from leakscope.cli.progress import named_progress

    with named_progress() as progress:
        options = {"channel": channel, "exact": exact, "probes": probes, "seed": seed, "progress": progress}
        if spec is not None:
            flags = {"--model": model, "--input": input, "--batch": batch, "--samples": samples, "--rounds": rounds}
            twice = {**flags, "--classes": classes, "--data": data, "--data-path": data_path, "--index": index}
            results = _of_spec(spec, [name for name, value in twice.items() if value is not None], options, allow_code)
        elif model is None:
            raise UserError("limits: expected a spec (leakscope limits SPEC.yaml) or --model")
        else:
            count = batch if batch is not None else 1
            source = "folder" if data is None and data_path is not None else data
            shape, facts = _examples(source, data_path, index or 0, samples if samples is not None else count, input)
            results = [_of_model(model, shape, facts, classes, count, samples, rounds, options)]
    if as_json:
        from leakscope.results.records import plain

        contents = plain([limits.as_dict() for _, limits in results])
        print(json.dumps(contents[0] if len(contents) == 1 else contents, indent=1, allow_nan=False))
    else:
        for title, limits in results:
            print_limits(title, limits)


def _vertical(net: Any, samples: int, batch: int, rounds: int | None, options: Options, facts: Options) -> Any:
    if options["channel"] is not None or options["exact"]:
        raise UserError(
            "--noise, --clip, --prune, --dropout, --exact: not for a vertical model, whose least error is too large to "
            "compute; leave them out"
        )
    from leakscope.limits import vertical_limits

    return vertical_limits(net, samples, batch, rounds, **facts, seed=options["seed"], progress=options["progress"])


def _of_model(
    name: str,
    shape: tuple[int, ...],
    facts: dict[str, Any],
    classes: int | None,
    batch: int,
    samples: int | None,
    rounds: int | None,
    options: Options,
) -> tuple[str, Any]:
    from leakscope.limits import limits as compute
    from leakscope.models import build_model
    from leakscope.models.split import VerticalModel

    if classes is None:
        classes = facts.pop("num_classes", None)
    net = build_model(name, input_shape=shape, **({} if classes is None else {"num_classes": classes}))
    if not isinstance(net, VerticalModel):
        if samples is not None or rounds is not None:
            raise UserError(f"--samples and --rounds: expected for a vertical model only, and {name!r} is none")
        return f"{name}, {batch} x {_size(shape)}", compute(net, shape, batch, **facts, **options)
    if samples is None:
        raise UserError(
            f"--samples: {name!r} is a vertical model; expected how many samples its batches are drawn from"
        )
    examples: Options = {key: facts[key] for key in ("inputs", "labels") if key in facts}
    limits = _vertical(net, samples, batch, rounds, options, examples)
    return _vertical_title(name, limits, shape), limits


def _of_spec(path: Path, twice: list[str], options: Options, allow_code: bool) -> list[tuple[str, Any]]:
    """The limits of every vertical protocol of a spec, and those of one gradient where there are others."""
    if twice:
        raise UserError(f"{', '.join(twice)}: expected without a spec, for {path} says it")
    from leakscope.audit import load_spec
    from leakscope.audit.setup import build_setup
    from leakscope.limits import limits as compute

    setup = build_setup(load_spec(path, allow_code=allow_code))
    spec, (x, y) = setup.spec, setup.batch(0)
    shape = tuple(x.shape[1:])
    results: list[tuple[str, Any]] = []
    protocols = [part.instance for part in spec.protocols]
    for protocol in protocols:
        if protocol.sends_rounds:
            facts: Options = {"inputs": x, "labels": y, "sampling": protocol.sampling}
            rounds = protocol.count_rounds(spec.batch)
            limits = _vertical(setup.model, spec.batch, protocol.batch_size, rounds, options, facts)
            results.append((_vertical_title(spec.model.name, limits, shape), limits))
    if not all(protocol.sends_rounds for protocol in protocols):
        facts = {"inputs": x, "labels": y}
        if setup.data.range_known:
            facts["value_range"] = setup.data.value_range
        limits = compute(setup.model, shape, spec.batch, **facts, **options)
        results.append((f"{spec.model.name}, {spec.batch} x {_size(shape)}", limits))
    return results


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _vertical_title(name: str, limits: Any, shape: tuple[int, ...]) -> str:
    return f"{name}, {limits.samples} x {_size(shape)}, {limits.rounds} rounds of {limits.batch}"


def _examples(
    name: str | None, path: Path | None, index: int, count: int, shape: str | None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape of an example, and ``count`` real examples with what is known of them where data is named."""
    wanted = None if shape is None else parse_shape(shape)
    if name is None:
        if wanted is None:
            raise UserError("--input: expected the shape of one example, such as 3x32x32, or --data")
        return wanted, {}
    if index < 0 or count < 1:
        raise UserError(f"--index and --batch or --samples: expected at least 0 and 1, got {index} and {count}")
    from leakscope.data import DATA, load_data

    taken = DATA[name].options() if name in DATA else ()
    # A pack of the user's own need not have splits.
    options: Options = {"limit": index + count} | ({} if name == "npz" else {"split": "test"})
    examples = load_data(name, path, **{key: value for key, value in options.items() if key in taken})
    examples = examples.subset(range(index, index + count))
    if wanted not in (None, examples.shape):
        raise UserError(f"--input: the data {name!r} has shape {_size(examples.shape)}, got {shape}")
    box = {"value_range": examples.value_range} if examples.range_known else {}
    return examples.shape, {"inputs": examples.x, "labels": examples.y, "num_classes": examples.num_classes, **box}


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
        from leakscope.cli.console import make_console, write

        write("inspection", make_console(), title=title, found=found)
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


@takes(Output, "as_json", "as_csv", "no_progress")
def plan(
    spec: Annotated[Path | None, typer.Argument(help="YAML spec of an audit; without it the default audit.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers of a cluster, each with processors of its own: for the hours.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="As if there were so many clients like the first; default: the spec's.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds for trials, about.")] = 60.0,
    allow_code: Annotated[bool, typer.Option("--allow-code", help=ALLOW_CODE)] = False,
    *,
    output: Output,
) -> None:
    """Tell what an audit will take: jobs, core-hours, memory, disk.

    Some steps of each attack are timed on the first client; nothing is written.
    """
    from leakscope.audit.estimate import is_long, size_audit
    from leakscope.audit.executors.processes import default_workers
    from leakscope.audit.sections import span
    from leakscope.cli.console import make_console, say, write
    from leakscope.cli.progress import named_progress

    checked = checked_spec(spec, {}, allow_code=allow_code)
    serial = checked.executor.name == "serial"
    here = 1 if serial else checked.workers or default_workers(checked.threads)
    if output.progress:
        say(make_console(stderr=True), f"Timing some steps of each attack, for about {seconds:.0f} s at most.")
    with named_progress(show=output.progress) as progress:
        sizing = size_audit(checked, workers=workers, clients=clients, seconds=seconds, progress=progress)
    if is_long(sizing.hours(here) * 3600, checked.budget):
        than = "" if checked.budget is None else f"That is longer than the budget of {span(checked.budget)}. "
        quick = quick_command(["audit", *([] if spec is None else [str(spec)])])
        sizing = dataclasses.replace(sizing, notes=(*sizing.notes, f"{than}For a first answer in minutes: {quick}"))
    if output.for_machines:
        from leakscope.report.export import document

        content = document("plan", _document(sizing))
        output.write(lambda: content, lambda: content["cells"])
    else:
        spans = {count: _span(sizing.hours(count)) for count in dict.fromkeys((here, workers or here))}
        write("plan", make_console(), sizing=sizing, confidence=_confidence(sizing), spans=spans)


def _document(sizing: Sizing) -> dict[str, Any]:
    names = ("clients", "jobs", "core_hours", "threads", "memory_mb", "disk_mb", "workers", "notes")
    return {
        **{name: getattr(sizing, name) for name in names},
        "hours": None if sizing.workers is None else sizing.hours(sizing.workers),
        "processor_share": sizing.share,
        "confidence": _confidence(sizing),
        "cells": [{**dataclasses.asdict(cell), "core_hours": cell.core_hours} for cell in sizing.cells],
    }


def _confidence(sizing: Sizing) -> str:
    by: defaultdict[str, float] = defaultdict(float)
    for cell in sizing.cells:
        by[cell.timed if cell.timed in ("whole", "steps", "at least", "not timed") else "alike"] += cell.core_hours
    total = sum(by.values())
    if not total:
        return "Nothing could be timed."
    words = {
        "whole": "from whole jobs",
        "steps": "from some steps of a job, without compilation",
        "alike": "taken over from a job of the same attack in another setting",
        "at least": "a lower bound, as a trial was stopped before its end",
    }
    told = [f"{by[name] / total:.0%} {text}" for name, text in words.items() if by[name] >= 0.005 * total]
    return f"Of the core-hours {', '.join(told)}."


def _span(hours: float) -> str:
    """Hours as people say them.

    >>> _span(0.001), _span(0.5), _span(30), _span(1000)
    ('4 s', '30 min', '30 h', '42 days')
    """
    for limit, factor, unit in ((1 / 60, 3600, "s"), (2, 60, "min"), (72, 1, "h")):
        if hours < limit:
            return f"{hours * factor:.{0 if hours * factor >= 10 or unit == 's' else 1}f} {unit}"
    return f"{hours / 24:.0f} days"
