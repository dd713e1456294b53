"""Find what a model is made of by running it: its layers in order of execution, the head, and first linear layers."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import UserError
from leakscope.contracts.task import Classification, Task, outputs_of
from leakscope.models.split import Share, VerticalModel
from leakscope.network.recorder import Call, output_replaced, probe, probe_input

#: Relative difference up to which float32 outputs are those of a softmax: rounding leaves 1e-6.
SAME = 1e-5


@dataclass(frozen=True)
class Layer:
    """A layer with parameters; ``reads_input``: it received exactly the input's values in order, flattened at most."""

    name: str
    module: nn.Module
    reads_input: bool
    trainable: bool

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @property
    def size(self) -> str:
        module = self.module
        if isinstance(module, nn.Linear):
            return f"{module.in_features} -> {module.out_features}"
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            kernel = "x".join(str(n) for n in module.kernel_size)
            return f"{module.in_channels} -> {module.out_channels}, kernel {kernel}"
        return f"{sum(p.numel() for p in module.parameters(recurse=False))} parameters"

    @property
    def has_bias(self) -> bool:
        bias = getattr(self.module, "bias", None)
        return isinstance(bias, nn.Parameter) and bias.requires_grad


@dataclass(frozen=True)
class Structure:
    """The layers that ran, the shape of one example's outputs, and the number of entries of an update."""

    layers: tuple[Layer, ...]
    output_shape: tuple[int, ...]
    entries: int

    @property
    def outputs(self) -> int:
        return math.prod(self.output_shape)

    @property
    def first(self) -> Layer:
        return self.layers[0]

    @property
    def linear_first(self) -> Layer | str:
        """Return the first layer, where it is linear and reads the input itself; else why it is not so."""
        first = self.first
        if not isinstance(first.module, nn.Linear):
            return f"the first layer {first.name!r} is {first.kind}, not Linear"
        if not first.reads_input:
            return f"the first linear layer {first.name!r} does not read the input itself"
        return first


def structure(model: nn.Module, input_shape: tuple[int, ...]) -> Structure:
    """Run a copy of ``model`` on one marked input of ``input_shape``; the caller's model is left as it is.

    >>> net = structure(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), (2, 3))
    >>> net.first.kind, net.first.size, net.first.reads_input, net.outputs, net.entries
    ('Linear', '6 -> 3', True, 3, 21)
    """
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if entries == 0:
        raise UserError("the model has no trainable parameters, so an update of it is empty")
    wide = copy.deepcopy(model).to(device="cpu", dtype=torch.float64)
    size = math.prod(input_shape)
    marked = (torch.arange(1, size + 1, dtype=torch.float64) / size).reshape(1, *input_shape)
    record = probe(wide, marked)
    if not record.calls:
        raise UserError("the model runs no layer with parameters")
    layers = []
    for call in record.calls:
        trainable = all(parameter.requires_grad for parameter in call.module.parameters(recurse=False))
        layers.append(Layer(call.name, call.module, _reads(call, marked), trainable))
    return Structure(tuple(layers), tuple(record.outputs.shape[1:]), entries)


#: What is behind the last linear layer: cross-entropy of log_softmax(z) is that of z, and that of softmax(z) is not.
Tail = Literal["none", "log_softmax", "softmax", "other"]


