"""The rank of the Jacobian of the gradient with respect to the inputs: whether small changes of them show in it.

At a generic point, full rank means that the inputs are determined locally (up to the order of the examples); less means
that there are directions in which they can change without a trace, whatever the attack.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.observation import Observation
from leakscope.equations.decomposition import Decomposition, JacobianRank, decompose
from leakscope.limits.effort import COLUMNS_WORK, Effort, effort_of
from leakscope.matching.gradient_map import GradientMap, Progress

#: Above these the Jacobian is never made: unknowns, and entries of the matrix (two gigabytes in float64).
MAX_UNKNOWNS = 5000
MAX_ENTRIES = 2**28
#: Up to so many unknowns the Jacobian of a small model is made unasked: above, it can take minutes.
QUICK_UNKNOWNS = 1024


def too_large(unknowns: int, columns: int) -> str | None:
    """Why a Jacobian of this size is not made; None where it is.

    >>> too_large(6000, 10)
    '6000 unknowns; the Jacobian is made up to 5000'
    """
    if unknowns > MAX_UNKNOWNS:
        return f"{unknowns} unknowns; the Jacobian is made up to {MAX_UNKNOWNS}"
    if unknowns * columns > MAX_ENTRIES:
        return f"the Jacobian has {unknowns} x {columns} entries; it is made up to {MAX_ENTRIES} in all"
    return None


def not_unasked(unknowns: int, effort: Effort) -> str | None:
    """Why the Jacobian of a model is not made unless asked for; None where it is."""
    if unknowns > QUICK_UNKNOWNS:
        return f"{unknowns} unknowns; above {QUICK_UNKNOWNS} only if asked for (--exact)"
    return effort.refusal("the Jacobian", unknowns, COLUMNS_WORK)


def make_jacobian(mapping: GradientMap, flat: Tensor, *, progress: Progress | None = None) -> Tensor | str:
    """The Jacobian with compressed columns, or why it was not made.

    The compression takes the examples behind a linear layer's gradient for linearly independent. Where they are not, as
    with an input of nothing but zeros, it would lose something, which a product with one random direction shows: then
    every entry gets a column of its own.
    """
    # The count first: the number of columns needs a pass through the model.
    reason = too_large(mapping.unknowns, 1) or too_large(mapping.unknowns, mapping.columns(flat))
    if reason is not None:
        return reason
    try:
        matrix = mapping.jacobian(flat, progress=progress)
        draws = torch.Generator().manual_seed(0)
        direction = torch.randn(len(flat), generator=draws, dtype=torch.float64).to(flat)
        whole, ours = float(mapping.linearise(flat).forward(direction).norm()), float((direction @ matrix).norm())
        if not math.isclose(whole, ours, rel_tol=1e3 * math.sqrt(torch.finfo(flat.dtype).eps)):
            reason = too_large(mapping.unknowns, mapping.entries)
            if reason is not None:
                return reason
            matrix = mapping.jacobian(flat, exact=True, progress=progress)
    except RuntimeError as error:  # an operation without a forward derivative, or one that vmap does not know
        return f"the model cannot be differentiated twice in forward mode: {str(error).strip().splitlines()[0]}"
    if not bool(torch.isfinite(matrix).all()):
        return "the Jacobian has NaN or infinite entries at this input"
    return matrix


def gradient_map_at(
    model: nn.Module,
    input_shape: tuple[int, ...],
    batch: int,
    num_classes: int,
    *,
    value_range: ValueRange | None = None,
    seed: int = 0,
    inputs: Tensor | None = None,
    labels: Tensor | None = None,
) -> tuple[GradientMap, Tensor]:
    """The map of a model in float64 and a batch to look at it: ``inputs`` with ``labels``, or a random one.

    A random batch lies in the box ([0, 1] without one) and has the labels 0, 1, 2, ...
    """
    update = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    # The observation copies the model, so nothing below can reach the caller's.
    box = value_range or ValueRange()
    observation = Observation.from_update(
        model, update, input_shape=input_shape, num_classes=num_classes, num_examples=batch, value_range=box
    ).to(device="cpu", dtype=torch.float64)
    if labels is None:
        labels = torch.arange(batch) % max(2, num_classes)  # one output is the logit of two classes
    mapping = GradientMap.of(observation, labels)
    if inputs is not None:
        return mapping, mapping.flat(inputs.to(device="cpu", dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    return mapping, torch.rand((batch, *input_shape), generator=generator, dtype=torch.float64).flatten()


def jacobian_rank(
    model: nn.Module,
    input_shape: tuple[int, ...],
    batch: int,
    num_classes: int,
    *,
    value_range: ValueRange | None = None,
    seed: int = 0,
    exact: bool = False,
    progress: Progress | None = None,
) -> JacobianRank:
    """The rank at a random batch in the box ([0, 1] without one) with known labels 0, 1, 2, ...; float64.

    ``exact`` asks for it above QUICK_UNKNOWNS unknowns too. A single linear layer of three classes has 3 x 2 weights
    and so shows two inputs of one example:

    >>> jacobian_rank(nn.Linear(2, 3), (2,), batch=1, num_classes=3).rank
    2
    """
    mapping, flat = gradient_map_at(model, input_shape, batch, num_classes, value_range=value_range, seed=seed)
    spectrum = decompose_at(mapping, flat, exact=exact, progress=progress)
    return JacobianRank(mapping.unknowns, reason=spectrum) if isinstance(spectrum, str) else spectrum.summary()


def decompose_at(
    mapping: GradientMap, flat: Tensor, *, exact: bool = False, vectors: bool = False, progress: Progress | None = None
) -> Decomposition | str:
    """The singular values of the Jacobian at ``flat``, or why they were not computed."""
    if not exact:
        reason = not_unasked(mapping.unknowns, effort_of(mapping.victim.model, mapping.inputs.shape, mapping.shape[0]))
        if reason is not None:
            return reason
    matrix = make_jacobian(mapping, flat, progress=progress)
    return matrix if isinstance(matrix, str) else decompose(matrix, vectors=vectors)
