"""What a peel knows by step of the network: derivatives, values and masks, and how these follow from each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.batch_statistics import NormalisedLayer
from leakscope.equations.convolution_equations import gradient_rows
from leakscope.equations.local_networks import LocalNetworks
from leakscope.network.gates import GatedNetwork, WeightedLayer

#: Share of the largest value below which values of scarce equations are errors.
SMALLEST = 2e-5
#: Values behind a ReLU within this factor of the line between rounding and not may be on its other side.
DOUBTED = 100.0


class PeelState:
    """Derivatives (``signals``), ``values`` and ``gates`` of all images by step.

    ``pinned``: the steps whose derivatives the factored layer told. ``seen``: ReLUs whose masks the forward pass told.
    """

    def __init__(
        self, network: LocalNetworks, gradients: Mapping[str, Tensor], noise: Mapping[str, float] | None = None
    ) -> None:
        self.network, self.gradients, self.noise = network, gradients, noise or {}
        self.signals: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.gates: dict[int, Tensor] = {}
        self.layers = {layer.step: layer for layer in network.layers}
        self.readers: list[list[int]] = [[] for _ in network.steps]
        for number, step in enumerate(network.steps):
            for source in step.sources:
                self.readers[source].append(number)
        self.pinned: set[int] = set()
        self.seen: set[int] = set()

    def share(self, name: str) -> float:
        """Return the size of a gradient's noise, relative to its own."""
        gradient = self.gradients[name]
        size = max(float(gradient.double().norm()), 1e-300)  # of a layer that sent zeros: none in float32
        return self.noise.get(name, 0.0) * gradient.numel() ** 0.5 / size

    def climb(self, number: int) -> None:
        """Take a derivative up through all that multiplies by known numbers."""
        while len(self.readers[number]) == 1:
            reader = self.readers[number][0]
            scale = self._channel_scale(reader, len(self.signals[number]))
            if self.network.steps[reader].kind != "add" and (scale is None or not bool((scale != 0).all())):
                break
            self.signals[reader] = self.signals[number] if scale is None else self.signals[number] / scale
            number = reader

    def _channel_scale(self, number: int, images: int) -> Tensor | None:
        """Return what BatchNorm in eval mode multiplies each channel of each image by; None for other steps."""
        module = self.network.steps[number].module
        if not isinstance(module, nn.BatchNorm2d) or module.training:
            return None
        scales = torch.stack([_eval_scale(network.steps[number].module) for network in self.network.each])
        return scales.repeat_interleave(images // len(scales), 0)[:, :, None, None]

    def norm_behind(self, number: int) -> int | None:
        """Return the BatchNorm in train mode that reads a step, and nothing else does."""
        readers = self.readers[number]
        module = self.network.steps[readers[0]].module if len(readers) == 1 else None
        return readers[0] if isinstance(module, nn.BatchNorm2d) and module.training else None

    def normalised(self, layer: WeightedLayer) -> NormalisedLayer:
        norm = self.norm_behind(layer.step)
        assert norm is not None
        step, convolution = self.network.steps[norm], self.network.steps[layer.step]
        module: Any = step.module
        names = [f"{step.name}.weight", f"{step.name}.bias"]
        if any(name not in self.gradients for name in names):
            raise NotApplicable(f"the gradients of {step.name!r} are not in the update")
        shape = self.network.steps[convolution.sources[0]].shape
        return NormalisedLayer(
            signal=self.signals.get(norm, torch.zeros(())),
            gradient=self.gradients[layer.weight_name].double().flatten(2).transpose(1, 2).contiguous(),
            gain=module.weight.detach(),
            gain_gradient=self.gradients[names[0]].double(),
            bias_gradient=self.gradients[names[1]].double(),
            eps=module.eps,
            noisy=bool(self.noise),
            rows=lambda signal: gradient_rows(layer, signal, shape),
            forward=lambda value: self.network.forward(layer.step, value),
        )

    def bias_gradients(self, sources: tuple[int, ...]) -> list[Tensor]:
        found = []
        for number in sources:
            step = self.network.steps[number]
            if step.kind in ("add", "max", "reshape"):
                found += self.bias_gradients(step.sources)
            elif f"{step.name}.bias" in self.gradients:
                found.append(self.gradients[f"{step.name}.bias"])
        return found

    def unknown_maxima(self, number: int) -> int | None:
        known = (n for n in self.readers[number] if n in self.signals)
        return next((n for n in known if not self.passes(n)), None)

    def passes(self, number: int) -> bool:
        gated = self.network.steps[number].kind in ("relu", "max")
        return number in self.signals and (number in self.gates or not gated)

    def backward(self, number: int, readers: Iterable[int] | None = None) -> Tensor:
        total: Tensor | None = None
        for reader in self.readers[number] if readers is None else readers:
            step, signal = self.network.steps[reader], self.signals[reader]
            if step.kind == "relu":
                signal = signal * self.gates[reader]
            # What is in front of a BatchNorm in train mode follows with what the layer reads.
            elif step.kind != "add" and reader != self.norm_behind(number):
                shape = self.network.steps[number].shape
                signal = self.network.pull_back(reader, signal, shape, self.gates.get(reader))
            total = signal if total is None else total + signal
        assert total is not None
        return total

    def unmasked(self, number: int, gate: int, signal: Tensor | None = None) -> Tensor:
        """Return the derivative at a step without the mask of the ReLU that reads it through BatchNorm and sums.

        ``signal`` is the derivative behind the ReLU, if it is another than that of this step.
        """
        total = self.signals[gate] if signal is None else signal
        while number != gate:
            number = self.readers[number][0]
            scale = self._channel_scale(number, len(total))
            total = total if scale is None else total * scale
        return total

    def gated(self, number: int, value: Tensor) -> Tensor:
        """Set what is rounding around a zero of a ReLU to zero."""
        if self.network.steps[number].kind == "relu" and not self.network.steps[number].slope:
            return value * (self.gates[number] if number in self.seen else active(value))
        return value * active(value) if rectified(self.network, number) else value

    def settle(self, layer: WeightedLayer, value: Tensor, *, derived: bool = False) -> float:
        """Tell the weights of each local step from what a layer read; return how far the gain behind it moves.

        ``derived``: the derivative at the output of BatchNorm follows from that at its input, not the other way round.
        """
        if len(self.network) == 1:
            return 0.0
        number, moved = layer.step, 0.0
        if layer.weight_name in self.gradients:
            self.network.settle(number, "weight", self.network.gradients(layer, value, self.signals[number]))
        self._settle_bias(number, self.network.split(self.signals[number]))
        for norm in self.readers[number]:
            if isinstance(self.network.steps[norm].module, nn.BatchNorm2d):
                moved = self._settle_norm(norm, number, self.network.forward(number, value, bias=True), derived)
        return moved

    def _settle_norm(self, norm: int, number: int, received: Tensor, derived: bool) -> float:
        module: Any = self.network.steps[norm].module
        deviation = (module.running_var + module.eps).sqrt()
        normalised = (received - module.running_mean.reshape(1, -1, 1, 1)) / deviation.reshape(1, -1, 1, 1)
        own = module.weight is not None and f"{self.network.steps[norm].name}.weight" in self.gradients
        parts = self.network.split(normalised)
        signals = self.network.split(self.signals[number if derived else norm])
        if derived:
            gain = torch.ones_like(deviation) if module.weight is None else module.weight.detach()
            found = list[Tensor]()
            for part, behind in zip(parts, signals, strict=True):
                factor = torch.where(gain == 0, 0.0, deviation / gain)
                found.append(behind * factor.reshape(1, -1, 1, 1))
                gain = gain - (found[-1] * part).sum((0, 2, 3)) if own else gain
            signals = tuple(found)
        self._settle_bias(norm, signals)
        if not own:
            return 0.0
        changes = [(one * part).sum((0, 2, 3)) for one, part in zip(signals, parts, strict=True)]
        return self.network.settle(norm, "weight", torch.stack(changes))

    def _settle_bias(self, number: int, signals: Sequence[Tensor]) -> None:
        if f"{self.network.steps[number].name}.bias" in self.gradients:
            self.network.settle(number, "bias", torch.stack([one.sum((0, 2, 3)) for one in signals]))


def rectified(network: GatedNetwork | LocalNetworks, number: int) -> bool:
    """Return whether a step gives what a ReLU gave, or the maxima of it: nothing negative, and exact zeros."""
    relu = network.relu_behind(number)
    return relu is not None and not network.steps[relu].slope


def active(values: Tensor) -> Tensor:
    """Return ones where values behind a ReLU are not rounding around zero: the widest gap of small values decides.

    Where nothing is negative (scarce equations), that does not show how large errors are.

    >>> active(torch.tensor([0.9, 1e-9, -2e-9, 0.4, 0.01])).tolist()
    [1.0, 0.0, 0.0, 1.0, 1.0]
    """
    positive = values[values > 0].sort().values
    if not len(positive):
        return torch.zeros_like(values)
    largest = float(positive[-1])
    if not bool((values < 0).any()):
        return (values > SMALLEST * largest).to(values)
    noise = min(float((-values).max().clamp_min(0)), 1e-2 * largest)
    small = positive[(positive >= 0.3 * noise) & (positive < 3e-2 * largest)]
    if len(small) < 2:
        return (values > noise).to(values)
    widest = int((small[1:] / small[:-1]).argmax())
    return (values > (small[widest] * small[widest + 1]).sqrt()).to(values)


def doubt(values: Tensor, gates: Tensor) -> Tensor:
    """Return how near values are to the line that ``active`` drew: one on it, zero beyond a factor of DOUBTED.

    >>> doubt(torch.tensor([1.0, 1e-3, 1e-5]), torch.tensor([1.0, 1.0, 0.0]))[1:].round(decimals=1).tolist()
    [0.5, 0.5]
    """
    least = values[gates > 0].min() if bool((gates > 0).any()) else values.new_ones(())
    most = values[gates == 0].max().clamp_min(1e-300) if bool((gates == 0).any()) else values.new_tensor(1e-300)
    line = (least * most).sqrt()
    apart = (values.clamp_min(1e-300) / line).log().abs() / torch.tensor(DOUBTED).log()
    return (1 - apart).clamp_min(0)


def _eval_scale(module: Any) -> Tensor:
    assert module.running_var is not None  # read_gated refuses others
    scale = torch.rsqrt(module.running_var + module.eps) * (1 if module.weight is None else module.weight)
    return scale.detach()
