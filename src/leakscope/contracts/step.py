"""A client at work: the gradient of its batch with the defence's hooks, and its local steps.

Protocols are made of these, and an adversary who knows protocol and defence plays clients of its own with the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from leakscope.contracts.defense import Gradient
from leakscope.contracts.protocol import BATCHNORM, ClientSide
from leakscope.contracts.task import Reduction, outputs_of

#: Told before each local step: its number, and the gradient it will follow.
Record = Callable[[int, Gradient], None]


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


def visits(examples: int, batch_size: int, epochs: int, generator: torch.Generator | None = None) -> Iterator[Tensor]:
    """Which examples each local step is on; each epoch shuffled anew with a ``generator``, in their order without.

    >>> [batch.tolist() for batch in visits(3, 2, epochs=2)]
    [[0, 1], [2], [0, 1], [2]]
    """
    for _ in range(epochs):
        order = torch.arange(examples) if generator is None else torch.randperm(examples, generator=generator)
        yield from order.split(batch_size)


def train_locally(
    client: ClientSide,
    batches: Iterable[Tensor],
    learning_rate: float,
    optimizer: str = "sgd",
    momentum: float = 0.0,
    record: Record | None = None,
) -> tuple[Gradient, tuple[tuple[int, ...], ...]]:
    """Weights before minus after a step on each of the batches, and the examples of each; the client's model moves."""
    trained, before = client.trained, client.weights()
    rule: torch.optim.Optimizer
    if optimizer == "adam":
        rule = torch.optim.Adam(trained.values(), lr=learning_rate)
    else:
        rule = torch.optim.SGD(trained.values(), lr=learning_rate, momentum=momentum)
    order: list[tuple[int, ...]] = []
    for batch in batches:
        gradient = batch_gradient(client.at(batch))
        if record is not None:
            record(len(order), gradient)
        for name, parameter in trained.items():
            parameter.grad = gradient[name]
        rule.step()
        order.append(tuple(batch.tolist()))
    return {name: before[name] - parameter.detach() for name, parameter in trained.items()}, tuple(order)
