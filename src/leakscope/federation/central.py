"""Ordinary training in one place, so that a federated update can be attacked at a checkpoint of it.

Papers attack nets that were trained for some epochs before the client computes its update. Unlike federated training,
which sends parameters only, this one also moves the running statistics of BatchNorm.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Classification, Task, outputs_of
from leakscope.federation.training import Client, Training, round_generator


@dataclass(frozen=True, kw_only=True)
class CentralTraining(Training):
    """A round is one epoch of SGD with momentum over the examples of all clients together.

    Momentum begins anew with each epoch, so that an epoch depends on the weights before it alone and a checkpoint needs
    nothing else. ``decay_every``: the learning rate falls to a tenth after so many epochs, and again; 0 never.
    """

    rounds: int = setting(1, "Epochs of training.", ge=1)
    batch_size: int = setting(64, "Examples in a step.", ge=1)
    lr: float = setting(0.1, "Step size of SGD.", gt=0)
    momentum: float = setting(0.9, "Momentum of SGD.", ge=0, lt=1)
    decay_every: int = setting(50, "Epochs after which the step size falls to a tenth; 0 never.", ge=0)
    task: Task = field(default_factory=Classification)

    def play_round(
        self, model: nn.Module, clients: Sequence[Client], number: int, *, seed: int = 0, defense: Defense | None = None
    ) -> tuple[nn.Module, float]:
        """The model after epoch ``number``, and the mean loss over its steps."""
        if defense is not None:
            raise UserError(f"central training: expected no defence, for nothing is sent, got {defense!r}")
        x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
        after = copy.deepcopy(model).train()
        rate = self.lr * (0.1 ** ((number - 1) // self.decay_every) if self.decay_every else 1.0)
        optimiser = torch.optim.SGD([p for p in after.parameters() if p.requires_grad], rate, self.momentum)
        total, draws = 0.0, round_generator(seed, number, 0)
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed)  # for models that draw random numbers of their own
            for rows in torch.randperm(len(x), generator=draws).tensor_split(-(-len(x) // self.batch_size)):
                optimiser.zero_grad()
                loss = self.task.loss(outputs_of(after(x[rows])), y[rows], "mean")
                loss.backward()
                optimiser.step()
                total += float(loss.detach()) * len(rows)
        after.zero_grad(set_to_none=True)
        return after.train(model.training), total / len(x)
