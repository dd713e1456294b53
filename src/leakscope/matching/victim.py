"""A differentiable view of the observed model: what update would a candidate batch have caused?"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.func import functional_call, grad

from leakscope.loss import client_loss
from leakscope.observation import Observation, Reduction

Tensors = dict[str, Tensor]
_BATCHNORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Known(NamedTuple):
    """The tensors of a victim. Passed to every call, so that a compiled step takes them as inputs.

    ``weights`` are those the update speaks of, ``fixed`` all others (frozen parameters and buffers), ``movement`` how
    far the client moved the weights, before minus after; empty where the client sent a gradient.
    """

    weights: Tensors
    fixed: Tensors
    movement: Tensors


@dataclass(frozen=True, eq=False)
class Victim:
    """The model as pure functions of its weights; made from an observation, never changing it."""

    model: nn.Module = field(repr=False)
    known: Known = field(repr=False)
    buffers: frozenset[str] = field(repr=False)
    reduction: Reduction
    batchnorm_targets: Mapping[str, tuple[Tensor, Tensor]] = field(repr=False)
    _tape: dict[str, Tensor] = field(repr=False)

    @classmethod
    def of(cls, observation: Observation, record: Iterable[str] = ()) -> Victim:
        """The victim of the first message; the inputs of the layers named in ``record`` are recorded too."""
        model = copy.deepcopy(observation.model).eval()
        message = observation.messages[0]
        tape: dict[str, Tensor] = {}
        targets: dict[str, tuple[Tensor, Tensor]] = {}
        for name, module in model.named_modules():
            if not isinstance(module, _BATCHNORM):
                continue
            if message.batchnorm_statistics is not None:
                statistics = message.batchnorm_statistics
                targets[name] = (statistics[f"{name}.mean"], statistics[f"{name}.var"])
            elif module.running_mean is not None and module.running_var is not None:
                targets[name] = (module.running_mean.clone(), module.running_var.clone())
            if name in targets:
                # The hook lives on this private copy only, so it needs no removal and cannot pile up.
                module.register_forward_pre_hook(_recorder(tape, name))
            if observation.batchnorm == "train":
                # Batch statistics without the in-place update of the running ones, which torch.func forbids.
                module.train()
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
        for name in record:
            model.get_submodule(name).register_forward_pre_hook(_recorder(tape, name))
        everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        weights = {name: everything[name].detach() for name in message.update}
        fixed = {name: value.detach() for name, value in everything.items() if name not in weights}
        buffers = frozenset(name for name, _ in model.named_buffers())
        movement = dict(message.update) if message.kind == "weight_delta" else {}
        known = Known(weights, fixed, movement)
        return cls(model, known, buffers, observation.reduction, targets, tape)

    def loss(
        self, weights: Tensors, fixed: Tensors, x: Tensor, targets: Tensor, back_signal: Tensor | None = None
    ) -> tuple[Tensor, Tensors]:
        """The client's loss (``targets``: class numbers or probabilities), and the recorded layers' inputs.

        With ``back_signal`` it is <back_signal, logits> instead, whose derivative by the logits is known.
        """
        self._tape.clear()
        # Copies of what a forward pass may change in place: counters and other buffers, and the input.
        fresh = {name: value.clone() if name in self.buffers else value for name, value in fixed.items()}
        logits = functional_call(self.model, {**weights, **fresh}, (x.clone(),))
        recorded = dict(self._tape)
        self._tape.clear()
        if back_signal is not None:
            return (logits * back_signal).sum(), recorded
        return client_loss(logits, targets, self.reduction), recorded

    def gradient(
        self, weights: Tensors, fixed: Tensors, x: Tensor, targets: Tensor, back_signal: Tensor | None = None
    ) -> tuple[Tensors, Tensors]:
        """The gradient a client would send for this batch, and the recorded layers' inputs."""
        return grad(self.loss, has_aux=True)(weights, fixed, x, targets, back_signal)


def _recorder(tape: dict[str, Tensor], name: str):  # type: ignore[no-untyped-def]
    def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tape[name] = inputs[0]

    return hook
