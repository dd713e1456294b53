"""The one table of measures: policy, verdict, console, page and comparison are made from it.

A measure is a number of one example. ``better`` is the direction in which the adversary gains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from leakscope.contracts.inputs import InputSpace
from leakscope.contracts.task import Task

Better = Literal["higher", "lower"]
NOT_TOLD = "not measured, and the job does not say why"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure.

    ``key`` is its name in an example's record, ``digits`` how many a table shows after the point (None: a share).
    ``of`` is what it compares: inputs, or the targets of a task whose guesses are right or wrong ("labels") or near or
    far ("targets"). ``limit`` is the key of the policy that bounds it, of every example or over a setting (``per``).
    ``otherwise`` is why it is missing where a job does not say.
    """

    name: str
    label: str
    better: Better
    meaning: str
    span: str
    key: str = ""
    unit: str = ""
    digits: int | None = 3
    of: Literal["inputs", "labels", "targets"] = "inputs"
    limit: str | None = None
    per: Literal["example", "setting"] = "example"
    otherwise: str = NOT_TOLD

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key or self.name)

    @property
    def title(self) -> str:
        return f"{self.label}, {self.unit}" if self.unit else self.label

    def applies(self, inputs: InputSpace, task: Task) -> bool:
        """Whether it means something for examples that live here and a client that minimises this."""
        if self.of == "inputs":
            return self.name in inputs.measures
        return task.discrete if self.of == "labels" else not task.discrete


_NO_GUESS = "the attack guesses no labels"
_ALL = (
    Measure(
        name="mse", label="MSE", better="lower", span="0 to 1, lower = closer", digits=4,
        meaning="Mean squared error in unit space [0, 1].",
    ),
    Measure(
        name="rmse", label="RMSE", better="lower", span="0 to 1, lower = closer", digits=4,
        meaning="Root of the mean squared error.",
    ),
    Measure(
        name="rmse_maxnorm", label="RMSE, max-norm", better="lower", span="0 to 1", digits=4,
        meaning="RMSE after the error is divided by its largest entry, for comparison with published tables: it tells "
        "the error's shape, not its size.",
    ),
    Measure(
        name="psnr", label="PSNR", unit="dB", better="higher", span="0 dB and up, higher = closer", digits=1,
        limit="max_psnr",
        meaning="Peak signal-to-noise ratio, −10·log₁₀ of the mean squared error, for each example in unit space "
        "[0, 1]. About 20 dB is recognisable, above 30 dB nearly identical; 200 dB stands for an exact copy.",
    ),
    Measure(
        name="ssim", label="SSIM", better="higher", span="−1 to 1, higher = closer", limit="max_ssim",
        meaning="Structural similarity: luminance, contrast and structure in local windows. Images only.",
    ),
    Measure(
        name="lpips", label="LPIPS", better="lower", span="0 and up, lower = closer",
        meaning="Perceptual distance between deep features; needs a network for it.",
    ),
    Measure(
        name="label_accuracy", key="label_correct", label="Labels", better="higher", span="share from 0 to 100 %",
        digits=None, of="labels", otherwise=_NO_GUESS,
        meaning="How many labels the attack named correctly, where it names labels.",
    ),
    Measure(
        name="target_error", label="Target error", better="lower", span="0 and up, lower = closer", of="targets",
        otherwise=_NO_GUESS,
        meaning="Root-mean-square distance of the recovered targets from the true ones, in their own units.",
    ),
    Measure(
        name="identification", key="identified", label="Identified", better="higher", span="share from 0 to 100 %",
        digits=None, limit="max_identification", per="setting",
        meaning="Whether the reconstruction is nearer to its own original than to every other candidate of the data; "
        "the chance of a blind guess is stated beside it.",
    ),
)  # fmt: skip
MEASURES: Mapping[str, Measure] = MappingProxyType({measure.name: measure for measure in _ALL})
