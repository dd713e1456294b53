"""Record updates while somebody else's training runs; attack them later.

A recording is an observation on disk (``NAME.safetensors`` and ``NAME.json``, as ``Observation.save`` writes them, so
that ``leakscope attack NAME.safetensors`` reads it too), ``NAME.origin.json`` that says where it was taken, and perhaps
``NAME.truth.safetensors``: the client's own data, in the client's folder, which no attack is given and which is read
only to measure. Files and folders are their owner's only.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from leakscope.contracts.checks import FACTS_BYTES
from leakscope.contracts.disk import atomic_write, private_folder, read_json, read_whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.files import read_tensors, tensor_file, tensors_below
from leakscope.contracts.observation import Observation
from leakscope.contracts.printable import printable

#: Where an update can be taken, and what that place sees.
PLACES: Mapping[str, str] = {
    "raw": "what the client computed, before any mod altered it",
    "as_sent": "what left the client, after all its mods",
    "server": "what the server received from the client",
    "dp_step": "the clipped and noised gradient that a DP-SGD step follows",
}
#: Inputs and targets of the examples behind an update.
Truth = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Say where a recording was taken: the place, whose update it is, and which round or step of which run."""

    place: str
    client: str
    number: int
    run: str = "0"
    library: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise UserError(f"place: expected one of {', '.join(PLACES)}, got {self.place!r}")

    @property
    def name(self) -> str:
        """Return the file name of the recording, without an ending.

        >>> Origin(place="raw", client="7", number=2, run="1").name
        'run-1_round-0002_client-7_raw'
        """
        return f"run-{self.run}_round-{self.number:04d}_client-{self.client}_{self.place}"

    @property
    def exchange(self) -> tuple[str, int, str]:
        return self.run, self.number, self.client


@dataclass(frozen=True)
class Recording:
    """Hold one recorded update; ``path`` is that of its safetensors file."""

    path: Path
    origin: Origin

    def observation(self, model: nn.Module) -> Observation:
        """Load what the adversary saw; ``model`` gives the structure, the weights are in the file."""
        return Observation.load(self.path, model)

    def update(self) -> dict[str, Tensor]:
        return tensors_below(read_tensors(self.path), "message/0/update/")

    def truth(self) -> Truth | None:
        file = _beside(self.path, ".truth.safetensors")
        if not file.is_file():
            return None
        tensors = read_tensors(file)
        if not {"x", "y"} <= set(tensors):
            raise UserError(f"{file}: expected the tensors x and y, got {', '.join(sorted(tensors)) or 'none'}")
        return tensors["x"], tensors["y"]


#: Folders of which this process has said that it records there.
_TOLD: set[Path] = set()


def _tell(folder: Path) -> None:
    if (place := folder.resolve()) not in _TOLD:
        _TOLD.add(place)
        then = f"when the run is over: leakscope report {folder} --model package.module:factory"
        print(printable(f"leakscope records updates in {folder}; {then}"), file=sys.stderr)


def save_recording(folder: Path, observation: Observation, origin: Origin, truth: Truth | None = None) -> Recording:
    """Write a recording; the origin comes last, so that what has one is whole."""
    private_folder(folder)
    _tell(folder)
    path = tensor_file(folder / origin.name)
    observation.save(path)
    if truth is not None:
        x, y = (part.detach().cpu().contiguous().clone() for part in truth)
        atomic_write(_beside(path, ".truth.safetensors"), save({"x": x, "y": y}))
    atomic_write(_beside(path, ".origin.json"), json.dumps(dataclasses.asdict(origin), indent=1).encode())
    return Recording(path, origin)


def recordings(folder: str | Path) -> list[Recording]:
    """List all recordings in a folder, by run, round and client."""
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{root}: expected a folder of recordings, got none")
    found = [_read(file) for file in sorted(root.glob("*.origin.json"))]
    return sorted(found, key=lambda one: (*one.origin.exchange, one.origin.place))


def altered_on_the_way(client: str | Path, server: str | Path) -> list[str]:
    """List updates that differ in any bit between "as_sent" and the server; none if "as_sent" was the outermost."""
    sent = {one.origin.exchange: one for one in recordings(client) if one.origin.place == "as_sent"}
    received = {one.origin.exchange: one for one in recordings(server) if one.origin.place == "server"}
    shared = sorted(set(sent) & set(received))
    if not shared:
        raise UserError(f"nothing to compare: {len(sent)} updates as sent, {len(received)} received, none in both")
    lines = []
    for exchange in shared:
        ours, theirs = sent[exchange].update(), received[exchange].update()
        both = ours.keys() & theirs.keys()
        same = {n for n in both if ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n])}
        differing = [n for n in ours if n not in same]
        differing += [n for n in theirs if n not in ours]
        if differing:
            run, number, who = exchange
            lines.append(f"run {run}, round {number}, client {who}: {', '.join(differing)} differ from what was sent")
    return lines


def _read(file: Path) -> Recording:
    try:
        facts: Any = read_json(read_whole(file, FACTS_BYTES))
        origin = Origin(**{**facts, "notes": tuple(facts["notes"])})
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{file}: not the origin of a recording ({error})") from error
    return Recording(file.with_name(file.name.removesuffix(".origin.json") + ".safetensors"), origin)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name.removesuffix(".safetensors") + ending)
