"""What a client minimises, how its targets look, and what of them can be searched and compared."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import UserError
from leakscope.contracts.registry import Entry, Registry, import_object
from leakscope.contracts.settings import Described, setting

Reduction = Literal["mean", "sum"]
Shape = tuple[int, ...]


def outputs_of(answer: Any) -> Tensor:
    """The tensor in what a model returns: itself, its ``logits``, or the first tensor of a tuple or a mapping.

    >>> outputs_of({"logits": torch.zeros(1, 3), "hidden": torch.zeros(1, 8)}).shape
    torch.Size([1, 3])
    """
    if isinstance(answer, Tensor):
        return answer
    logits = answer.get("logits") if isinstance(answer, Mapping) else getattr(answer, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    for part in answer.values() if isinstance(answer, Mapping) else answer if isinstance(answer, list | tuple) else ():
        if isinstance(part, Tensor):
            return part
    raise UserError(f"model: expected a tensor, or something with a tensor called logits, got {type(answer).__name__}")


@dataclass(frozen=True, kw_only=True)
class Task(Described, ABC):
    """The contract of a task. ``outputs`` are (examples, ...), targets what the client holds for them."""

    #: Whether targets are class numbers of one label an example, which the rules of ``leakscope.labels`` read.
    has_classes: ClassVar[bool] = False
    #: Whether targets can be searched along with the inputs.
    searchable: ClassVar[bool] = True
    #: Whether a guessed target is right or wrong; else it is near or far.
    discrete: ClassVar[bool] = True

    @abstractmethod
    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example (B,)."""

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        each = self.each(outputs, targets)
        return each.mean() if reduction == "mean" else each.sum()

    @abstractmethod
    def problems_of(self, targets: Tensor, examples: int, outputs: Shape) -> list[str]:
        """What is wrong with the targets of a batch for a model with outputs of this shape (without the batch)."""

    def counts(self, targets: Tensor, outputs: Shape) -> Tensor | None:
        """How many examples each class has; None where there are no classes."""
        return None

    def examples(self, count: int, outputs: Shape) -> Tensor:
        """Return targets of a batch that stands for any, for theory."""
        return self.decode(torch.linspace(-1, 1, count * math.prod(outputs)).reshape(count, *outputs))

    def from_search(self, free: Tensor) -> Tensor:
        """Targets from free numbers of the outputs' shape, differentiable."""
        return free

    def decode(self, free: Tensor) -> Tensor:
        """The targets that such numbers stand for, as a client would hold them."""
        return free

    def right(self, targets: Tensor, guess: Tensor) -> Tensor:
        """For each example the share of its targets that the guess has right; else how far it is, root-mean-square."""
        if self.discrete:
            return (targets == guess).double().reshape(len(targets), -1).mean(1)
        gap = targets.double().reshape(len(targets), -1) - guess.double().reshape(len(targets), -1)
        return gap.square().mean(1).sqrt()


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Cross-entropy; targets are class numbers (B,), or a probability for each class (B, classes).

    A model with one output means two classes, for a softmax over one output is constant: it is the logit of class 1.

    >>> two, one = torch.tensor([[0.0, 3.0]]), torch.tensor([[3.0]])
    >>> label, task = torch.tensor([1]), Classification()
    >>> math.isclose(task.loss(two, label), task.loss(one, label), rel_tol=1e-6)
    True
    """

    has_classes: ClassVar[bool] = True

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape[-1] != 1:
            return nn.functional.cross_entropy(outputs, targets, reduction="none")
        logit = outputs.flatten()
        # The same as binary cross-entropy, in a form that can be differentiated twice in forward mode too.
        return nn.functional.softplus(logit) - targets.flatten().to(logit) * logit

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        if outputs.shape[-1] != 1:
            return nn.functional.cross_entropy(outputs, targets, reduction=reduction)
        return super().loss(outputs, targets, reduction)

    def problems_of(self, targets: Tensor, examples: int, outputs: Shape) -> list[str]:
        if len(outputs) != 1:
            return [f"model: expected logits of shape (examples, classes), got (examples, {_dims(outputs)})"]
        if targets.is_floating_point():
            rows = targets.shape == (examples, *outputs) and bool((targets >= 0).all())
            if rows and bool(((targets.sum(1) - 1).abs() < 1e-4).all()):
                return []
            wanted = f"class numbers, or probabilities ({examples}, {outputs[0]}) that add up to 1"
            return [f"y: expected {wanted}, got {_told(targets)}"]
        if targets.dtype != torch.int64 or targets.shape != (examples,):
            return [f"y: expected int64 class numbers of shape ({examples},), got {_told(targets)}"]
        return _class_problems(targets, label_count(outputs[0]))

    def counts(self, targets: Tensor, outputs: Shape) -> Tensor | None:
        return None if targets.is_floating_point() else torch.bincount(targets, minlength=outputs[0])

    def examples(self, count: int, outputs: Shape) -> Tensor:
        return torch.arange(count) % label_count(outputs[0])

    def from_search(self, free: Tensor) -> Tensor:
        return torch.sigmoid(free) if free.shape[-1] == 1 else torch.softmax(free, -1)

    def decode(self, free: Tensor) -> Tensor:
        return (free[:, 0] > 0).long() if free.shape[-1] == 1 else free.argmax(1)

    def right(self, targets: Tensor, guess: Tensor) -> Tensor:
        hard = [t.argmax(1) if t.is_floating_point() and t.dim() > 1 else t for t in (targets, guess)]
        return (hard[0] == hard[1]).double()


@dataclass(frozen=True, kw_only=True)
class MultiLabel(Task):
    """Binary cross-entropy of each output, averaged; targets are (B, labels) of 0 and 1.

    >>> MultiLabel().right(torch.tensor([[1.0, 0.0, 1.0, 0.0]]), torch.tensor([[1.0, 1.0, 1.0, 0.0]])).tolist()
    [0.75]
    """

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        flat, wanted = outputs.reshape(len(outputs), -1), targets.reshape(len(outputs), -1).to(outputs)
        return (nn.functional.softplus(flat) - wanted * flat).mean(1)

    def problems_of(self, targets: Tensor, examples: int, outputs: Shape) -> list[str]:
        problems = _shape_problems(targets, examples, outputs)
        if not problems and not bool(((targets >= 0) & (targets <= 1)).all()):
            problems.append(
                f"y: expected numbers from 0 to 1, got {float(targets.min()):g} to {float(targets.max()):g}"
            )
        return problems

    def from_search(self, free: Tensor) -> Tensor:
        return torch.sigmoid(free)

    def decode(self, free: Tensor) -> Tensor:
        return (free > 0).to(free)

    def right(self, targets: Tensor, guess: Tensor) -> Tensor:
        return super().right(targets > 0.5, guess > 0.5)


@dataclass(frozen=True, kw_only=True)
class Binary(MultiLabel):
    """Binary cross-entropy of one output; targets are 0 or 1, (B,) or (B, 1)."""


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """The mean over outputs of a distance from the targets, (B, outputs) or (B,) for one output.

    >>> Regression().loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 3.0])).item()
    0.5
    """

    discrete: ClassVar[bool] = False

    distance: Literal["squared", "absolute", "huber"] = setting("squared", "How far an output is from its target.")

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        gap = outputs.reshape(len(outputs), -1) - targets.reshape(len(outputs), -1).to(outputs)
        huber = partial(nn.functional.huber_loss, target=torch.zeros_like(gap), reduction="none")
        distances: dict[str, Any] = {"squared": torch.square, "absolute": torch.abs, "huber": huber}
        return torch.mean(distances[self.distance](gap), 1)

    def problems_of(self, targets: Tensor, examples: int, outputs: Shape) -> list[str]:
        return _shape_problems(targets, examples, outputs)


@dataclass(frozen=True, kw_only=True)
class PerPosition(Task):
    """Cross-entropy averaged over positions; outputs are (B, positions..., classes), targets class numbers."""

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wanted = targets.reshape(-1, outputs.shape[-1]) if targets.is_floating_point() else targets.reshape(-1)
        losses = nn.functional.cross_entropy(outputs.flatten(0, -2), wanted, reduction="none")
        return losses.reshape(len(outputs), -1).mean(1)

    def problems_of(self, targets: Tensor, examples: int, outputs: Shape) -> list[str]:
        if len(outputs) < 2:
            wanted = "(examples, positions, classes)"
            return [f"model: expected outputs of shape {wanted}, got (examples, {_dims(outputs)})"]
        if targets.dtype != torch.int64 or tuple(targets.shape) != (examples, *outputs[:-1]):
            return [f"y: expected int64 class numbers of shape {(examples, *outputs[:-1])}, got {_told(targets)}"]
        return _class_problems(targets, outputs[-1])

    def examples(self, count: int, outputs: Shape) -> Tensor:
        return (torch.arange(count * math.prod(outputs[:-1])) % outputs[-1]).reshape(count, *outputs[:-1])

    def from_search(self, free: Tensor) -> Tensor:
        return torch.softmax(free, -1)

    def decode(self, free: Tensor) -> Tensor:
        return free.argmax(-1)


@dataclass(frozen=True, kw_only=True)
class CustomLoss(Task):
    """A user's own ``loss(outputs, targets)``, the mean over the batch; ``name`` identifies it in rows and keys.

    ``targets`` "values" are numbers of the outputs' shape, which a search may find; attacks must be granted "given".
    """

    discrete: ClassVar[bool] = False

    name: str = setting("", "package.module:function.")
    targets: Literal["values", "given"] = setting("values", "Whether attacks may search the targets as numbers.")
    function: Callable[[Tensor, Tensor], Tensor] | None = field(default=None, repr=False, compare=False)

    def problems(self) -> list[str]:
        return [] if callable(self.function) else [f"name: expected package.module:function, got {self.name!r}"]

    @property
    def searchable(self) -> bool:  # type: ignore[override]
        return self.targets == "values"

    @classmethod
    def load(cls, name: str, **options: Any) -> Self:
        return cls(name=name, function=import_object("task", name), **options)

    def __reduce__(self) -> tuple[Any, ...]:
        if ":" in self.name:  # a function of a script cannot be sent to a worker; its name can
            return partial(CustomLoss.load, targets=self.targets), (self.name,)
        return super().__reduce__()  # type: ignore[return-value]

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        assert self.function is not None
        loss = self.function(outputs, targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"loss {self.name!r}: expected one number, the mean over the batch, got {got}")
        return loss if reduction == "mean" else loss * len(outputs)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([self.loss(outputs[n : n + 1], targets[n : n + 1]) for n in range(len(outputs))])

    def problems_of(self, targets: Tensor, examples: int, outputs: Shape) -> list[str]:
        if self.targets == "values":
            return _shape_problems(targets, examples, outputs)
        wrong = f"y: expected one target for each of {examples} examples, got {_told(targets)}"
        return [] if len(targets) == examples else [wrong]


TASKS: Registry[Entry] = Registry(
    "task",
    (
        Entry("classification", Classification, "one class an example; hard or soft labels, cross-entropy"),
        Entry("binary", Binary, "yes or no, one output"),
        Entry("multi-label", MultiLabel, "several labels an example, binary cross-entropy of each"),
        Entry("regression", Regression, "numbers; squared, absolute or Huber distance"),
        Entry("per-position", PerPosition, "one class at each position of a sequence or picture"),
    ),
    Task,
)


def label_count(outputs: int) -> int:
    """How many classes a model with so many outputs tells apart.

    >>> label_count(10), label_count(1)
    (10, 2)
    """
    return 2 if outputs == 1 else outputs


def _class_problems(targets: Tensor, classes: int) -> list[str]:
    low, high = int(targets.min()), int(targets.max())
    wrong = f"y: labels must lie in 0..{classes - 1} for this model, got {low}..{high}"
    return [] if low >= 0 and high < classes else [wrong]


def _shape_problems(targets: Tensor, examples: int, outputs: Shape) -> list[str]:
    if targets.numel() == examples * math.prod(outputs) and len(targets) == examples:
        return [] if bool(torch.isfinite(targets.double()).all()) else ["y: has NaN or infinite values"]
    return [f"y: expected numbers of shape ({examples}, {_dims(outputs)}), got {_told(targets)}"]


def _told(targets: Tensor) -> str:
    return f"{targets.dtype} {tuple(targets.shape)}"


def _dims(shape: Shape) -> str:
    return ", ".join(map(str, shape))
