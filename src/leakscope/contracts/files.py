"""An observation on disk: one safetensors file with the tensors, one JSON file beside it with the facts.

The defence, which is code, and auxiliary examples, which were not captured, are not written. Whoever reads the file
gives both again: ``dataclasses.replace(observation, defense=..., auxiliary=(x, y))``.
"""

import copy
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import BYTES, FACTS_BYTES, FLOAT, MAX_AXES, brief, expected, is_whole, refuse
from leakscope.contracts.disk import atomic_write, private_folder, read_json, read_whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import space_from_facts
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.made import Made, problems_of_made
from leakscope.contracts.observation import LocalTraining, Message, Observation
from leakscope.contracts.task import TASKS, CustomLoss, Task

#: 2: input spaces and tasks (0.5); 3: how the observation was made.
FORMAT_VERSION = 3
#: Fields of an observation that JSON holds as they are.
_PLAIN = ("model_name", "num_classes", "num_examples", "reduction", "batchnorm")
_FACTS = {*_PLAIN, "format", "inputs", "output_shape", "task", "knowledge", "channel", "training", "messages", "made"}


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
                kind=entry["kind"],
                indices=None if entry["indices"] is None else tuple(entry["indices"]),
                partial=bool(entry.get("partial", False)),
                batchnorm_statistics=tensors_below(tensors, f"message/{number}/batchnorm/") or None,
            )
            for number, entry in enumerate(facts["messages"])
        )
        training = dict(facts["training"])
        if training.get("batch_order") is not None:
            training["batch_order"] = tuple(tuple(step) for step in training["batch_order"])
        return Observation(
            model=skeleton,
            messages=messages,
            inputs=space_from_facts(facts["inputs"]),
            output_shape=tuple(facts["output_shape"]),
            # Only names of the table: a file never names code.
            task=TASKS.find(facts["task"]["name"]).target.build(facts["task"]["options"]),
            knowledge=Knowledge(**facts["knowledge"]),
            channel=None if facts["channel"] is None else Channel(**facts["channel"]),
            labels=tensors.get("labels"),
            label_counts=tensors.get("label_counts"),
            training=LocalTraining(**training),
            randomness=facts.get("randomness"),  # versions up to 0.5 did not say
            made=Made.from_facts(facts["made"]),
            **{name: facts[name] for name in _PLAIN},
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
        misfit = f"{path}: the stored weights do not fit the model given: {error}"
        raise UserError(f"{misfit}. Pass the model that was observed.") from error
    return skeleton


def read_observation_files(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
    if missing := _FACTS - set(facts):
        raise UserError(f"{beside}: missing {', '.join(sorted(missing))}")
    if facts["format"] != FORMAT_VERSION:
        raise UserError(f"{target}: format {brief(facts['format'])}, this version reads {FORMAT_VERSION}")
    refuse(f"{beside}: a fact is not as expected", _fact_problems(facts))
    return tensors, facts


def _fact_problems(facts: Mapping[str, Any]) -> list[str]:
    """What of the facts is of the wrong kind or size, before a model is built from them."""
    shape = facts["inputs"].get("shape") if isinstance(facts["inputs"], dict) else None
    problems = expected("a list of positive sizes", _sizes, **{"inputs.shape": shape})
    for name, (what, fits) in _KINDS.items():
        problems += expected(what, fits, **{name: facts[name]})
    problems += [f"made: {line}" for line in problems_of_made(facts["made"])]
    if problems:
        return problems
    numbers = math.prod(facts["inputs"]["shape"]) + math.prod(facts["output_shape"]) + facts["num_classes"]
    problem = BYTES.problem(FLOAT * numbers * (facts["num_examples"] or 1), "Is num_examples, or a shape, mistaken?")
    return [] if problem is None else [f"inputs and outputs of all examples: {problem}"]


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MAX_AXES and all(map(is_whole, value))


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "output_shape": ("a list of positive sizes", _sizes),
    **dict.fromkeys(("knowledge", "task", "training"), ("a mapping", lambda value: isinstance(value, dict))),
    "channel": ("a mapping or null", lambda value: value is None or isinstance(value, dict)),
    "messages": ("a list of mappings", lambda rows: isinstance(rows, list) and all(isinstance(r, dict) for r in rows)),
    "num_examples": ("a whole number, or null", lambda value: value is None or is_whole(value)),
    "num_classes": ("a whole number of at least 1", is_whole),
    "reduction": ("'mean' or 'sum'", lambda value: value in ("mean", "sum")),
    "batchnorm": ("'eval' or 'train'", lambda value: value in ("eval", "train")),
    "model_name": ("a name or null", lambda value: value is None or isinstance(value, str)),
}


def _of_format_1(facts: dict[str, Any]) -> dict[str, Any]:
    """Files of versions up to 0.4 knew boxes and classification only."""
    space = {"kind": "box", "shape": facts.get("input_shape"), "range": facts.get("value_range")}
    added = {"output_shape": [facts.get("num_classes")], "task": {"name": "classification", "options": {}}}
    return {**facts, **added, "format": 2, "inputs": space, "channel": None}


def tensors_below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; one ValueError whatever is wrong with it."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = read_whole(file)
    try:
        return load(content)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({error})") from error
