"""The client's side of a step: the gradient of one batch with the defence's hooks, and what is sent of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from leakscope.contracts.defense import Gradient
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import LocalTraining, Message
from leakscope.contracts.protocol import BATCHNORM, ClientSide, Protocol
from leakscope.contracts.task import Reduction, outputs_of
from leakscope.network.recorder import record_layers


class UpdateNotFinite(ValueError):
    """What a client would send has NaN or infinite entries: its training diverged."""


@dataclass(frozen=True, kw_only=True)
class OneMessage(Protocol):
    """Base of protocols whose client sends one message on all its examples."""

    def _exchange(self, client: ClientSide, knowledge: Knowledge) -> tuple[tuple[Message, ...], LocalTraining]:
        with own_randomness(client.generator):
            statistics = batchnorm_statistics(client.model, client.x) if knowledge.batchnorm_statistics else None
            update, recipe = self._train(client)
        return (Message(update=protected(client, update), kind=self.kind, batchnorm_statistics=statistics),), recipe

    @abstractmethod
    def _train(self, client: ClientSide) -> tuple[Gradient, LocalTraining]:
        """The update before ``protect_message``, and the whole recipe; ``observe`` withholds what is not known."""


def protected(client: ClientSide, update: Gradient) -> Gradient:
    """The update as it is sent; UpdateNotFinite, a ValueError, where it is not."""
    _check_finite(update)
    update = client.defense.protect_message(update, client.generator)
    _check_finite(update)
    return update


def _check_finite(update: Gradient) -> None:
    broken = [name for name, value in update.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise UpdateNotFinite(
            f"the client's update is not finite in {', '.join(broken)}: its training diverged. "
            "Lower the learning rate or check the inputs."
        )


@contextmanager
def own_randomness(generator: torch.Generator) -> Iterator[None]:
    """For models that draw random numbers of their own: from the client's generator, leaving the global one alone."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        yield


def batch_gradient(client: ClientSide, reduction: Reduction = "mean") -> Gradient:
    """The gradient of the client's loss on its examples, with the defence's hooks applied in their order."""
    defense, draws = client.defense, client.generator
    x, y = defense.protect_batch(client.x, client.y, draws)
    if defense.needs_example_gradients:
        each = defense.protect_example_gradients(example_gradients(client, x, y), draws)
        gradient = {k: v.mean(0) if reduction == "mean" else v.sum(0) for k, v in each.items()}
    else:
        gradient = _gradient(client, x, y, reduction)
    return defense.protect_gradient(gradient, draws)


def example_gradients(client: ClientSide, x: Tensor, y: Tensor) -> Gradient:
    """The gradient of each example by itself, stacked along a first axis: all at once where the model lets us.

    BatchNorm in train mode mixes examples, so each goes through the model alone, as does one of a model that vmap does
    not know.
    """
    mixes = any(isinstance(module, BATCHNORM) and module.training for module in client.model.modules())
    if len(x) > 1 and not mixes:
        state = torch.random.get_rng_state()
        try:
            return _mapped_gradients(client, x, y)
        except RuntimeError:  # an operation that vmap does not know; a fault of the model is met again below
            torch.random.set_rng_state(state)
    singles = [_gradient(client, x[i : i + 1], y[i : i + 1], "mean") for i in range(len(x))]
    return {name: torch.stack([g[name] for g in singles]) for name in singles[0]}


def _mapped_gradients(client: ClientSide, x: Tensor, y: Tensor) -> Gradient:
    fixed = {name: p.detach() for name, p in client.model.named_parameters() if not p.requires_grad}
    fixed |= {name: value.detach().clone() for name, value in client.model.named_buffers()}

    def loss(weights: Gradient, picture: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(client.model, {**weights, **fixed}, (picture[None].clone(),))
        return client.task.loss(outputs_of(outputs), target[None])

    weights = {name: p.detach() for name, p in client.trained.items()}
    each: Gradient = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(weights, x, y)
    return {name: each[name].detach() for name in weights}


def _gradient(client: ClientSide, x: Tensor, y: Tensor, reduction: Reduction) -> Gradient:
    trained = client.trained
    loss = client.task.loss(outputs_of(client.model(x.clone())), y, reduction)
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g.detach()
        for (name, p), g in zip(trained.items(), gradients, strict=True)
    }


def batchnorm_statistics(client: nn.Module, x: Tensor) -> Mapping[str, Tensor] | None:
    """Mean and biased variance of the inputs of each BatchNorm layer on the private batch."""
    if not any(isinstance(module, BATCHNORM) for module in client.modules()):
        return None
    # What a random model draws here must not change its training: the update is the same whoever looks at it.
    with torch.random.fork_rng(devices=[]):
        record = record_layers(client, x, lambda _, module: isinstance(module, BATCHNORM))
    statistics: dict[str, Tensor] = {}
    for call in record.calls:
        z = call.inputs.detach()
        axes = [0, *range(2, z.dim())]
        statistics[f"{call.name}.mean"] = z.mean(axes)
        statistics[f"{call.name}.var"] = z.var(axes, unbiased=False)
    return statistics
