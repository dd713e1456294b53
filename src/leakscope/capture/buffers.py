"""What the running statistics of BatchNorm layers tell of a client that sends them, as most do.

One training step moves them by r' = (1 - m) r + m s, with s the mean of the client's batch, or its variance divided by
n - 1 instead of n. From r, r' and m the statistics of the private batch itself follow exactly. Several steps leave a
blend of as many batches, of which no single one can be told; then nothing is claimed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakscope.capture.sign import COUNTER
from leakscope.contracts.protocol import BATCHNORM

BatchNormLayer = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
#: A recovered variance may be this much below zero, relative to the largest, by rounding alone.
ROUNDING = 1e-4


@dataclass(frozen=True, eq=False)
class RunningMovement:
    """What buffers say: whether they moved, the steps that were counted, and the statistics of the batch."""

    moved: bool | None
    steps: int | None = None
    statistics: dict[str, Tensor] | None = None
    note: str = ""


def batch_statistic(before: Tensor, after: Tensor, momentum: float) -> Tensor:
    """The statistic that moved ``before`` to ``after`` in one step.

    >>> batch_statistic(torch.tensor([2.0]), torch.tensor([2.5]), 0.5).item()
    3.0
    """
    return (after.double() - (1 - momentum) * before.double()) / momentum


def biased(variance: Tensor, values: int) -> Tensor:
    """The variance with n in the denominator, which BatchNorm normalises by, from the one with n - 1.

    >>> biased(torch.tensor([2.0]), 4).item()
    1.5
    """
    return variance * (values - 1) / values


def counted_steps(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each layer's counter of steps went."""
    names = [name for name in after if name.endswith(COUNTER) and name in before]
    return {name: float(after[name].double() - before[name].double()) for name in names}


def running_movement(
    model: nn.Module,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    input_shape: tuple[int, ...],
    batch: int | None,
    told_steps: int | None,
) -> RunningMovement:
    """What the buffers tell; ``batch`` examples are in a step and ``told_steps`` are as many as somebody says."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BATCHNORM)}
    pairs = [(name, kind) for name in layers for kind in ("running_mean", "running_var")]
    known = [f"{name}.{kind}" for name, kind in pairs if f"{name}.{kind}" in before and f"{name}.{kind}" in after]
    if not layers:
        return RunningMovement(None)
    if not known:
        note = "the BatchNorm layers' running statistics were not sent; train mode is assumed"
        return RunningMovement(None, note=note)
    if all(torch.equal(before[name].double(), after[name].double()) for name in known):
        return RunningMovement(False, note="the running statistics did not move: BatchNorm was in eval mode")
    counts = set(counted_steps(before, after).values())
    if len(counts) > 1 or any(not count.is_integer() for count in counts):
        words = "the BatchNorm layers' counters disagree or are no whole numbers: a layer that runs twice, or a mean"
        return RunningMovement(True, note=f"{words} of clients. Statistics of one batch cannot be told")
    steps = int(counts.pop()) if counts else told_steps
    if steps is None:
        return RunningMovement(True, note="the running statistics moved in an unknown number of steps")
    if steps != 1:
        words = f"the running statistics are a blend of {steps} steps: those of no single batch can be told"
        return RunningMovement(True, steps, note=words)
    if len(known) < len(pairs):
        return RunningMovement(True, steps, note="the running statistics of some BatchNorm layers were not sent")
    if batch is None:
        return RunningMovement(True, steps, note="the number of examples is not known, which the variances need")
    statistics, problem = _of_one_step(layers, model, before, after, input_shape, batch)
    if statistics is None:
        return RunningMovement(True, steps, note=problem)
    words = "one step moved the running statistics, so that those of the private batch are known"
    return RunningMovement(True, steps, statistics, words)


def _of_one_step(
    layers: Mapping[str, BatchNormLayer],
    model: nn.Module,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    input_shape: tuple[int, ...],
    batch: int,
) -> tuple[dict[str, Tensor] | None, str]:
    values = _values_per_channel(model, input_shape, batch)
    like = next(model.parameters())
    statistics: dict[str, Tensor] = {}
    for name, layer in layers.items():
        momentum = layer.momentum
        if momentum is None:  # a plain average over all steps so far
            if f"{name}.{COUNTER}" not in after:
                return None, f"{name}: averages over all steps, and its counter of them was not sent"
            momentum = 1 / max(1.0, float(after[f"{name}.{COUNTER}"]))
        if not momentum > 0:
            return None, f"{name}: with a momentum of {momentum:g} nothing moves, yet the running statistics did"
        mean, variance = (
            batch_statistic(before[f"{name}.{kind}"], after[f"{name}.{kind}"], momentum)
            for kind in ("running_mean", "running_var")
        )
        if float(variance.min()) < -ROUNDING * float(variance.abs().max()):
            return None, f"{name}: a batch of negative variance would follow: the momentum is not {momentum:g}"
        if values.get(name, 0) < 2:
            return None, f"{name}: how many values a channel has is not known"
        statistics[f"{name}.mean"] = mean.to(like)
        statistics[f"{name}.var"] = biased(variance.clamp(min=0), values[name]).to(like)
    return statistics, ""


def _values_per_channel(model: nn.Module, input_shape: tuple[int, ...], batch: int) -> dict[str, int]:
    """How many values a channel of each BatchNorm layer has for so many examples; none where the model does not run."""
    twin, sizes = copy.deepcopy(model).eval(), {}

    def measuring(name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def measured(x: Tensor) -> Tensor:
            sizes[name] = batch * x[0, 0].numel()
            return forward(x)

        return measured

    for name, module in twin.named_modules():
        if isinstance(module, BATCHNORM):
            module.forward = measuring(name, module.forward)  # type: ignore[assignment,method-assign]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            twin(torch.zeros((2, *input_shape)).to(next(model.parameters())))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return {}
    return sizes
