"""Read labels by replay: of all classes, the one whose derivative has the direction of the observed one."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from leakscope.network.layers import Head


def nearest_labels(
    observed: Tensor, logits: Tensor, head: Head, adjoint: Callable[[Tensor], Tensor] = lambda delta: delta
) -> tuple[Tensor, Tensor, float]:
    """Return each example's label, its derivative by the model's outputs, and the largest sine of the angles left.

    ``observed`` (n, d): the derivatives at a cut, of any positive scale; ``adjoint`` takes derivatives by the outputs
    of the head's layer there, by default they are meant.

    >>> head, logits = Head("weight", "bias", "", "log_softmax"), torch.tensor([[0.5, 0.0, 1.0]], dtype=torch.float64)
    >>> observed = 3 * head.derivatives(logits, torch.eye(3).double()[[2]])[0]
    >>> labels, _, apart = nearest_labels(observed, logits, head)
    >>> labels.tolist(), apart < 1e-12
    ([2], True)
    """
    best = torch.full((len(logits),), torch.inf, dtype=torch.float64)
    labels = torch.zeros(len(logits), dtype=torch.int64)
    output_gradients = torch.zeros_like(logits)
    for label in range(logits.shape[1]):
        targets = F.one_hot(torch.full((len(logits),), label), logits.shape[1])
        delta, by_outputs = head.derivatives(logits, targets)
        given = adjoint(delta)
        # Clipping scales all of an update, and a mean divides by the number of examples.
        factor = (given * observed).sum(1) / given.square().sum(1).clamp_min(1e-300)
        apart = (observed - factor[:, None] * given).norm(dim=1) / observed.norm(dim=1).clamp_min(1e-300)
        better = (apart < best) & (factor > 0)
        best = torch.where(better, apart, best)
        labels[better] = label
        output_gradients[better] = (factor[:, None] * by_outputs)[better]
    return labels, output_gradients, float(best.max())
