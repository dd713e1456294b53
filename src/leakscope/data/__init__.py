"""Private examples: an embedded default, and readers of the standard files of public data sets.

>>> tiles = load_data("tiles")
>>> tiles.shape, tiles.num_classes, tiles.private
((3, 32, 32), 9, False)
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from leakscope.contracts.errors import UserError
from leakscope.contracts.registry import Entry, Registry, import_object
from leakscope.data.examples import (
    READ_AT_MOST,
    Examples,
    from_object,
    from_tensors,
    split_by_group,
    split_dirichlet,
    split_iid,
)
from leakscope.data.folder import load_folder
from leakscope.data.npz import load_npz
from leakscope.data.standard import load_cifar10, load_cifar100, load_emnist, load_mnist, load_tiles


@dataclass(frozen=True, kw_only=True)
class DataEntry(Entry):
    """One row of the table. ``needs_path``: files are needed, from ``path`` or from LEAKSCOPE_DATA."""

    shape: tuple[int, ...] | None
    needs_path: bool

    def options(self) -> tuple[str, ...]:
        """Names of the options beside the path.

        >>> DATA["mnist"].options()
        ('split', 'limit')
        """
        fixed = self.target.keywords if isinstance(self.target, partial) else {}
        hidden = {"path", "name", "file_name", *fixed}
        return tuple(name for name in inspect.signature(self.target).parameters if name not in hidden)


def _entry(
    name: str, summary: str, shape: tuple[int, ...] | None, needs_path: bool, loader: Callable[..., Examples]
) -> DataEntry:
    return DataEntry(name, loader, summary, shape=shape, needs_path=needs_path)


def _pack(name: str, summary: str, file_name: str, shape: tuple[int, ...], **fixed: Any) -> DataEntry:
    loader = partial(load_npz, name=name, file_name=file_name, private=False, **fixed)
    return _entry(name, f"{summary}, {file_name}", shape, True, loader)


_T1 = {"x_key": "x_t1", "y_key": "y_t1", "names_key": "t1_names"}
_UNLABELLED = {"y_key": None, "names_key": "names"}
_ENTRIES = (
    _entry("tiles", "embedded: tiles of nine openly licensed photos (default)", (3, 32, 32), False, load_tiles),
    _entry("cifar10", "CIFAR-10, binary or Python version", (3, 32, 32), True, load_cifar10),
    _entry("cifar100", "CIFAR-100, binary or Python version", (3, 32, 32), True, load_cifar100),
    _entry("mnist", "MNIST, idx files", (1, 28, 28), True, load_mnist),
    _entry("emnist", "EMNIST, idx files", (1, 28, 28), True, load_emnist),
    _entry("npz", "your own .npz pack: x, y, optional writer, scale, split", None, True, load_npz),
    _entry("folder", "your own pictures, one subfolder a class", None, True, load_folder),
    _pack("femnist", "FEMNIST of LEAF", "femnist.npz", (1, 28, 28)),
    _pack("yale", "Yale faces", "yale32.npz", (1, 32, 32)),
    _pack("orl", "ORL faces", "orl32.npz", (1, 32, 32)),
    _pack("ecg", "MIT-BIH heart beats", "ecg_mitbih.npz", (1, 256)),
    _pack("bloodcells", "blood cells", "bloodcells64.npz", (3, 64, 64)),
    _pack("brain", "slices of a T1 brain template", "brain64.npz", (1, 64, 64), **_T1),
    _pack("photos", "open photos, each its own class", "photos224_open.npz", (3, 224, 224), **_UNLABELLED),
)
DATA: Registry[DataEntry] = Registry("data", _ENTRIES)


def load_data(name: str, path: str | Path | None = None, **options: Any) -> Examples:
    """Read the data set called ``name`` from ``path``, or from the folder LEAKSCOPE_DATA if there is no path.

    ``options`` are the reader's own, such as ``split`` and ``limit``; ``DATA[name].options()`` lists them. A name
    ``package.module:function`` is the user's own reader, which returns Examples, a pair (x, y) or a torch dataset.
    """
    if isinstance(name, str) and ":" in name:
        return _own(name, {**({} if path is None else {"path": path}), **options})
    entry = DATA.find(name)
    if unknown := sorted(set(options) - set(entry.options())):
        raise UserError(f"data {name!r} has no option {', '.join(unknown)}; it takes {', '.join(entry.options())}")
    examples: Examples = entry.target(path, **options)
    return examples


def _own(name: str, options: dict[str, Any]) -> Examples:
    reader = import_object("data", name)
    try:
        examples = reader(**options)
    except Exception as error:
        raise UserError(f"data {name!r}: calling it raised {type(error).__name__}: {error}") from error
    try:
        return from_object(examples, name=name)
    except ValueError as error:
        raise UserError(f"data {name!r}: {error}") from error
