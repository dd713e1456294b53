"""The ways to evaluate an objective and its derivative for every row: all give the same numbers up to rounding.

"plain" takes rows one after another by plain autograd. "batched" takes all at once through ``torch.func``, which costs
more a row than it saves unless the model is small: it saves calls, not arithmetic. "compiled" takes rows one after
another through one compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from leakscope.contracts.errors import UserError
from leakscope.matching.compilation import FUNCTIONS, Compiled
from leakscope.matching.derivatives import gradients
from leakscope.matching.search import Evaluation

Way = Literal["plain", "batched", "compiled"]
#: The objective and its judged values (k,), of an example, the other numbers, the iteration, and facts that stay.
Objective = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]
#: From examples (rows, n), other numbers (rows, m), and the iteration.
Step = Callable[[Tensor, Tensor, Tensor], Evaluation]


def make_step(
    way: Way, objective: Objective, facts: Any, example: tuple[Tensor, Tensor, Tensor], numbers: bool
) -> tuple[Step, Compiled | None]:
    """The step, and how it was compiled; ``numbers``: the derivative is by the other numbers too.

    ``example``: one row's arguments, of which a compiled step takes the shapes.
    """
    if way == "batched":
        return _batched(objective, facts, numbers), None
    if way == "plain":
        return _one_by_one(lambda *row: _differentiate(objective, facts, numbers, *row)), None
    if way != "compiled":
        raise UserError(f"way: expected one of {', '.join(get_args(Way))}, got {way!r}")
    leaves, form = tree_flatten(facts)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    held = [leaves[place] for place in places]

    def function(main: Tensor, others: Tensor, iteration: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return _differentiate(objective, tree_unflatten(given, form), numbers, main, others, iteration)

    with sdpa_kernel(SDPBackend.MATH):
        compiled = FUNCTIONS.get(function, (*example, *held))
    return _one_by_one(lambda *row: compiled.function(*row, *held)), compiled


def _differentiate(
    objective: Objective, facts: Any, numbers: bool, main: Tensor, others: Tensor, iteration: Tensor
) -> tuple[Tensor, ...]:
    """Objective, judged values and gradient of one row."""
    with torch.enable_grad():
        main = main.detach().requires_grad_()
        others = others.detach().requires_grad_(numbers)
        value, judged = objective(main, others, iteration, facts)
        found = gradients(value, (main, others) if numbers else (main,))
    return value.detach(), judged.detach(), torch.cat(found) if numbers else found[0]


def _one_by_one(evaluate: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> Step:
    def step(mains: Tensor, others: Tensor, iteration: Tensor) -> Evaluation:
        # Only the plain form of attention can be differentiated twice.
        with sdpa_kernel(SDPBackend.MATH):
            each = [evaluate(main, other, iteration) for main, other in zip(mains, others, strict=True)]
        if len(each) == 1:
            value, judged, gradient = each[0]
            return value[None], judged[None], gradient[None]
        value, judged, gradient = map(torch.stack, zip(*each, strict=True))
        return value, judged, gradient

    return step


def _batched(objective: Objective, facts: Any, numbers: bool) -> Step:
    derivative = grad_and_value(objective, argnums=(0, 1) if numbers else (0,), has_aux=True)
    together = vmap(derivative, in_dims=(0, 0, None, None))

    def step(mains: Tensor, others: Tensor, iteration: Tensor) -> Evaluation:
        with sdpa_kernel(SDPBackend.MATH):
            found, (value, judged) = together(mains, others, iteration, facts)
        return value.detach(), judged.detach(), torch.cat(found, dim=1).detach()

    return step
