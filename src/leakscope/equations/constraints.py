"""Build the linear equations that the input of a layer or of a residual block satisfies, sparse and in float64.

For a convolution z = w * x + b with output gradient k = dL/dz, both known, the input x of one example satisfies

    W x = z - b        weight constraints: one row (f, a, b) an output,        |z| rows
    K x = dL/dw        gradient constraints: one row (f, c, i, j) a weight,    |w| rows

(Zhu and Blaschko, R-GAP, ICLR 2021). Padded pixels are known to be zero, so their columns are left out; the published
code keeps them as unknowns with rows of their own, which comes to the same. For each pair of filters
k_f' W_g = w_g' K_f, so that the rank is at most |z| + |w| - filters^2 (see :func:`generic_rank`). For a linear layer
dL/dW = k x', worth exactly |k| x = (dL/dW)' k / |k|. The gradients of a BatchNorm in eval mode say nothing that its
outputs do not.

A residual block gives y = S x + W2 h + offsets with h = f(z1) and z1 = W1 x + b1, where S is the shortcut (the
identity, or linear layers) and f an activation that can be inverted. With y and k = dL/dy known,

    step 1, for (x, h):    S x + W2 h = y - offsets,           K2 h = dL/dW2,    K_S x = dL/dS
    between:               z1 = f^-1(h),                       k1 = (W2' k) f'(z1)
    step 2, for x:         S x = y - W2 h - offsets,           W1 x = z1 - b1,   K1 x = dL/dW1,    K_S x = dL/dS

and the loss's derivative by x is S' k + W1' k1: an extension of R-GAP, which solves chains without branches. Step 1
need only determine h. Beside an identity h must follow from K2 alone: a 3 x 3 convolution needs at least a ninth as
many filters as there are pixels. Where h is left open, the solution of least length is passed on; step 2 then may have
full rank and yet a wrong solution, which its residual shows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import scipy.sparse
import torch
from torch import Tensor, nn

from leakscope.contracts.errors import UserError
from leakscope.equations.linear_system import Array, LinearSystem, Matrix
from leakscope.network.chain import BATCH_NORMS, CONVOLUTIONS, Operation, ResidualStage, Stage

#: Rows and what they are equal to.
Block: TypeAlias = tuple[Matrix, Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class AffineMap:
    """Hold a stage without its activation: ``matrix`` x + ``offset``, and a block of rows for each gradient."""

    matrix: Matrix
    offset: Array
    gradients: tuple[Block, ...]


def operation_matrix(operation: Operation) -> Matrix:
    """Return the matrix of an operation over the flattened, unpadded input; the bias is :func:`operation_offset`.

    >>> layer = nn.AvgPool1d(2).double()
    >>> pool = Operation(name="pool", module=layer, input_shape=(1, 4), output_shape=(1, 2))
    >>> operation_matrix(pool).toarray().tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """
    module = operation.module
    if isinstance(module, nn.Linear):
        return scipy.sparse.csr_array(_numpy(module.weight))
    if isinstance(module, CONVOLUTIONS):
        return _convolution_matrix(operation, _numpy(module.weight).reshape(len(module.weight), -1), weights=True)
    if isinstance(module, BATCH_NORMS):
        scale, _ = _normalisation(module)
        return scipy.sparse.csr_array(scipy.sparse.diags_array(_each_place(scale, operation)))
    return _pooling_matrix(operation)


def operation_offset(operation: Operation) -> Array:
    if isinstance(operation.module, BATCH_NORMS):
        _, offset = _normalisation(operation.module)
        return _each_place(offset, operation)
    bias = getattr(operation.module, "bias", None)
    return np.zeros(math.prod(operation.output_shape)) if bias is None else _each_place(_numpy(bias), operation)


def gradient_block(operation: Operation, output_gradient: Array, gradient: Array) -> Block:
    """Return the rows K x = dL/dw for the operation's own input x, from the output gradient at its flattened output.

    For a linear layer |k| x = (dL/dW)' k / |k| without loss, for K'K = |k|^2; no rows where the output gradient is 0.

    >>> layer = Operation(name="fc", module=nn.Linear(2, 2), input_shape=(2,), output_shape=(2,))
    >>> rows, target = gradient_block(layer, np.array([3.0, 4.0]), np.array([[3.0, 6.0], [4.0, 8.0]]))
    >>> rows.toarray().tolist(), target.tolist()
    ([[5.0, 0.0], [0.0, 5.0]], [5.0, 10.0])
    """
    if isinstance(operation.module, CONVOLUTIONS):
        signal = output_gradient.reshape(operation.output_shape[0], -1)
        return _convolution_matrix(operation, signal, weights=False), gradient.reshape(-1)
    length = float(np.linalg.norm(output_gradient))
    unknowns = operation.input_shape[0]
    if length == 0:
        return scipy.sparse.csr_array((0, unknowns)), np.zeros(0)
    return scipy.sparse.csr_array(length * scipy.sparse.eye_array(unknowns)), gradient.T @ (output_gradient / length)


def stage_system(
    stage: Stage, outputs: Array | Tensor, output_gradient: Array | Tensor, update: Mapping[str, Tensor]
) -> LinearSystem:
    """Return all equations for a stage's input, from what its activation received and the loss's derivative there.

    A first linear layer with a gradient says all on its own: there the weight constraints are left out, as in R-GAP.
    """
    parts = affine_map(stage, output_gradient, update)
    first = stage.operations[0]
    decided = isinstance(first.module, nn.Linear) and first.weight_name in update and parts.gradients[0][0].shape[0] > 0
    return stacked(parts.gradients if decided else [(parts.matrix, _flat(outputs) - parts.offset), *parts.gradients])


def affine_map(stage: Stage, output_gradient: Array | Tensor, update: Mapping[str, Tensor]) -> AffineMap:
    """Return ``stage`` without its activation, where the loss's derivative is ``output_gradient``."""
    _refuse_blocks(stage)
    matrices = [operation_matrix(operation) for operation in stage.operations]
    # Output gradients at the output of each operation, the last one's first.
    signals = [_flat(output_gradient)]
    for matrix in matrices[:0:-1]:
        signals.append(np.asarray(matrix.T @ signals[-1]))
    signals.reverse()
    before: Matrix | None = None  # the product of the matrices so far; None is the identity
    offset = np.zeros(stage.unknowns)
    gradients: list[Block] = []
    for operation, matrix, at_output in zip(stage.operations, matrices, signals, strict=True):
        gradient = None if operation.weight_name is None else update.get(operation.weight_name)
        if gradient is not None and not isinstance(operation.module, BATCH_NORMS):
            rows, target = gradient_block(operation, at_output, _numpy(gradient))
            gradients.append(
                (rows if before is None else scipy.sparse.csr_array(rows @ before), target - rows @ offset)
            )
        offset = matrix @ offset + operation_offset(operation)
        before = matrix if before is None else scipy.sparse.csr_array(matrix @ before)
    assert before is not None  # a stage has operations
    return AffineMap(matrix=before, offset=offset, gradients=tuple(gradients))


