"""The pictures of docs/gallery.md and the figures beside them, from the embedded tiles alone.

    python tools/make_gallery.py                 all scenes: minutes on one core
    python tools/make_gallery.py untrained fedavg    some of them

A scene is an update, or several, and what attacks made of it. Its picture has the originals in the first row and an
attack in each further row, the PSNR below each tile. Mean figures go to tools/gallery.json, from which
tools/make_docs.py writes the table. Settings are defaults, the seed is 0, and the tiles are the first of the data set;
networks are trained on others. The scene of a batch is of the untrained network because of the trained one there is
nothing to see, which the page says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

import leakscope as ls
from leakscope.metrics import assign, psnr

ROOT = Path(__file__).resolve().parents[1]
FIGURES = Path(__file__).with_name("gallery.json")
#: Tiles that are shown; networks are trained on those behind them.
SHOWN, SCALE, LINE, LEFT = 36, 3, 18, 150


@dataclass(frozen=True)
class Recovered:
    """What one attack made of the originals: in the unit range, each at the place of its original."""

    name: str
    tiles: Tensor
    psnr: Sequence[float]


@dataclass(frozen=True)
class Scene:
    title: str
    make: Callable[[], tuple[Tensor, list[Recovered]]]


def victim(epochs: int = 0) -> nn.Module:
    """The ConvNet of the default audit, untrained or after so many epochs of Adam on tiles that are not shown."""
    tiles = ls.load_data("tiles")
    net = ls.build_model("convnet", input_shape=tiles.shape, num_classes=tiles.num_classes)
    x, y = tiles.x[SHOWN:], tiles.y[SHOWN:]
    order, optimiser = torch.Generator().manual_seed(0), torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=order).split(16):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
    return net.requires_grad_(True)


def attacked(name: str, attack: ls.Attack, observations: Sequence[ls.Observation], x: Tensor, batch: int) -> Recovered:
    """The attack on one observation a batch, matched with the originals."""
    guesses = []
    for number, observation in enumerate(observations):
        found = attack(observation, seed=0).inputs.clamp(0, 1)
        truth = x[number * batch : (number + 1) * batch]
        grey = torch.full_like(truth[:1], 0.5)  # the place of an original that nothing was found for: -1, the last
        guesses.append(torch.cat([found, grey])[assign(truth, found)])
    tiles = torch.cat(guesses)
    return Recovered(name, tiles, psnr(x, tiles).tolist())


def one_by_one(
    model: nn.Module,
    attacks: dict[str, ls.Attack],
    *,
    defense: ls.Defense | None = None,
    knowledge: ls.Knowledge = ls.Knowledge.honest_server,
    protocol: ls.Protocol | None = None,
    count: int = 4,
    batch: int = 1,
) -> tuple[Tensor, list[Recovered]]:
    """``count`` tiles in updates of ``batch`` each, and every attack on them."""
    tiles = ls.load_data("tiles", limit=count)
    observations = [
        (protocol or ls.FedSGD()).observe(
            model, x, y, defense, knowledge, torch.Generator().manual_seed(number), inputs=tiles.inputs
        )
        for number, (x, y) in enumerate(zip(tiles.x.split(batch), tiles.y.split(batch), strict=True))
    ]
    return tiles.x, [attacked(name, attack, observations, tiles.x, batch) for name, attack in attacks.items()]


def untrained() -> tuple[Tensor, list[Recovered]]:
    return one_by_one(
        victim(), {"inverting-gradients": ls.attacks.InvertingGradients(), "head-first": ls.attacks.HeadFirst()}
    )


def trained() -> tuple[Tensor, list[Recovered]]:
    return one_by_one(
        victim(40), {"inverting-gradients": ls.attacks.InvertingGradients(), "head-first": ls.attacks.HeadFirst()}
    )


def batch() -> tuple[Tensor, list[Recovered]]:
    return one_by_one(victim(), {"head-first": ls.attacks.HeadFirst()}, batch=4)


def pruning() -> tuple[Tensor, list[Recovered]]:
    return one_by_one(
        victim(),
        {
            "does not know": ls.attacks.InvertingGradients(ignore_defense=True),
            "knows the pruning": ls.attacks.InvertingGradients(),
        },
        defense=ls.defenses.GradientPruning(fraction=0.9),
        knowledge=ls.Knowledge.adaptive_server,
    )


def noise() -> tuple[Tensor, list[Recovered]]:
    rows: list[Recovered] = []
    for sigma in (0.001, 0.01, 0.1):
        x, found = one_by_one(
            victim(),
            {f"sigma {sigma:g}": ls.attacks.HeadFirst()},
            defense=ls.defenses.GradientNoise(sigma=sigma),
            knowledge=ls.Knowledge.adaptive_server,
        )
        rows += found
    return x, rows


def fedavg() -> tuple[Tensor, list[Recovered]]:
    return one_by_one(
        victim(),
        {"inverting-gradients": ls.attacks.InvertingGradients(), "dlfa": ls.attacks.DLFA()},
        protocol=ls.FedAvg(epochs=5, batch_size=2, lr=0.01),
        batch=4,
    )


def imprint() -> tuple[Tensor, list[Recovered]]:
    attack = ls.attacks.RobbingTheFed(bins=256)
    tiles = ls.load_data("tiles", limit=8)
    sent = attack.prepare(victim(), tiles.shape)
    return one_by_one(sent, {"robbing-the-fed": attack}, knowledge=ls.Knowledge.malicious_server, count=8, batch=8)


SCENES = {
    "untrained": Scene("An untrained ConvNet, one picture an update", untrained),
    "trained": Scene("The same network trained, one picture an update", trained),
    "batch": Scene("The untrained network, four pictures in one update", batch),
    "pruning": Scene("Pruning of 90 %, without and with knowing of it", pruning),
    "noise": Scene("Noise on every entry, known to the attack", noise),
    "fedavg": Scene("Ten local steps on four pictures", fedavg),
    "imprint": Scene("A server that plants a layer, eight pictures in one update", imprint),
}


def draw(x: Tensor, rows: Sequence[Recovered]) -> Image.Image:
    """Originals above what attacks made of them."""
    side, font = x.shape[-1] * SCALE, ImageFont.load_default(14)
    step = (side + 6, side + LINE + 6)
    picture = Image.new("RGB", (LEFT + len(x) * step[0], step[1] * (1 + len(rows)) - LINE), "white")
    pen = ImageDraw.Draw(picture)
    for level, (name, tiles, values) in enumerate(
        [("original", x, [None] * len(x)), *((row.name, row.tiles, row.psnr) for row in rows)]
    ):
        top = level * step[1] - (LINE if level else 0)
        pen.text((6, top + side / 2 - 8), name, fill="black", font=font)
        for column, (tile, value) in enumerate(zip(tiles, values, strict=True)):
            pixels = (tile.permute(1, 2, 0) * 255).round().byte().numpy()
            left = LEFT + column * step[0]
            picture.paste(Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST), (left, top))
            if value is not None:
                pen.text((left + side / 2, top + side + 1), f"{value:.0f} dB", fill="black", font=font, anchor="ma")
    return picture


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in SCENES]
    if unknown:
        print(f"no scene {', '.join(unknown)}; there are {', '.join(SCENES)}")
        return 1
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    for name in names or SCENES:
        x, rows = SCENES[name].make()
        path = ROOT / "docs" / f"gallery-{name}.png"
        draw(x, rows).quantize(256).save(path, optimize=True)
        figures[name] = {row.name: [round(value, 1) for value in row.psnr] for row in rows}
        print(name, figures[name], f"{path.stat().st_size / 1000:.0f} kB", flush=True)
        ordered = {scene: figures[scene] for scene in SCENES if scene in figures}
        FIGURES.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
