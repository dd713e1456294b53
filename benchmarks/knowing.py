"""What knowing a defence is worth: the strongest search with and without that knowledge, on unseen images.

    python benchmarks/knowing.py [--states untrained,1] [--images 8] [--first 1000] [--defenses NAME ...] [--out FILE]

ConvNet on CIFAR-10, one image an update (MixUp: four, matched to the truth one to one), labels unknown, ``head-first``
with ``ignore_defense`` false and true on the same update with the same seed. A line of JSON for each image and way is
appended to FILE as soon as it is measured; what is there is not run again. Needs LEAKSCOPE_DATA.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from knowing_table import IGNORING, KNOWING, cell, pairs, read_rows
from leakscope import __version__
from leakscope.attacks import HeadFirst
from leakscope.contracts.defense import Defense
from leakscope.contracts.knowledge import Knowledge
from leakscope.defenses import (
    GradientClipping,
    GradientDropout,
    GradientNoise,
    GradientPruning,
    GradientQuantisation,
    MixUp,
    NetworkDropout,
)
from leakscope.federation import FedSGD
from leakscope.metrics import psnr
from leakscope.metrics.assignment import assign
from strength_models import data_of, victim

DEFENSES: Mapping[str, Defense] = {
    "pruning 0.9": GradientPruning(fraction=0.9),
    "pruning 0.99": GradientPruning(fraction=0.99),
    "noise 0.001": GradientNoise(sigma=0.001),
    "noise 0.01": GradientNoise(sigma=0.01),
    "clipping 1": GradientClipping(norm=1.0),
    "dropout 0.5": GradientDropout(probability=0.5),
    "8-bit": GradientQuantisation(bits=8),
    "sign": GradientQuantisation(values="sign"),
    "network dropout 0.5": NetworkDropout(probability=0.5),
    "mixup, batches of 4": MixUp(),
}
#: Images of an update, where one is not defended.
BATCHES = {"mixup, batches of 4": 4}
WAYS = {KNOWING: False, IGNORING: True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", default="untrained,1")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--defenses", nargs="*", default=list(DEFENSES), choices=list(DEFENSES))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("knowing.jsonl"))
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "leakscope-strength")
    options = parser.parse_args()
    torch.set_num_threads(1)
    examples = data_of(["convnet"])["cifar10"]
    rows = read_rows(options.out)
    there = {(row["state"], row["defense"], row["image"], row["way"]) for row in rows}
    for state in options.states.split(","):
        net = victim("convnet", state, examples, options.cache)
        for name in options.defenses:
            batch = BATCHES.get(name, 1)
            for image in range(options.first, options.first + batch * options.images, batch):
                x, y = examples.x[image : image + batch], examples.y[image : image + batch]
                draws = torch.Generator().manual_seed(image)
                seen = FedSGD().observe(net, x, y, DEFENSES[name], Knowledge.adaptive_server, draws)
                for way, ignores in WAYS.items():
                    if (state, name, image, way) in there:
                        continue
                    started = time.process_time()
                    result = HeadFirst(ignore_defense=ignores)(seen, seed=0)
                    row = {"state": state, "defense": name, "image": image, "way": way, "version": __version__}
                    guess = result.inputs.clamp(0, 1).float()
                    guess = guess[assign(x.flatten(1), guess.flatten(1))]
                    row |= {"psnr": round(float(psnr(x, guess).mean()), 3)}
                    row |= {"seconds": round(time.process_time() - started, 2), "flags": list(result.flags)}
                    rows.append(row)
                    with options.out.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(row) + "\n")
            print(state, name, cell(pairs(rows, state, name)), flush=True)


if __name__ == "__main__":
    main()
