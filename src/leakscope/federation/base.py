"""The contract of a protocol and of a defence, and the one place where facts are withheld from the adversary."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from leakscope.loss import client_loss, label_count
from leakscope.observation import (
    BatchNormMode,
    Knowledge,
    LocalTraining,
    Message,
    Observation,
    Reduction,
    UpdateKind,
    ValueRange,
)

BATCHNORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

Gradient = dict[str, Tensor]

# Not a number people type as a seed: the client's draws must not coincide with an attack's.
_CLIENT_SEED = 0x1EA6_5C0F


@dataclass(frozen=True, kw_only=True)
class Defense:
    """A protection of the update. Override the hooks at which it acts; the others leave things as they are.

    The protocol calls the hooks in this order: ``protect_batch`` once for each batch the client trains on,
    ``protect_example_gradients`` and ``protect_gradient`` at each local step, ``protect_message`` once, last.
    """

    def protect_batch(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return x, y

    def protect_example_gradients(self, gradients: Gradient, generator: torch.Generator) -> Gradient:
        """``gradients`` have a leading axis of examples; the same shape comes back."""
        return gradients

    def protect_gradient(self, gradient: Gradient, generator: torch.Generator) -> Gradient:
        return gradient

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return update

    @property
    def needs_example_gradients(self) -> bool:
        return type(self).protect_example_gradients is not Defense.protect_example_gradients


@dataclass(frozen=True, kw_only=True)
class Protocol(ABC):
    """How an update comes about. Settings are keyword-only fields; data is given to :meth:`observe`."""

    #: What a client of this protocol sends.
    kind: ClassVar[UpdateKind]

    batchnorm: BatchNormMode = "eval"

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if getattr(cls, "kind", None) not in ("gradient", "weight_delta"):
            raise TypeError(f"{cls.__name__}: expected a class attribute kind, 'gradient' or 'weight_delta'")

    def __post_init__(self) -> None:
        if self.batchnorm not in ("eval", "train"):
            raise ValueError(f"batchnorm: expected 'eval' or 'train', got {self.batchnorm!r}")

    def observe(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        defense: Defense | None = None,
        knowledge: Knowledge = Knowledge.honest_server,
        generator: torch.Generator | None = None,
        *,
        value_range: ValueRange | None = None,
        num_classes: int | None = None,
        model_name: str | None = None,
    ) -> Observation:
        """What an adversary with this ``knowledge`` sees after a client trained ``model`` on (x, y).

        The client works on a copy: the caller's model is bit-identical afterwards. Dropout is off; BatchNorm
        follows the ``batchnorm`` setting. ``value_range`` is the box of valid inputs; without it [0, 1] is taken
        where the data fits, and otherwise the adversary has no box.
        """
        outputs = check_batch(model, x, y, num_classes)
        # Copies: a model may change its input in place, and the caller's data is the truth of the comparison.
        x, y = x.detach().clone(), y.clone()
        generator = generator if generator is not None else client_generator()
        if value_range is None and bool((x >= 0).all()) and bool((x <= 1).all()):
            value_range = ValueRange()
        client = client_copy(model, self.batchnorm)
        defense = defense if defense is not None else Defense()
        messages, recipe = self._exchange(client, x, y, defense, knowledge, generator)
        return Observation(
            model=model,
            messages=messages,
            input_shape=tuple(x.shape[1:]),
            num_classes=outputs,
            knowledge=knowledge,
            num_examples=x.shape[0] if knowledge.num_examples else None,
            value_range=value_range if knowledge.normalisation else None,
            labels=y.clone() if knowledge.labels == "yes" else None,
            label_counts=torch.bincount(y, minlength=outputs) if knowledge.labels != "no" else None,
            training=_withhold(recipe, knowledge),
            reduction=self._reduction(),
            batchnorm=self.batchnorm,
            model_name=model_name,
        )

    def _exchange(
        self,
        client: nn.Module,
        x: Tensor,
        y: Tensor,
        defense: Defense,
        knowledge: Knowledge,
        generator: torch.Generator,
    ) -> tuple[tuple[Message, ...], LocalTraining]:
        """What is sent, as far as the knowledge reveals it, and the whole recipe."""
        with own_randomness(generator):
            statistics = batchnorm_statistics(client, x) if knowledge.batchnorm_statistics else None
            update, recipe = self._train(client, x, y, defense, generator)
        update = finite(defense.protect_message(update, generator))
        return (Message(update=update, kind=self.kind, batchnorm_statistics=statistics),), recipe

    @abstractmethod
    def _train(
        self, client: nn.Module, x: Tensor, y: Tensor, defense: Defense, generator: torch.Generator
    ) -> tuple[Gradient, LocalTraining]:
        """The update before ``protect_message``, and the whole recipe; ``observe`` withholds what is not known."""

    def _reduction(self) -> Reduction:
        return "mean"


def finite(update: Gradient) -> Gradient:
    """The update itself; ValueError where it is not finite."""
    broken = [name for name, value in update.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise ValueError(
            f"the client's update is not finite in {', '.join(broken)}: its training diverged. "
            "Lower the learning rate or check the inputs."
        )
    return update


def client_generator() -> torch.Generator:
    """The client's draws where the caller gives no generator; always the same."""
    return torch.Generator().manual_seed(_CLIENT_SEED)