def stacked(blocks: Sequence[Block]) -> LinearSystem:
    return LinearSystem(
        scipy.sparse.csr_array(scipy.sparse.vstack([rows for rows, _ in blocks])),
        np.concatenate([target for _, target in blocks]),
        tuple(int(rows.shape[0]) for rows, _ in blocks),
    )


def signal_at_input(stage: Stage, output_gradient: Array | Tensor) -> Array:
    """Return the loss's derivative by the input of ``stage``, from that by what its activation received."""
    _refuse_blocks(stage)
    signal = _flat(output_gradient)
    for operation in reversed(stage.operations):
        signal = np.asarray(operation_matrix(operation).T @ signal)
    return signal


def generic_rank(stage: Stage) -> int | None:
    """Return min(unknowns, |z| + |w| - filters^2) of an ungrouped convolution, all unknowns of a linear layer, or None.

    The rank never exceeds it where a filter has as many weights, and as many outputs, as there are filters. It attains
    it with random weights and stride 1 and padding up to half the kernel; more padding or strides can cost a few ranks.
    """
    if len(stage.operations) != 1:
        return None
    module = stage.operations[0].module
    if isinstance(module, nn.Linear):
        return stage.unknowns
    if isinstance(module, CONVOLUTIONS) and module.groups == 1:
        filters = module.out_channels
        return min(stage.unknowns, math.prod(stage.output_shape) + module.weight.numel() - filters**2)
    return None


def _refuse_blocks(stage: Stage) -> None:
    if isinstance(stage, ResidualStage):
        raise UserError(f"{stage.name!r} is a residual block, whose equations are those of ResidualSystem")


def _normalisation(module: nn.Module) -> tuple[Array, Array]:
    assert isinstance(module, BATCH_NORMS)
    assert module.running_mean is not None
    assert module.running_var is not None
    scale = 1 / np.sqrt(_numpy(module.running_var) + module.eps)
    if module.affine:
        scale = scale * _numpy(module.weight)
    offset = -scale * _numpy(module.running_mean)
    return scale, offset + _numpy(module.bias) if module.affine else offset


