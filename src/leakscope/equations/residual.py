"""The linear equations of a residual block, in two steps: first what its second layer receives, then its own input.

A block gives y = S x + W2 h + offsets with h = f(z1) and z1 = W1 x + b1, where S is the shortcut (the identity, or
linear layers) and f an activation that can be inverted. With y and k = dL/dy known, as of any layer,

    step 1, for (x, h):    S x + W2 h = y - offsets,           K2 h = dL/dW2,    K_S x = dL/dS
    between:               z1 = f^-1(h),                       k1 = (W2' k) f'(z1)
    step 2, for x:         S x = y - W2 h - offsets,           W1 x = z1 - b1,   K1 x = dL/dW1,    K_S x = dL/dS

and the loss's derivative by x is S' k + W1' k1. Zhu and Blaschko (R-GAP, ICLR 2021) solve chains without branches;
the two steps are an extension of their equations.

Step 1 need not determine x, only h. Beside an identity its first equation says nothing of h, so that h must follow from
K2 alone: each of its channels has as many unknowns as pixels, and as many rows as weights that read it. A 3 x 3
convolution needs at least a ninth as many filters as there are pixels. Where h is left open, the solution of least
length is passed on; step 2 then may have full rank and yet a wrong solution, which its residual shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse
from torch import Tensor

from leakscope.equations.constraints import AffineMap, affine_map, signal_at_input, stacked
from leakscope.equations.linear_system import Array, LinearSystem
from leakscope.network.chain import ResidualStage


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualSystem:
    """The equations of ``block``, from what its last activation received and the loss's derivative there."""

    block: ResidualStage
    outputs: Array
    output_gradient: Array
    update: Mapping[str, Tensor]

    @cached_property
    def first(self) -> LinearSystem:
        """Step 1: the unknowns are the block's input, then the input of the body's second layer."""
        short, outer = self._shortcut, self._outer
        blocks = [(scipy.sparse.hstack([short.matrix, outer.matrix]), self.outputs - short.offset - outer.offset)]
        for rows, target in outer.gradients:
            zeros = scipy.sparse.csr_array((rows.shape[0], self.block.unknowns))
            blocks.append((scipy.sparse.hstack([zeros, rows]), target))
        for rows, target in short.gradients:
            zeros = scipy.sparse.csr_array((rows.shape[0], self.block.outer.unknowns))
            blocks.append((scipy.sparse.hstack([rows, zeros]), target))
        return stacked(blocks)

    def hidden_rank(self, limit: int) -> int | None:
        """How many directions of the second layer's input step 1 determines: its rank without what x accounts for.

        None where step 1 has more than ``limit`` unknowns and rows.
        """
        whole = self.first.spectrum_up_to(limit)
        inputs = self.block.unknowns
        if whole is None:
            return None
        if self.block.shortcut is None:
            return whole.rank - inputs
        alone = LinearSystem(self.first.matrix[:, :inputs], self.first.target, self.first.blocks)
        return whole.rank - alone.rank

    def hidden(self, solution: Array) -> Array:
        """The input of the body's second layer, from a solution of step 1."""
        return solution[self.block.unknowns :]

    @cached_property
    def signal_at_hidden(self) -> Array:
        """The loss's derivative by the input of the body's second layer."""
        return signal_at_input(self.block.outer, self.output_gradient)

    def second(self, hidden: Array, received: Array, inner_signal: Array) -> LinearSystem:
        """Step 2, for the block's input; ``received`` is z1 and ``inner_signal`` the loss's derivative by it."""
        short, outer = self._shortcut, self._outer
        inner = affine_map(self.block.inner, inner_signal, self.update)
        left = self.outputs - outer.matrix @ hidden - outer.offset - short.offset
        paths = [(short.matrix, left), (inner.matrix, received - inner.offset)]
        return stacked([*paths, *inner.gradients, *short.gradients])

    def signal_at_input(self, inner_signal: Array) -> Array:
        """The loss's derivative by the block's input."""
        shortcut = self.block.shortcut
        passed = self.output_gradient if shortcut is None else signal_at_input(shortcut, self.output_gradient)
        return passed + signal_at_input(self.block.inner, inner_signal)

    @cached_property
    def _outer(self) -> AffineMap:
        return affine_map(self.block.outer, self.output_gradient, self.update)

    @cached_property
    def _shortcut(self) -> AffineMap:
        if self.block.shortcut is not None:
            return affine_map(self.block.shortcut, self.output_gradient, self.update)
        size = self.block.unknowns
        identity = scipy.sparse.csr_array(scipy.sparse.eye_array(size))
        return AffineMap(matrix=identity, offset=np.zeros(size), gradients=())
