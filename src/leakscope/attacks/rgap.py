"""R-GAP: one example solved layer by layer from the last to the first, without a search.

Junyi Zhu and Matthew Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021. Where a network is a chain of
convolutions or linear layers, each followed by an activation f that can be inverted, the input x of a layer follows
from the input y of the next one and the loss's derivative k by what the layer gives out:

    z = f^-1(y),    k = (W_next' k_next) f'(z),    W x = z - b  and  K x = dL/dw        (see limits/constraints.py)

The recursion starts at the logits: k is the gradient of the last bias; without a bias and with one output (logistic
loss, as in the paper) it follows from <w, dL/dw> by Lambert's W, without a bias and with several classes from the
length that the layer's input must have for softmax and gradient to agree (limits/last_layer.py).

Differences from the paper and its code: padded pixels are no unknowns; the equations of a layer are brought to one
scale and solved by sparse normal equations with corrections, in float64 whatever the update's precision; the margin is
in closed form instead of 30 000 steps of descent, and if two margins or labels explain the update, both are followed
and the better residual wins. In a LeakyReLU net without any bias both are exact, for it is homogeneous: there the
larger picture that fits the value range is taken, and a note says so. Biases, linear layers anywhere, average pooling,
several classes, BatchNorm that uses running statistics and residual blocks (limits/residual.py; they have two rows in
``info["layers"]``, of which "(inner)" is the input of the body's second layer) are allowed. A weight difference of
several local steps is taken for one gradient; several examples give one mixture.

Where a layer has fewer independent equations than unknowns, its solution of least length is passed on and everything
before it is an approximation; ``info["layers"]`` has rows, rank and unknowns of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leakscope.attacks.base import Attack, NotApplicable, Progress, Reconstruction
from leakscope.attacks.recursion import Solver, mean_gradient, reconstruction, walk_back
from leakscope.limits.activations import Unsupported
from leakscope.limits.chain import read_chain
from leakscope.observation import Observation


@dataclass(frozen=True, kw_only=True)
class RGAP(Attack):
    """Solve for the input of every layer, last one first; no search.

    ``clip`` is the largest size of a tanh output that is inverted (0.9999 in published code); None takes the largest
    that the update's precision can tell from 1. ``ranks`` computes the rank of each layer's equations for the report.
    """

    requires = ("num_examples",)

    clip: float | None = None
    ranks: bool = True

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < 1:
            raise ValueError(f"clip: expected 0 < clip < 1 or None, got {self.clip}")

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        try:
            eval_mode = observation.batchnorm == "eval"
            chain = read_chain(observation.model, observation.input_shape, residual=True, batch_norm=eval_mode)
        except Unsupported as error:
            raise NotApplicable(str(error)) from error
        update, scaled, why = mean_gradient(observation)
        clip = 1 - 4 * torch.finfo(observation.dtype).eps if self.clip is None else self.clip
        solver = Solver(chain=chain, update=update, clip=clip, ranks=self.ranks)
        walk, notes = walk_back(solver, observation, scaled, why, progress)
        return reconstruction(observation, walk, notes)
