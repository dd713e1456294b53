"""Hostile inputs by the thousand: every reader, file, option and store, mutated from good ones; seeds are kept.

    python tests/hostile_cases.py --cases 3000 --seed 0

A case is a kind and a seed, run in this process. It fails if it ends in anything but a result or one clear error (exit
code 3, a traceback, an exception that no reader promises), takes more than 20 seconds, needs more than 2 GB, or if any
code of the input is run. ``--only KIND:SEED`` runs one case again and shows what it says.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import pickle
import random
import resource
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import save

from leakscope.audit import SpecError
from leakscope.audit.plan import make_plan
from leakscope.audit.setup import build_setup, rehearse
from leakscope.audit.spec import load_spec
from leakscope.cli import main
from leakscope.contracts.knowledge import Knowledge
from leakscope.data import load_data
from leakscope.federation import FedAvg, FedSGD
from leakscope.models import build_model
from leakscope.results.store import seal

SECONDS, MEGABYTES = 20, 2000
ALLOWED = {0, 1, 2, 4, 5}
_RAN: list[str] = []
_watching = False


class Hang(BaseException):
    """A case took too long."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Told by Python itself of whatever a program that came with the input would have to do."""
    if _watching and event in (
        "os.system",
        "subprocess.Popen",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "socket.connect",
    ):
        _RAN.append(f"{event} {arguments!r}"[:200])


sys.addaudithook(_watch)


# -- mutations --


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, added or left out; most near the beginning, where headers steer a reader."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        if not changed:
            break
        place = chance.randrange(min(len(changed), chance.choice((64, 400, len(changed)))))
        match chance.randrange(8):
            case 0:
                del changed[place:]
            case 1:
                changed[place:place] = chance.randbytes(chance.randrange(1, 6))
            case 2:
                del changed[place : place + chance.randrange(1, 9)]
            case _:
                changed[place] = chance.randrange(256)
    return bytes(changed)


