"""An observation on disk: one safetensors file with the tensors, one JSON file beside it with the facts.

The defence, which is code, and auxiliary examples, which were not captured, are not written. Whoever reads the file
gives both again: ``dataclasses.replace(observation, defense=..., auxiliary=(x, y))``.
"""

import copy
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import BYTES, FACTS_BYTES, FLOAT, MAX_AXES, brief, refuse
from leakscope.contracts.disk import atomic_write, private_folder, read_json, read_whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import space_from_facts
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.made import Made
from leakscope.contracts.observation import BatchNormMode, DropoutMode, LocalTraining, Message, Observation, UpdateKind
from leakscope.contracts.task import TASKS, CustomLoss, Reduction, Task

#: 2: input spaces and tasks (0.5); 3: how the observation was made.
FORMAT_VERSION = 3
#: Fields of an observation that JSON holds as they are.
_PLAIN = ("model_name", "num_classes", "num_examples", "reduction", "batchnorm", "dropout")
Sizes = Annotated[list[PositiveInt], Field(min_length=1, max_length=MAX_AXES)]


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


class SpaceFacts(_Facts, extra="allow"):
    shape: Sizes


class MessageFacts(_Facts):
    kind: UpdateKind
    indices: tuple[int, ...] | None
    partial: bool = False


class Facts(_Facts):
    """What the JSON file says, before anything is built from it."""

    inputs: SpaceFacts
    output_shape: Sizes
    num_classes: PositiveInt
    num_examples: PositiveInt | None
    task: dict[str, Any]
    knowledge: dict[str, Any]
    channel: dict[str, Any] | None
    training: LocalTraining
    messages: list[MessageFacts]
    reduction: Reduction
    batchnorm: BatchNormMode
    model_name: str | None
    made: Made | None
    dropout: DropoutMode = "eval"  # versions up to 0.13 did not say
    randomness: Literal["system", "seeded"] | None = None  # versions up to 0.5 did not say


def tensor_file(path: str | os.PathLike[str]) -> Path:
    """PATH with .safetensors at its end; "round.1" and "round.2" stay two files.

    >>> tensor_file("runs/round.1").name, tensor_file("update.safetensors").name
    ('round.1.safetensors', 'update.safetensors')
    """
    path = Path(path)
    return path if path.suffix == ".safetensors" else path.with_name(path.name + ".safetensors")


def save_observation(observation: Observation, path: str | os.PathLike[str]) -> None:
    from safetensors.torch import save

    target = tensor_file(path)
    private_folder(target.parent)
    facts = {name: getattr(observation, name) for name in _PLAIN} | {
        "format": FORMAT_VERSION,
        "made": (observation.made or Made(by="leakscope.Observation.save")).facts(),
        "randomness": observation.randomness,
        "inputs": observation.inputs.facts(),
        "output_shape": list(observation.output_shape),
        "task": _task_facts(observation.task),
        "knowledge": dataclasses.asdict(observation.knowledge),
        "channel": None if observation.channel is None else observation.channel.facts(),
        "training": dataclasses.asdict(observation.training),
        "messages": [
            {"kind": m.kind, "indices": None if m.indices is None else list(m.indices), "partial": m.partial}
            for m in observation.messages
        ],
    }
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in _named_tensors(observation)}
    atomic_write(target, save(tensors))
    atomic_write(target.with_suffix(".json"), json.dumps(facts, indent=1).encode())


def _named_tensors(observation: Observation) -> Iterator[tuple[str, Tensor]]:
    for name, value in observation.model.state_dict().items():
        yield f"model/{name}", value
    for number, message in enumerate(observation.messages):
        for name, value in message.update.items():
            yield f"message/{number}/update/{name}", value
        for name, value in (message.batchnorm_statistics or {}).items():
            yield f"message/{number}/batchnorm/{name}", value
    if observation.labels is not None:
        yield "labels", observation.labels
    if observation.label_counts is not None:
        yield "label_counts", observation.label_counts


def _task_facts(task: Task) -> dict[str, Any]:
    if isinstance(task, CustomLoss):
        raise UserError(f"task: the loss {task.name!r} is code and is not written to a file")
    options = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return {"name": TASKS.name_of(type(task)), "options": options}


