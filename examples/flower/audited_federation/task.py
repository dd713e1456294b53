"""What clients and server agree on: the model, the recipe, the defence, and where recordings go."""

from __future__ import annotations

from pathlib import Path

import torch
from flwr.app import Context
from flwr.clientapp.mod import LocalDpMod
from torch import nn

import leakscope as ls
from leakscope.contracts.observation import LocalTraining
from leakscope.integrations.flower import Capture, channel_of_local_dp

TILES = ls.load_data("tiles")
#: Clips the update and adds a little noise: far too little, as the audit shows.
DEFENSE = LocalDpMod(clipping_norm=1.0, sensitivity=1e-4, epsilon=10.0, delta=1e-5)


def make_model() -> nn.Module:
    """The same initial weights everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ls.build_model("mlp", input_shape=TILES.shape, num_classes=TILES.num_classes, hidden=[64])


def examples_of(client: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The private examples of a client."""
    own = TILES.batch(client, count)
    return own.x, own.y


def capture(context: Context, side: str, *, defended: bool) -> Capture:
    """Both sides describe the exchange in the same words; each has a folder of its own."""
    count, rate = int(context.run_config["examples"]), float(context.run_config["learning-rate"])
    return Capture(
        folder=Path(str(context.run_config["recordings"])) / side,
        model=make_model(),
        input_shape=TILES.shape,
        num_classes=TILES.num_classes,
        value_range=TILES.value_range,
        training=LocalTraining(epochs=1, batch_size=count, learning_rate=rate, optimizer="sgd"),
        channel=channel_of_local_dp(DEFENSE) if defended else None,
    )