@dataclass(frozen=True)
class Head:
    """The last linear layer that runs, and what is behind it."""

    weight_name: str
    bias_name: str | None
    module_name: str
    tail: Tail = "none"

    def gives_logits(self, task: Task) -> bool:
        """Tell whether the loss of the model's outputs is the same loss of the layer's outputs.

        >>> Head("weight", "bias", "", "log_softmax").gives_logits(Classification())
        True
        """
        return self.tail == "none" or (self.tail == "log_softmax" and isinstance(task, Classification))

    def follows_softmax(self, task: Task) -> bool:
        """Tell whether the loss is the cross-entropy of probabilities: of softmax of softmax."""
        return self.tail == "softmax" and isinstance(task, Classification)

    def outputs(self, logits: Tensor) -> Tensor:
        """Return the model's outputs for outputs of the layer, for any tail but "other"."""
        if self.tail == "log_softmax":
            return torch.log_softmax(logits, -1)
        return torch.softmax(logits, -1) if self.tail == "softmax" else logits

    def derivatives(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Differentiate the cross-entropy of the model's outputs by the layer's outputs, and by the model's.

        >>> head, z = Head("weight", "bias", "", "softmax"), torch.zeros(1, 2, requires_grad=True)
        >>> nn.functional.cross_entropy(torch.softmax(z, 1), torch.tensor([1])).backward()
        >>> head.derivatives(z.detach(), torch.eye(2)[[1]])[0].tolist() == z.grad.tolist()
        True
        """
        outputs = self.outputs(logits)
        by_outputs = torch.softmax(outputs, -1) - targets
        if self.tail != "softmax":
            return by_outputs, by_outputs
        return outputs * (by_outputs - (outputs * by_outputs).sum(-1, keepdim=True)), by_outputs


def find_head(model: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> Head:
    """Find the last layer with parameters that a forward pass executes, which must be linear.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> find_head(net, (1, 2, 2), 3)
    Head(weight_name='3.weight', bias_name='3.bias', module_name='3', tail='none')
    """
    like, draws = probe_input(model, input_shape), torch.Generator().manual_seed(0)
    # Small and large inputs, so that outputs have either sign: a ReLU behind the head leaves positive ones alone.
    sizes = torch.logspace(0, 1.5, 16).reshape(-1, *[1] * len(input_shape))
    record = probe(model, (sizes * torch.randn((16, *input_shape), generator=draws)).to(like))
    if not record.calls:
        raise UserError("no head: the forward pass executes no layer with parameters, so no linear layer")
    name, last = record.calls[-1].name, record.calls[-1].module
    if not isinstance(last, nn.Linear):
        raise UserError(
            f"no linear head: the last layer executed is {name!r} ({type(last).__name__}). Label recovery "
            "reads the linear layer that produces the logits; give the labels, or end the model in nn.Linear."
        )
    if last.out_features != num_classes:
        raise UserError(
            f"no head for {num_classes} classes: the last layer executed, {name!r}, has {last.out_features} outputs"
        )
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    weight_name = names.get(id(last.weight))
    if weight_name is None:
        raise UserError(
            f"the weight of {name!r} is computed from other parameters (a parametrisation), so the update "
            "does not hold its gradient; remove the parametrisation or give the labels"
        )
    bias_name = None if last.bias is None else names.get(id(last.bias))
    tail = _tail(record.calls[-1].output, record.outputs)
    return Head(weight_name=weight_name, bias_name=bias_name, module_name=name, tail=tail)


def _tail(logits: Tensor, outputs: Tensor) -> Tail:
    """Tell by their values what makes the model's outputs of the last linear layer's."""
    if torch.equal(logits, outputs):
        return "none"
    known: tuple[tuple[Tail, Tensor], ...] = (
        ("log_softmax", torch.log_softmax(logits, -1)),
        ("softmax", torch.softmax(logits, -1)),
    )
    for tail, expected in known:
        if expected.shape == outputs.shape and torch.allclose(outputs, expected, rtol=SAME, atol=SAME):
            return tail
    return "other"


@dataclass(frozen=True, eq=False)
class FirstDense:
    """The first dense layer of a worker, by its ``name`` in the whole model: CAFE reads its gradients and inputs."""

    worker: int
    share: Share
    name: str
    inputs: int
    units: int
    bias: bool

    def module(self, model: nn.Module) -> nn.Linear:
        layer = model.get_submodule(self.name)
        assert isinstance(layer, nn.Linear)
        return layer


def first_dense(model: VerticalModel) -> tuple[FirstDense, ...]:
    """Find the first dense layer that each worker runs; ValueError where there is none, or it reads no row a sample."""
    layers = []
    for number, (worker, share) in enumerate(zip(model.workers, model.shares, strict=True)):
        like = probe_input(worker, share.shape)
        with torch.random.fork_rng(devices=[]):
            record = probe(worker, like.new_zeros((2, *share.shape)), lambda _, module: isinstance(module, nn.Linear))
        if not record.calls:
            raise UserError(f"worker {share.name!r}: expected a dense layer (nn.Linear), it runs none")
        first = record.calls[0]
        uses = len(record.of(first.name))
        if first.output.dim() != 2 or uses > 1:
            got = f"used {uses} times" if uses > 1 else f"with outputs {tuple(first.output.shape)}"
            words = "expected a first dense layer to read each sample once"
            raise UserError(f"worker {share.name!r}: {words}, got one {got}")
        layer = first.module
        assert isinstance(layer, nn.Linear)
        path = f"workers.{number}.{first.name}".removesuffix(".")
        layers.append(FirstDense(number, share, path, layer.in_features, layer.out_features, layer.bias is not None))
    return tuple(layers)


def _reads(call: Call, marked: Tensor) -> bool:
    flat = call.inputs.flatten()
    same = len(flat) == marked.numel() and torch.equal(flat, marked.flatten())
    # A linear layer on a matrix reads its rows one by one, not the input as a whole.
    return same and (not isinstance(call.module, nn.Linear) or call.inputs.dim() == 2)


@dataclass(frozen=True, eq=False)
class DenseEntry:
    """A dense layer in an update; ``shape`` is that of the map flattened into its inputs, (inputs,) if unknown."""

    name: str
    weight_name: str
    bias_name: str | None
    weight: Tensor
    bias: Tensor | None
    reads_input: bool
    shape: tuple[int, ...]


def dense_entry(model: nn.Module, input_shape: tuple[int, ...]) -> DenseEntry | str:
    """Find the first dense layer that reads each example once, in the order of execution; else say why there is none.

    >>> entry = dense_entry(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)), (1, 4, 4))
    >>> entry.name, entry.shape, entry.reads_input
    ('2', (4, 2, 2), False)
    """
    like = probe_input(model, input_shape)
    size = 2 * math.prod(input_shape)
    marked = torch.linspace(0.1, 1.0, size, dtype=like.dtype, device=like.device).reshape(2, *input_shape)
    calls = probe(model, marked, lambda _name, module: not any(True for _ in module.children())).calls
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for place, call in enumerate(calls):
        layer = call.module
        if not isinstance(layer, nn.Linear) or call.inputs.dim() != 2 or len(call.inputs) != 2:
            continue
        if sum(other.module is layer for other in calls) > 1:
            return f"the first dense layer {call.name!r} runs more than once, so its gradient is a sum over its inputs"
        if id(layer.weight) not in names:
            return f"the weight of {call.name!r} is computed from other parameters, so the update lacks its gradient"
        reads_input = torch.equal(call.inputs.flatten(), marked.flatten())
        shape = tuple(input_shape) if reads_input else _map_shape(calls[:place], call.inputs.shape[1])
        return DenseEntry(
            name=call.name,
            weight_name=names[id(layer.weight)],
            bias_name=None if layer.bias is None else names.get(id(layer.bias)),
            weight=layer.weight.detach(),
            bias=None if layer.bias is None else layer.bias.detach(),
            reads_input=reads_input,
            shape=shape,
        )
    return "no dense layer (nn.Linear) reads each example as one row"


def output_jacobian(
    model: nn.Module, entry: DenseEntry, input_shape: tuple[int, ...], project: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Map (projected) inputs (n, d) of the layer to derivatives (n, units, K) of the model's outputs by the layer's.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
    >>> jacobian = output_jacobian(net, dense_entry(net, (2,)), (2,), lambda rows: rows)
    >>> jacobian(torch.zeros(5, 2)).shape
    torch.Size([5, 3, 2])
    """
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    like = entry.weight
    layer = twin.get_submodule(entry.name)

    def jacobian(rows: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = torch.nn.functional.linear(project(rows.to(like)), entry.weight, entry.bias).requires_grad_()
            with output_replaced(layer, inner):
                outputs = outputs_of(twin(like.new_zeros((len(rows), *input_shape)))).flatten(1)
            columns = [
                torch.autograd.grad(outputs[:, number].sum(), inner, retain_graph=True)[0]
                for number in range(outputs.shape[1])
            ]
        return torch.stack(columns, dim=2).double().cpu()

    return jacobian


def _map_shape(before: tuple[Call, ...], size: int) -> tuple[int, ...]:
    for call in reversed(before):
        output = call.output
        if isinstance(output, Tensor) and output.dim() > 2 and math.prod(output.shape[1:]) == size:
            return tuple(output.shape[1:])
    return (size,)
