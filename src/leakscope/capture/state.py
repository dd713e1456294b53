"""Read state dicts with wrappers' names and buffers, and lists of arrays in some order.

Everything that does not fit the model is listed at once. Nothing is guessed: of a list of arrays the count and the
shapes must say which order it has.

One training step moves BatchNorm's running statistics by r' = (1 - m) r + m s, with s the mean of the client's batch,
or its variance divided by n - 1 instead of n. From r, r' and m the statistics of the private batch follow exactly.
Several steps leave a blend of as many batches; then nothing is claimed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leakscope.capture.sign import COUNTER
from leakscope.contracts.checks import brief
from leakscope.contracts.errors import UserError
from leakscope.contracts.files import dense
from leakscope.contracts.protocol import BATCHNORM
from leakscope.models.weights import WRAPPERS
from leakscope.network.recorder import record_layers

_PLACE = re.compile(r"(?:arr_)?(\d+)")
BatchNormLayer = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
#: A recovered variance may be this much below zero, relative to the largest, by rounding alone.
ROUNDING = 1e-4


@dataclass(frozen=True, eq=False)
class CapturedState:
    """Hold tensors by the model's own names, in float64 where they are floats; ``notes`` say how they were read."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    notes: tuple[str, ...] = ()


def read_state(
    what: str, content: Any, model: nn.Module, *, trained_only: bool = False, finite: bool = True
) -> tuple[CapturedState, list[str]]:
    """Read the state in ``content``, a mapping of names or a list in order, and list what is wrong with it.

    ``trained_only``: parameters that are not trained may be missing, as in an update. ``finite``: NaN is wrong.
    """
    if isinstance(content, Mapping):
        named, notes = plain_names(content, model)
        content = content if set(named) & set(model.state_dict()) else in_places(content)
    if isinstance(content, Mapping):
        problems: list[str] = []
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        names, note, problems = order_of([_shape(value) for value in content], model)
        named, notes = dict(zip(names, content, strict=False)), (note,) if note else ()
    else:
        kinds = "a mapping of names to tensors, or a list of arrays"
        return CapturedState({}, {}), [f"{what}: expected {kinds}, got {type(content).__name__}"]
    if problems:
        return CapturedState({}, {}), [f"{what}: {line}" for line in problems]
    state, problems = _checked(named, model, trained_only, finite)
    state = replace(state, notes=tuple(f"{what}: {note}" for note in notes))
    return state, [f"{what}: {line}" for line in problems]


def in_places(named: Mapping[str, Any]) -> Mapping[str, Any] | list[Any]:
    """List arrays called arr_0, arr_1 ... (or 0, 1 ...) in that order; return others by name.

    >>> in_places({"arr_10": "c", "arr_0": "a", "arr_2": "b"}), in_places({"fc.weight": "a"})
    (['a', 'b', 'c'], {'fc.weight': 'a'})
    """
    places = {name: int(match[1]) for name in named if (match := _PLACE.fullmatch(str(name)))}
    if not named or len(places) < len(named):
        return named
    return [named[name] for name in sorted(places, key=places.__getitem__)]