class Payload:
    """Runs something as soon as it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        import os

        return os.system, ("true",)


def _deep(levels: int) -> Any:
    value: Any = 1
    for number in range(levels):
        value = [value] if number % 2 else {"a": value}
    return value


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 1.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), 10**6, 10**9, 10**12),
    *(2**31, 2**63 - 1, -(2**63), 10**30, 10**400, "", " ", "x", "0", "-1", "1e999", "nan", "none", "../../etc/passwd"),
    *("/dev/zero", "/dev/stdin", "/etc", "\x00", "\ud800", "ünïcödé", "a" * 5000, "<script>", "os:system", "os:getcwd"),
    *("subprocess:run", "builtins:exec", "leakscope.cli:main", "json:loads", ":", "a:", ":b", "a:b:c", "fedsgd", "dlg"),
    *([], {}, [[]], [{}], [1, 2], ["x", "x"], {"name": None}, {"name": "mlp", "options": None}, {"x": {"y": []}}),
    *([0] * 3000, {str(n): n for n in range(500)}, [10**9] * 3, [-1], [1.5], {"": ""}, {"name": "os:system"}),
    *(
        {"dlg": {"iterations": 10**12}},
        {"fedavg": {"epochs": 10**9}},
        {"gradient-noise": {"sigma": -1}},
        "cuda",
        "meta",
    ),
)


def replaced(value: Any, chance: random.Random) -> Any:
    """A structure with something in it put in place of something else, added or left out."""
    changed = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = list(_places(changed))
        holder, key = chance.choice(places)
        action = chance.randrange(10)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[chance.choice(("x", "name", "options", str(key) + "s", ""))] = chance.choice(VALUES)
        elif action == 2:
            holder[key] = _deep(chance.choice((5, 60, 3000)))
        elif action == 3:
            other_holder, other = chance.choice(places)
            with contextlib.suppress(KeyError, IndexError, RecursionError):
                holder[key] = copy.deepcopy(other_holder[other])
        else:
            holder[key] = copy.deepcopy(chance.choice(VALUES))
        if not changed:
            break
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    todo = [value]
    while todo:
        one = todo.pop()
        for key in list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ():
            yield one, key
            if isinstance(one[key], dict | list):
                todo.append(one[key])


def as_json(value: Any) -> str:
    """JSON of whatever depth; what recursion cannot write is written by hand."""
    try:
        return json.dumps(value)
    except (RecursionError, ValueError):
        return "[" * 4000 + "]" * 4000


def as_yaml(value: Any) -> str:
    try:
        return yaml.safe_dump(value, allow_unicode=True)
    except (RecursionError, yaml.YAMLError, ValueError, UnicodeError):
        return "a: " + "[" * 3000


# -- what is run --


def command(*words: str) -> None:
    """A command line as a shell would start it; AssertionError if it ends as no command should."""
    before, sys.argv = sys.argv, ["leakscope", *words]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    said = err.getvalue()
    if code not in ALLOWED or "Traceback (most recent call last)" in said:
        raise AssertionError(f"exit {code}: {said[-1500:]}")
    if code == 4 and not said.strip():
        raise AssertionError("exit 4 without a word")


def planned(path: Path) -> None:
    """All of an audit up to its first job."""
    setup = build_setup(load_spec(path))
    rehearse(setup)
    make_plan(setup)


SPECS: tuple[dict[str, Any], ...] = (
    {"model": "logistic", "data": "tiles", "examples": 2, "attacks": ["linear-layer"]},
    {
        "model": {"name": "mlp", "options": {"hidden": [4], "activation": "relu"}, "seed": 1},
        "data": {"name": "tiles", "limit": 8, "mean": [0.5], "std": [0.25]},
        "task": "classification",
        "examples": 4,
        "batch": 2,
        "protocols": [{"fedavg": {"epochs": 1, "batch_size": 1, "lr": 0.01}}, "fedsgd"],
        "defenses": ["none", {"gradient-noise": {"sigma": 0.1}}, {"gradient-pruning": {"fraction": 0.5}}],
        "attacks": [{"inverting-gradients": {"iterations": 3, "restarts": 1}}, {"dlg": {"iterations": 2}}],
        "knowledge": {"labels": "yes", "num_examples": True},
        "seeds": [0, 1],
        "policy": {"max_psnr": 20.0, "min_lift": 3.0},
        "pictures": False,
        "controls": True,
        "findings": False,
        "device": "cpu",
        "dtype": "float64",
        "threads": 1,
        "executor": "serial",
        "workers": 1,
    },
    {
        "model": "vertical-mlp",
        "data": {"name": "tiles", "limit": 6},
        "examples": 4,
        "batch": 4,
        "protocols": [{"vertical": {"batch_size": 2, "rounds": 3}}],
        "attacks": [{"cafe": {"iterations": 2}}],
        "seeds": 1,
    },
    {
        "model": "logistic",
        "data": {"name": "tiles", "limit": 12},
        "training": {"rounds": 1, "split": "iid", "clients": 2, "epochs": 1, "batch_size": 4, "lr": 0.1, "seed": 0},
        "defenses": {"dp-sgd": {"epsilon": 2.0, "clip": 1.0, "steps": 3}},
        "attacks": "linear-layer",
    },
)


def spec_case(chance: random.Random, folder: Path) -> None:
    path = folder / "spec.yaml"
    base = chance.choice(SPECS)
    if chance.random() < 0.4:
        path.write_bytes(mutated(as_yaml(base).encode(), chance))
    else:
        path.write_text(as_yaml(replaced(base, chance)), encoding="utf-8", errors="surrogatepass")
    planned(path)


_SPEC_TEXTS = (
    "a0: &a0 [x, x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
    "model: !!python/object/apply:os.system [true]",
    "model: !!python/name:os.system",
    "model: &m [*m]",
    "? {model: x}\n: y",
    "model: logistic\nmodel: mlp",
    "{" * 2000,
    "- " * 2000,
    "model: !!binary gIGC",
    "model: 2001-12-14t21:59:43.10-05:00",
    "examples: !!int '0b1'",
    "!!set {model, data}",
    "<<: {model: logistic, data: tiles}",
    "%TAG ! tag:yaml.org,2002:\n---\nmodel: !str x",
    "model: |\n" + " x\n" * 30000,
    "\ufeffmodel: logistic",
    "model: 'logistic\n",
    "1: 2\ntrue: 3\nnull: 4",
)


def yaml_case(chance: random.Random, folder: Path) -> None:
    path = folder / "spec.yaml"
    text = chance.choice(_SPEC_TEXTS)
    path.write_bytes(mutated(text.encode(), chance) if chance.random() < 0.7 else text.encode())
    # Some of these texts are good specs; what they leave open is kept small.
    small = ("--examples", "1", "--attack", "linear-layer", "--no-findings", "--serial")
    command("audit", str(path), "--out", str(folder / "out"), *small)


_OPTIONS = {
    "audit": (
        *("--examples", "--batch", "--seeds", "--threads", "--device", "--knowledge", "--max-psnr", "--protocol"),
        *("--defense", "--task", "--data", "--data-path", "--weights", "--workers", "--model", "--labels"),
    ),
    "limits": (
        *("--batch", "--samples", "--rounds", "--classes", "--data", "--index", "--noise", "--clip", "--prune"),
        *("--dropout", "--seed", "--input", "--model", "--noise-scale", "--prune-scope"),
    ),
}
_BASES = {
    "audit": (
        *("--model", "logistic", "--data", "tiles", "--examples", "2", "--attack", "linear-layer", "--serial"),
        *("--no-findings", "--no-progress"),
    ),
    "limits": ("--model", "logistic", "--input", "3x4x4", "--classes", "3", "--probes", "2"),
}
_WORDS = (
    *("0", "-1", "1", "2", "1.5", "nan", "inf", "-inf", "1e308", "1e-308", "10" * 9, "9" * 5000, str(2**63), "", " "),
    *(
        "x",
        "--",
        "-",
        "=",
        ":",
        "a:b",
        "fedavg:",
        "fedavg:epochs=",
        "fedavg:epochs=1000000000",
        "fedavg:=1",
        "dlg:x=[[[",
    ),
    *("fedavg:epochs=!!python/name:os.system", "gradient-noise:sigma=nan", "gradient-noise:sigma={a: &a [*a]}"),
    *("os:system", "subprocess:run", "json:loads", "mlp", "convnet", "resnet18", "cuda", "cuda:999", "meta", "cpu:99"),
    *(
        "/dev/zero",
        "/etc/passwd",
        "/nowhere",
        "\x00"[:0] + "a" * 5000,
        "../..",
        "1x1",
        "0x0",
        "x".join(["1"] * 99),
        "3x9x9",
    ),
    *(
        "1000000x1000000",
        "yes",
        "no",
        "counts",
        "full",
        "eavesdropper",
        "vertical",
        "fedsgd,x",
        "fedsgd:a=1,b=2",
        "\udce9",
    ),
    *("regression", "per-position", "fake-gradients:candidates=1000000000", "dp-sgd:epsilon=1e-300", "npz", "mnist"),
)


def option_case(chance: random.Random, folder: Path) -> None:
    if chance.random() < 0.25:
        _other_command(chance, folder)
        return
    name = chance.choice(("audit", "audit", "limits"))
    words = list(_BASES[name])
    for _ in range(chance.choice((1, 1, 2, 3))):
        words += [chance.choice(_OPTIONS[name]), chance.choice(_WORDS)]
    if name == "audit":
        words += ["--out", str(folder / "out")]
    command(name, *words)


def _other_command(chance: random.Random, folder: Path) -> None:
    words = [
        chance.choice(("list", "report", "compare", "attack", "reproduce", "audit", "limits", "nothing", "--version"))
    ]
    words += [chance.choice((*_WORDS, "attacks", "models", "data")) for _ in range(chance.randrange(4))]
    if words[0] == "audit":  # without a word of its own it would run the default audit
        words.append("/nowhere.yaml")
    command(*words)


# -- files of data --


def _npz() -> bytes:
    content = io.BytesIO()
    names = np.array(["a", "b"])
    x = np.zeros((2, 3, 3), np.uint8)
    np.savez(content, x=x, y=np.array([0, 1]), class_names=names, scale=np.float32(1), split=np.array([0, 1]))
    return content.getvalue()


def _picture(kind: str) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


IDX = bytes((0, 0, 8, 3)) + struct.pack(">3I", 3, 4, 4) + bytes(48)
IDX_LABELS = bytes((0, 0, 8, 1)) + struct.pack(">I", 3) + bytes((0, 1, 2))
CIFAR = {b"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}
CIFAR100 = {b"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1, 2], "coarse_labels": [0, 1]}
#: Reader, name of the file, content.
FILES: dict[str, tuple[str, str, bytes]] = {
    **{f"cifar10 protocol {n}": ("cifar10", "batch", pickle.dumps(CIFAR, n)) for n in (0, 2, 4, 5)},
    "cifar100 protocol 2": ("cifar100", "train", pickle.dumps(CIFAR100, 2)),
    "cifar10 binary": ("cifar10", "batch.bin", bytes((1,)) + bytes(3072)),
    "idx": ("mnist", "some-images-idx3-ubyte", IDX),
    "idx gz": ("mnist", "some-images-idx3-ubyte.gz", gzip.compress(IDX, mtime=0)),
    "emnist": ("emnist", "some-images-idx3-ubyte", IDX),
    "npz": ("npz", "pack.npz", _npz()),
    **{
        f"folder {kind}": ("folder", f"a/x.{end}", _picture(kind))
        for kind, end in (("PNG", "png"), ("JPEG", "jpg"), ("GIF", "gif"), ("TIFF", "tiff"), ("WEBP", "webp"))
    },
    **{f"folder {kind}": ("folder", f"a/x.{kind.lower()}", _picture(kind)) for kind in ("BMP", "PPM")},
}


def write_data(folder: Path, what: str, content: bytes) -> tuple[str, Path, dict[str, Any]]:
    """The file of a reader with this content; the reader, its path and its options."""
    reader, name, _ = FILES[what]
    (folder / "some-labels-idx1-ubyte").write_bytes(IDX_LABELS)
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    return (reader, folder, {"resize": 8}) if reader == "folder" else (reader, file, {})


def data_case(chance: random.Random, folder: Path) -> None:
    what = chance.choice(sorted(FILES))
    content = FILES[what][2]
    if chance.random() < 0.15:
        content = _bomb(FILES[what][0], what, chance) or content
    elif what == "npz" and chance.random() < 0.5:
        content = _hostile_npz(chance)
    else:
        content = mutated(content, chance)
    reader, path, options = write_data(folder, what, content)
    if chance.random() < 0.3:
        options = {**options, "limit": chance.choice((1, 2, 10**9, 0, -1, 1.5, "x", None, True))}
    if chance.random() < 0.1:
        options = {
            **options,
            chance.choice(("split", "resize", "mode", "layout", "x_key", "y_key")): chance.choice(VALUES),
        }
    load_data(reader, path, **options)


def _bomb(reader: str, what: str, chance: random.Random) -> bytes | None:
    size = chance.choice((10**5, 10**6, 2**31, 2**32 - 1))
    if reader in ("mnist", "emnist"):
        content = bytes((0, 0, 8, 3)) + struct.pack(">3I", size % 2**32, 4000, 4000) + bytes(10**6)
        return gzip.compress(content, 1) if "gz" in what else content
    if reader == "folder":
        header = struct.pack(
            ">IIBBBBB", size % 2**31, chance.choice((1, 10**5)), 8, chance.choice((0, 2, 3, 6)), 0, 0, 0
        )
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(10**6))), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks
        )
    if reader.startswith("cifar") and "protocol" in what:
        nest = b"]q\x00" + b"]h\x00ah\x00aq\x00" * chance.randrange(20, 90)
        ends = (
            b"}U\x04datah\x00s.",
            b"cnumpy\ndtype\nh\x00\x85R.",
            b"}h\x00\x85K\x01s.",
            b"(h\x00h\x00tq\x01h\x01\x86.",
        )
        return chance.choice((pickle.dumps({"data": Payload()}, 2), b"\x80\x02" + nest + chance.choice(ends)))
    return None


def _hostile_npz(chance: random.Random) -> bytes:
    """Headers that claim what is not there, members that grow a thousandfold, objects."""
    shapes = ((2, 3, 3), (10**6, 10**6), (10**15, 0), (2,), (), (-1, 3), (2**62, 4), (2, 3) * 20, (2, 40_000_000))
    shape = chance.choice(shapes)
    kinds = ("|u1", "<f4", "|O", "|V8", "<U4", ">f8", "<i2", "|b1", "<c8", "<M8[s]", "i4,f4", "<f2", "nonsense")
    text = repr({"descr": chance.choice(kinds), "fortran_order": chance.random() < 0.2, "shape": shape}).encode()
    text = text.ljust(chance.choice((118, 118, 118, 20_000, 3_000_000))) + b"\n"
    version, pack = (2, "<I") if len(text) > 60_000 else (1, "<H")
    body = bytes(chance.choice((0, 18, 80, 10**6, 80_000_000)))
    member = b"\x93NUMPY" + bytes((version, 0)) + struct.pack(pack, len(text)) + text + body
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        names = chance.choice((("x", "y"), ("x",), ("y", "x", "scale"), ("x", "y", "class_names"), ("x", "y", "split")))
        for name in names:
            archive.writestr(f"{name}.npy", member if name == names[0] or chance.random() < 0.2 else _npy(name))
    return content.getvalue()


def _npy(name: str) -> bytes:
    content = io.BytesIO()
    values = {"x": np.zeros((2, 3, 3), np.uint8), "y": np.array([0, 1]), "scale": np.float32(2)}
    np.save(content, values.get(name, np.array(["a", "b"]) if name == "class_names" else np.array([0, 1])))
    return content.getvalue()


# -- observations and weights --


@cache
def _observations() -> list[tuple[bytes, dict[str, Any]]]:
    tiles = load_data("tiles", limit=2)
    x, y = tiles.x[:, :, ::8, ::8], tiles.y
    made = []
    for protocol, knowledge in ((FedSGD(), Knowledge.full), (FedAvg(epochs=2, batch_size=1), Knowledge.full)):
        net = build_model("mlp", input_shape=(3, 4, 4), num_classes=9, hidden=(5,))
        seen = protocol.observe(net, x, y, None, knowledge, torch.Generator(), inputs=None, model_name="mlp")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "update.safetensors")
            seen.save(path)
            made.append((path.read_bytes(), json.loads(path.with_suffix(".json").read_text())))
    return made


_ATTACKS = ("linear-layer", "dlg:iterations=2", "inverting-gradients:iterations=2", "idlg:iterations=2", "rgap", "cafe")
_ATTACKS = (*_ATTACKS, "sme:iterations=2", "dlfa:iterations=2", "gauss-newton:steps=1", "hybrid:iterations=2", "x:y=1")


def observation_case(chance: random.Random, folder: Path) -> None:
    tensors, facts = chance.choice(_observations())
    path, choice = folder / "update.safetensors", chance.random()
    path.write_bytes(mutated(tensors, chance) if choice < 0.3 else tensors)
    text = as_json(replaced(facts, chance)) if 0.3 <= choice < 0.8 else json.dumps(facts)
    content = text.encode(errors="surrogatepass")
    path.with_suffix(".json").write_bytes(mutated(content, chance) if choice >= 0.8 else content)
    model = ("--model", "mlp") if chance.random() < 0.2 else ()
    command("attack", str(path), "--attack", chance.choice(_ATTACKS), "--out", str(folder / "out"), *model)


@cache
def _weights() -> dict[str, bytes]:
    net = build_model("logistic", input_shape=(3, 32, 32), num_classes=9)
    plain = io.BytesIO()
    torch.save(net.state_dict(), plain)
    armed = io.BytesIO()
    torch.save({"fc.weight": Payload()}, armed)
    return {
        "w.safetensors": save(net.state_dict()),
        "w.pt": plain.getvalue(),
        "armed.pt": armed.getvalue(),
        "armed.pth": pickle.dumps(Payload()),
        "odd.safetensors": save({"fc.weight": torch.zeros(3, 2, dtype=torch.int8), "more": torch.zeros(0)}),
    }


def weights_case(chance: random.Random, folder: Path) -> None:
    name, content = chance.choice(sorted(_weights().items()))
    (folder / name).write_bytes(mutated(content, chance) if chance.random() < 0.8 else content)
    key = chance.choice(("model", "model", "model", "lpips"))
    weights = str(folder / name)
    spec: dict[str, Any] = {"model": "logistic", "data": "tiles", "examples": 1, "attacks": "linear-layer"}
    if key == "lpips":
        spec["lpips"] = weights
    else:
        spec["model"] = {"name": "logistic", "weights": weights}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    planned(folder / "spec.yaml")


# -- stores --


@cache
def _store() -> Path:
    """A small audit of private pictures, which lasts as long as this process."""
    folder = Path(_FOLDER.name)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4), dtype=np.uint8)
    np.savez(folder / "pack.npz", x=pixels, y=np.array([0, 1]))
    command(*_audit(folder / "a"))
    return folder / "a"


def _audit(out: Path) -> tuple[str, ...]:
    words = ("--model", "logistic", "--data", "npz", "--data-path", str(Path(_FOLDER.name, "pack.npz")), "--pictures")
    defenses = ("--defense", "none", "--defense", "gradient-noise:sigma=0.1")
    return ("audit", *words, "--attack", "linear-layer", *defenses, "--serial", "--out", str(out))


_FOLDER = tempfile.TemporaryDirectory(prefix="leakscope-hostile-")
_COLUMNS = {
    "meta": ("value",),
    "jobs": ("key", "position", "status", "job", "result", "error", "seconds", "finished", "files", "checksum"),
    "findings": ("key", "position", "kind", "status", "subject", "content", "error", "seconds", "finished", "checksum"),
}


def store_case(chance: random.Random, folder: Path) -> None:
    directory = folder / "a"
    shutil.copytree(_store(), directory)
    database = directory / "audit.sqlite"
    match chance.randrange(4):
        case 0:
            database.write_bytes(mutated(database.read_bytes(), chance))
        case 1:
            files = sorted((directory / "artifacts").iterdir())
            file = chance.choice(files)
            content = mutated(file.read_bytes(), chance)
            file.unlink()
            if chance.random() < 0.7:
                file.write_bytes(content)
            elif chance.random() < 0.3:
                file.mkdir()
        case _:
            _change_row(database, chance)
    report, compare = ("report", str(directory)), ("compare", str(directory), str(_store()))
    command(*chance.choice((report, compare, _audit(directory))))


def _change_row(database: Path, chance: random.Random) -> None:
    """One value of one row, often with a checksum that fits it: it tells damage, not lies."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        table = chance.choice(("meta", "jobs", "jobs", "findings"))
        names = ("key", *_COLUMNS[table]) if table == "meta" else _COLUMNS[table]
        rows = connection.execute(f"SELECT rowid, {', '.join(names)} FROM {table}").fetchall()
        if not rows:
            return
        row = list(chance.choice(rows))
        place = 1 + names.index(chance.choice(_COLUMNS[table]))
        old = row[place]
        if isinstance(old, str) and old[:1] in "{[" and chance.random() < 0.6:
            row[place] = as_json(replaced({"x": json.loads(old)}, chance).get("x"))
        elif isinstance(old, str) and chance.random() < 0.5:
            row[place] = mutated(old.encode(), chance).decode("utf-8", "replace")
        else:
            value = chance.choice(VALUES)
            fits = value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
            row[place] = value if fits else chance.choice((as_json(value), b"\x00\xff", str(value)[:4000]))
        if isinstance(row[place], str):
            row[place] = row[place].encode("utf-8", "replace").decode()
        if table != "meta" and names[place - 1] != "checksum" and chance.random() < 0.7:
            row[-1] = seal([value for value, name in zip(row[1:-1], names, strict=False) if name != "position"])
        changes = ", ".join(f"{name} = ?" for name in names)
        with contextlib.suppress(sqlite3.IntegrityError):
            connection.execute(f"UPDATE {table} SET {changes} WHERE rowid = ?", (*row[1:], row[0]))
        connection.commit()


