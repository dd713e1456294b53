"""Tensors of hundreds of messages, kept in an unnamed temporary file (``TMPDIR``) and read one at a time."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError

#: Where a tensor begins in the file, and a tensor of its shape and type without content.
Place = tuple[int, Tensor]


def tensor_bytes(value: Tensor) -> memoryview:
    """Return the content of a tensor, the same on every device and for every memory layout."""
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


class Spool:
    """A file of tensors without a name: nobody else can open it, and it is gone with the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="leakscope-")  # noqa: SIM115 - it closes when nobody reads it
        self._lock = threading.Lock()

    def add(self, tensors: Mapping[str, Tensor]) -> StoredTensors:
        places: dict[str, Place] = {}
        with self._lock:
            for name, value in tensors.items():
                places[name] = self._file.seek(0, os.SEEK_END), value.detach().contiguous().to("meta")
                self._file.write(tensor_bytes(value))
        devices = {value.device for value in tensors.values()}
        return StoredTensors(self, places, devices.pop() if len(devices) == 1 else None)

    def read(self, place: Place) -> Tensor:
        start, like = place
        content = bytearray(like.nbytes)
        with self._lock:
            self._file.seek(start)
            self._file.readinto(content)
        flat = torch.frombuffer(content, dtype=like.dtype) if content else torch.empty(0, dtype=like.dtype)
        return flat.reshape(like.shape)


class StoredTensors(Mapping[str, Tensor]):
    """Named tensors of a :class:`Spool`, each read anew whenever it is asked for, on a device and in a precision.

    >>> stored = Spool().add({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    >>> list(stored), stored["weight"].sum().item(), stored.layout()["bias"].shape
    (['weight', 'bias'], 6.0, torch.Size([2]))
    """

    def __init__(
        self, spool: Spool, places: Mapping[str, Place], device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        self._spool, self._places = spool, dict(places)
        self._device, self._dtype = device, dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._spool.read(self._places[name]).to(device=self._device, dtype=self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __deepcopy__(self, _memo: dict[int, Any]) -> StoredTensors:
        return self  # what is on disk does not change

    def layout(self) -> dict[str, Tensor]:
        """Tensors without content, for their shapes and precision; nothing is read."""
        return {name: like.to(dtype=self._dtype) for name, (_, like) in self._places.items()}

    def in_order(self, names: Sequence[str]) -> StoredTensors:
        return StoredTensors(self._spool, {name: self._places[name] for name in names}, self._device, self._dtype)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> StoredTensors:
        device = self._device if device is None else device
        return StoredTensors(self._spool, self._places, device, dtype or self._dtype)


def layout_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return tensors.layout() if isinstance(tensors, StoredTensors) else tensors


def frozen_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A copy that nobody can change; what is on disk stays there."""
    if isinstance(tensors, StoredTensors):
        return tensors
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{name}: expected a tensor, got {type(value).__name__}")
    return MappingProxyType({name: value.detach().clone() for name, value in tensors.items()})
