"""Label accuracy of DLG and iDLG: the table of "iDLG: Improved Deep Leakage from Gradients" (Zhao et al., 2020).

One image, the sigmoid LeNet with weights from U(-0.5, 0.5), redrawn for each trial; 1000 trials. DLG searches the
label together with the image and takes the largest label logit; iDLG takes the class with the smallest row sum of the
last layer's weight gradient.

Here DLG runs with its published settings (``DLG.preset("paper")``: start from N(0, 1), full L-BFGS steps), at the
smaller scales for fewer iterations. iDLG's label does not depend on the search, so only its rule is run. Images are
drawn without repetition from the test split.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from leakscope.attacks import DLG
from leakscope.data import Examples
from leakscope.federation import FedSGD
from leakscope.labels import idlg_label
from leakscope.models import build_model
from leakscope.network.layers import find_head
from leakscope.papers.base import (
    Group,
    Line,
    Progress,
    Row,
    attacked,
    examples_or_reason,
    measured_rows,
    paper_tables,
    wanted,
)

MEASURE = "label accuracy (%)"
#: Data set, its name in ``load_data`` (None: there is no reader), and the published accuracies in percent.
PUBLISHED = (
    ("MNIST", "mnist", {"DLG": 89.9, "iDLG": 100.0}),
    ("CIFAR-100", "cifar100", {"DLG": 83.3, "iDLG": 100.0}),
    ("LFW", None, {"DLG": 79.1, "iDLG": 100.0}),
)


@dataclass(frozen=True)
class Scale:
    images: int
    iterations: int


SCALES: Mapping[str, Scale] = {"smoke": Scale(3, 30), "small": Scale(20, 300), "paper": Scale(1000, 6000)}


def run(scale: str, seed: int, progress: Progress | None = None) -> list[Row]:
    size = replace(SCALES[scale], images=wanted(SCALES[scale].images))
    readable = {
        title: "no data" if name is None else examples_or_reason(name, split="test") for title, name, _ in PUBLISHED
    }

    def trials(examples: Examples) -> Iterator[dict[str, float]]:
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
        for number, index in enumerate(order[: size.images].tolist()):
            # Weights and start are drawn anew for each trial; trials of different seeds share none.
            yield trial(examples.subset([index]), size.iterations, seed=seed * 1_000_003 + number)

    def groups() -> Iterator[Group]:
        for title, _, published in PUBLISHED:
            examples = readable[title]
            lines = {
                method: Line(f"{title}, {method}", MEASURE, value, _note(method, size), kind="shares")
                for method, value in published.items()
            }
            yield Group(lines, examples if isinstance(examples, str) else trials(examples), main="DLG")

    total = size.images * sum(isinstance(examples, Examples) for examples in readable.values())
    return measured_rows(groups(), total, progress)


def trial(example: Examples, iterations: int, seed: int) -> dict[str, float]:
    """Return 100 for each method that finds the label of one image from the gradient of fresh weights, else 0."""
    model = build_model("dlg-lenet", input_shape=example.shape, num_classes=example.num_classes, seed=seed)
    observation = FedSGD().observe(
        model, example.x, example.y, value_range=example.value_range, num_classes=example.num_classes
    )
    label = int(example.y[0])
    attack = DLG.preset("paper", iterations=iterations)
    (right,) = attacked(observation, attack, example.x, example.y, seed).label_correct or (False,)
    head = find_head(observation.model, observation.input_shape, observation.num_classes)
    rule = idlg_label(observation.message.update[head.weight_name])
    return {"DLG": 100.0 * (right is True), "iDLG": 100.0 * (rule == label)}


def _note(method: str, size: Scale) -> str:
    full = SCALES["paper"]
    words = f"{size.images} of {full.images} images"
    if method == "DLG" and size.iterations < full.iterations:
        words += f", the search cut to {size.iterations} of {full.iterations} iterations"
    return words


TABLES = paper_tables("idlg", {"labels": run}, SCALES, counted=("labels",))