#: Kinds of cases, with their share of all.
KINDS: dict[str, tuple[Callable[[random.Random, Path], None], int]] = {
    "spec": (spec_case, 6),
    "yaml": (yaml_case, 2),
    "option": (option_case, 4),
    "data": (data_case, 8),
    "observation": (observation_case, 5),
    "weights": (weights_case, 2),
    "store": (store_case, 5),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a case; ``problem`` is empty where it ended as it should."""

    kind: str
    seed: int
    seconds: float
    problem: str = ""


def run_case(kind: str, seed: int) -> Outcome:
    """One case, watched."""
    global _watching
    chance = random.Random(f"{kind}:{seed}")
    folder = Path(tempfile.mkdtemp(prefix="leakscope-case-"))
    for prepare in (_store, _observations, _weights):
        prepare()  # once, and not on the first case's time
    _RAN.clear()
    problem = ""
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    started = time.perf_counter()
    _watching = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            KINDS[kind][0](chance, folder)
    except (ValueError, SpecError) as error:
        # What a reader of files or a spec promises; a library's own error, passed on, names no file.
        if len(str(error)) > 20_000 or not _told_by_us(error):
            problem = _trace(error)
    except Hang:
        problem = f"more than {SECONDS} s"
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        problem = _trace(error)
    finally:
        _watching = False
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        shutil.rmtree(folder, ignore_errors=True)
    if _RAN:
        problem = f"code was run: {_RAN[0]}"
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if not problem and megabytes > MEGABYTES:
        problem = f"{megabytes:.0f} MB"
    return Outcome(kind, seed, time.perf_counter() - started, problem)


def _told_by_us(error: Exception) -> bool:
    """Whether a file of leakscope raised it, and not a library that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return "leakscope" in frames[-1].filename


def _trace(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    places = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-4:]))
    return f"{type(error).__name__}: {str(error)[-1500:]} [{places}]"


