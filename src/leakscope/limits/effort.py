"""Count what one pass through a model takes, and refuse what theory cannot do beforehand.

Operations and numbers are counted on one real pass, which is ended once it is over any limit, so that refusing a model
is quick however large it is; and by count, not time, the answer is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leakscope.contracts.protocol import client_copy

#: Operations of a pass times passes, a minute or two on one processor: for products with a Jacobian and its transpose,
#: for columns of a Jacobian, and for plain gradients.
PRODUCTS_WORK, COLUMNS_WORK, GRADIENTS_WORK = 2e10, 7e10, 2e12
#: Numbers that a pass makes on the way; second derivatives hold about a hundred bytes for each.
MAX_NUMBERS = 1e7
#: Where a pass of one example, or of two, is ended: too much for any of these.
MAX_OPERATIONS = 1e10
#: What a step of a recurrent layer counts where calls do: 0.8 ms of a product with a Jacobian and its transpose.
STEP_OPERATIONS = 5e5
_ADVICE = "take smaller inputs, fewer examples or a smaller model"


@dataclass(frozen=True)
class Effort:
    """One pass of a batch: multiplications and additions, and numbers made on the way; ``whole`` unless it was ended.

    ``steps`` are those of recurrent layers, one after another: however small, each takes the time of its calls.

    >>> print(Effort(6e9, 2e6).refusal("the floor", passes=48, work=2e10))
    the floor was not computed: one pass takes 6e+09 operations, and it takes 48 passes of 4e+08 at most; take smaller \
inputs, fewer examples or a smaller model
    """

    operations: float
    numbers: float
    whole: bool = True
    steps: float = 0.0

    def times(self, passes: float) -> Effort:
        return Effort(self.operations * passes, self.numbers * passes, self.whole, self.steps * passes)

    def with_calls(self) -> Effort:
        """Count each step of a recurrent layer as the operations that its calls take the time of."""
        return replace(self, operations=self.operations + STEP_OPERATIONS * self.steps)

    def refusal(self, what: str, passes: float, work: float, numbers: float = MAX_NUMBERS) -> str | None:
        """Say why ``what`` is not computed; None where its passes take no more than ``work`` and ``numbers`` in all."""
        if not self.whole or self.operations * passes > work:
            size = f"{'' if self.whole else 'more than '}{self.operations:.0e} operations"
            limit = f"it takes {passes:.0f} passes of {min(work / passes, MAX_OPERATIONS):.0e} at most"
        elif self.numbers > numbers:
            size = f"{self.numbers:.0e} numbers on its way"
            limit = f"it holds derivatives of {numbers:.0e} at most, a gigabyte"
        else:
            return None
        return f"{what} was not computed: one pass takes {size}, and {limit}; {_ADVICE}"


def effort_of(model: nn.Module, input_shape: tuple[int, ...], examples: int = 1) -> Effort:
    """Count what one pass of so many examples takes; nothing where the model cannot be run, which others tell better.

    >>> effort_of(nn.Linear(100, 10), (100,), examples=3)
    Effort(operations=6000.0, numbers=30.0, whole=True, steps=0.0)
    """
    count = _Count()
    rows = min(2, examples)  # two where there are several: BatchNorm in train mode cannot normalise a single number
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            twin = client_copy(model, "eval").float().cpu()
            x = torch.full((rows, *input_shape), 0.5)
            with count:
                twin(x)
        except _PassEnded:
            pass
        except Exception:  # noqa: BLE001 - the user's model may raise anything
            return Effort(0, 0)
    scale = examples / rows
    whole = count.operations <= MAX_OPERATIONS
    return Effort(count.operations * scale, count.numbers * scale, whole, count.rows_of_steps / rows)


class _PassEnded(Exception):
    """The pass is over the limit already."""


class _Count(TorchFunctionMode):
    """Add up what every function of torch does that the model calls, by itself or through its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.numbers = self.rows_of_steps = 0

    def __torch_function__(
        self, function: Any, _types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        answer = function(*arguments, **(options or {}))
        made = list(_tensors(answer))
        self.numbers += sum(value.numel() for value in made)
        name = getattr(function, "__name__", "")
        rule = _OPERATIONS.get(name)
        inputs = list(_tensors([arguments, (options or {}).values()]))
        if rule is not None and made:
            self.operations += rule(inputs, made[0])
        if name in _RECURRENT:
            # Every example takes the steps of its sequence in each layer and direction, which have two matrices each.
            self.rows_of_steps += _rows(made[0]) * sum(weights.dim() == 2 for weights in inputs) // 2
        if self.operations > MAX_OPERATIONS:
            raise _PassEnded
        return answer


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | type({}.values())):
        for item in value:
            yield from _tensors(item)


def _per_number(inputs: list[Tensor], made: Tensor) -> int:
    """Each number, of the output or of a transposed convolution's input, meets one row of the weights."""
    return 2 * made.numel() * inputs[1].numel() // max(1, len(inputs[1]))


def _rows(made: Tensor) -> int:
    return made.numel() // made.shape[-1]


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_OPERATIONS: Mapping[str, Callable[[list[Tensor], Tensor], int]] = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), _per_number),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), lambda inputs, _: _per_number(inputs, inputs[0])
    ),
    **dict.fromkeys(
        ("matmul", "__matmul__", "bmm", "mm", "einsum"), lambda inputs, made: 2 * made.numel() * inputs[0].shape[-1]
    ),
    # Every step of the sequence reads all weights.
    **dict.fromkeys(
        _RECURRENT,
        lambda inputs, made: 2 * _rows(made) * sum(weights.numel() for weights in inputs if weights.dim() == 2),
    ),
    "scaled_dot_product_attention": lambda inputs, _: 4 * inputs[0].numel() * inputs[1].shape[-2],
    # The projections; torch counts nothing inside of this function.
    "multi_head_attention_forward": lambda inputs, _: (
        2 * inputs[0].numel() * sum(len(weights) for weights in inputs[3:] if weights.dim() == 2)
    ),
}
