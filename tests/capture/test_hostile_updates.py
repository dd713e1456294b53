"""Updates, and what is said of them, that no client can have made: one error of the caller, in bounded work."""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from leakscope.capture.files import read_captured, read_truth
from leakscope.cli import main
from leakscope.contracts.errors import UserError
from leakscope.data.npz import Pack
from leakscope.models import build_model

SHAPE = (3, 4, 4)
MODEL = build_model("mlp", input_shape=SHAPE, num_classes=3)
NAMED = ["--model", "mlp", "--input", "3x4x4", "--classes", "3", "--range", "0,1", "--attack", "linear-layer"]


def gradient() -> dict[str, Tensor]:
    x = torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(MODEL(x), torch.tensor([1]))
    names = [name for name, _ in MODEL.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(MODEL.parameters())), strict=True))


def attack(folder: Path, file: str, *words: str) -> tuple[Any, str]:
    save_file(MODEL.state_dict(), folder / "before.safetensors")
    files = ["--before", str(folder / "before.safetensors"), "--update", str(folder / file)]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["leakscope", "attack", *NAMED, *files, "--out", str(folder / "out"), *words])
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code, err.getvalue()


@pytest.mark.parametrize("count", [float("nan"), float("inf"), 1.5, 0, -3, True], ids=str)
@pytest.mark.parametrize("ending", [".npz", ".pt"])
def test_numbers_of_examples(count: float, ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"update{ending}"
    if ending == ".npz":
        np.savez(file, w=np.zeros(2), num_samples=count)
    else:
        torch.save({"model_params": {"w": torch.zeros(2)}, "num_samples": count}, file)
    with pytest.raises(UserError, match="num_samples: expected how many examples"):
        read_captured(file)


def test_a_whole_number_of_examples_may_be_a_float(tmp_path: Path) -> None:
    np.savez(tmp_path / "update.npz", w=np.zeros(2), num_samples=2.0)
    assert read_captured(tmp_path / "update.npz")[1] == 2


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": lambda value: value.to_sparse_csr(),
    "float8": lambda value: value.to(torch.float8_e5m2),
}
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "nested": lambda value: torch.nested.nested_tensor([value[0], value[1]]),
    "meta": lambda value: value.to("meta"),
    "quantised": lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
    "complex": lambda value: value + 0j,
}


@pytest.mark.parametrize("kind", [*READ, *REFUSED])
@pytest.mark.filterwarnings("ignore")
def test_kinds_of_tensors(kind: str, tmp_path: Path) -> None:
    update = gradient()
    name = next(iter(update))
    torch.save({**update, name: {**READ, **REFUSED}[kind](update[name])}, tmp_path / "update.pt")
    code, text = attack(tmp_path, "update.pt", "--kind", "gradient")
    assert (code, "Traceback" in text) == (0 if kind in READ else 4, False)


def test_a_sparse_tensor_that_would_fill_the_memory(tmp_path: Path) -> None:
    huge = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.long), torch.ones(1), (10**6, 10**6))
    torch.save({"w": huge}, tmp_path / "update.pt")
    with pytest.raises(UserError, match="LEAKSCOPE_MAX_BYTES"):
        read_captured(tmp_path / "update.pt")


@pytest.mark.parametrize(
    "words",
    [
        *(("--device", name) for name in ("meta", "xla", "mps", "", "hpu", "lazy", "cpu:-1", "mtia")),
        *(("--seed", str(seed)) for seed in (2**64, -(2**64), 10**40)),
        *(("--examples", count) for count in ("1000000", "0")),
    ],
    ids=" ".join,
)
def test_how_it_is_attacked(words: tuple[str, str], tmp_path: Path) -> None:
    save_file(gradient(), tmp_path / "update.safetensors")
    code, text = attack(tmp_path, "update.safetensors", "--kind", "gradient", *words)
    assert code == 4
    assert "Traceback" not in text


@pytest.mark.parametrize("examples", [(), ("--examples", "1")], ids=["unknown", "known"])
@pytest.mark.parametrize(
    "words", [("--momentum", "2"), ("--momentum", "-1"), ("--lr", "-1"), ("--lr", "0"), ("--lr", "nan")], ids=" ".join
)
def test_the_recipe(words: tuple[str, str], examples: tuple[str, ...], tmp_path: Path) -> None:
    save_file(gradient(), tmp_path / "update.safetensors")
    code, text = attack(tmp_path, "update.safetensors", "--kind", "weight_delta", *examples, *words)
    assert code == 4
    assert "expected a number" in text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("ending", [".npz", ".pt", ".safetensors", ".png"])
def test_pipes_are_not_waited_for(ending: str, tmp_path: Path) -> None:
    import leakscope as ls

    pipe = tmp_path / f"endless{ending}"
    os.mkfifo(pipe)
    observation = ls.FedSGD().observe(MODEL, torch.rand(1, *SHAPE), torch.tensor([0]))
    with pytest.raises(UserError, match="pipe or a device"):
        read_truth(pipe, observation)
    with pytest.raises(UserError):
        read_captured(pipe)
    if ending == ".png":
        with pytest.raises(UserError, match="pipe or a device"):
            read_truth(tmp_path, observation)


def test_an_archive_is_opened_once_however_many_arrays_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "many.npz", **{f"arr_{number}": np.full(1, number) for number in range(50)})
    opened, real = [], zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda *args, **options: opened.append(1) or real(*args, **options))
    pack = Pack(tmp_path / "many.npz")
    assert [int(pack.array(f"arr_{number}", "uif")[0]) for number in range(50)] == list(range(50))
    assert len(opened) == 1
