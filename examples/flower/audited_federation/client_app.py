"""A client that takes one step on its examples, protects the update, and audits it before and after."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from audited_federation.task import DEFENSE, TILES, capture, examples_of, make_model
from leakscope.integrations.flower import AuditMod, Inline, hold_truth

INLINE = Inline(attack="cocktail-party", controls=False)


def raw(message: Message, context: Context, call_next: Any) -> Message:
    """What the client computed; the run's settings are in the context, so the mod is made here."""
    mod = AuditMod(capture(context, "clients", defended=False), position="raw", inline=INLINE, others=TILES.x[-90:])
    reply: Message = mod(message, context, call_next)
    return reply


def as_sent(message: Message, context: Context, call_next: Any) -> Message:
    """What leaves the client."""
    mod = AuditMod(capture(context, "clients", defended=True), position="as_sent", inline=INLINE, others=TILES.x[-90:])
    reply: Message = mod(message, context, call_next)
    return reply


app = ClientApp()


# The first mod is the outermost. Those of the function alone: Flower's LocalDpMod does not let evaluation pass.
@app.train(mods=[as_sent, DEFENSE, raw])
def train(message: Message, context: Context) -> Message:
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = examples_of(int(context.node_config["partition-id"]), int(context.run_config["examples"]))
    hold_truth(x, y)
    step = torch.optim.SGD(model.parameters(), lr=float(context.run_config["learning-rate"]))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    step.step()
    metrics = MetricRecord({"loss": loss.item(), "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = examples_of(int(context.node_config["partition-id"]), int(context.run_config["examples"]))
    loss = torch.nn.functional.cross_entropy(model(x), y).item()
    return Message(RecordDict({"metrics": MetricRecord({"loss": loss, "num-examples": len(x)})}), reply_to=message)
