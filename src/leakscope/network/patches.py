"""Find the patch embedding of a model and its learned positions, by running the model and not by names.

The patch embedding is the first layer, a convolution or a linear layer over patches, each of whose inputs is one pixel,
shifted and scaled at most. A parameter holds positions where its derivative is, row by row, that of the layer's output.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.network.recorder import Call, inputs_of, record_layers, twin_of

#: How far two rows may be apart, relative to their size, to count as the same derivative in float32. The derivative of
#: a sum is copied, so that rounding alone leaves 0; those of other parameters are apart by about 1.
SAME_ROW = 1e-4
#: ... and what a layer reads from the pixels that were found, relative to the largest.
SAME_VALUE = 1e-4


@dataclass(frozen=True, eq=False)
class PatchEmbedding:
    """A layer over patches, and the parameter that is added to its outputs, for one image.

    What the layer reads at token t and input j is ``shift[t, j] + scale[t, j] * pixel[t, j]``, by its place in the flat
    image; -1 for a constant such as padding. ``rows`` are the positions' rows that belong to the T tokens, and their
    derivative times ``factor`` is that of the layer's outputs. ``units_first``: a position is a column.
    """

    layer: str
    weight: str
    bias: str | None
    pixel: Tensor
    scale: Tensor
    shift: Tensor
    position: str
    rows: Tensor
    factor: float
    units_first: bool

    @property
    def tokens(self) -> int:
        return len(self.pixel)

    def signals(self, gradient: Tensor) -> Tensor:
        """Return the derivative (T, d) by the layer's outputs from that by the positions."""
        units = _sizes(gradient)[0 if self.units_first else -1]
        return self.factor * _rows(gradient, units, self.units_first)[self.rows]

    def patches(self, image: Tensor) -> Tensor:
        """Return what the layer reads (T, inputs) of one flat image."""
        return self.shift + self.scale * image[self.pixel.clamp_min(0)] * (self.pixel >= 0)

    def image(self, patches: Tensor) -> Tensor:
        """Return the flat image; a pixel that several patches hold is the mean over them."""
        seen = self.pixel >= 0
        values = ((patches - self.shift) / self.scale)[seen]
        size = int(self.pixel.max()) + 1
        total = values.new_zeros(size).index_add_(0, self.pixel[seen], values)
        return total / torch.bincount(self.pixel[seen], minlength=size)


def find_patches(model: nn.Module, input_shape: tuple[int, ...], trained: Collection[str]) -> PatchEmbedding:
    """Find the patch embedding, and positions among the ``trained`` parameters; NotApplicable says why there are none.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.cut, self.head = nn.Conv2d(1, 5, 2, 2), nn.Linear(5, 3)
    ...         self.where = nn.Parameter(torch.zeros(4, 5))
    ...     def forward(self, x):
    ...         return self.head((self.cut(x).flatten(2).transpose(1, 2) + self.where).tanh().mean(1))
    >>> net = Net()
    >>> found = find_patches(net, (1, 4, 4), [name for name, _ in net.named_parameters()])
    >>> found.layer, found.position, found.rows.tolist(), found.pixel[1].tolist()
    ('cut', 'where', [0, 1, 2, 3], [2, 3, 6, 7])
    """
    like = next(model.parameters())
    draws = torch.Generator().manual_seed(0)
    probe = torch.rand((1, *input_shape), generator=draws).to(like).requires_grad_()
    record = record_layers(model, probe, evaluate=True, differentiable=True)
    call = _first_layer(record.calls)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weight, bias = (names.get(id(getattr(call.module, kind))) for kind in ("weight", "bias"))
    if weight is None or weight not in trained:
        raise NotApplicable(f"the update says nothing of the first layer {call.name!r}")
    pixels = _pixels(model, call, probe.detach())
    positions = _positions(model, call, record.outputs, len(pixels[0]), trained)
    return PatchEmbedding(call.name, weight, bias if bias in trained else None, *(*pixels, *positions))


def _first_layer(calls: Sequence[Call]) -> Call:
    if not calls:
        raise NotApplicable("the model runs no layer with parameters")
    first, layer = calls[0], calls[0].module
    plain = isinstance(layer, nn.Conv2d) and layer.groups == 1 and not isinstance(layer.padding, str)
    if not plain and not isinstance(layer, nn.Linear):
        raise NotApplicable(f"the first layer {first.name!r} ({type(layer).__name__}) is no patch embedding")
    if sum(call.module is layer for call in calls) > 1:
        raise NotApplicable(f"the first layer {first.name!r} runs more than once, so its gradient is a sum")
    return first


