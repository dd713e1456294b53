"""Set hooks on private copies, or for a while, to record, tap or cut what layers receive and give."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import UserError
from leakscope.contracts.protocol import BATCHNORM
from leakscope.contracts.task import outputs_of

#: Which layers to record, by name and module.
Choice = Callable[[str, nn.Module], bool]


@dataclass(frozen=True, eq=False)
class Call:
    """One execution of a layer of the caller's model; ``inputs`` is the first tensor that it was given."""

    name: str
    module: nn.Module
    inputs: Tensor
    output: Any


@dataclass(frozen=True, eq=False)
class Record:
    """The chosen layers in the order in which they ran, a layer that ran twice twice, and the model's outputs."""

    calls: tuple[Call, ...] = field(repr=False)
    outputs: Tensor = field(repr=False)

    def of(self, name: str) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.name == name)


def is_layer(_name: str, module: nn.Module) -> bool:
    """Tell whether it is linear, or holds parameters while no child of it does (a container is no layer)."""
    inner = any(next(child.parameters(), None) is not None for child in module.children())
    own = next(module.parameters(recurse=False), None) is not None
    return isinstance(module, nn.Linear) or (own and not inner)


def twin_of(model: nn.Module) -> nn.Module:
    """Copy modules and buffers, which hooks, modes and BatchNorm change; share the parameters, which a pass only reads.

    >>> net = nn.BatchNorm1d(2)
    >>> twin = twin_of(net)
    >>> twin.weight is net.weight, twin.running_mean is net.running_mean
    (True, False)
    """
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def record_layers(
    model: nn.Module, x: Tensor, choice: Choice = is_layer, *, evaluate: bool = False, differentiable: bool = False
) -> Record:
    """Run a copy of ``model`` on ``x`` in its own mode or evaluated, and record layers; without gradients if not asked.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [(call.name, tuple(call.output.shape)) for call in record_layers(net, torch.zeros(1, 2, 2)).calls]
    [('1', (1, 3)), ('3', (1, 2))]
    """
    twin = twin_of(model)
    calls: list[Call] = []

    def record(name: str, original: nn.Module, _module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        first = next((value for value in inputs if isinstance(value, Tensor)), torch.empty(0))
        calls.append(Call(name, original, first, output))

    for (name, module), original in zip(twin.named_modules(), model.modules(), strict=True):
        if choice(name, module):
            module.register_forward_hook(partial(record, name, original))
    with torch.set_grad_enabled(differentiable):
        outputs = outputs_of((twin.eval() if evaluate else twin)(x.clone()))
    return Record(tuple(calls), outputs)


def probe(model: nn.Module, x: Tensor, choice: Choice = is_layer) -> Record:
    """Run :func:`record_layers` in evaluation mode; raise a ValueError that names a shape that does not fit."""
    try:
        return record_layers(model, x, choice, evaluate=True)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"the model cannot read an input of shape {tuple(x.shape[1:])}: {error}. "
            "Pass the shape of one example without the batch."
        ) from error


def probe_input(model: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Make an input of zeros; two examples where BatchNorm needs a batch to normalise."""
    norms = (*BATCHNORM, nn.SyncBatchNorm)
    needs_batch = any(isinstance(m, norms) and m.running_mean is None for m in model.modules())
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    return torch.zeros((2 if needs_batch else 1, *input_shape), device=like.device, dtype=like.dtype)


def tap(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return a tape that holds, after each pass of a private copy, what the layers received, differentiable."""
    tape: dict[str, Tensor] = {}

    def record(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        tape[name] = inputs[0]

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(partial(record, name))
    return tape


def change_input(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Let the layer, of a private copy, read ``change`` of its first input from now on."""
    layer.register_forward_pre_hook(partial(_changed_input, change))


def change_output(layer: nn.Module, change: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
    """Let the layer, of a private copy, give ``change(layer, first input, output)`` from now on."""
    layer.register_forward_hook(partial(_changed_output, change))


def _changed_input(change: Callable[[Tensor], Tensor], _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return change(inputs[0]), *inputs[1:]


def _changed_output(
    change: Callable[[nn.Module, Tensor, Tensor], Tensor], module: nn.Module, inputs: tuple[Any, ...], output: Tensor
) -> Tensor:
    return change(module, inputs[0], output)


class _Reached(Exception):
    """The layer was reached, with its input as the argument; nothing behind it need run."""


def inputs_of(layer: nn.Module, model: nn.Module, x: Tensor) -> Tensor:
    """Compute ``model`` of ``x`` up to ``layer``, differentiable; nothing behind the layer is run."""

    def stop(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _Reached(inputs[0])

    handle = layer.register_forward_pre_hook(stop)
    try:
        model(x)
    except _Reached as reached:
        inputs: Tensor = reached.args[0]
        return inputs
    finally:
        handle.remove()
    raise UserError("inputs_of: expected a layer that the model runs, got one that it does not")


@contextmanager
def cut_at(layers: Sequence[nn.Module]) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """Give input and output of each layer; differentiation ends at the output, so nothing before it is kept."""
    cuts: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def cut(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if output.dim() != 2 or layer in cuts:
            got = "used twice" if layer in cuts else f"with outputs {tuple(output.shape)}"
            raise UserError(f"model: expected first dense layers that read each sample once, got one {got}")
        cuts[layer] = (inputs[0], output.detach().requires_grad_())
        return cuts[layer][1]

    handles = [layer.register_forward_hook(cut) for layer in layers]
    try:
        yield cuts
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def output_replaced(layer: nn.Module, output: Tensor) -> Iterator[None]:
    """Let ``layer`` give a copy of ``output`` whatever it receives, so that a pass goes on from there."""
    handle = layer.register_forward_hook(lambda _module, _inputs, _output: output.clone())
    try:
        yield
    finally:
        handle.remove()