def _each_place(channels: Array, operation: Operation) -> Array:
    return np.repeat(channels, math.prod(operation.output_shape) // len(channels))


def _convolution_matrix(operation: Operation, values: Array, *, weights: bool) -> Matrix:
    """Return W (``weights``: values of (filter, kernel position)) or K (values of (filter, output position))."""
    module = operation.module
    assert isinstance(module, CONVOLUTIONS)
    places = _patches(operation)  # input column of (channel and kernel position, output position), -1 in the padding
    positions, outputs = places.shape
    filters, groups = module.out_channels, module.groups
    each = positions // groups
    rows, columns, entries = [], [], []
    for group in range(groups):
        part = places[group * each : (group + 1) * each]
        kernel, output = np.nonzero(part >= 0)
        for member in range(group * filters // groups, (group + 1) * filters // groups):
            rows.append(member * outputs + output if weights else member * each + kernel)
            columns.append(part[kernel, output])
            entries.append(values[member, kernel] if weights else values[member, output])
    shape = (filters * (outputs if weights else each), math.prod(operation.input_shape))
    triple = (np.concatenate(entries), (np.concatenate(rows), np.concatenate(columns)))
    return scipy.sparse.csr_array(scipy.sparse.coo_array(triple, shape=shape))


def _patches(operation: Operation) -> Array:
    module = operation.module
    assert isinstance(module, CONVOLUTIONS)
    size = math.prod(operation.input_shape)
    numbers = torch.arange(1.0, size + 1, dtype=torch.float64).reshape(1, *operation.input_shape)
    pads: list[int] = []
    for axis in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            total = module.dilation[axis] * (module.kernel_size[axis] - 1)
            pads += [total // 2, total - total // 2]
        else:
            amount = 0 if isinstance(module.padding, str) else module.padding[axis]
            pads += [amount, amount]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    numbers = nn.functional.pad(numbers, pads, mode=mode)
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    if isinstance(module, nn.Conv1d):
        numbers = numbers[:, :, None]
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
    windows = nn.functional.unfold(numbers, kernel, dilation=dilation, stride=stride)[0]
    return np.asarray(windows.round().long().numpy() - 1)


def _pooling_matrix(operation: Operation) -> Matrix:
    """Take the Kronecker product of the axes, for average pooling works on each alone."""
    module = operation.module
    matrix: Matrix = scipy.sparse.csr_array(scipy.sparse.eye_array(operation.input_shape[0]))
    for axis, (size, target) in enumerate(zip(operation.input_shape[1:], operation.output_shape[1:], strict=True)):
        impulses = torch.eye(size, dtype=torch.float64)[:, None]
        if isinstance(module, nn.AvgPool1d | nn.AvgPool2d):
            sizes = (module.kernel_size, module.stride, module.padding)
            kernel, stride, padding = (size if isinstance(size, int) else size[axis] for size in sizes)
            rest = (module.ceil_mode, module.count_include_pad)
            one = nn.functional.avg_pool1d(impulses, kernel, stride, padding, *rest)
        else:
            one = nn.functional.adaptive_avg_pool1d(impulses, target)
        matrix = scipy.sparse.csr_array(scipy.sparse.kron(matrix, scipy.sparse.csr_array(one[:, 0].numpy().T)))
    return matrix


def _flat(values: Array | Tensor) -> Array:
    return (_numpy(values) if isinstance(values, Tensor) else np.asarray(values, dtype=float)).reshape(-1)


def _numpy(values: Tensor) -> Array:
    return np.asarray(values.detach().to(device="cpu", dtype=torch.float64).numpy())


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualSystem:
    block: ResidualStage
    outputs: Array
    output_gradient: Array
    update: Mapping[str, Tensor]

    @cached_property
    def first(self) -> LinearSystem:
        """Return step 1: the unknowns are the block's input, then the input of the body's second layer."""
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
        whole = self.first.spectrum_up_to(limit)
        inputs = self.block.unknowns
        if whole is None:
            return None
        if self.block.shortcut is None:
            return whole.rank - inputs
        alone = LinearSystem(self.first.matrix[:, :inputs], self.first.target, self.first.blocks)
        return whole.rank - alone.rank

    def second(self, hidden: Array, received: Array, inner_signal: Array) -> LinearSystem:
        """Return step 2, for the block's input; ``received`` is z1 and ``inner_signal`` the loss's derivative by it."""
        short, outer = self._shortcut, self._outer
        inner = affine_map(self.block.inner, inner_signal, self.update)
        left = self.outputs - outer.matrix @ hidden - outer.offset - short.offset
        paths = [(short.matrix, left), (inner.matrix, received - inner.offset)]
        return stacked([*paths, *inner.gradients, *short.gradients])

    def signal_at_input(self, inner_signal: Array) -> Array:
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
