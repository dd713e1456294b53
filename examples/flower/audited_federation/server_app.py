"""A server that averages as ever, and audits each reply before it does."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from audited_federation.task import capture, make_model
from leakscope.attacks import InvertingGradients
from leakscope.integrations.flower import AuditedStrategy, Inline

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    recorded = capture(context, "server", defended=True)
    strategy = AuditedStrategy(FedAvg(), recorded, inline=Inline(attack=InvertingGradients(iterations=100)))
    rounds = int(context.run_config["rounds"])
    result = strategy.start(grid, ArrayRecord(make_model().state_dict()), num_rounds=rounds)
    metrics = {number: dict(record) for number, record in result.train_metrics_clientapp.items()}
    Path(str(context.run_config["recordings"]), "metrics.json").write_text(json.dumps(metrics, indent=1))