@contextmanager
def own_randomness(generator: torch.Generator) -> Iterator[None]:
    """For models that draw random numbers of their own: from the client's generator, leaving the global one alone."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        yield


def _withhold(recipe: LocalTraining, knowledge: Knowledge) -> LocalTraining:
    """Only those facts of the recipe that the knowledge grants."""
    return LocalTraining(
        epochs=recipe.epochs if knowledge.local_epochs else None,
        batch_size=recipe.batch_size if knowledge.batch_size else None,
        learning_rate=recipe.learning_rate if knowledge.learning_rate else None,
        optimizer=recipe.optimizer if knowledge.learning_rate else None,
        momentum=recipe.momentum if knowledge.learning_rate else None,
        batch_order=recipe.batch_order if knowledge.batch_order else None,
    )


def client_copy(model: nn.Module, batchnorm: BatchNormMode) -> nn.Module:
    """A private copy in the client's mode: dropout off, BatchNorm as told."""
    client = copy.deepcopy(model).eval()
    for module in client.modules():
        if isinstance(module, BATCHNORM):
            module.train(batchnorm == "train")
    return client


def batch_gradient(
    client: nn.Module,
    x: Tensor,
    y: Tensor,
    reduction: Reduction,
    defense: Defense,
    generator: torch.Generator,
) -> Gradient:
    """The gradient of the cross-entropy on one batch, with the defence's hooks applied in their order."""
    x, y = defense.protect_batch(x, y, generator)
    if defense.needs_example_gradients:
        # One backward pass an example: BatchNorm in train mode mixes examples, so it has no such gradients.
        singles = [_gradient(client, x[i : i + 1], y[i : i + 1], "mean") for i in range(x.shape[0])]
        stacked = {name: torch.stack([g[name] for g in singles]) for name in singles[0]}
        protected = defense.protect_example_gradients(stacked, generator)
        gradient = {k: v.mean(0) if reduction == "mean" else v.sum(0) for k, v in protected.items()}
    else:
        gradient = _gradient(client, x, y, reduction)
    return defense.protect_gradient(gradient, generator)


def _gradient(client: nn.Module, x: Tensor, y: Tensor, reduction: Reduction) -> Gradient:
    names = [name for name, p in client.named_parameters() if p.requires_grad]
    parameters = [p for p in client.parameters() if p.requires_grad]
    loss = client_loss(client(x.clone()), y, reduction)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g.detach()
        for name, p, g in zip(names, parameters, gradients, strict=True)
    }


def batchnorm_statistics(client: nn.Module, x: Tensor) -> Mapping[str, Tensor] | None:
    """Mean and biased variance of the inputs of each BatchNorm layer on the private batch."""
    found: dict[str, Tensor] = {}
    handles = []

    def record(name: str) -> None:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            z = inputs[0].detach()
            axes = [0, *range(2, z.dim())]
            found[f"{name}.mean"] = z.mean(axes)
            found[f"{name}.var"] = z.var(axes, unbiased=False)

        handles.append(layers[name].register_forward_pre_hook(hook))

    probe = copy.deepcopy(client)
    layers = {name: m for name, m in probe.named_modules() if isinstance(m, BATCHNORM)}
    if not layers:
        return None
    for name in layers:
        record(name)
    # What a random model draws here must not change its training: the update is the same whoever looks at it.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        probe(x.clone())
    return found


def check_batch(model: nn.Module, x: Tensor, y: Tensor, num_classes: int | None) -> int:
    """Raise one ValueError with everything that is wrong with the batch; return the number of classes."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise TypeError(f"x and y: expected tensors, got {type(x).__name__} and {type(y).__name__}")
    problems = []
    if x.dim() < 2 or x.shape[0] < 1:
        problems.append(f"x: expected (examples, ...) with at least one example, got {tuple(x.shape)}")
    if not x.is_floating_point():
        problems.append(f"x: expected floating point, got {x.dtype}; convert with x.float()")
    elif not bool(torch.isfinite(x).all()):
        problems.append("x: has NaN or infinite values")
    if y.dtype != torch.int64 or y.dim() != 1 or y.shape[0] != x.shape[0]:
        problems.append(f"y: expected int64 class numbers of shape ({x.shape[0]},), got {y.dtype} {tuple(y.shape)}")
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        problems.append("model: has no trainable parameter, so there is no update")
    elif x.is_floating_point() and parameter.dtype != x.dtype:
        problems.append(f"x is {x.dtype} but the model is {parameter.dtype}; convert one of them")
    if problems:
        raise ValueError("not a usable batch:\n  - " + "\n  - ".join(problems))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            logits = client_copy(model, "eval")(x[:1].clone())
        except RuntimeError as error:
            raise ValueError(f"the model cannot read inputs of shape {tuple(x.shape[1:])}: {error}") from error
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"model: expected logits of shape (examples, classes), got {got}")
    outputs = int(logits.shape[1])
    if num_classes is not None and num_classes != outputs:
        raise ValueError(f"num_classes is {num_classes} but the model has {outputs} outputs")
    classes = label_count(outputs)
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise ValueError(f"y: labels must lie in 0..{classes - 1} for this model, got {int(y.min())}..{int(y.max())}")
    return outputs