def load_observation(path: str | os.PathLike[str], model: nn.Module) -> Observation:
    """Read what :func:`save_observation` wrote; the structure comes from ``model``."""
    tensors, facts = read_observation_files(path)
    skeleton = _with_weights(path, model, tensors_below(tensors, "model/"))
    try:
        messages = tuple(
            Message(
                update=tensors_below(tensors, f"message/{number}/update/"),
                **dict(entry),
                batchnorm_statistics=tensors_below(tensors, f"message/{number}/batchnorm/") or None,
            )
            for number, entry in enumerate(facts.messages)
        )
        return Observation(
            model=skeleton,
            messages=messages,
            inputs=space_from_facts(facts.inputs.model_dump()),
            output_shape=tuple(facts.output_shape),
            # Only names of the table: a file never names code.
            task=TASKS.find(facts.task["name"]).target.build(facts.task["options"]),
            knowledge=Knowledge(**facts.knowledge),
            channel=None if facts.channel is None else Channel(**facts.channel),
            labels=tensors.get("labels"),
            label_counts=tensors.get("label_counts"),
            training=facts.training,
            randomness=facts.randomness,
            made=facts.made,
            **{name: getattr(facts, name) for name in _PLAIN},
        )
    except (KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise UserError(f"{path}: a fact in the .json file is not as expected ({brief(error)})") from error


def _with_weights(path: str | os.PathLike[str], model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    skeleton = copy.deepcopy(model)
    precisions = {value.dtype for value in weights.values() if value.is_floating_point()}
    if len(precisions) == 1:
        skeleton = skeleton.to(dtype=precisions.pop())
    try:
        skeleton.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        # torch names every tensor, one a line under a title; the first is enough to see that the model is another one.
        told = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
        first = told[min(1, len(told) - 1)] if told else type(error).__name__
        more = f" (and {len(told) - 2} more)" if len(told) > 2 else ""
        misfit = f"{path}: the stored weights do not fit the model given: {first}{more}"
        raise UserError(f"{misfit}. Pass the model that was observed.") from error
    return skeleton


def read_observation_files(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Facts]:
    """Tensors and facts of a saved observation; one clear ValueError whatever is wrong with the files."""
    target = tensor_file(path)
    beside = target.with_suffix(".json")
    for file in (target, beside):
        if not file.is_file():
            raise UserError(f"{file}: no such file. An observation is a .safetensors file with a .json beside it.")
    tensors = read_tensors(target)
    content = read_whole(beside, FACTS_BYTES)
    try:
        facts = read_json(content)
    except ValueError as error:
        raise UserError(f"{beside}: not readable as JSON ({error})") from error
    if not isinstance(facts, dict):
        raise UserError(f"{beside}: expected a mapping of facts, got {type(facts).__name__}")
    if facts.get("format") == 1:
        facts = _of_format_1(facts)
    if facts.get("format") == 2:
        facts = {**facts, "format": FORMAT_VERSION, "made": None}
    if facts.get("format") != FORMAT_VERSION:
        raise UserError(f"{target}: format {brief(facts.get('format'))}, this version reads {FORMAT_VERSION}")
    where = f"{beside}: a fact is not as expected"
    try:
        read = Facts.model_validate_json(json.dumps(facts))  # as JSON, whose lists may be tuples and nothing else
    except ValidationError as error:
        refuse(where, [": ".join([".".join(map(str, one["loc"])), one["msg"]]) for one in error.errors()], most=20)
        raise
    numbers = math.prod(read.inputs.shape) + math.prod(read.output_shape) + read.num_classes
    problem = BYTES.problem(FLOAT * numbers * (read.num_examples or 1), "Is num_examples, or a shape, mistaken?")
    refuse(where, [] if problem is None else [f"inputs and outputs of all examples: {problem}"])
    return tensors, read


def _of_format_1(facts: dict[str, Any]) -> dict[str, Any]:
    """Files of versions up to 0.4 knew boxes and classification only."""
    space = {"kind": "box", "shape": facts.get("input_shape"), "range": facts.get("value_range")}
    added = {"output_shape": [facts.get("num_classes")], "task": {"name": "classification", "options": {}}}
    return {**facts, **added, "format": 2, "inputs": space, "channel": None}


def tensors_below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def dense(name: str, value: Tensor) -> Tensor:
    """Return a tensor of a file as calculations need it: dense, on this machine, floats of at least 16 bits.

    >>> dense("w", torch.eye(2).to_sparse()).layout, dense("w", torch.ones(2).to(torch.float8_e5m2)).dtype
    (torch.strided, torch.float32)
    """
    if value.is_nested or value.is_meta or value.is_quantized:
        kind = "a nested tensor" if value.is_nested else "a tensor without data" if value.is_meta else str(value.dtype)
        raise UserError(f"{name}: expected a dense tensor of numbers, got {kind}. Save it as one.")
    if value.layout != torch.strided:
        BYTES.check(name, value.numel() * value.element_size(), "Is its shape mistaken?")
        value = value.to_dense()
    return value.float() if value.is_floating_point() and value.element_size() < 2 else value


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; one ValueError whatever is wrong with it."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = read_whole(file)
    try:
        return {name: dense(name, value) for name, value in load(content).items()}
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({error})") from error
