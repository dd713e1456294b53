"""Shuffled FedAvg clients, undefended: each must leak, or nothing about it may pass.

Sixteen clients on the embedded data: 1 to 5 epochs, batches of one and two, two to four images, learning rates from
0.05 to 1. For each: how many visiting orders exist, the PSNR of `inverting-gradients` with its defaults, what it leaves
of the update beside what the truth leaves, and the floor. The outcome is "open" where images are recovered. Else it
names what forbids a pass: a flag, or a floor above the limit; "PASSES" is a defect.

    python benchmarks/fedavg_orders.py [--only 0 3] [--side 16] [--out results.jsonl]

With ``--out`` finished lines are kept, and a further call goes on with the rest. A line took 37 to 154 seconds with
``--side 16`` on a busy machine of two cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from leakscope.audit.attempts import Bench
from leakscope.audit.plan import make_plan
from leakscope.audit.setup import build_setup
from leakscope.audit.spec import AuditSpec
from leakscope.data import load_data
from leakscope.matching.orders import least_orders
from leakscope.results.records import AttemptRecord, number

#: Images, batch size, epochs, learning rate.
CLIENTS = [
    *((2, 1, 2, 0.2), (2, 1, 1, 0.05), (2, 1, 1, 1.0), (2, 1, 2, 0.05), (2, 1, 3, 0.1), (2, 1, 4, 0.05)),
    *((2, 1, 5, 0.05), (3, 1, 1, 0.2), (3, 1, 2, 0.05), (3, 2, 1, 0.5), (3, 2, 2, 0.1), (3, 1, 3, 0.1)),
    *((4, 2, 1, 0.2), (4, 2, 2, 0.05), (4, 1, 1, 0.1), (4, 2, 5, 0.2)),
]
#: An image from here on is recovered (dB): the limit of the default policy.
RECOVERED = 20.0


def run(client: tuple[int, int, int, float], side: int, attack: str) -> dict[str, Any]:
    """Return the line of one client."""
    examples, batch_size, epochs, rate = client
    data = load_data("tiles")
    x = torch.nn.functional.interpolate(data.x, size=side, mode="area")
    spec = {
        "model": {"name": "convnet"},
        "data": (x, data.y),
        "batch": examples,
        "examples": examples,
        "protocols": [{"fedavg": {"epochs": epochs, "batch_size": batch_size, "lr": rate}}],
        "defenses": ["none"],
        "attacks": [attack],
        "controls": False,
    }
    setup = build_setup(AuditSpec.parse(spec))
    jobs, bench = make_plan(setup), Bench(setup)
    started = time.perf_counter()
    outcome = bench.run(next(job for job in jobs if job.attack is not None and job.control is None))
    if outcome.result is None:
        raise SystemExit(f"{client}: {outcome.error}")
    seconds = time.perf_counter() - started
    found = AttemptRecord.read(outcome.result)
    theory = bench.run(next(job for job in jobs if job.finding == "floor")).result or {}
    floor = number(theory.get("psnr"))
    psnr = [round(example.value("psnr"), 1) for example in found.examples]
    given = [round(example.value("psnr"), 1) for example in found.given_labels]
    best = max(psnr + given)
    reasons = [flag for flag in found.flags if flag in ("update not explained", "did not converge")]
    reasons += ["floor"] if floor > RECOVERED else []
    return {
        "client": client,
        "orders": least_orders(range(examples), batch_size, epochs),
        "psnr": psnr,
        "given_labels": given,
        "unexplained": found.unexplained,
        "by_truth": found.unexplained_by_truth,
        "floor": floor,
        "outcome": "open" if best >= RECOVERED else ", ".join(reasons) or "PASSES",
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Print one line a client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of clients")
    parser.add_argument("--side", type=int, default=32, help="pixels of a side")
    parser.add_argument("--attack", default="inverting-gradients")
    parser.add_argument("--out", type=Path, help="JSON lines; finished ones are not run again")
    options = parser.parse_args()
    kept = options.out.read_text().splitlines() if options.out is not None and options.out.exists() else []
    done = {tuple(line["client"]): line for line in map(json.loads, kept)}
    print("images batch epochs   lr   orders  PSNR (dB)                unexplained (truth)   floor  seconds  outcome")
    for place, client in enumerate(CLIENTS):
        if options.only is not None and place not in options.only:
            continue
        line = done.get(client)
        if line is None:
            line = run(client, options.side, options.attack)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        images, batch_size, epochs, rate = client
        psnr = " ".join(f"{value:.1f}" for value in line["psnr"])
        left = f"{line['unexplained']:.3f} ({line['by_truth']:.0e})"
        print(
            f"{images:6} {batch_size:5} {epochs:6} {rate:4} {line['orders']:8}  {psnr:24} {left:21} "
            f"{line['floor']:6.1f} {line['seconds']:8}  {line['outcome']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
