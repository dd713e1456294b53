"""Training with checkpoints kept by content: what was trained once is read, and goes on from there.

    FOLDER/KEY/round-00005.safetensors      parameters and buffers before round 5; losses of rounds 1 to 4

KEY is a hash of all that the training depends on. No private data is in a checkpoint, but trained weights are: folders
and files are for their owner only.
"""

import copy
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from leakscope import __version__
from leakscope.contracts.defense import Defense
from leakscope.contracts.disk import atomic_write, cache_home, private_folder
from leakscope.contracts.errors import UserError
from leakscope.contracts.protocol import own_randomness
from leakscope.contracts.spool import tensor_bytes
from leakscope.contracts.task import outputs_of
from leakscope.federation.training import Client, Progress, Training, TrainingRun, check_clients, initial_copy

CHECKPOINT_FORMAT = 1
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class _Checkpoint:
    """The model before round ``number``, and the losses of the rounds before it."""

    number: int
    model: nn.Module
    losses: tuple[float, ...]


def cached_training(
    training: Training,
    model: nn.Module,
    clients: Sequence[Client],
    *,
    seed: int = 0,
    at: Sequence[int] | None = None,
    folder: str | os.PathLike[str] | None = None,
    defense: Defense | None = None,
    progress: Progress | None = None,
) -> TrainingRun:
    """Return what ``training.run`` gives, bit for bit, but do not train a round again that is in the cache.

    Checkpoints of the rounds in ``at`` are kept, and the latest round, so that an interrupted training goes on too. A
    damaged or foreign file is passed over and made anew. ``folder`` is by default $LEAKSCOPE_CACHE/training, else
    leakscope/training in the user's cache ($XDG_CACHE_HOME or ~/.cache).
    """
    wanted = training.wanted_rounds(at)
    check_clients(model, clients, seed, training.task, training.inputs)
    home = cache_folder(folder) / training_key(training, model, clients, seed=seed, defense=defense)
    try:
        if wanted[-1] > 1:
            private_folder(home)  # before the training, so that its work is not lost
    except OSError as error:
        raise OSError(
            f"{home}: checkpoints cannot be kept here ({error}). Set LEAKSCOPE_CACHE to a folder that can be written."
        ) from error
    now = _Checkpoint(1, initial_copy(model), ())
    kept, passing = {}, None
    for target in wanted:
        now = _latest(home, model, now, target)
        while now.number < target:
            after, loss = training.play_round(now.model, clients, now.number, seed=seed, defense=defense)
            now = _Checkpoint(now.number + 1, after, (*now.losses, loss))
            _write(home, now)
            if passing is not None:
                passing.unlink(missing_ok=True)
            passing = None if now.number in wanted else _file(home, now.number)
            if progress is not None:
                progress(now.number - 1, wanted[-1] - 1, loss)
        kept[target] = now.model
    return TrainingRun(MappingProxyType(kept), now.losses)


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    return Path(folder) if folder is not None else cache_home() / "training"


def training_key(
    training: Training, model: nn.Module, clients: Sequence[Client], *, seed: int = 0, defense: Defense | None = None
) -> str:
    """Hash all that the checkpoints of a training depend on; a round does not depend on how many follow."""
    for what, text in (("training", repr(training)), ("defence", repr(defense))):
        if _ADDRESS.search(text):
            raise UserError(f"expected a {what} whose repr tells all its settings, got {text}; make it a dataclass")
    digest = hashlib.sha256()
    facts = {
        "format": CHECKPOINT_FORMAT,
        "leakscope": __version__,
        "torch": torch.__version__,
        "training": repr(dataclasses.replace(training, rounds=1)),  # type: ignore[type-var]  # a dataclass
        "defense": repr(defense),
        "seed": seed,
        "clients": len(clients),
        "model": f"{type(model).__qualname__} {_ADDRESS.sub('', repr(model))}",
    }
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for name, value in _named_tensors(model).items():
        digest.update(f"\n{name} {value.requires_grad} {value.device.type} ".encode())
        _add(digest, value)
    for x, y in clients:
        _add(digest, x)
        _add(digest, y)
    _add(digest, answer_to(model, clients[0][0][:2].double()))
    return digest.hexdigest()


def answer_to(model: nn.Module, x: Tensor) -> Tensor:
    """Return what the model says to inputs: its code may have changed though its parameters have not.

    Take inputs in double precision, so that the number of threads does not show in the digits that count. Return an
    empty tensor where the model cannot read them.
    """
    with torch.no_grad(), own_randomness(0):
        try:
            outputs = outputs_of(copy.deepcopy(model).double().eval()(x))
        except (RuntimeError, ValueError, TypeError, IndexError):
            return torch.zeros(0)
    return outputs.double().round(decimals=6)


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    parameters = {f"parameter/{name}": value for name, value in model.named_parameters()}
    return parameters | {f"buffer/{name}": value for name, value in model.named_buffers()}


def _add(digest: Any, value: Tensor) -> None:
    digest.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
    digest.update(tensor_bytes(value))


def _file(home: Path, number: int) -> Path:
    return home / f"round-{number:05d}.safetensors"


def _latest(home: Path, model: nn.Module, now: _Checkpoint, target: int) -> _Checkpoint:
    found = (_read(home, number, model) for number in range(target, now.number, -1))
    return next((checkpoint for checkpoint in found if checkpoint is not None), now)


def _write(home: Path, checkpoint: _Checkpoint) -> None:
    from safetensors.torch import save

    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in _named_tensors(checkpoint.model).items()}
    facts = json.dumps({"key": home.name, "round": checkpoint.number, "losses": checkpoint.losses})
    # One entry: the format writes several in any order, and the same checkpoint shall be the same file.
    metadata = {"training": f"{_seal(facts, tensors)} {facts}"}
    atomic_write(_file(home, checkpoint.number), save(tensors, metadata))


def _read(home: Path, number: int, model: nn.Module) -> _Checkpoint | None:
    """Read the checkpoint of round ``number``; None if there is none, or if the file is not what was written there."""
    from safetensors import SafetensorError, safe_open

    path = _file(home, number)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as stored:
            seal, _, facts = (stored.metadata() or {}).get("training", "").partition(" ")
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError):
        return None
    if seal != _seal(facts, tensors):
        return None
    header, loaded = json.loads(facts), initial_copy(model)
    own = _named_tensors(loaded)
    if (header["key"], header["round"]) != (home.name, number) or set(tensors) != set(own):
        return None
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])
    return _Checkpoint(number, loaded, tuple(header["losses"]))


def _seal(facts: str, tensors: dict[str, Tensor]) -> str:
    """Make a checksum: the format has none of its own, and one changed bit in a weight is damage too."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        digest.update(f"\n{name} ".encode())
        _add(digest, tensors[name])
    return digest.hexdigest()
