"""What lies in a reader's folder before the commands of a page are typed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import save_file

import leakscope as ls

SPEC = """
model: {name: mlp, options: {hidden: [16]}}
data: {name: tiles, limit: 12}
batch: 1
examples: 1
attacks: [linear-layer]
"""
OWN = """
from dataclasses import dataclass

import torch

import leakscope as ls


def net(input_shape=(3, 8, 8), num_classes=2):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.ReLU(), torch.nn.Linear(8, num_classes)
    )


def make(input_shape, num_classes):
    return net(input_shape, num_classes)


def load():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(12, 3, 8, 8, generator=generator), torch.rand(12, 2, generator=generator)


class MyAttack(ls.attacks.LinearLayer):
    pass


class MyDefense(ls.defenses.GradientPruning):
    pass
"""


def write_spec(folder: Path, name: str = "spec.yaml") -> None:
    (folder / name).write_text(SPEC, encoding="utf-8")


def write_own_code(folder: Path) -> None:
    (folder / "mine.py").write_text(OWN, encoding="utf-8")
    (folder / "mypackage").mkdir(exist_ok=True)
    (folder / "mypackage" / "__init__.py").write_text("", encoding="utf-8")
    (folder / "mypackage" / "nets.py").write_text(OWN, encoding="utf-8")


def write_pictures(folder: Path, name: str = "pictures") -> None:
    """Two classes of small pictures."""
    random = np.random.default_rng(0)
    for label in ("one", "two"):
        (folder / name / label).mkdir(parents=True)
        for number in range(6):
            pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / label / f"{number}.png")


def write_update(folder: Path) -> None:
    """A captured update of an embedded picture through a reference model."""
    tiles = ls.load_data("tiles", limit=1)
    net = ls.build_model("logistic", input_shape=tiles.shape, num_classes=tiles.num_classes)
    observation = ls.FedSGD().observe(net, tiles.x, tiles.y)
    dataclasses.replace(observation, model_name="logistic").save(folder / "update")


def write_audits(folder: Path, *names: str) -> None:
    for name in names:
        ls.audit(model="logistic", data="tiles", attacks="linear-layer", examples=1, findings=False, out=folder / name)


def write_received_models(folder: Path) -> None:
    """Weights as an honest server sends them, and a model with an imprint."""
    honest = ls.build_model("mlp", input_shape=(3, 8, 8), num_classes=2, hidden=8)
    renamed = dict(zip(("1.weight", "1.bias", "3.weight", "3.bias"), honest.state_dict().values(), strict=True))
    save_file(renamed, folder / "received.safetensors")
    (folder / "received.py").write_text(
        "import leakscope as ls\n\n\ndef net():\n"
        "    return ls.attacks.RobbingTheFed(bins=64).prepare(ls.build_model('convnet'), (3, 32, 32))\n",
        encoding="utf-8",
    )
    planted = ls.attacks.RobbingTheFed(bins=64).prepare(ls.build_model("convnet"), (3, 32, 32))
    save_file(planted.state_dict(), folder / "round-1.safetensors")


def readme(folder: Path) -> None:
    write_spec(folder)
    write_own_code(folder)
    write_pictures(folder)
    write_update(folder)
    write_received_models(folder)
    write_audits(folder, "runs/a", "runs/b")


def limits_and_papers(folder: Path) -> None:
    write_spec(folder, "SPEC.yaml")
    write_pictures(folder, "clinic/photos")


FOLDERS: Mapping[str, Callable[[Path], None]] = {
    "README": readme,
    "audit": write_spec,
    "output": write_spec,
    "malicious-server": write_received_models,
    "limits-and-papers": limits_and_papers,
}
