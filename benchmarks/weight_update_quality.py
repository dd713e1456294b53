"""How well weight updates are inverted: IG, SME and DLFA on fresh clients, settings of table 2 and 7 of the SME paper.

    python benchmarks/weight_update_quality.py --data femnist --epochs 10 --examples 10 --clients 10 --seed 1

Needs LEAKSCOPE_DATA. Prints one line a client and attack, then means; --pictures writes the first client's images,
truth above reconstructions, as a PNG.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from leakscope.data import load_data
from leakscope.papers import sme


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=sorted(sme.BOXES), default="femnist")
    parser.add_argument("--model", help="a name from 'leakscope list models'; default: the paper's CNN")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--examples", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attacks", nargs="+", default=["IG", "SME", "SME, defaults"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pictures", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    setting = sme.Setting(
        data=options.data,
        epochs=options.epochs,
        examples=options.examples,
        batch_size=options.batch_size,
        model=options.model,
        lr=options.lr,
    )
    found: dict[str, list[float]] = {name: [] for name in options.attacks}
    rows = []
    for client in sme.clients(setting, options.clients, options.seed, load_data(options.data, split="train")):
        seen = sme.observe(setting, client, setting.network(client.number))
        rows = rows or [client.box.to_unit(client.x)]
        for name, attack in sme.attacks(setting, "paper", tuple(options.attacks)).items():
            started = time.perf_counter()
            result = attack(seen, seed=client.number)
            found[name].append(client.psnr(result.inputs))
            beta = result.info.get("beta")
            print(
                f"{options.model or ''} {setting} client {client.number}  {name:14s} {found[name][-1]:5.1f} dB  "
                f"{'' if beta is None else f'beta {beta:.3f}  '}{time.perf_counter() - started:4.0f} s  "
                f"{', '.join(result.flags)}",
                flush=True,
            )
            if options.pictures and len(found[name]) == 1:
                rows.append(client.box.to_unit(result.inputs))
    for name, values in found.items():
        spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        where = f"{options.model or ''} {setting}  {name:14s}"
        print(f"{where} mean {statistics.mean(values):5.2f} +- {spread:.2f} ({len(values)})")
    if options.pictures:
        from PIL import Image

        grid = torch.cat([torch.cat(list(row.clamp(0, 1)), dim=2) for row in rows], dim=1)
        pixels = (grid * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]).save(options.pictures)


if __name__ == "__main__":
    main()
