"""Find the patch embedding of a model and its learned positions, by running the model and not by names.

The patch embedding is the first layer, a convolution or a linear layer over patches, each of whose inputs is one pixel,
shifted and scaled at most. A parameter holds positions where its derivative is, row by row, that of the layer's output.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.task import outputs_of
from leakscope.network.recorder import Call, inputs_of, record_layers, twin_of

#: How far two rows may be apart, relative to their size, to count as the same derivative in float32. The derivative of
#: a sum is copied, so that rounding alone leaves 0; those of other parameters are apart by about 1.
SAME_ROW = 1e-4
#: ... and what a layer reads from the pixels that were found, relative to the largest.
SAME_VALUE = 1e-4


@dataclass(frozen=True, eq=False, kw_only=True)
class PatchEmbedding:
    """A layer over patches, and the parameter that is added to its outputs, for one image.

    What the layer reads at token t and input j is ``shift[t, j] + scale[t, j] * pixel[t, j]``, by its place in the flat
    image; -1 for a constant such as padding. ``rows`` are the positions' rows that belong to the T tokens, and their
    derivative times ``factor`` is that of the layer's outputs. ``units_first``: a position is a column.
    """

    layer: str
    weight: str
    bias: str | None
    position: str
    pixel: Tensor
    scale: Tensor
    shift: Tensor
    rows: Tensor
    factor: float
    units_first: bool

    @property
    def tokens(self) -> int:
        return len(self.pixel)

    def signals(self, gradient: Tensor) -> Tensor:
        """Return the derivative (T, d) by the layer's outputs from that by the positions."""
        units = gradient.numel() // self._count(gradient)
        return self.factor * _rows(gradient, units, self.units_first)[self.rows]

    def patches(self, image: Tensor) -> Tensor:
        """Return what the layer reads (T, inputs) of one flat image."""
        return self.shift + self.scale * image[self.pixel.clamp_min(0)]

    def image(self, patches: Tensor) -> Tensor:
        """Return the flat image; a pixel that several patches hold is the mean over them."""
        seen = self.pixel >= 0
        values = ((patches - self.shift) / self.scale)[seen]
        size = int(self.pixel.max()) + 1
        total = values.new_zeros(size).index_add_(0, self.pixel[seen], values)
        return total / torch.bincount(self.pixel[seen], minlength=size)

    def _count(self, gradient: Tensor) -> int:
        sizes = [size for size in gradient.shape if size > 1]
        return gradient.numel() // (sizes[0] if self.units_first else sizes[-1])


