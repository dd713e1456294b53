"""What plan and an audit foretell, and what the same audit then takes, on five models.

python benchmarks/forecast.py [--models mlp convnet ...] [--examples 2]

For each model: seconds by ``leakscope plan``, those that the audit announces, those that its bar shows when half of the
time is over, and those that the jobs took; all but the last as ratios to it. Two examples, one search of 100 steps
beside the closed forms and head-first, controls on noise, no leak ends anything. On a busy machine all of them grow.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from leakscope.audit.estimate import size_audit
from leakscope.audit.forecast import START_SECONDS
from leakscope.audit.progress import Tally
from leakscope.audit.run import run_spec
from leakscope.audit.spec import AuditSpec

MODELS = ("mlp", "dlg-lenet", "convnet", "resnet18", "vit")
SETTINGS: dict[str, Any] = {
    "data": "tiles",
    "attacks": ["linear-layer", "head-first", {"inverting-gradients": {"iterations": 100}}],
    "controls": ["noise"],
    "findings": False,
    "stop_on_leak": False,
}


def measure(model: str, examples: int) -> tuple[float, float, float, float]:
    """Return the seconds of plan, announcement and bar, and those it took; the bar's are of the work behind it."""
    spec = AuditSpec.parse({**SETTINGS, "model": model, "examples": examples})
    planned = size_audit(spec).hours(1) * 3600 - START_SECONDS
    tally, marks = Tally(), {"begun": 0.0, "announced": 0.0}
    shown: list[tuple[float, float]] = []

    def watch(event: dict[str, Any]) -> None:
        tally.take(event)
        if event["event"] == "estimated":
            marks["begun"], marks["announced"] = time.perf_counter(), event["seconds"]
        elif event["event"] == "finished" and tally.remaining is not None:
            shown.append((time.perf_counter(), tally.remaining))

    run_spec(spec, progress=watch)
    end = time.perf_counter()
    took = end - marks["begun"]
    now, left = min(shown, key=lambda pair: abs(pair[0] - marks["begun"] - took / 2))
    return planned, marks["announced"], left / max(end - now, 1e-9) * took, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--examples", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':10} {'took, s':>8} {'plan':>6} {'audit':>6} {'bar':>6}")
    for model in chosen.models:
        *told, took = measure(model, chosen.examples)
        print(f"{model:10} {took:8.1f} " + " ".join(f"{one / took:6.2f}" for one in told), flush=True)


if __name__ == "__main__":
    main()