def plain_names(content: Mapping[Any, Any], model: nn.Module) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return names as the model has them, and which wrapper's prefix was taken away.

    >>> plain_names({"_module.weight": 1, "_module.bias": 2}, nn.Linear(1, 1))
    ({'weight': 1, 'bias': 2}, ("names begin with '_module.', as Opacus makes them",))
    """
    named, notes = {str(name): value for name, value in content.items()}, []
    own = set(model.state_dict())
    while named and not own & set(named):
        prefix = next((one for one in WRAPPERS if all(name.startswith(one) for name in named)), None)
        if prefix is None:
            break
        named = {name.removeprefix(prefix): value for name, value in named.items()}
        notes.append(f"names begin with {prefix!r}, as {WRAPPERS[prefix]} makes them")
    return named, tuple(notes)


def order_of(shapes: Sequence[tuple[int, ...] | None], model: nn.Module) -> tuple[list[str], str, list[str]]:
    """Return the names of arrays that come in an order, which order that is, and why none fits.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> order_of([(3, 2), (3,), (3,), (3,)], net)[1]
    '4 arrays are the parameters in their order'
    >>> order_of([(3, 2), (3,), (3,), (3,), (3,), (3,), ()], net)[1]
    '7 arrays are the state dict in its order, buffers included'
    >>> order_of([(2, 3), (3,), (3,), (3,)], net)[2]
    ['array 0 (0.weight): expected shape (3, 2), got (2, 3)']
    """
    state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    orders = {
        "the state dict in its order without the batch counters": [n for n in state if not n.endswith(COUNTER)],
        "the state dict in its order, buffers included": list(state),
        "the trained parameters in their order": [name for name, value in parameters.items() if value.requires_grad],
        "the parameters in their order": list(parameters),
    }
    distinct = {tuple(names): order for order, names in orders.items()}  # of equal ones the last names it
    same_count = {names: order for names, order in distinct.items() if len(names) == len(shapes)}
    if not same_count:
        counts = ", ".join(f"{len(names)} ({order})" for names, order in reversed(distinct.items()))
        return [], "", [f"expected {counts}, got {len(shapes)} arrays"]
    wrong = {
        names: [
            f"array {place} ({name}): expected shape {state[name]}, got {'no array' if shape is None else shape}"
            for place, (name, shape) in enumerate(zip(names, shapes, strict=True))
            if shape != state[name] and not (name.endswith(COUNTER) and shape == (1,))
        ]
        for names in same_count
    }
    fitting = [names for names, lines in wrong.items() if not lines]
    if len(fitting) > 1:
        return [], "", [f"{len(shapes)} arrays fit more than one order; pass a mapping of names to arrays"]
    if not fitting:
        return [], "", min(wrong.values(), key=len)
    return list(fitting[0]), f"{len(shapes)} arrays are {same_count[fitting[0]]}", []


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Tensor) and value.is_nested:
        return None
    shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
    return None if shape is None else tuple(shape)


def _checked(
    named: Mapping[str, Any], model: nn.Module, trained_only: bool, finite: bool
) -> tuple[CapturedState, list[str]]:
    parameters = dict(model.named_parameters())
    state = model.state_dict()
    needed = [name for name, value in parameters.items() if value.requires_grad or not trained_only]
    problems = [f"missing: {name} {tuple(parameters[name].shape)}" for name in needed if name not in named]
    problems += [f"extra: {name}, which the model does not have" for name in named if name not in state]
    kept: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, value in named.items():
        if name not in state:
            continue
        tensor, problem = _tensor(value, state[name], finite)
        if tensor is None:
            problems.append(f"{name}: {problem}")
        elif name in parameters:
            kept[0][name] = tensor
        elif state[name].data_ptr() not in {p.data_ptr() for p in parameters.values()}:  # a tied weight's other name
            kept[1][name] = tensor
    return CapturedState(*kept), problems


def _tensor(value: Any, expected: Tensor, finite: bool) -> tuple[Tensor | None, str]:
    try:
        tensor = dense("it", value.detach()).cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except UserError as error:
        return None, str(error)
    except (TypeError, ValueError, RuntimeError):
        return None, f"expected numbers, got {brief(value)}"
    if expected.dim() == 0 and tensor.shape == (1,):
        tensor = tensor.reshape(())
    if tensor.shape != expected.shape:
        return None, f"expected shape {tuple(expected.shape)}, got {tuple(tensor.shape)}"
    if tensor.is_complex() or (expected.is_floating_point() and not tensor.is_floating_point()):
        return None, f"expected floats such as {expected.dtype}, got {tensor.dtype}"
    broken = int((~torch.isfinite(tensor)).sum()) if finite else 0
    if broken:
        return None, f"{broken} of {tensor.numel()} entries are NaN or infinite"
    return tensor.double(), ""


@dataclass(frozen=True, eq=False)
class RunningMovement:
    """Say whether buffers moved, how many steps they counted, and the statistics of the batch."""

    moved: bool | None
    steps: int | None = None
    statistics: dict[str, Tensor] | None = None
    note: str = ""


def counted_steps(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
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
    """Read the buffers; ``batch`` examples are in a step and ``told_steps`` are as many as somebody says."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BATCHNORM)}
    pairs = [(name, kind) for name in layers for kind in ("running_mean", "running_var")]
    known = [f"{name}.{kind}" for name, kind in pairs if f"{name}.{kind}" in before and f"{name}.{kind}" in after]
    if not layers:
        return RunningMovement(None)
    if not known:
        return RunningMovement(
            None, note="the BatchNorm layers' running statistics were not sent; train mode is assumed"
        )
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
            (after[f"{name}.{kind}"].double() - (1 - momentum) * before[f"{name}.{kind}"].double()) / momentum
            for kind in ("running_mean", "running_var")
        )
        if float(variance.min()) < -ROUNDING * float(variance.abs().max()):
            return None, f"{name}: a batch of negative variance would follow: the momentum is not {momentum:g}"
        if values.get(name, 0) < 2:
            return None, f"{name}: how many values a channel has is not known"
        statistics[f"{name}.mean"] = mean.to(like)
        # BatchNorm normalises by the variance with n in the denominator, and keeps the one with n - 1.
        statistics[f"{name}.var"] = (variance.clamp(min=0) * (values[name] - 1) / values[name]).to(like)
    return statistics, ""


def _values_per_channel(model: nn.Module, input_shape: tuple[int, ...], batch: int) -> dict[str, int]:
    """Count values a channel of each BatchNorm layer for so many examples; none where the model does not run."""
    blank = torch.zeros((2, *input_shape)).to(next(model.parameters()))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            record = record_layers(model, blank, lambda _, module: isinstance(module, BATCHNORM), evaluate=True)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return {}
    return {call.name: batch * call.inputs[0, 0].numel() for call in record.calls}