def _read(layer: nn.Module, values: Tensor) -> Tensor:
    """Return the rows that each token's weights are multiplied with."""
    if isinstance(layer, nn.Linear):
        return values.reshape(-1, layer.in_features)
    assert isinstance(layer, nn.Conv2d)
    assert not isinstance(layer.padding, str)
    return F.unfold(values, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0].T


def _pixels(model: nn.Module, call: Call, probe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which pixel each input of the layer is at each token, its scale, and its shift, from short passes."""
    twin = twin_of(model).eval()
    layer = twin.get_submodule(call.name)
    size = probe[0].numel()

    def read(image: Tensor) -> Tensor:
        with torch.no_grad():
            values = inputs_of(layer, twin, image.reshape(probe.shape))
            return _read(layer, values).double().cpu()

    shift = read(torch.zeros_like(probe))
    scale = read(torch.ones_like(probe)) - shift
    constant = scale == 0
    scale = scale.masked_fill(constant, 1.0)
    # The place of a pixel in two digits, which float32 holds exactly enough.
    base = math.ceil(math.sqrt(size))
    places = torch.arange(size, device=probe.device)
    high, low = (
        ((read((digit / base).to(probe)) - shift) / scale * base).round().long()
        for digit in (places // base, places % base)
    )
    pixel = (high * base + low).masked_fill(constant, -1)
    if bool((pixel >= size).any()) or bool((pixel < -1).any()):
        raise NotApplicable("the inputs of the first layer are not the pixels of the image one by one")
    scale = scale.masked_fill(constant, 0.0)
    again, expected = read(probe), shift + scale * probe.flatten().double().cpu()[pixel.clamp_min(0)]
    if float((again - expected).abs().max()) > SAME_VALUE * float(expected.abs().max()):
        raise NotApplicable("the inputs of the first layer are not the pixels of the image one by one")
    if len(pixel[pixel >= 0].unique()) < size:
        raise NotApplicable("the first layer does not read every pixel")
    return pixel, scale.masked_fill(constant, 1.0), shift


def _rows(values: Tensor, units: int, units_first: bool) -> Tensor:
    return values.reshape(units, -1).T if units_first else values.reshape(-1, units)


def _positions(
    model: nn.Module, call: Call, outputs: Tensor, tokens: int, trained: Collection[str]
) -> tuple[str, Tensor, float, bool]:
    """Find the parameter whose derivative holds that of the layer's outputs, as rows or columns, times one factor."""
    assert isinstance(call.module, nn.Linear | nn.Conv2d)
    units = len(call.module.weight)
    plain = (module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d))
    owned = {id(parameter) for module in plain for parameter in module.parameters(recurse=False)}
    fitting = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name in trained
        and parameter.requires_grad
        and id(parameter) not in owned
        and parameter.numel() >= tokens * units
        and units in (_sizes(parameter)[0], _sizes(parameter)[-1])
    }
    if not fitting:
        raise NotApplicable("no learned position embedding is in the update: fixed, relative or frozen positions")
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)).to(outputs)
    with torch.enable_grad():
        value = (outputs * weights).sum()
    signals, *found = torch.autograd.grad(value, [call.output, *fitting.values()], materialize_grads=True)
    signals = _rows(signals, units, isinstance(call.module, nn.Conv2d))
    if not bool(signals.any(1).all()):
        raise NotApplicable("nothing comes back to some patches: the weights above them are zero")
    for name, gradient in zip(fitting, found, strict=True):
        for units_first in (False, True):
            if match := _match(signals, _rows(gradient, units, units_first)):
                return name, match[0].cpu(), match[1], units_first
    raise NotApplicable("no parameter of the update is added to the outputs of the patch embedding")


def _sizes(parameter: Tensor) -> tuple[int, ...]:
    return tuple(size for size in parameter.shape if size > 1) or (1,)


def _match(signals: Tensor, rows: Tensor) -> tuple[Tensor, float] | None:
    """Return which of the rows the signals are, and their common factor; None where they are not."""
    signals, rows = signals.double(), rows.double()
    if len(rows) < len(signals):
        return None
    place = (F.normalize(signals, dim=1) @ F.normalize(rows, dim=1).T).argmax(1)
    chosen = rows[place]
    factor = float((signals * chosen).sum() / chosen.square().sum().clamp_min(1e-300))
    apart = (signals - factor * chosen).norm(dim=1) / signals.norm(dim=1)
    if float(apart.max()) > SAME_ROW or len(place.unique()) < len(place):
        return None
    return place, 1.0 if abs(factor - 1) < SAME_ROW else factor