def _too_long(_number: int, _frame: Any) -> None:
    raise Hang


def cases(count: int, seed: int) -> Iterator[tuple[str, int]]:
    """So many cases: kinds in turn by their shares, seeds from ``seed`` on."""
    turn = [kind for kind, (_, share) in KINDS.items() for _ in range(share)]
    order = random.Random(seed)
    order.shuffle(turn)
    for number in range(count):
        yield turn[number % len(turn)], seed + number


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="KIND:SEED")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.only:
        kind, _, seed = asked.only.partition(":")
        print(run_case(kind, int(seed)))
        return 0
    started, slowest, failed, count = time.perf_counter(), 0.0, [], Counter[str]()
    for kind, seed in cases(asked.cases, asked.seed):
        outcome = run_case(kind, seed)
        count[kind] += 1
        slowest = max(slowest, outcome.seconds)
        if outcome.problem:
            failed.append(outcome)
            print(f"{kind}:{seed} {outcome.seconds:.1f} s {outcome.problem}\n", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    kinds = ", ".join(f"{number} {kind}" for kind, number in count.items())
    print(
        f"{asked.cases} cases ({kinds}) from seed {asked.seed}: {len(failed)} failed; slowest {slowest:.1f} s, ", end=""
    )
    print(f"peak {peak:.0f} MB, {time.perf_counter() - started:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_main())