def find_patches(model: nn.Module, input_shape: tuple[int, ...], trained: Collection[str]) -> PatchEmbedding:
    """Find the patch embedding and the positions among the ``trained`` parameters; NotApplicable says why there are none.

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
    # Small, so that no activation is saturated.
    probe = torch.rand((1, *input_shape), generator=draws).to(like)
    call = _first_layer(model, probe)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layer = call.module
    weight, bias = (names.get(id(getattr(layer, kind))) for kind in ("weight", "bias"))
    if weight not in trained:
        raise NotApplicable(f"the first layer {call.name!r} is frozen: the update says nothing of it")
    pixel, scale, shift = _pixels(model, layer, probe)
    position, rows, factor, units_first = _positions(model, call, probe, len(pixel), trained)
    return PatchEmbedding(
        layer=call.name,
        weight=weight,
        bias=bias if bias in trained else None,
        position=position,
        pixel=pixel,
        scale=scale,
        shift=shift,
        rows=rows,
        factor=factor,
        units_first=units_first,
    )


def _first_layer(model: nn.Module, probe: Tensor) -> Call:
    calls = record_layers(model, probe, evaluate=True).calls
    if not calls:
        raise NotApplicable("the model runs no layer with parameters")
    first, layer = calls[0], calls[0].module
    plain = isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.padding_mode == "zeros"
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
    if isinstance(layer.padding, str):
        raise NotApplicable("the first convolution pads by itself, so it is no patch embedding")
    options = {"dilation": layer.dilation, "padding": layer.padding, "stride": layer.stride}
    return F.unfold(values, layer.kernel_size, **options)[0].T


def _pixels(model: nn.Module, layer: nn.Module, probe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which pixel each input of the layer is at each token, its scale, and its shift, from four passes."""
    twin = twin_of(model).eval()
    path = next(name for name, module in model.named_modules() if module is layer)
    size = probe[0].numel()

    def read(image: Tensor) -> Tensor:
        with torch.no_grad():
            values = inputs_of(twin.get_submodule(path), twin, image.reshape(probe.shape))
            return _read(layer, values).double().cpu()

    shift = read(torch.zeros_like(probe))
    scale = read(torch.ones_like(probe)) - shift
    constant = scale == 0
    scale = scale.masked_fill(constant, 1.0)
    # The place of a pixel in two digits, which float32 holds exactly enough.
    base = math.ceil(math.sqrt(size))
    places = torch.arange(size, device=probe.device)
    digits = [
        ((read((digit / base).to(probe)) - shift) / scale * base).round().long() for digit in (places // base, places % base)
    ]
    pixel = (digits[0] * base + digits[1]).masked_fill(constant, -1)
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
    model: nn.Module, call: Call, probe: Tensor, tokens: int, trained: Collection[str]
) -> tuple[str, Tensor, float, bool]:
    """Find the parameter whose derivative holds that of the layer's outputs, as rows or columns, times one factor."""
    units = call.module.weight.shape[0]
    twin = twin_of(model).eval()
    owned = {id(p) for m in twin.modules() if isinstance(m, nn.Linear | nn.Conv2d) for p in m.parameters(recurse=False)}
    fitting = {
        name: parameter
        for name, parameter in twin.named_parameters()
        if name in trained and id(parameter) not in owned and parameter.numel() >= tokens * units
    }
    fitting = {name: p for name, p in fitting.items() if units in (p.shape[-1], _squeezed(p)[0])}
    if not fitting:
        raise NotApplicable("the update has no learned position embedding: fixed, relative or frozen positions")
    outputs: list[Tensor] = []
    twin.get_submodule(call.name).register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    with torch.enable_grad():
        probe = probe.clone().requires_grad_()  # so that the layer's output has a derivative if it is frozen
        answer = outputs_of(twin(probe))
        draws = torch.Generator().manual_seed(1)
        weights = torch.randn(answer.shape, generator=draws).to(answer)
        found = torch.autograd.grad((answer * weights).sum(), [outputs[0], *fitting.values()], materialize_grads=True)
    signals = _rows(found[0], units, isinstance(call.module, nn.Conv2d))
    for name, gradient in zip(fitting, found[1:], strict=True):
        for units_first in (False, True):
            if gradient.numel() % units == 0:
                match = _match(signals, _rows(gradient, units, units_first))
                if match is not None:
                    return name, match[0].cpu(), match[1], units_first
    raise NotApplicable("no parameter of the update is added to the outputs of the patch embedding")


def _squeezed(parameter: Tensor) -> tuple[int, ...]:
    return tuple(size for size in parameter.shape if size > 1) or (1,)


def _match(signals: Tensor, rows: Tensor) -> tuple[Tensor, float] | None:
    """Return which of the rows the signals are, and their common factor; None where they are not."""
    signals, rows = signals.double(), rows.double()
    if len(rows) < len(signals) or not bool(signals.any(1).all()):
        return None
    place = (F.normalize(signals, dim=1) @ F.normalize(rows, dim=1).T).argmax(1)
    chosen = rows[place]
    factor = float((signals * chosen).sum() / chosen.square().sum().clamp_min(1e-300))
    apart = (signals - factor * chosen).norm(dim=1) / signals.norm(dim=1)
    if float(apart.max()) > SAME_ROW or len(place.unique()) < len(place):
        return None
    return place, 1.0 if abs(factor - 1) < SAME_ROW else factor
