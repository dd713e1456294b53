"""The tables of "What Can We Learn from Gradients?" (Qian, Hansen, 2021): counts, filters, hidden units.

``gradients/counting``: proposition 2 for 1024 inputs and 10 classes, to three decimals; exact, without data or attack.
``gradients/filters``: one CIFAR-100 image behind one 5x5 convolution with stride 2 and a linear layer; the L1 distance,
summed over the image, by the number of filters. By proposition 3 twelve are enough for one image. ``gradients/units``:
four MNIST images of 32x32 (padded by two pixels) behind one hidden layer; PSNR by its number of units. The paper ran
four units although its own bound gives 4.002, and shows curves, no numbers.

Both are run with the paper's attack and with Gauss-Newton. Pictures are brought into the valid range before they are
compared. Labels are not known: the paper's attack searches them, Gauss-Newton reads them off the update.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.attacks import GaussNewton, LearnFromGradients
from leakscope.audit.assess import Assessment
from leakscope.contracts.attack import Attack
from leakscope.data import Examples
from leakscope.federation import FedSGD
from leakscope.limits import hidden_units_bound
from leakscope.models import build_model
from leakscope.papers import base

FEATURES, CLASSES = 1024, 10
#: Batch size and the bound to three decimals.
BOUNDS: Mapping[int, float] = {1: 0.99, 2: 1.992, 4: 4.002, 8: 8.045, 16: 16.226}
#: Filters and the published L1 distance.
DISTANCES: Mapping[int, float] = {1: 728.0, 5: 649.0, 8: 404.0, 11: 135.0, 12: 0.57}
BATCH = 4
METHODS = ("What can we learn", "Gauss-Newton")


@dataclass(frozen=True)
class Scale:
    trials: int
    side: int
    iterations: int
    filters: tuple[int, ...] = tuple(DISTANCES)
    units: tuple[int, ...] = (3, 4, 5, 8)


SCALES: Mapping[str, Scale] = {
    "smoke": Scale(1, 16, 40, filters=(1, 12), units=(3, 5)),
    "small": Scale(1, 32, 2000),
    "paper": Scale(10, 32, 20000),
}


def _size(scale: str) -> Scale:
    return dataclasses.replace(SCALES[scale], trials=base.wanted(SCALES[scale].trials))


def run_counting(scale: str, seed: int, progress: base.Progress | None = None) -> list[base.Row]:
    rows = []
    for batch, published in BOUNDS.items():
        bound = hidden_units_bound(batch, FEATURES, CLASSES)
        setting = f"batch {batch}, {FEATURES} inputs, {CLASSES} classes"
        note = f"exact; that is {math.ceil(bound)} whole units, about {batch} by the rule of thumb"
        rows.append(base.Line(setting, "least hidden units", published, note, 0.0005, "exact").measured([bound]))
        if progress is not None:
            progress(len(rows), len(BOUNDS), bound)
    return rows


def run_filters(scale: str, seed: int, progress: base.Progress | None = None) -> list[base.Row]:
    size, measure = _size(scale), "L1 distance of an image"
    settings: list[tuple[base.Line, dict[str, Any]]] = []
    for filters in size.filters:
        # A smaller image has a smaller sum, so that the published one is none of its.
        published = DISTANCES[filters] if size.side == 32 else None
        name = f"{filters} {'filter' if filters == 1 else 'filters'}"
        line = base.Line(name, measure, published, "lower is better for the attacker")
        settings.append((line, {"num_classes": 100, "filters": filters}))

    def distance(found: Assessment) -> float:
        assert found.truth is not None
        return float((base.recovered(found).clamp(0, 1) - found.truth.x).abs().sum())

    return _measured("cifar100", "one-layer-cnn", 1, distance, settings, size, seed, progress)


def run_units(scale: str, seed: int, progress: base.Progress | None = None) -> list[base.Row]:
    size = _size(scale)
    bound = hidden_units_bound(BATCH, size.side**2, CLASSES)
    settings: list[tuple[base.Line, dict[str, Any]]] = []
    for units in size.units:
        note = f"{'enough' if units >= bound else 'too few'} by proposition 2, which asks for {bound:.3f}"
        options = {"num_classes": CLASSES, "hidden": (units,), "activation": "sigmoid"}
        settings.append((base.Line(f"{units} hidden units", "PSNR of a batch of 4 (dB)", None, note), options))

    def quality(found: Assessment) -> float:
        # A cap, lest one exact image stand for a whole batch.
        return fmean(min(value, 100.0) for value in found.psnr or ())

    return _measured("mnist", "mlp", BATCH, quality, settings, size, seed, progress)


def _measured(
    data: str,
    model: str,
    batch: int,
    judge: Callable[[Assessment], float],
    settings: list[tuple[base.Line, dict[str, Any]]],
    size: Scale,
    seed: int,
    progress: base.Progress | None,
) -> list[base.Row]:
    """Run both methods on each setting: a row without its method, and options of the model."""
    examples = base.examples_or_reason(data, split="test")

    def trials(options: dict[str, Any], method: str, examples: Examples) -> Iterator[dict[str, float]]:
        for index in _batches(examples, size.trials, batch, seed):
            x = _resized(examples.subset(index), size.side)
            net = build_model(model, input_shape=x.shape[1:], seed=seed, **options)
            attack: Attack = LearnFromGradients(iterations=size.iterations) if method == METHODS[0] else GaussNewton()
            # In double precision, for distances here go below single.
            y = examples.y[index]
            yield {method: judge(base.attacked(FedSGD().observe(net.double(), x, y), attack, x, y, seed))}

    def groups() -> Iterator[base.Group]:
        for (line, options), method in itertools.product(settings, METHODS):
            whole = dataclasses.replace(line, setting=f"{line.setting}, {method}")
            values = examples if isinstance(examples, str) else trials(options, method, examples)
            yield base.Group({method: whole}, values, main=method)

    return base.measured_rows(groups(), len(settings) * len(METHODS) * size.trials, progress)


def _resized(part: Examples, side: int) -> Tensor:
    x = part.value_range.to_unit(part.x).double()
    margin = (32 - x.shape[-1]) // 2
    return nn.functional.avg_pool2d(nn.functional.pad(x, (margin,) * 4), 32 // side)


def _batches(examples: Examples, trials: int, batch: int, seed: int) -> list[list[int]]:
    """Draw batches of different labels, without an image twice."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    batches: list[list[int]] = []
    for _ in range(trials):
        taken: dict[int, int] = {}
        for index in order:
            if len(taken) < batch:
                taken.setdefault(int(examples.y[index]), index)
        batches.append(list(taken.values()))
        order = [index for index in order if index not in taken.values()]
    return batches


_RUNS = {"counting": run_counting, "filters": run_filters, "units": run_units}
TABLES = base.paper_tables("gradients", _RUNS, SCALES, counted=("filters", "units"))
